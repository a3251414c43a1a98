//! A MoE layer under each policy, against what its weights' bytes take.
//!
//! [`run`] takes a [`Plan`], which is data. For each shape and format it packs a bank, measures how
//! fast the CPU reads it, the link copies it and both at once ([`Limits`]), and runs each number of
//! tokens under each policy: the first output is compared with f64, then calls are timed. With GPUs
//! x and the output are on the first of them; without, the CPU policy is all there is.

mod data;
mod limits;
mod plot;
mod report;
#[cfg(test)]
mod tests;

pub use limits::Limits;
pub use plot::plot;
pub use report::{CSV_COLUMNS, Report, Row};

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use asym_gemm_cpu::{CpuError, Engine};
use asym_gemm_formats::WeightFormat;

use self::data::{Block, Tokens};
use super::Machine;
use super::cpu::{LayerShape, Progress};
use crate::dispatch::{Adaptive, DispatchError, Model, SharedModel};
#[cfg(feature = "cuda")]
use crate::driver::{DriverError, Gpu};
use crate::moe::division::{PolicyKind, STATIC_M_CPU};
use crate::moe::{LayerReport, MoeError, MoeLayer};
use crate::system::Memory;

/// What ends the benchmark early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerBenchError {
    /// A layer failed.
    #[error(transparent)]
    Moe(#[from] MoeError),
    /// A CPU kernel or the workers refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A measured rate makes no sense.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The driver failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// What to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Layers.
    pub shapes: Vec<LayerShape>,
    /// Formats of the weights.
    pub formats: Vec<WeightFormat>,
    /// Tokens of a forward; none is 0.
    pub tokens: Vec<usize>,
    /// Policies, of which without a GPU only the CPU's is run.
    pub policies: Vec<PolicyKind>,
    /// Share of the experts that fits into HBM, 0 to 1.
    pub resident: f64,
    /// Popularity of experts by Zipf's law with this exponent; 0 for all alike.
    pub zipf: f64,
    /// Time for the calls of one case.
    pub case_time: Duration,
    /// Fewest and most timed calls of a case.
    pub calls: Range<usize>,
    /// Calls of the adaptive policy before it is timed.
    pub learning: usize,
}

const NARROW: LayerShape = LayerShape {
    experts: 128,
    hidden: 2048,
    intermediate: 768,
    top_k: 8,
};
const WIDE: LayerShape = LayerShape {
    experts: 64,
    hidden: 4096,
    intermediate: 1536,
    top_k: 8,
};

impl Plan {
    /// Two shapes in int8 and bf16.
    pub fn full() -> Self {
        Self {
            shapes: vec![NARROW, WIDE],
            formats: vec![WeightFormat::Int8PerRow, WeightFormat::Bf16],
            tokens: vec![1, 8, 64, 512, 4096],
            policies: vec![
                PolicyKind::CpuOnly,
                PolicyKind::GpuOnly,
                PolicyKind::Static {
                    m_cpu: STATIC_M_CPU,
                },
                PolicyKind::Adaptive,
            ],
            resident: 0.0,
            zipf: 0.0,
            case_time: Duration::from_millis(600),
            calls: 7..200,
            learning: 12,
        }
    }

    /// The narrower shape in int8.
    pub fn quick() -> Self {
        Self {
            shapes: vec![NARROW],
            formats: vec![WeightFormat::Int8PerRow],
            case_time: Duration::from_millis(200),
            calls: 5..100,
            ..Self::full()
        }
    }

    fn policies(&self, gpus: usize) -> Vec<PolicyKind> {
        let all = self.policies.iter().copied();
        all.filter(|&kind| gpus > 0 || kind == PolicyKind::CpuOnly)
            .collect()
    }

    fn cases(&self, gpus: usize) -> usize {
        let blocks = self.shapes.len() * self.formats.len();
        blocks * self.tokens.len() * self.policies(gpus).len()
    }
}

/// What the layers run on.
#[derive(Clone)]
pub struct Setup {
    /// The CPU's kernels and workers.
    pub engine: Engine,
    /// The GPUs; none for the CPU alone.
    #[cfg(feature = "cuda")]
    pub gpus: Vec<Gpu>,
}

impl Setup {
    fn gpus(&self) -> usize {
        #[cfg(feature = "cuda")]
        {
            self.gpus.len()
        }
        #[cfg(not(feature = "cuda"))]
        0
    }

    fn gpu_name(&self) -> String {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.gpus.first() {
            return match self.gpus.len() {
                1 => gpu.name().to_owned(),
                count => format!("{count} x {}", gpu.name()),
            };
        }
        "no GPU".into()
    }
}

/// Runs the plan. `progress` is told what comes next.
///
/// # Errors
/// [`LayerBenchError`]. A case that computes something wrong, or for which there is no memory, is
/// no error: the report names it.
pub fn run(
    plan: &Plan,
    setup: &Setup,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report, LayerBenchError> {
    let start = Instant::now();
    let threads = setup.engine.workers().threads();
    let mut report = Report::new(
        Machine::read(threads),
        setup.engine.isa().name(),
        setup.gpu_name(),
    );
    let total = plan.cases(setup.gpus());
    let policies = plan.policies(setup.gpus());
    let mut done = 0;
    for &shape in &plan.shapes {
        for &format in &plan.formats {
            let of_block = plan.tokens.len() * policies.len();
            let mut tell = |done: usize, now: String| progress(&Progress { done, total, now });
            let name = format!("E={} H={} {format}", shape.experts, shape.hidden);
            tell(done, format!("{name}: weights"));
            if let Some(reason) = no_room(shape, format) {
                report.skip(&name, reason);
                done += of_block;
                continue;
            }
            let block = match Block::new(shape, format, plan, setup) {
                Ok(block) => block,
                Err(LayerBenchError::Moe(error)) => {
                    report.skip(&name, error.to_string());
                    done += of_block;
                    continue;
                }
                Err(error) => return Err(error),
            };
            tell(done, format!("{name}: limits"));
            let limits = Limits::measure(setup, &block.bank)?;
            report.limits.push(limits);
            let model = Model::new(limits.rates(format, setup.gpus()))?.shared();
            for &tokens in &plan.tokens {
                let mut inputs = Tokens::new(&block, tokens, plan.zipf, setup)?;
                for &kind in &policies {
                    tell(done, format!("{name} T={tokens} {kind}"));
                    done += 1;
                    let case = Case {
                        block: &block,
                        tokens,
                        kind,
                        limits: &limits,
                    };
                    match case.time(plan, &model, &mut inputs)? {
                        Ok(row) => report.rows.push(row),
                        Err(what) => report.wrong(&format!("{name} T={tokens} {kind}"), what),
                    }
                }
            }
        }
    }
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// Why a bank does not fit, or `None` if it does.
fn no_room(shape: LayerShape, format: WeightFormat) -> Option<String> {
    let needed = shape.geometry(format).bank_bytes() as u64;
    let usable = Memory::read().usable_bytes()?;
    (usable < needed + needed / 8)
        .then(|| format!("its weights are {needed} bytes, {usable} are available"))
}

/// One policy at one number of tokens.
struct Case<'a> {
    block: &'a Block,
    tokens: usize,
    kind: PolicyKind,
    limits: &'a Limits,
}

impl Case<'_> {
    /// Verifies, then times; what is wrong has no time.
    fn time(
        &self,
        plan: &Plan,
        model: &SharedModel,
        inputs: &mut Tokens,
    ) -> Result<Result<Row, String>, LayerBenchError> {
        let layer: &MoeLayer = &self.block.layer;
        let warm_up = match self.kind.fixed() {
            Some(fixed) => {
                layer.set_policy(fixed);
                2
            }
            None => {
                layer.set_policy(Adaptive::new(Arc::clone(model)));
                plan.learning
            }
        };
        inputs.poison()?;
        inputs.call(layer, 0)?;
        if let Err(what) = inputs.verify(self.block, 0) {
            return Ok(Err(what));
        }
        for call in 1..=warm_up {
            inputs.call(layer, call)?;
        }
        let mut timed = Vec::new();
        let start = Instant::now();
        for call in 0..plan.calls.end {
            if timed.len() >= plan.calls.start && start.elapsed() > plan.case_time {
                break;
            }
            let start = Instant::now();
            let report = inputs.call(layer, warm_up + 1 + call)?;
            timed.push((start.elapsed().as_secs_f64(), report));
        }
        Ok(Ok(self.row(timed)))
    }

    fn row(&self, mut timed: Vec<(f64, LayerReport)>) -> Row {
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = timed.len().max(1) as f64;
        let mean = |bytes: fn(&LayerReport) -> u64| {
            timed.iter().map(|(_, r)| bytes(r) as f64).sum::<f64>() / count
        };
        let bytes = [
            mean(|r| r.cpu_bytes),
            mean(|r| r.streamed_bytes),
            mean(|r| r.resident_bytes),
        ];
        let (best, median) = match (timed.first(), timed.get(timed.len() / 2)) {
            (Some(best), Some(median)) => (best.0, median),
            _ => (0.0, &(0.0, LayerReport::default())),
        };
        let shape = self.block.shape;
        Row {
            experts: shape.experts,
            hidden: shape.hidden,
            intermediate: shape.intermediate,
            top_k: shape.top_k,
            format: self.block.geometry.format.name(),
            tokens: self.tokens,
            policy: self.kind,
            calls: timed.len(),
            median_ms: median.0 * 1e3,
            best_ms: best * 1e3,
            floor_ms: self.limits.floor_s(bytes[0] + bytes[1]) * 1e3,
            cpu_mb: bytes[0] * 1e-6,
            link_mb: bytes[1] * 1e-6,
            hbm_mb: bytes[2] * 1e-6,
            cpu_ms: median.1.cpu_seconds * 1e3,
            limits: *self.limits,
        }
    }
}
