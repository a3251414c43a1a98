//! What a layer would take on a machine, without running it.

use asym_gemm_formats::bank::BankGeometry;

use super::cost::{Prediction, Work};
use super::partition::{Method, best};
use super::rates::{Rates, RatesError};
use super::traffic::{Random, popularity, route};
use crate::moe::division::{
    Divide, Division, ExpertLoad, FixedPolicy, LayerShape, PolicyKind, STATIC_M_CPU, Summary,
};

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// The layer.
    pub geometry: BankGeometry,
    /// Experts of a token, at most those of the layer.
    pub top_k: usize,
    /// Tokens of the forward.
    pub tokens: u32,
    /// GPUs; 0 for the CPU alone.
    pub devices: u32,
    /// HBM for experts, all GPUs together: the most popular ones as far as they fit.
    pub hbm_budget_bytes: u64,
    /// HBM for the ring that weights are staged through, all GPUs together.
    pub ring_bytes: u64,
    /// Popularity of experts by Zipf's law with this exponent; 0 for all alike.
    pub zipf: f64,
}

/// One policy's answer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct PolicyEstimate {
    /// Its name, as [`PolicyKind`] prints it.
    pub policy: String,
    /// How the work was divided, if that was a choice.
    pub method: Option<Method>,
    /// Seconds.
    pub prediction: Prediction,
    /// Weight bytes that the CPU reads.
    pub cpu_bytes: u64,
    /// Weight bytes that cross the links.
    pub streamed_bytes: u64,
    /// Weight bytes that are read from HBM.
    pub resident_bytes: u64,
    /// Totals of both sides.
    pub summary: Summary,
    /// Who does what.
    #[serde(skip)]
    pub division: Division,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// Experts with rows.
    pub active: usize,
    /// Rows of the most used expert.
    pub most_rows: u32,
    /// Experts in HBM.
    pub resident_experts: usize,
    /// Weight bytes of the routed experts, each once.
    pub bytes: u64,
    /// Those of them that are not in HBM.
    pub host_bytes: u64,
    /// Seconds that these take at least where CPU and links read them together.
    pub floor_s: f64,
    /// Host memory of the layer's weights.
    pub bank_bytes: u64,
    /// HBM of the experts and of the ring.
    pub hbm_bytes: u64,
    /// Working memory of tokens and rows, on either side, roughly.
    pub scratch_bytes: u64,
    /// Each policy.
    pub policies: Vec<PolicyEstimate>,
}

impl Question {
    /// Answers it for a machine. The routing is drawn, always the same for the same question.
    ///
    /// # Errors
    /// A rate that no machine has.
    pub fn answer(&self, rates: &Rates) -> Result<Estimate, RatesError> {
        rates.validate()?;
        let geometry = &self.geometry;
        let slices = geometry.slices() as u32;
        let expert_bytes = geometry.expert_bytes() as u64;
        let fitting = self.hbm_budget_bytes.checked_div(expert_bytes).unwrap_or(0);
        let resident_experts = match self.devices {
            0 => 0,
            _ => usize::try_from(fitting)
                .unwrap_or(usize::MAX)
                .min(geometry.experts),
        };
        let popularity = popularity(geometry.experts, self.zipf);
        let tokens = self.tokens as usize;
        let top_k = self.top_k.min(geometry.experts);
        let rows = route(&mut Random(tokens as u64), &popularity, tokens, top_k);
        let loads: Vec<ExpertLoad> = rows
            .iter()
            .enumerate()
            .filter(|(_, rows)| **rows > 0)
            .map(|(expert, &rows)| ExpertLoad {
                expert: expert as u32,
                rows,
                resident: match expert < resident_experts {
                    true => 0..slices,
                    false => slices..slices,
                },
            })
            .collect();
        let shape = LayerShape {
            slices,
            slice_bytes: geometry.slice_bytes() as u64,
            hidden: geometry.hidden as u32,
            tokens: self.tokens,
            devices: self.devices,
            x_on_device: self.devices > 0,
        };
        let slice_bytes = shape.slice_bytes * u64::from(slices);
        let bytes = loads.len() as u64 * slice_bytes;
        let in_hbm = loads.iter().filter(|load| load.resident.start == 0).count() as u64;
        let host_bytes = bytes - in_hbm * slice_bytes;
        Ok(Estimate {
            active: loads.len(),
            most_rows: rows.iter().copied().max().unwrap_or(0),
            resident_experts,
            bytes,
            host_bytes,
            floor_s: rates.byte_floor_s(host_bytes, self.devices),
            bank_bytes: geometry.bank_bytes() as u64,
            hbm_bytes: match self.devices {
                0 => 0,
                _ => resident_experts as u64 * expert_bytes + self.ring_bytes,
            },
            scratch_bytes: self.scratch_bytes(top_k),
            policies: self.policies(rates, &loads, &shape),
        })
    }

    /// x and sums of tokens; x, h and y of rows: what grows with tokens times top_k.
    fn scratch_bytes(&self, top_k: usize) -> u64 {
        let geometry = &self.geometry;
        let (hidden, intermediate) = (
            geometry.hidden_padded() as u64,
            geometry.intermediate_padded() as u64,
        );
        let tokens = u64::from(self.tokens);
        let rows = tokens * top_k as u64;
        let element = geometry.format.activation_bytes() as u64;
        tokens * hidden * (2 + 4) + rows * (hidden * (element + 4) + intermediate * (element + 4))
    }

    fn policies(
        &self,
        rates: &Rates,
        loads: &[ExpertLoad],
        shape: &LayerShape,
    ) -> Vec<PolicyEstimate> {
        let costs = rates.costs(shape);
        let estimate = |kind: PolicyKind, method, division: Division| {
            let work = Work::of(&division, loads);
            let bytes = |slices: f64| slices as u64 * shape.slice_bytes;
            PolicyEstimate {
                policy: kind.to_string(),
                method,
                prediction: costs.predict(&work),
                cpu_bytes: bytes(work.cpu.slices),
                streamed_bytes: bytes(work.streamed.slices),
                resident_bytes: bytes(work.resident.slices),
                summary: division.summary(),
                division,
            }
        };
        let mut policies = Vec::new();
        let fixed = [
            (PolicyKind::CpuOnly, FixedPolicy::CpuOnly),
            (PolicyKind::GpuOnly, FixedPolicy::GpuOnly),
            (
                PolicyKind::Static {
                    m_cpu: STATIC_M_CPU,
                },
                FixedPolicy::Static(STATIC_M_CPU),
            ),
        ];
        for (kind, mut policy) in fixed {
            if self.devices > 0 || kind == PolicyKind::CpuOnly {
                policies.push(estimate(kind, None, policy.divide(loads, shape)));
            }
        }
        if self.devices > 0 {
            let plan = best(loads, shape, &costs);
            let adaptive = estimate(PolicyKind::Adaptive, Some(plan.method), plan.division);
            policies.push(adaptive);
        }
        policies
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::Layer;
    use super::*;

    fn question() -> Question {
        Question {
            geometry: Layer::new(128, 2048, 768, 8).geometry,
            top_k: 8,
            tokens: 1,
            devices: 1,
            hbm_budget_bytes: 0,
            ring_bytes: 64 << 20,
            zipf: 0.0,
        }
    }

    #[test]
    fn one_token_takes_eight_experts_bytes_and_no_less_than_the_floor() {
        let question = question();
        let estimate = question.answer(&Rates::default()).unwrap();
        let slice = question.geometry.slice_bytes() as u64;
        assert_eq!((estimate.active, estimate.bytes), (8, 8 * 6 * slice));
        assert_eq!(estimate.policies.len(), 4);
        for policy in &estimate.policies {
            let bytes = policy.cpu_bytes + policy.streamed_bytes + policy.resident_bytes;
            assert_eq!(bytes, estimate.bytes, "{}", policy.policy);
            assert!(policy.prediction.total_s > estimate.floor_s);
        }
        let of = |i: usize| estimate.policies[i].prediction.total_s;
        assert!((0..3).all(|other| of(3) <= of(other) * 1.006));
        assert_eq!(estimate.hbm_bytes, 64 << 20);
    }

    #[test]
    fn without_a_gpu_there_is_the_cpu() {
        let question = Question {
            devices: 0,
            hbm_budget_bytes: 1 << 40,
            ..question()
        };
        let estimate = question.answer(&Rates::default()).unwrap();
        assert_eq!(estimate.policies.len(), 1);
        assert_eq!((estimate.hbm_bytes, estimate.resident_experts), (0, 0));
    }

    /// A quarter of the experts in HBM under Zipf's law take most of one token's bytes off the link.
    #[test]
    fn resident_experts_shorten_a_skewed_decode() {
        let plain = Question {
            zipf: 1.1,
            ..question()
        };
        let cached = Question {
            hbm_budget_bytes: plain.geometry.bank_bytes() as u64 / 4,
            ..plain
        };
        let [plain, cached] = [plain, cached].map(|q| q.answer(&Rates::default()).unwrap());
        assert_eq!(cached.resident_experts, 32);
        assert!(cached.host_bytes < plain.host_bytes);
        let adaptive = |e: &Estimate| e.policies[3].prediction.total_s;
        assert!(adaptive(&cached) < adaptive(&plain) / 1.4);
    }

    #[test]
    fn scratch_grows_with_tokens_times_top_k() {
        let many = Question {
            tokens: 4096,
            ..question()
        };
        let [one, many] = [question(), many].map(|q| q.answer(&Rates::default()).unwrap());
        assert_eq!(many.scratch_bytes, 4096 * one.scratch_bytes);
        assert!(many.scratch_bytes < 1 << 30);
    }
}
