//! FP8 E5M2: 1 sign, 5 exponent (bias 15), 2 mantissa bits; the upper byte of an IEEE binary16.
//!
//! Read only. 0x7c is infinity, what follows it NaN; the smallest value is 2^-16.

/// The exact f32 value of a code.
pub const fn decode(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let magnitude = code as u32 & 0x7f;
    let bits = match magnitude >> 2 {
        // Subnormal: magnitude * 2^-16; the product is exact.
        0 => (magnitude as f32 * (1.0 / 65536.0)).to_bits(),
        31 if magnitude == 0x7c => 0x7f80_0000,
        31 => 0x7fc0_0000,
        _ => (magnitude << 21) + ((127 - 15) << 23),
    };
    f32::from_bits(sign | bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code against its definition in f64.
    #[test]
    fn every_code() {
        for code in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(code >> 2 & 31), f64::from(code & 3));
            let magnitude = match (exponent, code & 3) {
                (31, 0) => f64::INFINITY,
                (31, _) => f64::NAN,
                (0, _) => mantissa * 2f64.powi(-16),
                _ => (1.0 + mantissa / 4.0) * 2f64.powi(exponent - 15),
            };
            let got = f64::from(decode(code));
            if magnitude.is_nan() {
                assert!(got.is_nan());
            } else {
                assert_eq!(got.abs(), magnitude, "{code:#04x}");
                assert_eq!(got.is_sign_negative(), code >= 0x80);
            }
        }
    }
}
