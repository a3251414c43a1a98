//! What must come out, computed slowly and plainly.
//!
//! Two kinds of answers:
//!
//! - [`Expected`]: f64 values, each with what its tolerance is made of. Operands are
//!   the *rounded* ones (bf16 values, INT8 codes and scales), so that a comparison
//!   measures the arithmetic and not the format.
//! - `Vec<f32>` for INT8, where every operation is defined and all backends agree
//!   bit for bit.
//!
//! Matrices are row-major; a weight matrix is [N, K] as checkpoints store it, and a
//! product is D[m, n] = Σ_k A[m, k] · B[n, k].

mod expected;
mod expert;
mod gemm;
mod int8;
mod moe;

pub use expected::Expected;
pub use expert::{ExpertWeights, Hidden, activation};
pub use gemm::{Group, Operand, Scales, grouped_gemm};
pub use int8::{QuantisedExpert, QuantisedMatrix, int8_down, int8_gemm, int8_hidden};
pub use moe::{MoeBlock, SharedExpert};

/// Relative error of a sum of `k` products accumulated in f32, against Σ|a·b|.
///
/// One rounding each time a tensor-core or vector step of 16 products joins the
/// accumulator, two more for what surrounds them; 2^-22 and not 2^-24 since the
/// hardware truncates inside a step.
pub(crate) fn f32_coefficient(k: usize) -> f64 {
    (k as f64 / 16.0 + 2.0) * 2f64.powi(-22)
}

/// `x` rounded once to bfloat16, ties to even.
///
/// By way of an f32 rounded to odd, which keeps the second rounding from seeing a
/// tie that is none.
pub fn round_to_bf16(x: f64) -> f64 {
    let nearest = x as f32;
    let odd = if nearest as f64 == x || x.is_nan() {
        nearest
    } else {
        let above = (nearest as f64).abs() > x.abs();
        f32::from_bits((nearest.to_bits() - above as u32) | 1)
    };
    asym_gemm_formats::bf16::round(odd) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_of_f64_is_single() {
        assert_eq!(round_to_bf16(1.0), 1.0);
        assert_eq!(round_to_bf16(-0.0).to_bits(), (-0.0f64).to_bits());
        // 1 + 2^-8 is half way between 1 and 1 + 2^-7: even is 1. A hair above is not a
        // tie, although f32 cannot hold it.
        let tie = 1.0 + 2f64.powi(-8);
        let hair = 2f64.powi(-40);
        assert_eq!(round_to_bf16(tie), 1.0);
        assert_eq!(round_to_bf16(tie + hair), 1.0 + 2f64.powi(-7));
        assert_eq!(round_to_bf16(-tie - hair), -1.0 - 2f64.powi(-7));
        let tie = 1.0 + 3.0 * 2f64.powi(-8);
        assert_eq!(round_to_bf16(tie), 1.0 + 2f64.powi(-6));
        assert_eq!(round_to_bf16(tie - hair), 1.0 + 2f64.powi(-7));
        assert_eq!(round_to_bf16(1e300), f64::INFINITY);
        assert!(round_to_bf16(f64::NAN).is_nan());
        // Below half of the smallest subnormal, 2^-133.
        assert_eq!(round_to_bf16(2f64.powi(-135)), 0.0);
        assert_eq!(round_to_bf16(2f64.powi(-160)), 0.0);
        assert_eq!(round_to_bf16(0.75 * 2f64.powi(-133)), 2f64.powi(-133));
    }
}
