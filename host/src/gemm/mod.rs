//! Grouped GEMM on the GPU: D[rows of group g] = A[rows of group g] · B[weight of g]^T.
//!
//! [`GroupedGemm`] takes borrowed, checked views of A and D on the device and of B in pinned
//! host memory or on the device, makes a [`Plan`] (kernel, tile, transfer, chunks: a value
//! that prints) and runs it. Nothing is written outside the groups' rows and D's columns.
//! `m_grouped_{bf16,fp8,int8}_asym_gemm_nt_{contiguous,masked}` are the same calls for the
//! packings that Python systems use: ranges with expert ids, an id for each row
//! ([`Packing`]), or a number of rows for each expert ([`masked_groups`]).

mod entries;
mod error;
mod format;
mod grouped;
mod groups;
mod launch;
mod matrix;
mod packing;
mod plan;
mod problem;
mod relay;

pub use entries::{
    m_grouped_bf16_asym_gemm_nt_contiguous, m_grouped_bf16_asym_gemm_nt_masked,
    m_grouped_fp8_asym_gemm_nt_contiguous, m_grouped_fp8_asym_gemm_nt_masked,
    m_grouped_int8_asym_gemm_nt_contiguous, m_grouped_int8_asym_gemm_nt_masked,
};
pub use error::GemmError;
pub use format::MatrixFormat;
pub use grouped::GroupedGemm;
pub(crate) use groups::tiles;
pub use groups::{DeviceGroups, GroupRange};
pub(crate) use launch::{Launch, Launcher, map_a, map_expert};
pub use matrix::{Activations, DeviceMatrix, DeviceMatrixMut, Output, WeightMemory, Weights};
pub use packing::{Packing, masked_groups};
pub use plan::Plan;
