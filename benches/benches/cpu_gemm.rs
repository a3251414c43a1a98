//! The CPU kernels against this machine's ceilings, as `asym-gemm bench cpu` runs them.
//!
//! `--quick` takes less than a minute; `--csv FILE` and `--plot FOLDER` write records and plots.

use asym_gemm::bench::cpu::{self, Plan, Report};
use asym_gemm_cpu::Engine;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)
    };
    let plan = if arguments.iter().any(|argument| argument == "--quick") {
        Plan::quick()
    } else {
        Plan::full()
    };
    let engine = Engine::detect()?;
    let report = cpu::run(&plan, &engine, &mut |_| ())?;
    println!("{}\n", report.heading());
    println!("| {} |", Report::TABLE_HEADERS.join(" | "));
    println!("|{}", "---|".repeat(Report::TABLE_HEADERS.len()));
    for row in report.table_rows() {
        println!("| {} |", row.join(" | "));
    }
    println!("\n{}", report.remarks());
    if let Some(path) = value("--csv") {
        std::fs::write(path, report.csv())?;
    }
    if let Some(folder) = value("--plot") {
        cpu::plot(&report, folder.as_ref())?;
    }
    match report.wrong.len() {
        0 => Ok(()),
        count => Err(format!("{count} cases computed something wrong").into()),
    }
}
