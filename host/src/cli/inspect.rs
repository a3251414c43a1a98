//! `inspect`: what a checkpoint holds, what a token costs, what fits where.

use super::table::table;
use super::{Failure, Outcome};
use asym_gemm::checkpoint::{Checkpoint, LayerStream, ModelConfig};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::bank::BankGeometry;
use asym_gemm::system::Memory;
use clap::Args;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// `inspect`.
#[derive(Debug, Args)]
pub(super) struct InspectArguments {
    /// Folder of the checkpoint.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
}

/// What is known of a checkpoint without reading its weights.
#[derive(Debug, Serialize)]
struct Report {
    model_type: String,
    layers: usize,
    moe_layers: usize,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    shared_intermediate: Option<usize>,
    quantization: Option<String>,
    files: usize,
    file_bytes: usize,
    /// Layers of the same stored formats.
    stored: Vec<Stored>,
    /// Layers that cannot be read, with the reason.
    unreadable: Vec<(usize, String)>,
    banks: Vec<Bank>,
    memory_bytes: Option<u64>,
    gpu_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Stored {
    first: usize,
    last: usize,
    formats: Vec<String>,
}

/// All MoE layers' experts as banks of one format.
#[derive(Debug, Serialize)]
struct Bank {
    format: &'static str,
    expert_bytes: usize,
    model_bytes: usize,
    /// Expert bytes that a token reads.
    token_bytes: usize,
    /// Tokens a second at most if all of them come over a link of 55 GB/s.
    link_tokens: f64,
    fits_memory: Option<bool>,
    /// The share of the experts that the GPU's memory holds.
    gpu_share: Option<f64>,
}

/// A PCIe 5.0 x16 link as copy engines use it, in bytes a second.
const LINK: f64 = 55e9;

pub(super) fn run(
    arguments: &InspectArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let checkpoint = Checkpoint::open(&arguments.model)?;
    let report = report(&checkpoint);
    let readable = report.unreadable.is_empty();
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(text, &report)?;
    }
    Ok(match readable {
        true => Outcome::Passed,
        false => Outcome::Failed,
    })
}

fn report(checkpoint: &Checkpoint) -> Report {
    let config = checkpoint.config();
    let moe_layers: Vec<usize> = config.moe_layers().collect();
    let (mut stored, mut unreadable) = (Vec::<Stored>::new(), Vec::new());
    for &layer in &moe_layers {
        match LayerStream::open(checkpoint, layer) {
            Ok(stream) => {
                let formats = stream.stored_names();
                match stored.last_mut() {
                    Some(run) if run.formats == formats => run.last = layer,
                    _ => stored.push(Stored {
                        first: layer,
                        last: layer,
                        formats,
                    }),
                }
            }
            Err(error) => unreadable.push((layer, error.to_string())),
        }
    }
    let memory_bytes = Memory::read().usable_bytes();
    let gpu_bytes = gpu_bytes();
    let banks = WeightFormat::ALL
        .map(|format| bank(config, moe_layers.len(), format, memory_bytes, gpu_bytes));
    Report {
        model_type: config.model_type.to_string(),
        layers: config.layers,
        moe_layers: moe_layers.len(),
        hidden: config.hidden,
        intermediate: config.intermediate,
        experts: config.experts,
        top_k: config.top_k,
        shared_intermediate: config.shared.map(|shared| shared.intermediate),
        quantization: config.quantization.clone(),
        files: checkpoint.files(),
        file_bytes: checkpoint.tensors().map(|(_, info)| info.bytes).sum(),
        stored,
        unreadable,
        banks: banks.into(),
        memory_bytes,
        gpu_bytes,
    }
}

fn bank(
    config: &ModelConfig,
    layers: usize,
    format: WeightFormat,
    memory: Option<u64>,
    gpu: Option<u64>,
) -> Bank {
    let bytes = |experts, intermediate| {
        BankGeometry {
            experts,
            hidden: config.hidden,
            intermediate,
            format,
            bias: config.bias,
        }
        .bank_bytes()
    };
    let expert_bytes = bytes(1, config.intermediate);
    let shared = config.shared.map_or(0, |s| bytes(1, s.intermediate));
    // Sizes of a description may be beyond any machine.
    let model_bytes = expert_bytes
        .saturating_mul(config.experts)
        .saturating_add(shared)
        .saturating_mul(layers);
    let token_bytes = expert_bytes
        .saturating_mul(config.top_k)
        .saturating_add(shared)
        .saturating_mul(layers);
    Bank {
        format: format.name(),
        expert_bytes,
        model_bytes,
        token_bytes,
        link_tokens: LINK / (token_bytes as f64).max(1.0),
        fits_memory: memory.map(|memory| model_bytes as u64 <= memory),
        gpu_share: gpu.map(|gpu| (gpu as f64 / (model_bytes as f64).max(1.0)).min(1.0)),
    }
}

/// Memory of the first GPU.
fn gpu_bytes() -> Option<u64> {
    #[cfg(feature = "cuda")]
    {
        let gpu = asym_gemm::driver::Gpu::open(0).ok()?;
        Some(gpu.total_memory() as u64)
    }
    #[cfg(not(feature = "cuda"))]
    None
}

fn gigabytes(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

fn print(text: &mut String, r: &Report) -> std::fmt::Result {
    writeln!(
        text,
        "{}: {} layers, {} of them MoE: {} experts of {} x {}, {} a token{}",
        r.model_type,
        r.layers,
        r.moe_layers,
        r.experts,
        r.intermediate,
        r.hidden,
        r.top_k,
        match r.shared_intermediate {
            Some(width) => format!(", a shared expert of {width}"),
            None => String::new(),
        }
    )?;
    writeln!(
        text,
        "{} GB in {} file{}{}",
        gigabytes(r.file_bytes),
        r.files,
        if r.files == 1 { "" } else { "s" },
        match &r.quantization {
            Some(method) => format!(", quantised: {method}"),
            None => String::new(),
        }
    )?;
    for run in &r.stored {
        writeln!(
            text,
            "layers {} to {}: {}",
            run.first,
            run.last,
            run.formats.join(" and ")
        )?;
    }
    for (layer, reason) in &r.unreadable {
        writeln!(text, "layer {layer} cannot be read: {reason}")?;
    }
    let rows: Vec<_> = r
        .banks
        .iter()
        .map(|bank| {
            vec![
                bank.format.to_owned(),
                format!("{:.2}", bank.expert_bytes as f64 / 1e6),
                gigabytes(bank.model_bytes),
                gigabytes(bank.token_bytes),
                format!("{:.1}", bank.link_tokens),
                match bank.fits_memory {
                    Some(true) => "yes".to_owned(),
                    Some(false) => "no".to_owned(),
                    None => "unknown".to_owned(),
                },
                match bank.gpu_share {
                    Some(share) => format!("{:.0} %", share * 100.0),
                    None => "no GPU".to_owned(),
                },
            ]
        })
        .collect();
    let headers = [
        "experts as",
        "MB an expert",
        "GB in all",
        "GB a token",
        "tokens/s at 55 GB/s",
        "fits in memory",
        "GPU holds",
    ];
    writeln!(text, "{}", table(&headers, 1, &rows))
}
