//! The eviction policy on recorded and on made-up routing: never better than
//! the optimum, never much worse than least recently used, and on the released
//! model's routing at least as good as the best simple policy.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use _k3rs::storage::access_trace::AccessTrace;
use _k3rs::storage::eviction::Eviction;
use _k3rs::storage::trace_replay::{Policy, hits};
use common::shared;
use proptest::prelude::*;

/// Hit rate of tokens from `first` on, in percent.
fn rate(trace: &AccessTrace, policy: Policy, slots: usize, first: usize) -> f64 {
    let slots = NonZeroUsize::new(slots).unwrap();
    hits(trace, policy, slots, first) as f64 * 100.0 / trace.requests(first) as f64
}

/// Little-endian pairs (layer, expert); a token ends where the layer falls.
fn trace_of_pairs(bytes: &[u8]) -> AccessTrace {
    let (mut token, mut last) = (0, 0);
    let requests = bytes.chunks_exact(4).map(|pair| {
        let layer = u32::from(u16::from_le_bytes([pair[0], pair[1]]));
        token += u32::from(layer < last);
        last = layer;
        [token, layer, u32::from(u16::from_le_bytes([pair[2], pair[3]]))]
    });
    AccessTrace::from_requests(requests).unwrap()
}

#[test]
fn released_routing_is_cached_as_well_as_by_shares_of_decayed_counts() {
    let Some(path) = shared("data/k3_router_trace_12tok.u16") else { return };
    let trace = trace_of_pairs(&std::fs::read(path).unwrap());
    assert_eq!((trace.tokens(), trace.requests(0)), (12, 12 * 92 * 16));
    for (slots, lru, shares, belady) in [
        (228, 0.0, 8.9, 15.4),
        (455, 0.0, 16.3, 29.5),
        (911, 0.0, 28.0, 45.2),
        (1472, 26.8, 39.5, 52.1),
        (1823, 39.5, 42.6, 55.1),
        (2944, 47.7, 49.0, 56.5),
    ] {
        let rounded = |policy| (rate(&trace, policy, slots, 4) * 10.0).round() / 10.0;
        assert_eq!(rounded(Policy::Lru), lru, "{slots} slots");
        assert_eq!(rounded(Policy::Belady), belady, "{slots} slots");
        let ours = rounded(Policy::Default);
        assert!(ours >= shares && ours <= belady, "{slots} slots: {ours} %");
    }
}

/// Routing made up from a seed.
struct Made {
    name: &'static str,
    /// Exponent of the Zipf law in which a layer prefers its experts.
    zipf: f64,
    /// Chance that an expert is used again by the next token.
    repeat: f64,
    /// Chance that a token changes a layer's preferences.
    drift: f64,
}

const LAYERS: usize = 8;
const EXPERTS: usize = 64;
const CHOSEN: usize = 4;
const TOKENS: usize = 150;
const FIRST_COUNTED: usize = 20;

/// Numbers in [0, 1) from a seed: splitmix64.
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn shuffled(&mut self) -> Vec<usize> {
        let mut order: Vec<(u64, usize)> =
            (0..EXPERTS).map(|expert| (self.next().to_bits(), expert)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, expert)| expert).collect()
    }
}

fn make(routing: &Made, seed: u64) -> AccessTrace {
    let mut random = Uniform(seed);
    let weights: Vec<f64> = (1..=EXPERTS).map(|rank| (rank as f64).powf(-routing.zipf)).collect();
    let total: f64 = weights.iter().sum();
    let mut preferred: Vec<Vec<usize>> = (0..LAYERS).map(|_| random.shuffled()).collect();
    let mut used = vec![BTreeSet::new(); LAYERS];
    let mut trace = AccessTrace::default();
    for token in 0..TOKENS {
        for layer in 0..LAYERS {
            if random.next() < routing.drift {
                preferred[layer] = random.shuffled();
            }
            used[layer].retain(|_| random.next() < routing.repeat);
            while used[layer].len() < CHOSEN {
                let mut left = random.next() * total;
                let rank = weights.iter().position(|weight| {
                    left -= weight;
                    left < 0.0
                });
                used[layer].insert(preferred[layer][rank.unwrap_or(0)]);
            }
            let experts: Vec<u32> = used[layer].iter().map(|expert| *expert as u32).collect();
            trace.push(token, layer as u32, &experts).unwrap();
        }
    }
    trace
}

#[test]
fn made_up_routing_is_never_cached_worse_than_by_recency() {
    let kinds = [
        Made { name: "uniform", zipf: 0.0, repeat: 0.0, drift: 0.0 },
        Made { name: "uniform, repeating", zipf: 0.0, repeat: 0.5, drift: 0.0 },
        Made { name: "Zipf", zipf: 1.0, repeat: 0.0, drift: 0.0 },
        Made { name: "steep Zipf", zipf: 1.4, repeat: 0.0, drift: 0.0 },
        Made { name: "Zipf, repeating", zipf: 1.0, repeat: 0.4, drift: 0.0 },
        Made { name: "Zipf, drifting", zipf: 0.7, repeat: 0.4, drift: 0.02 },
    ];
    for (kind, seed) in kinds.iter().zip(1..) {
        let trace = make(kind, seed);
        for slots in [8, 16, 32, 48, 64, 128, 256] {
            let of = |policy| rate(&trace, policy, slots, FIRST_COUNTED);
            let (lru, ours, belady) = (of(Policy::Lru), of(Policy::Default), of(Policy::Belady));
            let case = format!(
                "{}, seed {seed}, {slots} slots: lru {lru:.1}, ours {ours:.1}, optimum {belady:.1}",
                kind.name
            );
            assert!(ours > lru - 0.5, "{case}");
            assert!(ours <= belady, "{case}");
            if slots < LAYERS * CHOSEN && kind.zipf + kind.repeat > 0.0 {
                assert!(ours > belady / 4.0, "{case}");
            }
        }
    }
}

#[test]
fn with_room_for_everyone_only_first_uses_are_read() {
    let trace = make(&Made { name: "Zipf", zipf: 1.0, repeat: 0.2, drift: 0.0 }, 7);
    let distinct: BTreeSet<(u32, u32)> = trace
        .visits()
        .flat_map(|visit| visit.experts.iter().map(move |expert| (visit.layer, *expert)))
        .collect();
    let expected = (trace.requests(0) - distinct.len()) as u64;
    let slots = NonZeroUsize::new(LAYERS * EXPERTS).unwrap();
    for policy in Policy::ALL {
        assert_eq!(hits(&trace, policy, slots, 0), expected, "{}", policy.name());
    }
}

#[test]
fn fewer_slots_than_a_layer_needs_are_enough_to_go_on() {
    let trace =
        AccessTrace::from_requests((0..3).flat_map(|token| {
            (0..2).flat_map(move |layer| (0..4).map(move |e| [token, layer, e]))
        }));
    let slots = NonZeroUsize::new(1).unwrap();
    assert_eq!(hits(&trace.unwrap(), Policy::Default, slots, 0), 0);
}

/// A cache as a set, which asks for a victim whenever it is full.
struct Cache {
    capacity: usize,
    residents: BTreeSet<(usize, usize)>,
    eviction: Eviction,
}

impl Cache {
    /// Visits `layer` and checks every victim.
    fn visit(&mut self, layer: usize, needed: &BTreeSet<usize>) -> Vec<(usize, usize)> {
        let experts: Vec<usize> = needed.iter().copied().collect();
        self.eviction.visit(layer, &experts);
        let mut victims = Vec::new();
        for expert in &experts {
            if !self.residents.contains(&(layer, *expert)) {
                if self.residents.len() == self.capacity {
                    let victim = self.eviction.victim().unwrap();
                    assert!(
                        victim.0 != layer || !needed.contains(&victim.1),
                        "{victim:?} is needed"
                    );
                    assert!(self.residents.remove(&victim), "{victim:?} is not resident");
                    victims.push(victim);
                }
                self.residents.insert((layer, *expert));
            }
        }
        experts.iter().for_each(|expert| self.eviction.release(layer, *expert));
        victims
    }
}

proptest! {
    // A failure prints its smallest case; no file is written.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn victims_are_residents_that_nobody_needs(
        capacity in 4_usize..40,
        visits in prop::collection::vec((0_usize..5, prop::collection::btree_set(0_usize..12, 0..=4)), 1..120),
    ) {
        let run = || {
            let eviction = Eviction::new([12; 5]);
            let mut cache = Cache { capacity, residents: BTreeSet::new(), eviction };
            let victims: Vec<_> =
                visits.iter().flat_map(|(layer, needed)| cache.visit(*layer, needed)).collect();
            let left: BTreeSet<_> = std::iter::from_fn(|| cache.eviction.victim()).collect();
            prop_assert_eq!(&left, &cache.residents);
            Ok(victims)
        };
        prop_assert_eq!(run()?, run()?);
    }
}
