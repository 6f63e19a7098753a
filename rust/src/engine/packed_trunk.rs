//! The trunk by itself, for a disk that is faster than the one with the experts:
//! one safetensors file with the streamed matrices in the order in which a sweep
//! uses them. Experts, embedding and small vectors stay in the checkpoint.
//!
//! It is used only with the model whose fingerprint it carries; its bytes are the
//! checkpoint's own, so nothing but the time of a token depends on it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::format::catalog::TensorEntry;
use crate::format::safetensors::HeaderText;
use crate::io::buffer::PAGE;
use crate::io::extent::{Extent, FileId};
use crate::io::file::{Access, WeightFile};

/// Name of the file in its directory.
pub const FILE_NAME: &str = "trunk.safetensors";

/// Unit of the checksums: bytes of data, counted from the end of the header.
pub const PIECE_BYTES: u64 = 16 << 20;

/// Hexadecimal digits of a piece's checksum, an XXH3 of 64 bits.
pub const DIGITS: usize = 16;

const FORMAT: &str = "k3rs trunk 1";

const HINT: &str =
    "leave the trunk out, or remove it and make it again from this model with `k3rs pack`";

/// Length and JSON of the header of a trunk of `matrices`, a multiple of a page
/// long. `checksums` are those of all pieces, [`DIGITS`] each.
pub fn header(fingerprint: &str, matrices: &[&TensorEntry], checksums: &str) -> Vec<u8> {
    let mut entries = Map::new();
    let metadata = json!({
        "format": FORMAT,
        "fingerprint": fingerprint,
        "piece_bytes": PIECE_BYTES.to_string(),
        "checksums": checksums,
    });
    entries.insert("__metadata__".to_owned(), metadata);
    let mut end = 0;
    for matrix in matrices {
        let begin = end;
        end += matrix.extent.length;
        let facts = json!({
            "dtype": matrix.dtype.name(),
            "shape": matrix.shape,
            "data_offsets": [begin, end],
        });
        entries.insert(matrix.name.clone(), facts);
    }
    let json = Value::Object(entries).to_string();
    let length = (8 + json.len()).next_multiple_of(PAGE) - 8;
    let mut header = (length as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header.resize(8 + length, b' ');
    header
}

/// An open packed trunk.
#[derive(Debug)]
pub struct PackedTrunk {
    path: PathBuf,
    fingerprint: String,
    checksums: String,
    matrices: HashMap<String, (Vec<usize>, Extent)>,
    /// Where the data begin and end.
    data: (u64, u64),
}

impl PackedTrunk {
    /// Reads the header of the trunk in `directory`, which becomes the file `id`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if there is none or it is damaged, [`Error::Io`].
    pub fn open(directory: &Path, id: FileId) -> Result<Self> {
        let path = directory.join(FILE_NAME);
        if !path.exists() {
            let expected = format!("a packed trunk, `{FILE_NAME}`");
            return Err(refused(directory, expected, "none".into()));
        }
        let text = HeaderText::read(&path).map_err(again)?;
        let mut metadata = text.metadata().map_err(again)?;
        let mut field = |name: &str| metadata.remove(name).unwrap_or_default();
        if field("format") != FORMAT || field("piece_bytes") != PIECE_BYTES.to_string() {
            return Err(refused(&path, format!("`{FORMAT}`"), "another kind of file".into()));
        }
        let (fingerprint, checksums) = (field("fingerprint"), field("checksums"));
        let entries = text.entries().map_err(again)?;
        let begin = entries.first().map_or(text.file_length(), |entry| entry.offset);
        let matrices = entries.into_iter().map(|entry| {
            let extent = Extent { file: id, offset: entry.offset, length: entry.length };
            (entry.name.into_owned(), (entry.shape, extent))
        });
        let data = (begin, text.file_length());
        Ok(PackedTrunk { path, fingerprint, checksums, matrices: matrices.collect(), data })
    }

    /// Opens the file itself.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn file(&self, access: Access) -> Result<WeightFile> {
        WeightFile::open(&self.path, access)
    }

    /// Where the bytes of a matrix of the checkpoint are.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it is not there in this form.
    pub fn extent(&self, entry: &TensorEntry) -> Result<Extent> {
        match self.matrices.get(&entry.name) {
            Some((shape, extent))
                if *shape == entry.shape && extent.length == entry.extent.length =>
            {
                Ok(*extent)
            }
            _ => Err(refused(
                &self.path,
                format!("the tensor `{}` with shape {:?}", entry.name, entry.shape),
                "none: it is the trunk of another model".into(),
            )),
        }
    }

    /// Refuses the trunk of another model.
    ///
    /// # Errors
    /// [`Error::Checkpoint`].
    pub fn check(&self, fingerprint: &str) -> Result<()> {
        if self.fingerprint == fingerprint {
            return Ok(());
        }
        let expected = format!("the trunk of the model {fingerprint}");
        Err(refused(&self.path, expected, format!("that of {}", self.fingerprint)))
    }

    /// The checksums of all pieces, one behind the other.
    pub fn checksums(&self) -> &str {
        &self.checksums
    }

    /// How many pieces there are.
    pub fn piece_count(&self) -> u64 {
        (self.data.1 - self.data.0).div_ceil(PIECE_BYTES)
    }

    /// Offset, bytes and checksum of a piece; the checksum is empty if the header
    /// has none for it.
    pub fn piece(&self, number: u64) -> (u64, usize, &str) {
        let offset = self.data.0 + number * PIECE_BYTES;
        let length = (self.data.1 - offset).min(PIECE_BYTES) as usize;
        let first = number as usize * DIGITS;
        (offset, length, self.checksums.get(first..first + DIGITS).unwrap_or_default())
    }
}

fn refused(path: &Path, expected: String, found: String) -> Error {
    Error::Checkpoint { path: path.to_owned(), tensor: None, expected, found, hint: HINT.into() }
}

/// A damaged trunk is not fetched but made again.
fn again(error: Error) -> Error {
    match error {
        Error::Checkpoint { path, tensor, expected, found, .. } => {
            Error::Checkpoint { path, tensor, expected, found, hint: HINT.into() }
        }
        error => error,
    }
}
