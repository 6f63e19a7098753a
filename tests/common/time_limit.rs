//! A test that waits for a disk must end, also when the answer never comes.

use std::sync::mpsc;
use std::time::Duration;

/// Far beyond what any test takes, far below anyone's patience.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Runs `body` on a thread and fails when it panics or takes too long.
pub fn within_time(body: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let runner = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    match finished.recv_timeout(TIME_MAX) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {TIME_MAX:?}"),
        _ => runner.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}
