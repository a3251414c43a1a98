//! The machine that a prediction is for: measured, from a file, or by flags.

use super::Failure;
use asym_gemm::dispatch::{Model, Rates};
use asym_gemm::formats::WeightFormat;
use asym_gemm::system::Threads;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Buffer of the rates: larger than the caches of today's CPUs.
const RATE_BYTES: usize = 512 << 20;

/// Rates by flags; what no flag says is measured, or typical where it cannot be.
#[derive(Debug, clap::Args)]
pub(super) struct MachineArguments {
    /// Measure nothing: typical rates where no flag says otherwise.
    #[arg(long)]
    no_measure: bool,
    /// Start from the rates of a dispatch model that was saved.
    #[arg(long, value_name = "FILE")]
    rates: Option<PathBuf>,
    /// GPUs (default: one if this machine has one).
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,
    /// The CPU reading memory, GB/s.
    #[arg(long, value_name = "GB/S")]
    dram: Option<f64>,
    /// The CPU's products, TOP/s.
    #[arg(long, value_name = "TOP/S")]
    cpu_tops: Option<f64>,
    /// Host memory to one GPU, GB/s.
    #[arg(long, value_name = "GB/S")]
    link: Option<f64>,
    /// One GPU reading its memory, GB/s.
    #[arg(long, value_name = "GB/S")]
    hbm: Option<f64>,
    /// One GPU's products, TOP/s.
    #[arg(long, value_name = "TOP/S")]
    gpu_tops: Option<f64>,
    /// By how much of itself the CPU's reading takes longer beside a busy link.
    #[arg(long, value_name = "SHARE")]
    cpu_contention: Option<f64>,
    /// By how much of itself copying takes longer beside a reading CPU.
    #[arg(long, value_name = "SHARE")]
    link_contention: Option<f64>,
}

/// Rates, and GPUs to divide the work with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) rates: Rates,
    pub(super) gpus: u32,
}

impl MachineArguments {
    /// The machine for weights of `format`.
    pub(super) fn machine(
        &self,
        format: WeightFormat,
        threads: Option<NonZeroUsize>,
    ) -> Result<Machine, Failure> {
        let mut machine = match &self.rates {
            Some(path) => Machine {
                rates: Model::load(path)?.rates(),
                gpus: self.gpus.unwrap_or(1),
            },
            None => self.probed(format, threads)?,
        };
        let count = f64::from(machine.gpus.max(1));
        let rates = &mut machine.rates;
        for (flag, rate, of_each_gpu) in [
            (self.dram, &mut rates.dram_gb_s, false),
            (self.cpu_tops, &mut rates.cpu_tera_ops, false),
            (self.link, &mut rates.link_gb_s, true),
            (self.hbm, &mut rates.hbm_gb_s, true),
            (self.gpu_tops, &mut rates.gpu_tera_ops, true),
            (self.cpu_contention, &mut rates.cpu_contention, false),
            (self.link_contention, &mut rates.link_contention, false),
        ] {
            if let Some(flag) = flag {
                *rate = if of_each_gpu { flag * count } else { flag };
            }
        }
        rates.validate()?;
        Ok(machine)
    }

    /// What this machine measures, or what is typical.
    fn probed(
        &self,
        format: WeightFormat,
        threads: Option<NonZeroUsize>,
    ) -> Result<Machine, Failure> {
        let mut rates = Rates::typical(format);
        if !self.no_measure && (self.dram.is_none() || self.cpu_tops.is_none()) {
            let threads = threads.map_or_else(|| Threads::read().default_count(), |n| n.get());
            rates = rates.with_measured_cpu(format, threads, RATE_BYTES);
        }
        let link = match (self.link.is_some(), self.no_measure, self.gpus) {
            (true, ..) | (_, true, _) | (.., Some(0)) => None,
            _ => measured_link(),
        };
        let gpus = self.gpus.unwrap_or(match link {
            Some(_) => 1,
            None => u32::from(self.link.is_some()),
        });
        let count = f64::from(gpus.max(1));
        let (link_gb_s, hbm_gb_s) = link.unwrap_or((rates.link_gb_s, rates.hbm_gb_s));
        rates.link_gb_s = link_gb_s * count;
        rates.hbm_gb_s = hbm_gb_s * count;
        rates.gpu_tera_ops *= count;
        Ok(Machine { rates, gpus })
    }
}

/// Copy engine and HBM of the first GPU, if there is one that works.
#[cfg(feature = "cuda")]
fn measured_link() -> Option<(f64, f64)> {
    use asym_gemm::transfer::measure_link;
    let gpu = asym_gemm::driver::Gpu::open(0).ok()?;
    let link = measure_link(&gpu, 256 << 20).ok()?;
    Some((link.copy_engine, link.hbm_read))
}

#[cfg(not(feature = "cuda"))]
fn measured_link() -> Option<(f64, f64)> {
    None
}
