//! Gated activations of MoE experts.
//!
//! `exp` is one fixed polynomial of fused multiply-adds and the divisions are
//! IEEE, so that CPU, GPU and portable code give the same bits; a vectorised
//! version must perform exactly the operations of [`exp`] in its order, with the
//! constants of [`exp_constants`].

use crate::{fma, round_half_even};

/// Constants of [`exp`], for vectorised versions of it.
pub mod exp_constants {
    /// Arguments are clamped to ±this; exp stays finite and normal.
    pub const CLAMP: f32 = 87.0;
    /// log2(e).
    pub const LOG2_E: f32 = core::f32::consts::LOG2_E;
    /// Upper part of ln 2: few mantissa bits, so n * LN2_HI is exact for |n| <= 128.
    pub const LN2_HI: f32 = 355.0 / 512.0;
    /// ln 2 - LN2_HI.
    pub const LN2_LO: f32 = -2.121_944_4e-4;
    /// Taylor coefficients 1/6! .. 1/2!, highest power first; the last two are 1.
    ///
    /// On |r| <= ln(2)/2 the cut-off term r^7/7! is below 1.2e-7 relative.
    pub const POLY: [f32; 7] = [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
}

/// e^x for x clamped to ±87, relative error below 3e-7. NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    use exp_constants::*;
    // `clamp` keeps NaN.
    let x = x.clamp(-CLAMP, CLAMP);
    let n = round_half_even(x * LOG2_E);
    let r = fma(n, -LN2_LO, fma(n, -LN2_HI, x));
    let mut p = POLY[0];
    p = fma(p, r, POLY[1]);
    p = fma(p, r, POLY[2]);
    p = fma(p, r, POLY[3]);
    p = fma(p, r, POLY[4]);
    p = fma(p, r, POLY[5]);
    p = fma(p, r, POLY[6]);
    // 2^n: n is an integer within ±126; NaN casts to 0 and is kept by p.
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// x * sigmoid(scale * x). Below `scale * x = -87` the sigmoid stays at e^-87, so that
/// -inf gives a number near -1e-34, not NaN.
#[inline(always)]
pub fn swish(x: f32, scale: f32) -> f32 {
    // A finite floor: -inf / large would be -inf. 1e4 * e^-87 is below 2e-34.
    let x = if x < -1e4 { -1e4 } else { x };
    x / (1.0 + exp(-(scale * x)))
}

/// How an expert combines its gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// silu(gate) * up.
    SwiGlu,
    /// gpt-oss: gate is cut at `limit`, up to ±`limit`;
    /// (up + 1) * gate * sigmoid(`alpha` * gate).
    ClampedSwiGlu {
        /// Bound of gate (above only) and up (both sides).
        limit: f32,
        /// Slope of the sigmoid.
        alpha: f32,
    },
}

impl Activation {
    /// The activation of one gate and up pair.
    #[inline(always)]
    pub fn apply(self, gate: f32, up: f32) -> f32 {
        match self {
            Self::SwiGlu => swish(gate, 1.0) * up,
            Self::ClampedSwiGlu { limit, alpha } => {
                let gate = if gate > limit { limit } else { gate };
                let up = up.clamp(-limit, limit);
                (up + 1.0) * swish(gate, alpha)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_its_stated_error() {
        let mut worst = 0f64;
        for i in -87_000..=87_000 {
            let x = i as f32 / 1000.0;
            let want = (x as f64).exp();
            worst = worst.max(((exp(x) as f64 - want) / want).abs());
        }
        assert!(worst < 3e-7, "{worst:e}");
    }

    #[test]
    fn swish_at_the_edges() {
        assert_eq!(swish(0.0, 1.0), 0.0);
        assert_eq!(swish(f32::INFINITY, 1.0), f32::INFINITY);
        assert!(swish(f32::NEG_INFINITY, 1.0).abs() < 1e-30);
        assert!(swish(f32::NAN, 1.0).is_nan());
        for x in [-100.0, -88.0, 88.0, 100.0f32] {
            let want = x as f64 / (1.0 + (-x as f64).exp());
            assert!(
                (swish(x, 1.0) as f64 - want).abs() < 1e-33 + want.abs() * 1e-6,
                "{x}"
            );
        }
    }

    #[test]
    fn gate_and_up_are_not_interchangeable() {
        let a = Activation::SwiGlu;
        assert!(a.apply(-8.0, 3.0).abs() < 0.01 && a.apply(3.0, -8.0).abs() > 20.0);
        let c = Activation::ClampedSwiGlu {
            limit: 7.0,
            alpha: 1.702,
        };
        assert_eq!(c.apply(100.0, 100.0), c.apply(7.0, 7.0));
        assert_eq!(c.apply(1.0, -100.0), c.apply(1.0, -7.0));
    }
}
