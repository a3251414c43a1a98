//! What the bytes of a bank take at least: read by the CPU, copied by the link, both at once.

use asym_gemm_cpu::probe::dram;
use asym_gemm_formats::WeightFormat;

use super::{LayerBenchError, Setup};
use crate::dispatch::Rates;
use crate::moe::ExpertBank;

/// Rounds of each measurement.
const ROUNDS: usize = 3;
/// Bytes of the bank that are read and copied: no more than tell the rate.
const MOST_BYTES: usize = 1 << 30;

/// Rates in GB/s (10^9 bytes a second); those of links are 0 without a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Limits {
    /// The CPU reading the bank.
    pub dram_gb_s: f64,
    /// Copies from pinned memory to the first GPU.
    pub link_gb_s: f64,
    /// The GPU reading its own memory.
    pub hbm_gb_s: f64,
    /// The CPU while the links of all GPUs copy.
    pub together_cpu_gb_s: f64,
    /// The links of all GPUs while the CPU reads.
    pub together_link_gb_s: f64,
}

impl Limits {
    /// Measures them on a bank.
    pub(super) fn measure(setup: &Setup, bank: &ExpertBank) -> Result<Self, LayerBenchError> {
        let workers = setup.engine.workers().as_ref();
        let bytes = &bank.bytes()[..bank.bytes().len().min(MOST_BYTES)];
        let dram_gb_s = dram::read_rate(workers, bytes, ROUNDS)?.gb_per_second;
        #[cfg(feature = "cuda")]
        if let Some(gpu) = setup.gpus.first() {
            let link = crate::transfer::measure_link(gpu, 256 << 20)?;
            let (together_cpu_gb_s, together_link_gb_s) = together::measure(setup, bytes)?;
            return Ok(Self {
                dram_gb_s,
                link_gb_s: link.copy_engine,
                hbm_gb_s: link.hbm_read,
                together_cpu_gb_s,
                together_link_gb_s,
            });
        }
        Ok(Self {
            dram_gb_s,
            ..Self::default()
        })
    }

    /// Seconds that `bytes` of host memory take at least.
    pub(super) fn floor_s(&self, bytes: f64) -> f64 {
        let together = self.together_cpu_gb_s + self.together_link_gb_s;
        bytes / together.max(self.dram_gb_s).max(1e-3) * 1e-9
    }

    /// What a dispatch model begins with.
    pub(super) fn rates(&self, format: WeightFormat, gpus: usize) -> Rates {
        let typical = Rates::typical(format);
        let count = gpus.max(1) as f64;
        let or = |measured: f64, typical: f64| if measured > 0.0 { measured } else { typical };
        let slower = |alone: f64, together: f64, typical: f64| match together > 0.0 {
            true => (alone / together - 1.0).clamp(0.0, 3.0),
            false => typical,
        };
        let link_gb_s = or(self.link_gb_s, typical.link_gb_s) * count;
        Rates {
            dram_gb_s: or(self.dram_gb_s, typical.dram_gb_s),
            link_gb_s,
            hbm_gb_s: or(self.hbm_gb_s, typical.hbm_gb_s) * count,
            gpu_tera_ops: typical.gpu_tera_ops * count,
            cpu_contention: slower(
                self.dram_gb_s,
                self.together_cpu_gb_s,
                typical.cpu_contention,
            ),
            link_contention: slower(link_gb_s, self.together_link_gb_s, typical.link_contention),
            ..typical
        }
    }
}

#[cfg(feature = "cuda")]
mod together {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Instant;

    use asym_gemm_cpu::probe::dram;

    use super::{ROUNDS, Setup};
    use crate::bench::layer::LayerBenchError;
    use crate::driver::{DeviceBuffer, DriverError, Gpu, Stream};

    /// Bytes of one copy: as long as copies of experts are at best.
    const CHUNK: usize = 16 << 20;
    /// Copies enqueued before waiting, so that the link never pauses.
    const AHEAD: usize = 8;

    /// GB/s of the CPU reading `bytes`, which is pinned, and of all GPUs copying it meanwhile.
    pub(super) fn measure(setup: &Setup, bytes: &[u8]) -> Result<(f64, f64), LayerBenchError> {
        let stop = AtomicBool::new(false);
        let copied = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let copies: Vec<_> = setup
                .gpus
                .iter()
                .map(|gpu| scope.spawn(|| copy(gpu, bytes, &stop, &copied)))
                .collect();
            // The first copies set up what later ones use.
            while copied.load(Ordering::Relaxed) == 0 && !copies.iter().any(|c| c.is_finished()) {
                std::thread::yield_now();
            }
            let (start, before) = (Instant::now(), copied.load(Ordering::Relaxed));
            let workers = setup.engine.workers().as_ref();
            let read = dram::read_rate(workers, bytes, ROUNDS);
            let seconds = start.elapsed().as_secs_f64().max(1e-9);
            let moved = copied.load(Ordering::Relaxed) - before;
            stop.store(true, Ordering::Relaxed);
            for copy in copies {
                match copy.join() {
                    Ok(result) => result?,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok((read?.gb_per_second, moved as f64 / seconds * 1e-9))
        })
    }

    /// Copies until `stop`.
    fn copy(
        gpu: &Gpu,
        bytes: &[u8],
        stop: &AtomicBool,
        copied: &AtomicU64,
    ) -> Result<(), DriverError> {
        let target = DeviceBuffer::<u8>::zeroed(gpu, CHUNK.min(bytes.len()))?;
        let stream = Stream::new(gpu)?;
        let mut chunks = bytes.chunks_exact(target.len()).cycle();
        while !stop.load(Ordering::Relaxed) {
            for chunk in chunks.by_ref().take(AHEAD) {
                // SAFETY: the bank outlives this call, and the stream is waited for below.
                unsafe { target.copy_from_host_async(0, chunk, &stream)? };
            }
            stream.synchronize()?;
            copied.fetch_add((AHEAD * target.len()) as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_of_both_rates_and_of_the_cpu_alone() {
        let both = Limits {
            dram_gb_s: 100.0,
            link_gb_s: 50.0,
            hbm_gb_s: 4000.0,
            together_cpu_gb_s: 80.0,
            together_link_gb_s: 40.0,
        };
        assert!((both.floor_s(120e6) - 1e-3).abs() < 1e-12);
        let rates = both.rates(WeightFormat::Int8PerRow, 1);
        rates.validate().unwrap();
        assert!((rates.cpu_contention - 0.25).abs() < 1e-12);
        assert!((rates.link_contention - 0.25).abs() < 1e-12);
        let alone = Limits {
            dram_gb_s: 100.0,
            ..Limits::default()
        };
        assert!((alone.floor_s(100e6) - 1e-3).abs() < 1e-12);
        let typical = Rates::typical(WeightFormat::Bf16);
        let rates = alone.rates(WeightFormat::Bf16, 0);
        assert_eq!(
            (rates.dram_gb_s, rates.link_gb_s),
            (100.0, typical.link_gb_s)
        );
    }
}
