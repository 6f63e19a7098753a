//! Quantised rows and the exact values they stand for, from `fixtures/ops/mxfp4.json`:
//! every nibble, subnormal and overflowing scales, an odd number of groups.
//!
//! Catches a swapped nibble order, a scale exponent off by one, and a lost sign of zero.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::matmul::dot_rows;
use _k3rs::kernels::matrix::{Matrix, Weights};
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases {
    columns_per_scale: usize,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    name: String,
    packed: Vec<u8>,
    scales: Vec<u8>,
    expected_f32_bits: Vec<String>,
}

impl Row {
    fn columns(&self) -> usize {
        2 * self.packed.len()
    }

    fn matrix(&self) -> Matrix<'_> {
        let weights = Weights::Mxfp4 { packed: &self.packed, scales: &self.scales };
        Matrix::new(1, self.columns(), weights)
    }

    fn expected(&self) -> Vec<f32> {
        let bits = self.expected_f32_bits.iter();
        bits.map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).unwrap())).collect()
    }
}

fn cases() -> Cases {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/ops/mxfp4.json");
    let cases: Cases = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(cases.columns_per_scale, 32);
    assert!(cases.rows.len() >= 5);
    cases
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_value_decodes_to_the_bit() {
    for row in cases().rows {
        let mut decoded = vec![f32::NAN; row.columns()];
        row.matrix().decode(0, 0, &mut decoded);
        assert_eq!(bits(&decoded), bits(&row.expected()), "{}", row.name);
    }
}

/// A unit vector picks one column, so the product is its value: this is what
/// shows how a backend decodes, which never writes decoded values down.
#[test]
fn every_backend_multiplies_the_exact_values() {
    for row in cases().rows {
        let columns = row.columns();
        let expected = row.expected();
        let mut units = vec![0.0; columns * columns];
        (0..columns).for_each(|column| units[column * columns + column] = 1.0);
        for backend in Backend::available() {
            for tokens in [1, columns] {
                let mut products = vec![f32::NAN; columns];
                for (units, products) in
                    units.chunks_exact(tokens * columns).zip(products.chunks_exact_mut(tokens))
                {
                    dot_rows(backend, row.matrix(), units, tokens, products);
                }
                // A sum starts at +0, so the sign of a zero is not kept.
                assert_eq!(products, expected, "{} on {}, {tokens}", row.name, backend.name());
            }
        }
    }
}

/// Scales come after the sums of a group, so what counts is the product, not a value.
#[test]
fn a_product_beyond_float32_is_infinite() {
    let cases = cases();
    let infinite = |row: &&Row| row.expected().iter().any(|value| value.is_infinite());
    let overflowing: Vec<&Row> = cases.rows.iter().filter(infinite).collect();
    assert!(!overflowing.is_empty());
    for row in overflowing {
        let signs: Vec<f32> = row.expected().iter().map(|value| value.signum()).collect();
        for backend in Backend::available() {
            let mut product = [0.0];
            dot_rows(backend, row.matrix(), &signs, 1, &mut product);
            assert_eq!(product[0], f32::INFINITY, "{} on {}", row.name, backend.name());
        }
    }
}
