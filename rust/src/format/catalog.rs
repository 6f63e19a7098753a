//! A checkpoint directory, opened: where every tensor of the text model lies.
//!
//! Everything is checked here, once, against the config and against the
//! lengths of the files, so that nothing above has to wonder whether a tensor
//! exists, has the right shape or ends inside its file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::safetensors::HeaderText;
use super::shard_list::{MissingShards, ShardList};
use super::shard_reader::{ExpertFilter, ShardContent, read_shard, shard_names};
use super::{checkpoint_error, tensor_names, validation};
use crate::error::{Error, Result};
use crate::format::config::ModelConfig;
use crate::format::dtype::Dtype;
use crate::io::extent::{Extent, FileId};
use crate::io::file::{Access, WeightFile};

pub use super::expert_table::{ExpertPart, ExpertTable};

/// One trunk tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Full name as in the file, for messages.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Where its bytes are.
    pub extent: Extent,
}

/// One of the checkpoint's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardFile {
    /// As opened (symlinks are followed by the system).
    pub path: PathBuf,
    /// Its size in bytes.
    pub length: u64,
}

/// A number of tensors and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorTally {
    /// How many.
    pub count: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl TensorTally {
    pub(super) fn add(&mut self, count: u64, bytes: u64) {
        self.count += count;
        self.bytes += bytes;
    }
}

/// What a checkpoint consists of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CatalogSummary {
    /// Trunk tensors of the layers.
    pub layers: TensorTally,
    /// Embedding, output matrix and the norms outside the layers.
    pub roots: TensorTally,
    /// Routed experts.
    pub experts: TensorTally,
    /// Tensors that the text model ignores.
    pub ignored: TensorTally,
    /// Text tensors by element type; types that do not occur are left out.
    pub dtypes: Vec<(Dtype, TensorTally)>,
}

/// The tensors of a text model and the files that hold them.
#[derive(Debug, Clone)]
pub struct Catalog {
    /// The directory as given.
    pub root: PathBuf,
    /// Its `config.json`.
    pub config: ModelConfig,
    /// Keys of the config that nothing here knows, with their paths.
    pub unknown_config_keys: Vec<String>,
    /// The shards; [`FileId`] counts in this list.
    pub files: Vec<ShardFile>,
    /// The routed experts; shared with the cache that reads them.
    pub experts: Arc<ExpertTable>,
    /// Tensors of the image part, and of layers that are left out.
    pub ignored: TensorTally,
    /// What stands before every text tensor's name: nothing or [`tensor_names::PREFIX`].
    prefix: &'static str,
    /// Sorted by name.
    trunk: Vec<TensorEntry>,
}

impl Catalog {
    /// Opens a checkpoint directory: config, index if there is one, and the
    /// header of every shard. No tensor data are read.
    ///
    /// # Errors
    /// [`Error::Config`] for the config; [`Error::Checkpoint`] or [`Error::Io`]
    /// if a file is absent, broken, or does not hold what the config demands.
    pub fn open(directory: &Path) -> Result<Self> {
        Self::open_first(directory, None)
    }

    /// [`Catalog::open`] for the first `layers` layers, as if the model had no
    /// others: of a checkpoint that is complete or not.
    ///
    /// # Errors
    /// As [`Catalog::open`], and [`Error::InvalidInput`] for a number of layers
    /// that the model does not have.
    pub fn open_first(directory: &Path, layers: Option<usize>) -> Result<Self> {
        let config_file = read_config(directory)?;
        let mut config = config_file.config;
        let mut missing = MissingShards::Refused;
        if let Some(layers) = layers {
            config.keep_layers(layers)?;
            missing = MissingShards::Tolerated;
        }
        let mut shards = ShardList::find(directory, missing)?;
        let mut broken = None;
        if layers.is_some() {
            // As good as missing, unless something of it turns out to be needed.
            shards.names.retain(|name| {
                let header = HeaderText::read(&directory.join(name));
                let readable = header.and_then(|header| header.entries().map(drop));
                readable.map_err(|error| broken.get_or_insert(error)).is_ok()
            });
        }
        let mut files: Vec<ShardFile> = shards
            .names
            .iter()
            .map(|name| ShardFile { path: directory.join(name), length: 0 })
            .collect();
        let mut experts = ExpertTable::empty(&config);
        let contents = read_headers(&files, &ExpertFilter::new(&config, &experts, layers))?;
        for (file, content) in files.iter_mut().zip(&contents) {
            file.length = content.length;
        }
        if let Some(index) = &shards.index {
            for ((name, content), file) in shards.names.iter().zip(&contents).zip(&files) {
                index.check(name, content.names, || shard_names(&file.path))?;
            }
        }
        validation::refuse_duplicates(&contents, &files)?;
        let text = validation::select_text(contents, &experts);
        let scope = validation::Scope { root: directory, files: &files, prefix: text.prefix };
        let trunk = scope
            .check(&config, text.tensors, &text.expert_spans, &experts)
            .map_err(|error| broken.unwrap_or(error))?;
        experts.fill(&text.expert_spans);
        Ok(Catalog {
            root: directory.to_owned(),
            config,
            unknown_config_keys: config_file.unknown_keys,
            files,
            experts: Arc::new(experts),
            ignored: text.ignored,
            prefix: text.prefix,
            trunk,
        })
    }

    /// A trunk tensor by its name without prefix, e.g. `lm_head.weight`.
    pub fn find(&self, name: &str) -> Option<&TensorEntry> {
        let short_name = |entry: &TensorEntry| entry.name[self.prefix.len()..].cmp(name);
        self.trunk.binary_search_by(short_name).ok().map(|index| &self.trunk[index])
    }

    /// Like [`Catalog::find`].
    ///
    /// # Errors
    /// If the model has no such tensor.
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry> {
        self.find(name).ok_or_else(|| {
            let full_name = format!("{}{name}", self.prefix);
            let hint = "the config of this checkpoint does not provide for such a tensor";
            checkpoint_error(&self.root, Some(&full_name), "this tensor", "none", hint)
        })
    }

    /// All trunk tensors, sorted by name.
    pub fn trunk(&self) -> &[TensorEntry] {
        &self.trunk
    }

    /// Full name of an expert's tensor as on disk, for messages.
    pub fn expert_tensor_name(&self, layer: usize, expert: usize, part: ExpertPart) -> String {
        format!("{}{}", self.prefix, tensor_names::expert(layer, expert, part))
    }

    /// Opens all shards for reading, in the order of [`FileId`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open_files(&self, access: Access) -> Result<Vec<WeightFile>> {
        self.files.iter().map(|shard| WeightFile::open(&shard.path, access)).collect()
    }

    /// The shard that an extent lies in.
    pub fn file(&self, id: FileId) -> &ShardFile {
        &self.files[usize::from(id.0)]
    }

    /// Parameters of the text model. A 4-bit weight counts as one, its scales
    /// do not count.
    pub fn parameter_count(&self) -> u64 {
        let trunk = self.trunk.iter().map(|entry| entry.extent.length / entry.dtype.size() as u64);
        let lengths = ExpertPart::ALL.into_iter().zip(self.experts.part_lengths());
        let packed: u64 =
            lengths.filter(|(part, _)| !part.is_scale()).map(|(_, bytes)| bytes).sum();
        trunk.sum::<u64>() + self.experts.expert_count() as u64 * packed * 2
    }

    /// Counts and bytes by part and by element type.
    pub fn summary(&self) -> CatalogSummary {
        let mut summary = CatalogSummary { ignored: self.ignored, ..Default::default() };
        let mut dtypes = Dtype::ALL.map(|dtype| (dtype, TensorTally::default()));
        for entry in &self.trunk {
            let is_layer = tensor_names::is_layer(&entry.name[self.prefix.len()..]);
            let part = if is_layer { &mut summary.layers } else { &mut summary.roots };
            part.add(1, entry.extent.length);
            dtypes[entry.dtype as usize].1.add(1, entry.extent.length);
        }
        let experts = self.experts.expert_count() as u64;
        summary.experts.add(6 * experts, experts * self.experts.expert_bytes());
        dtypes[Dtype::U8 as usize].1.add(summary.experts.count, summary.experts.bytes);
        summary.dtypes = dtypes.into_iter().filter(|(_, tally)| tally.count > 0).collect();
        summary
    }

    /// Heap memory that the catalog holds, without the config.
    pub fn memory_bytes(&self) -> usize {
        let trunk = self.trunk.capacity() * size_of::<TensorEntry>();
        let entries = self
            .trunk
            .iter()
            .map(|entry| entry.name.capacity() + entry.shape.capacity() * size_of::<usize>());
        let files = self.files.capacity() * size_of::<ShardFile>();
        let paths = self.files.iter().map(|file| file.path.capacity());
        self.experts.memory_bytes() + trunk + files + entries.chain(paths).sum::<usize>()
    }
}

pub(super) fn read_config(directory: &Path) -> Result<super::config::ConfigFile> {
    let hint = "give the directory that holds config.json and the weights";
    let metadata =
        std::fs::metadata(directory).map_err(|source| Error::io("open", directory, source))?;
    if !metadata.is_dir() {
        return Err(checkpoint_error(directory, None, "a model directory", "a file", hint));
    }
    match ModelConfig::read(&directory.join("config.json")) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Err(checkpoint_error(directory, None, "a file `config.json`", "none", hint))
        }
        result => result,
    }
}

/// Reads all headers, several at a time. Of several broken shards the first
/// one is reported in full and the others are named in the hint.
pub(super) fn read_headers(
    files: &[ShardFile],
    filter: &ExpertFilter<'_>,
) -> Result<Vec<ShardContent>> {
    let results: Vec<Result<ShardContent>> = files
        .par_iter()
        .enumerate()
        .map(|(number, file)| read_shard(&file.path, FileId(number as u16), filter))
        .collect();
    let broken: Vec<String> = results
        .iter()
        .zip(files)
        .filter(|(result, _)| result.is_err())
        .map(|(_, file)| file.path.display().to_string())
        .collect();
    let result: Result<Vec<ShardContent>> = results.into_iter().collect();
    result.map_err(|mut error| {
        if let (Error::Checkpoint { hint, .. }, [_, others @ ..]) = (&mut error, &broken[..])
            && !others.is_empty()
        {
            hint.push_str(&format!("; also broken: {}", super::name_all(others)));
        }
        error
    })
}
