//! Rates of this machine, by the probes that there are.

use std::time::Duration;

use asym_gemm_cpu::pool::SpinPool;
use asym_gemm_cpu::probe::products::{Precision, Products};
use asym_gemm_formats::WeightFormat;

use super::rates::Rates;
use crate::system::dram_read_rate;

/// What kernels get of the rate of products on registers, at many rows.
const PRODUCT_SHARE: f64 = 0.55;
/// How long products are measured.
const PRODUCT_TIME: Duration = Duration::from_millis(20);
const PRODUCT_ROUNDS: usize = 3;

impl Rates {
    /// Typical rates for weights of `format`: the defaults, with products as fast as that format's
    /// are on such a machine.
    pub fn typical(format: WeightFormat) -> Self {
        let default = Self::default();
        let (cpu, gpu) = match format {
            WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => {
                (default.cpu_tera_ops, default.gpu_tera_ops)
            }
            // Widened to bf16 on the CPU; products of fp8 on the GPU.
            WeightFormat::Fp8Block128 => (default.cpu_tera_ops / 2.0, default.gpu_tera_ops),
            WeightFormat::Bf16 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
                (default.cpu_tera_ops / 2.0, default.gpu_tera_ops / 1.75)
            }
        };
        Self {
            cpu_tera_ops: cpu,
            gpu_tera_ops: gpu,
            ..default
        }
    }

    /// These rates, with reading and products of the CPU as measured on `threads` threads; what
    /// cannot be measured stays. Reads `bytes` of memory, which should be several times the
    /// last-level cache. Takes about a second; meaningful in optimised builds only.
    #[must_use]
    pub fn with_measured_cpu(self, format: WeightFormat, threads: usize, bytes: usize) -> Self {
        let precision = match format {
            WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => Precision::Int8,
            WeightFormat::Bf16
            | WeightFormat::Fp8Block128
            | WeightFormat::Nvfp4
            | WeightFormat::Mxfp4 => Precision::Bf16,
        };
        let products = SpinPool::new(threads).ok().and_then(|workers| {
            Products::best(precision)
                .rate(&workers, PRODUCT_TIME, PRODUCT_ROUNDS)
                .ok()
        });
        let positive = |rate: &f64| rate.is_finite() && *rate > 0.0;
        Self {
            dram_gb_s: dram_read_rate(threads, bytes)
                .filter(positive)
                .unwrap_or(self.dram_gb_s),
            cpu_tera_ops: products
                .map(|ops| ops * PRODUCT_SHARE * 1e-12)
                .filter(positive)
                .unwrap_or(self.cpu_tera_ops),
            ..self
        }
    }

    /// These rates for `devices` GPUs, each with the link and memory of `link`.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn with_link(self, link: &crate::transfer::LinkRates, devices: u32) -> Self {
        let count = f64::from(devices.max(1));
        Self {
            link_gb_s: link.copy_engine * count,
            hbm_gb_s: link.hbm_read * count,
            gpu_tera_ops: self.gpu_tera_ops * count,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_rates_are_rates_and_what_cannot_be_measured_stays() {
        for format in [WeightFormat::Bf16, WeightFormat::Int8PerRow] {
            let typical = Rates::typical(format);
            typical.validate().unwrap();
            let measured = typical.with_measured_cpu(format, 1, 1 << 20);
            measured.validate().unwrap();
            assert_ne!(measured.dram_gb_s, typical.dram_gb_s);
            assert_ne!(measured.cpu_tera_ops, typical.cpu_tera_ops);
            assert_eq!(measured.link_gb_s, typical.link_gb_s);
            assert_eq!(typical.with_measured_cpu(format, 0, 0), typical);
        }
    }
}
