//! How far an element may be from its expected value.

use std::ops::Range;

use crate::reference::{Expected, f32_coefficient};

/// What partial sums are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// f32, in tensor-core or vector steps: c = (K/16 + 2) · 2^-22.
    F32,
    /// The FP8 tensor cores' accumulator of about 13 bits inside a block of 128: c = 2^-11.
    Fp8,
}

impl Accumulation {
    /// Error of a sum of `k` products as a part of Σ|a·b|.
    pub fn coefficient(self, k: usize) -> f64 {
        match self {
            Self::F32 => f32_coefficient(k),
            Self::Fp8 => 2f64.powi(-11),
        }
    }
}

/// The type an output was rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Half precision.
    F16,
}

impl Output {
    /// Stored mantissa bits, exponent of the smallest normal number, largest finite value.
    fn format(self) -> (i32, i32, f64) {
        match self {
            Self::F32 => (23, -126, f32::MAX as f64),
            Self::Bf16 => (7, -126, half::bf16::MAX.to_f64()),
            Self::F16 => (10, -14, 65504.0),
        }
    }

    /// Half the distance of neighbouring values around `x`, subnormal ones included.
    pub fn half_ulp(self, x: f64) -> f64 {
        let (mantissa, smallest, max) = self.format();
        let x = x.abs().min(max);
        // The exponent field of x itself; 0, a subnormal f64, gives -1023.
        let exponent = (x.to_bits() >> 52) as i32 - 1023;
        2f64.powi(exponent.max(smallest) - mantissa - 1)
    }

    /// The magnitude from which values round to infinity.
    pub fn overflow(self) -> f64 {
        let max = self.format().2;
        max + self.half_ulp(max)
    }
}

/// The tolerance of each element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// For a product: half an ulp of the output type, plus c · Σ|a·b|, plus the
    /// expected value's slack.
    Product {
        /// Gives c.
        accumulation: Accumulation,
        /// Type the result was rounded to.
        output: Output,
    },
    /// For values computed elsewhere: `relative` · (|expected| + root mean square of the
    /// expected row).
    Relative {
        /// Part of the expected size.
        relative: f64,
    },
}

impl Bound {
    /// A product accumulated in f32 and rounded to `output`.
    pub const fn f32_accumulated(output: Output) -> Self {
        Self::Product {
            accumulation: Accumulation::F32,
            output,
        }
    }

    /// A product of the FP8 tensor cores, rounded to `output`.
    pub const fn fp8_accumulated(output: Output) -> Self {
        Self::Product {
            accumulation: Accumulation::Fp8,
            output,
        }
    }

    /// `relative` · (|expected| + row RMS).
    pub const fn relative(relative: f64) -> Self {
        Self::Relative { relative }
    }

    /// The tolerances of row `row` of `want`.
    pub fn tolerances(self, want: &Expected, row: usize) -> Vec<f64> {
        let at: Range<usize> = row * want.cols..(row + 1) * want.cols;
        let values = &want.value[at.clone()];
        match self {
            Self::Product {
                accumulation,
                output,
            } => {
                let c = accumulation.coefficient(want.k);
                at.map(|i| {
                    let error = c * want.magnitude[i] + want.slack[i];
                    // The computed value may lie in the next binade, where ulps are larger.
                    error + output.half_ulp(want.value[i].abs() + error)
                })
                .collect()
            }
            Self::Relative { relative } => {
                let squares: f64 = values.iter().map(|x| x * x).sum();
                let rms = (squares / want.cols as f64).sqrt();
                values.iter().map(|x| relative * (x.abs() + rms)).collect()
            }
        }
    }

    /// Whether an infinity of the expected sign is right for an expected magnitude.
    pub(super) fn overflows(self, magnitude: f64) -> bool {
        match self {
            Self::Product { output, .. } => magnitude >= output.overflow(),
            Self::Relative { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    /// Against the neighbours themselves.
    #[test]
    fn half_ulps() {
        for x in [0f32, 1e-45, 1e-40, 1.2e-38, 1.0, 1.5, 2.0, -3.0e7, f32::MAX] {
            let x = x.abs();
            let ulp = match x == f32::MAX {
                true => x as f64 - x.next_down() as f64,
                false => x.next_up() as f64 - x as f64,
            };
            assert_eq!(Output::F32.half_ulp(x as f64), ulp / 2.0, "{x}");
        }
        for bits in [0u16, 1, 0x7f, 0x80, 0x3f80, 0x3fff, 0x4000, 0x7f00] {
            let at = |b| half::bf16::from_bits(b).to_f64();
            let ulp = at(bits + 1) - at(bits);
            assert_eq!(Output::Bf16.half_ulp(-at(bits)), ulp / 2.0);
        }
        for bits in [0u16, 1, 0x3ff, 0x400, 0x3c00, 0x3fff, 0x4000, 0x7bfe] {
            let at = |b| half::f16::from_bits(b).to_f64();
            let ulp = at(bits + 1) - at(bits);
            assert_eq!(Output::F16.half_ulp(at(bits)), ulp / 2.0);
        }
        assert_eq!(Output::F16.overflow(), 65520.0);
    }

    #[test]
    fn tolerances_are_the_stated_formulas() {
        let mut want = Expected::from_values(2, &[3.0, 4.0, 0.0, 0.5]);
        want.k = 64;
        want.magnitude = vec![10.0; 4];
        want.slack = vec![0.25, 0.0, 0.0, 0.0];
        let c = 6.0 * 2f64.powi(-22);
        let tolerances = Bound::f32_accumulated(Output::Bf16).tolerances(&want, 0);
        assert_relative_eq!(
            tolerances[0],
            10.0 * c + 0.25 + 2f64.powi(-7),
            max_relative = 1e-12
        );
        assert_relative_eq!(
            tolerances[1],
            10.0 * c + 2f64.powi(-6),
            max_relative = 1e-12
        );
        let tolerances = Bound::fp8_accumulated(Output::F32).tolerances(&want, 1);
        assert_relative_eq!(
            tolerances[1],
            10.0 / 2048.0 + 2f64.powi(-25),
            max_relative = 1e-12
        );
        let tolerances = Bound::relative(0.1).tolerances(&want, 0);
        let rms = 12.5f64.sqrt();
        assert_relative_eq!(tolerances[0], 0.1 * (3.0 + rms), max_relative = 1e-12);
        assert_relative_eq!(tolerances[1], 0.1 * (4.0 + rms), max_relative = 1e-12);
    }
}
