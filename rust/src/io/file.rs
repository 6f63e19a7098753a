//! One weight file, read at offsets past the page cache where the file system
//! allows it.
//!
//! Weights are read once a token and never twice within reach of a cache, so
//! the page cache would only push useful memory out. Whether and at which
//! alignment direct reads work is asked (statx) and then tried, because file
//! systems differ in more than their names.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::io::buffer::{AlignedBuffer, PAGE};

/// Longest single read; the system call cannot do 2 GiB.
const READ_BYTES_MAX: usize = 1 << 30;

/// One positioned read, which may fall short: the system call, or what a
/// simulated disk makes of it.
pub(crate) type ReadAt<'a> = &'a mut dyn FnMut(&File, &mut [u8], u64) -> std::io::Result<usize>;

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Direct where it works, else buffered.
    Auto,
    /// Through the page cache, dropping what was read.
    Buffered,
}

/// An open file of weights.
#[derive(Debug)]
pub struct WeightFile {
    path: PathBuf,
    length: u64,
    /// `None` where the file system keeps no times.
    modified: Option<SystemTime>,
    buffered: File,
    direct: Option<Direct>,
    why: String,
}

#[derive(Debug)]
struct Direct {
    file: File,
    alignment: usize,
}

impl WeightFile {
    /// Opens `path` and finds out whether direct reads work on it.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or measured.
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        let buffered = File::open(path).map_err(|source| Error::io("open", path, source))?;
        let (length, modified) = content_version(path, &buffered)?;
        let probed = match access {
            Access::Auto => probe_direct(path, length),
            Access::Buffered => Err("buffered reads were asked for".into()),
        };
        let (direct, why) = match probed {
            Ok(direct) => {
                let why = format!("direct reads at a multiple of {} bytes", direct.alignment);
                (Some(direct), why)
            }
            Err(why) => (None, why),
        };
        Ok(WeightFile { path: path.to_owned(), length, modified, buffered, direct, why })
    }

    /// Its path, as opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes when it was opened.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether reads bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Why reads are direct or not, in words.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Size and time of modification when it was opened, as text.
    pub fn version(&self) -> String {
        format!("{} {:?}", self.length, self.modified)
    }

    /// Whether nothing wrote to the file since it was opened, by its size and
    /// time of modification. Else what was read of it may be of two models.
    pub fn is_unchanged(&self) -> bool {
        content_version(&self.path, &self.buffered)
            .is_ok_and(|version| version == (self.length, self.modified))
    }

    /// Reads exactly `out.len()` bytes through the page cache: for small pieces
    /// such as an embedding row.
    ///
    /// # Errors
    /// [`Error::Io`] with the offset, also when the file ends early.
    pub fn read_exact(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.buffered.read_exact_at(out, offset).map_err(|source| self.read_error(offset, source))
    }

    /// Reads `length` bytes from `offset` into `out` and returns where in `out`
    /// they start: direct reads fetch whole aligned blocks around them.
    ///
    /// # Errors
    /// [`Error::Io`] with the offset: the device failed, or the file is shorter
    /// than it was.
    ///
    /// # Panics
    /// If `out` is smaller than [`WeightFile::room_for`] `length`.
    pub fn read_around(&self, offset: u64, length: usize, out: &mut [u8]) -> Result<usize> {
        self.read_around_by(&mut |file, out, offset| file.read_at(out, offset), offset, length, out)
    }

    /// [`WeightFile::read_around`] over any positioned read.
    pub(crate) fn read_around_by(
        &self,
        read_at: ReadAt<'_>,
        offset: u64,
        length: usize,
        out: &mut [u8],
    ) -> Result<usize> {
        assert!(out.len() >= Self::room_for(length));
        let Some(direct) = &self.direct else {
            self.read_buffered(read_at, offset, &mut out[..length])?;
            return Ok(0);
        };
        let start = (offset % direct.alignment as u64) as usize;
        let wanted = start + length;
        let whole = wanted.next_multiple_of(direct.alignment);
        let first = offset - start as u64;
        let done = self.read_direct(read_at, direct, first, wanted, &mut out[..whole])?;
        if done < wanted {
            // Not even one block arrived: the file ends here, or it is a short
            // count that a direct read cannot continue from.
            self.read_buffered(read_at, first + done as u64, &mut out[done..wanted])?;
        }
        Ok(start)
    }

    /// Bytes that [`WeightFile::read_around`] may need for `length` bytes, at
    /// any offset and any alignment up to a page.
    pub fn room_for(length: usize) -> usize {
        length + 2 * PAGE
    }

    /// Fills `out` from `offset` with whole blocks until `wanted` bytes are
    /// there, and returns how many are: fewer when less than a block arrived.
    /// A short count is continued from the last block that is complete.
    fn read_direct(
        &self,
        read_at: ReadAt<'_>,
        direct: &Direct,
        offset: u64,
        wanted: usize,
        out: &mut [u8],
    ) -> Result<usize> {
        let mut done = 0;
        while done < wanted {
            let count =
                self.read_once(read_at, &direct.file, offset + done as u64, &mut out[done..])?;
            if done + count >= wanted {
                return Ok(wanted);
            }
            let blocks = count - count % direct.alignment;
            if blocks == 0 {
                break;
            }
            done += blocks;
        }
        Ok(done)
    }

    /// Fills `out` from `offset` through the page cache.
    fn read_buffered(&self, read_at: ReadAt<'_>, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            let position = offset + done as u64;
            let count = self.read_once(read_at, &self.buffered, position, &mut out[done..])?;
            if count == 0 {
                let kind = std::io::ErrorKind::UnexpectedEof;
                let message = format!("the file ended {} bytes early", out.len() - done);
                return Err(self.read_error(position, std::io::Error::new(kind, message)));
            }
            done += count;
        }
        self.drop_from_cache(offset, out.len());
        Ok(())
    }

    /// One read, again as long as a signal interrupts it.
    fn read_once(
        &self,
        read_at: ReadAt<'_>,
        file: &File,
        position: u64,
        out: &mut [u8],
    ) -> Result<usize> {
        let length = out.len().min(READ_BYTES_MAX);
        loop {
            match read_at(file, &mut out[..length], position) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => return read.map_err(|source| self.read_error(position, source)),
            }
        }
    }

    fn read_error(&self, offset: u64, source: std::io::Error) -> Error {
        Error::Io { action: "read", path: self.path.clone(), offset: Some(offset), source }
    }

    #[cfg(target_os = "linux")]
    fn drop_from_cache(&self, offset: u64, length: usize) {
        let length = std::num::NonZeroU64::new(length as u64);
        // Advice: a refusal leaves the pages to the kernel's own judgement.
        let _ = rustix::fs::fadvise(&self.buffered, offset, length, rustix::fs::Advice::DontNeed);
    }

    #[cfg(not(target_os = "linux"))]
    fn drop_from_cache(&self, _offset: u64, _length: usize) {}
}

/// What changes with the content: size and time of modification.
fn content_version(path: &Path, file: &File) -> Result<(u64, Option<SystemTime>)> {
    let metadata = file.metadata().map_err(|source| Error::io("measure", path, source))?;
    Ok((metadata.len(), metadata.modified().ok()))
}

/// Opens `path` for direct reads and proves with one read that they work.
#[cfg(target_os = "linux")]
fn probe_direct(path: &Path, length: u64) -> std::result::Result<Direct, String> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let file: File = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| format!("the file system refuses direct access ({error})"))?
        .into();
    let asked = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|found| found.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|found| found.stx_dio_offset_align.max(found.stx_dio_mem_align) as usize);
    let alignment = match asked {
        Some(0) => return Err("the file system says that it has no direct access".into()),
        Some(alignment) if alignment > PAGE => {
            return Err(format!("direct access would need an alignment of {alignment} bytes"));
        }
        Some(alignment) => alignment,
        None => PAGE,
    };
    let mut buffer =
        AlignedBuffer::new(PAGE).map_err(|error| format!("no memory to try it ({error})"))?;
    // The last block of the file, whose end is not aligned, is the hard case.
    let last = length.saturating_sub(1) / PAGE as u64 * PAGE as u64;
    match file.read_at(&mut buffer[..PAGE], last) {
        Ok(count) if count as u64 == length - last => Ok(Direct { file, alignment }),
        Ok(count) => Err(format!("a direct read gave {count} bytes instead of {}", length - last)),
        Err(error) => Err(format!("a direct read failed ({error})")),
    }
}

#[cfg(not(target_os = "linux"))]
fn probe_direct(_path: &Path, _length: u64) -> std::result::Result<Direct, String> {
    Err("direct access is used on Linux only".into())
}
