//! `asym-gemm demo`: the main job with nothing given.

use super::check::Comparison;
use super::table::table;
use super::{Failure, Outcome, TransferArgument, load, present_backends};
use asym_gemm::checkpoint::{MoeLayer, TensorFile};
use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::{Backend, ForwardReport};
use asym_gemm::system::{Threads, dram_read_rate};
use std::fmt::{self, Write};
use std::path::PathBuf;

/// The built-in model: a tiny Qwen3-MoE layer in bf16 with its expected output.
const FILES: [(&str, &[u8]); 3] = [
    (
        "config.json",
        include_bytes!("../../../tests/fixtures/qwen3_moe_bf16/config.json"),
    ),
    (
        "model.safetensors",
        include_bytes!("../../../tests/fixtures/qwen3_moe_bf16/model.safetensors"),
    ),
    (
        "moe_io.safetensors",
        include_bytes!("../../../tests/fixtures/qwen3_moe_bf16/moe_io.safetensors"),
    ),
];
const LAYER: usize = 0;
/// Timed runs; the median counts.
const RUNS: usize = 9;
/// Buffer of the memory rate: larger than caches.
const RATE_BYTES: usize = 256 << 20;

#[derive(Debug, clap::Args)]
pub(super) struct DemoArguments {
    /// Another checkpoint with a `moe_io.safetensors` (`layerN.input`, `layerN.output`) beside it.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Layer of that checkpoint.
    #[arg(long, value_name = "N", default_value_t = LAYER, requires = "model")]
    layer: usize,
}

/// One line of the table.
#[derive(Debug, serde::Serialize)]
struct Line {
    format: &'static str,
    transfer: Option<&'static str>,
    #[serde(flatten)]
    forward: ForwardReport,
    weight_gb_per_second: f64,
    /// The memory or link rate that bounds this back end, GB/s.
    limit_gb_per_second: Option<f64>,
    comparison: Comparison,
}

pub(super) fn run(
    arguments: &DemoArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let unpacked = tempfile::tempdir()?;
    let folder = match &arguments.model {
        Some(folder) => folder.clone(),
        None => {
            for (name, bytes) in FILES {
                std::fs::write(unpacked.path().join(name), bytes)?;
            }
            unpacked.path().to_owned()
        }
    };
    let number = arguments.layer;
    let layer = load::layer(&folder, number, false)?;
    let io = TensorFile::open(folder.join("moe_io.safetensors"))?;
    let x = io.read_f32(&format!("layer{number}.input"))?;
    let expected = io.read_f32(&format!("layer{number}.output"))?;
    if x.len() != expected.len() {
        return Err(format!("input has {} values, output {}", x.len(), expected.len()).into());
    }
    let gpu_reason = load::gpu_reason();
    let limits = Limits::measure()?;
    let mut lines = Vec::new();
    for format in [
        WeightFormat::Bf16,
        WeightFormat::Int8PerRow,
        WeightFormat::Fp8Block128,
    ] {
        run_format(&layer, format, &x, &expected, &limits, &mut lines)?;
    }
    let passed = lines.iter().all(|line| line.comparison.passed);
    if json {
        let document = serde_json::json!({
            "model_type": layer.spec.model_type.to_string(),
            "tokens": x.len() / layer.spec.hidden,
            "runs": lines,
            "gpu_skipped": gpu_reason,
            "passed": passed,
        });
        writeln!(text, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        print(text, &layer, &x, &lines, gpu_reason.as_deref())?;
    }
    Ok(if passed {
        Outcome::Passed
    } else {
        Outcome::Failed
    })
}

/// Measured rates that bound the back ends, GB/s.
struct Limits {
    dram: Option<f64>,
    link: Option<f64>,
}

impl Limits {
    fn measure() -> Result<Self, Failure> {
        let dram = dram_read_rate(Threads::read().default_count(), RATE_BYTES);
        Ok(Self {
            dram,
            link: Self::link()?,
        })
    }

    #[cfg(feature = "cuda")]
    fn link() -> Result<Option<f64>, Failure> {
        if load::gpu_reason().is_some() {
            return Ok(None);
        }
        let gpu = asym_gemm::driver::Gpu::open(0)?;
        Ok(Some(
            asym_gemm::transfer::measure_link(&gpu, RATE_BYTES)?.copy_engine,
        ))
    }

    #[cfg(not(feature = "cuda"))]
    fn link() -> Result<Option<f64>, Failure> {
        Ok(None)
    }

    fn of(&self, backend: Backend) -> Option<f64> {
        match backend {
            Backend::Cpu => self.dram,
            Backend::Gpu => self.link,
            Backend::Both => Some(self.dram? + self.link?),
        }
    }
}

fn run_format(
    layer: &MoeLayer,
    format: WeightFormat,
    x: &[f32],
    expected: &[f32],
    limits: &Limits,
    lines: &mut Vec<Line>,
) -> Result<(), Failure> {
    let mut backends = present_backends();
    backends.retain(|backend| backend.supports(format));
    let transfers: &[(TransferArgument, &str)] = match backends.len() {
        1 => &[(TransferArgument::Auto, "")],
        _ => &[
            (TransferArgument::Staged, "staged"),
            (TransferArgument::Direct, "direct"),
            (TransferArgument::Resident, "resident"),
        ],
    };
    for (i, &(transfer, name)) in transfers.iter().enumerate() {
        let mut block = load::block(layer, format, &backends, transfer, None)?;
        for &backend in &backends {
            // The transfer matters to the GPU alone.
            if backend != Backend::Gpu && i > 0 {
                continue;
            }
            let mut seconds = Vec::with_capacity(RUNS);
            let (out, mut forward) = block.forward(x, backend)?;
            for _ in 0..RUNS {
                seconds.push(block.forward(x, backend)?.1.seconds);
            }
            seconds.sort_by(f64::total_cmp);
            forward.seconds = seconds[RUNS / 2];
            lines.push(Line {
                format: format.name(),
                transfer: (backend != Backend::Cpu).then_some(name),
                weight_gb_per_second: forward.weight_bytes as f64 / forward.seconds / 1e9,
                forward,
                limit_gb_per_second: limits.of(backend),
                comparison: Comparison::new(
                    &out,
                    expected,
                    layer.spec.hidden,
                    format,
                    layer.stored_format() == Some(format),
                ),
            });
        }
    }
    Ok(())
}

fn print(
    text: &mut String,
    layer: &MoeLayer,
    x: &[f32],
    lines: &[Line],
    gpu_reason: Option<&str>,
) -> fmt::Result {
    let spec = &layer.spec;
    writeln!(
        text,
        "{} MoE block: {} tokens, hidden {}, {} experts of width {}, top {}",
        spec.model_type,
        x.len() / spec.hidden,
        spec.hidden,
        spec.experts,
        spec.intermediate,
        spec.top_k
    )?;
    let rows: Vec<Vec<String>> = lines
        .iter()
        .map(|line| {
            let c = &line.comparison;
            let backend = match line.transfer {
                Some(transfer) => format!("{} ({transfer})", line.forward.backend),
                None => line.forward.backend.to_string(),
            };
            vec![
                backend,
                line.format.to_owned(),
                line.forward.kernels.join("\n"),
                format!("{:.3}", line.forward.seconds * 1e3),
                format!("{:.4} / {}", c.element_error, c.element_limit),
                format!("{:.4} / {}", c.frobenius_error, c.frobenius_limit),
                match line.limit_gb_per_second {
                    Some(limit) => format!("{:.2} of {limit:.0}", line.weight_gb_per_second),
                    None => format!("{:.2}", line.weight_gb_per_second),
                },
                if c.passed { "pass" } else { "FAIL" }.to_owned(),
            ]
        })
        .collect();
    let headers = [
        "backend",
        "format",
        "kernels",
        "ms",
        "element error",
        "Frobenius error",
        "weights GB/s",
        "check",
    ];
    writeln!(text, "{}", table(&headers, 3, &rows))?;
    if let Some(reason) = gpu_reason {
        writeln!(text, "GPU skipped: {reason}")?;
    }
    writeln!(
        text,
        "The model is tiny: its times show launch and thread costs, not rates. See docs/performance.md."
    )?;
    let passed = lines.iter().all(|line| line.comparison.passed);
    writeln!(text, "{}", if passed { "PASS" } else { "FAIL" })
}
