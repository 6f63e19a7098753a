//! MXFP4 (OCP Microscaling Formats v1.0): groups of 32 four-bit values (E2M1)
//! that share one power of two (E8M0).
//!
//! Byte `j` of a row holds columns `2j` (low nibble) and `2j + 1` (high
//! nibble). Swapping the two gives a model that runs and talks nonsense.
//!
//! A decoded value, scale included, has at most two significant bits and is exact
//! in float32, subnormal scales included; values above its range are infinite and
//! scale byte 255 is NaN, both as the format has it.

/// Columns that share a scale.
pub const GROUP: usize = 32;

/// Packed bytes of one group.
pub const GROUP_BYTES: usize = GROUP / 2;

/// Columns that the kernels decode at once: two groups.
pub const PAIR: usize = 2 * GROUP;

/// For each place of an arranged pair, the column of the pair that is there: the
/// order in which interleaving the bytes of decoded values leaves them. Lane `l` of
/// step `s` of eight belongs to group `l / 4` and comes from byte `l % 4 * 2 + s %
/// 4 / 2` of the first (steps 0 to 3) or second half of that group's bytes.
/// Products take both factors in this order, which spares putting decoded weights
/// into another.
pub const ARRANGED: [usize; PAIR] = arranged();

const fn arranged() -> [usize; PAIR] {
    let mut order = [0; PAIR];
    let mut place = 0;
    while place < PAIR {
        let (step, lane) = (place / 8, place % 8);
        let (group, half) = (lane / 4, step / 4);
        order[place] = group * GROUP + half * GROUP / 2 + lane % 4 * 4 + step % 4;
        place += 1;
    }
    order
}

/// Writes a row (whole groups) in the order [`ARRANGED`] to `out`, which is filled up
/// with a group of zeros where the row ends within a pair.
///
/// # Panics
/// If `out` does not hold exactly the pairs that `row` begins.
pub fn arrange(row: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), padded(row.len()));
    let (pairs, rest) = row.as_chunks::<PAIR>();
    let mut last = [0.0; PAIR];
    last[..rest.len()].copy_from_slice(rest);
    for (pair, out) in pairs.iter().chain([&last]).zip(out.as_chunks_mut::<PAIR>().0) {
        *out = ARRANGED.map(|column| pair[column]);
    }
}

/// Places that `columns` take when arranged.
pub const fn padded(columns: usize) -> usize {
    columns.next_multiple_of(PAIR)
}

/// The scale byte that the format defines as NaN.
pub const SCALE_NAN: u8 = 255;

/// The scale byte of 1.
pub const SCALE_ONE: u8 = 127;

/// The sixteen E2M1 values in the order of their codes.
pub const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// `2^(byte - 127)`, or NaN for 255.
#[inline(always)]
pub const fn scale(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        SCALE_NAN => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Decodes one group into 32 floats in column order.
#[inline(always)]
pub fn decode_group(packed: &[u8; GROUP_BYTES], scale_byte: u8, out: &mut [f32; GROUP]) {
    let scale = scale(scale_byte);
    for (byte, pair) in packed.iter().zip(out.as_chunks_mut::<2>().0) {
        pair[0] = VALUES[usize::from(byte & 0x0f)] * scale;
        pair[1] = VALUES[usize::from(byte >> 4)] * scale;
    }
}

/// [`scale`] of every byte, once for each of the four lanes of its group.
pub(crate) static SCALE_LANES: [[f32; 4]; 256] = scale_lanes();

const fn scale_lanes() -> [[f32; 4]; 256] {
    let mut lanes = [[0.0; 4]; 256];
    let mut byte = 0;
    while byte < 256 {
        lanes[byte] = [scale(byte as u8); 4];
        byte += 1;
    }
    lanes
}

/// The high and the low bytes of [`VALUES`] as bfloat16, which hold them
/// exactly: what a byte shuffle needs to decode.
pub(crate) const VALUE_BYTES: [[u8; 16]; 2] = value_bytes();

const fn value_bytes() -> [[u8; 16]; 2] {
    let mut bytes = [[0; 16]; 2];
    let mut code = 0;
    while code < 16 {
        let bits = VALUES[code].to_bits();
        bytes[0][code] = (bits >> 24) as u8;
        bytes[1][code] = (bits >> 16) as u8;
        code += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_decode_low_first() {
        let mut packed = [0; GROUP_BYTES];
        for (j, byte) in packed.iter_mut().enumerate() {
            let low = (2 * j % 16) as u8;
            *byte = low | ((low + 1) << 4);
        }
        let mut out = [0.0; GROUP];
        decode_group(&packed, 127, &mut out);
        let twice: Vec<f32> = VALUES.iter().chain(&VALUES).copied().collect();
        assert_eq!(
            out.map(f32::to_bits).to_vec(),
            twice.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn scales_follow_the_format() {
        assert_eq!(scale(127), 1.0);
        assert_eq!(scale(0), 2f32.powi(-127));
        assert_eq!(scale(254), 2f32.powi(127));
        assert!(scale(255).is_nan());
    }

    #[test]
    fn every_value_fits_a_bfloat16() {
        let [high, low] = VALUE_BYTES;
        for (code, value) in VALUES.iter().enumerate() {
            let bits = (u32::from(high[code]) << 24) | (u32::from(low[code]) << 16);
            assert_eq!(bits, value.to_bits(), "code {code}");
        }
    }

    #[test]
    fn an_arranged_pair_holds_every_column_once() {
        let mut order = ARRANGED;
        order.sort_unstable();
        assert_eq!(order.to_vec(), (0..PAIR).collect::<Vec<_>>());
        let values: Vec<f32> = (0..3 * GROUP).map(|column| column as f32).collect();
        let mut arranged = vec![f32::NAN; 2 * PAIR];
        arrange(&values, &mut arranged);
        // A lane belongs to one group: the first four to the first of a pair.
        for (place, value) in arranged.iter().enumerate() {
            let group = 2 * (place / PAIR) + (place % 8) / 4;
            let expected = if group < 3 { group } else { 0 };
            assert_eq!(*value as usize / GROUP, expected, "place {place}");
        }
    }
}
