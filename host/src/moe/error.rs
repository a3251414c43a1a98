//! Errors of MoE layers.

use super::division::DivisionError;
use super::layout::LayoutError;
use super::routing::RoutingError;
use asym_gemm_cpu::CpuError;

/// What can go wrong in building or running an MoE block.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// The input is not whole tokens.
    #[error("input of {len} values is not a multiple of the hidden size {hidden}")]
    Input {
        /// Number of values.
        len: usize,
        /// Width of a token.
        hidden: usize,
    },
    /// Parts of a block, or a routing, that do not fit each other.
    #[error("{what}: {found}, needed {needed}")]
    Parts {
        /// What does not fit.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The size it must have.
        needed: usize,
    },
    /// A back end was asked for that this block does not have.
    #[error("back end {backend}: {reason}")]
    Backend {
        /// The back end.
        backend: &'static str,
        /// Why it is not there, and what to do.
        reason: String,
    },
    /// The transfer ring is too small for the layer.
    #[error(
        "a ring of {ring_bytes} bytes has {slots} slots, each too small for an expert of {expert_bytes} bytes; give it at least {}",
        slots * expert_bytes
    )]
    Ring {
        /// Bytes of the ring.
        ring_bytes: usize,
        /// Slots of the ring.
        slots: usize,
        /// Bytes of one expert.
        expert_bytes: usize,
    },
    /// An id that is no expert.
    #[error("expert {expert} is not in 0..{experts}")]
    Expert {
        /// The id.
        expert: u32,
        /// Number of experts.
        experts: usize,
    },
    /// A policy's division does not cover the forward's work.
    #[error("the policy's division: {0}")]
    Division(#[from] DivisionError),
    /// The bank does not fit into memory.
    #[error(transparent)]
    Memory(#[from] crate::system::MemoryShort),
    /// Routing failed.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The routing does not make a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The CPU kernels refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The GPU kernels refused.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gemm(#[from] crate::gemm::GemmError),
    /// The driver failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Driver(#[from] crate::driver::DriverError),
}
