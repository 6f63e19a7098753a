//! A disk that misbehaves on purpose: the real files, but answers come late and
//! out of order, reads fall short, are interrupted or fail.
//!
//! It sits at the very bottom, so everything above it is the code that users
//! run. What happens to a request follows from the seed and the request's
//! number alone; only how requests overlap is left to the machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::io::extent::Extent;
use crate::io::file::WeightFile;
use crate::io::queue::{ReadQueue, ReadRequest, perform_by};
use crate::io::threads::not_started;

/// Raw code of an input/output error.
const EIO: i32 = 5;

/// Interruptions in a row after which a read goes through, so that none can
/// take forever.
const INTERRUPTS_MAX: u32 = 3;

/// How a [`SimulatedQueue`] treats requests. The default is a perfect disk.
#[derive(Debug, Clone, Default)]
pub struct Misbehaviour {
    /// Everything random follows from it.
    pub seed: u64,
    /// Longest delay of an answer in microseconds. Each request draws its own,
    /// so answers come in another order than their requests.
    pub delay_us_max: u64,
    /// Of a hundred reads, so many give fewer bytes than asked for.
    pub short_percent: u8,
    /// Of a hundred reads, so many are interrupted by a signal (EINTR).
    pub interrupt_percent: u8,
    /// Requests that fail with EIO, by their number; the first is 0.
    pub failing_requests: Vec<u64>,
    /// Places whose bytes cannot be read: a read that touches one fails with EIO.
    pub failing_extents: Vec<Extent>,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Incidents {
    /// Requests submitted.
    pub requests: u64,
    /// Requests answered before one that was submitted earlier.
    pub overtakes: u64,
    /// Reads that gave fewer bytes than asked for.
    pub short_reads: u64,
    /// Reads that were interrupted.
    pub interrupts: u64,
    /// Reads that failed.
    pub failures: u64,
}

/// A [`ReadQueue`] over real files, driven by a seed.
///
/// ```
/// use std::sync::{Arc, mpsc};
/// use _k3rs::io::buffer::AlignedBuffer;
/// use _k3rs::io::extent::{Extent, FileId};
/// use _k3rs::io::file::{Access, WeightFile};
/// use _k3rs::io::queue::{ReadQueue, ReadRequest, Urgency, room_for};
/// use _k3rs::io::sim_queue::{Misbehaviour, SimulatedQueue};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("weights");
/// std::fs::write(&path, b"abcdefgh")?;
/// let files = Arc::new(vec![WeightFile::open(&path, Access::Buffered)?]);
/// let how = Misbehaviour { seed: 7, short_percent: 90, ..Misbehaviour::default() };
/// let queue = SimulatedQueue::new(files, how)?;
///
/// let extents = vec![Extent { file: FileId(0), offset: 2, length: 5 }];
/// let buffer = AlignedBuffer::new(room_for(&extents))?;
/// let (reply, answers) = mpsc::channel();
/// queue.submit(ReadRequest { tag: 0, extents, buffer, urgency: Urgency::Now, reply });
/// let answer = answers.recv()?;
/// let start = answer.starts?[0];
/// assert_eq!(&answer.buffer[start..start + 5], b"cdefg");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SimulatedQueue {
    shared: Arc<Shared>,
    server: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    files: Arc<Vec<WeightFile>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    how: Arc<Misbehaviour>,
    waiting: BinaryHeap<Reverse<Waiting>>,
    incidents: Incidents,
    /// Largest number of a request that was answered.
    answered_max: Option<u64>,
    closed: bool,
}

/// A request that is answered at `due`.
#[derive(Debug)]
struct Waiting {
    due: Instant,
    number: u64,
    how: Arc<Misbehaviour>,
    request: ReadRequest,
}

impl SimulatedQueue {
    /// Starts the thread that answers requests for `files`.
    ///
    /// # Errors
    /// [`crate::Error::System`] when the thread cannot be started.
    pub fn new(files: Arc<Vec<WeightFile>>, how: Misbehaviour) -> Result<Self> {
        let state = State {
            how: Arc::new(how),
            waiting: BinaryHeap::new(),
            incidents: Incidents::default(),
            answered_max: None,
            closed: false,
        };
        let shared = Arc::new(Shared { files, state: Mutex::new(state), changed: Condvar::new() });
        let serving = Arc::clone(&shared);
        let server = std::thread::Builder::new()
            .name("k3rs-simulated-disk".into())
            .spawn(move || serving.serve())
            .map_err(|error| not_started("the thread of a simulated disk", &error))?;
        Ok(SimulatedQueue { shared, server: Some(server) })
    }

    /// Treats what is submitted from now on in another way, and counts requests
    /// from 0 again.
    pub fn change(&self, how: Misbehaviour) {
        let mut state = self.shared.lock();
        state.how = Arc::new(how);
        state.incidents = Incidents::default();
        state.answered_max = None;
    }

    /// What happened since it was opened or changed.
    pub fn incidents(&self) -> Incidents {
        self.shared.lock().incidents
    }
}

impl ReadQueue for SimulatedQueue {
    fn submit(&self, request: ReadRequest) {
        let mut state = self.shared.lock();
        let number = state.incidents.requests;
        state.incidents.requests += 1;
        let delay = Random::of(state.how.seed, number).below(state.how.delay_us_max + 1);
        let due = Instant::now() + Duration::from_micros(delay);
        let how = Arc::clone(&state.how);
        state.waiting.push(Reverse(Waiting { due, number, how, request }));
        drop(state);
        self.shared.changed.notify_one();
    }
}

impl Drop for SimulatedQueue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
        if let Some(server) = self.server.take() {
            // A server that panicked has nothing left to give back.
            let _ = server.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        while let Some(waiting) = self.next() {
            self.answer(waiting);
        }
    }

    /// The request that is due first, once it is due.
    fn next(&self) -> Option<Waiting> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            let due = state.waiting.peek().map(|Reverse(first)| first.due);
            state = match due {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(due) if due > now => {
                    let waited = self.changed.wait_timeout(state, due - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some(_) => {
                    let Reverse(first) = state.waiting.pop()?;
                    if state.answered_max.is_some_and(|number| number > first.number) {
                        state.incidents.overtakes += 1;
                    }
                    state.answered_max = state.answered_max.max(Some(first.number));
                    return Some(first);
                }
            };
        }
    }

    fn answer(&self, waiting: Waiting) {
        let Waiting { number, how, request, .. } = waiting;
        let broken = how.failing_requests.contains(&number)
            || request.extents.iter().any(|extent| how.touches_failure(extent));
        let mut random = Random::of(!how.seed, number);
        let mut interrupts = 0;
        let mut read_at = |file: &File, out: &mut [u8], offset: u64| {
            if broken {
                self.lock().incidents.failures += 1;
                return Err(IoError::from_raw_os_error(EIO));
            }
            if interrupts < INTERRUPTS_MAX && random.percent(how.interrupt_percent) {
                interrupts += 1;
                self.lock().incidents.interrupts += 1;
                return Err(ErrorKind::Interrupted.into());
            }
            interrupts = 0;
            let mut count_max = out.len();
            if count_max > 1 && random.percent(how.short_percent) {
                self.lock().incidents.short_reads += 1;
                count_max = 1 + random.below(count_max as u64 - 1) as usize;
            }
            let count = file.read_at(out, offset)?.min(count_max);
            // What lies behind a short count must not pass for data.
            out[count..].fill(0xff);
            Ok(count)
        };
        perform_by(&mut read_at, &self.files, request);
    }
}

impl Misbehaviour {
    fn touches_failure(&self, read: &Extent) -> bool {
        self.failing_extents.iter().any(|failing| {
            failing.file == read.file && failing.offset < read.end() && read.offset < failing.end()
        })
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

/// A small generator: splitmix64.
struct Random(u64);

impl Random {
    fn of(seed: u64, number: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.rotate_left(32))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn percent(&mut self, percent: u8) -> bool {
        self.below(100) < u64::from(percent)
    }
}
