//! Products with one token at the released shapes, in bytes of weights a
//! second, beside a plain read of the same memory; `k3rs bench` measures the
//! many-token cases and prints ratios.
#![allow(missing_docs)]

use _k3rs::io::buffer::AlignedBuffer;
use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::matmul::matmul_by_rows;
use _k3rs::measure::kernels::{Form, fill};
use _k3rs::measure::limits::read_memory;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Inputs and outputs of the matrices, as released.
const SHAPES: [(usize, usize); 3] = [(7168, 12288), (3584, 3072), (7168, 33792)];

/// Far more than the caches hold, unless this run only checks that all works.
fn pool_bytes() -> usize {
    if std::env::args().any(|argument| argument == "--test") { 1 << 30 } else { 2 << 30 }
}

fn bench(criterion: &mut Criterion) {
    let backend = Backend::available()[0];
    let mut pool = AlignedBuffer::new(pool_bytes()).expect("memory");
    fill(&mut pool);
    for threads in [1, 2] {
        let workers =
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        let mut group = criterion.benchmark_group("one_token");
        group.sample_size(10);
        group.throughput(Throughput::Bytes(1 << 29));
        group.bench_function(BenchmarkId::new("read", threads), |bencher| {
            bencher.iter(|| workers.install(|| read_memory(backend, &pool[..1 << 29])));
        });
        for (columns, rows) in SHAPES {
            let x: Vec<f32> = (0..columns).map(|k| (k as f32 * 0.37).sin()).collect();
            let mut out = vec![0.0; rows];
            for form in [Form::Bf16, Form::F32, Form::Mxfp4] {
                let bytes = form.bytes(rows * columns);
                let mut start = 0;
                group.throughput(Throughput::Bytes(bytes as u64));
                let name = format!("{}_{columns}x{rows}", form.name());
                group.bench_function(BenchmarkId::new(name, threads), |bencher| {
                    bencher.iter(|| {
                        start = if start + 2 * bytes > pool.len() { 0 } else { start + bytes };
                        let matrix = form.view(rows, columns, &pool[start..]);
                        workers.install(|| matmul_by_rows(backend, &[matrix], &x, 1, &mut out));
                    });
                });
            }
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
