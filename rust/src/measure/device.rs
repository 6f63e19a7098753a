//! The device as the engine uses it: direct reads where they work, of the size of
//! tiles and of experts, as many in flight as the engine has readers.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::{Extent, FileId};
use crate::io::file::{Access, WeightFile};
use crate::io::output_file::OutputFile;
use crate::io::queue::{ReadQueue, ReadRequest, Urgency, room_for};
use crate::io::thread_queue::ThreadQueue;

/// Bytes of a tile of the trunk.
const TILE_BYTES: u64 = 4 << 20;

/// Bytes of a routed expert of the release: 3 matrices of 3,584 x 3,072 values of
/// four bits, and a byte of scale for 32 of them.
const EXPERT_BYTES: u64 = 3 * (3584 * 3072 / 2 + 3584 * 3072 / 32);

/// Readers, and reads that are waiting for one.
const READERS: usize = 16;
const IN_FLIGHT: usize = 2 * READERS;

/// Share of a file that must be on the disk for a figure to say something of it.
const SOLID: f64 = 0.5;

/// What a device delivers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Device {
    /// Tiles one after the other, in units of 10^9 bytes a second.
    pub tiles_gb_s: f64,
    /// Experts here and there.
    pub experts_gb_s: f64,
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// Why, in words.
    pub why: String,
    /// Whether the files are mostly holes, of which the disk knows nothing.
    pub sparse: bool,
}

/// Reads from the files at `paths`, `seconds` for each kind of read.
///
/// # Errors
/// [`Error::Io`], [`Error::System`]; [`Error::InvalidInput`] without a file that
/// has some bytes.
pub fn measure(paths: &[PathBuf], seconds: f64) -> Result<Device> {
    let files = paths.iter().map(|path| WeightFile::open(path, Access::Auto));
    let files: Arc<Vec<WeightFile>> = Arc::new(files.collect::<Result<_>>()?);
    let total: u64 = files.iter().map(WeightFile::length).sum();
    if total == 0 {
        return Err(Error::invalid("there are no bytes to read", "name files that hold some"));
    }
    let blocks = paths.iter().filter_map(|path| std::fs::metadata(path).ok());
    let stored: u64 = blocks.map(|facts| facts.blocks() * 512).sum();
    let queue = ThreadQueue::new(Arc::clone(&files), READERS)?;
    let duration = Duration::from_secs_f64(seconds);
    let mut position = 0;
    let tiles = bandwidth(&queue, duration, || {
        position += TILE_BYTES;
        extent(&files, position % total, TILE_BYTES)
    })?;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let experts = bandwidth(&queue, duration, || {
        state = next_random(state);
        extent(&files, (state >> 8) % total, EXPERT_BYTES)
    })?;
    let buffered = files.iter().find(|file| !file.is_direct());
    Ok(Device {
        tiles_gb_s: tiles * 1e-9,
        experts_gb_s: experts * 1e-9,
        direct: buffered.is_none(),
        why: buffered.unwrap_or(&files[0]).why().to_owned(),
        sparse: (stored as f64) < SOLID * total as f64,
    })
}

/// Bytes that arrive in a second, with all reads in flight all the time.
fn bandwidth(
    queue: &dyn ReadQueue,
    duration: Duration,
    mut next: impl FnMut() -> Extent,
) -> Result<f64> {
    let (reply, completions) = channel();
    let started = Instant::now();
    let (mut arrived, mut waiting) = (0, 0);
    let mut submit = |buffer: AlignedBuffer| {
        let extent = next();
        let request = ReadRequest {
            tag: extent.length as usize,
            extents: vec![extent],
            buffer,
            urgency: Urgency::Ahead,
            reply: reply.clone(),
        };
        queue.submit(request);
    };
    let room = room_for(&[Extent { file: FileId(0), offset: 0, length: EXPERT_BYTES }]);
    for _ in 0..IN_FLIGHT {
        submit(AlignedBuffer::for_weights(room)?);
        waiting += 1;
    }
    while waiting > 0 {
        let Ok(completion) = completions.recv() else { break };
        completion.starts?;
        waiting -= 1;
        arrived += completion.tag;
        if started.elapsed() < duration {
            submit(completion.buffer);
            waiting += 1;
        }
    }
    Ok(arrived as f64 / started.elapsed().as_secs_f64())
}

/// At most `length` bytes of the file in which byte `position` of all lies.
fn extent(files: &[WeightFile], mut position: u64, length: u64) -> Extent {
    for (number, file) in files.iter().enumerate() {
        if position < file.length() {
            let length = length.min(file.length() - position);
            return Extent { file: FileId(number as u16), offset: position, length };
        }
        position -= file.length();
    }
    unreachable!("a position below the length of all files")
}

/// Writes a file of random bytes, which no device can make smaller, to measure by.
///
/// # Errors
/// [`Error::Io`], [`Error::Checkpoint`] if the disk has no room; what was written
/// stays.
pub fn write_probe(path: &Path, bytes: u64) -> Result<()> {
    let output = OutputFile::open(path.to_owned(), false, "make room, or name another directory")?;
    output.reserve(bytes)?;
    let mut buffer = AlignedBuffer::for_weights(TILE_BYTES as usize)?;
    let mut state = 0x2545_F491_4F6C_DD1D;
    let mut offset = 0;
    while offset < bytes {
        let count = (bytes - offset).min(TILE_BYTES) as usize;
        for word in buffer.as_chunks_mut::<8>().0 {
            state = next_random(state);
            *word = state.to_le_bytes();
        }
        output.write_at(&buffer[..count], offset)?;
        offset += count as u64;
    }
    output.sync()
}

/// xorshift64*.
fn next_random(mut state: u64) -> u64 {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D)
}
