//! NVFP4: value = e2m1 code * e4m3 scale of 16 elements * f32 scale of the matrix.
//!
//! Published files spell the last one in two ways: `weight_scale_2` is the factor itself,
//! `weight_global_scale` its reciprocal ([`global_of_reciprocal`]).
//!
//! Quantising takes the global scale g = max(amax / (448 * 6), 2^-126) of the matrix, the block
//! scale s = e4m3 of (amax of the block / 6) / g, rounded to nearest, and the code of (x / g) / s, both
//! quotients as products with reciprocals. A block whose scale rounds to 0 becomes zeros. The
//! block scale saturates at 448 (0x7e); 0x7f, NaN, marks only a block that holds NaN or an infinity.
//!
//! The product of a code and a block scale is exact in bfloat16 ([`bf16_of`]): two significant
//! bits times four.

use crate::{bf16, e2m1, e4m3, max_keep_nan};

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// Smallest global scale: the smallest normal number, whose reciprocal is finite.
const MIN_GLOBAL: f32 = f32::MIN_POSITIVE;

/// Global scale of a matrix whose largest finite magnitude is `amax`.
#[inline(always)]
pub fn global_scale(amax: f32) -> f32 {
    max_keep_nan(MIN_GLOBAL, amax / (e4m3::MAX * e2m1::MAX))
}

/// The factor that a reciprocal global scale stands for.
#[inline(always)]
pub fn global_of_reciprocal(reciprocal: f32) -> f32 {
    1.0 / reciprocal
}

/// The bfloat16 code of e2m1 code * e4m3 scale: exact. NaN has one code, whatever the signs.
pub const fn bf16_of(scale: u8, code: u8) -> u16 {
    if scale & 0x7f == 0x7f {
        return bf16::NAN;
    }
    bf16::encode(e4m3::decode(scale) * e2m1::decode(code))
}

/// Quantises a row under a global scale; the last block may be shorter.
///
/// # Panics
/// If `codes`, one a byte, is not as long as the row, or `scales` not `row.len().div_ceil(16)`.
#[inline]
pub fn quantise_row(row: &[f32], global: f32, codes: &mut [u8], scales: &mut [u8]) {
    assert_eq!(row.len(), codes.len(), "one code an element");
    assert_eq!(scales.len(), row.len().div_ceil(BLOCK), "one scale a block");
    let inverse_global = 1.0 / global;
    let blocks = row.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    for ((x, codes), scale) in blocks.zip(scales) {
        // Magnitudes compare as integers, where NaN is above infinity.
        let amax = x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
        let amax = f32::from_bits(amax);
        *scale = match amax.is_finite() {
            true => e4m3::encode(amax / e2m1::MAX * inverse_global),
            false => 0x7f,
        };
        if *scale == 0 {
            codes.fill(0);
            continue;
        }
        let inverse = 1.0 / e4m3::decode(*scale);
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = e2m1::encode(x * inverse_global * inverse);
        }
    }
}

/// Values of a row of packed codes.
///
/// # Panics
/// If `packed` or `scales` are too short for `out`.
#[inline]
pub fn dequantise_row(packed: &[u8], scales: &[u8], global: f32, out: &mut [f32]) {
    for (block, (out, &scale)) in out.chunks_mut(BLOCK).zip(scales).enumerate() {
        let scale = e4m3::decode(scale);
        for (i, out) in out.iter_mut().enumerate() {
            *out = e2m1::decode(e2m1::nibble(packed, block * BLOCK + i)) * scale * global;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn round_trip(row: &[f32], global: f32) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0xa5; row.len()];
        let mut scales = vec![0xa5; row.len().div_ceil(BLOCK)];
        quantise_row(row, global, &mut codes, &mut scales);
        let mut packed = vec![0xa5; row.len().div_ceil(2)];
        e2m1::pack(&codes, &mut packed);
        let mut back = vec![f32::NAN; row.len()];
        dequantise_row(&packed, &scales, global, &mut back);
        (scales, back)
    }

    fn amax(row: &[f32]) -> f32 {
        row.iter().fold(0.0, |m, x| m.max(x.abs()))
    }

    /// All 16 codes under all 256 scales: the bf16 value is the exact product.
    #[test]
    fn products_are_exact_in_bf16() {
        for scale in 0..=u8::MAX {
            for code in 0..16 {
                let want = f64::from(e4m3::decode(scale)) * f64::from(e2m1::decode(code));
                let got = f64::from(bf16::decode(bf16_of(scale, code)));
                assert!(
                    got == want || got.is_nan() && want.is_nan(),
                    "{scale} {code}"
                );
            }
        }
    }

    /// Half a step of the code, and of the scale above it.
    #[test]
    fn error_is_bounded_by_the_block() {
        let row: Vec<f32> = (0..300)
            .map(|i| (((i * 7919) % 601) as f32 / 300.0 - 1.0) * 4f32.powi(i / 16 % 5))
            .collect();
        let (_, back) = round_trip(&row, global_scale(amax(&row)));
        for (x, back) in row.chunks(BLOCK).zip(back.chunks(BLOCK)) {
            for (x_i, back) in x.iter().zip(back) {
                // 1 of 6 between 4 and 6, and a scale of 3 mantissa bits.
                let bound = amax(x) * (1.0 / 6.0 + 1.0 / 16.0);
                assert!((x_i - back).abs() <= bound, "{x_i}: {back}");
            }
        }
    }

    #[test]
    fn zeros_and_a_single_one() {
        let mut rows = vec![0f32; 256];
        let (scales, back) = round_trip(&rows, global_scale(0.0));
        assert!(scales.iter().all(|&s| s == 0) && back.iter().all(|&x| x == 0.0));
        rows[0] = 1.0;
        let (scales, back) = round_trip(&rows, global_scale(1.0));
        assert_eq!(scales[0], 0x7e);
        assert!((back[0] - 1.0).abs() < 1e-6 && back[1..].iter().all(|&x| x == 0.0));
    }

    #[test]
    fn tiny_maxima_stay_finite() {
        for x in [1e-45, 6.3e-38, 1.3e-36, 1.4e-36f32] {
            let row: Vec<f32> = (0..16).map(|i| if i % 2 == 0 { x } else { -x }).collect();
            // Alone, and beside a normal value in another row of the matrix.
            for global in [global_scale(x), global_scale(1.0)] {
                let (_, back) = round_trip(&row, global);
                for (x, back) in row.iter().zip(back) {
                    assert!(
                        back.is_finite() && (x - back).abs() <= x.abs(),
                        "{x}: {back}"
                    );
                }
            }
        }
    }

    #[test]
    fn outliers_cost_their_own_block_only() {
        let mut row = vec![1f32; 48];
        row[5] = 3e38;
        let (scales, back) = round_trip(&row, global_scale(3e38));
        assert!(scales.iter().all(|&s| s & 0x7f != 0x7f));
        assert!(back.iter().all(|x| x.is_finite()));
        assert!((back[5] / 3e38 - 1.0).abs() < 1e-6);
    }

    /// A global scale too small for the data saturates; it makes no NaN.
    #[test]
    fn scales_saturate() {
        let (scales, back) = round_trip(&[1e30; 16], 1.0);
        assert_eq!(scales, [0x7e]);
        assert!(back.iter().all(|&x| x == 448.0 * 6.0));
    }

    #[test]
    fn nan_and_infinity_poison_their_block() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![1f32; 40];
            row[17] = bad;
            let (scales, back) = round_trip(&row, global_scale(1.0));
            assert_eq!(scales[1], 0x7f);
            for (i, x) in back.iter().enumerate() {
                assert_eq!(x.is_nan(), i / BLOCK == 1, "{i}");
            }
        }
    }

    #[test]
    fn reciprocal_spelling() {
        assert_eq!(global_of_reciprocal(4.0), 0.25);
    }
}
