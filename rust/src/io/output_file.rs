//! A large file while it is written, in pieces and by several threads.
//!
//! The data go past the page cache where the file system allows it: through the
//! cache a disk takes them at a fraction of its speed, and they would push out
//! what other programs need.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::io::buffer::PAGE;

/// An open file that is being written.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    /// The same file for writes of whole pages that bypass the page cache.
    direct: Option<File>,
    path: PathBuf,
    full_hint: &'static str,
}

impl OutputFile {
    /// Makes the file at `path`, which must not exist, or, if it `may_exist`,
    /// goes on with one. `full_hint` says what to do when the disk is full.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Checkpoint`] for a full disk.
    pub fn open(path: PathBuf, may_exist: bool, full_hint: &'static str) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(may_exist).create_new(!may_exist);
        let file = options
            .open(&path)
            .map_err(|source| failure("create", &path, None, full_hint, source))?;
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&path).ok();
        Ok(OutputFile { file, direct, path, full_hint })
    }

    /// Where it is for now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file itself, for small writes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes an error of the operating system one that says what failed where.
    pub fn failed(
        &self,
        action: &'static str,
        offset: Option<u64>,
    ) -> impl Fn(io::Error) -> Error + use<> {
        let (path, hint) = (self.path.clone(), self.full_hint);
        move |source| failure(action, &path, offset, hint, source)
    }

    /// Takes the space at once: a full disk shows before the work, and direct
    /// writes need not wait for each other to extend the file.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Checkpoint`] for a full disk.
    pub fn reserve(&self, length: u64) -> Result<()> {
        let reserved = match fallocate(&self.file, FallocateFlags::empty(), 0, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.file.set_len(length),
            result => result.map_err(io::Error::from),
        };
        reserved.map_err(self.failed("reserve space", Some(0)))
    }

    /// Writes `bytes` from a page-aligned buffer at an `offset` of whole pages:
    /// whole pages directly, the rest of the last one through the page cache.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Checkpoint`] for a full disk.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let failed = self.failed("write", Some(offset));
        let pages = bytes.len() / PAGE * PAGE;
        let written = match &self.direct {
            None => 0,
            Some(direct) => match direct.write_all_at(&bytes[..pages], offset) {
                Ok(()) => pages,
                // The file system took the flag, but wants another alignment.
                Err(error) if error.kind() == ErrorKind::InvalidInput => 0,
                Err(error) => return Err(failed(error)),
            },
        };
        self.file.write_all_at(&bytes[written..], offset + written as u64).map_err(failed)
    }

    /// Waits until the disk has everything.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Checkpoint`] for a full disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(self.failed("write", None))
    }
}

/// Refuses to begin what would not fit: `needed` bytes on the file system of
/// `directory`, which need not exist yet.
///
/// # Errors
/// [`Error::Checkpoint`] with `hint`, [`Error::Io`].
pub fn require_room(directory: &Path, needed: u64, hint: &str) -> Result<()> {
    // A relative path ends in the empty one, which stands for where we are.
    let existing = directory.ancestors().find(|parent| parent.exists());
    let free = free_bytes(existing.unwrap_or(Path::new(".")))?;
    if free >= needed {
        return Ok(());
    }
    Err(Error::Checkpoint {
        path: directory.to_owned(),
        tensor: None,
        expected: format!("{needed} bytes of free space"),
        found: format!("{free}, so {} are missing", needed - free),
        hint: hint.to_owned(),
    })
}

/// Bytes that an ordinary user may still write to the file system of `path`.
fn free_bytes(path: &Path) -> Result<u64> {
    let facts =
        rustix::fs::statvfs(path).map_err(|source| Error::io("measure", path, source.into()))?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}

/// Makes an error of the operating system one that says what failed where;
/// `full_hint` says what to do if the disk is full.
pub fn failure(
    action: &'static str,
    path: &Path,
    offset: Option<u64>,
    full_hint: &str,
    source: io::Error,
) -> Error {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            Error::Checkpoint {
                path: path.to_owned(),
                tensor: None,
                expected: format!("room to {action} from byte {}", offset.unwrap_or(0)),
                found: source.to_string(),
                hint: full_hint.to_owned(),
            }
        }
        _ => Error::Io { action, path: path.to_owned(), offset, source },
    }
}
