//! Arithmetic on slices. Knows nothing of files, layers or tokens.
//!
//! `scalar` is the truth. Everything else must give its bits: `avx2` and `avx512`
//! by tests over every length and alignment, the small functions because one body is
//! compiled once for each instruction set ([`backend::for_each_backend`]).

pub mod aligned;
pub mod backend;
pub mod bf16;
pub mod math;
pub mod matmul;
pub mod matrix;
pub mod mxfp4;
pub mod rms_norm;
pub mod scalar;
pub mod situ_glu;
pub mod softmax;

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
