//! `asym-gemm moe`: one MoE layer of a checkpoint.

use super::check::Comparison;
use super::table::table;
use super::{BackendArgument, Failure, FormatArgument, Outcome, TransferArgument, load};
use asym_gemm::checkpoint::{TensorData, TensorSpec, write};
use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::{Backend, ForwardReport};
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct MoeArguments {
    /// Folder of the checkpoint: config.json and safetensors.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Number of the layer.
    #[arg(long, value_name = "N")]
    layer: usize,
    /// Input [tokens, hidden]: a safetensors file, and the tensor if it holds several.
    #[arg(long, value_name = "FILE[:TENSOR]")]
    input: String,
    /// Output to compare with; a difference beyond the format's bound is exit status 1.
    #[arg(long, value_name = "FILE[:TENSOR]")]
    expect: Option<String>,
    /// Where to write the output, as tensor `output` of a safetensors file.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Format that the experts are computed in (default: as stored, or bf16).
    #[arg(long, value_enum)]
    format: Option<FormatArgument>,
    /// Folder of int8 experts, as `convert` writes them, to take the place of the checkpoint's.
    #[arg(long, value_name = "DIR")]
    experts: Option<PathBuf>,
    /// Take NVFP4 blocks whose scale is NaN and whose codes are all zero for zeros.
    #[arg(long)]
    zero_nan_blocks: bool,
    /// Who computes the experts.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendArgument,
    /// How weights reach the GPU.
    #[arg(long, value_enum, default_value = "auto")]
    transfer: TransferArgument,
    /// GPU memory for the ring of staged transfer (default: 256 MiB, or three experts).
    #[arg(long, value_name = "MIB")]
    ring_mib: Option<usize>,
}

/// What the command reports.
#[derive(Debug, serde::Serialize)]
struct Report {
    model_type: String,
    layer: usize,
    tokens: usize,
    format: &'static str,
    #[serde(flatten)]
    forward: ForwardReport,
    comparison: Option<Comparison>,
    output: Option<String>,
}

pub(super) fn run(
    arguments: &MoeArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    if let Some(path) = &arguments.output {
        check_output(path, arguments)?;
    }
    let mut layer = load::layer(&arguments.model, arguments.layer, arguments.zero_nan_blocks)?;
    if let Some(folder) = &arguments.experts {
        layer = layer.with_int8_experts(folder)?;
    }
    let stored = layer.stored_format();
    let format = match arguments.format {
        Some(format) => format.into(),
        None => stored.unwrap_or(WeightFormat::Bf16),
    };
    let backend = match arguments.backend {
        BackendArgument::Cpu => Backend::Cpu,
        BackendArgument::Gpu => Backend::Gpu,
        BackendArgument::Both => Backend::Both,
        BackendArgument::Auto => match load::gpu_reason() {
            None if Backend::Both.supports(format) => Backend::Both,
            _ => Backend::Cpu,
        },
    };
    let hidden = layer.spec.hidden;
    let x = tokens("--input", &arguments.input, hidden)?;
    let expected = match &arguments.expect {
        None => None,
        Some(spec) => {
            let expected = tokens("--expect", spec, hidden)?;
            if expected.len() != x.len() {
                return Err(format!(
                    "--expect {spec} has {} tokens, --input has {}",
                    expected.len() / hidden,
                    x.len() / hidden
                )
                .into());
            }
            Some(expected)
        }
    };
    let ring_bytes = arguments.ring_mib.map(|mib| mib.saturating_mul(1 << 20));
    let mut block = load::block(&layer, format, &[backend], arguments.transfer, ring_bytes)?;
    let (out, forward) = block.forward(&x, backend)?;
    if let Some(path) = &arguments.output {
        write(
            path,
            &[TensorData::f32("output", &[x.len() / hidden, hidden], &out)],
        )?;
    }
    let report = Report {
        model_type: layer.spec.model_type.to_string(),
        layer: layer.spec.layer,
        tokens: x.len() / hidden,
        format: format.name(),
        forward,
        comparison: expected.map(|expected| {
            Comparison::new(&out, &expected, hidden, format, stored == Some(format))
        }),
        output: arguments
            .output
            .as_ref()
            .map(|path| path.display().to_string()),
    };
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(text, &report)?;
    }
    Ok(match &report.comparison {
        Some(comparison) if !comparison.passed => Outcome::Failed,
        _ => Outcome::Passed,
    })
}

/// Refuses, before anything is computed, an output that cannot be written or that would take
/// the place of what is read: a part of the checkpoint, the input, the expectation, or
/// something that is no file.
fn check_output(path: &Path, arguments: &MoeArguments) -> Result<(), Failure> {
    let refuse = |reason: &str| Err(format!("--output {}: {reason}", path.display()).into());
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let Ok(folder) = folder.canonicalize() else {
        return refuse("its folder is not there");
    };
    match path.symlink_metadata() {
        Ok(about) if about.is_symlink() => return refuse("a link; name the file itself"),
        Ok(about) if !about.is_file() => return refuse("there, but not a regular file"),
        Ok(_) => {}
        Err(_) => return Ok(()),
    }
    let target = folder.join(path.file_name().unwrap_or_default());
    if arguments
        .model
        .canonicalize()
        .is_ok_and(|model| model == folder)
    {
        return refuse("a file of the checkpoint's folder, which stays as it is");
    }
    let read = [Some(&arguments.input), arguments.expect.as_ref()];
    for spec in read.into_iter().flatten() {
        let read = TensorSpec::parse(spec).path.canonicalize();
        if read.is_ok_and(|read| read == target) {
            return refuse("also read by this command");
        }
    }
    Ok(())
}

/// Values of a [tokens, hidden] tensor.
fn tokens(argument: &str, text: &str, hidden: usize) -> Result<Vec<f32>, Failure> {
    let (file, name) = TensorSpec::parse(text).open()?;
    let shape = &file.info(&name)?.shape;
    // Leading dimensions (batch, sequence) are tokens.
    if shape.len() < 2 || shape.last() != Some(&hidden) {
        return Err(format!(
            "{argument} {text}: tensor {name} has shape {shape:?}, needed is [tokens, {hidden}]"
        )
        .into());
    }
    Ok(file.read_f32(&name)?)
}

fn print(text: &mut String, report: &Report) -> fmt::Result {
    let f = &report.forward;
    writeln!(
        text,
        "{} layer {}, {} tokens, {} on {} ({} experts on the CPU, {} on the GPU)",
        report.model_type,
        report.layer,
        report.tokens,
        report.format,
        f.backend,
        f.cpu_experts,
        f.gpu_experts
    )?;
    writeln!(text, "kernels: {}", f.kernels.join(", "))?;
    writeln!(
        text,
        "time: {:.3} ms, {:.1} MB of weights",
        f.seconds * 1e3,
        f.weight_bytes as f64 / 1e6
    )?;
    if let Some(path) = &report.output {
        writeln!(text, "output: {path}")?;
    }
    if let Some(c) = &report.comparison {
        let row = |name: &str, error: f64, limit: f64| {
            vec![
                name.to_owned(),
                format!("{error:.5}"),
                format!("{limit:.3}"),
            ]
        };
        let rows = [
            row(
                "element, of |expected| + row RMS",
                c.element_error,
                c.element_limit,
            ),
            row("Frobenius", c.frobenius_error, c.frobenius_limit),
        ];
        writeln!(text, "{}", table(&["error", "found", "allowed"], 1, &rows))?;
        writeln!(
            text,
            "{} (worst at token {}, column {})",
            if c.passed { "PASS" } else { "FAIL" },
            c.worst_row,
            c.worst_column
        )?;
    }
    Ok(())
}
