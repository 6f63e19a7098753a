//! Which expert leaves the cache: pure bookkeeping, no I/O.
//!
//! A token visits the layers in a fixed order and touches more experts than
//! fit, so "least recently used" evicts just what the next token comes back
//! for. Every layer gets an equal share of the slots instead, and inside it the
//! expert with the smallest use count leaves, counts halving with every token.

/// Counts uses and chooses victims. Deterministic: equal counts are broken by
/// the longer absence, then by the lower expert id.
#[derive(Debug, Clone)]
pub struct Eviction {
    share: f64,
    uses: Vec<Vec<Use>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Use {
    /// Decayed count as of `token`.
    count: f64,
    token: u64,
}

/// Somebody who could leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Slot that would become free.
    pub slot: usize,
    /// Layer of its expert.
    pub layer: usize,
    /// The expert.
    pub expert: usize,
}

impl Eviction {
    /// For `slots` slots over all `layers`, of which `routed_layers` have experts.
    pub fn new(layers: usize, routed_layers: usize, experts: usize, slots: usize) -> Self {
        let share = slots as f64 / routed_layers.max(1) as f64;
        Eviction { share, uses: vec![vec![Use::default(); experts]; layers] }
    }

    /// Counts a use of an expert by token number `token`.
    pub fn record(&mut self, layer: usize, expert: usize, token: u64) {
        let count = self.value(layer, expert, token);
        self.uses[layer][expert] = Use { count: count + 1.0, token };
    }

    /// The candidate to evict so that an expert of `layer` can come in, given
    /// how many slots each layer holds: one of the layer itself once it has its
    /// share, otherwise one of the layer that is furthest above its own.
    pub fn victim(
        &self,
        layer: usize,
        held: &[usize],
        token: u64,
        candidates: &[Candidate],
    ) -> Option<Candidate> {
        let own = candidates.iter().any(|candidate| candidate.layer == layer);
        let from = if own && held[layer] as f64 >= self.share {
            layer
        } else {
            let layers = candidates.iter().map(|candidate| candidate.layer);
            layers.max_by_key(|layer| (held[*layer], std::cmp::Reverse(*layer)))?
        };
        let inside = candidates.iter().filter(|candidate| candidate.layer == from);
        inside.copied().min_by(|a, b| self.order(a, token).total_cmp_with(&self.order(b, token)))
    }

    fn value(&self, layer: usize, expert: usize, token: u64) -> f64 {
        let last = self.uses[layer][expert];
        let age = token.saturating_sub(last.token).min(64);
        last.count / (1u64 << age.min(63)) as f64
    }

    fn order(&self, candidate: &Candidate, token: u64) -> Rank {
        Rank {
            value: self.value(candidate.layer, candidate.expert, token),
            last: self.uses[candidate.layer][candidate.expert].token,
            expert: candidate.expert,
        }
    }
}

struct Rank {
    value: f64,
    last: u64,
    expert: usize,
}

impl Rank {
    fn total_cmp_with(&self, other: &Rank) -> std::cmp::Ordering {
        self.value
            .total_cmp(&other.value)
            .then(self.last.cmp(&other.last))
            .then(self.expert.cmp(&other.expert))
    }
}
