//! A session on disk: one safetensors file with everything that a text has left
//! behind, so that it continues later with the bits of never having stopped.
//!
//! Silently wrong would be a state of another model, of another arithmetic, or
//! one with a flipped bit: the text would go on fluently. So the header names the
//! model's fingerprint and the version of the contract, and a checksum covers the
//! whole file, header included, with its own digits taken as zeros. The file has
//! one form for given contents; whatever differs from it is refused.
//!
//! Written beside its place, made durable and renamed: an earlier file of this
//! name survives a full disk and a power cut.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::format::config::{AttentionKind, ModelConfig};
use crate::format::safetensors::HEADER_BYTES_MAX;
use crate::io::replacement::Replacement;
use crate::kernels::scalar::CONTRACT;
use crate::model::state::{AttentionState, ModelState};

const FORMAT: &str = "k3rs session 1";
const BUFFER_BYTES: usize = 1 << 20;
const LENGTH_BYTES: usize = 8;
/// Hexadecimal digits of an XXH3 of 128 bits.
const DIGITS: usize = 32;
const NO_CHECKSUM: &str = "00000000000000000000000000000000";

/// What the header of a saved session says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Label {
    format: String,
    /// XXH3 (128 bits) of the file with zeros in place of these digits.
    checksum: String,
    /// Of the model: [`crate::engine::Engine::fingerprint`].
    pub fingerprint: String,
    /// Version of the arithmetic: [`CONTRACT`].
    contract: String,
    /// Ids that the state stands for; the file's `ids` may go on behind them.
    positions: String,
    /// Ids in the file.
    ids: String,
    /// Whatever the caller wanted to keep with the text.
    pub note: String,
}

/// A text as it is saved and loaded.
#[derive(Debug)]
pub struct SavedText<'t> {
    /// What the model remembers of the first `positions` ids.
    pub state: Cow<'t, ModelState>,
    /// Ids that `state` stands for.
    pub positions: usize,
    /// The whole text: those ids, then those that were not taken yet.
    pub ids: Vec<u32>,
    /// After the last of the `positions` ids, `[vocab]`; empty if there are none.
    pub logits: Cow<'t, [f32]>,
    /// The caller's own.
    pub note: String,
}

/// The label of a saved session, the ids that its state stands for, and its ids
/// in all. Nothing else is read, so that damage behind the header is not noticed.
///
/// # Errors
/// [`Error::SessionFile`] if there is no readable file of the format.
pub fn read_label(path: &Path) -> Result<(Label, usize, usize)> {
    let (mut reader, file_bytes) = open(path)?;
    let (_, label) = read_header(path, &mut reader)?;
    let (positions, ids) = label.counts(path, file_bytes)?;
    Ok((label, positions, ids))
}

impl Label {
    fn new(fingerprint: &str, positions: usize, ids: usize, note: &str) -> Self {
        Label {
            format: FORMAT.to_owned(),
            checksum: NO_CHECKSUM.to_owned(),
            fingerprint: fingerprint.to_owned(),
            contract: CONTRACT.to_string(),
            positions: positions.to_string(),
            ids: ids.to_string(),
            note: note.to_owned(),
        }
    }

    /// Ids that the state stands for, and ids in all, if a file of `file_bytes`
    /// can have that many.
    fn counts(&self, path: &Path, file_bytes: u64) -> Result<(usize, usize)> {
        match (self.positions.parse(), self.ids.parse()) {
            (Ok(positions), Ok(ids)) if positions <= ids && ids as u64 <= file_bytes / 4 => {
                Ok((positions, ids))
            }
            _ => Err(damaged(path, "its numbers of positions and ids make no sense")),
        }
    }
}

/// Writes `text`, which belongs to the model `fingerprint` of `config`.
///
/// # Errors
/// [`Error::SessionFile`]; what was at `path` is untouched then.
pub fn save(
    path: &Path,
    config: &ModelConfig,
    fingerprint: &str,
    text: &SavedText<'_>,
) -> Result<()> {
    let label = Label::new(fingerprint, text.positions, text.ids.len(), &text.note);
    let (header, checksum_offset) = header(config, &label, text.positions, text.ids.len());
    if header.len() as u64 > HEADER_BYTES_MAX {
        return Err(Error::SessionFile {
            path: path.to_owned(),
            problem: format!(
                "the note of the session makes its header {} bytes long",
                header.len()
            ),
            hint: format!("a safetensors header has at most {HEADER_BYTES_MAX} bytes"),
        });
    }
    let failed = |source| unwritten(path, &source);
    let new = Replacement::create(path).map_err(failed)?;
    let digest = write(new.file(), &header, text).map_err(failed)?;
    new.file().write_all_at(digits(digest).as_bytes(), checksum_offset as u64).map_err(failed)?;
    new.finish().map_err(failed)
}

/// Reads the session at `path` for the model `fingerprint` of `config`.
///
/// # Errors
/// [`Error::SessionFile`] if the file is missing, damaged, or belongs to another
/// model or another version of the arithmetic.
pub fn load(path: &Path, config: &ModelConfig, fingerprint: &str) -> Result<SavedText<'static>> {
    let (mut reader, file_bytes) = open(path)?;
    let (found_header, label) = read_header(path, &mut reader)?;
    refuse_foreign(path, &label, fingerprint)?;
    let (positions, id_count) = label.counts(path, file_bytes)?;
    let (mut header, checksum_offset) = header(config, &label, positions, id_count);
    if header != found_header || label.checksum.len() != DIGITS {
        return Err(damaged(path, "its header is not the one that belongs to its contents"));
    }
    let wanted = (header.len() as u64).saturating_add(data_bytes(config, positions, id_count));
    if file_bytes != wanted {
        return Err(damaged(path, &format!("it has {file_bytes} bytes instead of {wanted}")));
    }
    header[checksum_offset..checksum_offset + DIGITS].fill(b'0');
    let mut source = Hashed { inner: reader, hash: Xxh3::new() };
    source.hash.update(&header);
    let mut ids = vec![0; id_count];
    let mut logits = vec![0.0; logit_count(config, positions)];
    let mut state = ModelState::new(config);
    source
        .read_exact(bytemuck::cast_slice_mut(&mut ids))
        .and_then(|()| source.read_exact(bytemuck::cast_slice_mut(&mut logits)))
        .and_then(|()| read_state(&mut source, &mut state, positions))
        .map_err(|error| unread(path, &error))?;
    if digits(source.hash.digest128()) != label.checksum {
        return Err(damaged(path, "its checksum does not fit its contents"));
    }
    let (state, logits) = (Cow::Owned(state), Cow::Owned(logits));
    Ok(SavedText { state, positions, ids, logits, note: label.note })
}

/// One tensor of the file.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
}

impl Tensor {
    /// All elements have four bytes. The shape may come from a damaged file.
    fn byte_count(&self) -> u64 {
        self.shape.iter().fold(4, |bytes, axis| bytes.saturating_mul(*axis as u64))
    }
}

/// The tensors of a session in the order of the file.
fn tensors(config: &ModelConfig, positions: usize, ids: usize) -> Vec<Tensor> {
    let logits = logit_count(config, positions);
    let mut tensors = vec![
        Tensor { name: "ids".into(), dtype: "I32", shape: vec![ids] },
        Tensor { name: "logits".into(), dtype: "F32", shape: vec![logits] },
    ];
    let mut push = |layer: usize, name: &str, shape: Vec<usize>| {
        tensors.push(Tensor { name: format!("layers.{layer}.{name}"), dtype: "F32", shape });
    };
    for (layer, kind) in config.layers.iter().enumerate() {
        match (kind.attention, &config.kda, &config.mla) {
            (AttentionKind::Kda, Some(kda), _) => {
                let (heads, width) = (kda.heads, kda.head_dim);
                push(layer, "kda.state", vec![heads, width, width]);
                push(layer, "kda.conv_history", vec![heads, 3, kda.conv_taps - 1, width]);
            }
            (AttentionKind::Mla, _, Some(mla)) => {
                let width = mla.latent_dim + mla.rope_dim;
                push(layer, "mla.latent_cache", vec![positions, width]);
            }
            _ => unreachable!("a config has the sections that its layers need"),
        }
    }
    tensors
}

/// There are no logits before the first id.
fn logit_count(config: &ModelConfig, positions: usize) -> usize {
    if positions == 0 { 0 } else { config.vocab_size }
}

fn data_bytes(config: &ModelConfig, positions: usize, ids: usize) -> u64 {
    let tensors = tensors(config, positions, ids);
    tensors.iter().fold(0, |bytes: u64, tensor| bytes.saturating_add(tensor.byte_count()))
}

/// Length and JSON of the header, and where the digits of the checksum are.
fn header(config: &ModelConfig, label: &Label, positions: usize, ids: usize) -> (Vec<u8>, usize) {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!(label));
    let mut end = 0u64;
    for tensor in tensors(config, positions, ids) {
        let begin = end;
        end = end.saturating_add(tensor.byte_count());
        let facts = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end],
        });
        entries.insert(tensor.name, facts);
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    // The data begin at a multiple of eight, as other programs like them.
    json.resize(json.len().next_multiple_of(8), b' ');
    // The first entries are `format`, whose text is known, and the checksum.
    let before = format!(r#"{{"__metadata__":{{"format":"{FORMAT}","checksum":""#).len();
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    (header, LENGTH_BYTES + before)
}

fn open(path: &Path) -> Result<(BufReader<File>, u64)> {
    let failed = |error| unread(path, &error);
    // Asked before it is opened: opening a pipe waits for somebody who writes.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::SessionFile {
            path: path.to_owned(),
            problem: "expected a saved session, found something that is not a file".into(),
            hint: "give the file that a session was saved to".into(),
        });
    }
    let file = File::open(path).map_err(failed)?;
    let file_bytes = file.metadata().map_err(failed)?.len();
    Ok((BufReader::with_capacity(BUFFER_BYTES, file), file_bytes))
}

/// The bytes of the header with its length in front, and what they say.
fn read_header(path: &Path, reader: &mut impl Read) -> Result<(Vec<u8>, Label)> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(rename = "__metadata__")]
        label: Label,
    }
    let foreign = || Error::SessionFile {
        path: path.to_owned(),
        problem: format!("expected a saved session (`{FORMAT}`), found another kind of file"),
        hint: "give the file that a session was saved to; if it is one, it is damaged, or was \
               saved by another version of k3rs"
            .into(),
    };
    let mut length = [0; LENGTH_BYTES];
    reader.read_exact(&mut length).map_err(|_| foreign())?;
    let count = u64::from_le_bytes(length);
    if count > HEADER_BYTES_MAX {
        return Err(foreign());
    }
    let mut bytes = length.to_vec();
    reader.take(count).read_to_end(&mut bytes).map_err(|error| unread(path, &error))?;
    let header: Header = serde_json::from_slice(&bytes[LENGTH_BYTES..]).map_err(|_| foreign())?;
    if header.label.format != FORMAT {
        return Err(foreign());
    }
    Ok((bytes, header.label))
}

fn refuse_foreign(path: &Path, label: &Label, fingerprint: &str) -> Result<()> {
    let refused = |problem: String, hint: &str| {
        Err(Error::SessionFile { path: path.to_owned(), problem, hint: hint.to_owned() })
    };
    if label.fingerprint != fingerprint {
        let found = &label.fingerprint;
        return refused(
            format!("expected a session of the model {fingerprint}, found one of {found}"),
            "open the model that it was saved from; a session means nothing to another one",
        );
    }
    if label.contract != CONTRACT.to_string() {
        return refused(
            format!(
                "expected version {CONTRACT} of the arithmetic, found a session of version {}",
                label.contract
            ),
            "read its text again with this version of k3rs, or continue it with the one that \
             saved it",
        );
    }
    Ok(())
}

fn read_state(source: &mut impl Read, state: &mut ModelState, positions: usize) -> io::Result<()> {
    for layer in &mut state.layers {
        match layer {
            AttentionState::Kda(heads) => {
                for head in &mut *heads {
                    source.read_exact(bytemuck::cast_slice_mut(&mut head.matrix))?;
                }
                for head in heads {
                    source.read_exact(bytemuck::cast_slice_mut(&mut head.history))?;
                }
            }
            AttentionState::Mla(cache) => {
                let mut row = vec![0.0; cache.width()];
                for _ in 0..positions {
                    source.read_exact(bytemuck::cast_slice_mut(&mut row))?;
                    cache.append(&row);
                }
            }
        }
    }
    Ok(())
}

fn write_state(target: &mut impl Write, state: &ModelState) -> io::Result<()> {
    for layer in &state.layers {
        match layer {
            AttentionState::Kda(heads) => {
                for head in heads {
                    target.write_all(bytemuck::cast_slice(&head.matrix))?;
                }
                for head in heads {
                    target.write_all(bytemuck::cast_slice(&head.history))?;
                }
            }
            AttentionState::Mla(cache) => target.write_all(bytemuck::cast_slice(cache.rows()))?,
        }
    }
    Ok(())
}

/// A reader or writer that knows the hash of what went through it.
struct Hashed<T> {
    inner: T,
    hash: Xxh3,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hash.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes header and data; the hash of both.
fn write(file: &File, header: &[u8], text: &SavedText<'_>) -> io::Result<u128> {
    let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
    let mut target = Hashed { inner: writer, hash: Xxh3::new() };
    target.write_all(header)?;
    target.write_all(bytemuck::cast_slice(&text.ids))?;
    target.write_all(bytemuck::cast_slice(&text.logits))?;
    write_state(&mut target, &text.state)?;
    target.flush()?;
    Ok(target.hash.digest128())
}

fn digits(digest: u128) -> String {
    format!("{digest:032x}")
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::SessionFile {
        path: path.to_owned(),
        problem: format!("the saved session is damaged: {what}"),
        hint: "take a copy of the file if there is one; otherwise its text has to be read again"
            .into(),
    }
}

fn unread(path: &Path, source: &io::Error) -> Error {
    Error::SessionFile {
        path: path.to_owned(),
        problem: format!("cannot read the saved session: {source}"),
        hint: "check the path, and that this user may read the file".into(),
    }
}

fn unwritten(path: &Path, source: &io::Error) -> Error {
    Error::SessionFile {
        path: path.to_owned(),
        problem: format!("cannot save the session: {source}"),
        hint: "an earlier file of this name is as it was; check that the directory exists, may \
               be written to by this user, and that its disk has room"
            .into(),
    }
}
