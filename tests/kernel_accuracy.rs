//! How far the kernels are from exact arithmetic: root mean square error over
//! the root mean square of the exact results, on normal random data. Float64
//! sums over the weights as they are stored count as exact.
//!
//! `cargo test --test kernel_accuracy -- --nocapture` shows the measured values.
#![allow(missing_docs)]

use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::matmul::{dot_rows, weighted_sum};
use _k3rs::kernels::matrix::{Matrix, Weights};

/// Largest relative error of a product.
const ERROR_MAX: f64 = 2e-7;

/// Inner sizes of the released model: latent, hidden, and the dense width.
const COLUMNS: [usize; 3] = [3584, 7168, 33792];

const TOKENS: [usize; 2] = [1, 5];

/// Results for each measurement, enough to know its error to a few percent.
const RESULTS: usize = 640;

/// Normal random numbers: splitmix64 and Box-Muller.
struct Normal(u64);

impl Normal {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Bf16,
    F32,
    Mxfp4,
}

const FORMS: [Form; 3] = [Form::Bf16, Form::F32, Form::Mxfp4];

/// Normal weights in a stored form; MXFP4 rounds to its nearest code under
/// scales that vary from group to group.
struct Stored {
    form: Form,
    rows: usize,
    columns: usize,
    bytes: Vec<u8>,
    scales: Vec<u8>,
}

impl Stored {
    fn normal(random: &mut Normal, form: Form, rows: usize, columns: usize) -> Self {
        let values = random.take(rows * columns);
        let (mut bytes, mut scales) = (Vec::new(), Vec::new());
        match form {
            Form::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
            Form::Bf16 => {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()));
            }
            Form::Mxfp4 => {
                scales.extend((0..values.len() / 32).map(|_| 124 + (random.bits() % 5) as u8));
                let codes: Vec<u8> = values.iter().map(|value| nearest_code(2.0 * value)).collect();
                bytes.extend(codes.chunks_exact(2).map(|pair| pair[0] | (pair[1] << 4)));
            }
        }
        Stored { form, rows, columns, bytes, scales }
    }

    fn matrix(&self) -> Matrix<'_> {
        let weights = match self.form {
            Form::Bf16 => Weights::Bf16(&self.bytes),
            Form::F32 => Weights::F32(&self.bytes),
            Form::Mxfp4 => Weights::Mxfp4 { packed: &self.bytes, scales: &self.scales },
        };
        Matrix::new(self.rows, self.columns, weights)
    }

    /// The stored weights, exactly.
    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.columns];
        for (row, values) in values.chunks_exact_mut(self.columns).enumerate() {
            self.matrix().decode(row, 0, values);
        }
        values
    }
}

/// The E2M1 code whose value is nearest.
fn nearest_code(value: f32) -> u8 {
    let sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0_f32];
    let distance = |code: &u8| (sizes[usize::from(*code)] - value.abs()).abs();
    let code = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    code | (u8::from(value < 0.0) << 3)
}

fn relative_error(results: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(results.len(), exact.len());
    let errors = results.iter().zip(exact).map(|(result, exact)| f64::from(*result) - exact);
    let squares: f64 = errors.map(|error| error * error).sum();
    (squares / exact.iter().map(|exact| exact * exact).sum::<f64>()).sqrt()
}

/// Shown by the test runner when asked for.
#[allow(clippy::print_stdout)]
fn print(line: &str) {
    println!("{line}");
}

#[test]
fn products_are_within_2e_7_of_exact() {
    let mut random = Normal(1);
    for columns in COLUMNS {
        for form in FORMS {
            for tokens in TOKENS {
                let rows = RESULTS.div_ceil(tokens) / if columns > 10_000 { 4 } else { 1 };
                let stored = Stored::normal(&mut random, form, rows, columns);
                let x = random.take(tokens * columns);
                let exact = exact_products(&stored.values(), &x, columns);
                for backend in Backend::available() {
                    let mut out = vec![f32::NAN; rows * tokens];
                    dot_rows(backend, stored.matrix(), &x, tokens, &mut out);
                    let error = relative_error(&out, &exact);
                    let name = backend.name();
                    print(&format!("dot {form:?} K={columns} tokens={tokens} {name}: {error:.2e}"));
                    assert!(error <= ERROR_MAX, "{form:?} K={columns} {name}: {error:e}");
                    assert!(error > 1e-9, "rounding to float32 alone costs more than {error:e}");
                }
            }
        }
    }
}

/// `[rows, tokens]`.
fn exact_products(weights: &[f32], x: &[f32], columns: usize) -> Vec<f64> {
    let dot = |row: &[f32], x: &[f32]| -> f64 {
        row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
    };
    let rows = weights.chunks_exact(columns);
    rows.flat_map(|row| x.chunks_exact(columns).map(move |x| dot(row, x))).collect()
}

/// The product with a transposed matrix sums over rows: MLA takes it over the
/// positions of its cache.
#[test]
fn weighted_sums_are_within_2e_7_of_exact() {
    let mut random = Normal(2);
    let columns = 64;
    for rows in COLUMNS {
        for form in FORMS {
            let tokens = 4;
            let stored = Stored::normal(&mut random, form, rows, columns);
            let factors = random.take(tokens * rows);
            let mut exact = vec![0.0; tokens * columns];
            for (row, values) in stored.values().chunks_exact(columns).enumerate() {
                for (token, exact) in exact.chunks_exact_mut(columns).enumerate() {
                    let factor = f64::from(factors[token * rows + row]);
                    for (exact, value) in exact.iter_mut().zip(values) {
                        *exact += factor * f64::from(*value);
                    }
                }
            }
            for backend in Backend::available() {
                let mut out = vec![f32::NAN; tokens * columns];
                weighted_sum(backend, stored.matrix(), &factors, tokens, &mut out);
                let error = relative_error(&out, &exact);
                let name = backend.name();
                print(&format!("weighted sum {form:?} rows={rows} {name}: {error:.2e}"));
                assert!(error <= ERROR_MAX, "{form:?} rows={rows} {name}: {error:e}");
                assert!(error > 1e-9, "rounding to float32 alone costs more than {error:e}");
            }
        }
    }
}
