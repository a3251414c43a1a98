//! What the integration tests of the public API share.

use asym_gemm::cpu::{Engine, ExpertSource};
use asym_gemm::driver::{DriverError, Gpu};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::bank::{BankGeometry, Projection};
use asym_gemm::moe::{ExpertBank, MoeError};
use asym_gemm_kernels_gpu::{elementwise, gemm::Operands};
use asym_gemm_testkit::reference::ExpertWeights;
use std::path::{Path, PathBuf};

/// Every weight format.
pub const FORMATS: [WeightFormat; 6] = WeightFormat::ALL;

/// Those that the GPU computes experts in.
pub const GPU_FORMATS: [WeightFormat; 3] = [
    WeightFormat::Bf16,
    WeightFormat::Int8PerRow,
    WeightFormat::Int8Block128,
];

/// Whether every bit of a result is defined.
pub fn is_exact(format: WeightFormat) -> bool {
    matches!(
        format,
        WeightFormat::Int8PerRow | WeightFormat::Int8Block128
    )
}

/// Folder of a checked-in checkpoint: in `ASYM_GEMM_FIXTURES` if that is set, otherwise where
/// this package was compiled.
pub fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("ASYM_GEMM_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"),
        PathBuf::from,
    );
    folder.join(name)
}

/// GPU 0 if every kernel is for it, or why there is none.
///
/// # Errors
/// The reason, for a test to skip with.
pub fn gpu() -> Result<Gpu, String> {
    let open = || {
        let gpu = Gpu::open(0)?;
        for operands in Operands::ALL {
            gpu.check_module(operands.family())?;
        }
        gpu.check_module(elementwise::FAMILY)?;
        Ok::<Gpu, DriverError>(gpu)
    };
    open().map_err(|error| error.to_string())
}

/// An engine for each instruction set of this processor, the portable one first.
///
/// # Panics
/// If one that is said to be there is not.
pub fn engines() -> Vec<Engine> {
    let isas = Engine::available();
    isas.into_iter()
        .map(|isa| Engine::with_isa(isa).expect("an ISA that is there"))
        .collect()
}

/// The reference's weights as a source of a bank.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a>(pub &'a ExpertWeights);

impl ExpertSource for Source<'_> {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        let (matrix, k) = match projection {
            Projection::Gate => (&self.0.gate, self.0.hidden),
            Projection::Up => (&self.0.up, self.0.hidden),
            Projection::Down => (&self.0.down, self.0.intermediate),
        };
        out.copy_from_slice(&matrix[row * k..][..k]);
    }

    fn bias(&self, projection: Projection) -> Option<&[f32]> {
        let bias = match projection {
            Projection::Gate => &self.0.gate_bias,
            Projection::Up => &self.0.up_bias,
            Projection::Down => &self.0.down_bias,
        };
        bias.as_deref()
    }
}

/// Geometry of a bank of `experts`, which are of one shape.
///
/// # Panics
/// If there is no expert.
pub fn geometry(format: WeightFormat, experts: &[ExpertWeights]) -> BankGeometry {
    let first = experts.first().expect("an expert");
    BankGeometry {
        experts: experts.len(),
        hidden: first.hidden,
        intermediate: first.intermediate,
        format,
        bias: first.down_bias.is_some(),
    }
}

/// A bank of `experts` in ordinary memory.
///
/// # Errors
/// If the weights do not make a bank.
///
/// # Panics
/// If there is no expert.
pub fn bank(format: WeightFormat, experts: &[ExpertWeights]) -> Result<ExpertBank, MoeError> {
    ExpertBank::plain(
        geometry(format, experts),
        |expert| Source(&experts[expert]),
        || {},
    )
}
