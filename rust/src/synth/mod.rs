//! Checkpoints of the released layout without the released weights.
//!
//! A sparse one has the names, sizes and offsets of the release and takes up
//! next to nothing: it rehearses opening, planning and streaming at full size
//! before 1.56 TB are fetched. A random one has real bytes from a seed, at any
//! size: it rehearses the disk.
//!
//! The layer stands beside the engine and needs only the layers below
//! `format`; what it writes enters through the same door as any checkpoint.

mod config_document;
mod layout;
mod new_file;
mod random_stream;
mod released;
mod target;
mod weights;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::Result;
use crate::io::output_file::require_room;
use crate::io::threads::compute_pool;
use config_document::ConfigDocument;
use layout::Layout;
use new_file::{NewFile, piece_count};
use target::{Target, refuse_used};

const ROOM_HINT: &str = "make room, or write less with fewer layers or experts; a sparse checkpoint \
                         needs room for its headers and its index only";

/// Called after each step; an error, such as [`Error::Cancelled`], ends the work.
pub type StepDone<'s> = dyn Fn() -> Result<()> + Sync + 's;

/// What to make. The released sizes where nothing else is said.
#[derive(Debug, Clone, Default)]
pub struct SynthOptions {
    /// A `config.json` instead of the released one.
    pub config: Option<PathBuf>,
    /// Keep this many of the first layers, each with its kind.
    pub layers: Option<usize>,
    /// Routed experts of a layer.
    pub experts: Option<usize>,
    /// Size of the vocabulary, at least 320; special ids stay at its end.
    pub vocabulary: Option<usize>,
    /// Holes (zeros) instead of random weights.
    pub sparse: bool,
    /// Equal seeds give equal bytes, whatever the number of threads.
    pub seed: u64,
    /// Threads that make and write the weights; `None` is two a core, as half
    /// of them wait for the disk.
    pub threads: Option<usize>,
}

/// What a synthetic checkpoint consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SynthFacts {
    /// Whether the data are holes.
    pub sparse: bool,
    /// Seed of the random weights; `None` for holes.
    pub seed: Option<u64>,
    /// Layers of the model.
    pub layers: usize,
    /// Routed experts of a layer; 0 without any.
    pub experts: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Weight files.
    pub shards: usize,
    /// Tensors in them, image tensors included.
    pub tensors: u64,
    /// Bytes of all tensors: `total_size` of the index.
    pub tensor_bytes: u64,
    /// Bytes of the weight files as listed.
    pub file_bytes: u64,
    /// Keys of the config that nothing here knows.
    pub unknown_config_keys: Vec<String>,
}

/// A checkpoint that was thought through and can be written.
pub struct Synthesis {
    directory: PathBuf,
    document: ConfigDocument,
    layout: Layout,
    threads: Option<usize>,
    seed: u64,
    facts: SynthFacts,
    header_bytes: u64,
    steps: usize,
}

impl Synthesis {
    /// Checks the options and works out names and sizes. Nothing is written.
    ///
    /// Image tensors are part of it only with `sparse`, where they cost
    /// nothing, and if the config's image part is the released one.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a directory that holds something and for
    /// sizes that the model does not allow, [`Error::Config`] for a config that
    /// is not understood, [`Error::Io`].
    pub fn plan(directory: &Path, options: &SynthOptions) -> Result<Self> {
        refuse_used(directory)?;
        let document = ConfigDocument::new(options)?;
        let has_images = options.sparse && document.has_released_images();
        let layout = Layout::new(document.config.clone(), document.is_nested(), has_images);
        let config = &document.config;
        let mut facts = SynthFacts {
            sparse: options.sparse,
            seed: (!options.sparse).then_some(options.seed),
            layers: config.layers.len(),
            experts: config.moe.as_ref().map_or(0, |moe| moe.experts),
            vocabulary: config.vocab_size,
            shards: layout.shard_count(),
            tensors: 0,
            tensor_bytes: 0,
            file_bytes: 0,
            unknown_config_keys: document.unknown_keys.clone(),
        };
        let (mut header_bytes, mut steps) = (0, 0);
        for number in 0..layout.shard_count() {
            let shard = layout.shard(number);
            facts.tensors += shard.tensors().len() as u64;
            facts.tensor_bytes += shard.data_bytes();
            let header = shard.header().len() as u64;
            header_bytes += header;
            let pieces = piece_count(header + shard.data_bytes()) as usize;
            steps += if options.sparse { 1 } else { pieces };
        }
        facts.file_bytes = facts.tensor_bytes + header_bytes;
        Ok(Synthesis {
            directory: directory.to_owned(),
            document,
            layout,
            threads: options.threads,
            seed: options.seed,
            facts,
            header_bytes,
            steps,
        })
    }

    /// What it consists of.
    pub fn facts(&self) -> &SynthFacts {
        &self.facts
    }

    /// How often [`Synthesis::write`] calls its `step_done`.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Writes it and returns the bytes that it occupies on disk. Every file
    /// gets its name when it is complete, `config.json` the last; after an
    /// error nothing is left.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the file system has no room; [`Error::Io`];
    /// what `step_done` returns.
    pub fn write(&self, step_done: &StepDone<'_>) -> Result<u64> {
        let threads = compute_pool(self.threads)?;
        let mut target = Target::create(&self.directory)?;
        let data = if self.facts.sparse { 0 } else { self.facts.tensor_bytes };
        // Headers and index take about the same room.
        require_room(&self.directory, data + 2 * self.header_bytes, ROOM_HINT)?;
        for number in 0..self.layout.shard_count() {
            let shard = self.layout.shard(number);
            target.file(&self.layout.shard_name(number), |file| {
                if self.facts.sparse {
                    file.write_sparse(&shard)?;
                    return step_done();
                }
                threads.install(|| file.write_random(&shard, self.seed, step_done))
            })?;
        }
        target.file("model.safetensors.index.json", |file| self.write_index(file))?;
        target.file("config.json", |file| {
            file.write_text(|text| writeln!(text, "{:#}", self.document.json))
        })?;
        let disk_bytes = target.disk_bytes();
        target.finish();
        Ok(disk_bytes)
    }

    fn write_index(&self, file: &NewFile) -> Result<()> {
        file.write_text(|text| {
            let total = self.facts.tensor_bytes;
            write!(text, "{{\n  \"metadata\": {{\n    \"total_size\": {total}\n  }},")?;
            write!(text, "\n  \"weight_map\": {{")?;
            let mut separator = "";
            for number in 0..self.layout.shard_count() {
                let shard_name = self.layout.shard_name(number);
                for tensor in self.layout.shard(number).tensors() {
                    write!(text, "{separator}\n    \"{}\": \"{shard_name}\"", tensor.name)?;
                    separator = ",";
                }
            }
            writeln!(text, "\n  }}\n}}")
        })
    }
}
