//! GEMM in three forms on CPU and GPU, and the expert GEMM over weights in host memory.
//!
//! **General**: D = α·op(A)·op(B) + β·C for one problem ([`single`]), for many with the same
//! parameters ([`batched`], [`strided_batched`]) or with their own ([`grouped`]); [`Gemm`] holds the
//! parameters, [`Matrix`] and [`MatrixMut`] are views whose storage order is part of their type.
//! These run on the CPU; `GpuGemm` has the same calls over views of device (or, for what is read,
//! pinned) memory. On the same vocabulary: [`route_top_k`], [`pack`], [`gather_rows`],
//! [`grouped_nt`] and [`combine`], the steps of an MoE layer.
//!
//! **Expert GEMM** (feature `cuda`): D[rows of group g] = A[rows of group g] · B[weight of g]^T.
//!
//! `GroupedGemm` takes borrowed, checked views of A and D on the device and of B in pinned
//! host memory or on the device, makes a `Plan` (kernel, tile, transfer, chunks: a value
//! that prints) and runs it. Nothing is written outside the groups' rows and D's columns.
//! `m_grouped_{bf16,fp8,int8}_asym_gemm_nt_{contiguous,masked}` are the same calls for the
//! packings that Python systems use: ranges with expert ids, an id for each row
//! (`Packing`), or a number of rows for each expert (`masked_groups`).

#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod entries;
#[cfg(feature = "cuda")]
mod error;
mod experts;
#[cfg(feature = "cuda")]
mod format;
#[cfg(feature = "cuda")]
mod grouped;
#[cfg(feature = "cuda")]
mod groups;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
#[cfg(feature = "cuda")]
mod matrix;
#[cfg(feature = "cuda")]
mod packing;
#[cfg(feature = "cuda")]
mod plan;
#[cfg(feature = "cuda")]
mod problem;
#[cfg(feature = "cuda")]
mod relay;

#[cfg(feature = "cuda")]
pub use entries::{
    m_grouped_bf16_asym_gemm_nt_contiguous, m_grouped_bf16_asym_gemm_nt_masked,
    m_grouped_fp8_asym_gemm_nt_contiguous, m_grouped_fp8_asym_gemm_nt_masked,
    m_grouped_int8_asym_gemm_nt_contiguous, m_grouped_int8_asym_gemm_nt_masked,
};
#[cfg(feature = "cuda")]
pub use error::GemmError;
#[cfg(feature = "cuda")]
pub use format::MatrixFormat;
#[cfg(feature = "cuda")]
pub use grouped::GroupedGemm;
#[cfg(feature = "cuda")]
pub(crate) use groups::tiles;
#[cfg(feature = "cuda")]
pub use groups::{DeviceGroups, GroupRange};
#[cfg(feature = "cuda")]
pub(crate) use launch::{Launch, Launcher, map_a, map_expert};
#[cfg(feature = "cuda")]
pub use matrix::{Activations, DeviceMatrix, DeviceMatrixMut, Output, WeightMemory, Weights};
#[cfg(feature = "cuda")]
pub use packing::{Packing, masked_groups};
#[cfg(feature = "cuda")]
pub use plan::Plan;

pub use crate::moe::layout::{Packed, pack};
pub use asym_gemm_cpu::dense::{
    Batch, C, CheckedOperand, ColMajor, DenseError, Element, Extent, Gemm, Group, Layout, Matrix,
    MatrixMut, Multiply, Op, Output as OutputElement, Problem, RowMajor, Scalar, Strided,
    StridedMut, batched, grouped, single, strided_batched,
};
pub use asym_gemm_cpu::{Combine, combine};
#[cfg(feature = "cuda")]
pub use device::{GpuElement, GpuGemm, GpuProblem, OnGpu, ScatterPlan, Scattered};
pub use experts::{gather_rows, grouped_nt, route_top_k};
