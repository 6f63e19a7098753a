//! Once at open: names become offsets, small vectors become floats, and the
//! matrices become tiles in the order in which a sweep multiplies them.
//!
//! This file is the walk. The forward pass visits the tiles in just this order;
//! the stream notices when it does not.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::format::catalog::{Catalog, TensorEntry};
use crate::format::config::{AttentionKind, FeedForwardKind, KdaConfig, MlaConfig, ModelConfig};
use crate::format::dtype::Dtype;
use crate::format::tensor_names::{self as names, dense, kda, mla, moe, residual};
use crate::io::extent::Extent;
use crate::io::file::WeightFile;
use crate::kernels::bf16;
use crate::kernels::math;
use crate::model::weights::*;
use crate::storage::trunk_stream::TileIndex;

/// A model whose tensors have all been found.
#[derive(Debug)]
pub struct BoundModel {
    /// Layer by layer.
    pub layers: Vec<LayerWeights>,
    /// Outside the layers.
    pub roots: RootWeights,
    /// All tiles in the order of use.
    pub walk: Vec<Extent>,
    /// First tile of the output matrix.
    pub head: TileIndex,
    /// Rows of the largest tile, for scratch.
    pub tile_rows_max: usize,
    /// Bytes of the small vectors that stay in memory as floats.
    pub vector_bytes: usize,
    /// Hash over the content of all small vectors.
    pub vector_hash: u64,
}

/// Where the bytes of a matrix are read from, if not from its own place.
pub type Placement<'p> = dyn Fn(&TensorEntry) -> Result<Extent> + Sync + 'p;

/// Finds every tensor of `catalog`, reads the small ones and cuts the large
/// ones into tiles of at most `tile_bytes` (but at least one row, or one head),
/// which lie where `placement` says.
///
/// # Errors
/// [`Error::Io`] from reading, [`Error::NumericalFault`] for a vector that
/// contains NaN or infinity.
pub fn bind(
    catalog: &Catalog,
    files: &[WeightFile],
    tile_bytes: usize,
    placement: Option<&Placement<'_>>,
) -> Result<BoundModel> {
    let vectors = Vectors { catalog, files };
    let mut walk = Walk { catalog, placement, tile_bytes, tiles: Vec::new(), tile_rows_max: 0 };
    let mut matrices = Vec::new();
    for layer in 0..catalog.config.layers.len() {
        matrices.push(walk.layer(layer)?);
    }
    let head = walk.tiles.len();
    let embedding = catalog.config.tied_embeddings;
    let lm_head = walk.matrix(if embedding { names::EMBEDDING } else { names::LM_HEAD }, 1)?;
    let layers: Vec<LayerWeights> = matrices
        .into_par_iter()
        .enumerate()
        .map(|(layer, matrices)| vectors.layer(layer, matrices))
        .collect::<Result<_>>()?;
    let roots = vectors.roots(lm_head)?;
    let (vector_bytes, vector_hash) = measure(&layers, &roots);
    let Walk { tiles: walk, tile_rows_max, .. } = walk;
    Ok(BoundModel { layers, roots, walk, head, tile_rows_max, vector_bytes, vector_hash })
}

/// The matrices of a layer in the order of use.
struct LayerMatrices {
    attention: Vec<StreamedMatrix>,
    feed_forward: Vec<StreamedMatrix>,
}

struct Walk<'a> {
    catalog: &'a Catalog,
    placement: Option<&'a Placement<'a>>,
    tile_bytes: usize,
    tiles: Vec<Extent>,
    tile_rows_max: usize,
}

impl Walk<'_> {
    fn layer(&mut self, layer: usize) -> Result<LayerMatrices> {
        let config = &self.catalog.config;
        let kind = config.layers[layer];
        let mut order: Vec<(&str, usize)> = Vec::new();
        match kind.attention {
            AttentionKind::Kda => {
                order.extend([kda::Q_PROJ, kda::K_PROJ, kda::V_PROJ].map(|name| (name, 1)));
                order.extend([kda::F_A_PROJ, kda::F_B_PROJ, kda::B_PROJ].map(|name| (name, 1)));
                match kda_config(config).full_rank_gate {
                    true => order.push((kda::G_PROJ, 1)),
                    false => order.extend([(kda::G_A_PROJ, 1), (kda::G_B_PROJ, 1)]),
                }
                order.push((kda::O_PROJ, 1));
            }
            AttentionKind::Mla => {
                let mla = mla_config(config);
                match mla.query_rank {
                    Some(_) => order.extend([(mla::Q_A_PROJ, 1), (mla::Q_B_PROJ, 1)]),
                    None => order.push((mla::Q_PROJ, 1)),
                }
                order.push((mla::KV_A_PROJ, 1));
                if mla.output_gate {
                    order.push((mla::G_PROJ, 1));
                }
                // A head's keys and values lie together and are used together.
                order.push((mla::KV_B_PROJ, mla.nope_dim + mla.value_dim));
                order.push((mla::O_PROJ, 1));
            }
        }
        let attention = self.matrices(layer, &order)?;
        let order: Vec<(&str, usize)> = match (kind.feed_forward, &config.moe) {
            (FeedForwardKind::Experts, Some(moe)) => {
                let latent = moe.latent_dim.is_some();
                let shared = moe.shared_width > 0;
                [
                    (true, moe::ROUTER),
                    (latent, moe::LATENT_DOWN),
                    (shared, moe::SHARED_GATE),
                    (shared, moe::SHARED_UP),
                    (shared, moe::SHARED_DOWN),
                    (latent, moe::LATENT_UP),
                ]
                .into_iter()
                .filter_map(|(present, name)| present.then_some((name, 1)))
                .collect()
            }
            _ => [dense::GATE_PROJ, dense::UP_PROJ, dense::DOWN_PROJ].map(|name| (name, 1)).into(),
        };
        let feed_forward = self.matrices(layer, &order)?;
        Ok(LayerMatrices { attention, feed_forward })
    }

    fn matrices(&mut self, layer: usize, order: &[(&str, usize)]) -> Result<Vec<StreamedMatrix>> {
        order
            .iter()
            .map(|(suffix, granularity)| self.matrix(&names::layer(layer, suffix), *granularity))
            .collect()
    }

    /// Cuts a matrix into tiles whose rows are a multiple of `granularity`.
    fn matrix(&mut self, name: &str, granularity: usize) -> Result<StreamedMatrix> {
        let entry = self.catalog.tensor(name)?;
        let (rows, columns) = (entry.shape[0], entry.shape[1]);
        let row_bytes = columns * entry.dtype.size();
        let fitting = self.tile_bytes / row_bytes.max(1) / granularity * granularity;
        let tile_rows = fitting.clamp(granularity.min(rows), rows);
        let extent = self.placement.map_or(Ok(entry.extent), |place| place(entry))?;
        let first = self.tiles.len();
        for row in (0..rows).step_by(tile_rows) {
            let count = tile_rows.min(rows - row);
            let (start, length) = ((row * row_bytes) as u64, (count * row_bytes) as u64);
            self.tiles.push(extent.slice(start, length));
        }
        self.tile_rows_max = self.tile_rows_max.max(tile_rows);
        Ok(StreamedMatrix {
            name: entry.name.clone(),
            rows,
            columns,
            dtype: entry.dtype,
            tile_rows,
            tiles: first..self.tiles.len(),
        })
    }
}

fn kda_config(config: &ModelConfig) -> &KdaConfig {
    config.kda.as_ref().expect("a config with KDA layers has their section")
}

fn mla_config(config: &ModelConfig) -> &MlaConfig {
    config.mla.as_ref().expect("a config with MLA layers has their section")
}

struct Vectors<'a> {
    catalog: &'a Catalog,
    files: &'a [WeightFile],
}

impl Vectors<'_> {
    fn layer(&self, layer: usize, matrices: LayerMatrices) -> Result<LayerWeights> {
        let kind = self.catalog.config.layers[layer];
        let mixes = match self.catalog.config.residual_block {
            Some(_) => Some([
                self.mix(layer, residual::ATTENTION_NORM, residual::ATTENTION_PROJ)?,
                self.mix(layer, residual::MLP_NORM, residual::MLP_PROJ)?,
            ]),
            None => None,
        };
        Ok(LayerWeights {
            mixes,
            attention_norm: self.of(layer, names::INPUT_NORM)?,
            feed_forward_norm: self.of(layer, names::POST_ATTENTION_NORM)?,
            attention: match kind.attention {
                AttentionKind::Kda => {
                    AttentionWeights::Kda(Box::new(self.kda(layer, matrices.attention)?))
                }
                AttentionKind::Mla => {
                    AttentionWeights::Mla(Box::new(self.mla(layer, matrices.attention)?))
                }
            },
            feed_forward: self.feed_forward(layer, kind.feed_forward, matrices.feed_forward)?,
        })
    }

    fn kda(&self, layer: usize, matrices: Vec<StreamedMatrix>) -> Result<KdaWeights> {
        let config = kda_config(&self.catalog.config);
        let mut order = matrices.into_iter();
        let mut next = || order.next().expect("the walk lists every matrix of the layer");
        let rates = self.of(layer, kda::A_LOG)?;
        Ok(KdaWeights {
            projections: std::array::from_fn(|_| next()),
            decay: std::array::from_fn(|_| next()),
            beta: next(),
            gate: (0..if config.full_rank_gate { 1 } else { 2 }).map(|_| next()).collect(),
            output: next(),
            convolutions: [
                self.convolution(layer, kda::Q_CONV)?,
                self.convolution(layer, kda::K_CONV)?,
                self.convolution(layer, kda::V_CONV)?,
            ],
            decay_rate: rates.iter().map(|rate| math::exp(f64::from(*rate))).collect(),
            decay_bias: self.of(layer, kda::DT_BIAS)?,
            output_norm: self.of(layer, kda::O_NORM)?,
        })
    }

    /// Reorders `[P, 1, taps]` into `[heads, taps, d]`, so that a head's
    /// channels lie side by side.
    fn convolution(&self, layer: usize, suffix: &str) -> Result<Vec<f32>> {
        let config = kda_config(&self.catalog.config);
        let (taps, dim) = (config.conv_taps, config.head_dim);
        let stored = self.of(layer, suffix)?;
        let mut out = vec![0.0; stored.len()];
        for (channel, kernel) in stored.chunks_exact(taps).enumerate() {
            let (head, column) = (channel / dim, channel % dim);
            for (tap, weight) in kernel.iter().enumerate() {
                out[(head * taps + tap) * dim + column] = *weight;
            }
        }
        Ok(out)
    }

    fn mla(&self, layer: usize, matrices: Vec<StreamedMatrix>) -> Result<MlaWeights> {
        let config = mla_config(&self.catalog.config);
        let mut order = matrices.into_iter();
        let mut next = || order.next().expect("the walk lists every matrix of the layer");
        Ok(MlaWeights {
            query_down: match config.query_rank {
                Some(_) => Some((next(), self.of(layer, mla::Q_A_NORM)?)),
                None => None,
            },
            query: next(),
            latent: next(),
            latent_norm: self.of(layer, mla::KV_A_NORM)?,
            gate: config.output_gate.then(&mut next),
            expansion: next(),
            output: next(),
        })
    }

    fn feed_forward(
        &self,
        layer: usize,
        kind: FeedForwardKind,
        matrices: Vec<StreamedMatrix>,
    ) -> Result<FeedForwardWeights> {
        let mut order = matrices.into_iter();
        let mut next = || order.next().expect("the walk lists every matrix of the layer");
        let (FeedForwardKind::Experts, Some(config)) = (kind, &self.catalog.config.moe) else {
            return Ok(FeedForwardWeights::Dense(Box::new(mlp(&mut next))));
        };
        let router = next();
        let down = config.latent_dim.map(|_| next());
        let shared = (config.shared_width > 0).then(|| mlp(&mut next));
        let latent_norm = match config.latent_dim {
            Some(_) if config.latent_norm => Some(self.of(layer, moe::LATENT_NORM)?),
            _ => None,
        };
        Ok(FeedForwardWeights::Experts(Box::new(MoeWeights {
            router,
            router_bias: self.of(layer, moe::ROUTER_BIAS)?,
            latent: down.map(|down| [down, next()]),
            latent_norm,
            shared,
        })))
    }

    fn roots(&self, lm_head: StreamedMatrix) -> Result<RootWeights> {
        let output_mix = match self.catalog.config.residual_block {
            Some(_) => Some(MixWeights {
                norm: self.read(names::OUTPUT_RES_NORM)?,
                projection: self.read(names::OUTPUT_RES_PROJ)?,
            }),
            None => None,
        };
        Ok(RootWeights { output_mix, norm: self.read(names::FINAL_NORM)?, lm_head })
    }

    fn mix(&self, layer: usize, norm: &str, projection: &str) -> Result<MixWeights> {
        Ok(MixWeights { norm: self.of(layer, norm)?, projection: self.of(layer, projection)? })
    }

    fn of(&self, layer: usize, suffix: &str) -> Result<Vec<f32>> {
        self.read(&names::layer(layer, suffix))
    }

    /// Reads a small tensor as floats. Only what the model uses of it: the
    /// padding of `A_log` is never read.
    fn read(&self, name: &str) -> Result<Vec<f32>> {
        let entry = self.catalog.tensor(name)?;
        let stored: usize = entry.shape.iter().product();
        let count = match &self.catalog.config.kda {
            Some(config) if name.ends_with(kda::A_LOG) => config.heads,
            _ => stored,
        };
        let values = read_floats(entry, &self.files[usize::from(entry.extent.file.0)], count)?;
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(Error::NumericalFault {
                what: format!("{} at index {index}", values[index]),
                location: format!("tensor `{}`", entry.name),
            }),
        }
    }
}

fn mlp(next: &mut impl FnMut() -> StreamedMatrix) -> MlpWeights {
    MlpWeights { gate: next(), up: next(), down: next() }
}

/// The first `count` elements of a BF16 or F32 tensor.
fn read_floats(entry: &TensorEntry, file: &WeightFile, count: usize) -> Result<Vec<f32>> {
    let mut bytes = vec![0; count * entry.dtype.size()];
    file.read_exact(entry.extent.offset, &mut bytes)?;
    let mut values = vec![0.0; count];
    match entry.dtype {
        Dtype::F32 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        _ => bf16::widen_slice(&bytes, &mut values),
    }
    Ok(values)
}

/// Size and hash of all small vectors.
fn measure(layers: &[LayerWeights], roots: &RootWeights) -> (usize, u64) {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut bytes = 0;
    let mut add = |vector: &[f32]| {
        hash.update(bytemuck::cast_slice(vector));
        bytes += size_of_val(vector);
    };
    let mixes = layers.iter().flat_map(|layer| layer.mixes.iter().flatten());
    for mix in mixes.chain(&roots.output_mix) {
        add(&mix.norm);
        add(&mix.projection);
    }
    add(&roots.norm);
    for layer in layers {
        add(&layer.attention_norm);
        add(&layer.feed_forward_norm);
        match &layer.attention {
            AttentionWeights::Kda(kda) => {
                kda.convolutions.iter().for_each(|kernel| add(kernel));
                add(&kda.decay_bias);
                add(&kda.output_norm);
                let rates: Vec<f32> = kda.decay_rate.iter().map(|rate| *rate as f32).collect();
                add(&rates);
            }
            AttentionWeights::Mla(mla) => {
                mla.query_down.iter().for_each(|(_, norm)| add(norm));
                add(&mla.latent_norm);
            }
        }
        if let FeedForwardWeights::Experts(moe) = &layer.feed_forward {
            add(&moe.router_bias);
            moe.latent_norm.iter().for_each(|norm| add(norm));
        }
    }
    (bytes, hash.digest())
}
