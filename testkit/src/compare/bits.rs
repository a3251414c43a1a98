//! Results of which every bit is defined.

use std::fmt::Debug;

use bytemuck::NoUninit;

use super::Mismatch;

/// Compares `got` with `want`, both [.., cols], bit by bit: -0 differs from 0, and a NaN
/// equals only the same NaN.
///
/// # Errors
/// [`Mismatch::Length`], or [`Mismatch::Bits`] with the first element that differs.
pub fn bits_equal<T: NoUninit + Debug>(
    name: &str,
    got: &[T],
    want: &[T],
    cols: usize,
) -> Result<(), Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::Length {
            name: name.to_owned(),
            got: got.len(),
            want: want.len(),
        });
    }
    let differs = |i: &usize| bytemuck::bytes_of(&got[*i]) != bytemuck::bytes_of(&want[*i]);
    let Some(first) = (0..got.len()).find(differs) else {
        return Ok(());
    };
    Err(Mismatch::Bits {
        name: name.to_owned(),
        row: first / cols.max(1),
        col: first % cols.max(1),
        got: describe(&got[first]),
        want: describe(&want[first]),
        failures: (first..got.len()).filter(differs).count(),
        elements: got.len(),
    })
}

/// The value and its bytes, highest first.
fn describe<T: NoUninit + Debug>(x: &T) -> String {
    let bytes = bytemuck::bytes_of(x).iter().rev();
    let hex: String = bytes.map(|b| format!("{b:02x}")).collect();
    format!("{x:?} (0x{hex})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_is_enough() {
        let want = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(bits_equal("same", &want, &want, 3), Ok(()));
        let mut got = want;
        got[4] = got[4].next_up();
        let error = bits_equal("next", &got, &want, 3).unwrap_err();
        let Mismatch::Bits {
            row, col, failures, ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((row, col, failures), (1, 1, 1));
    }

    #[test]
    fn zeros_and_nans_are_told_apart() {
        assert!(bits_equal("zero", &[0f32], &[-0.0], 1).is_err());
        assert!(bits_equal("nan", &[f32::NAN], &[f32::NAN], 1).is_ok());
        assert!(bits_equal("nan", &[f32::NAN], &[-f32::NAN], 1).is_err());
        let error = bits_equal("zero", &[-0f32], &[0.0], 1).unwrap_err();
        assert!(error.to_string().contains("-0.0 (0x80000000)"), "{error}");
    }

    #[test]
    fn lengths_must_agree() {
        let error = bits_equal("short", &[1i8], &[1, 2], 2).unwrap_err();
        assert!(matches!(
            error,
            Mismatch::Length {
                got: 1,
                want: 2,
                ..
            }
        ));
    }
}
