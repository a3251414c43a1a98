//! The MoE block: every token through its experts, combined in slot order.

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::{WeightFormat, fma};

use super::{Expected, ExpertWeights};
use crate::generate::RoutingCase;

/// An expert that every token goes through.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert<'a> {
    /// Its weights; I may differ from that of the routed experts.
    pub weights: &'a ExpertWeights,
    /// Weight of each token, `[T]`; 1 if absent.
    pub token_weights: Option<&'a [f32]>,
}

/// Experts behind a router.
#[derive(Clone, Copy, Debug)]
pub struct MoeBlock<'a> {
    /// Routed experts, all of one shape.
    pub experts: &'a [ExpertWeights],
    /// Added after the routed ones.
    pub shared: Option<SharedExpert<'a>>,
    /// Activation of all experts.
    pub activation: Activation,
}

/// One term of a token's sum.
struct Term {
    weight: f32,
    /// Index into the outputs of its expert.
    row: usize,
    /// `None` for the shared expert.
    expert: Option<usize>,
}

impl MoeBlock<'_> {
    /// The block in f64 without roundings, [T, H]: for fixtures. Empty slots add nothing.
    ///
    /// # Panics
    /// If shapes disagree or an id names no expert.
    pub fn exact(&self, x: &[f32], routing: &RoutingCase) -> Expected {
        let act = self.activation;
        self.in_f64(x, routing, |weights, x| weights.exact(x, act))
    }

    /// The block with the roundings of the bf16 path ([`ExpertWeights::bf16`]), combined
    /// in f64, [T, H]; rounding to the output type is left to the comparison.
    ///
    /// # Panics
    /// If shapes disagree or an id names no expert.
    pub fn bf16(&self, x: &[f32], routing: &RoutingCase) -> Expected {
        let act = self.activation;
        self.in_f64(x, routing, |weights, x| weights.bf16(x, act))
    }

    /// The block with the roundings of the fp8 path ([`ExpertWeights::fp8`]), combined as
    /// [`MoeBlock::bf16`].
    ///
    /// # Panics
    /// If shapes disagree or an id names no expert.
    pub fn fp8(&self, x: &[f32], routing: &RoutingCase) -> Expected {
        let act = self.activation;
        self.in_f64(x, routing, |weights, x| weights.fp8(x, act))
    }

    /// The block with the roundings of the fp4 paths; see [`ExpertWeights::fp4`].
    ///
    /// # Panics
    /// If shapes disagree, an id names no expert or `format` is neither NVFP4 nor MXFP4.
    pub fn fp4(&self, format: WeightFormat, x: &[f32], routing: &RoutingCase) -> Expected {
        let act = self.activation;
        self.in_f64(x, routing, |weights, x| weights.fp4(format, x, act))
    }

    /// The block with all experts, the shared one among them, in an INT8 format, [T, H]
    /// in f32 before it is rounded to the output type. Every bit is defined: `out = 0`,
    /// then `out = fma(w, y, out)` over the slots in order, then the shared expert.
    ///
    /// # Panics
    /// If shapes disagree, an id names no expert or `format` is not an INT8 format.
    pub fn int8(&self, format: WeightFormat, x: &[f32], routing: &RoutingCase) -> Vec<f32> {
        let act = self.activation;
        let forward = |weights: &ExpertWeights, x: &[f32]| weights.quantise(format).forward(x, act);
        let (routed, shared) = self.outputs(x, routing, forward);
        let h = self.hidden();
        let mut out = vec![0f32; routing.tokens * h];
        for (token, out) in out.chunks_mut(h).enumerate() {
            for term in self.terms(routing, token) {
                let y = pick(&routed, &shared, &term);
                for (n, out) in out.iter_mut().enumerate() {
                    *out = fma(term.weight, y[term.row * h + n], *out);
                }
            }
        }
        out
    }

    fn hidden(&self) -> usize {
        let shared = self.shared.map(|s| s.weights);
        let any = self.experts.first().or(shared);
        any.expect("a block has an expert").hidden
    }

    /// Outputs of every routed expert for its slots in token order, and of the shared one
    /// for all tokens.
    fn outputs<Y>(
        &self,
        x: &[f32],
        routing: &RoutingCase,
        forward: impl Fn(&ExpertWeights, &[f32]) -> Y,
    ) -> (Vec<Y>, Option<Y>) {
        let h = self.hidden();
        assert_eq!(x.len(), routing.tokens * h, "x is [T, {h}]");
        assert_eq!(
            routing.experts,
            self.experts.len(),
            "experts of the routing"
        );
        let run = |weights: &ExpertWeights, x: &[f32]| {
            assert_eq!(weights.hidden, h, "H of every expert");
            forward(weights, x)
        };
        let routed = self.experts.iter().enumerate().map(|(e, weights)| {
            let slots = routing.slots_of(e);
            let tokens = slots.iter().map(|slot| slot / routing.top_k);
            let rows: Vec<f32> = tokens
                .flat_map(|t| x[t * h..(t + 1) * h].iter().copied())
                .collect();
            run(weights, &rows)
        });
        (routed.collect(), self.shared.map(|s| run(s.weights, x)))
    }

    /// What a token's output is the sum of, in order.
    fn terms(&self, routing: &RoutingCase, token: usize) -> Vec<Term> {
        let slots = token * routing.top_k..(token + 1) * routing.top_k;
        let mut terms: Vec<Term> = slots
            .filter(|&slot| routing.ids[slot] >= 0)
            .map(|slot| {
                let id = routing.ids[slot];
                let before = routing.ids[..slot].iter().filter(|&&other| other == id);
                Term {
                    weight: routing.weights[slot],
                    row: before.count(),
                    expert: Some(id as usize),
                }
            })
            .collect();
        if let Some(shared) = self.shared {
            terms.push(Term {
                weight: shared.token_weights.map_or(1.0, |w| w[token]),
                row: token,
                expert: None,
            });
        }
        terms
    }

    fn in_f64(
        &self,
        x: &[f32],
        routing: &RoutingCase,
        forward: impl Fn(&ExpertWeights, &[f32]) -> Expected,
    ) -> Expected {
        let (routed, shared) = self.outputs(x, routing, forward);
        let h = self.hidden();
        // The error of every term is in the slack: their sums differ in length.
        let mut out = Expected::zeros(routing.tokens, h, 0);
        for token in 0..routing.tokens {
            let terms = self.terms(routing, token);
            let combine_error = terms.len() as f64 * 2f64.powi(-24);
            for term in &terms {
                let y = pick(&routed, &shared, term);
                let weight = term.weight as f64;
                for n in 0..h {
                    let (from, to) = (term.row * h + n, token * h + n);
                    let value = weight * y.value[from];
                    out.value[to] += value;
                    out.magnitude[to] += value.abs();
                    out.slack[to] += weight.abs() * y.f32_error(from) + combine_error * value.abs();
                }
            }
        }
        out
    }
}

fn pick<'a, Y>(routed: &'a [Y], shared: &'a Option<Y>, term: &Term) -> &'a Y {
    match (term.expert, shared) {
        (Some(expert), _) => &routed[expert],
        (None, Some(shared)) => shared,
        (None, None) => unreachable!("a shared term comes from a shared expert"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Bound, Output, check_close};
    use crate::generate::{Pattern, RoutingKind, matrix};
    use approx::assert_relative_eq;

    const H: usize = 40;

    fn experts(count: u64) -> Vec<ExpertWeights> {
        (0..count)
            .map(|e| ExpertWeights::random(e, H, 50, true))
            .collect()
    }

    /// Token by token and slot by slot, without grouping.
    #[test]
    fn combine_is_the_weighted_sum() {
        let experts = experts(5);
        let shared_weights = ExpertWeights::random(99, H, 17, false);
        let token_weights: Vec<f32> = (0..9).map(|t| 0.1 + t as f32).collect();
        let block = MoeBlock {
            experts: &experts,
            shared: Some(SharedExpert {
                weights: &shared_weights,
                token_weights: Some(&token_weights),
            }),
            activation: Activation::SwiGlu,
        };
        let x = matrix(Pattern::Gaussian, 1, 9, H);
        for kind in RoutingKind::ALL {
            let routing = RoutingCase::new(kind, 2, 9, 3, 5);
            let (exact, int8) = (
                block.exact(&x, &routing),
                block.int8(WeightFormat::Int8PerRow, &x, &routing),
            );
            for t in 0..9 {
                let xt = &x[t * H..(t + 1) * H];
                let mut want = [0f64; H];
                let mut want_int8 = [0f32; H];
                let mut add = |weights: &ExpertWeights, w: f32| {
                    let y = weights.exact(xt, Activation::SwiGlu).value;
                    let q = weights.quantise(WeightFormat::Int8PerRow);
                    let q = q.forward(xt, Activation::SwiGlu);
                    for n in 0..H {
                        want[n] += w as f64 * y[n];
                        want_int8[n] = w.mul_add(q[n], want_int8[n]);
                    }
                };
                for slot in t * 3..t * 3 + 3 {
                    if routing.ids[slot] >= 0 {
                        add(&experts[routing.ids[slot] as usize], routing.weights[slot]);
                    }
                }
                add(&shared_weights, token_weights[t]);
                for n in 0..H {
                    assert_relative_eq!(exact.value[t * H + n], want[n], max_relative = 1e-12);
                    assert_eq!(
                        int8[t * H + n].to_bits(),
                        want_int8[n].to_bits(),
                        "{kind:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn tokens_without_experts_are_zero() {
        let experts = experts(3);
        let block = MoeBlock {
            experts: &experts,
            shared: None,
            activation: Activation::SwiGlu,
        };
        let x = matrix(Pattern::Gaussian, 1, 4, H);
        let routing = RoutingCase::new(RoutingKind::Holes, 2, 4, 2, 3);
        assert!(
            block.bf16(&x, &routing).value[..H]
                .iter()
                .all(|&y| y == 0.0)
        );
        let int8 = block.int8(WeightFormat::Int8Block128, &x, &routing);
        assert!(int8[..H].iter().all(|y| y.to_bits() == 0));
        assert!(
            int8.iter().all(|y| y.abs() < 1e6),
            "no weight of an empty slot"
        );
    }

    /// The bf16 form is near the exact one, and its own bound tells them apart.
    #[test]
    fn roundings_are_seen_by_the_tight_bound_only() {
        let experts = experts(3);
        let block = MoeBlock {
            experts: &experts,
            shared: None,
            activation: Activation::SwiGlu,
        };
        let x = matrix(Pattern::Gaussian, 1, 8, H);
        let routing = RoutingCase::new(RoutingKind::Uniform, 2, 8, 2, 3);
        let (exact, bf16) = (block.exact(&x, &routing), block.bf16(&x, &routing));
        check_close("exact", &bf16.value, &exact, Bound::relative(0.02)).unwrap();
        let tight = Bound::f32_accumulated(Output::F32);
        assert!(check_close("exact", &exact.value, &bf16, tight).is_err());
        check_close("itself", &bf16.value, &bf16, tight)
            .unwrap()
            .not_vacuous()
            .unwrap();
    }
}
