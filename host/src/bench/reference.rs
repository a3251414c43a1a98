//! Random experts, and a layer's output by them in f64.

use asym_gemm_cpu::{ExpertSource, UnpackedExpert};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::Projection;
use half::bf16;

use super::random::Random;

/// Weights of the usual magnitude, about 1 / sqrt(K); the same for the same number.
pub(super) struct RandomExpert(pub(super) u64);

impl ExpertSource for RandomExpert {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        let seed = (self.0 * 3 + projection as u64) << 32 | row as u64;
        let mut random = Random::new(seed);
        let magnitude = (out.len() as f32).sqrt().recip();
        out.iter_mut()
            .for_each(|value| *value = magnitude * random.unit());
    }

    fn bias(&self, _: Projection) -> Option<&[f32]> {
        None
    }
}

/// One token's output in f64 from dequantised weights: `slots` are its experts with their weights.
pub(super) fn expected<'a>(
    x: &[bf16],
    intermediate: usize,
    slots: impl Iterator<Item = (&'a UnpackedExpert, f32)>,
) -> Vec<f64> {
    let hidden = x.len();
    let x: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let mut out = vec![0.0; hidden];
    let dot = |a: &[f32], b: &[f64]| -> f64 {
        let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * b);
        products.sum()
    };
    for (expert, weight) in slots {
        let product = |projection, rows: usize, x: &[f64]| -> Vec<f64> {
            let mut row_values = vec![0.0; x.len()];
            (0..rows)
                .map(|row| {
                    expert.row(projection, row, &mut row_values);
                    dot(&row_values, x)
                })
                .collect()
        };
        let gate = product(Projection::Gate, intermediate, &x);
        let up = product(Projection::Up, intermediate, &x);
        let h: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
            .collect();
        let y = product(Projection::Down, hidden, &h);
        let weight = f64::from(weight);
        out.iter_mut()
            .zip(y)
            .for_each(|(out, y)| *out += weight * y);
    }
    out
}

/// Refuses an output that was not written or overflowed.
pub(super) fn all_finite(out: &[bf16], hidden: usize) -> Result<(), String> {
    match out.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(format!(
            "token {}, column {} is {}",
            at / hidden,
            at % hidden,
            out[at]
        )),
    }
}

/// Compares a token's output with [`expected`]: the norm of the difference.
pub(super) fn compare(
    found: &[bf16],
    expected: &[f64],
    format: WeightFormat,
) -> Result<(), String> {
    let bound = match format {
        // Rounding of h, then of the output.
        WeightFormat::Bf16
        | WeightFormat::Fp8Block128
        | WeightFormat::Nvfp4
        | WeightFormat::Mxfp4 => 1e-2,
        // Quantisation of x and of h.
        WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => 4e-2,
    };
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let error = square(&mut found.iter().zip(expected).map(|(f, e)| f.to_f64() - e));
    let relative = (error / square(&mut expected.iter().copied())).sqrt();
    match relative.is_nan() || relative > bound {
        true => Err(format!("{relative:.2e} off, allowed {bound:.0e}")),
        false => Ok(()),
    }
}
