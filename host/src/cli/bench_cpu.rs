//! `asym-gemm bench cpu`: the CPU kernels against this machine's ceilings.

use super::{Failure, Outcome, table};
use asym_gemm::bench::cpu::{self, Plan, Progress, Report};
use asym_gemm::cpu::Engine;
use asym_gemm::cpu::pool::SpinPool;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(super) struct BenchCpuArguments {
    /// The most telling cases only, in less than a minute.
    #[arg(long)]
    quick: bool,
    /// Time for the calls of one case, in milliseconds, 1 to 60000.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    case_ms: Option<u64>,
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
    let mut plan = if arguments.quick {
        Plan::quick()
    } else {
        Plan::full()
    };
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
    let report = under_bar(|progress| cpu::run(&plan, &engine, progress))??;
    if let Some(path) = &arguments.csv {
        std::fs::write(path, report.csv())
            .map_err(|error| format!("{}: {error}", path.display()))?;
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

/// Refuses what could not be written, before and not after a minute of work.
pub(super) fn check(path: &Path) -> Result<(), Failure> {
    let refuse = |reason| Err(format!("{}: {reason}", path.display()).into());
    // A file name alone has the empty path for its folder.
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    if folder.is_some_and(|folder| !folder.is_dir()) {
        return refuse("its folder is not there");
    }
    if path.is_dir() {
        return refuse("is a folder");
    }
    Ok(())
}

/// Runs a benchmark under a bar, which hides itself where standard error is no terminal.
pub(super) fn under_bar<T>(run: impl FnOnce(&mut dyn FnMut(&Progress)) -> T) -> Result<T, Failure> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}")?;
    let bar = ProgressBar::new(0).with_style(style);
    let result = run(&mut |progress: &Progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.now.clone());
    });
    bar.finish_and_clear();
    Ok(result)
}
