//! k3rs: Kimi K3 on one ordinary computer.
//!
//! Layers, each importing only from those before it:
//! `error < io < format < kernels < storage < model < engine < python`.
//! `synth` stands beside the engine and imports only from `error`, `io`, `format`.
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
