//! Floats that begin at a cache line, so that no register of them lies across two: the
//! CPU would fetch both.

use std::ops::{Deref, DerefMut};

/// Bytes that a CPU fetches at once.
pub const CACHE_LINE: usize = 64;

/// Floats of a cache line.
pub const LINE_FLOATS: usize = CACHE_LINE / size_of::<f32>();

/// A growing row of floats.
#[derive(Debug, Clone, Default)]
pub struct AlignedFloats {
    storage: Vec<f32>,
    /// Where in `storage` the cache line begins.
    start: usize,
}

impl AlignedFloats {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let mut storage = vec![0.0; len + LINE_FLOATS - 1];
        let start = first_line(&storage);
        storage.truncate(start + len);
        AlignedFloats { storage, start }
    }

    /// Makes room for `more` floats, if there is not, and for no others.
    pub fn reserve_exact(&mut self, more: usize) {
        if self.storage.capacity() - self.storage.len() >= more {
            return;
        }
        let mut storage = Vec::with_capacity(self.len() + more + LINE_FLOATS - 1);
        let start = first_line(&storage);
        storage.resize(start, 0.0);
        storage.extend_from_slice(self);
        *self = AlignedFloats { storage, start };
    }

    /// Appends `values`.
    pub fn extend_from_slice(&mut self, values: &[f32]) {
        self.reserve_exact(values.len());
        self.storage.extend_from_slice(values);
    }

    /// Floats that there is room for.
    pub fn capacity(&self) -> usize {
        self.storage.capacity() - self.start
    }
}

/// Floats before the first cache line of an allocation.
fn first_line(storage: &[f32]) -> usize {
    storage.as_ptr().align_offset(CACHE_LINE).min(LINE_FLOATS - 1)
}

impl Deref for AlignedFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.storage[self.start..]
    }
}

impl DerefMut for AlignedFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.storage[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_begin_at_a_cache_line_and_survive_growth() {
        let mut floats = AlignedFloats::default();
        let mut expected = Vec::new();
        for count in [0, 1, 15, 16, 100, 5000] {
            assert!(AlignedFloats::zeroed(count).iter().all(|value| *value == 0.0));
            assert_eq!(AlignedFloats::zeroed(count).len(), count);
            let values: Vec<f32> = (0..count).map(|value| value as f32 + 0.5).collect();
            floats.extend_from_slice(&values);
            expected.extend_from_slice(&values);
            assert_eq!(&floats[..], &expected[..]);
            if count > 0 {
                assert_eq!(floats.as_ptr() as usize % CACHE_LINE, 0);
                assert_eq!(AlignedFloats::zeroed(count).as_ptr() as usize % CACHE_LINE, 0);
            }
        }
    }
}
