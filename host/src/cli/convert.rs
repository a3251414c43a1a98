//! `convert`: a checkpoint's experts in another format.

use super::table::table;
use super::{Failure, Outcome};
use asym_gemm::checkpoint::Checkpoint;
use asym_gemm::convert::{Options, Target, convert, source_bytes};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// `convert`.
#[derive(Debug, Args)]
pub(super) struct ConvertArguments {
    /// Folder of the checkpoint.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Format of the experts.
    #[arg(long, value_enum)]
    to: TargetArgument,
    /// Folder of the result, new or empty.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Layers of the model to convert, `a..b` without b (default: all MoE layers).
    #[arg(long, value_name = "A..B", value_parser = layers)]
    layers: Option<Range<usize>>,
    /// Go on in a folder that an interrupted conversion has left.
    #[arg(long)]
    resume: bool,
    /// Take NVFP4 blocks whose scale is NaN and whose codes are all zero for zeros.
    #[arg(long)]
    zero_nan_blocks: bool,
}

/// `--to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TargetArgument {
    /// int8 with a scale for each row, one file a layer.
    Int8,
    /// int8 with a scale for each row and 128 columns, one file a layer.
    Int8Block,
    /// fp8 with a scale for each 128 x 128, as a checkpoint.
    Fp8,
    /// NVFP4, as a checkpoint.
    Nvfp4,
    /// MXFP4, as a checkpoint.
    Mxfp4,
}

impl From<TargetArgument> for Target {
    fn from(argument: TargetArgument) -> Self {
        match argument {
            TargetArgument::Int8 => Self::Int8,
            TargetArgument::Int8Block => Self::Int8Block,
            TargetArgument::Fp8 => Self::Fp8,
            TargetArgument::Nvfp4 => Self::Nvfp4,
            TargetArgument::Mxfp4 => Self::Mxfp4,
        }
    }
}

/// Reads `a..b`, or `a` alone.
fn layers(text: &str) -> Result<Range<usize>, String> {
    let number = |text: &str| {
        let wrong = |_| format!("`{text}` is not a layer number; write A..B, such as 3..8");
        text.trim().parse::<usize>().map_err(wrong)
    };
    let range = match text.split_once("..") {
        Some((first, end)) => number(first)?..number(end)?,
        None => {
            let first = number(text)?;
            first..first.saturating_add(1)
        }
    };
    match range.is_empty() {
        true => Err(format!("{text} names no layer")),
        false => Ok(range),
    }
}

pub(super) fn run(
    arguments: &ConvertArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let mut checkpoint = Checkpoint::open(&arguments.model)?;
    if arguments.zero_nan_blocks {
        checkpoint = checkpoint.with_zero_nan_blocks();
    }
    let options = Options {
        layers: arguments.layers.clone(),
        resume: arguments.resume,
    };
    let bar = ProgressBar::new(source_bytes(&checkpoint, &options)?);
    let style = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    let target = arguments.to.into();
    let start = Instant::now();
    let done = convert(&checkpoint, target, &arguments.out, &options, |bytes| {
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let report = done?;
    let seconds = start.elapsed().as_secs_f64();
    let passed = report.passed();
    if json {
        let document = serde_json::json!({
            "target": target.name(),
            "report": report,
            "seconds": seconds,
            "passed": passed,
        });
        writeln!(text, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        let rows: Vec<_> = report
            .layers
            .iter()
            .map(|layer| {
                let mut row = vec![layer.layer.to_string()];
                match layer.check {
                    Some(check) => row.extend([
                        format!("{:.5}", check.max_error),
                        check.out_of_bound.to_string(),
                        check.source_nan.to_string(),
                        check.nan.to_string(),
                    ]),
                    None => row.extend(["done before", "", "", ""].map(String::from)),
                }
                row.push(
                    layer
                        .first_bad_expert
                        .map_or(String::new(), |e| e.to_string()),
                );
                row
            })
            .collect();
        let headers = [
            "layer",
            "max error / max",
            "beyond bound",
            "NaN in source",
            "NaN written",
            "first bad expert",
        ];
        writeln!(text, "{}", table(&headers, 0, &rows))?;
        let gigabytes = report.source_bytes as f64 / 1e9;
        writeln!(
            text,
            "{gigabytes:.2} GB of experts in {seconds:.1} s ({:.2} GB/s), each read back and compared",
            gigabytes / seconds
        )?;
        writeln!(text, "{}", if passed { "PASS" } else { "FAIL" })?;
    }
    Ok(match passed {
        true => Outcome::Passed,
        false => Outcome::Failed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_layers() {
        assert_eq!(layers("3..8"), Ok(3..8));
        assert_eq!(layers("3"), Ok(3..4));
        for wrong in ["", "..", "3..", "8..3", "3..3", "a..b", "-1..2"] {
            assert!(layers(wrong).is_err(), "{wrong}");
        }
    }
}
