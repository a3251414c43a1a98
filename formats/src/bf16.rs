//! bfloat16: the upper half of an f32.

/// The code of a quiet NaN.
pub const NAN: u16 = 0x7fc0;

/// Rounds to bfloat16, ties to even. NaN becomes a quiet NaN of the same sign.
///
/// Subnormal results are kept (the `vcvtneps2bf16` instruction flushes them,
/// which is why no kernel here uses it).
#[inline(always)]
pub const fn encode(x: f32) -> u16 {
    let bits = x.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return ((bits >> 16) | 0x0040) as u16;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The exact f32 value of a bfloat16 code.
#[inline(always)]
pub const fn decode(code: u16) -> f32 {
    f32::from_bits((code as u32) << 16)
}

/// `x` rounded to bfloat16 and back.
#[inline(always)]
pub const fn round(x: f32) -> f32 {
    decode(encode(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips() {
        for code in 0..=u16::MAX {
            let x = decode(code);
            if x.is_nan() {
                assert!(decode(encode(x)).is_nan(), "{code:#06x}");
                assert_eq!(encode(x) >> 15, code >> 15, "sign of {code:#06x}");
            } else {
                assert_eq!(encode(x), code);
            }
        }
    }

    /// Between each pair of neighbours: just below, at and just above the midpoint.
    #[test]
    fn rounds_to_nearest_even_at_every_midpoint() {
        for code in 0..0x7f7fu16 {
            let mid = ((code as u32) << 16) | 0x8000;
            let even = if code & 1 == 0 { code } else { code + 1 };
            for sign in [0, 0x8000u16] {
                let f = |bits: u32| encode(f32::from_bits(bits | (sign as u32) << 16));
                assert_eq!(f(mid - 1), code | sign);
                assert_eq!(f(mid), even | sign);
                assert_eq!(f(mid + 1), (code + 1) | sign);
            }
        }
    }

    #[test]
    fn overflow_goes_to_infinity() {
        assert_eq!(encode(f32::MAX), 0x7f80);
        assert_eq!(encode(f32::INFINITY), 0x7f80);
        assert_eq!(encode(f32::NEG_INFINITY), 0xff80);
    }
}
