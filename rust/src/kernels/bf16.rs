//! bfloat16: the upper half of a float32, so widening is a shift and exact.
//!
//! A float's worth of bytes holds two neighbours: a shift widens the first and a
//! mask the second. Kernels that take all first ones of a group together, then all
//! second ones, need nothing else.

/// Columns that the kernels widen at once.
pub const GROUP: usize = 16;

/// For each place of an arranged group, the column of the group that is there: the
/// even ones, then the odd ones. Products take both factors in this order.
pub const ARRANGED: [usize; GROUP] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];

/// Writes a row in the order [`ARRANGED`] to `out`, which is filled up with zeros.
///
/// # Panics
/// If `out` does not hold exactly the groups that `row` begins.
pub fn arrange(row: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), row.len().next_multiple_of(GROUP));
    let (groups, rest) = row.as_chunks::<GROUP>();
    let mut last = [0.0; GROUP];
    last[..rest.len()].copy_from_slice(rest);
    for (group, out) in groups.iter().chain([&last]).zip(out.as_chunks_mut::<GROUP>().0) {
        *out = ARRANGED.map(|column| group[column]);
    }
}

/// Widens one value from its two little-endian bytes.
#[inline(always)]
pub fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Widens `bytes.len() / 2` values.
///
/// # Panics
/// If `bytes` does not hold exactly two bytes for each value of `out`.
pub fn widen_slice(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len());
    for (pair, value) in bytes.as_chunks::<2>().0.iter().zip(out) {
        *value = widen(*pair);
    }
}
