//! What streaming has cost, counted while it goes on: the streams write, and
//! anybody may look at any time without waiting for a sweep to end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Running totals since the engine was opened.
#[derive(Debug, Default)]
pub struct Counters {
    trunk_bytes_read: AtomicU64,
    trunk_bytes_used: AtomicU64,
    expert_bytes_read: AtomicU64,
    expert_requests: AtomicU64,
    expert_hits: AtomicU64,
    wait_nanoseconds: AtomicU64,
}

/// The totals at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Bytes of tiles read from files, counted when a tile is used (or given
    /// up), so that what is read ahead belongs to the next sweep.
    pub trunk_bytes_read: u64,
    /// Bytes of tiles that were multiplied, pinned ones included.
    pub trunk_bytes_used: u64,
    /// Bytes of experts read from files.
    pub expert_bytes_read: u64,
    /// Experts asked for: each once a layer and sweep.
    pub expert_requests: u64,
    /// Of those, found in a slot.
    pub expert_hits: u64,
    /// Time in which the computation stood still for a read.
    pub wait: Duration,
}

impl Counters {
    /// The totals now.
    pub fn totals(&self) -> Totals {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            trunk_bytes_read: value(&self.trunk_bytes_read),
            trunk_bytes_used: value(&self.trunk_bytes_used),
            expert_bytes_read: value(&self.expert_bytes_read),
            expert_requests: value(&self.expert_requests),
            expert_hits: value(&self.expert_hits),
            wait: Duration::from_nanos(value(&self.wait_nanoseconds)),
        }
    }

    pub(super) fn trunk_read(&self, bytes: u64) {
        self.trunk_bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn trunk_used(&self, bytes: u64) {
        self.trunk_bytes_used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn expert_read(&self, bytes: u64) {
        self.expert_bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn expert_requested(&self, hit: bool) {
        self.expert_requests.fetch_add(1, Ordering::Relaxed);
        self.expert_hits.fetch_add(u64::from(hit), Ordering::Relaxed);
    }

    pub(super) fn waited(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.wait_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}
