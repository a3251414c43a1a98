//! Comparing an output with the one expected.

use asym_gemm::formats::WeightFormat;

/// Largest element error allowed, as a share of |expected| + the row's RMS.
///
/// bf16 rounds weights, x and h once each (plain bf16 arithmetic on the reference models:
/// up to 0.0074); int8 has 1/254 of a row's largest value a code (up to 0.13); fp8 weights have
/// 1/16 of their own value at most; fp4 weights that were not fp4 before are off by up to a
/// sixth (nvfp4) or a third (mxfp4) of the largest of their group, 9 % and 13 % in the mean.
fn element_limit(format: WeightFormat) -> f64 {
    match format {
        WeightFormat::Bf16 => 0.012,
        WeightFormat::Int8PerRow | WeightFormat::Int8Block128 | WeightFormat::Fp8Block128 => 0.2,
        WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => 1.2,
    }
}

/// Largest relative Frobenius error of the block.
fn frobenius_limit(format: WeightFormat) -> f64 {
    match format {
        WeightFormat::Bf16 => 0.012,
        WeightFormat::Int8PerRow | WeightFormat::Int8Block128 | WeightFormat::Fp8Block128 => 0.08,
        WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => 0.3,
    }
}

/// Result of a comparison.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Comparison {
    /// Largest |got - expected| / (|expected| + row RMS); NaN counts as infinite.
    pub(super) element_error: f64,
    /// Bound of the above.
    pub(super) element_limit: f64,
    /// ‖got - expected‖ / ‖expected‖.
    pub(super) frobenius_error: f64,
    /// Bound of the above.
    pub(super) frobenius_limit: f64,
    /// Row of the largest element error.
    pub(super) worst_row: usize,
    /// Column of the largest element error.
    pub(super) worst_column: usize,
    /// Whether both errors are within their bounds.
    pub(super) passed: bool,
}

impl Comparison {
    /// Compares `got` with `expected`, both [T, hidden].
    ///
    /// `exact`: the model's own weights are stored in `format`, so that only activations are
    /// rounded.
    pub(super) fn new(
        got: &[f32],
        expected: &[f32],
        hidden: usize,
        format: WeightFormat,
        exact: bool,
    ) -> Self {
        let int8 = format.activation_bytes() == 1;
        let format = if exact && !int8 {
            WeightFormat::Bf16
        } else {
            format
        };
        let (mut worst, mut at) = (0.0, (0, 0));
        let (mut difference, mut norm) = (0.0, 0.0);
        let rows = got.chunks_exact(hidden).zip(expected.chunks_exact(hidden));
        for (r, (got, expected)) in rows.enumerate() {
            let squares: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
            let rms = (squares / hidden as f64).sqrt();
            norm += squares;
            for (c, (&g, &e)) in got.iter().zip(expected).enumerate() {
                let error = (f64::from(g) - f64::from(e)).abs();
                difference += error * error;
                let scaled = match error / (f64::from(e).abs() + rms) {
                    // 0 / 0: an exact zero row.
                    _ if error == 0.0 => 0.0,
                    scaled if scaled.is_nan() => f64::INFINITY,
                    scaled => scaled,
                };
                if scaled > worst {
                    (worst, at) = (scaled, (r, c));
                }
            }
        }
        let frobenius = if difference == 0.0 {
            0.0
        } else {
            (difference / norm).sqrt()
        };
        let (element_limit, frobenius_limit) = (element_limit(format), frobenius_limit(format));
        Self {
            element_error: worst,
            element_limit,
            frobenius_error: frobenius,
            frobenius_limit,
            worst_row: at.0,
            worst_column: at.1,
            passed: worst <= element_limit && frobenius <= frobenius_limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_wrong_values_fail() {
        let expected = [1.0, -2.0, 3.0, 4.0];
        let compare = |got: &[f32]| Comparison::new(got, &expected, 2, WeightFormat::Bf16, false);
        assert!(compare(&expected).passed);
        assert!(!compare(&[1.0, f32::NAN, 3.0, 4.0]).passed);
        let off = compare(&[1.0, -2.0, 3.0, 4.2]);
        assert!(!off.passed && (off.worst_row, off.worst_column) == (1, 1));
    }

    #[test]
    fn a_row_of_zeros_must_be_zero() {
        let compare = |got: &[f32]| Comparison::new(got, &[0.0, 0.0], 2, WeightFormat::Bf16, false);
        assert!(compare(&[0.0, 0.0]).passed);
        assert!(!compare(&[0.0, 1e-9]).passed);
    }
}
