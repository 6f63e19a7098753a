//! The header of a safetensors file, read without reading the data.
//!
//! A file is an 8-byte length, that many bytes of JSON, then the data, which
//! the tensors' spans must cover without overlap or gap up to the last byte.
//! Every such rule is checked against the length of the file at open: a file
//! that was cut short would otherwise show only when its last tensor is read,
//! perhaps after an hour. Names are borrowed from the JSON text.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::checkpoint_error;
use crate::error::{Error, Result};
use crate::format::dtype::StoredDtype;

/// Largest header that the format allows.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;
const DAMAGED: &str = "the file is damaged or not a safetensors file: fetch it again";
const CUT_SHORT: &str = "the file is incomplete: fetch it again, or let the download finish";

/// The JSON text of a file's header, with what is needed to make sense of it.
#[derive(Debug, Clone)]
pub struct HeaderText {
    path: PathBuf,
    file_length: u64,
    json: Vec<u8>,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderEntry<'h> {
    /// Full name.
    pub name: Cow<'h, str>,
    /// Element type.
    pub dtype: StoredDtype,
    /// Row-major shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Number of bytes, which fits shape and type.
    pub length: u64,
}

impl HeaderText {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// If the file cannot be read, or is too short for the header it announces.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |action| move |source| Error::io(action, path, source);
        // Asked before it is opened: opening a pipe waits for somebody who writes.
        if !fs::metadata(path).map_err(failed("open"))?.is_file() {
            let hint = "remove it, or give the directory that holds the checkpoint";
            return Err(checkpoint_error(path, None, "a file", "something else", hint));
        }
        let file = File::open(path).map_err(failed("open"))?;
        let file_length = file.metadata().map_err(failed("stat"))?.len();
        let broken = |expected: String, found: String, hint| {
            Err(checkpoint_error(path, None, expected, found, hint))
        };
        if file_length < LENGTH_BYTES {
            let expected = "8 bytes of header length".to_owned();
            return broken(expected, format!("a file of {file_length} bytes"), CUT_SHORT);
        }
        let read = |buffer: &mut [u8], offset: u64| {
            file.read_exact_at(buffer, offset).map_err(|source| Error::Io {
                action: "read",
                path: path.to_owned(),
                offset: Some(offset),
                source,
            })
        };
        let mut length = [0; LENGTH_BYTES as usize];
        read(&mut length, 0)?;
        let header_length = u64::from_le_bytes(length);
        if header_length > HEADER_BYTES_MAX {
            let expected = format!("a header of at most {HEADER_BYTES_MAX} bytes");
            return broken(expected, format!("a header length of {header_length}"), DAMAGED);
        }
        if header_length > file_length - LENGTH_BYTES {
            let expected = format!("a header of {header_length} bytes");
            return broken(expected, format!("a file of {file_length} bytes"), CUT_SHORT);
        }
        let mut json = vec![0; header_length as usize];
        read(&mut json, LENGTH_BYTES)?;
        Ok(HeaderText { path: path.to_owned(), file_length, json })
    }

    /// Bytes of the whole file.
    pub fn file_length(&self) -> u64 {
        self.file_length
    }

    fn parse(&self) -> Result<RawHeader<'_>> {
        let fault = |expected: &str, found: String| {
            checkpoint_error(&self.path, None, expected, found, DAMAGED)
        };
        let text = std::str::from_utf8(&self.json)
            .map_err(|error| fault("a header in UTF-8", format!("{error} of the header")))?;
        serde_json::from_str(text)
            .map_err(|error| fault("a JSON object of tensors as header", error.to_string()))
    }

    /// The entries of `__metadata__`.
    ///
    /// # Errors
    /// If the text is not a safetensors header.
    pub fn metadata(&self) -> Result<HashMap<String, String>> {
        Ok(self.parse()?.metadata)
    }

    /// The tensors of the file in the order of their bytes.
    ///
    /// # Errors
    /// If the text is not a safetensors header, a name occurs twice, a span
    /// does not fit its shape, or the spans do not tile the data.
    pub fn entries(&self) -> Result<Vec<HeaderEntry<'_>>> {
        let mut tensors = self.parse()?.tensors;
        self.refuse_duplicates(&tensors)?;
        tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
        let data_start = LENGTH_BYTES + self.json.len() as u64;
        let mut entries = Vec::with_capacity(tensors.len());
        let mut data_end = 0;
        for (name, raw) in tensors {
            let (begin, end) = raw.data_offsets;
            let (dtype, length) = self.checked_length(&name, &raw)?;
            self.check_tiling(&name, data_end, (begin, end))?;
            data_end = end;
            entries.push(HeaderEntry {
                name,
                dtype,
                shape: raw.shape,
                offset: data_start.saturating_add(begin),
                length,
            });
        }
        self.check_file_length(&entries, data_start.checked_add(data_end))?;
        Ok(entries)
    }

    fn fault(&self, tensor: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        checkpoint_error(&self.path, Some(tensor), expected, found, DAMAGED)
    }

    fn refuse_duplicates(&self, tensors: &[(Cow<'_, str>, RawTensor<'_>)]) -> Result<()> {
        let mut seen = HashSet::with_capacity(tensors.len());
        for (name, _) in tensors {
            if !seen.insert(name.as_ref()) {
                return Err(self.fault(name, "one entry of this name in the header", "two"));
            }
        }
        Ok(())
    }

    /// Type and bytes of a tensor, if its span agrees with them.
    fn checked_length(&self, name: &str, raw: &RawTensor<'_>) -> Result<(StoredDtype, u64)> {
        let Some(dtype) = StoredDtype::from_name(&raw.dtype) else {
            let found = format!("`{}`", raw.dtype);
            return Err(self.fault(name, "an element type of the safetensors format", found));
        };
        let shape = &raw.shape;
        let bits = shape
            .iter()
            .try_fold(1u64, |product, &axis| product.checked_mul(axis as u64))
            .and_then(|elements| elements.checked_mul(dtype.bits));
        let Some(bits) = bits else {
            return Err(self.fault(
                name,
                "a shape whose size can be counted in 64 bits",
                format!("{} {shape:?}", dtype.name),
            ));
        };
        let (begin, end) = raw.data_offsets;
        if bits % 8 != 0 || end.checked_sub(begin) != Some(bits / 8) {
            return Err(self.fault(
                name,
                format!("{} bytes for {} {shape:?}", bits.div_ceil(8), dtype.name),
                format!("data offsets {begin} to {end}"),
            ));
        }
        Ok((dtype, bits / 8))
    }

    fn check_tiling(&self, name: &str, data_end: u64, (begin, end): (u64, u64)) -> Result<()> {
        if begin == data_end {
            return Ok(());
        }
        let problem = if begin < data_end { "an overlap" } else { "a gap" };
        let expected = format!("data that continue at offset {data_end}");
        Err(self.fault(name, expected, format!("{problem}: data offsets {begin} to {end}")))
    }

    fn check_file_length(&self, entries: &[HeaderEntry<'_>], needed: Option<u64>) -> Result<()> {
        if needed == Some(self.file_length) {
            return Ok(());
        }
        let expected = needed.map_or_else(
            || "a file whose length can be counted in 64 bits".to_owned(),
            |needed| format!("a file of {needed} bytes, as its header says"),
        );
        let outside = entries
            .iter()
            .find(|entry| entry.offset.saturating_add(entry.length) > self.file_length)
            .map(|entry| entry.name.as_ref());
        let hint = if outside.is_some() { CUT_SHORT } else { DAMAGED };
        let found = format!("{} bytes", self.file_length);
        Err(checkpoint_error(&self.path, outside, expected, found, hint))
    }
}

/// A name, borrowed from the JSON text unless it has escapes.
#[derive(Deserialize)]
struct Name<'h>(#[serde(borrow)] Cow<'h, str>);

#[derive(Deserialize)]
struct RawTensor<'h> {
    #[serde(borrow)]
    dtype: Cow<'h, str>,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A header as written, the tensors in the order of the text.
struct RawHeader<'h> {
    metadata: HashMap<String, String>,
    tensors: Vec<(Cow<'h, str>, RawTensor<'h>)>,
}

impl<'de> Deserialize<'de> for RawHeader<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        while let Some(Name(name)) = map.next_key()? {
            if name == "__metadata__" {
                if metadata.is_some() {
                    return Err(A::Error::duplicate_field("__metadata__"));
                }
                let found: Option<HashMap<String, String>> = map.next_value()?;
                metadata = Some(found.unwrap_or_default());
                continue;
            }
            let tensor = map
                .next_value()
                .map_err(|error| A::Error::custom(format!("tensor `{name}`: {error}")))?;
            tensors.push((name, tensor));
        }
        Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
    }
}
