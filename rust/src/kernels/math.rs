//! exp, sigmoid, tanh and softplus, the same on every machine.
//!
//! The C library's versions differ between releases and CPUs in the last bit,
//! and the output must not. These compute in float64 with an error far below
//! half a unit of float32, so a result rounded to float32 is the correctly
//! rounded one but for about one argument in a million. They are branch-free,
//! so loops over them vectorise.

/// `e^x` in float64 with a relative error below 1e-14.
///
/// Below -708 the result is that of -708 (3e-308), above 709 that of 709:
/// both are zero and infinity once rounded to float32. NaN stays NaN.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    const ROUNDER: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = if x < -708.0 { -708.0 } else { x };
    let x = if x > 709.0 { 709.0 } else { x };
    let shifted = x.mul_add(std::f64::consts::LOG2_E, ROUNDER);
    let exponent = shifted - ROUNDER;
    let r = (-exponent).mul_add(LN2_LOW, (-exponent).mul_add(LN2_HIGH, x));
    // Taylor series on |r| <= ln(2)/2: the first term left out is below 7e-15.
    let mut p = 1.0 / 39_916_800.0;
    for coefficient in [
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = r.mul_add(p, coefficient);
    }
    // The low bits of `shifted` hold the exponent as an integer.
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    p * power
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Hyperbolic tangent, relative error below 1e-10.
#[inline(always)]
pub fn tanh(x: f64) -> f64 {
    let size = x.abs();
    let decay = exp(-2.0 * size);
    // Near zero `1 - decay` cancels; the series is exact enough below 2^-10.
    let near = size * (-size * size).mul_add(1.0 / 3.0, 1.0);
    let far = (1.0 - decay) / (1.0 + decay);
    (if size < 1.0 / 1024.0 { near } else { far }).copysign(x)
}

/// `ln(1 + e^x)` without overflow.
#[inline(always)]
pub fn softplus(x: f64) -> f64 {
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + libm::log1p(exp(-x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> impl Iterator<Item = f64> {
        let fine = (-200_000..=200_000).map(|i| f64::from(i) * 4.7e-4);
        let small = (-300..=300).map(|i| 1.17f64.powi(i) * if i % 2 == 0 { 1.0 } else { -1.0 });
        fine.chain(small.filter(|x| x.abs() < 700.0))
    }

    fn assert_close(ours: f64, reference: f64, relative: f64, x: f64) {
        let error = (ours - reference).abs();
        assert!(error <= relative * reference.abs(), "x = {x}: {ours} against {reference}");
    }

    #[test]
    fn agree_with_the_library() {
        for x in arguments() {
            assert_close(exp(x), libm::exp(x), 1e-14, x);
            assert_close(sigmoid(x), 1.0 / (1.0 + libm::exp(-x)), 1e-14, x);
            assert_close(tanh(x), libm::tanh(x), 1e-10, x);
            assert_close(softplus(x), libm::log1p(libm::exp(-x.abs())) + x.max(0.0), 1e-14, x);
        }
    }

    #[test]
    fn limits_and_faults() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e300) as f32, 0.0);
        assert_eq!(exp(1e300) as f32, f32::INFINITY);
        assert_eq!(sigmoid(f64::NEG_INFINITY) as f32, 0.0);
        assert_eq!(sigmoid(f64::INFINITY), 1.0);
        assert_eq!(tanh(f64::INFINITY), 1.0);
        assert_eq!(tanh(f64::NEG_INFINITY), -1.0);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f64).to_bits());
        for function in [exp, sigmoid, silu, tanh, softplus] {
            assert!(function(f64::NAN).is_nan());
        }
    }
}
