//! bfloat16: the upper half of a float32, so widening is a shift and exact.

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
