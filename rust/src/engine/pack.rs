//! Writes a packed trunk, piece by piece, and goes on where an earlier attempt
//! was killed.
//!
//! The file grows beside its place, with a record of finished pieces next to it.
//! The record is a hint, not a promise: each piece that it names is read back and
//! hashed before it counts, so a lost write cannot survive. Only the finished file
//! gets a header, and then its name.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Serialize;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::engine::fingerprint::fingerprint;
use crate::engine::packed_trunk::{DIGITS, FILE_NAME, PIECE_BYTES, PackedTrunk, header};
use crate::error::{Error, Result};
use crate::format::catalog::{Catalog, TensorEntry};
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::{Extent, FileId};
use crate::io::file::{Access, WeightFile};
use crate::io::output_file::{OutputFile, failure, require_room};
use crate::io::threads::{compute_pool, physical_cores};
use crate::model::binding::bind;
use crate::storage::memory_plan::TILE_BYTES;

const FULL_HINT: &str = "make room and run the command again: it goes on with what was written";

/// Threads a core: half of them wait for a disk.
const THREADS_PER_CORE: usize = 2;

/// Called after each piece; an error, such as [`Error::Cancelled`], ends the work.
pub type PieceDone<'s> = dyn Fn() -> Result<()> + Sync + 's;

/// What a packed trunk consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackFacts {
    /// Matrices in it.
    pub matrices: usize,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes that an earlier attempt had written already.
    pub resumed_bytes: u64,
}

/// A trunk that can be written.
pub struct Packing {
    directory: PathBuf,
    catalog: Catalog,
    files: Vec<WeightFile>,
    fingerprint: String,
    /// Indices into the catalog's trunk, and where the matrices begin in the data.
    order: Vec<(usize, u64)>,
    data_bytes: u64,
    threads: rayon::ThreadPool,
}

impl Packing {
    /// Opens the checkpoint `model`. Nothing is written to `directory` yet.
    ///
    /// # Errors
    /// As opening the model; [`Error::Checkpoint`] if `directory` holds the
    /// trunk of another model; [`Error::InvalidInput`] if it lies within the model.
    pub fn plan(model: &Path, directory: &Path) -> Result<Self> {
        refuse_inside(model, directory)?;
        let threads = compute_pool(Some(THREADS_PER_CORE * physical_cores()))?;
        let catalog = threads.install(|| Catalog::open(model))?;
        let files = catalog.open_files(Access::Auto)?;
        let bound = threads.install(|| bind(&catalog, &files, TILE_BYTES, None))?;
        let mut order = Vec::new();
        let mut data_bytes = 0;
        for index in first_tiles(&catalog, &bound.walk) {
            order.push((index, data_bytes));
            data_bytes += catalog.trunk()[index].extent.length;
        }
        let fingerprint = threads.install(|| fingerprint(&catalog, &files, &bound))?;
        let directory = directory.to_owned();
        let packing =
            Packing { directory, catalog, files, fingerprint, order, data_bytes, threads };
        if packing.directory.join(FILE_NAME).exists() {
            PackedTrunk::open(&packing.directory, FileId(0))?.check(&packing.fingerprint)?;
        }
        Ok(packing)
    }

    /// How often [`Packing::write`] calls its `piece_done`.
    pub fn pieces(&self) -> u64 {
        self.data_bytes.div_ceil(PIECE_BYTES)
    }

    /// Writes the trunk; one that is there already is left as it is.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if there is no room or another process writes;
    /// [`Error::Io`]; what `piece_done` returns. What was written stays.
    pub fn write(&self, piece_done: &PieceDone<'_>) -> Result<PackFacts> {
        let made = |source| Error::io("create", &self.directory, source);
        let path = self.directory.join(FILE_NAME);
        let partial = self.directory.join(format!("{FILE_NAME}.partial"));
        let blank = self.header(&"0".repeat(DIGITS * self.pieces() as usize));
        let file_bytes = blank.len() as u64 + self.data_bytes;
        let matrices = self.order.len();
        if path.exists() {
            Record::remove(&self.directory);
            return Ok(PackFacts { matrices, file_bytes, resumed_bytes: file_bytes });
        }
        let there = fs::metadata(&partial).map_or(0, |facts| facts.blocks() * 512);
        let needed = file_bytes.saturating_sub(there);
        require_room(&self.directory, needed, "choose a larger disk, or make room")?;
        fs::create_dir_all(&self.directory).map_err(made)?;
        let output = OutputFile::open(partial.clone(), true, FULL_HINT)?;
        self.lock(&output)?;
        // What another model left may be longer.
        output.file().set_len(file_bytes).map_err(output.failed("extend", Some(0)))?;
        output.reserve(file_bytes)?;
        let record = Record::open(&self.directory, self.identity(&blank))?;
        let written = WeightFile::open(&partial, Access::Auto)?;
        let place = Place { output: &output, written: &written, start: blank.len() as u64 };
        let resumed_bytes = AtomicU64::new(0);
        let hashes: Vec<u64> = self.threads.install(|| {
            let work = |buffers: &mut Result<Buffers>, piece: u64| {
                let Ok(buffers) = buffers else { return Err(no_memory()) };
                let (hash, resumed) = self.piece(piece, &place, &record, buffers)?;
                resumed_bytes.fetch_add(resumed, Ordering::Relaxed);
                piece_done()?;
                Ok(hash)
            };
            (0..self.pieces()).into_par_iter().map_init(Buffers::new, work).collect::<Result<_>>()
        })?;
        let checksums: String = hashes.iter().map(|hash| format!("{hash:016x}")).collect();
        let failed = output.failed("write", Some(0));
        output.file().write_all_at(&self.header(&checksums), 0).map_err(failed)?;
        output.sync()?;
        fs::rename(&partial, &path).map_err(|source| Error::io("rename", &partial, source))?;
        Record::remove(&self.directory);
        File::open(&self.directory).and_then(|directory| directory.sync_all()).map_err(made)?;
        let resumed_bytes = resumed_bytes.into_inner();
        Ok(PackFacts { matrices, file_bytes, resumed_bytes })
    }

    /// Compares every byte of a finished trunk with the checkpoint, and every piece
    /// with its checksum.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if there is no trunk, or for the first piece that
    /// differs; [`Error::Io`]; what `piece_done` returns.
    pub fn verify(&self, piece_done: &PieceDone<'_>) -> Result<()> {
        let trunk = PackedTrunk::open(&self.directory, FileId(0))?;
        let file = trunk.file(Access::Auto)?;
        // Names, shapes and places: the data alone would not show two that were swapped.
        let wanted = self.header(trunk.checksums());
        let mut found = vec![0; wanted.len()];
        let is_whole = file.length() == wanted.len() as u64 + self.data_bytes;
        if !is_whole || file.read_exact(0, &mut found).is_err() || found != wanted {
            return Err(self.damaged(0, wanted.len()));
        }
        let work = |buffers: &mut Result<Buffers>, piece: u64| {
            let Ok(buffers) = buffers else { return Err(no_memory()) };
            let (offset, length, checksum) = trunk.piece(piece);
            self.fill(piece * PIECE_BYTES, length, buffers)?;
            let start = file.read_around(offset, length, &mut buffers.scratch)?;
            let found = &buffers.scratch[start..start + length];
            let hash = format!("{:016x}", xxh3_64(found));
            if hash != checksum || found != &buffers.piece[..length] {
                return Err(self.damaged(offset, length));
            }
            piece_done()
        };
        self.threads.install(|| {
            (0..trunk.piece_count()).into_par_iter().try_for_each_init(Buffers::new, work)
        })
    }

    fn damaged(&self, offset: u64, length: usize) -> Error {
        Error::Checkpoint {
            path: self.directory.join(FILE_NAME),
            tensor: None,
            expected: format!("the model's own {length} bytes from byte {offset}"),
            found: "others".into(),
            hint: "the trunk is damaged: remove it and run `k3rs pack` again".into(),
        }
    }

    fn header(&self, checksums: &str) -> Vec<u8> {
        let trunk = self.catalog.trunk();
        let matrices: Vec<&TensorEntry> =
            self.order.iter().map(|(index, _)| &trunk[*index]).collect();
        header(&self.fingerprint, &matrices, checksums)
    }

    /// One writer at a time; the kernel lets go of the lock however it ends. Some
    /// file systems have no locks.
    fn lock(&self, output: &OutputFile) -> Result<()> {
        match flock(output.file(), FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(Error::Checkpoint {
                path: self.directory.clone(),
                tensor: None,
                expected: "this directory for one `k3rs pack` alone".into(),
                found: "another one at work in it".into(),
                hint: "wait until it is done, or choose another directory".into(),
            }),
            _ => Ok(()),
        }
    }

    /// What the pieces of the record belong to: the trunk, and the files that it
    /// comes from as they are.
    fn identity(&self, blank: &[u8]) -> u128 {
        let mut hash = Xxh3::new();
        hash.update(blank);
        self.files.iter().for_each(|file| hash.update(file.version().as_bytes()));
        hash.digest128()
    }

    /// Makes sure that a piece is written; its hash, and how many of its bytes
    /// were there already.
    fn piece(
        &self,
        number: u64,
        place: &Place<'_>,
        record: &Record,
        buffers: &mut Buffers,
    ) -> Result<(u64, u64)> {
        let first = number * PIECE_BYTES;
        let length = (self.data_bytes - first).min(PIECE_BYTES) as usize;
        let offset = place.start + first;
        if let Some(hash) = record.get(number) {
            let start = place.written.read_around(offset, length, &mut buffers.scratch)?;
            if xxh3_64(&buffers.scratch[start..start + length]) == hash {
                return Ok((hash, length as u64));
            }
        }
        self.fill(first, length, buffers)?;
        let bytes = &buffers.piece[..length];
        place.output.write_at(bytes, offset)?;
        let hash = xxh3_64(bytes);
        record.set(number, hash)?;
        Ok((hash, 0))
    }

    /// The data from `first` on, out of the checkpoint.
    fn fill(&self, first: u64, length: usize, buffers: &mut Buffers) -> Result<()> {
        let end = first + length as u64;
        let skipped = self.order.partition_point(|(_, begin)| *begin <= first).saturating_sub(1);
        for (index, begin) in &self.order[skipped..] {
            let entry = &self.catalog.trunk()[*index];
            let (from, to) = (first.max(*begin), end.min(begin + entry.extent.length));
            if *begin >= end {
                break;
            }
            if from >= to {
                continue;
            }
            let source = entry.extent.slice(from - begin, to - from);
            let count = source.length as usize;
            let file = &self.files[usize::from(source.file.0)];
            let start = file.read_around(source.offset, count, &mut buffers.scratch)?;
            let into = (from - first) as usize;
            buffers.piece[into..into + count]
                .copy_from_slice(&buffers.scratch[start..start + count]);
        }
        Ok(())
    }
}

/// Refuses to write into a model, where another file could count as a shard.
fn refuse_inside(model: &Path, directory: &Path) -> Result<()> {
    let failed = |source| Error::io("open", model, source);
    let model = fs::canonicalize(model).map_err(failed)?;
    let target = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let mut above = target.ancestors().filter_map(|parent| fs::canonicalize(parent).ok());
    if !above.any(|parent| parent == model) {
        return Ok(());
    }
    Err(Error::invalid(
        format!("{}: expected a directory outside of the model", directory.display()),
        "nothing is written into a model: name another directory for its trunk",
    ))
}

/// The trunk tensor, by its index, of every tile that begins one, in the order of
/// the walk.
fn first_tiles(catalog: &Catalog, walk: &[Extent]) -> Vec<usize> {
    let begins = catalog.trunk().iter().enumerate();
    let begins: std::collections::HashMap<(FileId, u64), usize> =
        begins.map(|(index, entry)| ((entry.extent.file, entry.extent.offset), index)).collect();
    walk.iter().filter_map(|tile| begins.get(&(tile.file, tile.offset)).copied()).collect()
}

/// Where pieces go, and where they are read back from.
struct Place<'p> {
    output: &'p OutputFile,
    written: &'p WeightFile,
    start: u64,
}

struct Buffers {
    piece: AlignedBuffer,
    scratch: AlignedBuffer,
}

impl Buffers {
    fn new() -> Result<Self> {
        let length = PIECE_BYTES as usize;
        Ok(Buffers {
            piece: AlignedBuffer::for_weights(length)?,
            scratch: AlignedBuffer::for_weights(WeightFile::room_for(length))?,
        })
    }
}

fn no_memory() -> Error {
    Error::System {
        problem: "the system has no memory for the buffers of a thread".into(),
        hint: "end what else uses memory".into(),
    }
}

/// Which pieces are said to be written: 16 bytes each, the hash, and the hash again
/// mixed with the number, so that half of a record is none.
struct Record {
    file: File,
    path: PathBuf,
}

const RECORD_BYTES: usize = 16;

impl Record {
    /// Opens the record of the pack `identity`; that of another one is begun anew.
    fn open(directory: &Path, identity: u128) -> Result<Self> {
        let path = Self::path(directory);
        let failed = |source| failure("write", &path, None, FULL_HINT, source);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(failed)?;
        let mut found = [0; RECORD_BYTES];
        let is_ours = file.read_exact_at(&mut found, 0).is_ok() && found == identity.to_le_bytes();
        if !is_ours {
            file.set_len(0).map_err(failed)?;
            file.write_all_at(&identity.to_le_bytes(), 0).map_err(failed)?;
        }
        Ok(Record { file, path })
    }

    fn path(directory: &Path) -> PathBuf {
        directory.join(format!("{FILE_NAME}.progress"))
    }

    /// Of no use once the trunk is complete.
    fn remove(directory: &Path) {
        let _ = fs::remove_file(Self::path(directory));
    }

    fn offset(number: u64) -> u64 {
        (number + 1) * RECORD_BYTES as u64
    }

    fn mixed(number: u64, hash: u64) -> u64 {
        hash ^ xxh3_64(&number.to_le_bytes())
    }

    fn get(&self, number: u64) -> Option<u64> {
        let mut bytes = [0; RECORD_BYTES];
        self.file.read_exact_at(&mut bytes, Self::offset(number)).ok()?;
        let ([hash, again], _) = bytes.as_chunks::<8>() else { return None };
        let hash = u64::from_le_bytes(*hash);
        (u64::from_le_bytes(*again) == Self::mixed(number, hash)).then_some(hash)
    }

    fn set(&self, number: u64, hash: u64) -> Result<()> {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&hash.to_le_bytes());
        bytes[8..].copy_from_slice(&Self::mixed(number, hash).to_le_bytes());
        let failed = |source| failure("write", &self.path, None, FULL_HINT, source);
        self.file.write_all_at(&bytes, Self::offset(number)).map_err(failed)
    }
}
