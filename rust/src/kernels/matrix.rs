//! A matrix as it is stored: a view of bytes, of shape `[rows, columns]`.

use std::ops::{Deref, Range};

use rayon::prelude::*;

use crate::kernels::aligned::AlignedFloats;
use crate::kernels::{bf16, mxfp4};

/// The stored elements, row-major. Bytes need no alignment.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// Two bytes an element.
    Bf16(&'a [u8]),
    /// Four bytes an element.
    F32(&'a [u8]),
    /// Half a byte an element and one scale byte for 32 of a row.
    Mxfp4 {
        /// `rows * columns / 2` bytes.
        packed: &'a [u8],
        /// `rows * columns / 32` bytes.
        scales: &'a [u8],
    },
}

/// A view of `rows * columns` stored weights.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    rows: usize,
    columns: usize,
    weights: Weights<'a>,
}

/// What [`Matrix::arranged`] returns.
#[derive(Debug)]
pub enum Arranged<'x> {
    /// The order is that of the columns.
    AsTheyAre(&'x [f32]),
    /// Another one.
    Moved(AlignedFloats),
}

impl Deref for Arranged<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Arranged::AsTheyAre(values) => values,
            Arranged::Moved(values) => values,
        }
    }
}

impl<'a> Matrix<'a> {
    /// A view of `weights`.
    ///
    /// # Panics
    /// If the number of bytes is not that of the shape, or MXFP4 rows are not
    /// whole groups: shapes are checked when a checkpoint is opened.
    pub fn new(rows: usize, columns: usize, weights: Weights<'a>) -> Self {
        match weights {
            Weights::Bf16(bytes) => assert_eq!(bytes.len(), rows * columns * 2),
            Weights::F32(bytes) => assert_eq!(bytes.len(), rows * columns * 4),
            Weights::Mxfp4 { packed, scales } => {
                assert!(columns.is_multiple_of(mxfp4::GROUP), "{columns} columns");
                assert_eq!(packed.len(), rows * columns / 2);
                assert_eq!(scales.len(), rows * columns / mxfp4::GROUP);
            }
        }
        Matrix { rows, columns, weights }
    }

    /// A view of floats that this process computed, e.g. a cache.
    pub fn of_floats(rows: usize, columns: usize, values: &'a [f32]) -> Self {
        Matrix::new(rows, columns, Weights::F32(bytemuck::cast_slice(values)))
    }

    /// Number of rows (outputs).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The stored elements.
    pub fn weights(&self) -> Weights<'a> {
        self.weights
    }

    /// The rows in `range`.
    pub fn row_range(&self, range: Range<usize>) -> Matrix<'a> {
        let part = |bytes: &'a [u8], row_bytes: usize| {
            &bytes[range.start * row_bytes..range.end * row_bytes]
        };
        let weights = match self.weights {
            Weights::Bf16(bytes) => Weights::Bf16(part(bytes, self.columns * 2)),
            Weights::F32(bytes) => Weights::F32(part(bytes, self.columns * 4)),
            Weights::Mxfp4 { packed, scales } => Weights::Mxfp4 {
                packed: part(packed, self.columns / 2),
                scales: part(scales, self.columns / mxfp4::GROUP),
            },
        };
        Matrix { rows: range.len(), columns: self.columns, weights }
    }

    /// Columns as products take them: see [`Matrix::arranged`].
    pub fn arranged_columns(&self) -> usize {
        match self.weights {
            Weights::Bf16(_) | Weights::F32(_) => self.columns.next_multiple_of(bf16::GROUP),
            Weights::Mxfp4 { .. } => mxfp4::padded(self.columns),
        }
    }

    /// Rows of one value for each column, in the order in which products with this
    /// matrix take them, filled up with zeros to whole groups: [`bf16::ARRANGED`],
    /// [`mxfp4::ARRANGED`], or float32 as it is.
    pub fn arranged<'x>(&self, values: &'x [f32]) -> Arranged<'x> {
        let arrange = match self.weights {
            Weights::Bf16(_) => bf16::arrange,
            Weights::F32(_) if self.columns.is_multiple_of(bf16::GROUP) => {
                return Arranged::AsTheyAre(values);
            }
            Weights::F32(_) => fill_up,
            Weights::Mxfp4 { .. } => mxfp4::arrange,
        };
        let (columns, places) = (self.columns.max(1), self.arranged_columns().max(1));
        let mut arranged = AlignedFloats::zeroed(values.len() / columns * places);
        if values.len() == columns {
            arrange(values, &mut arranged);
        } else {
            let rows = values.par_chunks_exact(columns);
            rows.zip(arranged.par_chunks_exact_mut(places))
                .for_each(|(row, out)| arrange(row, out));
        }
        Arranged::Moved(arranged)
    }

    /// Widens columns `first..first + out.len()` of one row, exactly.
    ///
    /// # Panics
    /// If they are not inside the row, or an MXFP4 range does not start at a
    /// group or does not cover whole groups.
    pub fn decode(&self, row: usize, first: usize, out: &mut [f32]) {
        let start = row * self.columns + first;
        assert!(row < self.rows && first + out.len() <= self.columns);
        match self.weights {
            Weights::Bf16(bytes) => {
                bf16::widen_slice(&bytes[start * 2..(start + out.len()) * 2], out);
            }
            Weights::F32(bytes) => {
                let stored = &bytes[start * 4..(start + out.len()) * 4];
                for (value, stored) in out.iter_mut().zip(stored.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*stored);
                }
            }
            Weights::Mxfp4 { packed, scales } => {
                let (groups, rest) = out.as_chunks_mut::<{ mxfp4::GROUP }>();
                assert!(rest.is_empty() && first.is_multiple_of(mxfp4::GROUP));
                let first_group = start / mxfp4::GROUP;
                let packed = packed[start / 2..].as_chunks::<{ mxfp4::GROUP_BYTES }>().0;
                for (g, group) in groups.iter_mut().enumerate() {
                    mxfp4::decode_group(&packed[g], scales[first_group + g], group);
                }
            }
        }
    }
}

/// Copies a row to the beginning of `out`, which is zeroed.
fn fill_up(row: &[f32], out: &mut [f32]) {
    out[..row.len()].copy_from_slice(row);
}
