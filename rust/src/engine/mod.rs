//! The engine owns files, weights in memory, threads and scratch; a session
//! owns all that grows with its text.

pub mod control;
pub mod describe;
pub mod fingerprint;
pub mod footprint;
pub mod pack;
pub mod packed_trunk;
pub mod report;
pub mod session;
pub mod session_file;
mod sweep;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::packed_trunk::PackedTrunk;
use crate::error::{Error, Result};
use crate::format::catalog::{Catalog, TensorEntry};
use crate::io::extent::FileId;
use crate::io::file::{Access, WeightFile};
use crate::io::queue::ReadQueue;
use crate::io::thread_queue::ThreadQueue;
use crate::io::threads::compute_pool;
use crate::kernels::backend::Backend;
use crate::model::binding::{BoundModel, Placement, bind};
use crate::storage::counters::Counters;
use crate::storage::expert_cache::ExpertCache;
use crate::storage::host_memory;
use crate::storage::memory_plan::{Budget, Footprint, MemoryPlan, PlanRequest, TILE_BYTES};
use crate::storage::trunk_stream::TrunkStream;

pub use control::Control;
pub use report::Report;
pub use session::Session;
pub use sweep::{Logits, RecordedRoutes, SweepOutput, Wanted};

/// Reads in flight that keep common devices busy.
const READER_THREADS: usize = 16;

/// How to open a checkpoint.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// `None` takes what the machine and its control groups leave.
    pub budget: Option<Budget>,
    /// Positions that a session may reach without leaving the plan.
    pub positions: usize,
    /// Tokens of a chunk; `None` lets the plan decide.
    pub chunk: Option<usize>,
    /// Compute threads; `None` is one a core.
    pub threads: Option<usize>,
    /// Instruction set.
    pub backend: Backend,
    /// Direct or buffered reads.
    pub access: Access,
    /// Reader threads.
    pub readers: usize,
    /// Largest tile in bytes.
    pub tile_bytes: usize,
    /// Keep this many of the first layers, for study.
    pub layers: Option<usize>,
    /// Directory of a packed trunk to stream from.
    pub trunk: Option<PathBuf>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            budget: None,
            positions: 4096,
            chunk: None,
            threads: None,
            backend: Backend::available()[0],
            access: Access::Auto,
            readers: READER_THREADS,
            tile_bytes: TILE_BYTES,
            layers: None,
            trunk: None,
        }
    }
}

/// An open checkpoint.
pub struct Engine {
    catalog: Catalog,
    files: Arc<Vec<WeightFile>>,
    model: BoundModel,
    fingerprint: String,
    plan: MemoryPlan,
    budget_source: String,
    backend: Backend,
    threads: rayon::ThreadPool,
    /// One sweep at a time: all sessions share the streams.
    streams: Mutex<Streams>,
    /// Readable while a sweep runs.
    counters: Arc<Counters>,
}

struct Streams {
    trunk: TrunkStream,
    experts: ExpertCache,
    /// A file that something wrote to after it was opened.
    changed: Option<usize>,
}

impl Engine {
    /// Opens the checkpoint in `directory`, which is never written to.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Checkpoint`] for what is not understood,
    /// [`Error::MemoryBudget`] before anything is loaded, [`Error::Io`],
    /// [`Error::System`].
    pub fn open(directory: &Path, options: &EngineOptions) -> Result<Engine> {
        let prepared = Prepared::open(directory, options)?;
        // The last threads to start: the others cannot be fewer.
        let queue = Arc::new(ThreadQueue::new(Arc::clone(&prepared.files), options.readers)?);
        Engine::new(prepared, queue, options.backend)
    }

    /// [`Engine::open`] over any read queue: the seam for simulated disks.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn with_queue(
        catalog: Catalog,
        files: Arc<Vec<WeightFile>>,
        queue: Arc<dyn ReadQueue>,
        options: &EngineOptions,
    ) -> Result<Engine> {
        let threads = compute_pool(options.threads)?;
        Engine::new(Prepared::new(threads, catalog, files, None, options)?, queue, options.backend)
    }

    fn new(prepared: Prepared, queue: Arc<dyn ReadQueue>, backend: Backend) -> Result<Engine> {
        let Prepared { threads, catalog, files, model, fingerprint, plan, budget_source } =
            prepared;
        let counters = Arc::new(Counters::default());
        let trunk = TrunkStream::new(
            Arc::clone(&queue),
            &model.walk,
            &plan.pinned,
            model.head,
            plan.ring_buffers,
            Arc::clone(&counters),
        )?;
        let experts = ExpertCache::new(
            queue,
            Arc::clone(&catalog.experts),
            plan.expert_slots,
            plan.expert_slot_bytes,
            Arc::clone(&counters),
        )?;
        Ok(Engine {
            catalog,
            files,
            model,
            fingerprint,
            plan,
            budget_source,
            backend,
            threads,
            streams: Mutex::new(Streams { trunk, experts, changed: None }),
            counters,
        })
    }

    /// What is in the checkpoint.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// How memory is divided.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Where the budget comes from, in words.
    pub fn budget_source(&self) -> &str {
        &self.budget_source
    }

    /// Instruction set in use.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Compute threads in use.
    pub fn thread_count(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Identifies the model; see [`fingerprint::fingerprint`].
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// What was read and waited for since open; does not wait for a sweep.
    pub fn report(&self) -> Report {
        let totals = self.counters.totals();
        let buffered = self.files.iter().find(|file| !file.is_direct());
        let why = match buffered.or(self.files.first()) {
            Some(file) => file.why().to_owned(),
            None => "there are no weight files".to_owned(),
        };
        Report {
            io: report::IoReport {
                trunk_bytes_read: totals.trunk_bytes_read,
                trunk_bytes_used: totals.trunk_bytes_used,
                expert_bytes_read: totals.expert_bytes_read,
                read_wait_s: totals.wait.as_secs_f64(),
                direct: buffered.is_none(),
                why,
            },
            experts: report::ExpertReport {
                requests: totals.expert_requests,
                hits: totals.expert_hits,
                distinct: totals.expert_requests - totals.expert_hits,
            },
            memory: report::MemoryReport { peak_rss_bytes: host_memory::peak_resident_bytes() },
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        // Nothing in a stream can be half-changed by a panic elsewhere in a
        // sweep: it restarts from any state.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The plan that [`Engine::open`] would follow, without loading any tile.
///
/// # Errors
/// As [`Engine::open`].
pub fn plan(directory: &Path, options: &EngineOptions) -> Result<(MemoryPlan, String)> {
    let prepared = Prepared::open(directory, options)?;
    Ok((prepared.plan, prepared.budget_source))
}

/// All that stands before the first tile is read.
struct Prepared {
    threads: rayon::ThreadPool,
    catalog: Catalog,
    files: Arc<Vec<WeightFile>>,
    model: BoundModel,
    fingerprint: String,
    plan: MemoryPlan,
    budget_source: String,
}

impl Prepared {
    fn open(directory: &Path, options: &EngineOptions) -> Result<Self> {
        let threads = compute_pool(options.threads)?;
        let catalog = threads.install(|| Catalog::open_first(directory, options.layers))?;
        let mut files = catalog.open_files(options.access)?;
        let id = FileId(files.len() as u16);
        let trunk = options.trunk.as_deref().map(|trunk| PackedTrunk::open(trunk, id));
        let trunk = trunk.transpose()?;
        if let Some(trunk) = &trunk {
            files.push(trunk.file(options.access)?);
        }
        Prepared::new(threads, catalog, Arc::new(files), trunk, options)
    }

    fn new(
        threads: rayon::ThreadPool,
        catalog: Catalog,
        files: Arc<Vec<WeightFile>>,
        trunk: Option<PackedTrunk>,
        options: &EngineOptions,
    ) -> Result<Self> {
        let place = trunk.as_ref().map(|trunk| |entry: &TensorEntry| trunk.extent(entry));
        let place = place.as_ref().map(|place| place as &Placement<'_>);
        let model = threads.install(|| bind(&catalog, &files, options.tile_bytes, place))?;
        let fingerprint = threads.install(|| fingerprint::fingerprint(&catalog, &files, &model))?;
        if let Some(trunk) = &trunk {
            trunk.check(&fingerprint)?;
        }
        let footprint = footprint::of(&catalog, &model, threads.current_num_threads(), options);
        let (budget, budget_source) = match options.budget {
            Some(budget) => (budget, "as asked for".to_owned()),
            None => automatic_budget(&footprint)?,
        };
        let request = PlanRequest { budget, positions: options.positions, chunk: options.chunk };
        let plan = MemoryPlan::new(&footprint, &request)?;
        Ok(Prepared { threads, catalog, files, model, fingerprint, plan, budget_source })
    }
}

/// What the tightest limit leaves after a margin for everybody else.
fn automatic_budget(footprint: &Footprint) -> Result<(Budget, String)> {
    let Some(limit) = host_memory::available(footprint.process_bytes) else {
        return Err(Error::invalid(
            "this system does not tell how much memory is available",
            "give the budget: --memory 8GB",
        ));
    };
    let margin = (limit.bytes / 10).min(2 << 30);
    let source = format!("{}, less a margin of {margin} bytes", limit.source);
    Ok((Budget::Total(limit.bytes - margin), source))
}
