//! What a cache would have made of recorded requests: policies side by side.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::num::NonZeroUsize;

use crate::storage::access_trace::AccessTrace;
use crate::storage::eviction::Eviction;

/// Who decides which expert leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used leaves.
    Lru,
    /// The one that is used again last leaves: no policy can do better, but it
    /// has to know the future. Everything asked for takes a slot.
    Belady,
    /// The one of the expert cache: the same [`Eviction`].
    Default,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 3] = [Policy::Lru, Policy::Belady, Policy::Default];

    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Belady => "belady",
            Policy::Default => "default",
        }
    }
}

/// Requests from token `first_counted` on that an initially empty cache of
/// `slots` slots would have answered without reading. The tokens before only
/// fill the cache.
pub fn hits(trace: &AccessTrace, policy: Policy, slots: NonZeroUsize, first_counted: usize) -> u64 {
    let (requests, slots) = (Requests::new(trace), slots.get());
    match policy {
        Policy::Lru => requests.replay(slots, first_counted, |position| position as u64),
        Policy::Belady => {
            let next_uses = requests.next_uses();
            requests.replay(slots, first_counted, |position| u64::MAX - next_uses[position])
        }
        Policy::Default => requests.replay_default(slots, first_counted),
    }
}

/// A trace with layers and experts numbered densely, in the order of their
/// numbers: state of a replay grows with the trace, not with the numbers in it.
struct Requests {
    visits: Vec<DenseVisit>,
    /// Experts of each layer.
    widths: Vec<usize>,
}

struct DenseVisit {
    token: usize,
    layer: usize,
    experts: Vec<usize>,
}

impl Requests {
    fn new(trace: &AccessTrace) -> Self {
        let keys: BTreeSet<(u32, u32)> = trace
            .visits()
            .flat_map(|visit| visit.experts.iter().map(move |expert| (visit.layer, *expert)))
            .collect();
        let (mut layers, mut experts) = (HashMap::new(), HashMap::new());
        let mut widths: Vec<usize> = Vec::new();
        for (layer, expert) in keys {
            let dense = *layers.entry(layer).or_insert(widths.len());
            widths.resize(dense + 1, 0);
            experts.insert((layer, expert), widths[dense]);
            widths[dense] += 1;
        }
        let visits = trace.visits().map(|visit| DenseVisit {
            token: visit.token,
            layer: layers[&visit.layer],
            experts: visit.experts.iter().map(|expert| experts[&(visit.layer, *expert)]).collect(),
        });
        Requests { visits: visits.collect(), widths }
    }

    /// Token and key of every request.
    fn in_order(&self) -> impl DoubleEndedIterator<Item = (usize, (usize, usize))> {
        self.visits.iter().flat_map(|visit| {
            visit.experts.iter().map(|expert| (visit.token, (visit.layer, *expert)))
        })
    }

    /// For each request the position of the next one for the same expert;
    /// behind the end, and all different, where there is none.
    fn next_uses(&self) -> Vec<u64> {
        let count: usize = self.visits.iter().map(|visit| visit.experts.len()).sum();
        let mut next: HashMap<(usize, usize), u64> = HashMap::new();
        let mut uses = vec![0; count];
        for (position, (_, key)) in (0..count).rev().zip(self.in_order().rev()) {
            let never = (count + position) as u64;
            uses[position] = next.insert(key, position as u64).unwrap_or(never);
        }
        uses
    }

    /// Hits when, request by request, the resident expert of the lowest rank
    /// leaves; a request ranks its expert by its position.
    fn replay(&self, slots: usize, first_counted: usize, rank: impl Fn(usize) -> u64) -> u64 {
        let mut ranks: HashMap<(usize, usize), u64> = HashMap::new();
        let mut residents: BTreeSet<(u64, (usize, usize))> = BTreeSet::new();
        let mut hits = 0;
        for (position, (token, key)) in self.in_order().enumerate() {
            match ranks.remove(&key) {
                Some(rank) => {
                    residents.remove(&(rank, key));
                    hits += u64::from(token >= first_counted);
                }
                None if residents.len() == slots => {
                    let victim = residents.pop_first();
                    victim.map(|(_, key)| ranks.remove(&key));
                }
                None => {}
            }
            ranks.insert(key, rank(position));
            residents.insert((rank(position), key));
        }
        hits
    }

    /// Hits of the expert cache: all missing experts of a visit take their slots
    /// before one is used, except where there are too few slots.
    fn replay_default(&self, slots: usize, first_counted: usize) -> u64 {
        let mut eviction = Eviction::new(self.widths.iter().copied());
        let mut resident: Vec<Vec<bool>> =
            self.widths.iter().map(|width| vec![false; *width]).collect();
        let (mut empty, mut hits) = (slots, 0);
        for DenseVisit { token, layer, experts } in &self.visits {
            eviction.visit(*layer, experts);
            let (mut ready, mut missing): (VecDeque<usize>, VecDeque<usize>) =
                experts.iter().copied().partition(|expert| resident[*layer][*expert]);
            hits += if *token >= first_counted { ready.len() as u64 } else { 0 };
            loop {
                while let Some(expert) = missing.front().copied() {
                    if empty > 0 {
                        empty -= 1;
                    } else if let Some((layer, expert)) = eviction.victim() {
                        resident[layer][expert] = false;
                    } else {
                        break;
                    }
                    missing.pop_front();
                    resident[*layer][expert] = true;
                    ready.push_back(expert);
                }
                let Some(expert) = ready.pop_front() else { break };
                eviction.release(*layer, expert);
            }
        }
        hits
    }
}
