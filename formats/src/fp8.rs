//! FP8 weights in blocks: value = e4m3 code * s, one scale s for 128 rows x 128 columns.
//!
//! s = max(amax / 448, 1e-12) over the block, code = e4m3 of x * (1 / s), rounded to nearest, ties to
//! even. The floor keeps 1 / s finite: a block of zeros, or of values that small, has zero or tiny
//! codes. A block that holds NaN or an infinity gets a scale that is not finite, so that its products
//! are NaN and not a plausible number; NaN has the code of NaN besides.

use crate::{e4m3, max_keep_nan};

/// Rows, and columns, that share one scale.
pub const BLOCK: usize = 128;

/// Scale of a block whose largest magnitude is `amax`.
#[inline(always)]
pub fn block_scale(amax: f32) -> f32 {
    max_keep_nan(1e-12, amax / e4m3::MAX)
}

/// Quantises a band of up to 128 rows, `k` columns each, with one scale for each 128 columns.
///
/// `band` and `codes` are row-major; the last block may be narrower.
///
/// # Panics
/// If `k` is 0 or does not divide the length of `band`, if there are more than 128 rows, or if
/// `codes` or `scales` (`k.div_ceil(128)`) have another length.
#[inline]
pub fn quantise_band(band: &[f32], k: usize, codes: &mut [u8], scales: &mut [f32]) {
    assert!(k > 0 && band.len().is_multiple_of(k), "whole rows");
    assert!(band.len() / k <= BLOCK, "at most 128 rows");
    assert_eq!(band.len(), codes.len(), "one code an element");
    assert_eq!(scales.len(), k.div_ceil(BLOCK), "one scale a block");
    for (block, scale) in scales.iter_mut().enumerate() {
        let columns = block * BLOCK..k.min((block + 1) * BLOCK);
        // Magnitudes compare as integers, where NaN is above infinity.
        let amax = band.chunks(k).fold(0, |m, row| {
            let row = &row[columns.clone()];
            row.iter().fold(m, |m, x| m.max(x.to_bits() & 0x7fff_ffff))
        });
        *scale = block_scale(f32::from_bits(amax));
        let inverse = 1.0 / *scale;
        for (row, codes) in band.chunks(k).zip(codes.chunks_mut(k)) {
            for (code, &x) in codes[columns.clone()].iter_mut().zip(&row[columns.clone()]) {
                *code = e4m3::encode(x * inverse);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn quantise(band: &[f32], k: usize) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0xa5; band.len()];
        let mut scales = vec![f32::NAN; k.div_ceil(BLOCK)];
        quantise_band(band, k, &mut codes, &mut scales);
        (codes, scales)
    }

    fn value(code: u8, scale: f32) -> f32 {
        e4m3::decode(code) * scale
    }

    /// Rows of 300 columns: 128, 128 and 44. Each block has the scale of its own largest value.
    #[test]
    fn error_is_half_a_step() {
        let (rows, k) = (3, 300);
        let band: Vec<f32> = (0..rows * k)
            .map(|i| {
                let x = ((i * 7919) % 601) as f32 / 300.0 - 1.0;
                x * 10f32.powi((i % k / BLOCK) as i32 - 1)
            })
            .collect();
        let (codes, scales) = quantise(&band, k);
        for (block, &scale) in scales.iter().enumerate() {
            let in_block = |i: &usize| i % k / BLOCK == block;
            let amax = (0..band.len())
                .filter(in_block)
                .fold(0f32, |m, i| m.max(band[i].abs()));
            assert_eq!(scale, amax / 448.0);
            for i in (0..band.len()).filter(in_block) {
                let error = (value(codes[i], scale) - band[i]).abs();
                // Half of 2^-3 relative for normal codes, of 2^-9 steps below.
                let bound = (band[i].abs() / 16.0).max(scale / 1024.0) * 1.0001;
                assert!(error <= bound, "{} for {}", codes[i], band[i]);
            }
        }
    }

    #[test]
    fn a_single_one_among_zeros_is_kept() {
        let mut band = vec![0f32; BLOCK * 256];
        band[0] = 1.0;
        let (codes, scales) = quantise(&band, 256);
        assert_eq!((codes[0], scales[1]), (0x7e, 1e-12));
        assert!((value(codes[0], scales[0]) - 1.0).abs() < 1e-6);
        assert!(codes[1..].iter().all(|&code| code == 0));
    }

    #[test]
    fn tiny_maxima_stay_finite() {
        for x in [1e-45, 6.3e-38, 1.3e-36, 1.4e-36, 1e-13f32] {
            let (codes, scales) = quantise(&[x, -x], 2);
            for (code, x) in codes.iter().zip([x, -x]) {
                let back = value(*code, scales[0]);
                assert!(
                    back.is_finite() && (back - x).abs() <= x.abs(),
                    "{x}: {back}"
                );
            }
        }
    }

    #[test]
    fn outlier_stays_finite() {
        let (codes, scales) = quantise(&[3e38, 1.0, -3e38], 3);
        assert!(scales[0].is_finite());
        assert_eq!(codes, [0x7e, 0, 0xfe]);
    }

    /// NaN and infinity spoil their block and no other.
    #[test]
    fn nan_and_infinity_poison_the_block() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut band = vec![1f32; 2 * 200];
            band[200 + 3] = bad;
            let (codes, scales) = quantise(&band, 200);
            assert!(!scales[0].is_finite() && scales[1].is_finite());
            assert!(codes[203] & 0x7f == 0x7f, "NaN stays NaN");
            let spoilt = |i: &usize| i % 200 < BLOCK;
            for i in (0..400).filter(spoilt) {
                assert!(value(codes[i], scales[0]).is_nan());
            }
        }
    }

    /// What was dequantised quantises to the same codes again.
    #[test]
    fn quantising_twice_changes_nothing() {
        for scale in [1.0, 3e-7, 1e-13, 7e4f32] {
            let band: Vec<f32> = (0..5 * 130)
                .map(|i| (((i * 7919) % 601) as f32 / 300.0 - 1.0) * scale)
                .collect();
            let (codes, scales) = quantise(&band, 130);
            let back: Vec<f32> = codes
                .iter()
                .enumerate()
                .map(|(i, &code)| value(code, scales[i % 130 / BLOCK]))
                .collect();
            assert_eq!(quantise(&back, 130).0, codes, "{scale}");
        }
    }
}
