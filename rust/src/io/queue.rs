//! Reads that are under way: the one replaceable seam between the model and
//! the disk. Caches, streams and the model above it are the same code over
//! threads, a simulated disk or another kernel interface.

use std::os::unix::fs::FileExt;
use std::sync::mpsc::Sender;

use crate::error::Result;
use crate::io::buffer::{AlignedBuffer, PAGE};
use crate::io::extent::Extent;
use crate::io::file::{ReadAt, WeightFile};

/// How soon a read is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it, or soon will: experts.
    Now,
    /// Read ahead with what is left of the device: the trunk.
    Ahead,
}

/// Reads one or more extents into one buffer, which it owns until it is done.
#[derive(Debug)]
pub struct ReadRequest {
    /// Chosen by the requester to know the answer by.
    pub tag: usize,
    /// What to read, in this order.
    pub extents: Vec<Extent>,
    /// Where to; at least [`room_for`] the extents.
    pub buffer: AlignedBuffer,
    /// How soon.
    pub urgency: Urgency,
    /// Where the answer goes. A requester that is gone is not an error.
    pub reply: Sender<Completion>,
}

/// The answer to a [`ReadRequest`]. The buffer always comes back.
#[derive(Debug)]
pub struct Completion {
    /// Of the request.
    pub tag: usize,
    /// The buffer and, if the read succeeded, where each extent starts in it.
    pub buffer: AlignedBuffer,
    /// One start for each extent.
    pub starts: Result<Vec<usize>>,
}

/// Takes requests and answers each exactly once, in any order.
pub trait ReadQueue: Send + Sync {
    /// Never blocks.
    fn submit(&self, request: ReadRequest);
}

/// Bytes of buffer that reading `extents` may need.
pub fn room_for(extents: &[Extent]) -> usize {
    extents
        .iter()
        .map(|extent| WeightFile::room_for(extent.length as usize).next_multiple_of(PAGE))
        .sum()
}

/// Reads `request` from `files` on this thread and answers it.
pub(crate) fn perform(files: &[WeightFile], request: ReadRequest) {
    perform_by(&mut |file, out, offset| file.read_at(out, offset), files, request);
}

/// [`perform`] over any positioned read.
pub(crate) fn perform_by(read_at: ReadAt<'_>, files: &[WeightFile], mut request: ReadRequest) {
    let starts = read_extents(read_at, files, &request.extents, &mut request.buffer);
    let completion = Completion { tag: request.tag, buffer: request.buffer, starts };
    // The requester may have given up, for example after another read's error.
    let _ = request.reply.send(completion);
}

fn read_extents(
    read_at: ReadAt<'_>,
    files: &[WeightFile],
    extents: &[Extent],
    buffer: &mut AlignedBuffer,
) -> Result<Vec<usize>> {
    let mut first = 0;
    let mut starts = Vec::with_capacity(extents.len());
    for extent in extents {
        let length = extent.length as usize;
        let file = &files[usize::from(extent.file.0)];
        let out = &mut buffer[first..];
        starts.push(first + file.read_around_by(read_at, extent.offset, length, out)?);
        first += WeightFile::room_for(length).next_multiple_of(PAGE);
    }
    Ok(starts)
}
