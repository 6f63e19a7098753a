//! Which tensors a shard of the released layout holds, and at which offsets.
//!
//! Layer `l` lies in shard `l + 1`, the tensors outside the layers in the next
//! one, the image tensors in two more. Within a shard tensors stand in order
//! of descending element size, then by name, without gaps; the header is JSON
//! without spaces, padded to a multiple of eight. This reproduces the sizes of
//! the published files to the byte.

use std::cmp::Reverse;
use std::fmt::Write;
use std::ops::Range;

use super::random_stream::RandomStream;
use super::released;
use super::weights::Fill;
use crate::format::config::{FeedForwardKind, ModelConfig};
use crate::format::dtype::Dtype;
use crate::format::expert_table::ExpertPart;
use crate::format::tensor_names::{self, ExpectedTensor};

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    fill: Fill,
}

impl Tensor {
    pub fn byte_count(&self) -> u64 {
        self.shape.iter().map(|axis| *axis as u64).product::<u64>() * self.dtype.size() as u64
    }
}

/// All shards of a checkpoint, made one at a time: the names of the release
/// alone would take 50 MB.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    config: ModelConfig,
    /// Before the name of every text tensor.
    prefix: &'static str,
    has_images: bool,
}

impl Layout {
    /// Text tensors have the released prefix if `is_nested`.
    pub fn new(config: ModelConfig, is_nested: bool, has_images: bool) -> Self {
        let prefix = if is_nested { tensor_names::PREFIX } else { "" };
        Layout { config, prefix, has_images }
    }

    pub fn shard_count(&self) -> usize {
        self.config.layers.len() + 1 + if self.has_images { 2 } else { 0 }
    }

    /// File name of a shard, counted from 0.
    pub fn shard_name(&self, shard: usize) -> String {
        format!("model-{:05}-of-{:06}.safetensors", shard + 1, self.shard_count())
    }

    /// A shard, counted from 0.
    pub fn shard(&self, shard: usize) -> Shard {
        let layers = self.config.layers.len();
        Shard::new(if shard < layers {
            self.layer_tensors(shard)
        } else if shard == layers {
            let roots = tensor_names::expected_roots(&self.config);
            roots.into_iter().map(|tensor| self.trunk_tensor(tensor, "")).collect()
        } else if shard == layers + 1 {
            image_tensors(released::image_projector())
        } else {
            image_tensors(released::image_encoder())
        })
    }

    fn layer_tensors(&self, layer: usize) -> Vec<Tensor> {
        let layer_prefix = tensor_names::layer(layer, "");
        let mut tensors: Vec<Tensor> = tensor_names::expected_layer(&self.config, layer)
            .into_iter()
            .map(|tensor| self.trunk_tensor(tensor, &layer_prefix))
            .collect();
        if let (FeedForwardKind::Experts, Some(moe)) =
            (self.config.layers[layer].feed_forward, &self.config.moe)
        {
            let shapes = self.config.expert_shapes();
            for expert in 0..moe.experts {
                tensors.extend(ExpertPart::ALL.map(|part| Tensor {
                    name: self.prefix.to_owned() + &tensor_names::expert(layer, expert, part),
                    dtype: Dtype::U8,
                    shape: shapes[part as usize].to_vec(),
                    fill: Fill::expert(part, expert_fan_in(&shapes, part)),
                }));
            }
        }
        tensors
    }

    fn trunk_tensor(&self, tensor: ExpectedTensor, layer_prefix: &str) -> Tensor {
        let suffix = tensor.name.strip_prefix(layer_prefix).unwrap_or(&tensor.name);
        Tensor {
            fill: Fill::trunk(&self.config, suffix, &tensor),
            dtype: tensor.dtype,
            shape: tensor.shape.released(),
            name: self.prefix.to_owned() + &tensor.name,
        }
    }
}

/// Columns of the matrix that a tensor is a part of.
fn expert_fan_in(shapes: &[[usize; 2]; 6], part: ExpertPart) -> usize {
    let packed = match part {
        ExpertPart::GatePacked | ExpertPart::GateScale => ExpertPart::GatePacked,
        ExpertPart::DownPacked | ExpertPart::DownScale => ExpertPart::DownPacked,
        ExpertPart::UpPacked | ExpertPart::UpScale => ExpertPart::UpPacked,
    };
    2 * shapes[packed as usize][1]
}

fn image_tensors(shapes: Vec<(String, Vec<usize>)>) -> Vec<Tensor> {
    let tensor = |(name, shape)| Tensor { name, dtype: Dtype::Bf16, shape, fill: Fill::Zero };
    shapes.into_iter().map(tensor).collect()
}

/// One file: its tensors in file order and where their data start and end,
/// counted from the end of the header.
pub(super) struct Shard {
    tensors: Vec<(Tensor, Range<u64>)>,
}

impl Shard {
    fn new(mut tensors: Vec<Tensor>) -> Self {
        tensors.sort_by(|a, b| {
            (Reverse(a.dtype.size()), &a.name).cmp(&(Reverse(b.dtype.size()), &b.name))
        });
        let mut end = 0;
        let place = |tensor: Tensor| {
            let start = end;
            end += tensor.byte_count();
            (tensor, start..end)
        };
        Shard { tensors: tensors.into_iter().map(place).collect() }
    }

    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.tensors.iter().map(|(tensor, _)| tensor)
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |(_, span)| span.end)
    }

    /// The file up to the data: the length of the header, then the header.
    pub fn header(&self) -> Vec<u8> {
        let mut text = String::from("{");
        for (index, (tensor, span)) in self.tensors.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            // Writing into a string cannot fail.
            let _ = write!(
                text,
                r#"{separator}"{}":{{"dtype":"{}","shape":["#,
                tensor.name,
                tensor.dtype.name()
            );
            for (axis, size) in tensor.shape.iter().enumerate() {
                let separator = if axis == 0 { "" } else { "," };
                let _ = write!(text, "{separator}{size}");
            }
            let _ = write!(text, r#"],"data_offsets":[{},{}]}}"#, span.start, span.end);
        }
        text.push('}');
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        header
    }

    /// Writes the random data of `range`, whose start is a multiple of the
    /// largest element size, into `buffer`.
    pub fn fill(&self, seed: u64, range: &Range<u64>, buffer: &mut [u8]) {
        let first = self.tensors.partition_point(|(_, span)| span.end <= range.start);
        for (tensor, span) in &self.tensors[first..] {
            let (start, end) = (span.start.max(range.start), span.end.min(range.end));
            if start >= end {
                break;
            }
            let part = (start - range.start) as usize..(end - range.start) as usize;
            let stream = RandomStream::new(seed, &tensor.name);
            tensor.fill.write(stream, start - span.start, &mut buffer[part]);
        }
    }
}
