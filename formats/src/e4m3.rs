//! FP8 E4M3 ("E4M3FN"): 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity.
//!
//! Largest finite value 448 (0x7e), smallest normal 2^-6, smallest subnormal
//! 2^-9; 0x7f and 0xff are NaN. Encoding saturates finite values and infinities
//! to ±448 and keeps NaN, as `cvt.rn.satfinite.e4m3x2.f32` does.

/// Largest finite magnitude.
pub const MAX: f32 = 448.0;

/// Rounds to E4M3, ties to even, saturating. NaN becomes 0x7f (sign dropped).
///
/// Selections instead of branches, so that loops over it become vector code.
#[inline(always)]
pub const fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 24) & 0x80;
    // 2^-6 is the smallest normal value; below it the spacing is 2^-9. Adding 2^14 aligns the last
    // mantissa bit of the sum with 2^-9.
    let sum = f32::from_bits(magnitude) + 16384.0;
    let small = sum.to_bits().wrapping_sub(16384f32.to_bits());
    let rounded = magnitude + 0x7_ffff + ((magnitude >> 20) & 1);
    let normal = (rounded >> 20).wrapping_sub((127 - 7) << 3);
    let code = if magnitude < 0.015625f32.to_bits() {
        small
    } else {
        normal
    };
    // 464 is the midpoint between 448 and the absent 480: a tie that goes to the even 448.
    let code = if magnitude >= 464f32.to_bits() {
        0x7e
    } else {
        code
    };
    let code = if magnitude > 0x7f80_0000 {
        0x7f
    } else {
        sign | code
    };
    code as u8
}

/// The exact f32 value of an E4M3 code.
pub const fn decode(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let magnitude = code as u32 & 0x7f;
    if magnitude == 0x7f {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    if magnitude < 8 {
        // Subnormal: magnitude * 2^-9; the product is exact.
        let value = magnitude as f32 * 0.001953125;
        return f32::from_bits(sign | value.to_bits());
    }
    f32::from_bits(sign | ((magnitude + ((127 - 7) << 3)) << 20))
}

/// The bfloat16 code of the same value: exact, since bfloat16 has more bits of either kind.
pub const fn to_bf16(code: u8) -> u16 {
    (decode(code).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips() {
        for code in 0..=u8::MAX {
            let x = decode(code);
            if code & 0x7f == 0x7f {
                assert!(x.is_nan());
                assert_eq!(encode(x), 0x7f);
            } else {
                assert_eq!(encode(x), code, "{x}");
            }
        }
    }

    #[test]
    fn bf16_has_every_value() {
        for code in 0..=u8::MAX {
            let (x, wide) = (decode(code), crate::bf16::decode(to_bf16(code)));
            assert!(x.to_bits() == wide.to_bits(), "{code:#04x}: {wide} for {x}");
        }
    }

    #[test]
    fn known_values() {
        for (code, x) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xb8, -1.0),
        ] {
            assert_eq!(decode(code), x);
        }
    }

    #[test]
    fn rounds_to_nearest_even_at_every_midpoint() {
        for code in 0..0x7eu8 {
            let (lo, hi) = (decode(code), decode(code + 1));
            let mid = (lo + hi) / 2.0; // exact in f32
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(encode(mid), even);
            assert_eq!(encode(f32::from_bits(mid.to_bits() - 1)), code);
            assert_eq!(encode(f32::from_bits(mid.to_bits() + 1)), code + 1);
            assert_eq!(encode(-mid), even | 0x80);
        }
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for x in [448.0, 464.0, 465.0, 480.0, 1e9, f32::INFINITY] {
            assert_eq!(encode(x), 0x7e, "{x}");
            assert_eq!(encode(-x), 0xfe, "-{x}");
        }
        assert_eq!(encode(f32::NAN), 0x7f);
    }
}
