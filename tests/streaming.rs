//! The tiny model streamed in tiles over well-behaved, slow and broken disks:
//! the same bits whatever the memory, an error and never a wrong token when a
//! read fails, never a hang.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "common/time_limit.rs"]
mod time_limit;

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use _k3rs::Error;
use _k3rs::engine::{Control, Engine, EngineOptions, Logits, Session, Wanted, plan};
use _k3rs::format::catalog::Catalog;
use _k3rs::io::extent::Extent;
use _k3rs::io::file::Access;
use _k3rs::io::sim_queue::{Misbehaviour, SimulatedQueue};
use _k3rs::model::binding::bind;
use _k3rs::model::router::Route;
use _k3rs::storage::memory_plan::Budget;
use time_limit::within_time;

const PROMPT: [u32; 9] = [64, 46, 28, 62, 202, 28, 6, 35, 40];

/// The chosen ids of `PROMPT`, from `fixtures/tiny_k3/expected.json`.
const GREEDY: [u32; 4] = [19, 19, 41, 9];

const LAST: Wanted = Wanted { logits: Logits::Last, hidden: false, routes: false };
const EVERY: Wanted = Wanted { logits: Logits::Every, hidden: false, routes: true };

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_k3/model")
}

/// Small tiles, one compute thread, parts instead of a budget.
fn options(tile_bytes: usize, pinned_bytes: u64, expert_bytes: u64) -> EngineOptions {
    EngineOptions {
        budget: Some(Budget::Parts { trunk: pinned_bytes, experts: expert_bytes }),
        positions: 64,
        chunk: Some(4),
        threads: Some(1),
        tile_bytes,
        readers: 2,
        ..EngineOptions::default()
    }
}

/// The same with a budget of so many bytes above the smallest that is accepted.
fn above_minimum(options: EngineOptions, bytes: u64) -> EngineOptions {
    let minimum = plan(&fixture(), &options).unwrap().0.minimum_bytes;
    EngineOptions { budget: Some(Budget::Total(minimum + bytes)), ..options }
}

fn open(options: &EngineOptions) -> Arc<Engine> {
    Arc::new(Engine::open(&fixture(), options).unwrap())
}

/// The engine over a simulated disk, and the disk.
fn open_simulated(
    directory: &Path,
    how: Misbehaviour,
    options: &EngineOptions,
) -> (Arc<Engine>, Arc<SimulatedQueue>) {
    let catalog = Catalog::open(directory).unwrap();
    let files = Arc::new(catalog.open_files(options.access).unwrap());
    let queue = Arc::new(SimulatedQueue::new(Arc::clone(&files), how).unwrap());
    let seam: Arc<SimulatedQueue> = Arc::clone(&queue);
    (Arc::new(Engine::with_queue(catalog, files, seam, options).unwrap()), queue)
}

/// What a run computed, to the bit.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    ids: Vec<u32>,
    logits: Vec<Vec<u32>>,
}

impl Run {
    /// The first `steps` steps.
    fn first(&self, steps: usize) -> Run {
        Run { ids: self.ids[..steps].to_vec(), logits: self.logits[..steps].to_vec() }
    }

    fn step(&mut self, logits: &[f32]) -> u32 {
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
        self.ids.push(best);
        self.logits.push(logits.iter().map(|logit| logit.to_bits()).collect());
        best
    }
}

/// Greedy continuation of `prompt`, ids and logits.
fn generate(session: &mut Session, prompt: &[u32], steps: usize) -> Result<Run, Error> {
    let mut run = Run { ids: Vec::new(), logits: Vec::new() };
    let mut next = prompt.to_vec();
    for _ in 0..steps {
        let output = session.forward(&next, LAST, &Control::default())?;
        next = vec![run.step(&output.logits)];
    }
    Ok(run)
}

fn generated(engine: &Arc<Engine>) -> Run {
    generate(&mut Session::new(Arc::clone(engine)), &PROMPT, GREEDY.len()).unwrap()
}

/// What every configuration has to give: big tiles, everything resident.
fn reference() -> Run {
    let run = generated(&open(&options(8 << 20, u64::MAX / 2, u64::MAX / 2)));
    assert_eq!(run.ids, GREEDY);
    run
}

/// Bytes of all expert slots of the tiny model.
fn all_experts_bytes() -> u64 {
    let plan = open(&options(8 << 20, 0, u64::MAX / 2)).plan().clone();
    plan.entries.iter().find(|entry| entry.name == "expert slots").unwrap().bytes
}

#[test]
fn budgets_from_the_smallest_to_everything() {
    within_time(|| {
        let truth = reference();
        let base = EngineOptions { chunk: None, ..options(4 << 10, 0, 0) };
        let minimum = plan(&fixture(), &base).unwrap().0.minimum_bytes;
        let total = |bytes| EngineOptions { budget: Some(Budget::Total(bytes)), ..base.clone() };
        let too_little = Engine::open(&fixture(), &total(minimum - 1)).err();
        assert!(matches!(too_little, Some(Error::MemoryBudget { minimum_bytes, .. })
            if minimum_bytes == minimum));
        let mut fractions = Vec::new();
        for more in [0, 100_000, 300_000, 600_000, 1_200_000, 1_800_000, 4_000_000, 40_000_000] {
            let engine = open(&total(minimum + more));
            assert_eq!(generated(&engine), truth, "{more} bytes above the minimum");
            fractions.push(engine.plan().pinned_fraction);
        }
        assert_eq!((fractions[0], fractions[7]), (0.0, 1.0), "{fractions:?}");
        assert!(fractions.is_sorted() && fractions[2] > 0.0, "{fractions:?}");
    });
}

#[test]
fn tiles_readers_chunks_and_access() {
    within_time(|| {
        let truth = reference();
        let everything = all_experts_bytes();
        for (index, (tile_bytes, readers, chunk)) in
            [(1, 1, 9), (500, 8, 2), (1000, 3, 5), (2000, 2, 1), (30_000, 5, 32), (8 << 20, 4, 3)]
                .into_iter()
                .enumerate()
        {
            for access in [Access::Auto, Access::Buffered] {
                let few = (access == Access::Auto) == index.is_multiple_of(2);
                let (pinned, experts) = if few { (0, 0) } else { (150_000, everything / 2) };
                let options = EngineOptions {
                    readers,
                    access,
                    chunk: Some(chunk),
                    ..options(tile_bytes, pinned, experts)
                };
                let mut session = Session::new(open(&options));
                let run = generate(&mut session, &PROMPT, 2).unwrap();
                assert!(run == truth.first(2), "wrong bits with {options:?}");
            }
        }
    });
}

#[test]
fn the_first_token_reads_every_tile_and_the_others_what_is_not_pinned() {
    within_time(|| {
        let catalog = Catalog::open(&fixture()).unwrap();
        let walk =
            bind(&catalog, &catalog.open_files(Access::Auto).unwrap(), 2000, None).unwrap().walk;
        for pinned in [0, 100_000, 400_000, 1_000_000, u64::MAX / 2] {
            let engine = open(&options(2000, pinned, 0));
            let tiles = || walk.iter().zip(&engine.plan().pinned);
            let every: u64 = tiles().map(|(tile, _)| tile.length).sum();
            let unpinned: u64 =
                tiles().filter(|(_, pinned)| !*pinned).map(|(tile, _)| tile.length).sum();
            let mut before = 0;
            for (token, expected) in [every, unpinned, unpinned, unpinned].into_iter().enumerate() {
                let mut session = Session::new(Arc::clone(&engine));
                session.forward(&[token as u32], LAST, &Control::default()).unwrap();
                let read = engine.report().io.trunk_bytes_read;
                assert_eq!(read - before, expected, "token {token} with {pinned} bytes pinned");
                before = read;
            }
            assert_eq!(unpinned == 0, engine.plan().pinned_fraction == 1.0);
        }
    });
}

#[test]
fn requests_hits_and_reads_of_experts() {
    within_time(|| {
        let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 320).collect();
        for slots_bytes in [0, all_experts_bytes() / 3, u64::MAX / 2] {
            let options = EngineOptions { chunk: Some(40), ..options(4000, 0, slots_bytes) };
            let engine = open(&options);
            let sweep = || {
                let mut session = Session::new(Arc::clone(&engine));
                session.forward(&prompt, EVERY, &Control::default()).unwrap()
            };
            let distinct: u64 = sweep().routes.iter().map(|routes| distinct_experts(routes)).sum();
            let first = engine.report();
            assert_eq!(first.experts.requests, distinct);
            assert_eq!((first.experts.hits, first.experts.distinct), (0, distinct));
            let expert_bytes = engine.catalog().experts.expert_bytes();
            assert_eq!(first.io.expert_bytes_read, distinct * expert_bytes);

            sweep();
            let second = engine.report();
            assert_eq!(second.experts.requests, 2 * distinct);
            let missed = 2 * distinct - second.experts.hits;
            assert_eq!(second.io.expert_bytes_read, missed * expert_bytes);
            if engine.plan().expert_slots == engine.catalog().experts.expert_count() {
                assert_eq!(second.experts.hits, distinct, "with room for all, none is read twice");
            } else {
                assert!(engine.plan().expert_slots < distinct as usize);
                assert!(second.experts.hits < distinct);
            }
        }
    });
}

fn distinct_experts(routes: &[Route]) -> u64 {
    let mut experts: Vec<usize> = routes.iter().flat_map(|route| route.experts.clone()).collect();
    experts.sort_unstable();
    experts.dedup();
    experts.len() as u64
}

#[test]
fn two_sessions_share_one_cache() {
    within_time(|| {
        let other: [u32; 3] = [58, 10, 8];
        let alone = open(&options(3000, 100_000, all_experts_bytes() / 2));
        let expected = [&PROMPT[..], &other]
            .map(|prompt| generate(&mut Session::new(Arc::clone(&alone)), prompt, 4).unwrap());
        let engine = open(&options(3000, 100_000, u64::MAX / 2));
        let mut sessions = [(); 2].map(|()| Session::new(Arc::clone(&engine)));
        let mut runs = [(); 2].map(|()| Run { ids: vec![], logits: vec![] });
        let mut next = [PROMPT.to_vec(), other.to_vec()];
        for _ in 0..4 {
            for which in 0..2 {
                let session = &mut sessions[which];
                let output = session.forward(&next[which], LAST, &Control::default()).unwrap();
                next[which] = vec![runs[which].step(&output.logits)];
            }
        }
        assert_eq!(runs, expected);
        let report = engine.report();
        let all = engine.catalog().experts.expert_count() as u64;
        assert!(report.experts.distinct <= all, "an expert was read twice: {report:?}");
    });
}

#[test]
fn any_delays_short_reads_and_interruptions() {
    within_time(|| {
        let truth = reference();
        let (mut overtakes, mut short_reads, mut interrupts) = (0, 0, 0);
        for seed in 0..30 {
            let how = Misbehaviour {
                seed,
                delay_us_max: [0, 30, 200][seed as usize % 3],
                short_percent: [0, 30, 80][seed as usize / 3 % 3],
                interrupt_percent: [0, 20, 60][seed as usize % 2],
                ..Misbehaviour::default()
            };
            let options = EngineOptions {
                access: [Access::Auto, Access::Buffered][seed as usize % 2],
                chunk: Some(1 + seed as usize % 9),
                ..options(1500 + 997 * seed as usize, 0, 0)
            };
            let options = above_minimum(options, 60_000 * seed);
            let (engine, disk) = open_simulated(&fixture(), how, &options);
            let mut session = Session::new(Arc::clone(&engine));
            let run = generate(&mut session, &PROMPT, 2);
            let run = run.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert!(run == truth.first(2), "seed {seed}: wrong bits, ids {:?}", run.ids);
            let incidents = disk.incidents();
            overtakes += incidents.overtakes;
            short_reads += incidents.short_reads;
            interrupts += incidents.interrupts;
        }
        assert!(overtakes > 1000, "{overtakes}");
        assert!(short_reads > 1000 && interrupts > 1000, "{short_reads} {interrupts}");
    });
}

/// Slots and rings as small as they can be, and answers as late as it gets.
#[test]
fn the_smallest_memory_on_the_slowest_disk() {
    within_time(|| {
        let truth = reference();
        let options = EngineOptions { chunk: Some(9), ..options(20_000, 0, 0) };
        let options = above_minimum(options, 0);
        for seed in 0..3 {
            let how = Misbehaviour { seed, delay_us_max: 3000, ..Misbehaviour::default() };
            let (engine, _disk) = open_simulated(&fixture(), how, &options);
            assert_eq!(engine.plan().expert_slots, 3, "those of one token");
            assert!(generated(&engine) == truth, "seed {seed}: wrong bits");
        }
    });
}

/// Asserts that `error` names the file and a place within or just before `extent`.
fn assert_names(error: &Error, path: &Path, extent: &Extent, seed: u64) {
    let Error::Io { path: named, offset: Some(offset), source, .. } = error else {
        panic!("seed {seed}: {error:?}");
    };
    assert_eq!(named, path, "seed {seed}");
    assert_eq!(source.raw_os_error(), Some(5), "seed {seed}: {error}");
    // A direct read starts at the block that holds the first byte.
    let block = extent.offset / 4096 * 4096;
    assert!((block..extent.end()).contains(offset), "seed {seed}: {error}, not in {extent:?}");
}

#[test]
fn an_unreadable_place_is_an_error_and_no_token() {
    within_time(|| {
        let truth = reference();
        let catalog = Catalog::open(&fixture()).unwrap();
        let extent = |name: &str| catalog.tensor(name).unwrap().extent;
        let expert = |layer, expert| catalog.experts.parts(layer, expert)[0];
        let places = [
            ("lm_head", extent("lm_head.weight")),
            ("first", extent("model.layers.0.self_attn.q_proj.weight")),
            ("middle", extent("model.layers.4.self_attn.o_proj.weight")),
            ("last", extent("model.layers.6.self_attn.o_proj.weight")),
        ];
        // Which experts the prompt wakes follows from its routes.
        let mut session = Session::new(open(&options(4000, 0, 0)));
        let routes = session.forward(&PROMPT, EVERY, &Control::default()).unwrap().routes;
        let woken = routes[2][8].experts[1];
        let places = places.into_iter().chain([("expert", expert(3, woken))]);
        for (seed, (what, broken)) in places.enumerate() {
            let seed = seed as u64;
            for pinned in [0, 150_000, u64::MAX / 2] {
                let fine = Misbehaviour { seed, delay_us_max: 50, ..Misbehaviour::default() };
                let failing = Misbehaviour { failing_extents: vec![broken], ..fine.clone() };
                let options = EngineOptions { chunk: Some(9), ..options(4000, pinned, 0) };
                let (engine, disk) = open_simulated(&fixture(), failing, &options);
                let mut session = Session::new(Arc::clone(&engine));
                let error = generate(&mut session, &PROMPT, 4).expect_err(what);
                let path = &catalog.files[usize::from(broken.file.0)].path;
                assert_names(&error, path, &tile_of(&broken), seed);
                let again = session.forward(&[1], LAST, &Control::default());
                assert!(matches!(again, Err(Error::SessionAborted)), "{what}: {again:?}");
                // Still broken for a new session, and fine when the disk is.
                assert!(generate(&mut Session::new(Arc::clone(&engine)), &PROMPT, 4).is_err());
                disk.change(fine);
                assert!(generated(&engine) == truth, "{what}: wrong bits after an error");
                session.reset();
                let run = generate(&mut session, &PROMPT, 4).unwrap();
                assert!(run == truth, "{what}: wrong bits after a reset");
            }
        }
    });
}

/// The bytes that one read around `broken` may cover: an expert is read whole.
fn tile_of(broken: &Extent) -> Extent {
    Extent {
        offset: broken.offset.saturating_sub(30_000),
        length: broken.length + 30_000,
        ..*broken
    }
}

#[test]
fn a_read_that_fails_once() {
    within_time(|| {
        let truth = reference();
        for seed in 0..30_u64 {
            let how = Misbehaviour {
                seed,
                delay_us_max: 20 * (seed % 4),
                failing_requests: vec![seed * seed],
                ..Misbehaviour::default()
            };
            let options = above_minimum(options(4000, 0, 0), 50_000 * seed);
            let (engine, disk) = open_simulated(&fixture(), how, &options);
            let mut session = Session::new(Arc::clone(&engine));
            let mut failures = 0;
            let run = loop {
                match generate(&mut session, &PROMPT, 2) {
                    Ok(run) => break run,
                    Err(Error::Io { .. }) => failures += 1,
                    Err(error) => panic!("seed {seed}: {error}"),
                }
                session.reset();
            };
            assert!(run == truth.first(2), "seed {seed}: wrong bits");
            assert_eq!(disk.incidents().failures, 1, "seed {seed}");
            assert_eq!(failures, 1, "seed {seed}: the failure has to show once");
        }
    });
}

#[test]
fn a_shard_that_is_cut_off_while_running() {
    within_time(|| {
        let truth = reference();
        for (access, keep) in
            [(Access::Auto, 4096), (Access::Auto, 100_001), (Access::Buffered, 100_001)]
        {
            let copy = tempfile::tempdir().unwrap();
            for entry in fs::read_dir(fixture()).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
            }
            let options = EngineOptions { access, ..options(4000, 0, 0) };
            let engine = Arc::new(Engine::open(copy.path(), &options).unwrap());
            assert!(generated(&engine) == truth);

            let shard = copy.path().join("model-00002-of-000006.safetensors");
            let whole = fs::read(&shard).unwrap();
            OpenOptions::new().write(true).open(&shard).unwrap().set_len(keep).unwrap();
            let mut session = Session::new(Arc::clone(&engine));
            let error = generate(&mut session, &PROMPT, 4).unwrap_err();
            let Error::Io { path, offset: Some(_), source, .. } = &error else {
                panic!("{error:?}");
            };
            assert_eq!(path, &shard);
            assert_eq!(source.kind(), std::io::ErrorKind::UnexpectedEof, "{error}");
            assert!(session.forward(&[1], LAST, &Control::default()).is_err());

            fs::write(&shard, whole).unwrap();
            let error = generate(&mut Session::new(engine), &PROMPT, 4).unwrap_err();
            assert!(error.to_string().contains("changed while"), "{error}");
            let engine = Engine::open(copy.path(), &options).unwrap();
            assert!(generated(&Arc::new(engine)) == truth, "once the file is whole again");
        }
    });
}

#[test]
fn a_cancelled_sweep_leaves_the_engine_usable() {
    within_time(|| {
        let truth = reference();
        for seed in 0..12_u64 {
            let how = Misbehaviour { seed, delay_us_max: 100, ..Misbehaviour::default() };
            let options = above_minimum(options(4000, 0, 0), 100_000 * seed);
            let (engine, _disk) = open_simulated(&fixture(), how, &options);
            let control = Arc::new(Control::default());
            let mut session = Session::new(Arc::clone(&engine));
            let layers = seed as usize;
            let watcher = std::thread::spawn({
                let control = Arc::clone(&control);
                move || {
                    while control.layers_done() < layers {
                        std::thread::yield_now();
                    }
                    control.cancel();
                }
            });
            let outcome = session.forward(&PROMPT, LAST, &control);
            watcher.join().unwrap();
            match outcome {
                Err(Error::Cancelled { .. }) => {
                    let again = session.forward(&[1], LAST, &Control::default());
                    assert!(matches!(again, Err(Error::SessionAborted)), "seed {seed}");
                }
                other => panic!("seed {seed}: {other:?}"),
            }
            assert!(generated(&engine) == truth, "seed {seed}: wrong bits after a cancellation");
        }
    });
}
