//! The house rules that a compiler does not know.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest: a module uses only those before it.
const LAYERS: [&str; 8] =
    ["error", "io", "format", "storage", "kernels", "model", "engine", "python"];

/// Uses that the order would allow and the design does not, and modules that
/// stand beside the layers, with all that they may use.
const ALLOWED: [(&str, &[&str]); 4] = [
    ("storage", &["error", "io", "format"]),
    ("kernels", &["error"]),
    ("synth", &["error", "io", "format"]),
    ("measure", &["error", "io", "format", "kernels", "model"]),
];

/// Modules beside the layers that the Python binding exposes.
const BESIDE: [&str; 2] = ["synth", "measure"];

/// The only places of `unsafe`, each with its reason in its header.
const UNSAFE_FILES: [&str; 12] = [
    "io/buffer.rs",
    "kernels/avx2/mxfp4.rs",
    "kernels/avx2/panel.rs",
    "kernels/avx2/plain.rs",
    "kernels/avx2/weighted_sum.rs",
    "kernels/avx512/mxfp4.rs",
    "kernels/avx512/panel.rs",
    "kernels/avx512/plain.rs",
    "kernels/avx512/weighted_sum.rs",
    "kernels/backend.rs",
    "kernels/matmul.rs",
    "measure/limits.rs",
];

const LINES_MAX: usize = 500;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files with one of `endings` in `directory`, below it, and nowhere else;
/// with their text.
fn sources(directory: &str, endings: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut waiting = vec![root().join(directory)];
    while let Some(directory) = waiting.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                let generated = name.starts_with(['.', '_']) || name == "target";
                waiting.extend((!generated).then_some(path));
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

fn rust_core() -> Vec<(PathBuf, String)> {
    let core = sources("rust/src", &[".rs"]);
    assert!(core.len() > 40, "only {} files in rust/src", core.len());
    core
}

fn all_code() -> Vec<(PathBuf, String)> {
    let directories = ["rust", "python", "tests", "benches", "examples", "tools"];
    directories.iter().flat_map(|directory| sources(directory, &[".rs", ".py", ".pyi"])).collect()
}

/// The lines of a file that are not comments, with their numbers from 1.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    lines.filter(|(_, line)| !line.trim_start().starts_with("//"))
}

fn fail_if_any(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

/// The module under `rust/src` that a file belongs to.
fn module_of(path: &Path) -> String {
    let inside = path.strip_prefix("rust/src").unwrap();
    inside.components().next().unwrap().as_os_str().to_string_lossy().replace(".rs", "")
}

fn may_use(user: &str, used: &str) -> bool {
    if user == used {
        return true;
    }
    if let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == user) {
        return allowed.contains(&used);
    }
    let place = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    match (place(user), place(used)) {
        (Some(user), Some(used)) => used < user,
        (Some(_), None) => user == "python" && BESIDE.contains(&used),
        _ => false,
    }
}

/// Names behind `crate::` in a line, also those in braces.
fn modules_used(line: &str) -> Vec<String> {
    let mut names = Vec::new();
    for part in line.split("crate::").skip(1) {
        let (listed, braces) = match part.strip_prefix('{') {
            Some(list) => (list, true),
            None => (part, false),
        };
        for item in listed.split(',').take(if braces { usize::MAX } else { 1 }) {
            let item = item.trim_start();
            let end = item.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(item.len());
            names.push(item[..end].to_owned());
        }
    }
    names.retain(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
    names
}

#[test]
fn modules_use_only_lower_layers() {
    let mut problems = Vec::new();
    for (path, text) in rust_core() {
        let user = module_of(&path);
        if user == "lib" {
            continue;
        }
        for (number, line) in code_lines(&text) {
            for used in modules_used(line) {
                if !may_use(&user, &used) {
                    let place = path.display();
                    problems.push(format!("{place}:{number}: `{user}` must not use `{used}`"));
                }
            }
        }
    }
    fail_if_any(&problems);
}

#[test]
fn the_layer_rule_catches_what_it_should() {
    assert_eq!(modules_used("use crate::kernels::bf16;"), ["kernels"]);
    assert_eq!(modules_used("use crate::{io::file, model};"), ["io", "model"]);
    assert_eq!(modules_used("$crate::kernels::x(crate::Error)"), ["kernels"]);
    assert!(may_use("model", "storage") && may_use("io", "io") && may_use("python", "synth"));
    let forbidden = [("storage", "kernels"), ("kernels", "io"), ("io", "format")];
    assert!(forbidden.iter().all(|(user, used)| !may_use(user, used)));
    assert!(!may_use("engine", "python") && !may_use("model", "measure"));
    assert!(!may_use("unheard_of", "error"));
}

#[test]
fn files_are_short() {
    let long = all_code().into_iter().filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > LINES_MAX).then(|| format!("{}: {lines} lines", path.display()))
    });
    fail_if_any(&long.collect::<Vec<_>>());
}

#[test]
fn unsafe_has_its_places() {
    let mut with_unsafe = Vec::new();
    for (path, text) in rust_core() {
        let word = |line: &str| {
            line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
        };
        if code_lines(&text).any(|(_, line)| word(line)) {
            with_unsafe.push(path.strip_prefix("rust/src").unwrap().display().to_string());
        }
    }
    assert_eq!(with_unsafe, UNSAFE_FILES);
}

#[test]
fn every_rust_file_says_what_it_is() {
    let silent = all_code().into_iter().filter_map(|(path, text)| {
        let rust = path.extension().is_some_and(|extension| extension == "rs");
        (rust && !text.starts_with("//! ")).then(|| format!("{}: no header", path.display()))
    });
    fail_if_any(&silent.collect::<Vec<_>>());
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, so that this file does not contain them.
    let words: Vec<String> = [
        ("todo", "!("),
        ("unimplemented", "!("),
        ("dbg", "!("),
        ("TO", "DO"),
        ("FIX", "ME"),
        ("XX", "X"),
        ("/ro", "ot/"),
        ("/ho", "me/"),
        ("/wo", "rk/"),
    ]
    .map(|(first, second)| format!("{first}{second}"))
    .to_vec();
    let mut problems = Vec::new();
    for (path, text) in all_code().into_iter().chain(papers()) {
        for (index, line) in text.lines().enumerate() {
            for word in words.iter().filter(|word| line.contains(*word)) {
                problems.push(format!("{}:{}: `{word}`", path.display(), index + 1));
            }
        }
    }
    fail_if_any(&problems);
}

/// The Markdown files of the project.
fn papers() -> Vec<(PathBuf, String)> {
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let mut papers: Vec<(PathBuf, String)> = top
        .iter()
        .filter_map(|name| Some((PathBuf::from(name), fs::read_to_string(root().join(name)).ok()?)))
        .collect();
    for directory in ["fixtures", "tools", "benches", "docs", "examples"] {
        papers.extend(sources(directory, &[".md"]));
    }
    papers
}

/// Targets of the Markdown links in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next())
}

#[test]
fn links_between_papers_lead_somewhere() {
    assert_eq!(links("a [b](c.md#d), [e](f)").collect::<Vec<_>>(), ["c.md#d", "f"]);
    let mut problems = Vec::new();
    for (path, text) in papers() {
        let directory = root().join(&path).parent().unwrap().to_owned();
        for (index, line) in text.lines().enumerate() {
            for link in links(line).filter(|link| !link.contains("://")) {
                let file = link.split('#').next().unwrap_or_default();
                if !file.is_empty() && !directory.join(file).exists() {
                    problems.push(format!("{}:{}: {link}", path.display(), index + 1));
                }
            }
        }
    }
    fail_if_any(&problems);
}
