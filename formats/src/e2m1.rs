//! FP4 E2M1: 1 sign, 2 exponent (bias 1), 1 mantissa bit; neither infinity nor NaN.
//!
//! The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Encoding rounds to nearest, ties to even,
//! saturates at 6, keeps the sign of zero and gives NaN the code of 6, as
//! `cvt.rn.satfinite.e2m1x2.f32` does: what holds NaN must say so in its scale.
//!
//! Two codes share a byte, the element of lower index in the low nibble.

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// The magnitudes of codes 0 to 7.
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Rounds to E2M1, ties to even, saturating; see the [module documentation](self) for NaN.
#[inline(always)]
pub const fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 28) as u8 & 8;
    if magnitude > 0x7f80_0000 {
        return 7;
    }
    // A magnitude gets the code of how many midpoints lie below it; at a midpoint the even code
    // wins, so that every second one counts from itself on.
    let mut code = (magnitude > 0.25f32.to_bits()) as u8;
    code += (magnitude >= 0.75f32.to_bits()) as u8;
    code += (magnitude > 1.25f32.to_bits()) as u8;
    code += (magnitude >= 1.75f32.to_bits()) as u8;
    code += (magnitude > 2.5f32.to_bits()) as u8;
    code += (magnitude >= 3.5f32.to_bits()) as u8;
    code += (magnitude > 5.0f32.to_bits()) as u8;
    sign | code
}

/// The value of the code in the low nibble of `code`.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let magnitude = MAGNITUDES[(code & 7) as usize];
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// The code of element `index` of a row of packed bytes.
///
/// # Panics
/// If the row is shorter.
#[inline(always)]
pub const fn nibble(packed: &[u8], index: usize) -> u8 {
    packed[index / 2] >> (index % 2 * 4) & 15
}

/// Packs codes two to a byte; the last byte of an odd count has a zero above.
///
/// # Panics
/// If `packed` is not `codes.len().div_ceil(2)` long.
#[inline]
pub fn pack(codes: &[u8], packed: &mut [u8]) {
    assert_eq!(packed.len(), codes.len().div_ceil(2), "two codes a byte");
    for (byte, pair) in packed.iter_mut().zip(codes.chunks(2)) {
        *byte = pair[0] | pair.get(1).map_or(0, |high| high << 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips() {
        for code in 0..16 {
            assert_eq!(encode(decode(code)), code);
        }
    }

    /// At, just below and just above every midpoint, of either sign.
    #[test]
    fn rounds_to_nearest_even_at_every_midpoint() {
        for code in 0..7u8 {
            let (low, high) = (MAGNITUDES[code as usize], MAGNITUDES[code as usize + 1]);
            let mid = (low + high) / 2.0;
            let even = code + (code & 1);
            for (sign, bit) in [(1.0, 0), (-1.0, 8)] {
                assert_eq!(encode(sign * mid), even | bit, "{mid}");
                assert_eq!(encode(sign * mid.next_down()), code | bit, "below {mid}");
                assert_eq!(
                    encode(sign * mid.next_up()),
                    (code + 1) | bit,
                    "above {mid}"
                );
            }
        }
    }

    #[test]
    fn saturates() {
        for x in [6.0, 7.0, 8.0, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (7, 15));
        }
        assert_eq!((encode(f32::NAN), encode(-f32::NAN)), (7, 7));
        assert_eq!((encode(1e-45), encode(-1e-45), encode(-0.0)), (0, 8, 8));
    }

    #[test]
    fn low_nibble_first() {
        let codes = [1, 2, 15, 7, 9];
        let mut packed = [0xff; 3];
        pack(&codes, &mut packed);
        assert_eq!(packed, [0x21, 0x7f, 0x09]);
        for (i, code) in codes.into_iter().enumerate() {
            assert_eq!(nibble(&packed, i), code);
        }
    }
}
