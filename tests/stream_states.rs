//! The trunk stream and the expert cache by themselves, in the states that a
//! whole model rarely gets into: one buffer, one slot, sweeps given up half-way,
//! batches that are never finished.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "common/time_limit.rs"]
mod time_limit;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use _k3rs::Error;
use _k3rs::format::catalog::Catalog;
use _k3rs::io::extent::{Extent, FileId};
use _k3rs::io::file::{Access, WeightFile};
use _k3rs::io::sim_queue::{Misbehaviour, SimulatedQueue};
use _k3rs::storage::counters::Counters;
use _k3rs::storage::expert_cache::{ExpertCache, slot_bytes};
use _k3rs::storage::trunk_stream::TrunkStream;
use time_limit::within_time;

const TILES: usize = 12;
/// First tile of the output matrix.
const HEAD: usize = 9;
const LENGTH: usize = 1000;

fn tile(index: usize) -> Extent {
    Extent { file: FileId(0), offset: (index * LENGTH) as u64, length: LENGTH as u64 }
}

/// A file whose tile `i` is full of byte `i`, and a slow disk for it.
fn disk(seed: u64, failing: &[usize]) -> (tempfile::TempDir, Arc<SimulatedQueue>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiles");
    let bytes: Vec<u8> = (0..TILES).flat_map(|tile| [tile as u8; LENGTH]).collect();
    std::fs::write(&path, bytes).unwrap();
    let files = vec![WeightFile::open(&path, Access::Auto).unwrap()];
    let how = Misbehaviour {
        seed,
        delay_us_max: 300,
        short_percent: 20,
        failing_extents: failing.iter().map(|index| tile(*index)).collect(),
        ..Misbehaviour::default()
    };
    (directory, Arc::new(SimulatedQueue::new(Arc::new(files), how).unwrap()))
}

/// Visits `tiles`, checks their bytes, and returns the first that failed.
fn sweep(stream: &mut TrunkStream, tiles: std::ops::Range<usize>) -> Option<usize> {
    let mut next = tiles.start;
    let visited = stream.visit(tiles.clone(), |first, together| {
        assert_eq!(first, next);
        for bytes in together {
            assert!(*bytes == [next as u8; LENGTH], "the bytes of another tile for {next}");
            next += 1;
        }
    });
    match visited {
        Ok(()) => assert_eq!(next, tiles.end),
        Err(Error::Io { .. }) => return Some(next),
        Err(error) => panic!("{error}"),
    }
    None
}

#[test]
fn any_ring_any_pinning_any_place_to_give_up() {
    within_time(|| {
        for seed in 0..24_usize {
            let (_directory, queue) = disk(seed as u64, &[]);
            let tiles: Vec<Extent> = (0..TILES).map(tile).collect();
            let pinned: Vec<bool> = (0..TILES).map(|tile| tile % 4 < seed % 5).collect();
            let ring = [1, 2, 5, 30][seed % 4];
            let counters = Arc::new(Counters::default());
            let counting = Arc::clone(&counters);
            let mut stream =
                TrunkStream::new(queue, &tiles, &pinned, HEAD, ring, counting).unwrap();
            // Every tile but one lies between a sweep that was given up and the end.
            for stop in 0..TILES {
                stream.begin_sweep(true);
                assert_eq!(sweep(&mut stream, 0..stop), None, "seed {seed}");
                stream.begin_sweep(false);
                assert_eq!(sweep(&mut stream, 0..HEAD), None, "seed {seed}");
            }
            // Whole sweeps cost what is not pinned, whatever came before.
            stream.begin_sweep(true);
            sweep(&mut stream, 0..TILES);
            for (with_logits, end) in [(true, TILES), (false, HEAD), (false, HEAD), (true, TILES)] {
                let before = counters.totals().trunk_bytes_read;
                stream.begin_sweep(with_logits);
                assert_eq!(sweep(&mut stream, 0..end), None, "seed {seed}");
                let unpinned = pinned[..end].iter().filter(|pinned| !**pinned).count();
                let read = counters.totals().trunk_bytes_read - before;
                assert_eq!(read, (unpinned * LENGTH) as u64, "seed {seed}");
            }
        }
    });
}

#[test]
fn an_error_shows_where_its_tile_is_used_and_only_there() {
    within_time(|| {
        for failing in 0..TILES {
            for (ring, pin) in [(1, false), (3, false), (30, false), (3, true), (30, true)] {
                let (_directory, queue) = disk(failing as u64, &[failing]);
                let tiles: Vec<Extent> = (0..TILES).map(tile).collect();
                let disk = Arc::clone(&queue);
                let mut stream =
                    TrunkStream::new(queue, &tiles, &[pin; TILES], HEAD, ring, Arc::default())
                        .unwrap();
                for _ in 0..2 {
                    stream.begin_sweep(true);
                    assert_eq!(sweep(&mut stream, 0..TILES), Some(failing), "ring {ring}");
                }
                disk.change(Misbehaviour::default());
                for _ in 0..2 {
                    stream.begin_sweep(true);
                    assert_eq!(sweep(&mut stream, 0..TILES), None, "ring {ring}");
                }
            }
        }
    });
}

/// A cache over the experts of the tiny model.
struct Experts {
    catalog: Catalog,
    disk: Arc<SimulatedQueue>,
    cache: ExpertCache,
}

const LAYER: usize = 3;
const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Experts {
    fn new(slots: usize, failing: Option<usize>) -> Result<Self, Error> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_k3/model");
        let catalog = Catalog::open(&directory).unwrap();
        let files = catalog.files.iter();
        let files = files.map(|file| WeightFile::open(&file.path, Access::Auto).unwrap()).collect();
        let failing = failing.map(|expert| catalog.experts.parts(LAYER, expert)[0]);
        let how = Misbehaviour {
            seed: slots as u64,
            delay_us_max: 300,
            failing_extents: failing.into_iter().collect(),
            ..Misbehaviour::default()
        };
        let disk = Arc::new(SimulatedQueue::new(Arc::new(files), how).unwrap());
        let seam: Arc<SimulatedQueue> = Arc::clone(&disk);
        let table = Arc::clone(&catalog.experts);
        let bytes = slot_bytes(&table);
        let cache = ExpertCache::new(seam, table, slots, bytes, Arc::default())?;
        Ok(Experts { catalog, disk, cache })
    }

    /// Requests and uses `experts`, checking that each comes once, with its bytes.
    fn take(&mut self, layer: usize, experts: &[usize]) -> Result<(), Error> {
        let mut seen = BTreeSet::new();
        let batch = self.cache.request(layer, experts);
        self.cache.finish(batch, |expert, bytes| {
            assert!(seen.insert(expert), "expert {expert} came twice");
            for (extent, bytes) in self.catalog.experts.parts(layer, expert).iter().zip(bytes) {
                let path = &self.catalog.files[usize::from(extent.file.0)].path;
                let file = WeightFile::open(path, Access::Buffered)?;
                let mut expected = vec![0; extent.length as usize];
                file.read_exact(extent.offset, &mut expected)?;
                assert!(bytes == expected, "the bytes of another expert for {expert}");
            }
            Ok(())
        })?;
        assert_eq!(seen, experts.iter().copied().collect(), "every expert comes");
        Ok(())
    }
}

#[test]
fn fewer_slots_than_experts_of_a_batch() {
    within_time(|| {
        for slots in 1..=ALL.len() {
            let mut experts = Experts::new(slots, None).unwrap();
            for layer in [1, LAYER, 5, 1] {
                experts.take(layer, &ALL).unwrap();
            }
            experts.take(LAYER, &[2]).unwrap();
        }
    });
}

#[test]
fn experts_without_a_slot_are_refused() {
    within_time(|| {
        assert!(matches!(Experts::new(0, None).err(), Some(Error::InvalidInput { .. })));
    });
}

#[test]
fn a_batch_that_is_dropped_leaves_nothing_behind() {
    within_time(|| {
        for slots in [1, 3, 8] {
            let mut experts = Experts::new(slots, None).unwrap();
            experts.take(LAYER, &ALL[..slots]).unwrap();
            for _ in 0..3 {
                drop(experts.cache.request(LAYER, &ALL));
                drop(experts.cache.request(1, &ALL));
            }
            experts.take(5, &ALL).unwrap();
            experts.take(LAYER, &ALL).unwrap();
        }
    });
}

#[test]
fn a_failed_expert_fails_the_batch_and_no_other() {
    within_time(|| {
        for slots in [1, 3, 8] {
            let mut experts = Experts::new(slots, Some(5)).unwrap();
            for _ in 0..3 {
                assert!(matches!(experts.take(LAYER, &ALL), Err(Error::Io { .. })));
                experts.take(LAYER, &[0, 2, 7]).unwrap();
                experts.take(1, &ALL).unwrap();
            }
            experts.disk.change(Misbehaviour::default());
            experts.take(LAYER, &ALL).unwrap();
        }
    });
}
