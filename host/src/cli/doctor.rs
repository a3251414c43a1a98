//! `asym-gemm doctor`: what this machine can do.

use super::{Failure, Outcome, load};
use asym_gemm::cpu::{Engine, ISA_VARIABLE, Isa};
use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::Backend;
use asym_gemm::system::{AmxPermission, System, amx_permission, dram_read_rate};
use std::fmt::{self, Write};

/// Buffer of the rates: larger than the caches of today's CPUs.
const RATE_BYTES: usize = 512 << 20;

#[derive(Debug, clap::Args)]
pub(super) struct DoctorArguments {
    /// Only look; measure no rates.
    #[arg(long)]
    no_measure: bool,
}

#[derive(Debug, serde::Serialize)]
struct Report {
    system: System,
    amx: AmxPermission,
    dram_read_gb_per_second: Option<f64>,
    cpu_isa: String,
    cpu_isa_reason: String,
    gpu: GpuReport,
    kernels: Vec<KernelChoice>,
}

/// Kernel that a format would use, and why.
#[derive(Debug, serde::Serialize)]
struct KernelChoice {
    format: &'static str,
    cpu: &'static str,
    gpu: Result<Vec<GpuKernel>, String>,
}

/// A GPU kernel and when it is taken.
#[derive(Debug, serde::Serialize)]
struct GpuKernel {
    name: &'static str,
    product: &'static str,
    rows_of_largest_expert: &'static str,
}

#[derive(Debug, Default, serde::Serialize)]
struct GpuReport {
    driver_missing: Option<String>,
    driver_version: Option<(u32, u32)>,
    device_files: usize,
    devices: Vec<DeviceReport>,
    /// Why no device can be used.
    unusable: Option<String>,
}

#[derive(Debug, serde::Serialize)]
struct DeviceReport {
    ordinal: usize,
    name: String,
    compute_capability: (u32, u32),
    multiprocessors: u32,
    memory_bytes: usize,
    l2_bytes: usize,
    numa_node: Option<u32>,
    copy_engine_gb_per_second: Option<f64>,
    sm_read_gb_per_second: Option<f64>,
    hbm_read_gb_per_second: Option<f64>,
    /// Why this device's rates or kernels are not to be had.
    problem: Option<String>,
}

pub(super) fn run(
    arguments: &DoctorArguments,
    json: bool,
    text: &mut String,
) -> Result<Outcome, Failure> {
    let system = System::read();
    let engine = Engine::detect()?;
    let forced = std::env::var(ISA_VARIABLE).is_ok_and(|value| !value.is_empty());
    let measure = !arguments.no_measure;
    let threads = system.threads.default_count();
    let gpu = gpu_report(measure);
    let report = Report {
        amx: amx_permission(),
        dram_read_gb_per_second: measure
            .then(|| dram_read_rate(threads, RATE_BYTES))
            .flatten(),
        cpu_isa: engine.isa().to_string(),
        cpu_isa_reason: isa_reason(&engine, forced),
        kernels: kernels(&engine, gpu.unusable.as_deref()),
        gpu,
        system,
    };
    if json {
        writeln!(text, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(text, &report, threads)?;
    }
    Ok(Outcome::Passed)
}

fn isa_reason(engine: &Engine, forced: bool) -> String {
    if forced {
        return format!("forced by {ISA_VARIABLE}");
    }
    match engine.isa() {
        Isa::Portable => "the CPU or the system lacks AVX2 with FMA".into(),
        isa => format!(
            "best of what CPU and system grant: {}",
            names(&Engine::available(), isa)
        ),
    }
}

fn names(available: &[Isa], chosen: Isa) -> String {
    let others: Vec<String> = available
        .iter()
        .filter(|&&isa| isa != chosen)
        .map(ToString::to_string)
        .collect();
    format!("{chosen}, also there {}", others.join(", "))
}

#[cfg(feature = "cuda")]
fn gpu_report(measure: bool) -> GpuReport {
    use asym_gemm::driver;
    let probe = driver::probe();
    let mut report = GpuReport {
        driver_missing: probe.missing,
        driver_version: probe.driver_version,
        device_files: probe.device_files,
        devices: Vec::new(),
        unusable: load::gpu_reason(),
    };
    match driver::device_count() {
        Ok(count) => report.devices = (0..count).map(|i| device_report(i, measure)).collect(),
        Err(error) => report.unusable = Some(error.to_string()),
    }
    report
}

#[cfg(not(feature = "cuda"))]
fn gpu_report(_: bool) -> GpuReport {
    GpuReport {
        unusable: load::gpu_reason(),
        ..GpuReport::default()
    }
}

#[cfg(feature = "cuda")]
fn device_report(ordinal: usize, measure: bool) -> DeviceReport {
    use asym_gemm::driver::Gpu;
    use asym_gemm::transfer::measure_link;
    let mut report = DeviceReport {
        ordinal,
        name: String::new(),
        compute_capability: (0, 0),
        multiprocessors: 0,
        memory_bytes: 0,
        l2_bytes: 0,
        numa_node: None,
        copy_engine_gb_per_second: None,
        sm_read_gb_per_second: None,
        hbm_read_gb_per_second: None,
        problem: None,
    };
    let gpu = match Gpu::open(ordinal) {
        Ok(gpu) => gpu,
        Err(error) => {
            report.problem = Some(error.to_string());
            return report;
        }
    };
    report.name = gpu.name().to_owned();
    report.compute_capability = gpu.compute_capability();
    report.multiprocessors = gpu.sm_count();
    report.memory_bytes = gpu.total_memory();
    report.l2_bytes = gpu.l2_bytes();
    report.numa_node = gpu.numa_node();
    if measure {
        match measure_link(&gpu, RATE_BYTES) {
            Ok(rates) => {
                report.copy_engine_gb_per_second = Some(rates.copy_engine);
                report.sm_read_gb_per_second = Some(rates.sm_read);
                report.hbm_read_gb_per_second = Some(rates.hbm_read);
            }
            Err(error) => report.problem = Some(error.to_string()),
        }
    }
    report
}

/// Kernels for each format: the tile follows from the rows of the largest expert.
fn kernels(engine: &Engine, unusable: Option<&str>) -> Vec<KernelChoice> {
    WeightFormat::ALL
        .into_iter()
        .map(|format| KernelChoice {
            format: format.name(),
            cpu: engine.kernel_name(format),
            gpu: match unusable {
                _ if !Backend::Gpu.supports(format) => {
                    Err(format!("{format} experts run on the CPU"))
                }
                Some(reason) => Err(reason.to_owned()),
                None => Ok(gpu_kernels(format)),
            },
        })
        .collect()
}

#[cfg(feature = "cuda")]
fn gpu_kernels(format: WeightFormat) -> Vec<GpuKernel> {
    use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile, kernel_name};
    let operands: &[(Operands, &str)] = match format {
        WeightFormat::Bf16 => &[(Operands::Bf16, "gate, up and down")],
        WeightFormat::Int8PerRow => &[
            (Operands::Int8PerRow, "gate and up"),
            (Operands::Int8Slices, "down"),
        ],
        WeightFormat::Int8Block128 => &[(Operands::Int8Blocks, "gate, up and down")],
        WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => &[],
    };
    let mut kernels = Vec::new();
    for &(operands, product) in operands {
        for (rows, rows_of_largest_expert) in [(64, "up to 64"), (65, "more than 64")] {
            let tile = choose_tile(operands, rows);
            kernels.extend(kernel_name(operands, tile).map(|name| GpuKernel {
                name,
                product,
                rows_of_largest_expert,
            }));
        }
    }
    kernels
}

#[cfg(not(feature = "cuda"))]
fn gpu_kernels(_: WeightFormat) -> Vec<GpuKernel> {
    Vec::new()
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".to_owned(), gib)
}

fn rate(gb_per_second: Option<f64>) -> String {
    gb_per_second.map_or_else(
        || "not measured".to_owned(),
        |rate| format!("{rate:.1} GB/s"),
    )
}

fn print(text: &mut String, report: &Report, threads: usize) -> fmt::Result {
    let s = &report.system;
    writeln!(text, "CPU       {} ({})", s.cpu.model, s.cpu.architecture)?;
    writeln!(text, "features  {}", s.cpu.features.join(" "))?;
    if !s.cpu.disabled_by_os.is_empty() {
        writeln!(
            text,
            "          not granted by the system: {}",
            s.cpu.disabled_by_os.join(" ")
        )?;
    }
    writeln!(
        text,
        "AMX       {}",
        match (report.amx.supported, report.amx.granted) {
            (false, _) => "not there",
            (true, false) => "there, permission not yet asked for",
            (true, true) => "there, permission granted",
        }
    )?;
    writeln!(
        text,
        "ISA used  {} ({})",
        report.cpu_isa, report.cpu_isa_reason
    )?;
    writeln!(
        text,
        "threads   {threads} (affinity {}, quota {}, physical cores {})",
        s.threads.affinity.len(),
        s.threads
            .quota
            .map_or_else(|| "none".to_owned(), |q| format!("{q:.2}")),
        s.threads
            .physical_cores
            .map_or_else(|| "unknown".to_owned(), |n| n.to_string()),
    )?;
    writeln!(
        text,
        "memory    {} of {} available, {} NUMA node(s), DRAM read {}",
        s.memory
            .usable_bytes()
            .map_or_else(|| "unknown".to_owned(), gib),
        s.memory
            .total_bytes
            .map_or_else(|| "unknown".to_owned(), gib),
        s.numa.count().max(1),
        rate(report.dram_read_gb_per_second)
    )?;
    writeln!(
        text,
        "lock      soft {}, hard {}",
        limit(s.lock_limit.soft_bytes),
        limit(s.lock_limit.hard_bytes)
    )?;
    match (&report.gpu.driver_missing, report.gpu.driver_version) {
        (Some(reason), _) => writeln!(text, "driver    {reason}")?,
        (None, Some((major, minor))) => writeln!(text, "driver    CUDA {major}.{minor}")?,
        (None, None) => writeln!(text, "driver    there, version unknown")?,
    }
    for d in &report.gpu.devices {
        writeln!(
            text,
            "GPU {}     {}, sm_{}{}, {} SMs, {}",
            d.ordinal,
            d.name,
            d.compute_capability.0,
            d.compute_capability.1,
            d.multiprocessors,
            gib(d.memory_bytes as u64)
        )?;
        writeln!(
            text,
            "          link: copy engine {}, SM reads {}; HBM reads {}",
            rate(d.copy_engine_gb_per_second),
            rate(d.sm_read_gb_per_second),
            rate(d.hbm_read_gb_per_second)
        )?;
        if let Some(problem) = &d.problem {
            writeln!(text, "          {problem}")?;
        }
    }
    writeln!(text, "kernels")?;
    for choice in &report.kernels {
        writeln!(text, "  {:14} CPU {}", choice.format, choice.cpu)?;
        match &choice.gpu {
            Ok(kernels) => {
                for k in kernels {
                    writeln!(
                        text,
                        "  {:14} GPU {} ({}; {} rows in the largest expert)",
                        "", k.name, k.product, k.rows_of_largest_expert
                    )?;
                }
            }
            Err(reason) => writeln!(text, "  {:14} GPU none: {reason}", "")?,
        }
    }
    Ok(())
}
