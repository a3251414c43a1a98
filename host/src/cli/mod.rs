//! The command line: arguments, set-up, exit status.

mod bench_cpu;
mod bench_gpu;
mod bench_layer;
mod check;
mod convert;
mod demo;
mod doctor;
mod inspect;
mod load;
mod machine;
mod moe;
mod plan;
mod table;

use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::Backend;
use asym_gemm::system::Threads;
use clap::{Parser, Subcommand, ValueEnum};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Mixture-of-Experts layers whose weights stay in host memory, on CPU and GPU.
#[derive(Debug, Parser)]
#[command(name = "asym-gemm", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON document instead of tables.
    #[arg(long, global = true)]
    json: bool,
    /// Worker threads (default: what quota, affinity and physical cores allow).
    #[arg(long, global = true, value_name = "N")]
    threads: Option<std::num::NonZeroUsize>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a built-in model's MoE block on every back end present and check the results.
    Demo(demo::DemoArguments),
    /// Run one MoE layer of a checkpoint: router, experts, shared expert.
    Moe(moe::MoeArguments),
    /// Convert a checkpoint's experts to another format, and verify each of them.
    Convert(convert::ConvertArguments),
    /// Show what a checkpoint holds, what a token costs and what fits where.
    Inspect(inspect::InspectArguments),
    /// Predict a layer's time, bytes and memory under each policy, on this or a given machine.
    Plan(plan::PlanArguments),
    /// Compare kernels with this machine's ceilings.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Show what this machine can do: CPU, memory, limits, GPUs, link, kernels.
    Doctor(doctor::DoctorArguments),
}

/// `bench`.
#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// The CPU kernels: ceilings first, then GEMM and expert layers, verified and timed.
    Cpu(bench_cpu::BenchCpuArguments),
    /// The grouped GEMM on the GPU: link and memory rates first, then each way of the weights.
    Gpu(bench_gpu::BenchGpuArguments),
    /// A MoE layer under each policy: limits first, then verified and timed against the byte floor.
    Layer(bench_layer::BenchLayerArguments),
}

/// What a command found; errors are of the library or of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
}

/// Any error; it is printed with its causes and ends the program with status 2.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FormatArgument {
    /// bfloat16, as stored.
    Bf16,
    /// int8 with a scale for each row.
    Int8,
    /// int8 with a scale for each row and 128 columns.
    #[value(name = "int8-block128")]
    Int8Block128,
    /// fp8 (e4m3) with a scale for each 128 rows and 128 columns; CPU only.
    Fp8,
    /// fp4 with an fp8 scale for each 16 columns and one of the matrix; CPU only.
    Nvfp4,
    /// fp4 with a power of two for each 32 columns; CPU only.
    Mxfp4,
}

impl From<FormatArgument> for WeightFormat {
    fn from(argument: FormatArgument) -> Self {
        match argument {
            FormatArgument::Bf16 => Self::Bf16,
            FormatArgument::Int8 => Self::Int8PerRow,
            FormatArgument::Int8Block128 => Self::Int8Block128,
            FormatArgument::Fp8 => Self::Fp8Block128,
            FormatArgument::Nvfp4 => Self::Nvfp4,
            FormatArgument::Mxfp4 => Self::Mxfp4,
        }
    }
}

/// `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BackendArgument {
    /// Both if there is a GPU with kernels for it and for the format, otherwise the CPU.
    Auto,
    /// The CPU only.
    Cpu,
    /// The GPU only.
    Gpu,
    /// Experts with many rows on the GPU, the others on the CPU.
    Both,
}

/// `--transfer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransferArgument {
    /// Staged.
    Auto,
    /// The kernels read host memory.
    Direct,
    /// Through a ring in GPU memory.
    Staged,
    /// All weights in GPU memory.
    Resident,
}

#[cfg(feature = "cuda")]
impl From<TransferArgument> for asym_gemm::transfer::Transfer {
    fn from(argument: TransferArgument) -> Self {
        match argument {
            TransferArgument::Auto => Self::Auto,
            TransferArgument::Direct => Self::Direct,
            TransferArgument::Staged => Self::Staged,
            TransferArgument::Resident => Self::Resident,
        }
    }
}

/// Back ends that this machine has, the CPU first.
fn present_backends() -> Vec<Backend> {
    let mut backends = vec![Backend::Cpu];
    if load::gpu_reason().is_none() {
        backends.extend([Backend::Gpu, Backend::Both]);
    }
    backends
}

/// Parses the command line and runs it.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::parse();
    set_up_logging();
    match execute(&arguments) {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(1),
        Err(error) => {
            report_error(error.as_ref(), arguments.json);
            ExitCode::from(2)
        }
    }
}

/// Runs the command; what it has to say goes out at its end.
fn execute(arguments: &Arguments) -> Result<Outcome, Failure> {
    set_up_threads(arguments.threads)?;
    let mut text = String::new();
    let outcome = match &arguments.command {
        Command::Demo(a) => demo::run(a, arguments.json, &mut text),
        Command::Moe(a) => moe::run(a, arguments.json, &mut text),
        Command::Convert(a) => convert::run(a, arguments.json, &mut text),
        Command::Inspect(a) => inspect::run(a, arguments.json, &mut text),
        Command::Plan(a) => plan::run(a, arguments.threads, arguments.json, &mut text),
        Command::Bench(BenchCommand::Cpu(a)) => {
            bench_cpu::run(a, arguments.threads, arguments.json, &mut text)
        }
        Command::Bench(BenchCommand::Gpu(a)) => bench_gpu::run(a, arguments.json, &mut text),
        Command::Bench(BenchCommand::Layer(a)) => {
            bench_layer::run(a, arguments.threads, arguments.json, &mut text)
        }
        Command::Doctor(a) => doctor::run(a, arguments.json, &mut text),
    }?;
    // Not `print!`, which panics where nobody reads or the disk is full.
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("standard output: {error}"))?;
    Ok(outcome)
}

/// Prints an error with its causes, each once.
fn report_error(error: &(dyn std::error::Error + 'static), json: bool) {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !parts.last().is_some_and(|last| last.contains(&text)) {
            parts.push(text);
        }
        next = error.source();
    }
    let message = parts.join(": ");
    // Where neither can be written, the exit status is what is left.
    if json {
        let _ = writeln!(
            std::io::stdout(),
            "{}",
            serde_json::json!({ "error": message })
        );
    }
    let _ = writeln!(std::io::stderr(), "error: {message}");
}

/// Warnings and the like go to standard error; RUST_LOG chooses.
fn set_up_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
}

/// Threads beyond this only cost: none of today's machines has as many cores.
const MAX_THREADS: usize = 1024;

/// Sizes the global pool before anything uses it.
fn set_up_threads(threads: Option<std::num::NonZeroUsize>) -> Result<(), Failure> {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    let (count, source) = match (threads, std::env::var_os(VARIABLE)) {
        (Some(count), _) => (count.get(), "--threads"),
        (None, Some(text)) if !text.is_empty() => {
            let text = text.to_string_lossy();
            let count = text.parse().map_err(|_| {
                format!("{VARIABLE}={text}: expected a number from 1 to {MAX_THREADS}")
            })?;
            (count, VARIABLE)
        }
        _ => (Threads::read().default_count(), "the machine"),
    };
    if !(1..=MAX_THREADS).contains(&count) {
        return Err(format!("{count} threads ({source}): possible are 1 to {MAX_THREADS}").into());
    }
    rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build_global()
        .map_err(|error| format!("starting {count} threads ({source}): {error}"))?;
    Ok(())
}
