//! `asym-gemm bench cpu`: the CPU kernels against this machine's ceilings.

use super::{Failure, Outcome, table};
use asym_gemm::bench::cpu::{self, Plan, Progress, Report};
use asym_gemm::cpu::Engine;
use asym_gemm::cpu::pool::SpinPool;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, clap::Args)]
pub(super) struct BenchCpuArguments {
    /// The most telling cases only, in less than a minute.
    #[arg(long)]
    quick: bool,
    /// Write the cases as comma-separated values, with machine and commit.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the share of the ceiling against rows or tokens, one SVG file for each shape.
    #[arg(long, value_name = "FOLDER")]
    plot: Option<PathBuf>,
}

pub(super) fn run(
    arguments: &BenchCpuArguments,
    threads: Option<NonZeroUsize>,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let plan = if arguments.quick {
        Plan::quick()
    } else {
        Plan::full()
    };
    // Now, not after a minute of work.
    let mut csv = arguments.csv.as_ref().map(create).transpose()?;
    let mut engine = Engine::detect()?;
    if let Some(threads) = threads {
        engine = engine.with_workers(Arc::new(SpinPool::new(threads.get())?));
    }
    let report = with_progress(&plan, &engine)?;
    if let Some(file) = &mut csv {
        file.write_all(report.csv().as_bytes())
            .map_err(|error| format!("the csv file: {error}"))?;
    }
    if let Some(folder) = &arguments.plot {
        cpu::plot(&report, folder)?;
    }
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        let rows = table::table(&Report::TABLE_HEADERS, 1, &report.table_rows());
        writeln!(
            text,
            "{}\n\n{rows}\n{}",
            report.heading(),
            report.remarks().trim_end()
        )?;
    }
    Ok(if report.wrong.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed
    })
}

fn create(path: impl AsRef<Path>) -> Result<File, Failure> {
    let path = path.as_ref();
    File::create(path).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Runs the plan under a bar, which hides itself where standard error is no terminal.
fn with_progress(plan: &Plan, engine: &Engine) -> Result<Report, Failure> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")?;
    let bar = ProgressBar::new(0).with_style(style);
    let report = cpu::run(plan, engine, &mut |progress: &Progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.now.clone());
    });
    bar.finish_and_clear();
    Ok(report?)
}
