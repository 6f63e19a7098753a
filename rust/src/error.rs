//! What can go wrong, as values: each variant says what was expected, what was
//! found and where, and `hint` says what to do about it.
//!
//! Data (a file, a config, a token id) never panics; panics are reserved for
//! mistakes of the programmer.

use std::path::{Path, PathBuf};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// An error with its context. `Display` is one sentence without the hint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("cannot {action} `{}`{}: {source}", path.display(), at_offset(*offset))]
    Io {
        /// What was tried, as a verb: "open", "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Byte offset in the file, where one is known.
        offset: Option<u64>,
        /// The operating system's own words.
        source: std::io::Error,
    },
    /// A checkpoint file is missing, broken or not of the released layout.
    #[error("{}: {}expected {expected}, found {found}", path.display(), of_tensor(tensor.as_deref()))]
    Checkpoint {
        /// File (or directory) concerned.
        path: PathBuf,
        /// Full tensor name, if the problem is with one tensor.
        tensor: Option<String>,
        /// What the format or the config demands.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        hint: String,
    },
    /// `config.json` is missing fields, contradicts itself, or asks for a form
    /// of the model that is not implemented. All problems at once.
    #[error("{}: {}", path.display(), problems.join("; "))]
    Config {
        /// The config file.
        path: PathBuf,
        /// One sentence each, with the key.
        problems: Vec<String>,
    },
    /// The work would not fit the memory budget. Raised before anything is loaded.
    #[error(
        "a memory budget of {budget_bytes} bytes is too small: {missing_bytes} bytes are missing for {largest}"
    )]
    MemoryBudget {
        /// The budget that was asked for.
        budget_bytes: u64,
        /// How much more would be needed.
        missing_bytes: u64,
        /// The smallest budget that would be accepted.
        minimum_bytes: u64,
        /// What takes most of the smallest plan.
        largest: String,
    },
    /// NaN or infinity where numbers were expected. No token is made from it.
    #[error("numerical fault: {what} in {location}")]
    NumericalFault {
        /// What was found, e.g. "NaN".
        what: String,
        /// Tensor name, layer or position.
        location: String,
    },
    /// The caller passed something that cannot be used (ids, options).
    #[error("{problem}")]
    InvalidInput {
        /// What is wrong with which argument.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// The operating system has no memory or no thread left to give.
    #[error("{problem}")]
    System {
        /// What it refused, in its own words.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A saved session cannot be read or written, or cannot be continued here.
    #[error("{}: {problem}", path.display())]
    SessionFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A sweep was cancelled (Ctrl-C). Its session cannot go on.
    #[error("cancelled in layer {layer}")]
    Cancelled {
        /// The layer after which the sweep stopped, counted from 0.
        layer: usize,
    },
    /// The session was left half-way through a sweep and would give wrong
    /// tokens if it went on.
    #[error("this session stopped in the middle of a sweep and cannot continue")]
    SessionAborted,
}

impl Error {
    /// What the user can do about it, if that is more than reading the message.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Io { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => {
                    Some("check the path; a dangling symlink looks like a missing file".into())
                }
                std::io::ErrorKind::PermissionDenied => {
                    Some("the file must be readable by this user".into())
                }
                std::io::ErrorKind::UnexpectedEof => {
                    Some("the file is shorter than when it was opened: get it again".into())
                }
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                    Some("make room on this disk, or choose another one".into())
                }
                std::io::ErrorKind::ReadOnlyFilesystem => {
                    Some("choose a place on a disk that can be written to".into())
                }
                std::io::ErrorKind::AlreadyExists
                | std::io::ErrorKind::NotADirectory
                | std::io::ErrorKind::IsADirectory => {
                    Some("something of another kind is there: choose another name".into())
                }
                _ => None,
            },
            Error::Checkpoint { hint, .. }
            | Error::InvalidInput { hint, .. }
            | Error::SessionFile { hint, .. }
            | Error::System { hint, .. } => Some(hint.clone()),
            Error::Config { .. } => Some(
                "use the config.json that came with the checkpoint, unchanged; a form that is \
                 not listed in the documentation is refused rather than guessed at"
                    .into(),
            ),
            Error::MemoryBudget { minimum_bytes, .. } => {
                Some(format!("the smallest budget that is accepted is {minimum_bytes} bytes"))
            }
            Error::NumericalFault { .. } => Some(
                "the weights are damaged or the model is not what its config says; compare the \
                 files with their published checksums"
                    .into(),
            ),
            Error::Cancelled { .. } => None,
            Error::SessionAborted => Some("reset the session or open a new one".into()),
        }
    }

    /// An [`Error::Io`] without an offset.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Error::Io { action, path: path.to_owned(), offset: None, source }
    }

    /// An [`Error::InvalidInput`].
    pub fn invalid(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::InvalidInput { problem: problem.into(), hint: hint.into() }
    }
}

fn at_offset(offset: Option<u64>) -> String {
    offset.map_or_else(String::new, |offset| format!(" at byte {offset}"))
}

fn of_tensor(tensor: Option<&str>) -> String {
    tensor.map_or_else(String::new, |name| format!("tensor `{name}`: "))
}
