//! Products of matrices of the released shapes, in bytes of weights and
//! operations a second.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

use crate::error::Result;
use crate::io::buffer::AlignedBuffer;
use crate::io::threads::compute_pool;
use crate::kernels::backend::Backend;
use crate::kernels::matmul::matmul_by_rows;
use crate::kernels::matrix::{Matrix, Weights};
use crate::measure::limits::{self, Limits};
use crate::measure::small_work::{self, SmallWork};
use crate::measure::{Effort, median, median_seconds, seconds_of};

/// One kernel at one number of tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelSpeed {
    /// Stored form, inputs and outputs, e.g. `bf16 7168x12288`.
    pub name: String,
    /// Tokens multiplied together.
    pub tokens: usize,
    /// Bytes of weights in a second, in units of 10^9.
    pub weights_gb_s: f64,
    /// float32 operations in a second, in units of 10^9.
    pub gflop_s: f64,
    /// Share of the memory limit, the median of shares of what was read just after each
    /// product: neighbours on a shared machine change it from one second to the next.
    pub of_read: f64,
    /// Share of the multipliers' limit, measured likewise.
    pub of_fma: f64,
}

/// A stored form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
    /// Packed experts.
    Mxfp4,
}

impl Form {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Form::Bf16 => "bf16",
            Form::F32 => "f32",
            Form::Mxfp4 => "mxfp4",
        }
    }

    /// Bytes of a matrix of `elements` weights.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Form::Bf16 => elements * 2,
            Form::F32 => elements * 4,
            Form::Mxfp4 => elements / 2 + elements / 32,
        }
    }

    /// A matrix of this form over the first bytes of `bytes`.
    ///
    /// # Panics
    /// If `bytes` is shorter than the matrix.
    pub fn view(self, rows: usize, columns: usize, bytes: &[u8]) -> Matrix<'_> {
        let bytes = &bytes[..self.bytes(rows * columns)];
        let weights = match self {
            Form::Bf16 => Weights::Bf16(bytes),
            Form::F32 => Weights::F32(bytes),
            Form::Mxfp4 => {
                let (packed, scales) = bytes.split_at(rows * columns / 2);
                Weights::Mxfp4 { packed, scales }
            }
        };
        Matrix::new(rows, columns, weights)
    }
}

/// Form, inputs, outputs and numbers of tokens of what is measured: the matrices
/// that a released token spends its time in.
const CASES: [(Form, usize, usize, &[usize]); 6] = [
    (Form::Bf16, 7168, 12288, &[1, 8, 32, 128]),
    (Form::Mxfp4, 3584, 3072, &[1, 8, 32, 128]),
    (Form::F32, 7168, 12288, &[1]),
    (Form::Bf16, 7168, 33792, &[1]),
    (Form::Bf16, 3584, 7168, &[1]),
    (Form::Bf16, 7168, 163_840, &[1]),
];

/// Weights that are multiplied between two measurements of the limits, in as many
/// products as that takes: threads that have just been woken are slower.
const BATCH_BYTES: usize = 64 << 20;

/// Bytes and calls by which the limits are measured after each product: some
/// milliseconds.
const LIMIT_BYTES: usize = 128 << 20;
const LIMIT_CALLS: u64 = 8;

/// Weights, threads and a backend to measure with.
pub struct Bench {
    pool: AlignedBuffer,
    threads: rayon::ThreadPool,
    backend: Backend,
    effort: Effort,
}

impl Bench {
    /// Fills a pool of weights.
    ///
    /// # Errors
    /// [`crate::Error::System`] when it cannot be mapped or the threads not started.
    pub fn new(backend: Backend, threads: Option<usize>, effort: Effort) -> Result<Self> {
        let mut pool = AlignedBuffer::for_weights(effort.pool_bytes)?;
        let threads = compute_pool(threads)?;
        threads.install(|| fill(&mut pool));
        Ok(Bench { pool, threads, backend, effort })
    }

    /// Measures the machine.
    pub fn limits(&self) -> Limits {
        let threads = self.threads.current_num_threads();
        let (read, multiply) = self.threads.install(|| {
            let repetitions = self.effort.repetitions;
            let read =
                median_seconds(repetitions, || limits::read_memory(self.backend, &self.pool));
            let multiply = median_seconds(repetitions, || limits::multiply(self.backend));
            (read, multiply)
        });
        Limits {
            read_gb_s: self.pool.len() as f64 / read * 1e-9,
            fma_gflop_s: (limits::multiply_flops(self.backend) * threads as u64) as f64 / multiply
                * 1e-9,
            threads,
        }
    }

    /// Measures the kernels, and the limits between any two of their products.
    pub fn kernels(&self) -> Vec<KernelSpeed> {
        let runs = CASES.iter().flat_map(|(form, columns, rows, tokens)| {
            tokens.iter().map(|tokens| self.kernel(*form, *columns, *rows, *tokens))
        });
        runs.collect()
    }

    /// Measures the small work of a token beside `limits`.
    pub fn small_work(&self, limits: &Limits) -> Vec<SmallWork> {
        let read = limits.read_gb_s;
        self.threads.install(|| small_work::measure(self.backend, self.effort, read))
    }

    /// How many times slower a product becomes when one more thread wants a core
    /// all the time: with `n` threads on `n` cores, `(n + 1) / n` if rows are
    /// handed out so that a core that is taken costs its share and no more.
    pub fn slowdown_beside_a_busy_thread(&self) -> f64 {
        let (columns, rows) = (7168, (self.pool.len() / 2 / Form::Bf16.bytes(7168)).min(12_288));
        let matrix = Form::Bf16.view(rows, columns, &self.pool);
        let x = vec![0.5; columns];
        let mut out = vec![0.0; rows];
        let mut mean_seconds = || {
            let (started, mut count) = (Instant::now(), 0);
            while count < 20 * self.effort.repetitions {
                self.threads.install(|| matmul_by_rows(self.backend, &[matrix], &x, 1, &mut out));
                count += 1;
            }
            started.elapsed().as_secs_f64() / count as f64
        };
        let alone = mean_seconds();
        let done = AtomicBool::new(false);
        let crowded = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let crowded = mean_seconds();
            done.store(true, Ordering::Relaxed);
            crowded
        });
        crowded / alone
    }

    fn kernel(&self, form: Form, columns: usize, rows: usize, tokens: usize) -> KernelSpeed {
        let name = format!("{} {columns}x{rows}", form.name());
        // A check run has a small pool: it measures as many rows as fit.
        let fitting = (self.pool.len() / 2 / form.bytes(columns)).min(rows);
        let bytes = form.bytes(fitting * columns);
        let x: Vec<f32> = (0..tokens * columns).map(|k| (k as f32 * 0.37).sin()).collect();
        let mut out = vec![0.0; fitting * tokens];
        let mut start = 0;
        let mut product = || {
            start = if start + 2 * bytes > self.pool.len() { 0 } else { start + bytes };
            let matrix = form.view(fitting, columns, &self.pool[start..]);
            matmul_by_rows(self.backend, &[matrix], &x, tokens, &mut out);
        };
        let products = (BATCH_BYTES / bytes.max(1)).max(1);
        let mut runs: Vec<[f64; 3]> = Vec::new();
        self.threads.install(|| {
            product();
            for _ in 0..self.effort.repetitions {
                let seconds = seconds_of(|| (0..products).for_each(|_| product()));
                let seconds = seconds / products as f64;
                let (read, multiply) = self.limits_now();
                runs.push([seconds, read / seconds, multiply / seconds]);
            }
        });
        let [seconds, by_read, by_multiply] = [0, 1, 2].map(|i| median(runs.iter().map(|r| r[i])));
        let flops = (2 * fitting * columns * tokens) as f64;
        KernelSpeed {
            name,
            tokens,
            weights_gb_s: bytes as f64 / seconds * 1e-9,
            gflop_s: flops / seconds * 1e-9,
            of_read: by_read * bytes as f64,
            of_fma: by_multiply * flops,
        }
    }

    /// Seconds for reading a byte of memory and for an operation of the multipliers, with
    /// the threads of the current pool.
    fn limits_now(&self) -> (f64, f64) {
        let bytes = &self.pool[..self.pool.len().min(LIMIT_BYTES)];
        let read = seconds_of(|| limits::read_memory(self.backend, bytes));
        let multiply = seconds_of(|| (0..LIMIT_CALLS).for_each(|_| limits::multiply(self.backend)));
        let threads = rayon::current_num_threads() as u64;
        let flops = limits::multiply_flops(self.backend) * threads * LIMIT_CALLS;
        (read / bytes.len() as f64, multiply / flops as f64)
    }
}

/// Bytes that are ordinary weights in every form, and different in every place.
pub fn fill(pool: &mut [u8]) {
    pool.par_chunks_mut(1 << 20).enumerate().for_each(|(chunk, bytes)| {
        for (index, byte) in bytes.iter_mut().enumerate() {
            let mixed = (chunk + index).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            *byte = 120 + (mixed % 4) as u8;
        }
    });
}
