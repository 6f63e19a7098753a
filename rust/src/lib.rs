//! k3rs: Kimi K3 on one ordinary computer.
//!
//! Layers, each importing only from those before it:
//! `error < io < format < kernels < storage < model < engine < python`.
//! `ARCHITECTURE.md` walks one token through them.

pub mod engine;
pub mod error;
pub mod format;
pub mod io;
pub mod kernels;
pub mod model;
pub mod storage;

#[cfg(feature = "python")]
mod python;

pub use error::{Error, Result};
