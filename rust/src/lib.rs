//! k3rs: Kimi K3 on one ordinary computer.
//!
//! Layers, each importing only from those before it:
//! `error < io < format < storage < kernels < model < engine < python`.
//! Beside the engine stand `synth` (imports `error`, `io`, `format`) and `measure`
//! (imports `error`, `io`, `kernels`).
//! `ARCHITECTURE.md` walks one token through them.

pub mod engine;
pub mod error;
pub mod format;
pub mod io;
pub mod kernels;
pub mod measure;
pub mod model;
pub mod storage;
pub mod synth;

#[cfg(feature = "python")]
mod python;

pub use error::{Error, Result};
