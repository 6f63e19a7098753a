//! The trunk, tile by tile in the order in which a sweep uses it.
//!
//! Every token reads the same tiles in the same order, so what comes next is
//! never a guess: pinned tiles stay after their first use, the others pass a
//! ring of buffers that is refilled as soon as one is free, past the end of the
//! sweep into the next one. There is no other way to a trunk weight: fully
//! resident means that every tile is pinned.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::Extent;
use crate::io::queue::{Completion, ReadQueue, ReadRequest, Urgency, room_for};

/// A tile: its place in the walk.
pub type TileIndex = usize;

/// What the stream has read and waited for since it was opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrunkCounters {
    /// Bytes of tiles that were read from files.
    pub bytes_read: u64,
    /// Time in which the computation stood still for a tile.
    pub wait: Duration,
}

/// Streams the tiles of a walk.
pub struct TrunkStream {
    queue: Arc<dyn ReadQueue>,
    tiles: Vec<Tile>,
    /// First tile that a sweep without logits leaves out.
    head: TileIndex,
    free: Vec<AlignedBuffer>,
    ring_buffers: usize,
    /// Submitted and not yet used, in the order of use.
    ahead: VecDeque<TileIndex>,
    next: NextRead,
    reply: Sender<Completion>,
    replies: Receiver<Completion>,
    counters: TrunkCounters,
}

struct Tile {
    extent: Extent,
    pinned: bool,
    held: Option<Held>,
}

struct Held {
    buffer: AlignedBuffer,
    start: usize,
}

/// Where read-ahead goes on.
#[derive(Clone, Copy)]
struct NextRead {
    tile: TileIndex,
    end: TileIndex,
    in_next_sweep: bool,
}

impl TrunkStream {
    /// A stream over `tiles` of which those marked in `pinned` will stay;
    /// `head` is the first tile that only logits need. The ring has
    /// `ring_buffers` buffers, each for the largest tile that passes it.
    ///
    /// # Errors
    /// [`Error::Io`] when memory for the ring cannot be mapped.
    pub fn new(
        queue: Arc<dyn ReadQueue>,
        tiles: &[Extent],
        pinned: &[bool],
        head: TileIndex,
        ring_buffers: usize,
    ) -> Result<Self> {
        let tiles: Vec<Tile> = tiles
            .iter()
            .zip(pinned)
            .map(|(extent, pinned)| Tile { extent: *extent, pinned: *pinned, held: None })
            .collect();
        let largest = tiles.iter().filter(|tile| !tile.pinned).map(|tile| room_for(&[tile.extent]));
        let free = match largest.max() {
            Some(bytes) => (0..ring_buffers).map(|_| map_buffer(bytes)).collect::<Result<_>>()?,
            None => Vec::new(),
        };
        let (reply, replies) = channel();
        let next = NextRead { tile: 0, end: tiles.len(), in_next_sweep: false };
        let ahead = VecDeque::new();
        let counters = TrunkCounters::default();
        Ok(TrunkStream {
            queue,
            tiles,
            head,
            free,
            ring_buffers,
            ahead,
            next,
            reply,
            replies,
            counters,
        })
    }

    /// Starts a sweep, which visits every tile in order; without logits those
    /// from the output matrix on are left out.
    pub fn begin_sweep(&mut self, with_logits: bool) {
        self.next.end = if with_logits { self.tiles.len() } else { self.head };
        if !self.next.in_next_sweep {
            self.restart(0);
        }
        self.next.in_next_sweep = false;
        self.read_ahead();
    }

    /// Calls `use_tile` with the bytes of `tile`, waiting for them if need be.
    ///
    /// # Errors
    /// [`Error::Io`] when the tile could not be read; a later sweep tries again.
    pub fn visit<R>(&mut self, tile: TileIndex, use_tile: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let length = self.tiles[tile].extent.length as usize;
        if self.tiles[tile].held.is_none() {
            if self.ahead.front() != Some(&tile) && !self.ahead.contains(&tile) {
                self.restart(tile);
                self.read_ahead();
            }
            let held = self.receive(tile)?;
            self.tiles[tile].held = Some(held);
        }
        let held = self.tiles[tile].held.as_ref().expect("held since the lines above");
        let result = use_tile(&held.buffer[held.start..held.start + length]);
        if !self.tiles[tile].pinned {
            self.free.extend(self.tiles[tile].held.take().map(|held| held.buffer));
        }
        self.read_ahead();
        Ok(result)
    }

    /// What was read and waited for since open.
    pub fn counters(&self) -> TrunkCounters {
        self.counters
    }

    /// Forgets what is under way and goes on reading at `tile`.
    pub fn restart(&mut self, tile: TileIndex) {
        while let Some(tile) = self.ahead.front().copied() {
            // Only the buffer matters here; a read error will come up again
            // when the tile is wanted.
            if let Ok(held) = self.receive(tile) {
                self.keep_or_free(tile, held);
            }
        }
        for index in 0..self.tiles.len() {
            if !self.tiles[index].pinned {
                self.free.extend(self.tiles[index].held.take().map(|held| held.buffer));
            }
        }
        self.next.tile = tile;
        self.next.in_next_sweep = false;
    }

    fn keep_or_free(&mut self, tile: TileIndex, held: Held) {
        if self.tiles[tile].pinned {
            self.tiles[tile].held = Some(held);
        } else {
            self.free.push(held.buffer);
        }
    }

    /// Waits until `tile` has arrived, keeping what arrives before it.
    fn receive(&mut self, tile: TileIndex) -> Result<Held> {
        loop {
            if let Some(held) = self.tiles[tile].held.take() {
                self.ahead.retain(|ahead| *ahead != tile);
                return Ok(held);
            }
            let started = Instant::now();
            let completion = self.replies.recv().expect("this stream holds a sender itself");
            self.counters.wait += started.elapsed();
            let arrived = completion.tag;
            match completion.starts {
                Ok(starts) => {
                    self.counters.bytes_read += self.tiles[arrived].extent.length;
                    let held = Held { buffer: completion.buffer, start: starts[0] };
                    self.tiles[arrived].held = Some(held);
                }
                Err(error) => {
                    self.ahead.retain(|ahead| *ahead != arrived);
                    if !self.tiles[arrived].pinned {
                        self.free.push(completion.buffer);
                    }
                    if arrived == tile {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Submits reads, in the order of use, while there are buffers.
    fn read_ahead(&mut self) {
        while self.ahead.len() < self.ring_buffers {
            if self.next.tile >= self.next.end {
                if self.next.in_next_sweep {
                    return;
                }
                // The next sweep may leave the output matrix out.
                self.next = NextRead { tile: 0, end: self.head, in_next_sweep: true };
            }
            let tile = self.next.tile;
            if self.tiles[tile].held.is_none() && !self.ahead.contains(&tile) {
                let Some(buffer) = self.buffer_for(tile) else { return };
                self.submit(tile, buffer);
            }
            self.next.tile += 1;
        }
    }

    fn buffer_for(&mut self, tile: TileIndex) -> Option<AlignedBuffer> {
        if self.tiles[tile].pinned {
            // Without memory now the tile is read when it is waited for.
            map_buffer(room_for(&[self.tiles[tile].extent])).ok()
        } else {
            self.free.pop()
        }
    }

    fn submit(&mut self, tile: TileIndex, buffer: AlignedBuffer) {
        self.ahead.push_back(tile);
        self.queue.submit(ReadRequest {
            tag: tile,
            extents: vec![self.tiles[tile].extent],
            buffer,
            urgency: Urgency::Ahead,
            reply: self.reply.clone(),
        });
    }
}

pub(crate) fn map_buffer(bytes: usize) -> Result<AlignedBuffer> {
    AlignedBuffer::new(bytes).map_err(|error| {
        Error::invalid(
            format!("the system has no {bytes} bytes of memory for a buffer: {error}"),
            "choose a smaller --memory",
        )
    })
}
