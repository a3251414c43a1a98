//! Symmetric INT8: code = round_half_even(x * (1 / s)) clamped to ±127, value = code * s.
//!
//! Two recipes, which differ in what one scale covers:
//!
//! - per row: s = max(amax / 127, 1e-12) over a whole row (weights, activations) or
//!   over a slice of 128 of a row (the hidden activation h between the two expert
//!   products, so that no division of the intermediate dimension changes a code);
//! - block 128: s = max(amax, 1e-4) / 127 over 128 columns of a row.
//!
//! A row that holds NaN or an infinity gets a scale that is not finite, so that its
//! products are NaN and not a plausible number.

use crate::{max_keep_nan, round_half_even};

/// Columns of K that share one scale in the block recipe.
pub const BLOCK: usize = 128;

/// Scale of a row (or slice) whose largest magnitude is `amax`.
#[inline(always)]
pub fn per_row_scale(amax: f32) -> f32 {
    max_keep_nan(1e-12, amax / 127.0)
}

/// Scale of a block of 128 columns whose largest magnitude is `amax`.
#[inline(always)]
pub fn block_scale(amax: f32) -> f32 {
    max_keep_nan(1e-4, amax) / 127.0
}

/// The code of `x` for the inverse scale `inv` = 1 / s. NaN gives 0.
#[inline(always)]
pub fn encode(x: f32, inv: f32) -> i8 {
    let scaled = x * inv;
    // Compared so that NaN falls through to zero.
    let clamped = if scaled >= 127.0 {
        127.0
    } else if scaled <= -127.0 {
        -127.0
    } else if scaled.is_nan() {
        0.0
    } else {
        scaled
    };
    round_half_even(clamped) as i32 as i8
}

/// Largest magnitude in `row`; NaN if the row holds NaN.
///
/// Magnitudes compare as unsigned integers, where NaN is above infinity: the vector
/// kernels take an integer maximum too, so that none of them drops a NaN.
#[inline]
pub fn amax(row: &[f32]) -> f32 {
    f32::from_bits(row.iter().fold(0, |m, &x| m.max(x.to_bits() & 0x7fff_ffff)))
}

/// Quantises `row` with one scale, which it returns.
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn quantise_per_row(row: &[f32], codes: &mut [i8]) -> f32 {
    assert_eq!(row.len(), codes.len(), "one code an element");
    let scale = per_row_scale(amax(row));
    let inv = 1.0 / scale;
    for (code, &x) in codes.iter_mut().zip(row) {
        *code = encode(x, inv);
    }
    scale
}

/// Quantises `row` with one scale for each 128 columns (the last block may be shorter).
///
/// # Panics
/// If the lengths differ or `scales` is not `row.len().div_ceil(128)` long.
#[inline]
pub fn quantise_blocks(row: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    assert_eq!(row.len(), codes.len(), "one code an element");
    assert_eq!(scales.len(), row.len().div_ceil(BLOCK), "one scale a block");
    for ((xs, cs), scale) in row.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
        *scale = block_scale(amax(xs));
        let inv = 1.0 / *scale;
        for (code, &x) in cs.iter_mut().zip(xs) {
            *code = encode(x, inv);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    #[test]
    fn zero_row_gives_zero_codes_and_a_finite_scale() {
        let mut codes = [1i8; 4];
        let scale = quantise_per_row(&[0.0; 4], &mut codes);
        assert_eq!((scale, codes), (1e-12, [0; 4]));
        let mut scales = [0.0];
        quantise_blocks(&[0.0; 4], &mut codes, &mut scales);
        assert_eq!((scales[0], codes), (1e-4 / 127.0, [0; 4]));
    }

    #[test]
    fn tiny_maxima_stay_finite() {
        for x in [1e-45, 6.3e-38, 1.3e-36, 1.4e-36, 1e-13f32] {
            let mut codes = [0i8; 2];
            let scale = quantise_per_row(&[x, -x], &mut codes);
            let back = codes[0] as f32 * scale;
            assert!(back.is_finite() && (back - x).abs() <= x, "{x}: {back}");
        }
    }

    #[test]
    fn outlier_stays_finite() {
        let mut codes = [0i8; 3];
        let scale = quantise_per_row(&[3e38, 1.0, -3e38], &mut codes);
        assert!(scale.is_finite());
        assert_eq!(codes, [127, 0, -127]);
    }

    #[test]
    fn nan_and_infinity_poison_the_row() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut codes = [0i8; 3];
            let scale = quantise_per_row(&[1.0, bad, -1.0], &mut codes);
            assert!(!scale.is_finite());
            assert!((codes[1] as f32 * scale).is_nan() || bad.is_infinite());
        }
    }

    #[test]
    fn error_is_half_a_step() {
        let row: vec::Vec<f32> = (0..300)
            .map(|i| ((i * 7919) % 601) as f32 / 300.0 - 1.0)
            .collect();
        let mut codes = vec![0i8; 300];
        let scale = quantise_per_row(&row, &mut codes);
        for (c, x) in codes.iter().zip(&row) {
            assert!((*c as f32 * scale - x).abs() <= scale * 0.5001);
        }
        let mut scales = vec![0f32; 3];
        quantise_blocks(&row, &mut codes, &mut scales);
        for (i, (c, x)) in codes.iter().zip(&row).enumerate() {
            let s = scales[i / BLOCK];
            assert!((*c as f32 * s - x).abs() <= s * 0.5001);
        }
    }

    #[test]
    fn encode_ties_to_even_and_never_gives_minus_128() {
        assert_eq!(encode(0.5, 1.0), 0);
        assert_eq!(encode(1.5, 1.0), 2);
        assert_eq!(encode(-126.5, 1.0), -126);
        assert_eq!(encode(-1e30, 1.0), -127);
        assert_eq!(encode(f32::NAN, 1.0), 0);
    }
}
