//! A whole expert layer: routed tokens through their experts, and the weighted sum.

use std::sync::OnceLock;

use asym_gemm_cpu::pool::{Workers, for_chunks};
use asym_gemm_cpu::{
    BankRef, CpuError, Engine, ExpertGroup, Slots, UnpackedExpert, pack_expert, unpack,
};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::BankGeometry;
use half::bf16;

use super::case::LayerShape;
use super::data::{Pattern, fill};
use super::{BenchError, Workload};
use crate::bench::random::Random;
use crate::bench::reference::{self, RandomExpert};

/// Experts that differ: all others of a bank repeat their bytes at places of their own.
const DISTINCT: usize = 3;
/// Routings that calls take in turn.
const ROUTINGS: usize = 16;

/// Banks, tokens, and where they go.
pub(super) struct LayerData<'a> {
    shape: LayerShape,
    geometry: BankGeometry,
    /// Copies of the bank, one after the other.
    banks: &'a [u8],
    copies: usize,
    distinct: Vec<UnpackedExpert>,
    /// Tokens [T, H] of the largest size.
    x: Vec<bf16>,
    out: Vec<bf16>,
    /// The routings of the size in use.
    routings: Vec<Routing>,
}

impl<'a> LayerData<'a> {
    pub(super) fn new(
        shape: LayerShape,
        format: WeightFormat,
        tokens: usize,
        workers: &dyn Workers,
        weights: &'a mut [u8],
    ) -> Result<Self, BenchError> {
        let geometry = shape.geometry(format);
        let expert_bytes = geometry.expert_bytes();
        let copies = weights.len() / geometry.bank_bytes();
        let banks = &mut weights[..copies * geometry.bank_bytes()];
        let mut packed = vec![0u8; DISTINCT * expert_bytes];
        let refused = OnceLock::new();
        for_chunks(workers, &mut packed, expert_bytes, |seed, expert| {
            if let Err(error) = pack_expert(geometry, expert, &RandomExpert(seed as u64)) {
                refused.get_or_init(|| error);
            }
        })
        .map_err(CpuError::from)?;
        if let Some(error) = refused.into_inner() {
            return Err(error.into());
        }
        let distinct: Result<_, CpuError> = packed
            .chunks_exact(expert_bytes)
            .map(|expert| unpack(geometry, expert))
            .collect();
        for_chunks(workers, banks, expert_bytes, |index, expert| {
            let which = index % shape.experts % DISTINCT;
            expert.copy_from_slice(&packed[which * expert_bytes..][..expert_bytes]);
        })
        .map_err(CpuError::from)?;
        let mut x = vec![bf16::ZERO; tokens * shape.hidden];
        fill(workers, bytemuck::cast_slice_mut(&mut x), Pattern::Bf16, 4)?;
        Ok(Self {
            shape,
            geometry,
            banks,
            copies,
            distinct: distinct?,
            x,
            out: vec![bf16::NAN; tokens * shape.hidden],
            routings: Vec::new(),
        })
    }

    fn routing(&self, call: usize) -> &Routing {
        &self.routings[call % self.routings.len()]
    }

    /// A token's output in f64 from dequantised weights.
    fn expected(&self, token: usize, routing: &Routing) -> Vec<f64> {
        let LayerShape { hidden, top_k, .. } = self.shape;
        let slots = token * top_k..(token + 1) * top_k;
        reference::expected(
            &self.x[token * hidden..][..hidden],
            self.shape.intermediate,
            slots.map(|slot| {
                let expert = &self.distinct[routing.experts[slot] % DISTINCT];
                (expert, routing.weights[slot])
            }),
        )
    }
}

impl Workload for LayerData<'_> {
    fn call(&mut self, engine: &Engine, size: usize, call: usize) -> Result<(), CpuError> {
        if call == 0 {
            // Outside of the times: only later calls are timed.
            self.routings = routings(self.shape, size);
            self.out.fill(bf16::NAN);
        }
        let routing = &self.routings[call % self.routings.len()];
        let bank_bytes = self.geometry.bank_bytes();
        let bank = &self.banks[call % self.copies * bank_bytes..][..bank_bytes];
        let elements = size * self.shape.hidden;
        let groups = routing.groups();
        engine.expert_layer(
            BankRef::new(self.geometry, bank)?,
            Activation::SwiGlu,
            &self.x[..elements],
            &groups,
            Slots {
                top_k: self.shape.top_k,
                output_index: &routing.output_index,
                weights: &routing.weights,
            },
            &mut self.out[..elements],
        )
    }

    fn verify(&self, size: usize, call: usize) -> Result<(), String> {
        let hidden = self.shape.hidden;
        let out = &self.out[..size * hidden];
        reference::all_finite(out, hidden)?;
        for token in [0, size - 1] {
            let expected = self.expected(token, self.routing(call));
            let found = &out[token * hidden..][..hidden];
            reference::compare(found, &expected, self.geometry.format)
                .map_err(|what| format!("token {token} is {what}"))?;
        }
        Ok(())
    }

    fn weight_bytes(&self, _: usize, call: usize) -> usize {
        self.routing(call).lists.len() * self.geometry.expert_bytes()
    }
}

/// Where the tokens of a call go.
struct Routing {
    /// Expert of each slot [T, top_k].
    experts: Vec<usize>,
    /// Weight of each slot.
    weights: Vec<f32>,
    /// Row of y of each slot.
    output_index: Vec<i32>,
    /// Experts that have tokens, with their first row of y and their tokens.
    lists: Vec<(usize, usize, Vec<u32>)>,
}

impl Routing {
    fn new(shape: LayerShape, experts: Vec<usize>, random: &mut Random) -> Self {
        let mut tokens = vec![Vec::new(); shape.experts];
        let mut places = Vec::with_capacity(experts.len());
        for (slot, &expert) in experts.iter().enumerate() {
            places.push(tokens[expert].len());
            tokens[expert].push((slot / shape.top_k) as u32);
        }
        let mut start = 0;
        let mut starts = Vec::with_capacity(shape.experts);
        for tokens in &tokens {
            starts.push(start);
            start += tokens.len();
        }
        let row = |(&expert, place): (&usize, usize)| (starts[expert] + place) as i32;
        Self {
            weights: experts
                .iter()
                .map(|_| (1.0 + 0.5 * random.unit()) / shape.top_k as f32)
                .collect(),
            output_index: experts.iter().zip(places).map(row).collect(),
            lists: tokens
                .into_iter()
                .enumerate()
                .filter(|(_, tokens)| !tokens.is_empty())
                .map(|(expert, tokens)| (expert, starts[expert], tokens))
                .collect(),
            experts,
        }
    }

    fn groups(&self) -> Vec<ExpertGroup<'_>> {
        let lists = self.lists.iter();
        lists
            .map(|(expert, start, tokens)| ExpertGroup {
                expert: *expert,
                start: *start,
                tokens,
            })
            .collect()
    }
}

/// Routings of `tokens` tokens to different experts each. A single token goes to the next experts of
/// a random order, so that consecutive calls share none.
fn routings(shape: LayerShape, tokens: usize) -> Vec<Routing> {
    let LayerShape { experts, top_k, .. } = shape;
    let mut random = Random::new(tokens as u64);
    let mut order: Vec<usize> = (0..experts).collect();
    shuffle(&mut order, experts, &mut random);
    (0..ROUTINGS)
        .map(|routing| {
            let chosen = match tokens {
                1 => (0..top_k)
                    .map(|slot| order[(routing * top_k + slot) % experts])
                    .collect(),
                _ => (0..tokens)
                    .flat_map(|_| {
                        shuffle(&mut order, top_k, &mut random);
                        order[..top_k].to_vec()
                    })
                    .collect(),
            };
            Routing::new(shape, chosen, &mut random)
        })
        .collect()
}

/// Puts a random choice of `count` of the values first.
fn shuffle(values: &mut [usize], count: usize, random: &mut Random) {
    for i in 0..count.min(values.len()) {
        let other = i + random.below(values.len() - i);
        values.swap(i, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn routings_give_each_token_different_experts_and_each_slot_a_row() {
        let shape = LayerShape {
            experts: 16,
            hidden: 1,
            intermediate: 1,
            top_k: 4,
        };
        for tokens in [1, 2, 33] {
            for routing in routings(shape, tokens) {
                let rows: HashSet<_> = routing.output_index.iter().collect();
                assert_eq!(rows.len(), tokens * 4);
                for (token, experts) in routing.experts.chunks(4).enumerate() {
                    assert_eq!(experts.iter().collect::<HashSet<_>>().len(), 4);
                    for (slot, expert) in experts.iter().enumerate() {
                        let row = routing.output_index[token * 4 + slot] as usize;
                        let groups = routing.groups();
                        let group = groups.iter().find(|g| g.expert == *expert).expect("listed");
                        assert_eq!(group.tokens[row - group.start], token as u32);
                    }
                }
            }
        }
        let [first, second] = [0, 1].map(|i| routings(shape, 1).remove(i).experts);
        assert!(first.iter().all(|expert| !second.contains(expert)));
    }
}
