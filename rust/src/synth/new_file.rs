//! A file of a synthetic checkpoint while it is written.
//!
//! Random data go past the page cache where the file system allows it: through
//! the cache a disk takes them at a fraction of its speed, and they would push
//! out what other programs need.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::StepDone;
use super::layout::Shard;
use crate::error::{Error, Result};
use crate::io::buffer::{AlignedBuffer, PAGE};

/// Files are made and written in pieces of this size, one a thread at a time.
/// A multiple of every element size and of every page size.
const PIECE_BYTES: u64 = 4 << 20;

/// Pieces of a file of this length.
pub(super) fn piece_count(file_bytes: u64) -> u64 {
    file_bytes.div_ceil(PIECE_BYTES)
}

/// A file that does not have its final name yet.
pub(super) struct NewFile {
    file: File,
    /// The same file for writes of whole pages that bypass the page cache.
    direct: Option<File>,
    path: PathBuf,
}

impl NewFile {
    /// Makes the file, which must not exist.
    pub fn create(path: PathBuf) -> Result<Self> {
        let file = File::create_new(&path).map_err(|source| Error::io("create", &path, source))?;
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&path).ok();
        Ok(NewFile { file, direct, path })
    }

    /// Where it is for now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn failed(
        &self,
        action: &'static str,
        offset: Option<u64>,
    ) -> impl Fn(io::Error) -> Error + use<> {
        let path = self.path.clone();
        move |source| match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::Checkpoint {
                path: path.clone(),
                tensor: None,
                expected: format!("room to {action} from byte {}", offset.unwrap_or(0)),
                found: source.to_string(),
                hint: "what was written has been removed; make room, or write less with fewer \
                       layers or experts"
                    .into(),
            },
            _ => Error::Io { action, path: path.clone(), offset, source },
        }
    }

    /// Writes text that arrives in pieces.
    pub fn write_text(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 20, &self.file);
        write(&mut writer).and_then(|()| writer.flush()).map_err(self.failed("write", None))
    }

    /// Writes a shard whose data are a hole.
    pub fn write_sparse(&self, shard: &Shard) -> Result<()> {
        let header = shard.header();
        self.file.write_all_at(&header, 0).map_err(self.failed("write", Some(0)))?;
        let length = header.len() as u64 + shard.data_bytes();
        self.file.set_len(length).map_err(self.failed("extend", Some(header.len() as u64)))
    }

    /// Writes a shard with random data and waits until the disk has them.
    pub fn write_random(&self, shard: &Shard, seed: u64, step_done: &StepDone<'_>) -> Result<()> {
        let header = shard.header();
        let length = header.len() as u64 + shard.data_bytes();
        self.reserve(length).map_err(self.failed("reserve space", Some(0)))?;
        let buffer = || AlignedBuffer::new(length.min(PIECE_BYTES) as usize);
        (0..piece_count(length)).into_par_iter().try_for_each_init(buffer, |buffer, piece| {
            let offset = piece * PIECE_BYTES;
            let range = offset..length.min(offset + PIECE_BYTES);
            let failed = self.failed("write", Some(offset));
            let buffer = match buffer {
                Ok(buffer) => &mut buffer[..(range.end - range.start) as usize],
                Err(error) => return Err(failed(error.kind().into())),
            };
            fill_piece(shard, &header, seed, &range, buffer);
            self.write_at(buffer, offset).map_err(failed)?;
            step_done()
        })?;
        self.file.sync_data().map_err(self.failed("write", None))
    }

    /// Takes the space at once: a full disk shows before the work, and direct
    /// writes need not wait for each other to extend the file.
    fn reserve(&self, length: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.file.set_len(length),
            result => Ok(result?),
        }
    }

    /// Whole pages directly, the rest of the last one through the page cache.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let pages = bytes.len() / PAGE * PAGE;
        let written = match &self.direct {
            None => 0,
            Some(direct) => match direct.write_all_at(&bytes[..pages], offset) {
                Ok(()) => pages,
                // The file system took the flag, but wants another alignment.
                Err(error) if error.kind() == ErrorKind::InvalidInput => 0,
                Err(error) => return Err(error),
            },
        };
        self.file.write_all_at(&bytes[written..], offset + written as u64)
    }
}

/// Makes the bytes of `range` of a file, counted from its start.
fn fill_piece(shard: &Shard, header: &[u8], seed: u64, range: &Range<u64>, buffer: &mut [u8]) {
    let header_bytes = header.len() as u64;
    let header = &header[range.start.min(header_bytes) as usize..];
    let header = &header[..header.len().min(buffer.len())];
    let (head, data) = buffer.split_at_mut(header.len());
    head.copy_from_slice(header);
    let start = (range.start + header.len() as u64).saturating_sub(header_bytes);
    shard.fill(seed, &(start..start + data.len() as u64), data);
}
