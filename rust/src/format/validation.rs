//! The tensors that were found against the tensors that the config demands.

use std::collections::HashMap;
use std::path::Path;

use super::catalog::{ShardFile, TensorEntry, TensorTally};
use super::expert_table::{ExpertPart, ExpertSpan, ExpertTable};
use super::shard_reader::{NamedTensor, ShardContent};
use super::tensor_names::{self, ExpectedShape, ExpectedTensor};
use super::{checkpoint_error, name_some};
use crate::error::{Error, Result};
use crate::format::config::ModelConfig;
use crate::format::dtype::{Dtype, StoredDtype};
use crate::io::extent::FileId;

/// Names that a message lists before it only counts.
const NAMES_SHOWN: usize = 8;
/// Unexpected names among which a misspelling is looked for, and how long they may be.
const CANDIDATES_MAX: usize = 1000;
const CANDIDATE_LENGTH_MAX: usize = 200;

/// The text tensors of all shards.
pub(super) struct TextTensors {
    /// What all their names start with.
    pub prefix: &'static str,
    /// Sorted by layer, expert and part.
    pub expert_spans: Vec<ExpertSpan>,
    pub tensors: Vec<NamedTensor>,
    pub ignored: TensorTally,
}

/// Separates text from image tensors. If any name starts with the prefix of
/// the text model, all text tensors do.
pub(super) fn select_text(contents: Vec<ShardContent>, experts: &ExpertTable) -> TextTensors {
    let has_prefix = |tensor: &NamedTensor| tensor.name.starts_with(tensor_names::PREFIX);
    let prefixed = contents.iter().any(|content| {
        !content.prefixed_experts.is_empty() || content.others.iter().any(has_prefix)
    });
    let mut text = TextTensors {
        prefix: if prefixed { tensor_names::PREFIX } else { "" },
        expert_spans: Vec::new(),
        tensors: Vec::new(),
        ignored: TensorTally::default(),
    };
    for content in contents {
        text.ignored.add(content.beyond.count, content.beyond.bytes);
        if prefixed {
            text.expert_spans.extend(content.prefixed_experts);
            for span in content.plain_experts {
                text.ignored.add(1, experts.part_lengths()[span.part as usize]);
            }
        } else {
            text.expert_spans.extend(content.plain_experts);
        }
        for tensor in content.others {
            let is_text =
                if prefixed { has_prefix(&tensor) } else { !tensor_names::is_vision(&tensor.name) };
            if is_text {
                text.tensors.push(tensor);
            } else {
                text.ignored.add(1, tensor.extent.length);
            }
        }
    }
    text.expert_spans.sort_unstable();
    text
}

/// Refuses names that occur in two shards, image tensors included; routed
/// experts are compared later, as numbers.
pub(super) fn refuse_duplicates(contents: &[ShardContent], files: &[ShardFile]) -> Result<()> {
    let mut holders: HashMap<&str, FileId> = HashMap::new();
    for tensor in contents.iter().flat_map(|content| &content.others) {
        if let Some(first) = holders.insert(&tensor.name, tensor.extent.file) {
            return Err(duplicate(files, &tensor.name, first, tensor.extent.file));
        }
    }
    Ok(())
}

fn duplicate(files: &[ShardFile], name: &str, first: FileId, second: FileId) -> Error {
    let path = |file: FileId| &files[usize::from(file.0)].path;
    checkpoint_error(
        path(second),
        Some(name),
        "a name that no other shard uses",
        format!("the same name in `{}`", path(first).display()),
        "remove files that belong to another checkpoint",
    )
}

/// What messages need to say where something was found.
pub(super) struct Scope<'c> {
    pub root: &'c Path,
    pub files: &'c [ShardFile],
    pub prefix: &'static str,
}

impl Scope<'_> {
    /// Returns the trunk, sorted by name, if trunk and experts are complete,
    /// unique, and of the right shapes and types.
    pub fn check(
        &self,
        config: &ModelConfig,
        tensors: Vec<NamedTensor>,
        spans: &[ExpertSpan],
        experts: &ExpertTable,
    ) -> Result<Vec<TensorEntry>> {
        let mut found: HashMap<String, NamedTensor> =
            tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        self.refuse_duplicate_experts(spans)?;
        let mut missing = MissingTensors::default();
        let mut trunk = Vec::new();
        for expected in tensor_names::expected_trunk(config) {
            let full_name = format!("{}{}", self.prefix, expected.name);
            match found.remove(&full_name) {
                Some(tensor) => trunk.push(self.checked_entry(&expected, tensor)?),
                None => missing.add(full_name),
            }
        }
        let mut unexpected: Vec<NamedTensor> = found.into_values().collect();
        unexpected.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        self.refuse_misshapen_experts(config, experts, &unexpected)?;
        self.list_missing_experts(experts, spans, &mut missing);
        if missing.count > 0 {
            return Err(self.missing(&missing, &unexpected));
        }
        if !unexpected.is_empty() {
            return Err(self.unexpected(&unexpected));
        }
        trunk.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(trunk)
    }

    fn path(&self, file: FileId) -> &Path {
        &self.files[usize::from(file.0)].path
    }

    fn refuse_duplicate_experts(&self, spans: &[ExpertSpan]) -> Result<()> {
        let key = |span: &ExpertSpan| (span.layer, span.expert, span.part);
        match spans.windows(2).find(|pair| key(&pair[0]) == key(&pair[1])) {
            None => Ok(()),
            Some(pair) => {
                let name = self.expert_name(pair[0].layer, pair[0].expert, pair[0].part);
                Err(duplicate(self.files, &name, pair[0].file, pair[1].file))
            }
        }
    }

    fn expert_name(&self, layer: u32, expert: u32, part: ExpertPart) -> String {
        let name = tensor_names::expert(layer as usize, expert as usize, part);
        format!("{}{name}", self.prefix)
    }

    fn checked_entry(&self, expected: &ExpectedTensor, tensor: NamedTensor) -> Result<TensorEntry> {
        let dtype = match Dtype::from_name(tensor.dtype.name) {
            Some(dtype @ (Dtype::Bf16 | Dtype::F32)) if expected.shape.accepts(&tensor.shape) => {
                dtype
            }
            _ => return Err(self.wrong_form(&tensor, "BF16 or F32", &expected.shape)),
        };
        Ok(TensorEntry { name: tensor.name, dtype, shape: tensor.shape, extent: tensor.extent })
    }

    fn wrong_form(&self, tensor: &NamedTensor, dtypes: &str, shape: &ExpectedShape) -> Error {
        let NamedTensor { dtype: StoredDtype { name: dtype, .. }, shape: found, .. } = tensor;
        checkpoint_error(
            self.path(tensor.extent.file),
            Some(&tensor.name),
            format!("{dtypes} with {shape}"),
            format!("{dtype} with shape {found:?}"),
            "config.json and the weights must come from the same release",
        )
    }

    /// Experts of the model with another type or shape are not in the spans.
    fn refuse_misshapen_experts(
        &self,
        config: &ModelConfig,
        experts: &ExpertTable,
        unexpected: &[NamedTensor],
    ) -> Result<()> {
        let shapes = config.expert_shapes();
        for tensor in unexpected {
            match tensor_names::parse_expert(&tensor.name[self.prefix.len()..]) {
                Some((layer, expert, part)) if experts.contains(layer, expert) => {
                    let shape = ExpectedShape::Exact(shapes[part as usize].to_vec());
                    return Err(self.wrong_form(tensor, Dtype::U8.name(), &shape));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn list_missing_experts(
        &self,
        experts: &ExpertTable,
        spans: &[ExpertSpan],
        missing: &mut MissingTensors,
    ) {
        // The spans are distinct tensors of this model, so counting them is enough.
        let missing_count = experts.expert_count() * 6 - spans.len();
        let mut present = spans.iter().map(|span| (span.layer, span.expert, span.part)).peekable();
        let all = experts.layers().flat_map(|layer| {
            (0..experts.experts_per_layer()).flat_map(move |expert| {
                ExpertPart::ALL.map(|part| (layer as u32, expert as u32, part))
            })
        });
        let absent = all.filter(|key| present.next_if_eq(key).is_none());
        let shown = missing_count.min(NAMES_SHOWN.saturating_sub(missing.first.len()));
        let names =
            absent.take(shown).map(|(layer, expert, part)| self.expert_name(layer, expert, part));
        missing.first.extend(names);
        missing.count += missing_count;
    }

    fn missing(&self, missing: &MissingTensors, unexpected: &[NamedTensor]) -> Error {
        let first = &missing.first[0];
        let near = unexpected
            .iter()
            .filter(|tensor| tensor.name.len() <= CANDIDATE_LENGTH_MAX)
            .take(CANDIDATES_MAX)
            .min_by_key(|tensor| edit_distance(&tensor.name, first));
        let hint = match near {
            Some(tensor) => format!(
                "`{}` in `{}` is no tensor of this model: is `{first}` misspelt?",
                tensor.name,
                self.path(tensor.extent.file).display(),
            ),
            None => "fetch the complete checkpoint, and its own config.json".to_owned(),
        };
        if missing.count == 1 {
            let found = "no such tensor in any shard";
            return checkpoint_error(self.root, Some(first), "this tensor", found, hint);
        }
        let found = format!(
            "{} missing: {}",
            missing.count,
            name_some(&missing.first, missing.count, NAMES_SHOWN)
        );
        let expected = "every tensor that config.json demands";
        checkpoint_error(self.root, None, expected, found, hint)
    }

    fn unexpected(&self, unexpected: &[NamedTensor]) -> Error {
        let names: Vec<String> =
            unexpected.iter().take(NAMES_SHOWN).map(|tensor| tensor.name.clone()).collect();
        let count = unexpected.len();
        let others = if count == 1 { "1 other" } else { &format!("{count} others") };
        let found = format!("{others}: {}", name_some(&names, count, NAMES_SHOWN));
        checkpoint_error(
            self.path(unexpected[0].extent.file),
            None,
            "only text tensors that config.json provides for",
            found,
            "config.json and the weights must come from the same release; leaving weights out \
             would give a different model",
        )
    }
}

/// Expected tensors that no shard has: how many, and the names of the first.
#[derive(Default)]
struct MissingTensors {
    count: usize,
    first: Vec<String>,
}

impl MissingTensors {
    fn add(&mut self, name: String) {
        self.count += 1;
        if self.first.len() < NAMES_SHOWN {
            self.first.push(name);
        }
    }
}

/// Insertions, deletions and replacements that turn one name into the other.
fn edit_distance(a: &str, b: &str) -> usize {
    let b = b.as_bytes();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, byte) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::edit_distance;

    #[test]
    fn edit_distance_counts_changes() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("model.norm", "model.norm"), 0);
    }
}
