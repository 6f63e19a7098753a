//! A file of a synthetic checkpoint while it is written.

use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::StepDone;
use super::layout::Shard;
use crate::error::Result;
use crate::io::buffer::AlignedBuffer;
use crate::io::output_file::OutputFile;

/// Files are made and written in pieces of this size, one a thread at a time.
/// A multiple of every element size and of every page size.
const PIECE_BYTES: u64 = 4 << 20;

const FULL_HINT: &str = "what was written has been removed; make room, or write less with fewer \
                         layers or experts";

/// Pieces of a file of this length.
pub(super) fn piece_count(file_bytes: u64) -> u64 {
    file_bytes.div_ceil(PIECE_BYTES)
}

/// A file that does not have its final name yet.
pub(super) struct NewFile(OutputFile);

impl NewFile {
    /// Makes the file, which must not exist.
    pub fn create(path: PathBuf) -> Result<Self> {
        Ok(NewFile(OutputFile::open(path, false, FULL_HINT)?))
    }

    /// Where it is for now.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes text that arrives in pieces.
    pub fn write_text(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 20, self.0.file());
        write(&mut writer).and_then(|()| writer.flush()).map_err(self.0.failed("write", None))
    }

    /// Writes a shard whose data are a hole.
    pub fn write_sparse(&self, shard: &Shard) -> Result<()> {
        let header = shard.header();
        let file = self.0.file();
        file.write_all_at(&header, 0).map_err(self.0.failed("write", Some(0)))?;
        let length = header.len() as u64 + shard.data_bytes();
        file.set_len(length).map_err(self.0.failed("extend", Some(header.len() as u64)))
    }

    /// Writes a shard with random data and waits until the disk has them.
    pub fn write_random(&self, shard: &Shard, seed: u64, step_done: &StepDone<'_>) -> Result<()> {
        let header = shard.header();
        let length = header.len() as u64 + shard.data_bytes();
        self.0.reserve(length)?;
        let buffer = || AlignedBuffer::new(length.min(PIECE_BYTES) as usize);
        (0..piece_count(length)).into_par_iter().try_for_each_init(buffer, |buffer, piece| {
            let offset = piece * PIECE_BYTES;
            let range = offset..length.min(offset + PIECE_BYTES);
            let buffer = match buffer {
                Ok(buffer) => &mut buffer[..(range.end - range.start) as usize],
                Err(error) => {
                    return Err(self.0.failed("write", Some(offset))(error.kind().into()));
                }
            };
            fill_piece(shard, &header, seed, &range, buffer);
            self.0.write_at(buffer, offset)?;
            step_done()
        })?;
        self.0.sync()
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
