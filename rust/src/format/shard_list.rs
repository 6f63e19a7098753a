//! Which files make up a checkpoint.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path};

use super::shard_index::ShardIndex;
use super::{checkpoint_error, name_some};
use crate::error::{Error, Result};

const INDEX_FILE: &str = "model.safetensors.index.json";
const SUFFIX: &str = ".safetensors";
const FETCH: &str = "fetch the missing files (a dangling symlink counts as missing); \
                     `k3rs inspect` shows what is there, and `--layers N` runs the first N layers";

/// Names that a message lists before it only counts.
const NAMES_SHOWN: usize = 8;

/// What to do about shards that are not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingShards {
    /// Refuse the checkpoint.
    Refused,
    /// Go on with the others.
    Tolerated,
}

/// The shards of a checkpoint, by file name in order.
pub(super) struct ShardList {
    /// File names relative to the directory.
    pub names: Vec<String>,
    /// File names of those that are not there, if these are tolerated.
    pub missing: Vec<String>,
    /// What the index says about them, where there is one.
    pub index: Option<ShardIndex>,
}

impl ShardList {
    /// Takes the index if the directory has one, otherwise every
    /// `*.safetensors` file.
    ///
    /// # Errors
    /// If there is none, or some are missing and this is refused; then the first
    /// of these are named.
    pub fn find(directory: &Path, missing_shards: MissingShards) -> Result<Self> {
        let index_path = directory.join(INDEX_FILE);
        let index = match ShardIndex::read(&index_path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
            index => Some(index?),
        };
        let mut names: Vec<String> = match &index {
            Some(index) => index.shard_names().map(str::to_owned).collect(),
            None => scan(directory)?,
        };
        if names.is_empty() {
            let expected = format!("one or more files `*{SUFFIX}`");
            let hint = "give the directory that holds the weights and their config.json";
            return Err(checkpoint_error(directory, None, expected, "none", hint));
        }
        if names.len() > usize::from(u16::MAX) {
            let found = names.len().to_string();
            return Err(checkpoint_error(directory, None, "at most 65535 shards", found, FETCH));
        }
        for name in &names {
            if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
                let expected = "shard names that stay inside the directory";
                return Err(checkpoint_error(
                    &index_path,
                    None,
                    expected,
                    format!("`{name}`"),
                    "use the index that came with the checkpoint",
                ));
            }
        }
        let mut missing = if index.is_some() { Vec::new() } else { missing_siblings(&names) };
        for name in &names {
            let path = directory.join(name);
            match fs::metadata(&path) {
                Ok(_) => {}
                Err(source) if source.kind() == ErrorKind::NotFound => missing.push(name.clone()),
                Err(source) => return Err(Error::io("stat", &path, source)),
            }
        }
        missing.sort();
        if missing.is_empty() || missing_shards == MissingShards::Tolerated {
            names.retain(|name| missing.binary_search(name).is_err());
            return Ok(ShardList { names, missing, index });
        }
        let some = name_some(&missing, missing.len(), NAMES_SHOWN);
        let found = format!("{} missing: {some}", missing.len());
        Err(checkpoint_error(directory, None, "all shards of the checkpoint", found, FETCH))
    }
}

fn scan(directory: &Path) -> Result<Vec<String>> {
    let failed = |source| Error::io("list", directory, source);
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_directory = entry.file_type().map_err(failed)?.is_dir();
        if name.ends_with(SUFFIX) && !name.starts_with('.') && !is_directory {
            names.insert(name.to_owned());
        }
    }
    Ok(names.into_iter().collect())
}

/// Shards that must exist because another one is called `...-00001-of-000096`.
/// Without an index nothing else tells that a file was not fetched yet.
fn missing_siblings(names: &[String]) -> Vec<String> {
    let present: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let families: BTreeSet<(&str, usize, &str)> = names
        .iter()
        .filter_map(|name| numbered(name))
        .map(|(stem, number, total)| (stem, number.len(), total))
        .collect();
    let mut missing = Vec::new();
    for (stem, width, total) in families {
        // A number beyond all bounds is somebody's file name, not a count.
        let count: u16 = total.parse().unwrap_or_default();
        let siblings =
            (1..=count).map(|number| format!("{stem}-{number:0width$}-of-{total}{SUFFIX}"));
        missing.extend(siblings.filter(|sibling| !present.contains(sibling.as_str())));
    }
    missing
}

/// `stem-00001-of-000096.safetensors` as stem, number, total.
fn numbered(name: &str) -> Option<(&str, &str, &str)> {
    let (rest, total) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(total)).then_some((stem, number, total))
}
