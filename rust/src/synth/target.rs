//! The directory that a synthetic checkpoint is written into: its files are
//! complete under their names, or not there.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::new_file::NewFile;
use crate::error::{Error, Result};

/// A directory that is being filled. Dropped before it is finished, everything
/// written so far is removed, and the directory if it was made here.
pub(super) struct Target<'d> {
    directory: &'d Path,
    is_new: bool,
    files: Vec<PathBuf>,
    is_finished: bool,
}

impl<'d> Target<'d> {
    /// Makes the directory; one that exists has to be empty.
    pub fn create(directory: &'d Path) -> Result<Self> {
        refuse_used(directory)?;
        let is_new = !directory.exists();
        let failed = |source| Error::io("create", directory, source);
        fs::create_dir_all(directory).map_err(failed)?;
        Ok(Target { directory, is_new, files: Vec::new(), is_finished: false })
    }

    /// Writes a file through `write` beside its place and moves it there.
    pub fn file(&mut self, name: &str, write: impl FnOnce(&NewFile) -> Result<()>) -> Result<()> {
        let path = self.directory.join(name);
        let partial = self.directory.join(format!(".{name}.partial"));
        let new = NewFile::create(partial.clone())?;
        // Only what was made here is ever removed.
        self.files.push(partial);
        write(&new)?;
        self.files.push(path.clone());
        fs::rename(new.path(), &path).map_err(|source| Error::io("rename", new.path(), source))
    }

    /// Bytes that the files really occupy.
    pub fn disk_bytes(&self) -> u64 {
        let files = self.files.iter().filter_map(|path| fs::metadata(path).ok());
        files.map(|facts| facts.blocks() * 512).sum()
    }

    /// Keeps what was written.
    pub fn finish(mut self) {
        self.is_finished = true;
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // The error that led here is the one to report.
        for file in &self.files {
            let _ = fs::remove_file(file);
        }
        if self.is_new {
            let _ = fs::remove_dir(self.directory);
        }
    }
}

/// Refuses a directory that holds something, and a file.
pub(super) fn refuse_used(directory: &Path) -> Result<()> {
    let found = match fs::read_dir(directory).map(|mut entries| entries.next().is_some()) {
        Ok(false) => return Ok(()),
        Ok(true) => "files in it",
        Err(error) => match error.kind() {
            ErrorKind::NotFound => return Ok(()),
            ErrorKind::NotADirectory => "a file",
            _ => return Err(Error::io("open", directory, error)),
        },
    };
    Err(Error::invalid(
        format!("{}: expected a new or an empty directory, found {found}", directory.display()),
        "nothing is overwritten: name another directory, or remove what is there",
    ))
}
