//! One shard's header, sorted into routed experts (numbers) and all other
//! tensors (names). The text of the header is dropped at the end.

use std::path::Path;

use super::catalog::TensorTally;
use super::expert_table::{ExpertSpan, ExpertTable};
use super::safetensors::{HeaderEntry, HeaderText};
use super::shard_index::NameDigest;
use super::tensor_names;
use crate::error::Result;
use crate::format::config::ModelConfig;
use crate::format::dtype::{Dtype, StoredDtype};
use crate::io::extent::{Extent, FileId};

/// A tensor that is not one of the model's routed experts.
pub(super) struct NamedTensor {
    pub name: String,
    pub dtype: StoredDtype,
    pub shape: Vec<usize>,
    pub extent: Extent,
}

/// What a shard holds.
#[derive(Default)]
pub(super) struct ShardContent {
    pub length: u64,
    /// Digest of all its names, for comparison with an index.
    pub names: NameDigest,
    /// Tensors of layers that are left out.
    pub beyond: TensorTally,
    /// Routed experts whose names start with the prefix of the text model.
    pub prefixed_experts: Vec<ExpertSpan>,
    /// Routed experts whose names do not.
    pub plain_experts: Vec<ExpertSpan>,
    pub others: Vec<NamedTensor>,
}

/// Recognises the tensors of a model's routed experts, and layers that are left out.
pub(super) struct ExpertFilter<'c> {
    table: &'c ExpertTable,
    shapes: [[usize; 2]; 6],
    /// Layers from this one on are left out.
    kept_layers: usize,
}

impl<'c> ExpertFilter<'c> {
    /// With `kept_layers` later layers are left out.
    pub fn new(config: &ModelConfig, table: &'c ExpertTable, kept_layers: Option<usize>) -> Self {
        let kept_layers = kept_layers.unwrap_or(usize::MAX);
        ExpertFilter { table, shapes: config.expert_shapes(), kept_layers }
    }

    /// Whether `name`, without the prefix, is of a layer that is left out.
    fn leaves_out(&self, name: &str) -> bool {
        self.kept_layers < usize::MAX
            && tensor_names::layer_of(name).is_some_and(|layer| layer >= self.kept_layers)
    }

    /// The tensor as a span, if name, type and shape are those of an expert of
    /// this model. `name` is without the prefix.
    fn span(&self, name: &str, entry: &HeaderEntry<'_>, file: FileId) -> Option<ExpertSpan> {
        let (layer, expert, part) = tensor_names::parse_expert(name)?;
        let fits = self.table.contains(layer, expert)
            && entry.dtype.name == Dtype::U8.name()
            && entry.shape == self.shapes[part as usize];
        let (layer, expert) = (u32::try_from(layer).ok()?, u32::try_from(expert).ok()?);
        fits.then_some(ExpertSpan { layer, expert, part, file, offset: entry.offset })
    }
}

/// Reads the header of the shard `file` at `path`.
///
/// # Errors
/// Those of [`HeaderText`].
pub(super) fn read_shard(
    path: &Path,
    file: FileId,
    filter: &ExpertFilter<'_>,
) -> Result<ShardContent> {
    let header = HeaderText::read(path)?;
    let mut content = ShardContent { length: header.file_length(), ..Default::default() };
    for entry in header.entries()? {
        content.names.add(&entry.name);
        let (plain_name, prefixed) = match entry.name.strip_prefix(tensor_names::PREFIX) {
            Some(name) => (name, true),
            None => (entry.name.as_ref(), false),
        };
        if filter.leaves_out(plain_name) {
            content.beyond.add(1, entry.length);
            continue;
        }
        match filter.span(plain_name, &entry, file) {
            Some(span) if prefixed => content.prefixed_experts.push(span),
            Some(span) => content.plain_experts.push(span),
            None => content.others.push(NamedTensor {
                dtype: entry.dtype,
                extent: Extent { file, offset: entry.offset, length: entry.length },
                shape: entry.shape,
                name: entry.name.into_owned(),
            }),
        }
    }
    Ok(content)
}

/// All names of a shard, to word an error.
pub(super) fn shard_names(path: &Path) -> Result<Vec<String>> {
    let header = HeaderText::read(path)?;
    Ok(header.entries()?.into_iter().map(|entry| entry.name.into_owned()).collect())
}
