//! One expert: y = act(x·gateᵀ, x·upᵀ)·downᵀ, without roundings and with those of bf16 and fp8.

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::{WeightFormat, bf16, e2m1, e4m3, fp8, mxfp4, nvfp4};

use super::gemm::{Operand, dot};
use super::{Expected, f32_coefficient, round_to_bf16};
use crate::generate::{Pattern, matrix, rounded_to_bf16};

/// Weights of one expert as plain row-major f32 matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWeights {
    /// Model width H.
    pub hidden: usize,
    /// Expert width I.
    pub intermediate: usize,
    /// [I, H], through the nonlinearity.
    pub gate: Vec<f32>,
    /// [I, H].
    pub up: Vec<f32>,
    /// [H, I].
    pub down: Vec<f32>,
    /// `[I]`.
    pub gate_bias: Option<Vec<f32>>,
    /// `[I]`.
    pub up_bias: Option<Vec<f32>>,
    /// `[H]`.
    pub down_bias: Option<Vec<f32>>,
}

impl ExpertWeights {
    /// Normal weights, scaled so that for standard normal x gate and up have unit
    /// variance and y stays near it; biases, if asked for, of standard deviation 1/2.
    ///
    /// Not exact in any narrower format: see [`ExpertWeights::to_bf16`].
    pub fn random(seed: u64, hidden: usize, intermediate: usize, bias: bool) -> Self {
        // Seeds far apart from those that tests count up from zero.
        let part = |i: u64| seed.wrapping_mul(8).wrapping_add(i) ^ 0x5eed_0000_0000;
        let weights = |i, rows, cols: usize| {
            let mut w = matrix(Pattern::Gaussian, part(i), rows, cols);
            let scale = 1.0 / (cols as f32).sqrt();
            w.iter_mut().for_each(|w| *w *= scale);
            w
        };
        let biases = |i, len| {
            bias.then(|| {
                let mut b = matrix(Pattern::Gaussian, part(i), 1, len);
                b.iter_mut().for_each(|b| *b *= 0.5);
                b
            })
        };
        Self {
            hidden,
            intermediate,
            gate: weights(0, intermediate, hidden),
            up: weights(1, intermediate, hidden),
            down: weights(2, hidden, intermediate),
            gate_bias: biases(3, intermediate),
            up_bias: biases(4, intermediate),
            down_bias: biases(5, hidden),
        }
    }

    /// The three matrices rounded to bfloat16; biases stay f32.
    pub fn to_bf16(&self) -> Self {
        Self {
            gate: rounded_to_bf16(&self.gate),
            up: rounded_to_bf16(&self.up),
            down: rounded_to_bf16(&self.down),
            ..self.clone()
        }
    }

    /// The three matrices as fp8 has them, code · scale of 128 x 128 blocks rounded to f32; biases
    /// stay f32.
    pub fn to_fp8(&self) -> Self {
        Self {
            gate: through_fp8(&self.gate, self.hidden),
            up: through_fp8(&self.up, self.hidden),
            down: through_fp8(&self.down, self.intermediate),
            ..self.clone()
        }
    }

    /// Panics unless every length fits the shape and `x` holds whole tokens; the number
    /// of tokens.
    pub(super) fn check(&self, x: &[f32]) -> usize {
        let (h, i) = (self.hidden, self.intermediate);
        assert!(h > 0 && x.len().is_multiple_of(h), "x is [T, {h}]");
        for (name, matrix) in [("gate", &self.gate), ("up", &self.up), ("down", &self.down)] {
            assert_eq!(matrix.len(), h * i, "length of {name} at H = {h}, I = {i}");
        }
        for (name, bias, len) in [
            ("gate", &self.gate_bias, i),
            ("up", &self.up_bias, i),
            ("down", &self.down_bias, h),
        ] {
            let found = bias.as_ref().map_or(len, Vec::len);
            assert_eq!(found, len, "length of the bias of {name}");
        }
        x.len() / h
    }

    /// The expert in f64 without any rounding, on x [T, H] and weights as given: what a
    /// checkpoint's own model computes. [T, H].
    ///
    /// The result carries magnitudes, but no slack for roundings of x, h or the weights:
    /// compare with [`Bound::Relative`](crate::compare::Bound::Relative).
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn exact(&self, x: &[f32], act: Activation) -> Expected {
        let tokens = self.check(x);
        let x = Operand::plain(tokens, self.hidden, x);
        let mut hidden = Hidden::zeros(tokens, self.intermediate);
        self.for_each_gated(&x, |t, i, gate, up| {
            hidden.value[t * self.intermediate + i] = activation(act, gate.value, up.value);
        });
        self.down(&hidden)
    }

    /// The expert with the roundings of the bf16 path: x and the weights to bfloat16
    /// (which changes nothing if they are exact), h to bfloat16, everything between in
    /// f64. [T, H], rows as in `x`.
    ///
    /// The slack covers elements of h that f32 accumulation may round the other way.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn bf16(&self, x: &[f32], act: Activation) -> Expected {
        let hidden = self.bf16_hidden(x, act);
        self.to_bf16().down(&hidden)
    }

    /// The expert with the roundings of the fp8 path: the weights to fp8 in blocks of 128 x 128, x
    /// and h to bfloat16, everything between in f64. [T, H], rows as in `x`.
    ///
    /// The slack is that of [`ExpertWeights::bf16`]. Scaling the sums of 128 costs one rounding each
    /// and the weights here one more than the codes have: less than what the error of a sum of
    /// 128 products is granted.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn fp8(&self, x: &[f32], act: Activation) -> Expected {
        let weights = self.to_fp8();
        let hidden = weights.rounded_hidden(x, act);
        weights.down(&hidden)
    }

    /// The expert with the roundings of the fp4 paths: the weights to `format`, the rest as in
    /// [`ExpertWeights::fp8`].
    ///
    /// # Panics
    /// If lengths do not fit or `format` is neither NVFP4 nor MXFP4.
    pub fn fp4(&self, format: WeightFormat, x: &[f32], act: Activation) -> Expected {
        let weights = Self {
            gate: through_fp4(format, &self.gate, self.hidden),
            up: through_fp4(format, &self.up, self.hidden),
            down: through_fp4(format, &self.down, self.intermediate),
            ..self.clone()
        };
        let hidden = weights.rounded_hidden(x, act);
        weights.down(&hidden)
    }

    /// The first half of [`ExpertWeights::bf16`]: h [T, I], rounded to bfloat16.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn bf16_hidden(&self, x: &[f32], act: Activation) -> Hidden {
        self.to_bf16().rounded_hidden(x, act)
    }

    /// h of these weights as they are, x and h rounded to bfloat16.
    fn rounded_hidden(&self, x: &[f32], act: Activation) -> Hidden {
        let tokens = self.check(x);
        let x = Operand::plain(tokens, self.hidden, &rounded_to_bf16(x));
        let mut hidden = Hidden::zeros(tokens, self.intermediate);
        self.for_each_gated(&x, |t, i, gate, up| {
            let h = activation(act, gate.value, up.value);
            let error = activation_error(act, gate, up, h);
            let rounded = round_to_bf16(h);
            let moved = |h: f64| (round_to_bf16(h) - rounded).abs();
            let at = t * self.intermediate + i;
            hidden.value[at] = rounded;
            hidden.slack[at] = moved(h - error).max(moved(h + error));
        });
        hidden
    }

    /// y [T, H] = h·downᵀ + bias in f64, with down as it is.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn down(&self, hidden: &Hidden) -> Expected {
        let (h, i) = (self.hidden, self.intermediate);
        assert_eq!(hidden.value.len(), hidden.tokens * i, "h is [T, {i}]");
        let down = Operand::plain(h, i, &self.down);
        let mut out = Expected::zeros(hidden.tokens, h, i);
        for t in 0..hidden.tokens {
            let row = t * i..(t + 1) * i;
            for n in 0..h {
                let bias = self.down_bias.as_ref().map_or(0.0, |b| b[n] as f64);
                let (value, magnitude) = dot(&hidden.value[row.clone()], down.row(n));
                let (_, slack) = dot(&hidden.slack[row.clone()], down.row(n));
                out.value[t * h + n] = value + bias;
                out.magnitude[t * h + n] = magnitude + bias.abs();
                out.slack[t * h + n] = slack;
            }
        }
        out
    }

    /// Calls `f(token, unit, gate, up)` for every hidden unit.
    fn for_each_gated(&self, x: &Operand, mut f: impl FnMut(usize, usize, Sum, Sum)) {
        let (h, i) = (self.hidden, self.intermediate);
        let gate = Operand::plain(i, h, &self.gate);
        let up = Operand::plain(i, h, &self.up);
        let sum = |t: usize, weights: &Operand, bias: &Option<Vec<f32>>, unit: usize| {
            let bias = bias.as_ref().map_or(0.0, |b| b[unit] as f64);
            let (value, magnitude) = dot(x.row(t), weights.row(unit));
            Sum {
                value: value + bias,
                error: f32_coefficient(h) * (magnitude + bias.abs()),
            }
        };
        for t in 0..x.rows() {
            for unit in 0..i {
                let gate = sum(t, &gate, &self.gate_bias, unit);
                let up = sum(t, &up, &self.up_bias, unit);
                f(t, unit, gate, up);
            }
        }
    }
}

/// A matrix of rows of `k` quantised to fp4 and back.
fn through_fp4(format: WeightFormat, weights: &[f32], k: usize) -> Vec<f32> {
    let group = format.scale_group().expect("an fp4 format");
    let amax = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
    let global = nvfp4::global_scale(amax);
    let (mut codes, mut packed) = (vec![0; k], vec![0; k.div_ceil(2)]);
    let mut scales = vec![0; k.div_ceil(group)];
    let mut values = vec![0.0; weights.len()];
    for (row, out) in weights.chunks(k).zip(values.chunks_mut(k)) {
        match format {
            WeightFormat::Nvfp4 => nvfp4::quantise_row(row, global, &mut codes, &mut scales),
            _ => mxfp4::quantise_row(row, &mut codes, &mut scales),
        }
        e2m1::pack(&codes, &mut packed);
        match format {
            WeightFormat::Nvfp4 => nvfp4::dequantise_row(&packed, &scales, global, out),
            _ => mxfp4::dequantise_row(&packed, &scales, out),
        }
    }
    values
}

/// A matrix of rows of `k` quantised to fp8 and back.
fn through_fp8(weights: &[f32], k: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(weights.len());
    let mut scales = vec![0.0; k.div_ceil(fp8::BLOCK)];
    for band in weights.chunks(fp8::BLOCK * k) {
        let mut codes = vec![0; band.len()];
        fp8::quantise_band(band, k, &mut codes, &mut scales);
        let value = |(i, &code): (usize, &u8)| e4m3::decode(code) * scales[i % k / fp8::BLOCK];
        out.extend(codes.iter().enumerate().map(value));
    }
    out
}

/// A sum in f64 and how far f32 accumulation may be from it.
#[derive(Clone, Copy)]
struct Sum {
    value: f64,
    error: f64,
}

/// The hidden activation h = act(gate, up) of some tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Hidden {
    /// Tokens T.
    pub tokens: usize,
    /// Values, [T, I].
    pub value: Vec<f64>,
    /// How far each may be off after rounding, [T, I]: 0 where f32 accumulation cannot
    /// change the rounded value, otherwise the step to the neighbour.
    pub slack: Vec<f64>,
}

impl Hidden {
    fn zeros(tokens: usize, intermediate: usize) -> Self {
        Self {
            tokens,
            value: vec![0.0; tokens * intermediate],
            slack: vec![0.0; tokens * intermediate],
        }
    }

    /// The values as bfloat16 codes, to feed to a down product under test.
    pub fn codes(&self) -> Vec<u16> {
        self.value.iter().map(|&h| bf16::encode(h as f32)).collect()
    }

    /// h as expected values of its own, for a gate-up product under test.
    pub fn expected(&self) -> Expected {
        let cols = self.value.len().checked_div(self.tokens).unwrap_or(0);
        let mut out = Expected::zeros(self.tokens, cols, 0);
        out.value.clone_from(&self.value);
        out.slack.clone_from(&self.slack);
        out
    }
}

/// x · sigmoid(scale · x) in f64.
fn swish(x: f64, scale: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        return -0.0;
    }
    x / (1.0 + (-scale * x).exp())
}

/// Both factors of the activation: the gated one and the linear one.
fn factors(act: Activation, gate: f64, up: f64) -> (f64, f64) {
    match act {
        Activation::SwiGlu => (swish(gate, 1.0), up),
        Activation::ClampedSwiGlu { limit, alpha } => {
            let (limit, alpha) = (limit as f64, alpha as f64);
            // Compared so that NaN stays.
            let gate = if gate > limit { limit } else { gate };
            let up = if up.abs() > limit {
                limit.copysign(up)
            } else {
                up
            };
            (swish(gate, alpha), up + 1.0)
        }
    }
}

/// act(gate, up) in f64.
pub fn activation(act: Activation, gate: f64, up: f64) -> f64 {
    let (gated, linear) = factors(act, gate, up);
    gated * linear
}

/// How far an f32 activation of inaccurate sums may be from `h`.
///
/// The slope of x·sigmoid(a·x) is below 1.1 for every a. 2^-20 covers exp's own error
/// and the f32 operations around it.
fn activation_error(act: Activation, gate: Sum, up: Sum, h: f64) -> f64 {
    let (gated, linear) = factors(act, gate.value, up.value);
    let gated_error = 1.1 * gate.error;
    gated_error * (linear.abs() + up.error) + gated.abs() * up.error + 2f64.powi(-20) * h.abs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    const CLAMPED: Activation = Activation::ClampedSwiGlu {
        limit: 7.0,
        alpha: 1.702,
    };

    #[test]
    fn activations_agree_with_the_f32_ones() {
        for act in [Activation::SwiGlu, CLAMPED] {
            for gate in [
                -300.0, -20.0, -3.5, -1.0, -0.01, 0.0, 0.3, 2.0, 7.5, 90.0f32,
            ] {
                for up in [-9.0, -7.0, -1.0, 0.0, 0.5, 3.0, 8.0f32] {
                    let want = act.apply(gate, up) as f64;
                    let got = activation(act, gate as f64, up as f64);
                    assert_relative_eq!(got, want, max_relative = 1e-6, epsilon = 1e-30);
                }
            }
            assert!(activation(act, f64::NAN, 1.0).is_nan());
            assert!(activation(act, 1.0, f64::NAN).is_nan());
            assert_eq!(activation(act, f64::NEG_INFINITY, 1.0), 0.0);
        }
    }

    /// H = 2, I = 1, everything by hand.
    #[test]
    fn expert_known_by_hand() {
        let weights = ExpertWeights {
            hidden: 2,
            intermediate: 1,
            gate: vec![1.0, 2.0],
            up: vec![-1.0, 0.5],
            down: vec![3.0, -4.0],
            gate_bias: Some(vec![0.5]),
            up_bias: Some(vec![0.25]),
            down_bias: Some(vec![10.0, 20.0]),
        };
        let y = weights.exact(&[1.0, 0.5], Activation::SwiGlu);
        let (gate, up) = (2.5f64, -0.5f64);
        let h = gate / (1.0 + (-gate).exp()) * up;
        assert_relative_eq!(y.value[0], 3.0 * h + 10.0, max_relative = 1e-14);
        assert_relative_eq!(y.value[1], -4.0 * h + 20.0, max_relative = 1e-14);
        let rounded = weights.bf16(&[1.0, 0.5], Activation::SwiGlu);
        assert_eq!(rounded.value[0], 3.0 * round_to_bf16(h) + 10.0);
    }

    #[test]
    fn random_weights_have_their_shapes_and_scale() {
        let w = ExpertWeights::random(3, 256, 64, true);
        assert_eq!(w.check(&vec![0.0; 512]), 2);
        assert_eq!(w, ExpertWeights::random(3, 256, 64, true));
        assert_ne!(w.gate, w.up);
        assert_ne!(w.gate, ExpertWeights::random(4, 256, 64, true).gate);
        assert!(ExpertWeights::random(3, 8, 8, false).down_bias.is_none());
        let x = matrix(Pattern::Gaussian, 1, 8, 256);
        let y = w.exact(&x, Activation::SwiGlu);
        let mean_square = y.value.iter().map(|y| y * y).sum::<f64>() / y.value.len() as f64;
        assert!((0.1..3.0).contains(&mean_square), "{mean_square}");
    }

    /// The bf16 form is near the exact one, and equals it where nothing is rounded.
    #[test]
    fn the_two_forms_differ_by_roundings_only() {
        let w = ExpertWeights::random(5, 96, 70, true);
        let x = matrix(Pattern::Gaussian, 6, 4, 96);
        let (exact, rounded) = (w.exact(&x, CLAMPED), w.bf16(&x, CLAMPED));
        for (a, b) in exact.value.iter().zip(&rounded.value) {
            assert_relative_eq!(a, b, epsilon = 0.05, max_relative = 0.02);
        }
        assert_ne!(exact.value, rounded.value);
        assert_eq!(
            w.bf16(&x, CLAMPED),
            w.to_bf16().bf16(&rounded_to_bf16(&x), CLAMPED)
        );
    }

    /// fp8 moves every weight by at most half a step of its block, and the result by a few percent.
    #[test]
    fn fp8_is_near_the_exact_expert() {
        let w = ExpertWeights::random(5, 300, 170, true);
        let x = matrix(Pattern::Gaussian, 6, 4, 300);
        for (got, want) in w.to_fp8().down.iter().zip(&w.down) {
            assert!(
                (got - want).abs() <= want.abs() / 16.0 + 1e-3,
                "{got} for {want}"
            );
        }
        let (exact, rounded) = (w.exact(&x, CLAMPED), w.fp8(&x, CLAMPED));
        let square = |x: f64| x * x;
        let off: f64 = exact
            .value
            .iter()
            .zip(&rounded.value)
            .map(|(a, b)| square(a - b))
            .sum();
        let norm: f64 = exact.value.iter().map(|&a| square(a)).sum();
        let relative = (off / norm).sqrt();
        assert!((1e-3..0.08).contains(&relative), "{relative}");
    }

    /// Slack is there for elements near a rounding boundary, and for few others.
    #[test]
    fn slack_is_rare_and_small() {
        let w = ExpertWeights::random(5, 64, 500, false);
        let x = matrix(Pattern::Gaussian, 6, 4, 64);
        let h = w.bf16_hidden(&x, Activation::SwiGlu);
        let moved = h.slack.iter().filter(|&&s| s > 0.0).count();
        assert!(
            0 < moved && moved < h.slack.len() / 10,
            "{moved} of {}",
            h.slack.len()
        );
        for (value, slack) in h.value.iter().zip(&h.slack) {
            assert!(
                *slack <= value.abs() * 2f64.powi(-6) + 1e-6,
                "{value}: {slack}"
            );
        }
    }
}
