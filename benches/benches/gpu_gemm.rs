//! Grouped GEMM on the GPU: staged, direct and resident weights against this machine's limits,
//! as `asym-gemm bench gpu` runs them.
//!
//! ```text
//! gpu_gemm [--shape G,N,K].. [--m M,..] [--format NAME,..] [--transfer NAME,..] [--csv FILE]
//! ```

use asym_gemm::bench::gpu::{self, FORMATS, Plan, Report, TRANSFERS};
use asym_gemm::driver::Gpu;

type Failure = Box<dyn std::error::Error>;

/// What to measure, and where to write it.
fn arguments() -> Result<(Plan, Option<String>), Failure> {
    let (mut plan, mut shapes, mut csv) = (Plan::full(), Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        // cargo bench passes this one.
        if name == "--bench" {
            continue;
        }
        let value = arguments.next().ok_or(format!("{name} needs a value"))?;
        let words: Vec<&str> = value.split(',').collect();
        match name.as_str() {
            "--shape" => {
                let shape = numbers(&words)?.try_into();
                shapes.push(shape.map_err(|_| format!("{value} is not G,N,K"))?);
            }
            "--m" => plan.rows = numbers(&words)?,
            "--format" => plan.formats = named(&FORMATS, &words)?,
            "--transfer" => plan.transfers = named(&TRANSFERS, &words)?,
            "--csv" => csv = Some(value),
            _ => return Err(format!("unknown argument {name}").into()),
        }
    }
    if !shapes.is_empty() {
        plan.shapes = shapes;
    }
    Ok((plan, csv))
}

/// Positive numbers.
fn numbers(words: &[&str]) -> Result<Vec<usize>, Failure> {
    let number = |word: &&str| Ok(word.parse::<std::num::NonZeroUsize>()?.get());
    words.iter().map(number).collect()
}

/// Those of `all` whose names are in `words`.
fn named<T: Copy + ToString>(all: &[T], words: &[&str]) -> Result<Vec<T>, Failure> {
    let find = |word: &&str| {
        let one = all.iter().find(|x| x.to_string() == **word);
        one.copied().ok_or_else(|| format!("unknown {word}").into())
    };
    words.iter().map(find).collect()
}

fn main() -> Result<(), Failure> {
    let (plan, csv) = arguments()?;
    let device = match Gpu::open(0) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let report = gpu::run(&plan, &device, &mut |_| ())?;
    println!("{}\n", report.heading());
    println!("| {} |", Report::TABLE_HEADERS.join(" | "));
    println!("|{}", "---|".repeat(Report::TABLE_HEADERS.len()));
    for row in report.table_rows() {
        println!("| {} |", row.join(" | "));
    }
    println!("\n{}", report.remarks());
    if let Some(path) = csv {
        std::fs::write(path, report.csv())?;
    }
    match report.wrong.len() {
        0 => Ok(()),
        count => Err(format!("{count} cases computed something wrong").into()),
    }
}
