//! Rows of one routed expert as released: every decoded value exact, and their
//! products with a vector as accurate as the kernels promise.
//!
//! The bytes are no part of the project; without them these tests say so and pass.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::matmul::dot_rows;
use _k3rs::kernels::matrix::{Matrix, Weights};
use common::shared;
use serde::Deserialize;

/// Root mean square of a product's error over that of the product.
const RELATIVE_ERROR_MAX: f64 = 2e-7;

#[derive(Deserialize)]
struct Array<T> {
    shape: [usize; 2],
    data: Vec<T>,
}

#[derive(Deserialize)]
struct ReleasedRows {
    packed: Array<u8>,
    scales: Array<u8>,
    expected: Array<f32>,
}

impl ReleasedRows {
    fn read() -> Option<Self> {
        let text = fs::read_to_string(shared("data/released_mxfp4_rows.json")?).unwrap();
        let rows: ReleasedRows = serde_json::from_str(&text).unwrap();
        assert_eq!(rows.packed.shape, [64, 1792]);
        assert_eq!(rows.scales.shape, [64, 112]);
        assert_eq!(rows.expected.shape, [64, 3584]);
        Some(rows)
    }

    fn matrix(&self) -> Matrix<'_> {
        let [rows, columns] = self.expected.shape;
        let weights = Weights::Mxfp4 { packed: &self.packed.data, scales: &self.scales.data };
        Matrix::new(rows, columns, weights)
    }
}

/// Normal numbers, from the sums of twelve uniform ones.
fn normal_numbers(count: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count).map(|_| ((0..12).map(|_| uniform()).sum::<f64>() - 6.0) as f32).collect()
}

fn root_mean_square(values: impl Iterator<Item = f64> + Clone) -> f64 {
    (values.clone().map(|value| value * value).sum::<f64>() / values.count() as f64).sqrt()
}

#[test]
fn every_released_value_decodes_to_the_bit() {
    let Some(rows) = ReleasedRows::read() else { return };
    let (matrix, columns) = (rows.matrix(), rows.expected.shape[1]);
    let mut decoded = vec![f32::NAN; columns];
    for (row, expected) in rows.expected.data.chunks_exact(columns).enumerate() {
        matrix.decode(row, 0, &mut decoded);
        for (column, (value, expected)) in decoded.iter().zip(expected).enumerate() {
            assert_eq!(value.to_bits(), expected.to_bits(), "row {row}, column {column}");
        }
    }
}

#[test]
fn products_with_released_rows_are_accurate_on_every_backend() {
    let Some(rows) = ReleasedRows::read() else { return };
    let [row_count, columns] = rows.expected.shape;
    for tokens in [1, 5] {
        let x = normal_numbers(tokens * columns);
        let mut exact = Vec::new();
        for row in rows.expected.data.chunks_exact(columns) {
            for x in x.chunks_exact(columns) {
                let terms = row.iter().zip(x).map(|(row, x)| f64::from(*row) * f64::from(*x));
                exact.push(terms.sum::<f64>());
            }
        }
        for backend in Backend::available() {
            let mut products = vec![f32::NAN; row_count * tokens];
            dot_rows(backend, rows.matrix(), &x, tokens, &mut products);
            let errors =
                products.iter().zip(&exact).map(|(found, exact)| f64::from(*found) - exact);
            let ratio = root_mean_square(errors) / root_mean_square(exact.iter().copied());
            assert!(ratio <= RELATIVE_ERROR_MAX, "{ratio:e} on {}", backend.name());
        }
    }
}
