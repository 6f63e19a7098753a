//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! The index of the release is 55 MB long, so its names are not kept. Per shard
//! the reader counts them and adds up their hashes; a shard whose own names
//! give the same two numbers has the same names. Only when they differ is the
//! index read again, to say which names are meant.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_64;

use super::{checkpoint_error, name_some};
use crate::error::{Error, Result};

const HINT: &str = "index and shards are not of the same checkpoint: fetch both again";

/// Ten times the release; bounds what a broken index can make us allocate.
const INDEX_BYTES_MAX: u64 = 1 << 29;

/// A set of names as two numbers. Sums (rather than exclusive or) so that a
/// name that occurs twice does not cancel itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct NameDigest {
    count: u64,
    hash_sum: u64,
}

impl NameDigest {
    /// Takes a name in.
    pub fn add(&mut self, name: &str) {
        self.count += 1;
        self.hash_sum = self.hash_sum.wrapping_add(xxh3_64(name.as_bytes()));
    }
}

/// The index as digests.
pub(super) struct ShardIndex {
    path: PathBuf,
    shards: BTreeMap<String, NameDigest>,
}

impl ShardIndex {
    /// Reads the index file.
    ///
    /// # Errors
    /// If it cannot be read or is not an index.
    pub fn read(path: &Path) -> Result<Self> {
        let mut digests: Vec<(String, NameDigest)> = Vec::new();
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut last = 0;
        for_each_entry(path, &mut |name, shard| {
            // Neighbours in the index mostly lie in the same shard.
            if digests.get(last).is_none_or(|(known, _)| known != shard) {
                last = match numbers.get(shard) {
                    Some(&number) => number,
                    None => {
                        numbers.insert(shard.to_owned(), digests.len());
                        digests.push((shard.to_owned(), NameDigest::default()));
                        digests.len() - 1
                    }
                };
            }
            digests[last].1.add(name);
        })?;
        Ok(ShardIndex { path: path.to_owned(), shards: digests.into_iter().collect() })
    }

    /// File names of the shards in order.
    pub fn shard_names(&self) -> impl Iterator<Item = &str> {
        self.shards.keys().map(String::as_str)
    }

    /// Compares the index with a shard's own names; `names` gives them again
    /// to word the error.
    ///
    /// # Errors
    /// If one has a name that the other has not.
    pub fn check(
        &self,
        shard: &str,
        digest: NameDigest,
        names: impl FnOnce() -> Result<Vec<String>>,
    ) -> Result<()> {
        if self.shards.get(shard) == Some(&digest) {
            return Ok(());
        }
        let mut listed = BTreeSet::new();
        let mut twice = Vec::new();
        for_each_entry(&self.path, &mut |name, holder| {
            if holder == shard && !listed.insert(name.to_owned()) {
                twice.push(name.to_owned());
            }
        })?;
        let held: BTreeSet<String> = names()?.into_iter().collect();
        let absent: Vec<String> = listed.difference(&held).cloned().collect();
        let unlisted: Vec<String> = held.difference(&listed).cloned().collect();
        let found = [
            ("the shard lacks", absent),
            ("the index lacks", unlisted),
            ("the index repeats", twice),
        ];
        let found: Vec<String> = found
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{what} {}", name_some(names, names.len(), 5)))
            .collect();
        let expected = format!("the tensors of `{shard}`");
        Err(checkpoint_error(&self.path, None, expected, found.join("; "), HINT))
    }
}

/// Calls `visit(name, shard)` for every entry of the index's `weight_map`.
fn for_each_entry(path: &Path, visit: &mut dyn FnMut(&str, &str)) -> Result<()> {
    let failed = |action| move |source| Error::io(action, path, source);
    let expected = "an index: a JSON object with `weight_map`";
    let length = fs::metadata(path).map_err(failed("open"))?.len();
    if length > INDEX_BYTES_MAX {
        let found = format!("a file of {length} bytes");
        return Err(checkpoint_error(path, None, expected, found, HINT));
    }
    // Parsing from memory takes half the time of parsing from a stream.
    let text = fs::read(path).map_err(failed("read"))?;
    let mut deserializer = serde_json::Deserializer::from_slice(&text);
    deserializer
        .deserialize_map(IndexVisitor(visit))
        .and_then(|()| deserializer.end())
        .map_err(|error| checkpoint_error(path, None, expected, error.to_string(), HINT))
}

struct IndexVisitor<'v>(&'v mut dyn FnMut(&str, &str));

impl<'de> Visitor<'de> for IndexVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if std::mem::replace(&mut found, true) {
                return Err(A::Error::duplicate_field("weight_map"));
            } else {
                map.next_value_seed(WeightMap(self.0))?;
            }
        }
        if found { Ok(()) } else { Err(A::Error::missing_field("weight_map")) }
    }
}

struct WeightMap<'v>(&'v mut dyn FnMut(&str, &str));

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor name to shard")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let (mut name, mut shard) = (String::new(), String::new());
        while map.next_key_seed(ReadInto(&mut name))?.is_some() {
            map.next_value_seed(ReadInto(&mut shard))?;
            (self.0)(&name, &shard);
        }
        Ok(())
    }
}

/// Reads a string into a buffer that is used again: half a million
/// allocations would be most of the work.
struct ReadInto<'b>(&'b mut String);

impl<'de> DeserializeSeed<'de> for ReadInto<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for ReadInto<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<(), E> {
        self.0.clear();
        self.0.push_str(text);
        Ok(())
    }
}
