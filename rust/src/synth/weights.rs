//! What the random weights of a synthetic checkpoint are like.
//!
//! Matrices are uniform around zero and scaled by their fan-in, so that every
//! part passes on values of about the size that it got, through any number of
//! layers; norms lie around one, decays and kernels in plausible ranges. All
//! bits come from the tensor's [`RandomStream`] by integer and exactly rounded
//! arithmetic: a seed gives the same bytes on every machine.
//!
//! Too small weights would leave all logits equal, too large ones would end in
//! saturation, where every text has the same next token.

use super::random_stream::RandomStream;
use crate::format::config::{ModelConfig, RouterActivation};
use crate::format::dtype::Dtype;
use crate::format::expert_table::ExpertPart;
use crate::format::tensor_names::{self as names, ExpectedShape, ExpectedTensor};

/// Half width of a uniform distribution of variance 1.
const UNIT_HALF_WIDTH: f64 = 1.732_050_807_568_877_2;
/// Root mean square of a random nibble, times that of two scales of which one
/// is twice the other: `sqrt(68.5 / 8) * sqrt((1 + 4) / 2)`.
const MXFP4_RMS: f64 = 4.626_688_891_371_5;
/// Standard deviation of the logits.
const LOGIT_GAIN: f64 = 4.0;
/// Makes up for what a gate (a sigmoid, half open on average) takes away.
const GATED_GAIN: f64 = 2.0;
/// Makes up for a gated activation, whose output has about this part of the
/// size of its inputs: `1 / 0.6`.
const ACTIVATED_GAIN: f64 = 1.7;
/// Makes softmax scores differ: of attention, and of the residual mixes.
const SCORE_GAIN: f64 = 1.5;

/// How the bytes of a tensor come about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// All zero bytes.
    Zero,
    /// BF16, uniform.
    Bf16(Uniform),
    /// F32, uniform; elements from `used` on are padding, which is zero.
    F32 { values: Uniform, used: u64 },
    /// Two 4-bit values a byte, all sixteen equally likely.
    Packed,
    /// An 8-bit exponent, `lower` or one more.
    Scale { lower: u8 },
}

/// Values within `half_width` of `centre`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Uniform {
    centre: f32,
    half_width: f32,
}

impl Uniform {
    fn between(low: f32, high: f32) -> Self {
        Uniform { centre: (low + high) / 2.0, half_width: (high - low) / 2.0 }
    }

    /// Around zero, so that a product with `columns` values of size 1 has size `gain`.
    fn matrix(columns: usize, gain: f64) -> Self {
        let deviation = gain / (columns as f64).sqrt();
        Uniform { centre: 0.0, half_width: (UNIT_HALF_WIDTH * deviation) as f32 }
    }

    /// The value for `position` in -1..1.
    fn value(self, position: f32) -> f32 {
        self.centre + self.half_width * position
    }
}

impl Fill {
    /// For a trunk tensor; `suffix` is its name within its layer, or its whole
    /// name outside the layers.
    pub fn trunk(config: &ModelConfig, suffix: &str, tensor: &ExpectedTensor) -> Self {
        let shape = tensor.shape.released();
        let values = match suffix {
            names::kda::A_LOG => Uniform::between(-0.5, 1.0),
            names::kda::DT_BIAS => Uniform::between(-4.0, 0.0),
            names::moe::ROUTER_BIAS => router_bias(config),
            names::EMBEDDING if !config.tied_embeddings => Uniform::matrix(1, 1.0),
            _ => match shape[..] {
                [_] => Uniform::between(0.8, 1.2),
                _ => Uniform::matrix(shape[shape.len() - 1], matrix_gain(suffix)),
            },
        };
        let used = match tensor.shape {
            ExpectedShape::Padded { used, .. } => used as u64,
            ExpectedShape::Exact(_) => u64::MAX,
        };
        match tensor.dtype {
            Dtype::Bf16 => Fill::Bf16(values),
            Dtype::F32 => Fill::F32 { values, used },
            Dtype::U8 => Fill::Packed,
        }
    }

    /// For a tensor of a routed expert; `columns` is the fan-in of its matrix.
    pub fn expert(part: ExpertPart, columns: usize) -> Self {
        if !part.is_scale() {
            return Fill::Packed;
        }
        let gain = if part == ExpertPart::DownScale { ACTIVATED_GAIN } else { 1.0 };
        let wanted = gain / (columns as f64).sqrt() / MXFP4_RMS;
        // The power of two nearest to `wanted`: its exponent once it is rounded
        // up where its fraction is above the square root of two.
        let exponent = ((wanted * std::f64::consts::SQRT_2).to_bits() >> 52) as i64 - 1023;
        Fill::Scale { lower: (127 + exponent).clamp(1, 253) as u8 }
    }

    /// Writes the bytes from `offset` of the tensor on. Offset and length are
    /// multiples of the element size.
    pub fn write(self, stream: RandomStream, offset: u64, buffer: &mut [u8]) {
        if self == Fill::Zero {
            return buffer.fill(0);
        }
        stream.fill(offset, buffer);
        match self {
            Fill::Zero | Fill::Packed => {}
            Fill::Scale { lower } => buffer.iter_mut().for_each(|byte| *byte = lower + (*byte & 1)),
            Fill::Bf16(values) => {
                for bytes in buffer.as_chunks_mut::<2>().0 {
                    let position = (f32::from(i16::from_le_bytes(*bytes)) + 0.5) / 32_768.0;
                    *bytes = bf16(values.value(position)).to_le_bytes();
                }
            }
            Fill::F32 { values, used } => {
                let first = offset / 4;
                for (index, bytes) in (first..).zip(buffer.as_chunks_mut::<4>().0) {
                    let position = ((i32::from_le_bytes(*bytes) >> 8) as f32 + 0.5) / 8_388_608.0;
                    let value = if index < used { values.value(position) } else { 0.0 };
                    *bytes = value.to_le_bytes();
                }
            }
        }
    }
}

fn matrix_gain(suffix: &str) -> f64 {
    match suffix {
        names::LM_HEAD | names::EMBEDDING => LOGIT_GAIN,
        names::residual::ATTENTION_PROJ
        | names::residual::MLP_PROJ
        | names::OUTPUT_RES_PROJ
        | names::mla::Q_B_PROJ => SCORE_GAIN,
        names::kda::O_PROJ => GATED_GAIN,
        names::dense::DOWN_PROJ | names::moe::SHARED_DOWN => ACTIVATED_GAIN,
        _ => 1.0,
    }
}

/// Narrower than the scores, or the same experts would always be chosen.
fn router_bias(config: &ModelConfig) -> Uniform {
    let half_width = match &config.moe {
        Some(moe) if moe.router_activation == RouterActivation::Softmax => 0.5 / moe.experts as f32,
        _ => 0.1,
    };
    Uniform { centre: 0.0, half_width }
}

/// The nearest BF16, ties to even, of a finite value (whose sum cannot wrap;
/// checked additions would cost most of the time).
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    (bits.wrapping_add(0x7fff).wrapping_add(odd) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 1 << 16;

    fn bytes(fill: Fill, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        fill.write(RandomStream::new(3, "weights"), 0, &mut bytes);
        bytes
    }

    fn deviation(values: impl Iterator<Item = f32>) -> f64 {
        let squares: Vec<f64> = values.map(|value| f64::from(value).powi(2)).collect();
        (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
    }

    #[test]
    fn a_matrix_keeps_the_size_of_what_it_multiplies() {
        let bytes = bytes(Fill::Bf16(Uniform::matrix(400, 1.5)), 2 * COUNT);
        let values = bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16));
        let deviation = deviation(values) * 20.0;
        assert!((deviation - 1.5).abs() < 0.02, "{deviation}");
    }

    #[test]
    fn an_expert_matrix_keeps_it_within_a_factor_of_the_root_of_two() {
        const NIBBLES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (part, columns, gain) in [
            (ExpertPart::GateScale, 3584, 1.0),
            (ExpertPart::DownScale, 3072, ACTIVATED_GAIN),
            (ExpertPart::UpScale, 32, 1.0),
        ] {
            let scales = bytes(Fill::expert(part, columns), COUNT);
            let values =
                bytes(Fill::Packed, COUNT).into_iter().zip(&scales).flat_map(|(packed, scale)| {
                    let scale = 2f32.powi(i32::from(*scale) - 127);
                    [packed & 7, packed >> 4 & 7].map(|code| NIBBLES[usize::from(code)] * scale)
                });
            let found = deviation(values) * (columns as f64).sqrt() / gain;
            assert!((0.70..1.42).contains(&found), "{part:?}: {found}");
            let lowest = scales.iter().min().copied().unwrap_or_default();
            assert!(scales.contains(&(lowest + 1)), "one exponent only");
        }
    }

    #[test]
    fn padding_is_zero_and_values_stay_within_their_bounds() {
        let fill = Fill::F32 { values: Uniform::between(-4.0, 0.0), used: 96 };
        let bytes = bytes(fill, 4 * 128);
        let values: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
        assert!(values[..96].iter().all(|value| (-4.0..0.0).contains(value)));
        assert!(values[96..].iter().all(|value| *value == 0.0));
    }

    #[test]
    fn bf16_is_rounded_to_the_nearest() {
        assert_eq!(bf16(1.0), 0x3f80);
        assert_eq!(bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
    }
}
