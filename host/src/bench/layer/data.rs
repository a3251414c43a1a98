//! The bank of a block, and the tokens that go through it.

use std::sync::Arc;

use asym_gemm_cpu::{CpuError, UnpackedExpert, unpack};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::BankGeometry;
use half::bf16;

use super::{LayerBenchError, Plan, Setup};
use crate::bench::cpu::LayerShape;
use crate::bench::random::Random;
use crate::bench::reference::{self, RandomExpert};
#[cfg(feature = "cuda")]
use crate::driver::DeviceBuffer;
use crate::moe::routing::Routing;
use crate::moe::{ExpertBank, LayerReport, MoeLayer};

/// Experts that differ: all others of a bank repeat their weights at places of their own.
const DISTINCT: usize = 3;
/// Routings that calls take in turn.
const ROUTINGS: usize = 16;

/// One shape in one format.
pub(super) struct Block {
    pub(super) shape: LayerShape,
    pub(super) geometry: BankGeometry,
    pub(super) bank: Arc<ExpertBank>,
    pub(super) layer: MoeLayer,
    distinct: Vec<UnpackedExpert>,
}

impl Block {
    pub(super) fn new(
        shape: LayerShape,
        format: WeightFormat,
        plan: &Plan,
        setup: &Setup,
    ) -> Result<Self, LayerBenchError> {
        let geometry = shape.geometry(format);
        let source = |expert: usize| RandomExpert((expert % DISTINCT) as u64);
        #[cfg(feature = "cuda")]
        let bank = match setup.gpus.first() {
            Some(gpu) => ExpertBank::pinned(gpu, geometry, source, || ())?,
            None => ExpertBank::plain(geometry, source, || ())?,
        };
        #[cfg(not(feature = "cuda"))]
        let bank = ExpertBank::plain(geometry, source, || ())?;
        let bank = Arc::new(bank);
        let experts = bank.bytes().chunks_exact(geometry.expert_bytes());
        let distinct: Result<_, CpuError> = experts
            .take(DISTINCT)
            .map(|expert| unpack(geometry, expert))
            .collect();
        let builder = MoeLayer::builder(Arc::clone(&bank)).engine(setup.engine.clone());
        #[cfg(feature = "cuda")]
        let builder = with_gpus(builder, &geometry, plan, setup)?;
        #[cfg(not(feature = "cuda"))]
        let _ = plan;
        Ok(Self {
            shape,
            geometry,
            layer: builder.build()?,
            bank,
            distinct: distinct?,
        })
    }
}

/// The devices, and what is resident on them by live counts.
#[cfg(feature = "cuda")]
fn with_gpus(
    builder: crate::moe::MoeLayerBuilder,
    geometry: &BankGeometry,
    plan: &Plan,
    setup: &Setup,
) -> Result<crate::moe::MoeLayerBuilder, LayerBenchError> {
    use crate::dispatch::{Residency, ResidencySettings};
    let builder = builder.devices(&setup.gpus);
    let budget = (geometry.bank_bytes() as f64 * plan.resident.clamp(0.0, 1.0)) as u64;
    if budget == 0 || setup.gpus.is_empty() {
        return Ok(builder);
    }
    let residency = Residency::new(geometry, budget, ResidencySettings::default())
        .map_err(crate::dispatch::DispatchError::from)?;
    let of_each = budget as usize / setup.gpus.len();
    Ok(builder.hbm_budget(of_each).retain(residency))
}

/// Tokens of one number, their routings, and where the output goes.
pub(super) struct Tokens {
    x: Vec<bf16>,
    out: Vec<bf16>,
    routings: Vec<Routing>,
    #[cfg(feature = "cuda")]
    device: Option<(DeviceBuffer<bf16>, DeviceBuffer<bf16>)>,
}

impl Tokens {
    pub(super) fn new(
        block: &Block,
        tokens: usize,
        zipf: f64,
        setup: &Setup,
    ) -> Result<Self, LayerBenchError> {
        let mut random = Random::new(tokens as u64);
        let elements = tokens * block.shape.hidden;
        let x: Vec<bf16> = (0..elements)
            .map(|_| bf16::from_f32(random.unit()))
            .collect();
        let count = if tokens > 64 { 4 } else { ROUTINGS };
        #[cfg(feature = "cuda")]
        let device = match setup.gpus.first() {
            None => None,
            Some(gpu) => Some((
                DeviceBuffer::from_slice(gpu, &x)?,
                DeviceBuffer::zeroed(gpu, elements)?,
            )),
        };
        #[cfg(not(feature = "cuda"))]
        let _ = setup;
        Ok(Self {
            x,
            out: vec![bf16::NAN; elements],
            routings: routings(block.shape, tokens, zipf, count, &mut random),
            #[cfg(feature = "cuda")]
            device,
        })
    }

    /// Makes every element of the output NaN.
    pub(super) fn poison(&mut self) -> Result<(), LayerBenchError> {
        self.out.fill(bf16::NAN);
        #[cfg(feature = "cuda")]
        if let Some((_, out)) = &mut self.device {
            out.fill_bytes(0xff)?;
        }
        Ok(())
    }

    /// One forward; `call` chooses the routing.
    pub(super) fn call(
        &mut self,
        layer: &MoeLayer,
        call: usize,
    ) -> Result<LayerReport, LayerBenchError> {
        let routing = &self.routings[call % self.routings.len()];
        #[cfg(feature = "cuda")]
        if let Some((x, out)) = &mut self.device {
            return Ok(layer.forward(&*x, routing, out)?);
        }
        Ok(layer.forward(&self.x, routing, &mut self.out)?)
    }

    /// Compares the output of that call with f64, for the first token and the last.
    pub(super) fn verify(&mut self, block: &Block, call: usize) -> Result<(), String> {
        #[cfg(feature = "cuda")]
        if let Some((_, out)) = &self.device {
            out.copy_to_host(&mut self.out)
                .map_err(|error| error.to_string())?;
        }
        let LayerShape { hidden, top_k, .. } = block.shape;
        let routing = &self.routings[call % self.routings.len()];
        reference::all_finite(&self.out, hidden)?;
        for token in [0, self.x.len() / hidden - 1] {
            let slots = token * top_k..(token + 1) * top_k;
            let expected = reference::expected(
                &self.x[token * hidden..][..hidden],
                block.shape.intermediate,
                slots.map(|slot| {
                    let expert = routing.ids[slot] as usize % DISTINCT;
                    (&block.distinct[expert], routing.weights[slot])
                }),
            );
            let found = &self.out[token * hidden..][..hidden];
            reference::compare(found, &expected, block.geometry.format)
                .map_err(|what| format!("token {token} is {what}"))?;
        }
        Ok(())
    }
}

/// Routings of `tokens` tokens to different experts each, popular by Zipf's law. Where all are
/// popular alike a single token goes to the next experts of a random order, so that consecutive
/// calls share none.
fn routings(
    shape: LayerShape,
    tokens: usize,
    zipf: f64,
    count: usize,
    random: &mut Random,
) -> Vec<Routing> {
    let LayerShape { experts, top_k, .. } = shape;
    let weights: Vec<f64> = (1..=experts)
        .map(|rank| (rank as f64).powf(-zipf))
        .collect();
    // Popular experts lie anywhere in the bank.
    let mut order: Vec<usize> = (0..experts).collect();
    for i in (1..experts).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut keys: Vec<(f64, usize)> = Vec::with_capacity(experts);
    let routing = |routing: usize| {
        let mut ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            if tokens == 1 && zipf == 0.0 {
                let next = (0..top_k).map(|slot| order[(routing * top_k + slot) % experts] as i32);
                ids.extend(next);
                continue;
            }
            // The largest of ln(u) / weight are a weighted choice without replacement.
            keys.clear();
            keys.extend(weights.iter().zip(&order).map(|(weight, &expert)| {
                let unit = f64::from(random.unit()).mul_add(0.5, 0.5).max(1e-12);
                (unit.ln() / weight, expert)
            }));
            keys.select_nth_unstable_by(top_k - 1, |a, b| b.0.total_cmp(&a.0));
            ids.extend(keys[..top_k].iter().map(|(_, expert)| *expert as i32));
        }
        Routing {
            top_k,
            weights: ids
                .iter()
                .map(|_| (1.0 + 0.5 * random.unit()) / top_k as f32)
                .collect(),
            ids,
        }
    };
    (0..count).map(routing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn routings_give_each_token_different_experts_and_follow_popularity() {
        let shape = LayerShape {
            experts: 16,
            hidden: 1,
            intermediate: 1,
            top_k: 4,
        };
        for (tokens, zipf) in [(1, 0.0), (1, 1.1), (33, 0.0), (200, 1.1)] {
            let all = routings(shape, tokens, zipf, 4, &mut Random::new(1));
            let mut uses = [0; 16];
            for routing in &all {
                assert_eq!(routing.ids.len(), tokens * 4);
                for experts in routing.ids.chunks(4) {
                    assert_eq!(experts.iter().collect::<BTreeSet<_>>().len(), 4);
                    experts
                        .iter()
                        .for_each(|&expert| uses[expert as usize] += 1);
                }
            }
            if tokens == 200 {
                uses.sort_unstable();
                assert!(uses[15] > 3 * uses[3], "{uses:?}");
            }
        }
        let all = routings(shape, 1, 0.0, 4, &mut Random::new(1));
        assert!(all[0].ids.iter().all(|id| !all[1].ids.contains(id)));
    }
}
