//! bfloat16 and float32 rows, two to a register.

use std::arch::x86_64::*;

use crate::kernels::avx2::plain::{Bf16Row, F32Row, PlainRow};
use crate::kernels::avx512::join;

/// Two rows of a plain stored form side by side.
pub(super) trait PlainRows: PlainRow {
    /// A group of sixteen columns of each row.
    ///
    /// # Safety
    /// A group must be readable at both places, on a CPU with AVX-512.
    unsafe fn widen(first: *const u8, second: *const u8) -> [__m512; 2];
}

impl PlainRows for Bf16Row {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn widen(first: *const u8, second: *const u8) -> [__m512; 2] {
        // SAFETY: the caller vouches for thirty-two readable bytes.
        let first = unsafe { _mm256_loadu_si256(first.cast()) };
        // SAFETY: as above.
        let second = unsafe { _mm256_loadu_si256(second.cast()) };
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
        let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
    }
}

impl PlainRows for F32Row {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn widen(first: *const u8, second: *const u8) -> [__m512; 2] {
        // SAFETY: as the caller vouches.
        unsafe {
            [
                join(F32Row::half::<0>(first), F32Row::half::<0>(second)),
                join(F32Row::half::<1>(first), F32Row::half::<1>(second)),
            ]
        }
    }
}
