//! The limits of the machine: reading memory and multiplying.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

use crate::kernels::backend::{Backend, Kind, for_each_backend};

/// What bounds a token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes read from memory in a second, in units of 10^9.
    pub read_gb_s: f64,
    /// float32 operations in a second, an FMA counting as two, in units of 10^9.
    pub fma_gflop_s: f64,
    /// Threads that measured.
    pub threads: usize,
}

/// Reads all of `bytes` over the threads of the current pool. Registers of AVX2 read
/// as fast as those of AVX-512, and their loop is the one that compilers make well.
pub fn read_memory(backend: Backend, bytes: &[u8]) {
    let backend = match backend.name() {
        "avx512" => Backend::named("avx2").unwrap_or(backend),
        _ => backend,
    };
    let sums = bytes.par_chunks(256 << 10).map(|chunk| sum_words(backend, chunk));
    black_box(sums.reduce(|| 0, |a, b| a ^ b));
}

for_each_backend! {
    /// Adds up 64-bit words: less work than any kernel does with the bytes.
    fn sum_words(bytes: &[u8]) -> u64 {
        let words = bytes.as_chunks::<8>().0;
        let mut sums = [0u64; 32];
        for block in words.as_chunks::<32>().0 {
            for (sum, word) in sums.iter_mut().zip(block) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sums.iter().fold(0, |a, b| a ^ b)
    }
}

/// float32 operations that one call of [`multiply`] does on each thread.
pub(super) fn multiply_flops(backend: Backend) -> u64 {
    2 * (CHAINS * lanes(backend) * STEPS) as u64
}

/// Independent chains: more than latency times units of any current core.
const CHAINS: usize = 12;

const STEPS: usize = 1 << 18;

/// Floats of a register of `backend`.
fn lanes(backend: Backend) -> usize {
    match backend.kind() {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => 16,
        _ => 8,
    }
}

/// Keeps the multipliers of every thread of the current pool busy.
#[allow(unsafe_code)]
pub(super) fn multiply(backend: Backend) {
    let threads = rayon::current_num_threads();
    let sums = (0..threads).into_par_iter().map(|thread| match backend.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a backend of this kind exists only after detection.
        Kind::Avx512 => unsafe { chains_avx512(thread as f32) },
        _ => chains(backend, thread as f32),
    });
    black_box(sums.sum::<f32>());
}

for_each_backend! {
    fn chains(start: f32) -> f32 {
        let factor = black_box(0.999_f32);
        let mut lanes = [[start; 8]; CHAINS];
        for _ in 0..STEPS {
            for chain in &mut lanes {
                for lane in chain {
                    *lane = lane.mul_add(factor, 0.5);
                }
            }
        }
        lanes.iter().flatten().sum()
    }
}

/// [`chains`] of sixteen lanes, which the compiler does not vectorise by itself.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn chains_avx512(start: f32) -> f32 {
    use std::arch::x86_64::*;
    let (factor, half) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(0.5));
    let mut lanes = [_mm512_set1_ps(start); CHAINS];
    for _ in 0..STEPS {
        for lane in &mut lanes {
            *lane = _mm512_fmadd_ps(*lane, factor, half);
        }
    }
    let mut sum = 0.0;
    for lane in lanes {
        sum += _mm512_reduce_add_ps(lane);
    }
    sum
}

/// Notices other work on the machine while something is measured.
pub(super) struct ForeignWork {
    started: Instant,
    machine: Option<f64>,
    own: f64,
}

impl ForeignWork {
    pub(super) fn start() -> Self {
        ForeignWork { started: Instant::now(), machine: busy_seconds(), own: own_seconds() }
    }

    /// Cores that were busy with anything but this process since the start.
    pub(super) fn busy_cores(&self) -> Option<f64> {
        let all = busy_seconds()? - self.machine?;
        let others = all - (own_seconds() - self.own);
        Some((others / self.started.elapsed().as_secs_f64()).max(0.0))
    }
}

/// Processor seconds that all of the machine has spent.
fn busy_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<f64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _wait, interrupts, soft, stolen, ..] = ticks[..] else {
        return None;
    };
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Some((user + nice + system + interrupts + soft + stolen) / per_second)
}

/// Processor seconds that this process has spent.
fn own_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
