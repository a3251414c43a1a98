//! What a machine can do, in rates that do not depend on a layer's shape.

use super::cost::{Costs, SideCost};
use crate::moe::division::LayerShape;
use asym_gemm_formats::bank::SLICE;

/// Rates and fixed times of one machine for one weight format.
///
/// Products are counted as two operations for each multiply-add, GB/s are 10^9 bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Rates {
    /// Seconds until the CPU's workers have begun and ended, without work.
    pub cpu_launch_s: f64,
    /// Seconds for each share that the CPU takes: packing, one round of the queue.
    pub cpu_share_s: f64,
    /// The CPU reading weights, with the link idle.
    pub dram_gb_s: f64,
    /// The CPU's products, in 10^12 operations a second.
    pub cpu_tera_ops: f64,
    /// Seconds of the GPU's kernels and first copy, without work.
    pub gpu_launch_s: f64,
    /// Seconds for each share on the GPU.
    pub gpu_share_s: f64,
    /// Host memory to HBM, all links together, with the CPU idle.
    pub link_gb_s: f64,
    /// The GPUs reading weights in HBM, all together.
    pub hbm_gb_s: f64,
    /// The GPUs' products, in 10^12 operations a second, all together.
    pub gpu_tera_ops: f64,
    /// By how much of itself the CPU's reading takes longer while the links are busy.
    pub cpu_contention: f64,
    /// By how much of itself the links' copying takes longer while the CPU reads.
    pub link_contention: f64,
    /// Seconds to bring the CPU's rows from a device and back, without bytes.
    pub join_s: f64,
}

impl Default for Rates {
    /// A server of 2024: 16 threads with AMX, PCIe 5.0 x16, an H200; int8 weights.
    ///
    /// The contention is what a CPU that keeps 68 % of its rate and a link that keeps 84 % see.
    fn default() -> Self {
        Self {
            cpu_launch_s: 15e-6,
            cpu_share_s: 2e-6,
            dram_gb_s: 105.0,
            cpu_tera_ops: 16.0,
            gpu_launch_s: 50e-6,
            gpu_share_s: 2e-6,
            link_gb_s: 54.0,
            hbm_gb_s: 3500.0,
            gpu_tera_ops: 700.0,
            cpu_contention: 0.47,
            link_contention: 0.19,
            join_s: 25e-6,
        }
    }
}

/// A rate that no machine has.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}: expected a finite number {}", if *.positive { "above 0" } else { "of at least 0" })]
pub struct RatesError {
    /// Field of [`Rates`].
    pub name: &'static str,
    /// What it holds.
    pub value: f64,
    /// Whether 0 is refused too.
    pub positive: bool,
}

impl Rates {
    /// The fields by name, and whether each must be above 0.
    fn fields(&self) -> [(&'static str, f64, bool); 12] {
        [
            ("cpu_launch_s", self.cpu_launch_s, false),
            ("cpu_share_s", self.cpu_share_s, false),
            ("dram_gb_s", self.dram_gb_s, true),
            ("cpu_tera_ops", self.cpu_tera_ops, true),
            ("gpu_launch_s", self.gpu_launch_s, false),
            ("gpu_share_s", self.gpu_share_s, false),
            ("link_gb_s", self.link_gb_s, true),
            ("hbm_gb_s", self.hbm_gb_s, true),
            ("gpu_tera_ops", self.gpu_tera_ops, true),
            ("cpu_contention", self.cpu_contention, false),
            ("link_contention", self.link_contention, false),
            ("join_s", self.join_s, false),
        ]
    }

    /// Refuses rates that are 0, negative or not finite.
    ///
    /// # Errors
    /// The first such rate.
    pub fn validate(&self) -> Result<(), RatesError> {
        for (name, value, positive) in self.fields() {
            let fits = value.is_finite() && value >= 0.0 && (value > 0.0 || !positive);
            if !fits {
                return Err(RatesError {
                    name,
                    value,
                    positive,
                });
            }
        }
        Ok(())
    }

    /// What these rates make of a layer's shape.
    pub fn costs(&self, shape: &LayerShape) -> Costs {
        let hidden = f64::from(shape.hidden);
        let ops = 3.0 * 2.0 * hidden * SLICE as f64;
        let bytes = shape.slice_bytes as f64;
        let side = |launch, share, tera_ops: f64, gb_s: f64| SideCost {
            launch,
            share,
            row_slice: ops / tera_ops * 1e-12,
            slice: bytes / gb_s * 1e-9,
        };
        // A token comes as bf16 and its sum returns as f32, over one link in each direction.
        let crossing = hidden * 6.0 / self.link_gb_s * 1e-9;
        Costs {
            cpu: side(
                self.cpu_launch_s,
                self.cpu_share_s,
                self.cpu_tera_ops,
                self.dram_gb_s,
            ),
            streamed: side(
                self.gpu_launch_s,
                self.gpu_share_s,
                self.gpu_tera_ops,
                self.link_gb_s,
            ),
            resident: side(
                self.gpu_launch_s,
                self.gpu_share_s,
                self.gpu_tera_ops,
                self.hbm_gb_s,
            ),
            cpu_contention: self.cpu_contention,
            link_contention: self.link_contention,
            join: match shape.x_on_device {
                true => self.join_s + f64::from(shape.tokens) * crossing,
                false => 0.0,
            },
        }
    }

    /// Seconds that `bytes` of weights take at least where CPU and links read them together, as
    /// fast as they do side by side.
    pub fn byte_floor_s(&self, bytes: u64, devices: u32) -> f64 {
        let cpu = self.dram_gb_s / (1.0 + self.cpu_contention);
        let links = self.link_gb_s / (1.0 + self.link_contention);
        let together = match devices {
            0 => self.dram_gb_s,
            _ => (cpu + links).max(self.dram_gb_s).max(self.link_gb_s),
        };
        bytes as f64 / together * 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_is_validated_by_name() {
        Rates::default().validate().unwrap();
        let mut rates = Rates {
            link_gb_s: 0.0,
            ..Rates::default()
        };
        let error = rates.validate().unwrap_err();
        assert_eq!((error.name, error.positive), ("link_gb_s", true));
        assert!(error.to_string().contains("above 0"));
        rates = Rates {
            join_s: f64::NAN,
            ..Rates::default()
        };
        assert_eq!(rates.validate().unwrap_err().name, "join_s");
        rates.join_s = 0.0;
        rates.validate().unwrap();
    }

    #[test]
    fn costs_follow_from_bytes_and_operations() {
        let rates = Rates {
            dram_gb_s: 100.0,
            cpu_tera_ops: 10.0,
            link_gb_s: 50.0,
            ..Rates::default()
        };
        let shape = LayerShape {
            slices: 6,
            slice_bytes: 1_000_000,
            hidden: 1000,
            tokens: 10,
            devices: 1,
            x_on_device: true,
        };
        let costs = rates.costs(&shape);
        assert!((costs.cpu.slice - 10e-6).abs() < 1e-12);
        assert!((costs.streamed.slice - 20e-6).abs() < 1e-12);
        assert!((costs.cpu.row_slice - 768_000.0 / 10e12).abs() < 1e-15);
        assert!((costs.join - rates.join_s - 60_000.0 / 50e9).abs() < 1e-12);
        let on_host = LayerShape {
            x_on_device: false,
            ..shape
        };
        assert_eq!(rates.costs(&on_host).join, 0.0);
    }

    #[test]
    fn the_floor_adds_the_rates_side_by_side() {
        let rates = Rates {
            dram_gb_s: 100.0,
            link_gb_s: 50.0,
            cpu_contention: 0.25,
            link_contention: 0.25,
            ..Rates::default()
        };
        assert!((rates.byte_floor_s(120_000_000, 1) - 1e-3).abs() < 1e-9);
        assert!((rates.byte_floor_s(100_000_000, 0) - 1e-3).abs() < 1e-9);
    }
}
