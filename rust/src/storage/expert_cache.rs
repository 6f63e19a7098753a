//! Routed experts, packed as they are on disk, in a fixed number of slots.
//!
//! All reads of a layer start at once, in disk order, and each expert is used
//! as it lands. A slot is empty, filling (its buffer is with the read queue) or
//! held; a buffer has one owner at any time, so no slot can be handed out twice.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::format::expert_table::ExpertTable;
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::Extent;
use crate::io::queue::{Completion, ReadQueue, ReadRequest, Urgency, room_for};
use crate::storage::eviction::{Candidate, Eviction};
use crate::storage::trunk_stream::map_buffer;

/// What the cache was asked for and what it read.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpertCounters {
    /// Experts asked for: each once a layer and sweep.
    pub requests: u64,
    /// Of those, found in a slot.
    pub hits: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Time in which the computation stood still for an expert.
    pub wait: Duration,
}

type Key = (usize, usize);

enum Slot {
    Empty(AlignedBuffer),
    Filling(Key),
    Held(Key, HeldExpert),
}

struct HeldExpert {
    buffer: AlignedBuffer,
    /// Start in the buffer and length of each part.
    parts: [(usize, usize); 6],
}

/// The six tensors of one expert, in the order of `ExpertPart`.
pub type ExpertBytes<'a> = [&'a [u8]; 6];

/// Slots for experts and the reads that fill them.
pub struct ExpertCache {
    queue: Arc<dyn ReadQueue>,
    table: Arc<ExpertTable>,
    slots: Vec<Slot>,
    slot_of: HashMap<Key, usize>,
    held_per_layer: Vec<usize>,
    eviction: Eviction,
    token: u64,
    reply: Sender<Completion>,
    replies: Receiver<Completion>,
    counters: ExpertCounters,
}

/// The experts that a layer needs in this sweep, some of them under way.
#[must_use = "reads are under way until the batch is finished"]
pub struct ExpertBatch {
    layer: usize,
    /// Needed experts that were there, not used yet.
    present: VecDeque<usize>,
    /// Needed experts that have no slot yet, in disk order.
    waiting: VecDeque<usize>,
    in_flight: usize,
}

/// The extents of an expert as few reads as the file allows, and for each part
/// the read and the place in it. In the released files it is one.
fn runs_of(parts: &[Extent; 6]) -> (Vec<Extent>, [(usize, usize); 6]) {
    let mut order: [usize; 6] = std::array::from_fn(|part| part);
    order.sort_by_key(|part| (parts[*part].file, parts[*part].offset));
    let mut runs: Vec<Extent> = Vec::new();
    let mut places = [(0, 0); 6];
    for part in order {
        let extent = parts[part];
        match runs.last_mut() {
            Some(run) if run.file == extent.file && run.end() == extent.offset => {
                places[part] =
                    (runs.len() - 1, (extent.offset - runs[runs.len() - 1].offset) as usize);
                let last = runs.len() - 1;
                runs[last].length += extent.length;
            }
            _ => {
                places[part] = (runs.len(), 0);
                runs.push(extent);
            }
        }
    }
    (runs, places)
}

/// Bytes of one slot: room for the expert that needs most.
pub fn slot_bytes(table: &ExpertTable, experts: usize) -> usize {
    let all = table.layers().flat_map(|layer| (0..experts).map(move |expert| (layer, expert)));
    all.map(|(layer, expert)| room_for(&runs_of(&table.parts(layer, expert)).0)).max().unwrap_or(0)
}

impl ExpertCache {
    /// A cache of `slots` empty slots of `slot_bytes` each over the experts of
    /// `table`, for a model of `layers` layers with `experts` experts each.
    ///
    /// # Errors
    /// When memory for a slot cannot be mapped.
    pub fn new(
        queue: Arc<dyn ReadQueue>,
        table: Arc<ExpertTable>,
        layers: usize,
        experts: usize,
        slots: usize,
        slot_bytes: usize,
    ) -> Result<Self> {
        let (reply, replies) = channel();
        let routed = table.layers().count();
        Ok(ExpertCache {
            queue,
            table,
            slots: (0..slots)
                .map(|_| Ok(Slot::Empty(map_buffer(slot_bytes)?)))
                .collect::<Result<_>>()?,
            slot_of: HashMap::new(),
            held_per_layer: vec![0; layers],
            eviction: Eviction::new(layers, routed, experts, slots),
            token: 0,
            reply,
            replies,
            counters: ExpertCounters::default(),
        })
    }

    /// Tells the cache that `tokens` more tokens have begun.
    pub fn begin_tokens(&mut self, tokens: usize) {
        self.token += tokens as u64;
    }

    /// What was asked for and read since open.
    pub fn counters(&self) -> ExpertCounters {
        self.counters
    }

    /// Starts reading what is missing of `experts` (each once) of `layer`.
    pub fn request(&mut self, layer: usize, experts: &[usize]) -> ExpertBatch {
        let (mut present, mut missing) = (VecDeque::new(), Vec::new());
        for expert in experts.iter().copied() {
            self.counters.requests += 1;
            self.eviction.record(layer, expert, self.token);
            if self.slot_of.contains_key(&(layer, expert)) {
                self.counters.hits += 1;
                present.push_back(expert);
            } else {
                missing.push(expert);
            }
        }
        missing.sort_by_key(|expert| {
            let first = self.table.parts(layer, *expert)[0];
            (first.file, first.offset)
        });
        let mut batch = ExpertBatch { layer, present, waiting: missing.into(), in_flight: 0 };
        self.submit_waiting(&mut batch);
        batch
    }

    /// Calls `use_expert` once for each expert of the batch: those that were
    /// there first, then each as it arrives.
    ///
    /// # Errors
    /// The first read error or error of `use_expert`; what is under way is
    /// waited for, so that the cache stays usable.
    pub fn finish(
        &mut self,
        mut batch: ExpertBatch,
        mut use_expert: impl FnMut(usize, ExpertBytes<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        loop {
            if outcome.is_ok() {
                self.submit_waiting(&mut batch);
            }
            let expert = match batch.present.pop_front() {
                Some(expert) => expert,
                None if batch.in_flight > 0 => match self.receive(&mut batch) {
                    Ok(expert) => expert,
                    Err(error) => {
                        outcome = outcome.and(Err(error));
                        continue;
                    }
                },
                None => return outcome,
            };
            if outcome.is_ok() {
                outcome = use_expert(expert, self.bytes((batch.layer, expert)));
            }
        }
    }

    fn bytes(&self, key: Key) -> ExpertBytes<'_> {
        match &self.slots[self.slot_of[&key]] {
            Slot::Held(_, held) => {
                held.parts.map(|(start, length)| &held.buffer[start..start + length])
            }
            Slot::Empty(_) | Slot::Filling(_) => unreachable!("only held experts are in the index"),
        }
    }

    fn submit_waiting(&mut self, batch: &mut ExpertBatch) {
        while let Some(expert) = batch.waiting.front().copied() {
            let Some((slot, buffer)) = self.take_slot(batch) else { return };
            batch.waiting.pop_front();
            batch.in_flight += 1;
            let (extents, _) = runs_of(&self.table.parts(batch.layer, expert));
            self.slots[slot] = Slot::Filling((batch.layer, expert));
            let (tag, reply) = (slot, self.reply.clone());
            self.queue.submit(ReadRequest { tag, extents, buffer, urgency: Urgency::Now, reply });
        }
    }

    /// An empty slot, or one whose expert this batch does not need any more.
    fn take_slot(&mut self, batch: &ExpertBatch) -> Option<(usize, AlignedBuffer)> {
        let empty = self.slots.iter().position(|slot| matches!(slot, Slot::Empty(_)));
        let slot = empty.or_else(|| self.victim(batch))?;
        let filling = Slot::Filling((batch.layer, usize::MAX));
        match std::mem::replace(&mut self.slots[slot], filling) {
            Slot::Empty(buffer) => Some((slot, buffer)),
            Slot::Held(key, held) => {
                self.slot_of.remove(&key);
                self.held_per_layer[key.0] -= 1;
                Some((slot, held.buffer))
            }
            Slot::Filling(_) => unreachable!("a filling slot is neither empty nor a victim"),
        }
    }

    fn victim(&self, batch: &ExpertBatch) -> Option<usize> {
        let candidates: Vec<Candidate> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(slot, state)| match state {
                Slot::Held((layer, expert), _)
                    if *layer != batch.layer || !batch.present.contains(expert) =>
                {
                    Some(Candidate { slot, layer: *layer, expert: *expert })
                }
                _ => None,
            })
            .collect();
        let victim =
            self.eviction.victim(batch.layer, &self.held_per_layer, self.token, &candidates)?;
        Some(victim.slot)
    }

    /// Waits for the next read of the batch and returns its expert.
    fn receive(&mut self, batch: &mut ExpertBatch) -> Result<usize> {
        let started = Instant::now();
        let completion = self.replies.recv().expect("this cache holds a sender itself");
        self.counters.wait += started.elapsed();
        batch.in_flight -= 1;
        let slot = completion.tag;
        let Slot::Filling(key) = self.slots[slot] else {
            unreachable!("a completion belongs to a filling slot");
        };
        let starts = match completion.starts {
            Ok(starts) => starts,
            Err(error) => {
                self.slots[slot] = Slot::Empty(completion.buffer);
                return Err(error);
            }
        };
        let parts = self.table.parts(key.0, key.1);
        let (_, places) = runs_of(&parts);
        let parts = std::array::from_fn(|part| {
            let (run, offset) = places[part];
            self.counters.bytes_read += parts[part].length;
            (starts[run] + offset, parts[part].length as usize)
        });
        self.slots[slot] = Slot::Held(key, HeldExpert { buffer: completion.buffer, parts });
        self.slot_of.insert(key, slot);
        self.held_per_layer[key.0] += 1;
        Ok(key.1)
    }
}
