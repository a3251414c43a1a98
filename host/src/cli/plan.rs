//! `asym-gemm plan`: what a layer would take, without running it.

use super::machine::{Machine, MachineArguments};
use super::{Failure, FormatArgument, Outcome, table};
use asym_gemm::checkpoint::Checkpoint;
use asym_gemm::dispatch::{Estimate, PolicyEstimate, Question, Rates};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::bank::BankGeometry;
use std::fmt::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("layer").required(true).args(["model", "shape"])))]
pub(super) struct PlanArguments {
    /// Folder of a checkpoint: the shape of its MoE layers.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Experts, hidden, intermediate, experts of a token.
    #[arg(long, value_name = "E,H,I,K", value_parser = parse_shape)]
    shape: Option<Shape>,
    /// Format of the experts.
    #[arg(long, value_enum, default_value = "int8")]
    format: FormatArgument,
    /// Tokens of a forward; several may be named.
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: Vec<u32>,
    /// GPU memory for experts of one layer, in MiB, all GPUs together.
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    hbm_mib: u64,
    /// GPU memory for the ring that weights are staged through, in MiB, of each GPU.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    ring_mib: u64,
    /// Popularity of experts by Zipf's law with this exponent; 0 for all alike.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    zipf: f64,
    /// Also print who computes what under each policy.
    #[arg(long)]
    divisions: bool,
    #[command(flatten)]
    machine: MachineArguments,
}

/// `--shape`, or what a checkpoint says.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Shape {
    experts: usize,
    hidden: usize,
    intermediate: usize,
    top_k: usize,
}

/// Dimensions beyond this are typing errors, and sizes could overflow.
const MOST: usize = 1 << 20;

fn parse_shape(text: &str) -> Result<Shape, String> {
    let numbers: Option<Vec<usize>> = text
        .split(',')
        .map(|number| number.trim().parse().ok())
        .collect();
    let Some([experts, hidden, intermediate, top_k]) =
        numbers.and_then(|numbers| <[usize; 4]>::try_from(numbers).ok())
    else {
        return Err("expected four numbers E,H,I,K, as 128,2048,768,8".into());
    };
    let fits = |n: usize| (1..=MOST).contains(&n);
    if ![experts, hidden, intermediate, top_k].into_iter().all(fits) {
        return Err(format!("each number must be from 1 to {MOST}"));
    }
    if top_k > experts {
        return Err(format!("a token cannot use {top_k} of {experts} experts"));
    }
    Ok(Shape {
        experts,
        hidden,
        intermediate,
        top_k,
    })
}

/// One answer for each number of tokens.
#[derive(serde::Serialize)]
struct Answer {
    tokens: u32,
    #[serde(flatten)]
    estimate: Estimate,
}

/// What the command reports.
#[derive(serde::Serialize)]
struct Report {
    shape: Shape,
    /// MoE layers of the checkpoint.
    layers: Option<usize>,
    format: &'static str,
    gpus: u32,
    rates: Rates,
    /// Host memory of all layers' experts.
    model_bytes: u64,
    answers: Vec<Answer>,
}

pub(super) fn run(
    arguments: &PlanArguments,
    threads: Option<NonZeroUsize>,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let format: WeightFormat = arguments.format.into();
    if !(0.0..=10.0).contains(&arguments.zipf) {
        return Err(format!("--zipf {}: expected 0 to 10", arguments.zipf).into());
    }
    let (shape, layers) = match (&arguments.model, arguments.shape) {
        (Some(folder), _) => of_checkpoint(folder)?,
        (None, Some(shape)) => (shape, None),
        (None, None) => return Err("--model or --shape is needed".into()),
    };
    let Machine { rates, gpus } = arguments.machine.machine(format, threads)?;
    let geometry = BankGeometry {
        experts: shape.experts,
        hidden: shape.hidden,
        intermediate: shape.intermediate,
        format,
        bias: false,
    };
    let answer = |&tokens: &u32| {
        let question = Question {
            geometry,
            top_k: shape.top_k,
            tokens,
            devices: gpus,
            hbm_budget_bytes: arguments.hbm_mib.saturating_mul(1 << 20),
            ring_bytes: arguments.ring_mib.saturating_mul(1 << 20) * u64::from(gpus),
            zipf: arguments.zipf,
        };
        let estimate = question.answer(&rates)?;
        Ok::<Answer, Failure>(Answer { tokens, estimate })
    };
    let report = Report {
        shape,
        layers,
        format: format.name(),
        gpus,
        rates,
        model_bytes: (geometry.bank_bytes() as u64).saturating_mul(layers.unwrap_or(1) as u64),
        answers: arguments
            .tokens
            .iter()
            .map(answer)
            .collect::<Result<_, _>>()?,
    };
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(text, &report, arguments.divisions)?;
    }
    Ok(Outcome::Passed)
}

fn of_checkpoint(folder: &Path) -> Result<(Shape, Option<usize>), Failure> {
    let checkpoint = Checkpoint::open(folder)?;
    let config = checkpoint.config();
    let shape = Shape {
        experts: config.experts,
        hidden: config.hidden,
        intermediate: config.intermediate,
        top_k: config.top_k,
    };
    Ok((shape, Some(config.moe_layers().count())))
}

fn print(text: &mut String, report: &Report, divisions: bool) -> fmt::Result {
    let Report {
        shape,
        rates,
        format,
        ..
    } = report;
    writeln!(
        text,
        "E={} H={} I={} top {}, {format}{}",
        shape.experts,
        shape.hidden,
        shape.intermediate,
        shape.top_k,
        match report.layers {
            Some(layers) => format!(", {layers} MoE layers"),
            None => String::new(),
        }
    )?;
    write!(
        text,
        "CPU reads {:.1} GB/s, computes {:.1} TOP/s",
        rates.dram_gb_s, rates.cpu_tera_ops
    )?;
    match report.gpus {
        0 => writeln!(text, "; no GPU")?,
        gpus => writeln!(
            text,
            "; {gpus} GPU{}: link {:.1} GB/s, HBM {:.0} GB/s, {:.0} TOP/s",
            if gpus == 1 { "" } else { "s" },
            rates.link_gb_s,
            rates.hbm_gb_s,
            rates.gpu_tera_ops
        )?,
    }
    for Answer { tokens, estimate } in &report.answers {
        writeln!(
            text,
            "\nT={tokens}: {} experts routed, at most {} rows; {} of weights, {} in host memory: at \
             least {:.3} ms",
            estimate.active,
            estimate.most_rows,
            bytes(estimate.bytes),
            bytes(estimate.host_bytes),
            estimate.floor_s * 1e3
        )?;
        let rows: Vec<Vec<String>> = estimate
            .policies
            .iter()
            .map(|policy| row(policy, estimate.floor_s))
            .collect();
        let headers = [
            "policy",
            "division",
            "ms",
            "of floor",
            "CPU ms",
            "GPU ms",
            "CPU MB",
            "link MB",
            "HBM MB",
            "CPU slices",
            "GPU slices",
        ];
        writeln!(text, "{}", table::table(&headers, 2, &rows))?;
        if divisions {
            for policy in &estimate.policies {
                write!(text, "{}: {}", policy.policy, policy.division)?;
            }
        }
        writeln!(
            text,
            "host memory {} a layer; GPU memory {} ({} experts and the ring); working memory {}",
            bytes(estimate.bank_bytes),
            bytes(estimate.hbm_bytes),
            estimate.resident_experts,
            bytes(estimate.scratch_bytes)
        )?;
    }
    if let Some(layers) = report.layers {
        writeln!(
            text,
            "\nhost memory {} for the experts of {layers} layers",
            bytes(report.model_bytes)
        )?;
    }
    Ok(())
}

fn row(policy: &PolicyEstimate, floor_s: f64) -> Vec<String> {
    let mb = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
    let p = policy.prediction;
    vec![
        policy.policy.clone(),
        policy.method.map_or("", |method| method.name()).to_owned(),
        format!("{:.3}", p.total_s * 1e3),
        match floor_s > 0.0 {
            true => format!("{:.2}x", p.total_s / floor_s),
            false => String::new(),
        },
        format!("{:.3}", p.cpu_s * 1e3),
        format!("{:.3}", p.gpu_s * 1e3),
        mb(policy.cpu_bytes),
        mb(policy.streamed_bytes),
        mb(policy.resident_bytes),
        policy.summary.cpu.slices.to_string(),
        policy.summary.gpu.slices.to_string(),
    ]
}

/// Bytes for people.
fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_four_numbers_that_make_sense() {
        let shape = parse_shape("128, 2048,768,8").unwrap();
        assert_eq!((shape.experts, shape.top_k), (128, 8));
        for (text, named) in [
            ("128,2048,768", "four numbers"),
            ("128,2048,768,8,1", "four numbers"),
            ("a,b,c,d", "four numbers"),
            ("0,2048,768,8", "from 1"),
            ("4,2048,768,8", "8 of 4"),
            ("4,2048,99999999,2", "from 1"),
        ] {
            let error = parse_shape(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(
            [999, 604_000_000, 2_500_000_000].map(bytes),
            ["1.0 kB", "604.0 MB", "2.50 GB"]
        );
    }
}
