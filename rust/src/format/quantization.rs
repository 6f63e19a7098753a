//! `quantization_config`: the one form that is understood is MXFP4.
//!
//! Which tensors are quantised is told by their names, not by the `ignore`
//! patterns (they do not cover all of the plain ones). What the packed bytes
//! mean is told only here, so a model with experts must have this section:
//! 4-bit integers would have the same names, types and shapes.

use serde_json::{Map, Value, json};

use super::config_keys;

const FORMAT: &str = "mxfp4-pack-quantized";

/// What keys of the section, of a group, and of its weights must say. `true`
/// marks keys that must be there; the others may also be absent or null.
type Rules = [(&'static str, bool, fn() -> Value)];

const SECTION: &Rules = &[
    ("quant_method", true, || json!("compressed-tensors")),
    ("format", true, || json!(FORMAT)),
    ("quantization_status", false, || json!("compressed")),
    ("kv_cache_scheme", false, || Value::Null),
    ("sparsity_config", false, || json!({})),
    ("transform_config", false, || json!({})),
];
const SECTION_OTHER: &[&str] = &["config_groups", "global_compression_ratio", "ignore", "version"];

const GROUP: &Rules = &[
    ("format", false, || json!(FORMAT)),
    ("input_activations", false, || Value::Null),
    ("output_activations", false, || Value::Null),
    ("targets", true, || json!(["Linear"])),
];

const WEIGHTS: &Rules = &[
    ("num_bits", true, || json!(4)),
    ("type", true, || json!("float")),
    ("strategy", true, || json!("group")),
    ("group_size", true, || json!(32)),
    ("symmetric", true, || json!(true)),
    ("dynamic", false, || json!(false)),
    ("scale_dtype", false, || json!("torch.uint8")),
    ("zp_dtype", false, || Value::Null),
    ("actorder", false, || Value::Null),
    ("block_structure", false, || Value::Null),
];
const WEIGHTS_OTHER: &[&str] = &["observer", "observer_kwargs"];

/// What a check of the section found.
#[derive(Default)]
pub(super) struct Findings {
    pub problems: Vec<String>,
    pub unknown_keys: Vec<String>,
}

/// Checks that a section says MXFP4. `path` is the section's own key with a dot.
pub(super) fn check(section: &Map<String, Value>, path: &str) -> Findings {
    let mut findings = Findings::default();
    findings.apply(section, path, SECTION, SECTION_OTHER);
    let groups_path = format!("{path}config_groups");
    match section.get("config_groups") {
        Some(Value::Object(groups)) if !groups.is_empty() => {
            for (name, group) in groups {
                findings.check_group(group, &format!("{groups_path}.{name}"));
            }
        }
        Some(found) => findings.problem(&groups_path, "an object with one group", found),
        None => findings.problems.push(format!("`{groups_path}` is missing")),
    }
    findings
}

impl Findings {
    fn problem(&mut self, path: &str, expected: impl std::fmt::Display, found: &Value) {
        self.problems.push(format!(
            "`{path}` must be {expected} for MXFP4, found {found}; no other form of expert \
             weights is supported"
        ));
    }

    fn check_group(&mut self, group: &Value, path: &str) {
        let Value::Object(group) = group else {
            return self.problem(path, "an object", group);
        };
        self.apply(group, &format!("{path}."), GROUP, &["weights"]);
        let path = format!("{path}.weights");
        match group.get("weights") {
            Some(Value::Object(weights)) => {
                self.apply(weights, &format!("{path}."), WEIGHTS, WEIGHTS_OTHER);
            }
            Some(found) => self.problem(&path, "an object", found),
            None => self.problems.push(format!("`{path}` is missing")),
        }
    }

    fn apply(&mut self, object: &Map<String, Value>, path: &str, rules: &Rules, other: &[&str]) {
        for (key, required, expected) in rules {
            let expected = expected();
            match object.get(*key) {
                None | Some(Value::Null) if !required => {}
                None => self.problems.push(format!("`{path}{key}` is missing")),
                Some(found) if *found == expected => {}
                Some(found) => self.problem(&format!("{path}{key}"), expected, found),
            }
        }
        let mut known: Vec<&str> = rules.iter().map(|(key, ..)| *key).collect();
        known.extend(other);
        self.unknown_keys.extend(config_keys::unknown(object, path, &known, false));
    }
}
