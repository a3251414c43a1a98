//! UE8M0 scales: a biased exponent without sign or mantissa.
//!
//! Code c is 2^(c - 127): 0 is 2^-127, which f32 holds as a subnormal, and 254 is 2^127. 255 is
//! NaN; files that hold it are refused.

/// The code of NaN.
pub const NAN: u8 = 255;

/// The exact value of a code, built from bits so that no mode of flushing subnormals touches it.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 0x0040_0000,
        NAN => 0x7fc0_0000,
        _ => (code as u32) << 23,
    })
}

/// The smallest power of two not below `x`, so that nothing that `x` was enough for overflows.
///
/// Zero and what is below 2^-127 become 2^-127. What no code reaches (negative values, infinities
/// and NaN, magnitudes above 2^127) becomes [`NAN`].
#[inline(always)]
pub const fn encode_up(x: f32) -> u8 {
    let bits = x.to_bits();
    if bits == 0x8000_0000 || bits <= 0x0040_0000 {
        return 0;
    }
    if bits > 0x7f00_0000 {
        return NAN;
    }
    // Subnormals above 2^-127 round up to 2^-126, whose code is 1.
    let up = (bits & 0x007f_ffff != 0) as u32;
    ((bits >> 23) + up) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_their_powers_of_two() {
        for code in 0..=254u8 {
            let want = 2f64.powi(i32::from(code) - 127);
            assert_eq!(f64::from(decode(code)), want, "{code}");
            assert_eq!(encode_up(decode(code)), code);
        }
        assert!(decode(255).is_nan());
    }

    #[test]
    fn rounds_up() {
        for code in 0..254u8 {
            let x = decode(code).next_up();
            assert_eq!(encode_up(x), code + 1, "just above code {code}");
        }
        for x in [0.0, -0.0, 1e-45, decode(0).next_down()] {
            assert_eq!(encode_up(x), 0, "{x}");
        }
        assert_eq!(encode_up(0.3), 126);
        for x in [
            -1.0,
            f32::NAN,
            f32::INFINITY,
            f32::MAX,
            decode(254).next_up(),
        ] {
            assert_eq!(encode_up(x), NAN, "{x}");
        }
    }
}
