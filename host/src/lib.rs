//! Mixture-of-Experts layers whose weights stay in host memory, on CPU and GPU.
//!
//! - [`checkpoint`]: an MoE layer from a Hugging Face checkpoint;
//! - [`convert`]: its experts in another format, for checkpoints larger than memory;
//! - [`moe`]: routing, the packed row layout, the expert bank and the whole block;
//! - [`dispatch`]: who computes what of a layer, by predicted time; what stays in GPU memory;
//! - [`gemm`]: single, batched and grouped GEMM on CPU and GPU, and the expert GEMM on the GPU;
//! - [`transfer`]: how weights reach the GPU, and what the link does;
//! - [`driver`]: devices, memory and kernels, over a driver loaded at run time;
//! - [`system`]: what this machine's CPU, memory and limits are;
//! - `bench`: the kernels against this machine's ceilings (feature `bench`).
//!
//! Without the `cuda` feature the crate is CPU only: `transfer`, `driver` and the GPU's part of
//! `gemm` are absent.

#[cfg(feature = "bench")]
pub mod bench;
pub mod checkpoint;
pub mod convert;
pub mod dispatch;
#[cfg(feature = "cuda")]
pub mod driver;
pub mod gemm;
pub mod moe;
pub mod system;
#[cfg(feature = "cuda")]
pub mod transfer;

pub use asym_gemm_cpu as cpu;
pub use asym_gemm_formats as formats;
