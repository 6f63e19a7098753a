//! Where every routed expert lies: a table of numbers, because the names of
//! half a million tensors would take thirty times as much memory.

use crate::format::config::{FeedForwardKind, ModelConfig};
use crate::format::tensor_names;
use crate::io::extent::{Extent, FileId};

/// The six tensors of a routed expert, in the order in which the released
/// files hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExpertPart {
    /// `w1.weight_packed`: gate projection.
    GatePacked,
    /// `w1.weight_scale`.
    GateScale,
    /// `w2.weight_packed`: down projection.
    DownPacked,
    /// `w2.weight_scale`.
    DownScale,
    /// `w3.weight_packed`: up projection.
    UpPacked,
    /// `w3.weight_scale`.
    UpScale,
}

impl ExpertPart {
    /// All six, in file order.
    pub const ALL: [ExpertPart; 6] = [
        ExpertPart::GatePacked,
        ExpertPart::GateScale,
        ExpertPart::DownPacked,
        ExpertPart::DownScale,
        ExpertPart::UpPacked,
        ExpertPart::UpScale,
    ];

    /// Whether this is one of the three scale tensors.
    pub fn is_scale(self) -> bool {
        matches!(self, Self::GateScale | Self::DownScale | Self::UpScale)
    }
}

/// One of an expert's tensors as a shard header has it. Ordered by what it is,
/// then by where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExpertSpan {
    pub layer: u32,
    pub expert: u32,
    pub part: ExpertPart,
    pub file: FileId,
    pub offset: u64,
}

/// File and offset of the six tensors of every routed expert. All experts of a
/// model have the same shapes, so lengths are stored once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTable {
    /// Per layer: its row of experts, if it has any.
    rows: Vec<Option<usize>>,
    experts_per_layer: usize,
    part_lengths: [u64; 6],
    files: Vec<[FileId; 6]>,
    offsets: Vec<[u64; 6]>,
}

impl ExpertTable {
    /// The layers of `config` that have experts, without any places yet.
    pub(super) fn empty(config: &ModelConfig) -> Self {
        let mut row_count = 0;
        let rows = config.layers.iter().map(|kind| {
            (kind.feed_forward == FeedForwardKind::Experts).then(|| {
                row_count += 1;
                row_count - 1
            })
        });
        let shapes = config.expert_shapes();
        ExpertTable {
            rows: rows.collect(),
            experts_per_layer: config.moe.as_ref().map_or(0, |moe| moe.experts),
            part_lengths: shapes.map(|[rows, columns]| rows as u64 * columns as u64),
            files: Vec::new(),
            offsets: Vec::new(),
        }
    }

    /// Fills the table.
    ///
    /// # Panics
    /// If `spans` are not all six tensors of all experts, in order.
    pub(super) fn fill(&mut self, spans: &[ExpertSpan]) {
        assert_eq!(spans.len(), self.expert_count() * 6);
        self.files =
            spans.chunks_exact(6).map(|six| std::array::from_fn(|i| six[i].file)).collect();
        self.offsets =
            spans.chunks_exact(6).map(|six| std::array::from_fn(|i| six[i].offset)).collect();
    }

    /// Whether the model has this expert.
    pub fn contains(&self, layer: usize, expert: usize) -> bool {
        self.rows.get(layer).is_some_and(Option::is_some) && expert < self.experts_per_layer
    }

    /// The six tensors of an expert, in the order of [`ExpertPart`].
    ///
    /// # Panics
    /// If the model has no such expert.
    pub fn parts(&self, layer: usize, expert: usize) -> [Extent; 6] {
        assert!(self.contains(layer, expert), "layer {layer} has no expert {expert}");
        let row = self.rows[layer].unwrap_or_default();
        let index = row * self.experts_per_layer + expert;
        std::array::from_fn(|part| Extent {
            file: self.files[index][part],
            offset: self.offsets[index][part],
            length: self.part_lengths[part],
        })
    }

    /// Layers that have experts, in order.
    pub fn layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.rows.iter().enumerate().filter_map(|(layer, row)| row.map(|_| layer))
    }

    /// Layers of the model, with and without experts.
    pub fn model_layers(&self) -> usize {
        self.rows.len()
    }

    /// Experts of one expert layer; 0 if no layer has any.
    pub fn experts_per_layer(&self) -> usize {
        self.experts_per_layer
    }

    /// Experts of the whole model.
    pub fn expert_count(&self) -> usize {
        self.layers().count() * self.experts_per_layer
    }

    /// Bytes of each of the six tensors.
    pub fn part_lengths(&self) -> [u64; 6] {
        self.part_lengths
    }

    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.part_lengths.iter().sum()
    }

    /// Heap memory of the table.
    pub(super) fn memory_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Option<usize>>()
            + self.files.capacity() * size_of::<[FileId; 6]>()
            + self.offsets.capacity() * size_of::<[u64; 6]>()
    }
}

impl ModelConfig {
    /// Width that a routed expert reads and writes: the latent one, or the full one.
    pub fn expert_input_width(&self) -> usize {
        self.moe.as_ref().and_then(|moe| moe.latent_dim).unwrap_or(self.hidden_size)
    }

    /// Shapes of an expert's tensors in the order of [`ExpertPart`]; empty
    /// shapes if the model has no experts.
    pub fn expert_shapes(&self) -> [[usize; 2]; 6] {
        let width = self.moe.as_ref().map_or(0, |moe| moe.expert_width);
        let input = if width == 0 { 0 } else { self.expert_input_width() };
        ExpertPart::ALL.map(|part| tensor_names::expert_shape(part, width, input))
    }
}
