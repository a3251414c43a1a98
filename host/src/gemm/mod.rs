//! Grouped GEMM on the GPU: D[rows of group g] = A[rows of group g] · B[weight of g]^T.
//!
//! [`GroupedGemm`] takes borrowed, checked views of A and D on the device and of B in pinned
//! host memory or on the device, makes a [`Plan`] (kernel, tile, transfer, chunks: a value
//! that prints) and runs it. Nothing is written outside the groups' rows and D's columns.

mod error;
mod format;
mod grouped;
mod groups;
mod launch;
mod matrix;
mod plan;
mod problem;
mod relay;

pub use error::GemmError;
pub use format::MatrixFormat;
pub use grouped::GroupedGemm;
pub(crate) use groups::tiles;
pub use groups::{DeviceGroups, GroupRange};
pub(crate) use launch::{Launch, Launcher, map_a, map_expert};
pub use matrix::{Activations, DeviceMatrix, DeviceMatrixMut, Output, WeightMemory, Weights};
pub use plan::Plan;
