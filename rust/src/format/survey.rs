//! What is in a checkpoint directory, complete or not: for looking, not for running.
//!
//! The same headers and the same list of demanded tensors as in the catalog, but
//! what is missing or wrong is counted here instead of refused.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;

use super::catalog::{ShardFile, TensorTally, read_config, read_headers};
use super::expert_table::ExpertTable;
use super::shard_list::{MissingShards, ShardList};
use super::shard_reader::{ExpertFilter, NamedTensor, ShardContent};
use super::tensor_names::{self, ExpectedTensor};
use super::validation::select_text;
use crate::error::Result;
use crate::format::config::{AttentionKind, FeedForwardKind, ModelConfig};
use crate::format::dtype::Dtype;

/// Names that are given in full.
const NAMES_MAX: usize = 20;

/// How many, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Names {
    /// How many.
    pub count: usize,
    /// At most 20.
    pub first: Vec<String>,
}

impl Names {
    fn add(&mut self, name: String) {
        self.count += 1;
        if self.first.len() < NAMES_MAX {
            self.first.push(name);
        }
    }
}

/// Tensors that are there, and how many should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Tensors that are there in the right form.
    pub found: u64,
    /// Tensors that the config demands.
    pub demanded: u64,
    /// Bytes of those that are there.
    pub bytes: u64,
}

impl Part {
    fn add(&mut self, bytes: u64) {
        self.found += 1;
        self.bytes += bytes;
    }
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerSurvey {
    /// What mixes positions.
    pub attention: AttentionKind,
    /// What follows it.
    pub feed_forward: FeedForwardKind,
    /// Everything but the routed experts.
    pub trunk: Part,
    /// The routed experts, six tensors each.
    pub experts: Part,
}

/// A directory as it is.
#[derive(Debug, Clone)]
pub struct Survey {
    /// Tensors outside the layers.
    pub roots: Part,
    /// Layer by layer.
    pub layers: Vec<LayerSurvey>,
    /// Tensors of the image part: how many, and their bytes.
    pub ignored: TensorTally,
    /// Bytes of text tensors by element type.
    pub dtypes: Vec<(Dtype, TensorTally)>,
    /// Demanded tensors that no shard has.
    pub missing: Names,
    /// Text tensors that nothing demands, and those in a form that is not the demanded one.
    pub unexpected: Names,
    /// Shards that the index, or their siblings' names, promise.
    pub missing_shards: Vec<String>,
    /// Shards that cannot be read, with the reason.
    pub broken_shards: Vec<String>,
    /// Shards that were read.
    pub files: Vec<ShardFile>,
    /// Keys of the config that nothing here knows.
    pub unknown_config_keys: Vec<String>,
    /// The config as understood.
    pub config: ModelConfig,
}

impl Survey {
    /// Looks at `directory`.
    ///
    /// # Errors
    /// Those of the config; [`crate::Error::Checkpoint`] if there is no shard at
    /// all, or the index is broken.
    pub fn of(directory: &Path) -> Result<Self> {
        let config_file = read_config(directory)?;
        let config = config_file.config;
        let shards = ShardList::find(directory, MissingShards::Tolerated)?;
        let experts = ExpertTable::empty(&config);
        let path = |name: &String| ShardFile { path: directory.join(name), length: 0 };
        let listed: Vec<ShardFile> = shards.names.iter().map(path).collect();
        let (mut files, mut contents, mut broken_shards) = (Vec::new(), Vec::new(), Vec::new());
        for file in listed {
            // One by one: a broken shard must not hide the others.
            let filter = ExpertFilter::new(&config, &experts, None);
            match read_headers(std::slice::from_ref(&file), &filter) {
                Ok(mut read) => {
                    let content: ShardContent = read.remove(0);
                    files.push(ShardFile { length: content.length, ..file });
                    contents.push(content);
                }
                Err(error) => broken_shards.push(error.to_string()),
            }
        }
        let text = select_text(contents, &experts);
        let mut survey = Survey {
            roots: Part::default(),
            layers: Vec::new(),
            ignored: text.ignored,
            dtypes: Vec::new(),
            missing: Names::default(),
            unexpected: Names::default(),
            missing_shards: shards.missing,
            broken_shards,
            files,
            unknown_config_keys: config_file.unknown_keys,
            config,
        };
        let mut found: HashMap<String, NamedTensor> =
            text.tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        let mut dtypes = Dtype::ALL.map(|dtype| (dtype, TensorTally::default()));
        let roots = tensor_names::expected_roots(&survey.config);
        survey.roots = survey.count(&roots, text.prefix, &mut found, &mut dtypes);
        for layer in 0..survey.config.layers.len() {
            let expected = tensor_names::expected_layer(&survey.config, layer);
            let kind = survey.config.layers[layer];
            let trunk = survey.count(&expected, text.prefix, &mut found, &mut dtypes);
            survey.layers.push(LayerSurvey {
                attention: kind.attention,
                feed_forward: kind.feed_forward,
                trunk,
                experts: Part::default(),
            });
        }
        survey.count_experts(&experts, text.prefix, &text.expert_spans, &mut dtypes);
        let mut left: Vec<String> = found.into_keys().collect();
        left.sort_unstable();
        left.into_iter().for_each(|name| survey.unexpected.add(name));
        survey.dtypes = dtypes.into_iter().filter(|(_, tally)| tally.count > 0).collect();
        Ok(survey)
    }

    /// How many of the first layers are there whole, with all that is outside of
    /// the layers; 0 if something of that is missing.
    pub fn first_layers(&self) -> usize {
        let whole = |part: &Part| part.found == part.demanded;
        if !whole(&self.roots) {
            return 0;
        }
        self.layers.iter().take_while(|layer| whole(&layer.trunk) && whole(&layer.experts)).count()
    }

    /// Takes the expected tensors out of `found`.
    fn count(
        &mut self,
        expected: &[ExpectedTensor],
        prefix: &str,
        found: &mut HashMap<String, NamedTensor>,
        dtypes: &mut [(Dtype, TensorTally)],
    ) -> Part {
        let mut part = Part { demanded: expected.len() as u64, ..Part::default() };
        for tensor in expected {
            let name = format!("{prefix}{}", tensor.name);
            let Some(entry) = found.get(&name) else {
                self.missing.add(name);
                continue;
            };
            match Dtype::from_name(entry.dtype.name) {
                Some(dtype @ (Dtype::Bf16 | Dtype::F32)) if tensor.shape.accepts(&entry.shape) => {
                    part.add(entry.extent.length);
                    dtypes[dtype as usize].1.add(1, entry.extent.length);
                    found.remove(&name);
                }
                // Left among the unexpected: it is there, in another form.
                _ => {}
            }
        }
        part
    }

    fn count_experts(
        &mut self,
        experts: &ExpertTable,
        prefix: &str,
        spans: &[super::expert_table::ExpertSpan],
        dtypes: &mut [(Dtype, TensorTally)],
    ) {
        let tensors = 6 * experts.experts_per_layer() as u64;
        for layer in experts.layers() {
            self.layers[layer].experts.demanded = tensors;
        }
        let mut last = None;
        for span in spans {
            let key = (span.layer, span.expert, span.part);
            let name = || {
                let name = tensor_names::expert(key.0 as usize, key.1 as usize, key.2);
                format!("{prefix}{name}")
            };
            if last.replace(key) == Some(key) {
                self.unexpected.add(name());
                continue;
            }
            let bytes = experts.part_lengths()[span.part as usize];
            self.layers[span.layer as usize].experts.add(bytes);
            dtypes[Dtype::U8 as usize].1.add(1, bytes);
        }
        for layer in experts.layers() {
            let part = self.layers[layer].experts;
            let absent = part.demanded - part.found;
            if absent > 0 {
                self.missing.count += absent as usize - 1;
                self.missing.add(format!("{prefix}{}", tensor_names::experts(layer)));
            }
        }
    }
}
