//! INT4 in groups, as "pack-quantized" checkpoints hold it: value = (nibble - 8) * scale.
//!
//! Eight nibbles share a little-endian 32-bit word, the element of lowest index in the lowest
//! bits; so two share a byte, low nibble first. A scale covers a group of columns of one row.

/// What is added to a code to store it.
pub const OFFSET: i32 = 8;

/// The value, without its scale, of element `index` of a row of packed bytes: -8 to 7.
///
/// # Panics
/// If the row is shorter.
#[inline(always)]
pub const fn decode(packed: &[u8], index: usize) -> i32 {
    (packed[index / 2] >> (index % 2 * 4) & 15) as i32 - OFFSET
}

/// Values of the elements `first..` of a packed row whose scales cover `group` columns each.
///
/// # Panics
/// If `packed` or `scales` are too short, or `group` is 0.
pub fn dequantise(packed: &[u8], scales: &[f32], group: usize, first: usize, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        let k = first + i;
        *out = decode(packed, k) as f32 * scales[k / group];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte() {
        for byte in 0..=u8::MAX {
            assert_eq!(decode(&[byte], 0), i32::from(byte & 15) - 8);
            assert_eq!(decode(&[byte], 1), i32::from(byte >> 4) - 8);
        }
    }

    /// The words of the published format: element 0 in bits 0 to 3 of the first word.
    #[test]
    fn words_and_groups() {
        let word = (0..8u32).fold(0, |word, i| word | (i + 4) << (4 * i));
        let packed = [word.to_le_bytes(); 2];
        let mut out = [f32::NAN; 12];
        dequantise(packed.as_flattened(), &[1.0, 10.0], 8, 2, &mut out);
        let want = [-2., -1., 0., 1., 2., 3., -40., -30., -20., -10., 0., 10.];
        assert_eq!(out, want);
    }
}
