//! The only thing that looks back up: a caller can cancel a sweep and see how
//! far it is.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Shared between a sweep and whoever watches it.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    layers_done: AtomicUsize,
}

impl Control {
    /// Asks the sweep to stop; it does within one layer.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Layers that the current call has finished, summed over its chunks.
    pub fn layers_done(&self) -> usize {
        self.layers_done.load(Ordering::Relaxed)
    }

    /// Called by other work after each of its steps, which are to it what layers
    /// are to a sweep.
    ///
    /// # Errors
    /// As [`Control::layer_done`].
    pub fn step_done(&self) -> Result<()> {
        self.layer_done(self.layers_done())
    }

    /// Called by the sweep after each layer.
    ///
    /// # Errors
    /// [`Error::Cancelled`] once [`Control::cancel`] was called.
    pub fn layer_done(&self, layer: usize) -> Result<()> {
        self.layers_done.fetch_add(1, Ordering::Relaxed);
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Cancelled { layer });
        }
        Ok(())
    }
}
