//! What this machine can do at most, and which part of it a case is compared with.

use asym_gemm_cpu::pool::Workers;
use asym_gemm_cpu::probe::dram::{self, DramRate};
use asym_gemm_cpu::probe::products::{Precision, Products};
use asym_gemm_cpu::{CpuError, Engine, Isa};
use asym_gemm_formats::WeightFormat;

use super::plan::Plan;

const PRODUCT_ROUNDS: usize = 3;

/// The rate of one product instruction on registers.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ProductRate {
    /// The instruction.
    pub name: &'static str,
    /// What it multiplies.
    pub precision: Precision,
    /// 10^12 operations a second, two for each multiply-add.
    pub tera_ops: f64,
}

/// Main memory and products, measured one after the other.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Ceilings {
    /// Reading main memory.
    pub dram: DramRate,
    /// Products, the fastest of each precision last.
    pub products: Vec<ProductRate>,
}

impl Ceilings {
    /// Every product instruction that there is.
    pub(super) fn of_everything(
        workers: &dyn Workers,
        weights: &[u8],
        plan: &Plan,
    ) -> Result<Self, CpuError> {
        Self::measure(workers, weights, plan, Products::available())
    }

    /// The product instruction that the engine's kernels for `format` use.
    pub(super) fn of_format(
        engine: &Engine,
        weights: &[u8],
        format: WeightFormat,
        plan: &Plan,
    ) -> Result<Self, CpuError> {
        let products = products_of(engine.isa(), precision_of(format));
        Self::measure(engine.workers().as_ref(), weights, plan, vec![products])
    }

    fn measure(
        workers: &dyn Workers,
        weights: &[u8],
        plan: &Plan,
        products: Vec<Products>,
    ) -> Result<Self, CpuError> {
        let dram = dram::read_rate(workers, weights, plan.read_rounds)?;
        let rate = |products: Products| {
            Ok(ProductRate {
                name: products.name(),
                precision: products.precision(),
                tera_ops: products.rate(workers, plan.product_time, PRODUCT_ROUNDS)? * 1e-12,
            })
        };
        let products: Result<_, CpuError> = products.into_iter().map(rate).collect();
        Ok(Self {
            dram,
            products: products?,
        })
    }

    /// The last, so the fastest, of the products measured.
    pub fn best_product(&self) -> Option<ProductRate> {
        self.products.last().copied()
    }
}

/// What the kernels of a format multiply: fp8 and fp4 weights are widened to bf16.
fn precision_of(format: WeightFormat) -> Precision {
    match format {
        WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => Precision::Int8,
        WeightFormat::Bf16
        | WeightFormat::Fp8Block128
        | WeightFormat::Nvfp4
        | WeightFormat::Mxfp4 => Precision::Bf16,
    }
}

/// The instruction that kernels of an instruction set multiply with: the first of these that the
/// processor has.
fn products_of(isa: Isa, precision: Precision) -> Products {
    let names: &[&str] = match (isa.name(), precision) {
        ("amx", Precision::Int8) => &["tdpbssd"],
        ("amx", Precision::Bf16) => &["tdpbf16ps"],
        ("avx512", Precision::Int8) => &["vpdpbusd zmm"],
        ("avx512", Precision::Bf16) => &["vdpbf16ps zmm", "vfmadd231ps zmm"],
        ("avx2", Precision::Int8) => &["vpdpbusd ymm", "vpmaddwd ymm"],
        ("avx2", Precision::Bf16) => &["vfmadd231ps ymm"],
        (_, Precision::Int8) => &["portable int8"],
        (_, Precision::Bf16) => &["portable f32"],
    };
    names
        .iter()
        .find_map(|name| Products::named(name))
        .unwrap_or_else(|| Products::best(precision))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_is_of_the_right_precision_on_every_instruction_set() {
        for isa in Isa::ALL {
            for precision in [Precision::Int8, Precision::Bf16] {
                assert_eq!(products_of(isa, precision).precision(), precision, "{isa}");
            }
        }
    }
}
