//! What the GPU tests share: a device or a reason, and weights from the test kit.
#![allow(dead_code, reason = "each test program uses its part")]

use asym_gemm::cpu::ExpertSource;
use asym_gemm::driver::Gpu;
use asym_gemm::formats::bank::Projection;
use asym_gemm_kernels_gpu::{elementwise, gemm};
use asym_gemm_testkit::reference::ExpertWeights;

/// GPU 0 with the kernels loaded, or why there is none.
pub(crate) fn gpu() -> Result<Gpu, String> {
    let open = || {
        let gpu = Gpu::open(0)?;
        gpu.module(gemm::FAMILY)?;
        gpu.module(elementwise::FAMILY)?;
        Ok::<Gpu, asym_gemm::driver::DriverError>(gpu)
    };
    open().map_err(|error| error.to_string())
}

/// The test kit's weights as a bank takes them.
pub(crate) struct Source<'a>(pub(crate) &'a ExpertWeights);

impl ExpertSource for Source<'_> {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        let matrix = match projection {
            Projection::Gate => &self.0.gate,
            Projection::Up => &self.0.up,
            Projection::Down => &self.0.down,
        };
        out.copy_from_slice(&matrix[row * out.len()..(row + 1) * out.len()]);
    }

    fn bias(&self, projection: Projection) -> Option<&[f32]> {
        match projection {
            Projection::Gate => self.0.gate_bias.as_deref(),
            Projection::Up => self.0.up_bias.as_deref(),
            Projection::Down => self.0.down_bias.as_deref(),
        }
    }
}
