//! Router: hidden states to expert ids and weights.
//!
//! All in f32 on the hidden states as given. Where scores are equal, the lower expert id
//! wins, so that the choice does not depend on how it is searched for.
//!
//! Broken scores stay inside their token and never leave the range of ids: every token
//! gets `top_k` distinct experts; a NaN score counts as negative infinity, loses to all
//! others and has weight zero; a token without a usable score has only zero weights.

use asym_gemm_formats::activation::exp;
use rayon::prelude::*;
use std::cmp::Ordering;
use thiserror::Error;

/// The experts of each token and how much each counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Slots of a token.
    pub top_k: usize,
    /// `[tokens, top_k]`, experts by descending score.
    pub ids: Vec<i32>,
    /// `[tokens, top_k]`.
    pub weights: Vec<f32>,
}

/// From logits to the chosen experts and their weights.
#[derive(Clone, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts, then the `top_k` largest (Qwen, OLMoE, Mixtral).
    Softmax {
        /// Whether the weights of a token are scaled to sum to one.
        renormalise: bool,
    },
    /// The `top_k` largest logits, then softmax over these (gpt-oss).
    SoftmaxOfTopK,
    /// Sigmoid, and a choice limited to some groups of experts (DeepSeek-V3, GLM-4 MoE).
    ///
    /// Experts are chosen by sigmoid + correction; a group counts as the sum of its two
    /// best; experts outside the best `chosen_groups` groups cannot be chosen. Weights are
    /// the sigmoids alone.
    GroupedSigmoid {
        /// `[experts]`, added to the scores for the choice only.
        correction: Vec<f32>,
        /// Number of equal groups of consecutive experts.
        groups: usize,
        /// Groups from which experts may be chosen.
        chosen_groups: usize,
        /// Whether the weights of a token are scaled to sum to one before `scale`.
        renormalise: bool,
        /// Factor of all weights.
        scale: f32,
    },
}

/// A router that cannot work, or input that does not fit it.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// top_k is zero or more than there are experts.
    #[error("top_k is {top_k}, but must be in 1..={experts}, the number of experts")]
    TopK {
        /// Experts of a token.
        top_k: usize,
        /// Experts there are.
        experts: usize,
    },
    /// A tensor or slice of the wrong length.
    #[error("{name} has {found} elements, expected {expected}")]
    Length {
        /// Which one.
        name: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A slice that does not hold whole rows.
    #[error("{name} has {found} elements, not a multiple of the row length {row}")]
    Rows {
        /// Which one.
        name: &'static str,
        /// Elements of a row.
        row: usize,
        /// Elements given.
        found: usize,
    },
    /// Hidden states without elements.
    #[error("the hidden size is zero")]
    NoHidden,
    /// Groups that do not divide the experts or hold too few.
    #[error(
        "cannot choose {top_k} of {experts} experts from {chosen_groups} of {groups} equal groups"
    )]
    Groups {
        /// Experts of a token.
        top_k: usize,
        /// Experts there are.
        experts: usize,
        /// Groups there are.
        groups: usize,
        /// Groups to choose from.
        chosen_groups: usize,
    },
    /// A parameter that is NaN or infinite.
    #[error("{name} is not finite")]
    NotFinite {
        /// Which one.
        name: &'static str,
    },
    /// The logits could not be computed.
    #[error(transparent)]
    Logits(#[from] asym_gemm_cpu::CpuError),
}

/// A linear layer over the hidden states and a [`Scoring`].
#[derive(Clone, Debug)]
pub struct Router {
    experts: usize,
    hidden: usize,
    top_k: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    scoring: Scoring,
}

impl Router {
    /// A router over `weight` `[experts, hidden]` and `bias` `[experts]`.
    ///
    /// # Errors
    /// `hidden` zero, `top_k` zero or above `experts`, tensors of other lengths, groups that do not
    /// divide the experts or offer fewer than `top_k`, a correction or scale that is not
    /// finite.
    pub fn new(
        experts: usize,
        hidden: usize,
        top_k: usize,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        scoring: Scoring,
    ) -> Result<Self, RoutingError> {
        if top_k == 0 || top_k > experts || experts > i32::MAX as usize {
            return Err(RoutingError::TopK { top_k, experts });
        }
        if hidden == 0 {
            return Err(RoutingError::NoHidden);
        }
        let length = |name, found, expected| match found == expected {
            true => Ok(()),
            false => Err(RoutingError::Length {
                name,
                expected,
                found,
            }),
        };
        length(
            "router weight",
            weight.len(),
            experts.saturating_mul(hidden),
        )?;
        if let Some(bias) = &bias {
            length("router bias", bias.len(), experts)?;
        }
        if let Scoring::GroupedSigmoid {
            correction,
            groups,
            chosen_groups,
            scale,
            ..
        } = &scoring
        {
            let (groups, chosen_groups) = (*groups, *chosen_groups);
            length("score correction", correction.len(), experts)?;
            let divides = groups != 0 && experts.is_multiple_of(groups);
            if !divides || chosen_groups > groups || chosen_groups * (experts / groups) < top_k {
                return Err(RoutingError::Groups {
                    top_k,
                    experts,
                    groups,
                    chosen_groups,
                });
            }
            if !correction.iter().all(|c| c.is_finite()) {
                return Err(RoutingError::NotFinite {
                    name: "score correction",
                });
            }
            if !scale.is_finite() {
                return Err(RoutingError::NotFinite {
                    name: "routed scaling factor",
                });
            }
        }
        Ok(Self {
            experts,
            hidden,
            top_k,
            weight,
            bias,
            scoring,
        })
    }

    /// Number of experts E.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Model width H.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// `[experts, hidden]`.
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }

    /// `[experts]`.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// How logits become choices.
    pub fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// Logits `[tokens, experts]` of `x` `[tokens, hidden]`.
    ///
    /// # Errors
    /// `x` that does not hold whole rows.
    pub fn logits(&self, x: &[f32]) -> Result<Vec<f32>, RoutingError> {
        let tokens = rows("hidden states", x, self.hidden)?;
        let mut logits = vec![0.0; tokens * self.experts];
        let router = asym_gemm_cpu::Router {
            x,
            w: &self.weight,
            bias: self.bias.as_deref(),
            hidden: self.hidden,
        };
        asym_gemm_cpu::router_logits(router, &mut logits)?;
        Ok(logits)
    }

    /// Experts and weights for `logits` `[tokens, experts]`.
    ///
    /// # Errors
    /// `logits` that do not hold whole rows.
    pub fn select(&self, logits: &[f32]) -> Result<Routing, RoutingError> {
        let tokens = rows("logits", logits, self.experts)?;
        let mut ids = vec![0; tokens * self.top_k];
        let mut weights = vec![0.0; tokens * self.top_k];
        ids.par_chunks_mut(self.top_k)
            .zip(weights.par_chunks_mut(self.top_k))
            .zip(logits.par_chunks(self.experts))
            .for_each_init(Scratch::default, |scratch, ((ids, weights), logits)| {
                self.select_token(logits, ids, weights, scratch);
            });
        Ok(Routing {
            top_k: self.top_k,
            ids,
            weights,
        })
    }

    /// Experts and weights for hidden states `x` `[tokens, hidden]`.
    ///
    /// # Errors
    /// `x` that does not hold whole rows.
    pub fn route(&self, x: &[f32]) -> Result<Routing, RoutingError> {
        self.select(&self.logits(x)?)
    }

    fn select_token(
        &self,
        logits: &[f32],
        ids: &mut [i32],
        weights: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let Scratch {
            choice,
            order,
            group_scores,
        } = scratch;
        choice.clear();
        order.clear();
        match &self.scoring {
            // Softmax keeps the order of the logits, and these still differ where
            // probabilities have underflowed to the same value.
            Scoring::Softmax { .. } | Scoring::SoftmaxOfTopK => {
                choice.extend(logits.iter().map(|&l| nan_last(l)));
                order.extend(0..self.experts as u32);
            }
            Scoring::GroupedSigmoid {
                correction,
                groups,
                chosen_groups,
                ..
            } => {
                choice.extend(
                    logits
                        .iter()
                        .zip(correction)
                        .map(|(&l, c)| nan_last(sigmoid(l) + c)),
                );
                let size = self.experts / groups;
                group_scores.clear();
                group_scores.extend(choice.chunks_exact(size).map(best_two));
                order.extend(0..*groups as u32);
                largest(order, group_scores, *chosen_groups);
                let chosen = std::mem::take(order);
                order.extend(chosen.iter().flat_map(|&group| {
                    let first = group * size as u32;
                    first..first + size as u32
                }));
            }
        }
        largest(order, choice, self.top_k);
        for (id, &expert) in ids.iter_mut().zip(order.iter()) {
            *id = expert as i32;
        }

        match &self.scoring {
            Scoring::Softmax { renormalise } => {
                let all = match renormalise {
                    true => None,
                    false => Some(choice.as_slice()),
                };
                softmax(choice, order, all, weights);
            }
            Scoring::SoftmaxOfTopK => softmax(choice, order, None, weights),
            Scoring::GroupedSigmoid {
                renormalise, scale, ..
            } => {
                for (weight, &expert) in weights.iter_mut().zip(order.iter()) {
                    let score = sigmoid(logits[expert as usize]);
                    *weight = if score.is_nan() { 0.0 } else { score };
                }
                let mut factor = *scale;
                if *renormalise {
                    // As published: keeps a sum of zero from dividing.
                    factor /= weights.iter().sum::<f32>() + 1e-20;
                }
                for weight in weights {
                    *weight *= factor;
                }
            }
        }
    }
}

/// Per-thread buffers of [`Router::select`].
#[derive(Default)]
struct Scratch {
    choice: Vec<f32>,
    order: Vec<u32>,
    group_scores: Vec<f32>,
}

fn rows(name: &'static str, values: &[f32], row: usize) -> Result<usize, RoutingError> {
    match values.len().is_multiple_of(row) {
        true => Ok(values.len() / row),
        false => Err(RoutingError::Rows {
            name,
            row,
            found: values.len(),
        }),
    }
}

fn nan_last(score: f32) -> f32 {
    if score.is_nan() {
        f32::NEG_INFINITY
    } else {
        score
    }
}

fn sigmoid(x: f32) -> f32 {
    // `exp` is cut at e^87; a score that is switched off must be exactly zero.
    match x {
        f32::NEG_INFINITY => 0.0,
        x => 1.0 / (1.0 + exp(-x)),
    }
}

/// Sum of the two largest usable scores; negative infinity if there is none.
fn best_two(scores: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in scores {
        if score > first {
            (first, second) = (score, first);
        } else if score > second {
            second = score;
        }
    }
    if second == f32::NEG_INFINITY {
        first
    } else {
        first + second
    }
}

/// Reduces `candidates` to the `count` of largest score, in descending order.
fn largest(candidates: &mut Vec<u32>, scores: &[f32], count: usize) {
    let by_score = |&a: &u32, &b: &u32| {
        let (score_a, score_b) = (scores[a as usize], scores[b as usize]);
        // No NaN is left; 0.0 and -0.0 are equal and go by id.
        score_b
            .partial_cmp(&score_a)
            .unwrap_or(Ordering::Equal)
            .then(a.cmp(&b))
    };
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, by_score);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(by_score);
}

/// Softmax weights of the experts `chosen`, the first of which has the largest score,
/// relative to the sum over `all` scores or over the chosen ones.
fn softmax(scores: &[f32], chosen: &[u32], all: Option<&[f32]>, weights: &mut [f32]) {
    let max = scores[chosen[0] as usize];
    let term = |score: f32| match score {
        // Infinite differences: an infinite score takes everything, -inf has nothing.
        f32::NEG_INFINITY => 0.0,
        score if score == max => 1.0,
        _ if max == f32::INFINITY => 0.0,
        score => exp(score - max),
    };
    for (weight, &expert) in weights.iter_mut().zip(chosen) {
        *weight = term(scores[expert as usize]);
    }
    let sum: f32 = match all {
        Some(all) => all.iter().map(|&score| term(score)).sum(),
        None => weights.iter().sum(),
    };
    // Zero only where no score was usable; the weights are zero then.
    if sum > 0.0 {
        for weight in weights {
            *weight /= sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;

    fn router(experts: usize, top_k: usize, scoring: Scoring) -> Result<Router, RoutingError> {
        Router::new(experts, 1, top_k, vec![0.0; experts], None, scoring)
    }

    fn grouped(experts: usize, groups: usize, chosen_groups: usize) -> Scoring {
        Scoring::GroupedSigmoid {
            correction: vec![0.0; experts],
            groups,
            chosen_groups,
            renormalise: true,
            scale: 2.5,
        }
    }

    fn every_scoring(experts: usize) -> Vec<Scoring> {
        vec![
            Scoring::Softmax { renormalise: false },
            Scoring::Softmax { renormalise: true },
            Scoring::SoftmaxOfTopK,
            grouped(experts, 1, 1),
            grouped(experts, 4, 2),
        ]
    }

    fn select(scoring: Scoring, top_k: usize, logits: &[f32]) -> (Vec<i32>, Vec<f32>) {
        let routing = router(logits.len(), top_k, scoring)
            .unwrap()
            .select(logits)
            .unwrap();
        (routing.ids, routing.weights)
    }

    #[test]
    fn broken_rows_give_distinct_ids_and_finite_weights() {
        let rows: [[f32; 8]; 8] = [
            [NAN; 8],
            [0.0, 1.0, NAN, 3.0, -1.0, 2.0, 0.5, 1.5],
            [0.0, 1.0, INF, 3.0, -1.0, 2.0, 0.5, 1.5],
            [INF; 8],
            [1.0; 8],
            [-INF; 8],
            [NAN, NAN, NAN, NAN, NAN, NAN, NAN, 1.0],
            [NAN, INF, -INF, 0.0, NAN, INF, -INF, -0.0],
        ];
        for scoring in every_scoring(8) {
            for row in rows {
                for top_k in [1, 3, 4] {
                    let (mut ids, weights) = select(scoring.clone(), top_k, &row);
                    assert!(
                        weights.iter().all(|w| w.is_finite() && *w >= 0.0),
                        "{row:?} {weights:?}"
                    );
                    ids.sort_unstable();
                    ids.dedup();
                    assert_eq!(ids.len(), top_k);
                    assert!(ids.iter().all(|id| (0..8).contains(id)));
                }
            }
            let dead = select(scoring.clone(), 3, &rows[0]);
            assert_eq!(dead, (vec![0, 1, 2], vec![0.0; 3]));
            assert_eq!(select(scoring.clone(), 2, &rows[5]).1, [0.0; 2]);
            // The one live expert wins, and in a softmax takes everything.
            let (ids, weights) = select(scoring.clone(), 2, &rows[6]);
            assert!(ids[0] == 7 && weights[0] > 0.0 && weights[1] == 0.0);
            assert_eq!(select(scoring, 3, &rows[2]).0[0], 2);
        }
        let (ids, _) = select(Scoring::SoftmaxOfTopK, 7, &rows[1]);
        assert_eq!(ids, [3, 5, 7, 1, 6, 0, 4]);
    }

    /// A broken token changes nothing in its neighbours.
    #[test]
    fn tokens_are_independent() {
        let row = [0.0, 1.0, -2.0, 3.0, -1.0, 2.0, 0.5, 1.5];
        for scoring in every_scoring(8) {
            let router = router(8, 3, scoring).unwrap();
            let alone = router.select(&row).unwrap();
            let both = router
                .select(&[&[NAN; 8][..], &row, &[INF; 8]].concat())
                .unwrap();
            assert_eq!(both.ids[3..6], alone.ids);
            assert_eq!(both.weights[3..6], alone.weights);
        }
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        for scoring in every_scoring(8) {
            assert_eq!(select(scoring.clone(), 3, &[0.5; 8]).0, [0, 1, 2]);
            let zeros = [-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0, -0.0];
            assert_eq!(select(scoring, 4, &zeros).0, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn weights_of_each_scoring() {
        let logits = [0.0f32, 2.0f32.ln(), 4.0f32.ln(), 1.0];
        let total = 1.0 + 2.0 + 4.0 + 1.0f32.exp();
        let close = |got: &[f32], want: &[f32]| {
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(want) {
                assert!((g - w).abs() < 1e-6, "{got:?} {want:?}");
            }
        };
        let e = 1.0f32.exp();
        let (ids, weights) = select(Scoring::Softmax { renormalise: false }, 2, &logits);
        assert_eq!(ids, [2, 3]);
        close(&weights, &[4.0 / total, e / total]);
        for scoring in [
            Scoring::Softmax { renormalise: true },
            Scoring::SoftmaxOfTopK,
        ] {
            close(
                &select(scoring, 2, &logits).1,
                &[4.0 / (4.0 + e), e / (4.0 + e)],
            );
        }
        // 1 / (1 + e^-ln(v)) = v / (v + 1)
        let scores = [4.0 / 5.0, e / (e + 1.0)];
        let sum = scores[0] + scores[1];
        let (ids, weights) = select(grouped(4, 1, 1), 2, &logits);
        assert_eq!(ids, [2, 3]);
        close(&weights, &[2.5 * scores[0] / sum, 2.5 * scores[1] / sum]);
    }

    /// The correction decides the choice but not the weight; groups out of the running
    /// lose even their best expert.
    #[test]
    fn groups_and_correction() {
        let mut correction = vec![0.0; 8];
        correction[5] = 0.5;
        let scoring = Scoring::GroupedSigmoid {
            correction,
            groups: 4,
            chosen_groups: 2,
            renormalise: false,
            scale: 1.0,
        };
        // Group sums of the best two: 0.98, 1.0, 1.5, 1.2. Expert 0 has the best score of all.
        let l = |p: f32| (p / (1.0 - p)).ln();
        let logits = [
            l(0.97),
            l(0.01),
            l(0.5),
            l(0.5),
            l(0.5),
            l(0.5),
            l(0.6),
            l(0.6),
        ];
        let (ids, weights) = select(scoring, 3, &logits);
        assert_eq!(ids, [5, 6, 7]);
        assert!((weights[0] - 0.5).abs() < 1e-6, "{weights:?}");
        // A negative correction everywhere still never lets a masked group in.
        let scoring = Scoring::GroupedSigmoid {
            correction: vec![-9.0; 8],
            groups: 4,
            chosen_groups: 1,
            renormalise: true,
            scale: 1.0,
        };
        assert_eq!(select(scoring, 2, &logits).0, [6, 7]);
    }

    #[test]
    fn sizes() {
        for experts in [1usize, 3, 60, 96, 384, 512, 1025, 2048] {
            for top_k in [1, 2, 6, 8, 10, 32, experts] {
                let top_k = top_k.min(experts);
                let logits: Vec<f32> = (0..experts).map(|e| (e * 7919 % 4099) as f32).collect();
                let (ids, _) = select(Scoring::SoftmaxOfTopK, top_k, &logits);
                let mut order: Vec<i32> = (0..experts as i32).collect();
                order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
                assert_eq!(ids, order[..top_k]);
            }
        }
    }

    #[test]
    fn refusals() {
        for top_k in [0, 5] {
            let err = router(4, top_k, Scoring::SoftmaxOfTopK).unwrap_err();
            assert_eq!(err, RoutingError::TopK { top_k, experts: 4 });
        }
        for (groups, chosen) in [(0, 0), (3, 1), (4, 5), (4, 2), (4, 0)] {
            let err = router(4, 3, grouped(4, groups, chosen)).unwrap_err();
            assert!(matches!(err, RoutingError::Groups { .. }), "{err}");
        }
        let err = router(4, 3, grouped(5, 1, 1)).unwrap_err();
        assert!(matches!(
            err,
            RoutingError::Length {
                name: "score correction",
                ..
            }
        ));
        let new = |weight, bias| Router::new(4, 3, 2, weight, bias, Scoring::SoftmaxOfTopK);
        assert!(matches!(
            new(vec![0.0; 11], None),
            Err(RoutingError::Length { .. })
        ));
        assert!(matches!(
            new(vec![0.0; 12], Some(vec![0.0; 3])),
            Err(RoutingError::Length { .. })
        ));
        let router = new(vec![0.0; 12], None).unwrap();
        assert!(matches!(
            router.logits(&[0.0; 4]),
            Err(RoutingError::Rows { .. })
        ));
        assert!(matches!(
            router.select(&[0.0; 5]),
            Err(RoutingError::Rows { .. })
        ));
        assert!(router.route(&[]).unwrap().ids.is_empty());
        let none = Router::new(4, 0, 2, vec![], None, Scoring::SoftmaxOfTopK);
        assert!(matches!(none, Err(RoutingError::NoHidden)));
    }

    proptest! {
        /// Logits do not depend on the batch and stay within the f32 summation bound.
        #[test]
        fn logits_match_f64(hidden in 1usize..130, tokens in 1usize..20, seed in any::<u32>()) {
            let value = |i: usize| {
                let mixed = (i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 8;
                mixed as f32 / (1 << 23) as f32 - 1.0
            };
            let experts = 5;
            let weight: Vec<f32> = (0..experts * hidden).map(value).collect();
            let bias: Vec<f32> = (0..experts).map(|i| value(i + 77)).collect();
            let x: Vec<f32> = (0..tokens * hidden).map(|i| value(i + 1000)).collect();
            let router = Router::new(
                experts, hidden, 2, weight.clone(), Some(bias.clone()), Scoring::SoftmaxOfTopK,
            ).unwrap();
            let logits = router.logits(&x).unwrap();
            for t in 0..tokens {
                let row = &x[t * hidden..][..hidden];
                prop_assert_eq!(&router.logits(row).unwrap(), &logits[t * experts..][..experts]);
                for e in 0..experts {
                    let products = row.iter().zip(&weight[e * hidden..][..hidden]);
                    let want = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                        + f64::from(bias[e]);
                    let got = f64::from(logits[t * experts + e]);
                    prop_assert!((got - want).abs() < 1e-6 * (hidden as f64 + 1.0), "{got} {want}");
                }
            }
        }
    }
}
