//! General GEMM on one GPU: the calls of the CPU over views of GPU memory.
//!
//! All problems of a call run in one launch of a persistent kernel that takes any stride
//! (`asym_gemm_kernels_gpu::dense`). Large bf16 products whose K is contiguous and 16-byte aligned,
//! with α = 1 and no C, run on the tensor-core kernels of the expert GEMM instead. Operands that
//! are read may lie in pinned host memory: they are copied to the device first, in stream order.

mod fast;
mod operands;
mod run;
mod scatter;

pub use operands::{GpuElement, GpuProblem, OnGpu};
pub use run::GpuGemm;
pub use scatter::{ScatterPlan, Scattered};
