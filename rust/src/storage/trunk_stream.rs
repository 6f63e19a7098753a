//! The trunk, tile by tile in the order in which a sweep uses it.
//!
//! Every token reads the same tiles in the same order, so what comes next is
//! never a guess: pinned tiles stay after their first use, the others pass a
//! ring of buffers that is refilled as soon as one is free, past the end of the
//! sweep into the next one. There is no other way to a trunk weight: fully
//! resident means that every tile is pinned.
//!
//! A tile is absent, being read, here, or failed. An error waits with its tile
//! until the sweep arrives there, so that what a sweep reports does not depend
//! on how far ahead the reads were.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::Extent;
use crate::io::queue::{Completion, ReadQueue, ReadRequest, Urgency, room_for};
use crate::storage::counters::Counters;

/// Tiles that are used together at most: enough of them to keep the compute
/// threads from going to sleep after each.
pub const TOGETHER_MAX: usize = 8;

/// A tile: its place in the walk.
pub type TileIndex = usize;

/// Streams the tiles of a walk.
pub struct TrunkStream {
    queue: Arc<dyn ReadQueue>,
    tiles: Vec<Tile>,
    /// First tile that a sweep without logits leaves out.
    head: TileIndex,
    /// Buffers of the ring that no tile has.
    free: Vec<AlignedBuffer>,
    ring_buffers: usize,
    /// Submitted and not yet visited, in the order of use: at most as many as
    /// the ring has buffers.
    ahead: VecDeque<TileIndex>,
    next: NextRead,
    sweep: Sweep,
    reply: Sender<Completion>,
    replies: Receiver<Completion>,
    counters: Arc<Counters>,
}

struct Tile {
    extent: Extent,
    pinned: bool,
    state: TileState,
}

enum TileState {
    Absent,
    Reading,
    /// Its bytes start at `start`.
    Here {
        buffer: AlignedBuffer,
        start: usize,
    },
    Failed(Error),
}

impl Tile {
    /// The bytes of a tile that is here.
    fn bytes(&self) -> &[u8] {
        let TileState::Here { buffer, start } = &self.state else {
            unreachable!("a tile that has been waited for is here");
        };
        &buffer[*start..*start + self.extent.length as usize]
    }
}

impl TileState {
    /// The buffer of a tile that is here, which then is not here any more.
    fn take_buffer(&mut self) -> Option<AlignedBuffer> {
        match std::mem::replace(self, TileState::Absent) {
            TileState::Here { buffer, .. } => Some(buffer),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// Where read-ahead goes on.
#[derive(Clone, Copy)]
struct NextRead {
    tile: TileIndex,
    end: TileIndex,
    in_next_sweep: bool,
}

/// How far the sweep is.
#[derive(Clone, Copy)]
struct Sweep {
    next: TileIndex,
    end: TileIndex,
}

impl TrunkStream {
    /// A stream over `tiles` of which those marked in `pinned` will stay;
    /// `head` is the first tile that only logits need. The ring has
    /// `ring_buffers` buffers (at least one), each for the largest tile that
    /// passes it. What the stream costs is added to `counters`.
    ///
    /// # Errors
    /// [`Error::System`] when memory for the ring cannot be mapped.
    pub fn new(
        queue: Arc<dyn ReadQueue>,
        tiles: &[Extent],
        pinned: &[bool],
        head: TileIndex,
        ring_buffers: usize,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        assert_eq!(tiles.len(), pinned.len());
        let ring_buffers = ring_buffers.max(1);
        let tiles: Vec<Tile> = tiles
            .iter()
            .zip(pinned)
            .map(|(extent, pinned)| Tile {
                extent: *extent,
                pinned: *pinned,
                state: TileState::Absent,
            })
            .collect();
        // More buffers than tiles that pass the ring would never be used.
        let passing = || tiles.iter().filter(|tile| !tile.pinned);
        let largest = passing().map(|tile| room_for(&[tile.extent])).max().unwrap_or(0);
        let buffers = ring_buffers.min(passing().count());
        let free =
            (0..buffers).map(|_| AlignedBuffer::for_weights(largest)).collect::<Result<_>>()?;
        let (reply, replies) = channel();
        Ok(TrunkStream {
            queue,
            head,
            free,
            ring_buffers,
            ahead: VecDeque::new(),
            next: NextRead { tile: 0, end: tiles.len(), in_next_sweep: false },
            sweep: Sweep { next: 0, end: tiles.len() },
            tiles,
            reply,
            replies,
            counters,
        })
    }

    /// Starts a sweep, which visits every tile in order; without logits those
    /// from the output matrix on are left out.
    pub fn begin_sweep(&mut self, with_logits: bool) {
        // What was read past the end of a sweep is the beginning of this one,
        // unless that sweep was given up before its end.
        let read_already = self.next.in_next_sweep && self.sweep.next == self.sweep.end;
        let end = if with_logits { self.tiles.len() } else { self.head };
        self.sweep = Sweep { next: 0, end };
        if read_already {
            self.next = NextRead { end, in_next_sweep: false, ..self.next };
        } else {
            self.restart(0);
        }
        // A tile for which there is no memory now is tried again when visited.
        let _ = self.read_ahead();
    }

    /// Calls `use_tiles` with the number of the first and the bytes of as many of
    /// `tiles` as are here, waiting for one if need be, until all had their turn,
    /// each once and in order. Used together, tiles that are here already cost
    /// one hand-over to the compute threads.
    ///
    /// # Errors
    /// [`Error::Io`] when a tile could not be read, [`Error::System`] when there
    /// is no memory for it; those before it have been used. A later sweep tries
    /// again.
    ///
    /// # Panics
    /// If the sweep was begun without logits and does not go as far as `tiles`.
    pub fn visit(
        &mut self,
        tiles: Range<TileIndex>,
        mut use_tiles: impl FnMut(TileIndex, &[&[u8]]),
    ) -> Result<()> {
        let mut first = tiles.start;
        while first < tiles.end {
            self.arrive(first)?;
            while let Ok(completion) = self.replies.try_recv() {
                self.take_in(completion);
            }
            let most = tiles.end.min(first + self.together());
            let end = (first + 1..most).find(|tile| !self.is_next_here(*tile)).unwrap_or(most);
            use_tiles(first, &self.tiles[first..end].iter().map(Tile::bytes).collect::<Vec<_>>());
            for tile in &mut self.tiles[first..end] {
                self.counters.trunk_used(tile.extent.length);
                if !tile.pinned {
                    self.free.extend(tile.state.take_buffer());
                }
            }
            first = end;
            self.sweep.next = end;
            // A tile for which there is no memory now is tried again when visited.
            let _ = self.read_ahead();
        }
        Ok(())
    }

    /// Tiles that are used together at most: the rest of the ring is read
    /// meanwhile.
    fn together(&self) -> usize {
        (self.ring_buffers / 3).clamp(1, TOGETHER_MAX)
    }

    /// Whether `tile`, the next one of the sweep, can be used without waiting;
    /// if so, it is off the list of those ahead.
    fn is_next_here(&mut self, tile: TileIndex) -> bool {
        let Tile { extent, pinned, state } = &self.tiles[tile];
        if !matches!(state, TileState::Here { .. }) {
            return false;
        }
        if self.ahead.front() == Some(&tile) {
            self.ahead.pop_front();
            self.counters.trunk_read(extent.length);
            return true;
        }
        *pinned
    }

    /// Waits until `tile` is here and takes it off the list of those ahead.
    fn arrive(&mut self, tile: TileIndex) -> Result<()> {
        let Tile { pinned, state, .. } = &self.tiles[tile];
        if self.ahead.front() != Some(&tile) {
            if *pinned && matches!(state, TileState::Here { .. }) {
                return Ok(());
            }
            self.restart(tile);
            self.read_ahead()?;
            assert_eq!(self.ahead.front(), Some(&tile), "this sweep leaves the tile out");
        }
        self.ahead.pop_front();
        self.wait_for(tile);
        match std::mem::replace(&mut self.tiles[tile].state, TileState::Absent) {
            TileState::Failed(error) => Err(error),
            here => {
                self.tiles[tile].state = here;
                Ok(())
            }
        }
    }

    /// Forgets what was read ahead, pinned tiles excepted, and goes on at `tile`
    /// of this sweep.
    fn restart(&mut self, tile: TileIndex) {
        while let Some(ahead) = self.ahead.pop_front() {
            self.wait_for(ahead);
            // An error will come up again when the tile is wanted.
            if let TileState::Failed(_) = self.tiles[ahead].state {
                self.tiles[ahead].state = TileState::Absent;
            }
        }
        for tile in self.tiles.iter_mut().filter(|tile| !tile.pinned) {
            self.free.extend(tile.state.take_buffer());
        }
        self.next = NextRead { tile, end: self.sweep.end, in_next_sweep: false };
    }

    /// Waits for the read of `tile`, which was ahead, and takes in what arrives
    /// before it.
    fn wait_for(&mut self, tile: TileIndex) {
        while matches!(self.tiles[tile].state, TileState::Reading) {
            let started = Instant::now();
            let completion = self.replies.recv().expect("this stream holds a sender itself");
            self.counters.waited(started.elapsed());
            self.take_in(completion);
        }
        if matches!(self.tiles[tile].state, TileState::Here { .. }) {
            self.counters.trunk_read(self.tiles[tile].extent.length);
        }
    }

    fn take_in(&mut self, completion: Completion) {
        let Tile { pinned, state, .. } = &mut self.tiles[completion.tag];
        *state = match completion.starts {
            Ok(starts) => TileState::Here { buffer: completion.buffer, start: starts[0] },
            Err(error) => {
                if !*pinned {
                    self.free.push(completion.buffer);
                }
                TileState::Failed(error)
            }
        };
    }

    /// Submits reads, in the order of use, while there are buffers.
    ///
    /// # Errors
    /// When there is no memory for a pinned tile; all before it are submitted.
    fn read_ahead(&mut self) -> Result<()> {
        while self.ahead.len() < self.ring_buffers {
            if self.next.tile >= self.next.end {
                if self.next.in_next_sweep {
                    return Ok(());
                }
                // The next sweep may leave the output matrix out.
                self.next = NextRead { tile: 0, end: self.head, in_next_sweep: true };
                continue;
            }
            let tile = self.next.tile;
            let Tile { extent, pinned, state } = &self.tiles[tile];
            if matches!(state, TileState::Absent) {
                let buffer = if *pinned {
                    Some(AlignedBuffer::for_weights(room_for(&[*extent]))?)
                } else {
                    None
                };
                let Some(buffer) = buffer.or_else(|| self.free.pop()) else { return Ok(()) };
                self.submit(tile, buffer);
            } else if !*pinned {
                // The ring holds the whole walk: this sweep has yet to use it.
                return Ok(());
            }
            self.next.tile += 1;
        }
        Ok(())
    }

    fn submit(&mut self, tile: TileIndex, buffer: AlignedBuffer) {
        self.ahead.push_back(tile);
        self.tiles[tile].state = TileState::Reading;
        self.queue.submit(ReadRequest {
            tag: tile,
            extents: vec![self.tiles[tile].extent],
            buffer,
            urgency: Urgency::Ahead,
            reply: self.reply.clone(),
        });
    }
}
