//! MXFP4 (OCP Microscaling Formats v1.0): groups of 32 four-bit values (E2M1)
//! that share one power of two (E8M0).
//!
//! Byte `j` of a row holds columns `2j` (low nibble) and `2j + 1` (high
//! nibble). Swapping the two gives a model that runs and talks nonsense.
//!
//! A decoded value, scale included, has at most two significant bits and is exact
//! in float32, subnormal scales included; values above its range are infinite and
//! scale byte 255 is NaN, both as the format has it.

use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::scalar::{BLOCK, LANES};

/// Columns that share a scale.
pub const GROUP: usize = 32;

/// Packed bytes of one group.
pub const GROUP_BYTES: usize = GROUP / 2;

/// Packed bytes of a block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// For each of the eight lanes of a sum, the group of a block of [`BLOCK`] columns
/// that it belongs to: the order in which transposing four registers of two groups
/// each leaves them. All steps of a lane share one scale.
pub const LANE_GROUPS: [usize; LANES] = [0, 2, 4, 6, 1, 3, 5, 7];

/// For each place of an arranged block, the column of the block that is there: step
/// `s` of lane `l` is column `s` of group `LANE_GROUPS[l]`. Products take both factors
/// in this order, which spares putting decoded weights into another.
pub const ARRANGED: [usize; BLOCK] = arranged();

const fn arranged() -> [usize; BLOCK] {
    let mut order = [0; BLOCK];
    let mut place = 0;
    while place < BLOCK {
        order[place] = LANE_GROUPS[place % LANES] * GROUP + place / LANES;
        place += 1;
    }
    order
}

/// Writes a row (whole groups) in the order [`ARRANGED`] to `out`, which is filled up
/// with groups of zeros where the row ends within a block.
///
/// # Panics
/// If `out` does not hold exactly the blocks that `row` begins.
pub fn arrange(row: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), padded(row.len()));
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    let mut last = [0.0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    for (block, out) in blocks.iter().chain([&last]).zip(out.as_chunks_mut::<BLOCK>().0) {
        *out = ARRANGED.map(|column| block[column]);
    }
}

/// Places that `columns` take when arranged.
pub const fn padded(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
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

/// Stored rows, cut into blocks of [`BLOCK`] columns.
#[derive(Clone, Copy)]
pub(crate) struct BlockRows<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    /// Of a row.
    groups: usize,
}

/// A block as it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) packed: &'a [u8; BLOCK_BYTES],
    pub(crate) scales: &'a [u8; LANES],
}

/// A block whose last groups are not stored: zeros with a scale of 1 stand for them.
pub(crate) struct LastBlock {
    packed: [u8; BLOCK_BYTES],
    scales: [u8; LANES],
}

impl Stored<'_> {
    /// Nothing but zeros.
    pub(crate) const NONE: Self = Stored { packed: &[0; BLOCK_BYTES], scales: &[0; LANES] };
}

impl<'a> BlockRows<'a> {
    /// # Panics
    /// If `matrix` is stored in another form.
    pub(crate) fn of(matrix: Matrix<'a>) -> Self {
        let Weights::Mxfp4 { packed, scales } = matrix.weights() else {
            unreachable!("kernels of MXFP4 are asked for its products only")
        };
        BlockRows { packed, scales, groups: matrix.columns() / GROUP }
    }

    /// Whole blocks of a row.
    #[inline]
    pub(crate) fn whole(&self) -> usize {
        self.groups / LANES
    }

    /// Whole block `block` of a row.
    ///
    /// # Panics
    /// If it is beyond the last row.
    #[inline]
    pub(crate) fn block(&self, row: usize, block: usize) -> Stored<'a> {
        let group = row * self.groups + block * LANES;
        let packed = self.packed[group * GROUP_BYTES..].first_chunk();
        let (Some(packed), Some(scales)) = (packed, self.scales[group..].first_chunk()) else {
            panic!("row {row} has no block {block}")
        };
        Stored { packed, scales }
    }

    /// What follows the whole blocks of a row.
    #[cold]
    pub(crate) fn last(&self, row: usize) -> LastBlock {
        let mut last = LastBlock { packed: [0; BLOCK_BYTES], scales: [SCALE_ONE; LANES] };
        let groups = row * self.groups + self.whole() * LANES..(row + 1) * self.groups;
        last.scales[..groups.len()].copy_from_slice(&self.scales[groups.clone()]);
        let bytes = groups.start * GROUP_BYTES..groups.end * GROUP_BYTES;
        last.packed[..bytes.len()].copy_from_slice(&self.packed[bytes]);
        last
    }
}

impl LastBlock {
    #[inline]
    pub(crate) fn stored(&self) -> Stored<'_> {
        Stored { packed: &self.packed, scales: &self.scales }
    }
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
    fn an_arranged_block_holds_every_column_once() {
        let mut order = ARRANGED;
        order.sort_unstable();
        assert_eq!(order.to_vec(), (0..BLOCK).collect::<Vec<_>>());
        let values: Vec<f32> = (0..11 * GROUP).map(|column| column as f32).collect();
        let mut arranged = vec![f32::NAN; 2 * BLOCK];
        arrange(&values, &mut arranged);
        // A lane belongs to one group, and meets its columns in their order.
        for (place, value) in arranged.iter().enumerate() {
            let group = place / BLOCK * LANES + LANE_GROUPS[place % LANES];
            let expected = group * GROUP + place % BLOCK / LANES;
            let expected = if group < 11 { expected } else { 0 };
            assert_eq!(*value as usize, expected, "place {place}");
        }
    }
}
