//! Matrices whose values are chosen to break something.

use asym_gemm_formats::bf16;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use super::rng;

/// What the elements of a matrix look like. All are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Standard normal.
    Gaussian,
    /// Uniform in [-1, 1).
    Uniform,
    /// Standard normal rounded to bfloat16: exact operands of a bf16 product.
    Bf16,
    /// Rows that take turns at what is hard to add or to round: cancelling halves, all
    /// positive, exponents spread over 2^±12, signed powers of two, midpoints between
    /// bfloat16 neighbours.
    Adversarial,
    /// Standard normal with a few elements in every row 100 to 1000 times as large.
    Outliers,
    /// Standard normal; every other row, the first among them, is zero.
    ZeroRows,
    /// Standard normal; every other row, the first among them, has a largest magnitude
    /// between the smallest subnormal and 1e-13, where inverse scales overflow.
    TinyRows,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Self; 7] = [
        Self::Gaussian,
        Self::Uniform,
        Self::Bf16,
        Self::Adversarial,
        Self::Outliers,
        Self::ZeroRows,
        Self::TinyRows,
    ];
}

/// Largest magnitudes of tiny rows: the smallest subnormal, below, around and above the
/// point where 448 / amax overflows f32, and below the floor of the INT8 row scale.
const TINY: [f32; 6] = [1e-45, 1e-40, 6.3e-38, 1.3e-36, 1.4e-36, 1e-13];

/// A row-major `rows` x `cols` matrix of the given pattern.
pub fn matrix(pattern: Pattern, seed: u64, rows: usize, cols: usize) -> Vec<f32> {
    let mut rng = rng(seed, 0);
    let mut out = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        match pattern {
            Pattern::Gaussian => gaussian(&mut rng, cols, &mut out),
            Pattern::Uniform => out.extend((0..cols).map(|_| rng.random_range(-1f32..1.0))),
            Pattern::Bf16 => {
                gaussian(&mut rng, cols, &mut out);
                round_last(&mut out, cols);
            }
            Pattern::Adversarial => adversarial(&mut rng, row, cols, &mut out),
            Pattern::Outliers => {
                gaussian(&mut rng, cols, &mut out);
                let start = out.len() - cols;
                for _ in 0..cols.div_ceil(200) {
                    let at = start + rng.random_range(0..cols);
                    out[at] = rng.random_range(100f32..1000.0).copysign(out[at]);
                }
            }
            Pattern::ZeroRows if row % 2 == 0 => out.resize(out.len() + cols, 0.0),
            Pattern::TinyRows if row % 2 == 0 => {
                let amax = TINY[row / 2 % TINY.len()];
                let start = out.len();
                out.extend((0..cols).map(|_| amax * rng.random_range(-1f32..1.0)));
                if cols > 0 {
                    out[start + rng.random_range(0..cols)] = amax;
                }
            }
            Pattern::ZeroRows | Pattern::TinyRows => gaussian(&mut rng, cols, &mut out),
        }
    }
    out
}

fn gaussian(rng: &mut ChaCha8Rng, cols: usize, out: &mut Vec<f32>) {
    out.extend((0..cols).map(|_| rng.sample::<f32, _>(StandardNormal)));
}

fn round_last(out: &mut [f32], cols: usize) {
    let start = out.len() - cols;
    for x in &mut out[start..] {
        *x = bf16::round(*x);
    }
}

fn adversarial(rng: &mut ChaCha8Rng, row: usize, cols: usize, out: &mut Vec<f32>) {
    let start = out.len();
    gaussian(rng, cols, out);
    let values = &mut out[start..];
    match row % 5 {
        0 => {
            // The second half undoes the first: large Σ|a·b| against a small sum.
            let half = cols / 2;
            for i in 0..half {
                values[half + i] = -values[i];
            }
        }
        1 => values.iter_mut().for_each(|x| *x = x.abs()),
        2 => {
            for x in values {
                *x *= 2f32.powi(rng.random_range(-12..=12));
            }
        }
        3 => {
            for x in values {
                *x = 2f32.powi(rng.random_range(-8..=8)).copysign(*x);
            }
        }
        _ => {
            // Bit 15 alone below the bfloat16 mantissa: exactly half way.
            for x in values {
                *x = f32::from_bits((x.to_bits() & 0xffff_0000) | 0x8000);
            }
        }
    }
}

/// Every element rounded to bfloat16.
pub fn rounded_to_bf16(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| bf16::round(x)).collect()
}

/// Uniform INT8 codes in -127..=127.
pub fn int8_codes(seed: u64, len: usize) -> Vec<i8> {
    let mut rng = rng(seed, 1);
    (0..len).map(|_| rng.random_range(-127i8..=127)).collect()
}

/// INT8 codes that are all +127 or -127: the largest sums, which overflow 16-bit intermediates.
///
/// The first half of the codes is all +127.
pub fn int8_extremes(seed: u64, len: usize) -> Vec<i8> {
    let mut rng = rng(seed, 1);
    (0..len)
        .map(|i| match i < len / 2 || rng.random() {
            true => 127,
            false => -127,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_repeat_and_differ() {
        for pattern in Pattern::ALL {
            let a = matrix(pattern, 1, 9, 37);
            assert_eq!(a.len(), 9 * 37);
            assert!(a.iter().all(|x| x.is_finite()), "{pattern:?}");
            assert_eq!(a, matrix(pattern, 1, 9, 37), "{pattern:?}");
            assert_ne!(a, matrix(pattern, 2, 9, 37), "{pattern:?}");
        }
        assert_eq!(int8_codes(3, 100), int8_codes(3, 100));
        assert_ne!(int8_codes(3, 100), int8_codes(4, 100));
    }

    /// The numbers themselves are part of the contract: a failure found with a seed must
    /// be found again on another machine.
    #[test]
    fn numbers_do_not_depend_on_the_machine() {
        assert_eq!(int8_codes(0, 6), [73, 65, -17, 61, 114, 23]);
    }

    #[test]
    fn empty_shapes_are_allowed() {
        for pattern in Pattern::ALL {
            assert!(matrix(pattern, 1, 0, 5).is_empty());
            assert!(matrix(pattern, 1, 5, 0).is_empty());
        }
    }

    #[test]
    fn patterns_are_what_they_say() {
        let (rows, cols) = (12, 64);
        let row = |m: &[f32], r: usize| m[r * cols..(r + 1) * cols].to_vec();
        let amax = |m: &[f32]| m.iter().fold(0f32, |a, x| a.max(x.abs()));

        let m = matrix(Pattern::Bf16, 5, rows, cols);
        assert_eq!(m, rounded_to_bf16(&m));
        let m = matrix(Pattern::Gaussian, 5, rows, cols);
        assert_ne!(m, rounded_to_bf16(&m));

        let m = matrix(Pattern::ZeroRows, 5, rows, cols);
        for r in 0..rows {
            assert_eq!(amax(&row(&m, r)) == 0.0, r % 2 == 0);
        }
        let m = matrix(Pattern::TinyRows, 5, rows, cols);
        for (i, tiny) in TINY.iter().enumerate() {
            assert_eq!(amax(&row(&m, 2 * i)), *tiny);
            assert!(amax(&row(&m, 2 * i + 1)) > 1.0);
        }
        let m = matrix(Pattern::Outliers, 5, rows, cols);
        for r in 0..rows {
            assert!(amax(&row(&m, r)) >= 100.0);
        }
        let m = matrix(Pattern::Adversarial, 5, rows, cols);
        assert_eq!(row(&m, 0).iter().map(|&x| x as f64).sum::<f64>(), 0.0);
        assert!(row(&m, 1).iter().all(|&x| x >= 0.0));
        assert!(row(&m, 3).iter().all(|x| x.to_bits() & 0x7f_ffff == 0));
        assert!(row(&m, 4).iter().all(|x| x.to_bits() & 0xffff == 0x8000));
    }

    #[test]
    fn codes_cover_their_range_without_minus_128() {
        let codes = int8_codes(7, 20_000);
        assert_eq!(codes.iter().max(), Some(&127));
        assert_eq!(codes.iter().min(), Some(&-127));
        let codes = int8_extremes(7, 1000);
        assert!(codes.iter().all(|c| c.abs() == 127));
        assert!(codes[..500].iter().all(|&c| c == 127));
        assert!(codes.contains(&-127));
    }
}
