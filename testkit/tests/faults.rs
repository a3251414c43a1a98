//! Correct arithmetic passes the comparisons; typical faults do not.

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::{WeightFormat, bf16};
use asym_gemm_testkit::compare::{Bound, Mismatch, Output, bits_equal, check_close, poison};
use asym_gemm_testkit::generate::{Pattern, RoutingCase, RoutingKind, matrix};
use asym_gemm_testkit::reference::{
    Expected, ExpertWeights, Group, MoeBlock, Operand, QuantisedMatrix, grouped_gemm, int8_hidden,
};
use half::bf16 as Bf16;

const BF16: Bound = Bound::f32_accumulated(Output::Bf16);
const H: usize = 96;
const I: usize = 130;

/// Σ a·b in f32, in order: the least exact of the orders in use.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (x, y)| sum + x * y)
}

/// The bf16 path of an expert in plain f32, [T, H] before the output is rounded.
fn expert_f32(w: &ExpertWeights, x: &[f32], act: Activation) -> Vec<f32> {
    let w = w.to_bf16();
    let (h, i) = (w.hidden, w.intermediate);
    let bias = |b: &Option<Vec<f32>>, at: usize| b.as_ref().map_or(0.0, |b| b[at]);
    let mut out = Vec::new();
    for x in x.chunks(h) {
        let x: Vec<f32> = x.iter().map(|&x| bf16::round(x)).collect();
        let hidden: Vec<f32> = (0..i)
            .map(|u| {
                let gate = dot(&x, &w.gate[u * h..(u + 1) * h]) + bias(&w.gate_bias, u);
                let up = dot(&x, &w.up[u * h..(u + 1) * h]) + bias(&w.up_bias, u);
                bf16::round(act.apply(gate, up))
            })
            .collect();
        out.extend(
            (0..h).map(|n| dot(&hidden, &w.down[n * i..(n + 1) * i]) + bias(&w.down_bias, n)),
        );
    }
    out
}

fn to_bf16(values: &[f32]) -> Vec<Bf16> {
    values.iter().map(|&y| Bf16::from_f32(y)).collect()
}

struct Case {
    weights: Vec<ExpertWeights>,
    x: Vec<f32>,
    routing: RoutingCase,
    want: Expected,
}

impl Case {
    fn new(pattern: Pattern, kind: RoutingKind) -> Self {
        let weights: Vec<_> = (0..4)
            .map(|e| ExpertWeights::random(e, H, I, e % 2 == 0))
            .collect();
        let x = matrix(pattern, 7, 12, H);
        let routing = RoutingCase::new(kind, 8, 12, 2, 4);
        let block = MoeBlock {
            experts: &weights,
            shared: None,
            activation: Activation::SwiGlu,
        };
        let want = block.bf16(&x, &routing);
        Self {
            weights,
            x,
            routing,
            want,
        }
    }

    /// The block in f32 with `weights` in place of the right ones.
    fn run(&self, weights: &[ExpertWeights]) -> Vec<Bf16> {
        let mut out = vec![0f32; self.x.len()];
        for (slot, &id) in self
            .routing
            .ids
            .iter()
            .enumerate()
            .filter(|(_, id)| **id >= 0)
        {
            let token = slot / self.routing.top_k * H..(slot / self.routing.top_k + 1) * H;
            let y = expert_f32(
                &weights[id as usize],
                &self.x[token.clone()],
                Activation::SwiGlu,
            );
            for (out, y) in out[token].iter_mut().zip(y) {
                *out = self.routing.weights[slot].mul_add(y, *out);
            }
        }
        to_bf16(&out)
    }

    fn check(&self, got: &[Bf16]) -> Result<(), Mismatch> {
        check_close("moe", got, &self.want, BF16).map(|_| ())
    }
}

#[test]
fn correct_f32_arithmetic_passes() {
    for pattern in Pattern::ALL {
        for kind in RoutingKind::ALL {
            let case = Case::new(pattern, kind);
            case.check(&case.run(&case.weights))
                .unwrap_or_else(|e| panic!("{pattern:?} {kind:?}: {e}"));
        }
    }
}

/// Large gates and ups, so that every clamp acts.
#[test]
fn correct_clamped_experts_pass() {
    let act = Activation::ClampedSwiGlu {
        limit: 7.0,
        alpha: 1.702,
    };
    let w = ExpertWeights::random(1, H, I, true);
    let mut x = matrix(Pattern::Gaussian, 2, 9, H);
    x.iter_mut().for_each(|x| *x *= 5.0);
    let got = to_bf16(&expert_f32(&w, &x, act));
    check_close("clamped", &got, &w.bf16(&x, act), BF16).unwrap();
    check_close("unclamped", &got, &w.bf16(&x, Activation::SwiGlu), BF16).unwrap_err();
}

#[test]
fn correct_products_pass_at_every_pattern() {
    for pattern in Pattern::ALL {
        let (m, n, k) = (11, 5, 2053);
        let a = asym_gemm_testkit::generate::rounded_to_bf16(&matrix(pattern, 1, m, k));
        let b = asym_gemm_testkit::generate::rounded_to_bf16(&matrix(pattern, 2, n, k));
        let groups = [Group::new(0..m, 0)];
        let want = grouped_gemm(
            &Operand::plain(m, k, &a),
            &[Operand::plain(n, k, &b)],
            &groups,
        );
        let rows = a
            .chunks(k)
            .flat_map(|a| b.chunks(k).map(move |b| dot(a, b)));
        let got: Vec<f32> = rows.collect();
        let bound = Bound::f32_accumulated(Output::F32);
        check_close("f32", &got, &want, bound).unwrap_or_else(|e| panic!("{pattern:?}: {e}"));
        check_close("bf16", &to_bf16(&got), &want, BF16).unwrap();
    }
}

#[test]
fn swapped_gate_and_up_are_caught() {
    let case = Case::new(Pattern::Gaussian, RoutingKind::Uniform);
    let mut weights = case.weights.clone();
    for w in &mut weights {
        std::mem::swap(&mut w.gate, &mut w.up);
        std::mem::swap(&mut w.gate_bias, &mut w.up_bias);
    }
    case.check(&case.run(&weights)).unwrap_err();
}

#[test]
fn a_zeroed_expert_is_caught() {
    for expert in 0..4 {
        let case = Case::new(Pattern::Gaussian, RoutingKind::Zipf);
        let mut weights = case.weights.clone();
        weights[expert].down.fill(0.0);
        case.check(&case.run(&weights)).unwrap_err();
    }
}

#[test]
fn swapped_experts_are_caught() {
    let case = Case::new(Pattern::Gaussian, RoutingKind::OneHot);
    let mut weights = case.weights.clone();
    weights.swap(1, 3);
    case.check(&case.run(&weights)).unwrap_err();
}

#[test]
fn one_wrong_output_is_caught_wherever_it_is() {
    let case = Case::new(Pattern::Gaussian, RoutingKind::Uniform);
    let right = case.run(&case.weights);
    for i in (0..right.len()).step_by(97) {
        let mut got = right.clone();
        // Two steps of the output type.
        got[i] = Bf16::from_bits(got[i].to_bits() + 3);
        let error = case.check(&got).unwrap_err();
        let Mismatch::Element { at, failures, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((at.row, at.col, failures), (i / H, i % H, 1));
        got[i] = Bf16::NAN;
        case.check(&got).unwrap_err();
    }
}

#[test]
fn an_output_never_written_is_caught() {
    let case = Case::new(Pattern::Gaussian, RoutingKind::Uniform);
    let mut got = case.run(&case.weights);
    poison(&mut got[H..H + 1]);
    case.check(&got).unwrap_err();
}

#[test]
fn combined_weights_of_another_slot_are_caught() {
    let mut case = Case::new(Pattern::Gaussian, RoutingKind::Uniform);
    case.routing.weights.swap(4, 5);
    case.check(&case.run(&case.weights)).unwrap_err();
}

/// The lowest bit of one code, in either half of the expert, changes the INT8 result.
#[test]
fn one_wrong_code_is_caught() {
    for format in [WeightFormat::Int8PerRow, WeightFormat::Int8Block128] {
        let expert = ExpertWeights::random(1, H, I, false).quantise(format);
        let x = matrix(Pattern::Gaussian, 2, 3, H);
        let want = expert.forward(&x, Activation::SwiGlu);
        bits_equal("same", &expert.forward(&x, Activation::SwiGlu), &want, H).unwrap();
        let mut wrong = expert.clone();
        wrong.down.codes[5 * I + 129] ^= 1;
        let got = wrong.forward(&x, Activation::SwiGlu);
        let error = bits_equal("down", &got, &want, H).unwrap_err();
        assert!(matches!(error, Mismatch::Bits { col: 5, .. }), "{error}");
        let mut wrong = expert.clone();
        wrong.gate.codes[H + 3] ^= 1;
        // Seen in h itself; its requantisation may hide so small a change.
        let x = QuantisedMatrix::new(format, &x, 3, H);
        let want = int8_hidden(&expert, &x, Activation::SwiGlu);
        let got = int8_hidden(&wrong, &x, Activation::SwiGlu);
        let error = bits_equal("gate", &got, &want, I).unwrap_err();
        assert!(matches!(error, Mismatch::Bits { col: 1, .. }), "{error}");
    }
}
