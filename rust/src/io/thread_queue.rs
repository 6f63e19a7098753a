//! Positioned reads on a pool of threads: enough of them keep a device busy,
//! and every system has them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::error::Result;
use crate::io::file::WeightFile;
use crate::io::queue::{ReadQueue, ReadRequest, Urgency, perform};
use crate::io::threads::not_started;

/// A queue served by reader threads until it is dropped.
#[derive(Debug)]
pub struct ThreadQueue {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    files: Arc<Vec<WeightFile>>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    now: VecDeque<ReadRequest>,
    ahead: VecDeque<ReadRequest>,
    closed: bool,
}

impl ThreadQueue {
    /// Starts `threads` readers over `files`, fewer if the system allows no more.
    ///
    /// # Errors
    /// [`crate::Error::System`] when not even one thread can be started.
    pub fn new(files: Arc<Vec<WeightFile>>, threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared { files, waiting: Mutex::default(), changed: Condvar::new() });
        let mut readers = Vec::new();
        for index in 0..threads.max(1) {
            let shared = Arc::clone(&shared);
            let reader = std::thread::Builder::new()
                .name(format!("k3rs-read-{index}"))
                .stack_size(256 << 10)
                .spawn(move || shared.serve());
            match reader {
                Ok(reader) => readers.push(reader),
                Err(error) if readers.is_empty() => {
                    return Err(not_started("a reader thread", &error));
                }
                Err(_) => break,
            }
        }
        Ok(ThreadQueue { shared, readers })
    }
}

impl ReadQueue for ThreadQueue {
    fn submit(&self, request: ReadRequest) {
        let mut waiting = self.shared.lock();
        match request.urgency {
            Urgency::Now => waiting.now.push_back(request),
            Urgency::Ahead => waiting.ahead.push_back(request),
        }
        drop(waiting);
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        while let Some(request) = self.next() {
            perform(&self.files, request);
        }
    }

    fn next(&self) -> Option<ReadRequest> {
        let mut waiting = self.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(request) = waiting.now.pop_front().or_else(|| waiting.ahead.pop_front()) {
                return Some(request);
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for reader in self.readers.drain(..) {
            // A reader that panicked has nothing left to give back.
            let _ = reader.join();
        }
    }
}
