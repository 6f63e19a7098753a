//! Matrix products at the released shapes, in bytes of weights a second, beside
//! a plain read of the same memory.
//!
//! The weights come from a pool much larger than the caches, so every product
//! reads them from memory, as in a real token.
#![allow(missing_docs)]

use std::hint::black_box;

use _k3rs::io::buffer::AlignedBuffer;
use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::matmul::matmul_by_rows;
use _k3rs::kernels::matrix::{Matrix, Weights};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rayon::prelude::*;

const POOL_BYTES: usize = 1 << 30;

/// Inputs and outputs of the matrices, as released.
const SHAPES: [(usize, usize); 3] = [(7168, 12288), (3584, 3072), (7168, 33792)];

const FORMS: [&str; 3] = ["bf16", "f32", "mxfp4"];

fn form_bytes(form: &str, rows: usize, columns: usize) -> usize {
    match form {
        "bf16" => rows * columns * 2,
        "f32" => rows * columns * 4,
        _ => rows * columns / 2 + rows * columns / 32,
    }
}

fn view<'a>(form: &str, rows: usize, columns: usize, bytes: &'a [u8]) -> Matrix<'a> {
    let bytes = &bytes[..form_bytes(form, rows, columns)];
    let weights = match form {
        "bf16" => Weights::Bf16(bytes),
        "f32" => Weights::F32(bytes),
        _ => {
            let (packed, scales) = bytes.split_at(rows * columns / 2);
            Weights::Mxfp4 { packed, scales }
        }
    };
    Matrix::new(rows, columns, weights)
}

/// Bytes that are ordinary weights in all three forms.
fn fill(pool: &mut [u8]) {
    pool.par_chunks_mut(1 << 20).for_each(|chunk| {
        for (index, byte) in chunk.iter_mut().enumerate() {
            *byte = 60 + (index.wrapping_mul(2_654_435_761) >> 13) as u8 % 8;
        }
    });
}

fn read_all(bytes: &[u8]) -> u64 {
    let words = bytes.par_chunks(1 << 18).map(|chunk| {
        let words = chunk.as_chunks::<8>().0;
        let mut sums = [0u64; 16];
        for block in words.as_chunks::<16>().0 {
            for (sum, word) in sums.iter_mut().zip(block) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sums.iter().fold(0, |a, b| a ^ b)
    });
    words.reduce(|| 0, |a, b| a ^ b)
}

fn threads() -> Vec<rayon::ThreadPool> {
    let build = |count| rayon::ThreadPoolBuilder::new().num_threads(count).build();
    [1, 2].into_iter().map(|count| build(count).expect("threads")).collect()
}

fn bench(criterion: &mut Criterion) {
    let mut pool = AlignedBuffer::new(POOL_BYTES).expect("memory");
    fill(&mut pool);
    for workers in threads() {
        let count = workers.current_num_threads();
        let mut group = criterion.benchmark_group("one_token");
        group.sample_size(10);
        group.throughput(Throughput::Bytes(1 << 28));
        let mut start = 0;
        group.bench_function(BenchmarkId::new("read", count), |bencher| {
            bencher.iter(|| {
                start = (start + (1 << 28)) % POOL_BYTES;
                workers.install(|| black_box(read_all(&pool[start..start + (1 << 28)])))
            });
        });
        for (columns, rows) in SHAPES {
            for form in FORMS {
                let bytes = form_bytes(form, rows, columns);
                let x: Vec<f32> = (0..columns).map(|k| (k as f32 * 0.37).sin()).collect();
                let mut out = vec![0.0; rows];
                let mut start = 0;
                group.throughput(Throughput::Bytes(bytes as u64));
                let name = BenchmarkId::new(format!("{form}_{columns}x{rows}"), count);
                group.bench_function(name, |bencher| {
                    bencher.iter(|| {
                        start = if start + 2 * bytes > POOL_BYTES { 0 } else { start + bytes };
                        let matrix = view(form, rows, columns, &pool[start..]);
                        let backend = Backend::available()[0];
                        workers.install(|| matmul_by_rows(backend, matrix, &x, 1, &mut out));
                    });
                });
            }
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
