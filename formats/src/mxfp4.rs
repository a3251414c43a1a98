//! MXFP4: value = e2m1 code * 2^(scale - 127), one UE8M0 scale for 32 elements.
//!
//! Quantising takes the smallest power of two that is not below amax / 6, so that nothing
//! saturates, and the code of x divided by it, which is exact but for subnormal quotients. Scale
//! 255, NaN, marks a block that holds NaN or an infinity.

use crate::{bf16, e2m1, e8m0};

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// The bfloat16 code of e2m1 code * 2^(scale - 127): exact, and infinite only where f32 is too
/// (magnitudes of 2^128 and more). NaN has one code.
pub const fn bf16_of(scale: u8, code: u8) -> u16 {
    if scale == e8m0::NAN {
        return bf16::NAN;
    }
    bf16::encode(e8m0::decode(scale) * e2m1::decode(code))
}

/// Quantises a row; the last block may be shorter.
///
/// # Panics
/// If `codes`, one a byte, is not as long as the row, or `scales` not `row.len().div_ceil(32)`.
#[inline]
pub fn quantise_row(row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    assert_eq!(row.len(), codes.len(), "one code an element");
    assert_eq!(scales.len(), row.len().div_ceil(BLOCK), "one scale a block");
    let blocks = row.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    for ((x, codes), scale) in blocks.zip(scales) {
        // Magnitudes compare as integers, where NaN is above infinity.
        let amax = x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
        let amax = f32::from_bits(amax);
        *scale = match amax.is_finite() {
            true => e8m0::encode_up(amax / e2m1::MAX),
            false => e8m0::NAN,
        };
        // 2^-n; for the scale 2^127 a subnormal, for NaN nothing that is used.
        let inverse = e8m0::decode(254u8.saturating_sub(*scale));
        // 4 * 2^126 is beyond f32: there 3 is the largest code, so that finite stays finite.
        let largest = if *scale == 253 { 3.0 } else { e2m1::MAX };
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = e2m1::encode((x * inverse).clamp(-largest, largest));
        }
    }
}

/// Values of a row of packed codes.
///
/// # Panics
/// If `packed` or `scales` are too short for `out`.
#[inline]
pub fn dequantise_row(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    for (block, (out, &scale)) in out.chunks_mut(BLOCK).zip(scales).enumerate() {
        let scale = e8m0::decode(scale);
        for (i, out) in out.iter_mut().enumerate() {
            *out = e2m1::decode(e2m1::nibble(packed, block * BLOCK + i)) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn round_trip(row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0xa5; row.len()];
        let mut scales = vec![0xa5; row.len().div_ceil(BLOCK)];
        quantise_row(row, &mut codes, &mut scales);
        let mut packed = vec![0xa5; row.len().div_ceil(2)];
        e2m1::pack(&codes, &mut packed);
        let mut back = vec![f32::NAN; row.len()];
        dequantise_row(&packed, &scales, &mut back);
        (scales, back)
    }

    /// All 16 codes under all scales but NaN, subnormal products included.
    #[test]
    fn products_are_exact_in_bf16() {
        for scale in 0..=254u8 {
            for code in 0..16 {
                let want = 2f64.powi(i32::from(scale) - 127) * f64::from(e2m1::decode(code));
                let got = f64::from(bf16::decode(bf16_of(scale, code)));
                match want.abs() < 2f64.powi(128) {
                    true => assert_eq!(got, want, "{scale} {code}"),
                    false => assert!(got.is_infinite(), "{scale} {code}"),
                }
            }
        }
    }

    #[test]
    fn error_is_half_a_step() {
        let row: Vec<f32> = (0..500)
            .map(|i| (((i * 7919) % 601) as f32 / 300.0 - 1.0) * 3f32.powi(i / 32 % 7 - 3))
            .collect();
        let (scales, back) = round_trip(&row);
        for (block, &scale) in scales.iter().enumerate() {
            for i in block * BLOCK..row.len().min((block + 1) * BLOCK) {
                // Steps of 2 at the top, of a quarter of the value and of 0.5 below.
                let s = e8m0::decode(scale);
                let bound = (row[i].abs() / 4.0).max(0.25 * s).min(s);
                assert!((row[i] - back[i]).abs() <= bound, "{}: {}", row[i], back[i]);
            }
        }
    }

    /// No block saturates: the scale was rounded up.
    #[test]
    fn the_largest_value_keeps_its_size() {
        for bits in (0x3f00_0000u32..0x4100_0000).step_by(0x3333) {
            let x = f32::from_bits(bits);
            let (_, back) = round_trip(&[x, 0.0]);
            assert!((back[0] / x - 1.0).abs() <= 0.2, "{x}: {}", back[0]);
        }
    }

    #[test]
    fn zeros_ones_tiny_and_large() {
        let mut row = vec![0f32; 256];
        assert!(round_trip(&row).1.iter().all(|&x| x == 0.0));
        row[0] = 1.0;
        assert_eq!(round_trip(&row).1, row);
        for x in [1e-45, 6.3e-38, 1.3e-36, 1.4e-36, 3e38, 65504.0f32] {
            let (_, back) = round_trip(&[x, -x, 0.0]);
            assert!(back.iter().all(|b| b.is_finite()), "{x}");
            assert!((back[0] - x).abs() <= x, "{x}: {}", back[0]);
        }
    }

    #[test]
    fn nan_and_infinity_poison_their_block() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![1f32; 70];
            row[40] = bad;
            let (scales, back) = round_trip(&row);
            assert_eq!(scales[1], e8m0::NAN);
            assert!((32..64).all(|i| back[i].is_nan()));
            assert!(back[..32].iter().chain(&back[64..]).all(|&x| x == 1.0));
        }
    }
}
