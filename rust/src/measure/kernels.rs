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
use crate::measure::{Effort, median_seconds};

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
    /// Share of the memory limit.
    pub of_read: f64,
    /// Share of the multipliers' limit.
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

    /// Measures the kernels beside `limits`.
    pub fn kernels(&self, limits: &Limits) -> Vec<KernelSpeed> {
        let runs = CASES.iter().flat_map(|(form, columns, rows, tokens)| {
            tokens.iter().map(|tokens| self.kernel(*form, *columns, *rows, *tokens, limits))
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

    fn kernel(
        &self,
        form: Form,
        columns: usize,
        rows: usize,
        tokens: usize,
        limits: &Limits,
    ) -> KernelSpeed {
        let name = format!("{} {columns}x{rows}", form.name());
        // A check run has a small pool: it measures as many rows as fit.
        let fitting = (self.pool.len() / 2 / form.bytes(columns)).min(rows);
        let bytes = form.bytes(fitting * columns);
        let x: Vec<f32> = (0..tokens * columns).map(|k| (k as f32 * 0.37).sin()).collect();
        let mut out = vec![0.0; fitting * tokens];
        let mut start = 0;
        let seconds = self.threads.install(|| {
            median_seconds(self.effort.repetitions, || {
                start = if start + 2 * bytes > self.pool.len() { 0 } else { start + bytes };
                let matrix = form.view(fitting, columns, &self.pool[start..]);
                matmul_by_rows(self.backend, &[matrix], &x, tokens, &mut out);
            })
        });
        let weights_gb_s = bytes as f64 / seconds * 1e-9;
        let gflop_s = (2 * fitting * columns * tokens) as f64 / seconds * 1e-9;
        KernelSpeed {
            name,
            tokens,
            weights_gb_s,
            gflop_s,
            of_read: weights_gb_s / limits.read_gb_s,
            of_fma: gflop_s / limits.fma_gflop_s,
        }
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
