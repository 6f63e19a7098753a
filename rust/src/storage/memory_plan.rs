//! Where a memory budget goes: every allocation is an entry, and their sum is
//! what the process may reach.
//!
//! The engine allocates what the plan says and `k3rs plan` prints it, so the
//! two cannot disagree. What is left after the fixed parts goes to the trunk
//! first: a pinned tile is used by every token, an expert only by some.

use serde::Serialize;

use crate::error::{Error, Result};

/// Largest tile in bytes.
pub const TILE_BYTES: usize = 4 << 20;

/// Bytes that the ring aims at: enough read ahead for any disk.
const RING_BYTES: u64 = 128 << 20;

/// Buffers that the ring needs to overlap reading and computing at all.
const RING_BUFFERS_MIN: u64 = 12;

/// Tokens of a chunk where memory is no question.
const CHUNK_MAX: usize = 128;

/// What a model asks for, before any choice.
#[derive(Debug, Clone, Default)]
pub struct Footprint {
    /// Interpreter, libraries and tokenizer.
    pub process_bytes: u64,
    /// Tensor table.
    pub table_bytes: u64,
    /// Small vectors kept as floats.
    pub vector_bytes: u64,
    /// Recurrent state of one session.
    pub state_bytes: u64,
    /// Latent cache of one position.
    pub position_bytes: u64,
    /// Scratch that does not depend on the chunk.
    pub scratch_bytes: u64,
    /// Scratch for each token of a chunk.
    pub token_bytes: u64,
    /// Stacks of compute and reader threads.
    pub thread_bytes: u64,
    /// Buffer size of every tile of the walk, in order.
    pub tiles: Vec<u64>,
    /// Buffer size of one expert.
    pub slot_bytes: u64,
    /// Routed experts in the model.
    pub expert_count: u64,
    /// Experts that a token wakes in a layer.
    pub experts_per_token: u64,
}

/// How to divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// Everything within this many bytes.
    Total(u64),
    /// So much for pinned tiles, so much for expert slots, the rest as needed.
    Parts {
        /// Bytes of pinned tiles.
        trunk: u64,
        /// Bytes of expert slots.
        experts: u64,
    },
}

/// What the plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanRequest {
    /// How to divide.
    pub budget: Budget,
    /// Positions that a session may reach: prompt and generated tokens.
    pub positions: usize,
    /// Tokens of a chunk, if not left to the plan.
    pub chunk: Option<usize>,
}

/// One allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanEntry {
    /// What it is for.
    pub name: &'static str,
    /// How much of it.
    pub bytes: u64,
}

/// A division of memory that fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// The budget that was asked for, or the sum of the parts.
    pub budget_bytes: u64,
    /// The smallest budget that would do.
    pub minimum_bytes: u64,
    /// Every allocation; their sum is at most the budget.
    pub entries: Vec<PlanEntry>,
    /// Bytes of pinned tiles.
    pub pinned_bytes: u64,
    /// Pinned bytes over the bytes of the walk: the share of the trunk that is
    /// not read again from the second token on.
    pub pinned_fraction: f64,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Tiles that are read ahead; the ring needs no more buffers than tiles that pass it.
    pub ring_buffers: usize,
    /// Expert slots.
    pub expert_slots: usize,
    /// Bytes of one of them.
    pub expert_slot_bytes: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Which tiles are pinned.
    #[serde(skip)]
    pub pinned: Vec<bool>,
}

impl MemoryPlan {
    /// Divides memory for a model of `footprint`.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] when not even the smallest ring, the slots of one
    /// token and a chunk of one token fit.
    pub fn new(footprint: &Footprint, request: &PlanRequest) -> Result<MemoryPlan> {
        let divider = Divider { footprint, positions: request.positions };
        let minimum_bytes = divider.minimum_bytes(request.chunk.unwrap_or(1));
        match request.budget {
            Budget::Total(budget) if budget < minimum_bytes => Err(Error::MemoryBudget {
                budget_bytes: budget,
                missing_bytes: minimum_bytes - budget,
                minimum_bytes,
                largest: divider.largest_fixed(),
            }),
            Budget::Total(budget) => {
                let chunk = request.chunk.unwrap_or_else(|| divider.chunk_for(budget));
                let mut left = budget - divider.minimum_bytes(chunk);
                let everything = divider.everything_bytes();
                let ring = if left + divider.ring_minimum() + divider.slots_minimum() >= everything
                {
                    divider.ring_minimum()
                } else {
                    divider.ring_minimum()
                        + (left / 4).min(RING_BYTES.saturating_sub(divider.ring_minimum()))
                };
                left -= ring - divider.ring_minimum();
                let pinned = divider.pin(left);
                left -= divider.pinned_bytes(&pinned);
                if pinned.iter().all(|pinned| *pinned) {
                    // Nothing streams: the ring's bytes serve the experts.
                    left += ring;
                }
                let slots = divider.slots_for(divider.slots_minimum() + left);
                Ok(divider.plan(budget, minimum_bytes, chunk, ring, pinned, slots))
            }
            Budget::Parts { trunk, experts } => {
                let chunk = request.chunk.unwrap_or(CHUNK_MAX / 4);
                let pinned = divider.pin(trunk);
                let slots = divider.slots_for(experts.max(divider.slots_minimum()));
                let ring = RING_BYTES.max(divider.ring_minimum());
                let mut plan = divider.plan(0, minimum_bytes, chunk, ring, pinned, slots);
                plan.budget_bytes = plan.entries.iter().map(|entry| entry.bytes).sum();
                Ok(plan)
            }
        }
    }
}

struct Divider<'a> {
    footprint: &'a Footprint,
    positions: usize,
}

impl Divider<'_> {
    fn fixed(&self, chunk: usize) -> Vec<PlanEntry> {
        let footprint = self.footprint;
        let entry = |name, bytes| PlanEntry { name, bytes };
        vec![
            entry("interpreter, libraries, tokenizer", footprint.process_bytes),
            entry("tensor table", footprint.table_bytes),
            entry("small vectors", footprint.vector_bytes),
            entry("threads", footprint.thread_bytes),
            entry("recurrent state", footprint.state_bytes),
            entry("latent cache", footprint.position_bytes * self.positions as u64),
            entry("workspace", footprint.scratch_bytes + footprint.token_bytes * chunk as u64),
        ]
    }

    fn fixed_bytes(&self, chunk: usize) -> u64 {
        self.fixed(chunk).iter().map(|entry| entry.bytes).sum()
    }

    fn largest_tile(&self) -> u64 {
        self.footprint.tiles.iter().copied().max().unwrap_or(0)
    }

    fn ring_minimum(&self) -> u64 {
        self.largest_tile() * RING_BUFFERS_MIN.min(self.footprint.tiles.len() as u64)
    }

    fn slots_minimum(&self) -> u64 {
        self.footprint.slot_bytes
            * self.footprint.experts_per_token.min(self.footprint.expert_count)
    }

    fn minimum_bytes(&self, chunk: usize) -> u64 {
        self.fixed_bytes(chunk) + self.ring_minimum() + self.slots_minimum()
    }

    fn everything_bytes(&self) -> u64 {
        let tiles: u64 = self.footprint.tiles.iter().sum();
        tiles + self.ring_minimum() + self.footprint.slot_bytes * self.footprint.expert_count
    }

    fn largest_fixed(&self) -> String {
        let mut entries = self.fixed(1);
        entries.push(PlanEntry { name: "expert slots", bytes: self.slots_minimum() });
        entries.push(PlanEntry { name: "ring", bytes: self.ring_minimum() });
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
        let names = entries.iter().take(3);
        let names: Vec<_> =
            names.map(|entry| format!("{} ({} bytes)", entry.name, entry.bytes)).collect();
        names.join(", ")
    }

    /// The largest chunk whose workspace takes at most an eighth of what the
    /// fixed parts leave.
    fn chunk_for(&self, budget: u64) -> usize {
        let free = budget - self.minimum_bytes(1);
        let fitting = free / 8 / self.footprint.token_bytes.max(1) + 1;
        CHUNK_MAX.min(usize::try_from(fitting).unwrap_or(CHUNK_MAX))
    }

    /// Pins tiles within `bytes`, spread evenly over the walk so that the disk
    /// works while pinned ones are multiplied.
    fn pin(&self, bytes: u64) -> Vec<bool> {
        let total: u64 = self.footprint.tiles.iter().sum();
        if bytes >= total {
            return vec![true; self.footprint.tiles.len()];
        }
        let fraction = bytes as f64 / total as f64;
        let mut credit = 0.0;
        let pinned = self.footprint.tiles.iter().map(|tile| {
            credit += *tile as f64 * fraction;
            let pin = credit >= *tile as f64;
            credit -= if pin { *tile as f64 } else { 0.0 };
            pin
        });
        pinned.collect()
    }

    fn pinned_bytes(&self, pinned: &[bool]) -> u64 {
        let tiles = self.footprint.tiles.iter().zip(pinned);
        tiles.filter_map(|(tile, pinned)| pinned.then_some(*tile)).sum()
    }

    fn slots_for(&self, bytes: u64) -> u64 {
        match self.footprint.slot_bytes {
            0 => 0,
            slot => (bytes / slot).min(self.footprint.expert_count),
        }
    }

    fn plan(
        &self,
        budget_bytes: u64,
        minimum_bytes: u64,
        chunk: usize,
        ring: u64,
        pinned: Vec<bool>,
        slots: u64,
    ) -> MemoryPlan {
        let pinned_bytes = self.pinned_bytes(&pinned);
        let total: u64 = self.footprint.tiles.iter().sum();
        let largest = self.largest_tile();
        let ring_buffers = ring / largest.max(1);
        let streamed = pinned.iter().filter(|pinned| !**pinned).count() as u64;
        let ring_bytes = ring_buffers.min(streamed) * largest;
        let mut entries = self.fixed(chunk);
        entries.push(PlanEntry { name: "ring", bytes: ring_bytes });
        entries.push(PlanEntry { name: "pinned tiles", bytes: pinned_bytes });
        entries.push(PlanEntry { name: "expert slots", bytes: slots * self.footprint.slot_bytes });
        MemoryPlan {
            budget_bytes,
            minimum_bytes,
            entries,
            pinned_bytes,
            pinned_fraction: if total == 0 { 1.0 } else { pinned_bytes as f64 / total as f64 },
            ring_bytes,
            ring_buffers: ring_buffers as usize,
            expert_slots: slots as usize,
            expert_slot_bytes: self.footprint.slot_bytes as usize,
            chunk,
            pinned,
        }
    }
}
