//! `asym-gemm bench layer`: a MoE layer under each policy against the byte floor.

use super::bench_cpu::{check, under_bar};
use super::{Failure, FormatArgument, Outcome, table};
use asym_gemm::bench::layer::{self, Plan, Report, Setup};
use asym_gemm::cpu::Engine;
use asym_gemm::cpu::pool::SpinPool;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(super) struct BenchLayerArguments {
    /// One shape in int8 only.
    #[arg(long)]
    quick: bool,
    /// Formats of the experts instead of the plan's.
    #[arg(long, value_enum, value_delimiter = ',')]
    format: Vec<FormatArgument>,
    /// Tokens of a forward instead of the plan's.
    #[arg(long, value_name = "T", value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: Vec<u32>,
    /// Share of the experts that fits into GPU memory, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=100))]
    resident: u32,
    /// Popularity of experts by Zipf's law with this exponent; 0 for all alike.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    zipf: f64,
    /// GPUs; 0 for the CPU alone (default: the first, if it can be used).
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Time for the calls of one case, in milliseconds, 1 to 60000.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    case_ms: Option<u64>,
    /// Write the cases as comma-separated values, with machine and commit.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the time against the tokens, one SVG file for each shape and format.
    #[arg(long, value_name = "FOLDER")]
    plot: Option<PathBuf>,
}

pub(super) fn run(
    arguments: &BenchLayerArguments,
    threads: Option<NonZeroUsize>,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let mut plan = if arguments.quick {
        Plan::quick()
    } else {
        Plan::full()
    };
    if !arguments.format.is_empty() {
        plan.formats = arguments.format.iter().map(|&f| f.into()).collect();
    }
    if !arguments.tokens.is_empty() {
        plan.tokens = arguments.tokens.iter().map(|&t| t as usize).collect();
    }
    if !(0.0..=10.0).contains(&arguments.zipf) {
        return Err(format!("--zipf {}: expected 0 to 10", arguments.zipf).into());
    }
    plan.zipf = arguments.zipf;
    plan.resident = f64::from(arguments.resident) / 100.0;
    if let Some(ms) = arguments.case_ms {
        plan.case_time = Duration::from_millis(ms);
    }
    if let Some(path) = &arguments.csv {
        check(path)?;
    }
    let mut engine = Engine::detect()?;
    if let Some(threads) = threads {
        engine = engine.with_workers(Arc::new(SpinPool::new(threads.get())?));
    }
    let setup = set_up(engine, arguments.gpus)?;
    let report = under_bar(|progress| layer::run(&plan, &setup, progress))??;
    if let Some(path) = &arguments.csv {
        std::fs::write(path, report.csv())
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Some(folder) = &arguments.plot {
        layer::plot(&report, folder)?;
    }
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        let rows = table::table(&Report::TABLE_HEADERS, 2, &report.table_rows());
        let (heading, remarks) = (report.heading(), report.remarks());
        writeln!(text, "{heading}\n\n{rows}\n{}", remarks.trim_end())?;
    }
    Ok(if report.wrong.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed
    })
}

/// The GPUs asked for; without a wish the first one, if there is one with kernels.
#[cfg(feature = "cuda")]
fn set_up(engine: Engine, gpus: Option<usize>) -> Result<Setup, Failure> {
    use asym_gemm::driver::Gpu;
    let count = gpus.unwrap_or_else(|| usize::from(super::load::gpu_reason().is_none()));
    let gpus = (0..count).map(Gpu::open).collect::<Result<_, _>>()?;
    Ok(Setup { engine, gpus })
}

#[cfg(not(feature = "cuda"))]
fn set_up(engine: Engine, gpus: Option<usize>) -> Result<Setup, Failure> {
    match gpus {
        None | Some(0) => Ok(Setup { engine }),
        Some(_) => Err("this program was built without the cuda feature".into()),
    }
}
