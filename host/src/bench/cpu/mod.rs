//! The CPU kernels against this machine's ceilings.
//!
//! [`run`] takes a [`Plan`], which is data: blocks of weights and the numbers of rows or tokens to run
//! on them. For each block it measures how fast the workers read main memory and multiply
//! registers ([`Ceilings`]), then verifies and times each size. Weights are rotated through a
//! buffer far larger than the caches, so each call finds its own in main memory.

mod case;
mod ceilings;
mod data;
mod gemm;
mod layer;
mod plan;
mod plot;
mod report;

pub use case::{Block, Case, GemmShape, LayerShape, Shape};
pub use ceilings::{Ceilings, ProductRate};
pub use plan::Plan;
pub use plot::{PlotError, plot};
pub use report::{CSV_COLUMNS, Report, Row, Skipped};

use std::time::{Duration, Instant};

use asym_gemm_cpu::probe::median;
use asym_gemm_cpu::{CpuError, Engine, HugeBuffer};
use asym_gemm_formats::WeightFormat;

use super::Machine;
use crate::system::{Memory, MemoryShort};

/// What ends a benchmark early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A kernel or the workers refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// There is not even memory for the smallest block of the plan.
    #[error(transparent)]
    Memory(#[from] MemoryShort),
    /// A GEMM in a format that only expert banks have.
    #[error("{0} is a format of expert banks: measure a layer in it, not a GEMM")]
    NoGemm(WeightFormat),
}

/// What [`run`] is doing, for a progress bar.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Sizes done, verified and timed or skipped.
    pub done: usize,
    /// Sizes of the plan.
    pub total: usize,
    /// What comes now.
    pub now: String,
}

/// One block's weights and inputs, ready to be called.
trait Workload {
    /// Calls the kernel for `size` rows or tokens; `call` counts them, and chooses the weights.
    fn call(&mut self, engine: &Engine, size: usize, call: usize) -> Result<(), CpuError>;

    /// Compares the outcome of that call with a reference in f64.
    fn verify(&self, size: usize, call: usize) -> Result<(), String>;

    /// Bytes of the weights that the call reads, each once.
    fn weight_bytes(&self, size: usize, call: usize) -> usize;
}

/// Runs the plan. `progress` is told what comes next.
///
/// # Errors
/// [`BenchError`]. A case that computes something wrong, or for which there is no memory or
/// time, is no error: the report names it.
pub fn run(
    plan: &Plan,
    engine: &Engine,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report, BenchError> {
    let start = Instant::now();
    let workers = engine.workers().as_ref();
    let mut weights = HugeBuffer::zeroed(workers, plan.weight_memory()?)?;
    let ceilings = Ceilings::of_everything(workers, &weights, plan)?;
    let mut report = Report::new(
        Machine::read(workers.threads()),
        engine.isa().name(),
        ceilings,
    );
    let mut done = 0;
    for block in &plan.blocks {
        let mut tell = |done, now: String| {
            progress(&Progress {
                done,
                total: plan.sizes(),
                now,
            });
        };
        tell(done, format!("{block}: weights"));
        let late = plan.limit.is_some_and(|limit| start.elapsed() >= limit);
        let reason = match room(block, weights.len()) {
            _ if late => Err("no time left".to_owned()),
            room => room,
        };
        if let Err(reason) = reason {
            report.skip(block, &block.sizes, &reason);
            done += block.sizes.len();
            continue;
        }
        let ceilings = Ceilings::of_format(engine, &weights, block.format, plan)?;
        let mut workload = data::workload(block, workers, &mut weights)?;
        for &size in &block.sizes {
            let case = block.case(size);
            tell(done, case.to_string());
            done += 1;
            let left = plan
                .limit
                .map(|limit| limit.saturating_sub(start.elapsed()));
            match time(plan, engine, workload.as_mut(), size, left)? {
                Timed::Wrong(what) => report.wrong(case, what),
                Timed::Skipped => report.skip(block, &[size], "no time left"),
                Timed::Times { seconds, bytes } => {
                    report
                        .rows
                        .push(Row::new(case, engine, &ceilings, &seconds, bytes));
                }
            }
        }
    }
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// Whether a block's weights and a reasonable part of its activations fit.
fn room(block: &Block, weights: usize) -> Result<(), String> {
    let needed = block.weight_bytes();
    if needed > weights {
        return Err(format!(
            "its weights are {needed} bytes, there is room for {weights}"
        ));
    }
    let usable = Memory::read().usable_bytes();
    let activations = block.activation_bytes();
    match usable {
        Some(usable) if usable < activations as u64 => Err(format!(
            "its activations are {activations} bytes, {usable} are available"
        )),
        _ => Ok(()),
    }
}

enum Timed {
    /// The check failed.
    Wrong(String),
    /// There is not enough time.
    Skipped,
    /// Seconds of each call; bytes of weights of the mean call.
    Times { seconds: Vec<f64>, bytes: f64 },
}

/// Verifies, then times.
fn time(
    plan: &Plan,
    engine: &Engine,
    workload: &mut dyn Workload,
    size: usize,
    left: Option<Duration>,
) -> Result<Timed, BenchError> {
    if left.is_some_and(|left| left.is_zero()) {
        return Ok(Timed::Skipped);
    }
    let start = Instant::now();
    workload.call(engine, size, 0)?;
    let first = start.elapsed();
    if let Err(what) = workload.verify(size, 0) {
        return Ok(Timed::Wrong(what));
    }
    if left.is_some_and(|left| left < first * plan.calls.start as u32) {
        return Ok(Timed::Skipped);
    }
    let budget = left.map_or(plan.case_time, |left| plan.case_time.min(left));
    let (mut seconds, mut bytes) = (Vec::new(), 0.0);
    let start = Instant::now();
    for call in 1..=plan.calls.end {
        if seconds.len() >= plan.calls.start && start.elapsed() > budget {
            break;
        }
        let start = Instant::now();
        workload.call(engine, size, call)?;
        seconds.push(start.elapsed().as_secs_f64());
        bytes += workload.weight_bytes(size, call) as f64;
    }
    let bytes = bytes / seconds.len().max(1) as f64;
    Ok(Timed::Times { seconds, bytes })
}

/// Median, or 0 of nothing.
fn middle(values: &[f64]) -> f64 {
    median(values.iter().copied()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests;
