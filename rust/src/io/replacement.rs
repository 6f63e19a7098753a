//! A file that takes the place of an earlier one whole, or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rights of a file that is not the successor of another: the owner's alone.
const OWN_MODE: u32 = 0o600;

/// A file without its final name; removed unless it gets it.
#[derive(Debug)]
pub struct Replacement {
    file: File,
    beside: PathBuf,
    target: PathBuf,
    is_finished: bool,
}

impl Replacement {
    /// A file beside `path`, with the rights of the one that is there.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::Other`] if `path` is no regular file.
    pub fn create(path: &Path) -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        // The file that a link points to is replaced, not the link.
        let target = match fs::canonicalize(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            target => target?,
        };
        let earlier = fs::metadata(&target).ok();
        let is_taken = earlier.as_ref().is_some_and(|facts| !facts.is_file());
        let Some(name) = target.file_name().filter(|_| !is_taken) else {
            return Err(io::Error::other("it is no regular file"));
        };
        let name = format!(".{}.", name.display());
        remove_abandoned(parent(&target), &name);
        let (process, number) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let beside = target.with_file_name(format!("{name}{process}.{number}.partial"));
        let mode = earlier.map_or(OWN_MODE, |facts| facts.mode() & 0o777);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(mode).open(&beside)?;
        Ok(Replacement { file, beside, target, is_finished: false })
    }

    /// To write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name once the disk has it.
    ///
    /// # Errors
    /// The system's; the earlier file is as it was then.
    pub fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.beside, &self.target)?;
        self.is_finished = true;
        // It has its name; whether that outlasts a power cut is the system's affair.
        let _ = File::open(parent(&self.target)).and_then(|parent| parent.sync_all());
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.is_finished {
            // The error that led here is the one to report.
            let _ = fs::remove_file(&self.beside);
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes what processes that were killed have left in `directory`: files that
/// begin with `name`, then have the number of a process that is no more.
fn remove_abandoned(directory: &Path, name: &str) {
    let processes = Path::new("/proc");
    let Ok(entries) = fs::read_dir(directory) else { return };
    if !processes.join("self").exists() {
        return;
    }
    for entry in entries.flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let rest = file.strip_prefix(name).and_then(|rest| rest.strip_suffix(".partial"));
        let Some((process, _)) = rest.and_then(|rest| rest.split_once('.')) else { continue };
        if process.parse::<u32>().is_ok() && !processes.join(process).exists() {
            let _ = fs::remove_file(entry.path());
        }
    }
}
