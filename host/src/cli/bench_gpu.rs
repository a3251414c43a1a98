//! `asym-gemm bench gpu`: the grouped GEMM on the GPU against link and memory.

use super::{Failure, Outcome};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(super) struct BenchGpuArguments {
    /// The most telling cases only.
    #[arg(long)]
    quick: bool,
    /// Write the cases as comma-separated values, with GPU and commit.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[cfg(feature = "cuda")]
pub(super) fn run(
    arguments: &BenchGpuArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    use super::{bench_cpu, table};
    use asym_gemm::bench::gpu::{self, Plan, Report};
    use asym_gemm::driver::Gpu;
    use std::fmt::Write;

    if let Some(path) = &arguments.csv {
        bench_cpu::check(path)?;
    }
    let plan = if arguments.quick {
        Plan::quick()
    } else {
        Plan::full()
    };
    let device = Gpu::open(0)?;
    let report = bench_cpu::under_bar(|progress| gpu::run(&plan, &device, progress))??;
    if let Some(path) = &arguments.csv {
        std::fs::write(path, report.csv())
            .map_err(|error| format!("{}: {error}", path.display()))?;
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

#[cfg(not(feature = "cuda"))]
pub(super) fn run(_: &BenchGpuArguments, _: bool, _: &mut String) -> Result<Outcome, Failure> {
    Err("this program was built without the cuda feature".into())
}
