//! The one door that long calls go through: the interpreter lock is released,
//! Ctrl-C is noticed within one layer, and progress is reported.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::engine::Control;
use crate::io::threads::not_started;

/// How often signals and progress are looked at.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs `work` on a thread of its own while this one, which alone may handle
/// Python's signals, watches. `progress` is called with the layers
/// done and `layers` in all.
///
/// A signal handler's exception cancels the work and is raised once the work
/// has stopped; so is an exception of `progress`. As the work may just have been
/// completed, `on_interrupted` is called to take its effect back.
pub(super) fn run<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    layers: usize,
    work: impl FnOnce(&Control) -> crate::Result<T> + Send,
    on_interrupted: impl FnOnce(),
) -> PyResult<T> {
    let control = Control::default();
    let progress = progress.map(|callable| callable.clone().unbind());
    let mut interruption = None;
    let outcome = py.detach(|| {
        std::thread::scope(|scope| {
            let (alive, finished) = channel::<()>();
            let worker = std::thread::Builder::new()
                .spawn_scoped(scope, || {
                    let _alive = alive;
                    work(&control)
                })
                .map_err(|error| not_started("a thread to work on", &error));
            let worker = match worker {
                Ok(worker) => worker,
                Err(error) => return Ok(Err(error)),
            };
            let mut reported = 0;
            while finished.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let done = control.layers_done();
                let looked = Python::attach(|py| {
                    py.check_signals()?;
                    match &progress {
                        Some(progress) if done != reported => {
                            progress.call1(py, (done, layers)).map(drop)
                        }
                        _ => Ok(()),
                    }
                });
                reported = done;
                if let Err(error) = looked {
                    interruption.get_or_insert(error);
                    control.cancel();
                }
            }
            worker.join()
        })
    });
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    match interruption {
        Some(error) => {
            on_interrupted();
            Err(error)
        }
        None => Ok(outcome?),
    }
}
