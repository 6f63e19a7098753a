//! The hash of a whole file, read the way weights are read: direct where that works,
//! several reads in flight.
//!
//! A checkpoint is hashed once, and it is larger than any page cache: pages that
//! the check leaves behind would only push out what the model needs.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use sha1::Sha1;
use sha2::Sha256;
use sha2::digest::DynDigest;

use crate::error::{Error, Result};
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::{Extent, FileId};
use crate::io::file::{Access, WeightFile};
use crate::io::queue::{Completion, ReadQueue, ReadRequest, Urgency, room_for};
use crate::io::thread_queue::ThreadQueue;

/// Bytes of one read.
const BLOCK_BYTES: u64 = 4 << 20;

/// Blocks of a file that are read or wait to be hashed.
const IN_FLIGHT: u64 = 8;

/// The hash by which the content of a file is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256 of the content (FIPS 180-4), as the hub lists files in large file storage.
    Sha256,
    /// What git calls a file: SHA-1 of `blob`, a space, the size in decimal, a zero
    /// byte and the content.
    GitSha1,
}

impl Algorithm {
    /// The algorithm that a manifest calls `name`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for any other name than `sha256` and `git_sha1`.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "sha256" => Ok(Algorithm::Sha256),
            "git_sha1" => Ok(Algorithm::GitSha1),
            _ => Err(Error::invalid(
                format!("expected `sha256` or `git_sha1`, found `{name}`"),
                "name one of these hashes",
            )),
        }
    }

    fn hasher(self, length: u64) -> Box<dyn DynDigest> {
        match self {
            Algorithm::Sha256 => Box::new(Sha256::default()),
            Algorithm::GitSha1 => {
                let mut hasher: Box<dyn DynDigest> = Box::new(Sha1::default());
                hasher.update(format!("blob {length}\0").as_bytes());
                hasher
            }
        }
    }
}

/// The hash of the file at `path` in lower-case hexadecimal digits.
///
/// `advanced` is told how many more bytes were hashed, and says whether to go on;
/// `None` is returned when it says no. Memory: eight blocks of 4 MiB, less for a
/// smaller file.
///
/// # Errors
/// [`Error::Io`] when the file cannot be opened or read, or becomes shorter;
/// [`Error::System`] without memory or threads.
pub fn hash_file(
    path: &Path,
    algorithm: Algorithm,
    mut advanced: impl FnMut(u64) -> bool,
) -> Result<Option<String>> {
    let file = WeightFile::open(path, Access::Auto)?;
    let length = file.length();
    let mut hasher = algorithm.hasher(length);
    let block_count = length.div_ceil(BLOCK_BYTES);
    let in_flight = block_count.min(IN_FLIGHT);
    let queue = ThreadQueue::new(Arc::new(vec![file]), in_flight as usize)?;
    let (reply, completions) = channel();
    for number in 0..in_flight {
        let extent = block(length, number);
        submit(&queue, &reply, number, AlignedBuffer::for_weights(room_for(&[extent]))?, extent);
    }
    // Reads end in any order, and are hashed in that of the file.
    let mut arrived: [Option<Completion>; IN_FLIGHT as usize] = Default::default();
    for number in 0..block_count {
        let place = (number % IN_FLIGHT) as usize;
        let completion = loop {
            if let Some(completion) = arrived[place].take() {
                break completion;
            }
            let completion = completions.recv().map_err(|_| lost_readers())?;
            let its_place = completion.tag % IN_FLIGHT as usize;
            arrived[its_place] = Some(completion);
        };
        let start = completion.starts?[0];
        let count = block(length, number).length;
        hasher.update(&completion.buffer[start..start + count as usize]);
        if number + IN_FLIGHT < block_count {
            let next = number + IN_FLIGHT;
            submit(&queue, &reply, next, completion.buffer, block(length, next));
        }
        if !advanced(count) {
            return Ok(None);
        }
    }
    let mut digits = String::new();
    for byte in hasher.finalize() {
        // Writing to a string cannot fail.
        let _ = write!(digits, "{byte:02x}");
    }
    Ok(Some(digits))
}

/// The `number`th block of a file of `length` bytes.
fn block(length: u64, number: u64) -> Extent {
    let offset = number * BLOCK_BYTES;
    Extent { file: FileId(0), offset, length: BLOCK_BYTES.min(length - offset) }
}

fn submit(
    queue: &ThreadQueue,
    reply: &Sender<Completion>,
    number: u64,
    buffer: AlignedBuffer,
    extent: Extent,
) {
    let extents = vec![extent];
    let (tag, reply) = (number as usize, reply.clone());
    queue.submit(ReadRequest { tag, extents, buffer, urgency: Urgency::Ahead, reply });
}

fn lost_readers() -> Error {
    Error::System {
        problem: "the threads that read a file have ended".into(),
        hint: "run the same command again".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(content: &[u8], algorithm: Algorithm) -> String {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        std::fs::write(&path, content).expect("a file");
        let mut hashed = 0;
        let found = hash_file(&path, algorithm, |count| {
            hashed += count;
            true
        });
        assert_eq!(hashed, content.len() as u64);
        found.expect("readable").expect("not stopped")
    }

    #[test]
    fn known_answers() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let million = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
        assert_eq!(hash(b"", Algorithm::Sha256), empty);
        assert_eq!(hash(b"abc", Algorithm::Sha256), abc);
        assert_eq!(hash(&vec![b'a'; 1_000_000], Algorithm::Sha256), million);
        // `git hash-object` of an empty file and of "abc".
        assert_eq!(hash(b"", Algorithm::GitSha1), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(hash(b"abc", Algorithm::GitSha1), "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f");
    }

    #[test]
    fn blocks_are_hashed_in_the_order_of_the_file() {
        let bytes = 3 * IN_FLIGHT * BLOCK_BYTES + 17;
        let content: Vec<u8> = (0..bytes).map(|index| (index / BLOCK_BYTES) as u8).collect();
        for length in [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, bytes] {
            let content = &content[..length as usize];
            let mut whole = Sha256::default();
            DynDigest::update(&mut whole, content);
            let wanted: Vec<u8> = Box::new(whole).finalize().into();
            let wanted: String = wanted.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hash(content, Algorithm::Sha256), wanted, "{length} bytes");
        }
    }

    #[test]
    fn it_stops_when_it_is_told_to() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(5 * BLOCK_BYTES).expect("room");
        let mut calls = 0;
        let found = hash_file(file.path(), Algorithm::Sha256, |_| {
            calls += 1;
            calls < 2
        });
        assert_eq!((found.expect("readable"), calls), (None, 2));
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let found = hash_file(Path::new("/nowhere/file"), Algorithm::Sha256, |_| true);
        assert!(matches!(found, Err(Error::Io { .. })));
    }
}
