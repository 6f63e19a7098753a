//! Every backend gives the bits of `scalar`, for every length, tail, alignment
//! and number of tokens; a token's bits do not depend on its company.
#![allow(missing_docs)]

use _k3rs::kernels::backend::Backend;
use _k3rs::kernels::bf16;
use _k3rs::kernels::matmul::{dot_rows, weighted_sum};
use _k3rs::kernels::matrix::{Matrix, Weights};
use _k3rs::kernels::scalar::CONTRACT;
use proptest::prelude::*;

/// Small deterministic generator: 64-bit xorshift*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn float(&mut self) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        unit * 2f32.powi((self.next() % 9) as i32 - 4)
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Bf16,
    F32,
    Mxfp4,
}

/// Stored bytes, shifted by `offset` so that no alignment can be relied upon.
struct Stored {
    form: Form,
    bytes: Vec<u8>,
    scales: Vec<u8>,
    offset: usize,
}

impl Stored {
    fn random(random: &mut Random, form: Form, rows: usize, columns: usize, offset: usize) -> Self {
        let mut bytes = vec![0; offset];
        let mut scales = vec![0; offset];
        match form {
            Form::F32 => {
                bytes.extend(random.floats(rows * columns).iter().flat_map(|v| v.to_le_bytes()));
            }
            Form::Bf16 => bytes.extend(
                random.floats(rows * columns).iter().flat_map(|v| v.to_le_bytes()[2..].to_vec()),
            ),
            Form::Mxfp4 => {
                bytes.extend(random.bytes(rows * columns / 2));
                scales.extend(random.bytes(rows * columns / 32).iter().map(|b| 110 + b % 30));
            }
        }
        Stored { form, bytes, scales, offset }
    }

    fn matrix(&self, rows: usize, columns: usize) -> Matrix<'_> {
        let bytes = &self.bytes[self.offset..];
        let weights = match self.form {
            Form::Bf16 => Weights::Bf16(bytes),
            Form::F32 => Weights::F32(bytes),
            Form::Mxfp4 => Weights::Mxfp4 { packed: bytes, scales: &self.scales[self.offset..] },
        };
        Matrix::new(rows, columns, weights)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn check(form: Form, rows: usize, columns: usize, tokens: usize, offset: usize, seed: u64) {
    let mut random = Random(seed | 1);
    let stored = Stored::random(&mut random, form, rows, columns, offset);
    let matrix = stored.matrix(rows, columns);
    let padded = random.floats(tokens * columns + offset);
    let x = &padded[offset..];
    let factors = random.floats(tokens * rows);

    let mut truth = vec![f32::NAN; rows * tokens];
    dot_rows(Backend::SCALAR, matrix, x, tokens, &mut truth);
    let mut summed_truth = vec![f32::NAN; tokens * columns];
    weighted_sum(Backend::SCALAR, matrix, &factors, tokens, &mut summed_truth);

    // The same weights as plain floats: bfloat16 has the chains of float32 over
    // columns in another order, MXFP4 a contract of its own.
    let mut widened = vec![0.0; rows * columns];
    for (row, values) in widened.chunks_exact_mut(columns.max(1)).enumerate() {
        matrix.decode(row, 0, values);
    }
    let plain = Matrix::of_floats(rows, columns, &widened);
    let places = columns.next_multiple_of(bf16::GROUP);
    let arrange = |values: &[f32]| {
        let mut arranged = vec![0.0; values.len() / columns.max(1) * places];
        let rows = values.chunks_exact(columns.max(1));
        rows.zip(arranged.chunks_exact_mut(places.max(1))).for_each(|(row, out)| {
            bf16::arrange(row, out);
        });
        arranged
    };
    let (arranged, arranged_x) = (arrange(&widened), arrange(x));
    let same_bits = match form {
        Form::Bf16 => (Matrix::of_floats(rows, places, &arranged), &arranged_x[..]),
        Form::F32 | Form::Mxfp4 => (matrix, x),
    };

    for backend in Backend::available() {
        for (matrix, x) in [(matrix, x), same_bits] {
            let mut out = vec![f32::NAN; rows * tokens];
            dot_rows(backend, matrix, x, tokens, &mut out);
            assert_eq!(bits(&out), bits(&truth), "{backend:?} dot");
        }
        for matrix in [matrix, plain] {
            let mut out = vec![f32::NAN; tokens * columns];
            weighted_sum(backend, matrix, &factors, tokens, &mut out);
            assert_eq!(bits(&out), bits(&summed_truth), "{backend:?} weighted sum");
        }
        for token in 0..tokens {
            let mut out = vec![f32::NAN; rows];
            dot_rows(backend, matrix, &x[token * columns..][..columns], 1, &mut out);
            let together: Vec<f32> = (0..rows).map(|row| truth[row * tokens + token]).collect();
            assert_eq!(bits(&out), bits(&together), "{backend:?} token {token} alone");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn plain_forms(rows in 0usize..81, columns in 0usize..1100, tokens in 0usize..21,
                   offset in 0usize..5, seed: u64) {
        check(Form::Bf16, rows, columns, tokens, offset, seed);
        check(Form::F32, rows, columns, tokens, offset, seed);
    }

    #[test]
    fn mxfp4(rows in 0usize..81, groups in 0usize..40, tokens in 0usize..21,
             offset in 0usize..5, seed: u64) {
        check(Form::Mxfp4, rows, groups * 32, tokens, offset, seed);
    }
}

#[test]
fn every_length_up_to_two_blocks() {
    for columns in 0..=1042 {
        // One, few, and so many that they share a panel.
        for tokens in [1, 4, 17] {
            check(Form::Bf16, 5, columns, tokens, columns % 3, 7 + columns as u64);
        }
    }
}

/// Float64 takes over after sixteen blocks of columns, and of rows of a weighted sum.
#[test]
fn every_length_around_sixteen_blocks() {
    for columns in [4064, 4095, 4096, 4097, 4112, 4128, 8192, 8224] {
        for tokens in [1, 2, 7, 17] {
            for form in [Form::Bf16, Form::F32, Form::Mxfp4] {
                if columns % 32 == 0 || !matches!(form, Form::Mxfp4) {
                    check(form, 9, columns, tokens, columns % 3, 11 + columns as u64);
                }
            }
        }
    }
    for rows in [511, 512, 513, 545, 1024] {
        for form in [Form::Bf16, Form::F32, Form::Mxfp4] {
            check(form, rows, 32, 5, 1, 13 + rows as u64);
        }
    }
}

#[test]
fn extreme_scales_agree() {
    for scale in [0, 1, 2, 253, 254] {
        let mut random = Random(99);
        let mut stored = Stored::random(&mut random, Form::Mxfp4, 6, 320, 1);
        stored.scales.fill(scale);
        let x = random.floats(320);
        let mut truth = vec![0.0; 6];
        dot_rows(Backend::SCALAR, stored.matrix(6, 320), &x, 1, &mut truth);
        for backend in Backend::available() {
            let mut out = vec![0.0; 6];
            dot_rows(backend, stored.matrix(6, 320), &x, 1, &mut out);
            let both_nan =
                |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(out.iter().zip(&truth).all(both_nan), "{scale}: {out:?} against {truth:?}");
        }
    }
}

#[test]
fn a_scale_of_255_is_not_silently_zero() {
    let mut random = Random(5);
    let mut stored = Stored::random(&mut random, Form::Mxfp4, 2, 64, 0);
    stored.scales[3] = 255;
    for backend in Backend::available() {
        let mut out = vec![0.0; 2];
        dot_rows(backend, stored.matrix(2, 64), &random.floats(64), 1, &mut out);
        assert!(!out[0].is_nan() && out[1].is_nan());
    }
}

/// If this fails, sums have other bits: raise `CONTRACT`, so that no saved session
/// goes on under arithmetic that it was not made with.
#[test]
fn new_sums_have_a_new_version() {
    // More than sixteen chains of both kinds of sum, and a rest.
    let (rows, columns, tokens) = (550, 4192, 2);
    let mut random = Random(1);
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for form in [Form::Bf16, Form::F32, Form::Mxfp4] {
        let stored = Stored::random(&mut random, form, rows, columns, 0);
        let matrix = stored.matrix(rows, columns);
        let mut out = vec![0.0; rows * tokens];
        dot_rows(Backend::SCALAR, matrix, &random.floats(tokens * columns), tokens, &mut out);
        out.iter().for_each(|value| hash.update(&value.to_le_bytes()));
        let mut summed = vec![0.0; tokens * columns];
        let factors = random.floats(tokens * rows);
        weighted_sum(Backend::SCALAR, matrix, &factors, tokens, &mut summed);
        summed.iter().for_each(|value| hash.update(&value.to_le_bytes()));
    }
    assert_eq!((CONTRACT, hash.digest()), (3, 0x595f_c496_d8ea_2912));
}
