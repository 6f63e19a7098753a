//! The latent cache: per position the normalised latent and the shared key
//! part, and nothing per head. 576 floats at the released sizes, where the
//! expanded keys and values of all heads would be 30,720.

use crate::kernels::aligned::AlignedFloats;

/// Rows that are made room for at a time.
const GROWTH: usize = 256;

/// One layer's cache.
#[derive(Debug, Clone)]
pub struct MlaCache {
    width: usize,
    values: AlignedFloats,
}

impl MlaCache {
    /// An empty cache of rows of `width` floats.
    pub fn new(width: usize) -> Self {
        MlaCache { width, values: AlignedFloats::default() }
    }

    /// Positions in it.
    pub fn positions(&self) -> usize {
        self.values.len() / self.width
    }

    /// `[positions, width]`.
    pub fn rows(&self) -> &[f32] {
        &self.values
    }

    /// Floats of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Appends whole rows. Grows in steps, not by doubling: the memory plan
    /// counts what is there.
    pub fn append(&mut self, rows: &[f32]) {
        if self.values.len() + rows.len() > self.values.capacity() {
            self.values.reserve_exact(rows.len().next_multiple_of(GROWTH * self.width));
        }
        self.values.extend_from_slice(rows);
    }
}
