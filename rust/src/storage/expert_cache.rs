//! Routed experts, packed as they are on disk, in a fixed number of slots.
//!
//! All reads of a layer start at once, in disk order, and each expert is used
//! as it lands. A slot is empty, filling (its buffer is with the read queue) or
//! held; a buffer has one owner at any time, so no slot can be handed out twice.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::format::expert_table::ExpertTable;
use crate::io::buffer::AlignedBuffer;
use crate::io::extent::Extent;
use crate::io::queue::{Completion, ReadQueue, ReadRequest, Urgency, room_for};
use crate::storage::counters::Counters;
use crate::storage::eviction::Eviction;

type Key = (usize, usize);

enum Slot {
    Empty(AlignedBuffer),
    Filling(Key),
    Held(HeldExpert),
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
    /// Slots in the state `Empty`.
    empty: Vec<usize>,
    slot_of: HashMap<Key, usize>,
    eviction: Eviction,
    batch: Pending,
    reply: Sender<Completion>,
    replies: Receiver<Completion>,
    counters: Arc<Counters>,
}

/// The experts that a layer needs in this sweep, some of them under way.
#[must_use = "reads are under way until the batch is finished"]
pub struct ExpertBatch {
    layer: usize,
}

/// What is left of the batch. It lives in the cache and not in the batch, so
/// that a batch which is dropped unfinished leaves nothing behind.
#[derive(Default)]
struct Pending {
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
pub fn slot_bytes(table: &ExpertTable) -> usize {
    let experts = 0..table.experts_per_layer();
    let all = table.layers().flat_map(|layer| experts.clone().map(move |expert| (layer, expert)));
    all.map(|(layer, expert)| room_for(&runs_of(&table.parts(layer, expert)).0)).max().unwrap_or(0)
}

impl ExpertCache {
    /// A cache of `slots` empty slots of `slot_bytes` each over the experts of
    /// `table`; what it costs is added to `counters`.
    ///
    /// # Errors
    /// [`Error::System`] when memory for a slot cannot be mapped,
    /// [`Error::InvalidInput`] when there are experts but no slot.
    pub fn new(
        queue: Arc<dyn ReadQueue>,
        table: Arc<ExpertTable>,
        slots: usize,
        slot_bytes: usize,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        if slots == 0 && table.expert_count() > 0 {
            return Err(Error::invalid(
                "a cache without slots cannot hold any of the model's experts",
                "give the experts room for those of one token",
            ));
        }
        let (reply, replies) = channel();
        let everywhere = std::iter::repeat_n(table.experts_per_layer(), table.model_layers());
        Ok(ExpertCache {
            queue,
            table,
            slots: (0..slots)
                .map(|_| Ok(Slot::Empty(AlignedBuffer::for_weights(slot_bytes)?)))
                .collect::<Result<_>>()?,
            empty: (0..slots).rev().collect(),
            slot_of: HashMap::new(),
            eviction: Eviction::new(everywhere),
            batch: Pending::default(),
            reply,
            replies,
            counters,
        })
    }

    /// Starts reading what is missing of `experts` (each once) of `layer`.
    pub fn request(&mut self, layer: usize, experts: &[usize]) -> ExpertBatch {
        self.settle();
        let (mut present, mut missing) = (VecDeque::new(), Vec::new());
        self.eviction.visit(layer, experts);
        for expert in experts.iter().copied() {
            let hit = self.slot_of.contains_key(&(layer, expert));
            self.counters.expert_requested(hit);
            if hit {
                present.push_back(expert);
            } else {
                missing.push(expert);
            }
        }
        missing.sort_by_key(|expert| {
            let first = self.table.parts(layer, *expert)[0];
            (first.file, first.offset)
        });
        self.batch = Pending { layer, present, waiting: missing.into(), in_flight: 0 };
        self.submit_waiting();
        ExpertBatch { layer }
    }

    /// Calls `use_expert` once for each expert of the batch: those that were
    /// there first, then each as it arrives.
    ///
    /// # Errors
    /// The first read error or error of `use_expert`; what is under way is
    /// waited for, so that the cache stays usable.
    pub fn finish(
        &mut self,
        batch: ExpertBatch,
        mut use_expert: impl FnMut(usize, ExpertBytes<'_>) -> Result<()>,
    ) -> Result<()> {
        assert_eq!(batch.layer, self.batch.layer, "a batch is finished before the next request");
        while let Some(arrived) = self.next_arrival() {
            let used =
                arrived.and_then(|expert| use_expert(expert, self.bytes((batch.layer, expert))));
            if let Err(error) = used {
                self.settle();
                return Err(error);
            }
            self.submit_waiting();
        }
        assert!(self.batch.waiting.is_empty(), "with nothing in use, there is a slot to be had");
        Ok(())
    }

    /// The next expert of the batch that can be used, `None` after the last. It
    /// may leave its slot from now on, but not before the next submission.
    fn next_arrival(&mut self) -> Option<Result<usize>> {
        let arrived = match self.batch.present.pop_front() {
            Some(expert) => Ok(expert),
            None if self.batch.in_flight > 0 => self.receive(),
            None => return None,
        };
        if let Ok(expert) = arrived {
            self.eviction.release(self.batch.layer, expert);
        }
        Some(arrived)
    }

    /// Gives up what is left of the batch: nothing is under way and nothing in
    /// use afterwards.
    fn settle(&mut self) {
        self.batch.waiting.clear();
        // A read error will come up again when the expert is wanted.
        while self.next_arrival().is_some() {}
    }

    fn bytes(&self, key: Key) -> ExpertBytes<'_> {
        match &self.slots[self.slot_of[&key]] {
            Slot::Held(held) => {
                held.parts.map(|(start, length)| &held.buffer[start..start + length])
            }
            Slot::Empty(_) | Slot::Filling(_) => unreachable!("only held experts are in the index"),
        }
    }

    /// Submits reads, in disk order, while there are slots.
    fn submit_waiting(&mut self) {
        while let Some(expert) = self.batch.waiting.front().copied() {
            let key = (self.batch.layer, expert);
            let Some((slot, buffer)) = self.take_slot_for(key) else { return };
            self.batch.waiting.pop_front();
            self.batch.in_flight += 1;
            let (extents, _) = runs_of(&self.table.parts(key.0, key.1));
            let (tag, reply) = (slot, self.reply.clone());
            self.queue.submit(ReadRequest { tag, extents, buffer, urgency: Urgency::Now, reply });
        }
    }

    /// A slot that was empty, or whose expert is not in use, with its buffer,
    /// which is to be filled with the expert `key`.
    fn take_slot_for(&mut self, key: Key) -> Option<(usize, AlignedBuffer)> {
        let slot = self.empty.pop().or_else(|| {
            let victim = self.eviction.victim()?;
            self.slot_of.remove(&victim)
        })?;
        match std::mem::replace(&mut self.slots[slot], Slot::Filling(key)) {
            Slot::Empty(buffer) => Some((slot, buffer)),
            Slot::Held(held) => Some((slot, held.buffer)),
            Slot::Filling(_) => unreachable!("a filling slot is neither empty nor a victim"),
        }
    }

    /// Waits for the next read of the batch and returns its expert.
    fn receive(&mut self) -> Result<usize> {
        let started = Instant::now();
        let completion = self.replies.recv().expect("this cache holds a sender itself");
        self.counters.waited(started.elapsed());
        self.batch.in_flight -= 1;
        let slot = completion.tag;
        let Slot::Filling(key) = self.slots[slot] else {
            unreachable!("a completion belongs to a filling slot");
        };
        let starts = match completion.starts {
            Ok(starts) => starts,
            Err(error) => {
                self.slots[slot] = Slot::Empty(completion.buffer);
                self.empty.push(slot);
                return Err(error);
            }
        };
        let parts = self.table.parts(key.0, key.1);
        let (_, places) = runs_of(&parts);
        let parts = std::array::from_fn(|part| {
            let (run, offset) = places[part];
            self.counters.expert_read(parts[part].length);
            (starts[run] + offset, parts[part].length as usize)
        });
        self.slots[slot] = Slot::Held(HeldExpert { buffer: completion.buffer, parts });
        self.slot_of.insert(key, slot);
        Ok(key.1)
    }
}
