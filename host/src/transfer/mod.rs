//! How weights reach the GPU.
//!
//! - **staged**: the copy engine brings them into a small ring in HBM, chunk by chunk, while
//!   the kernels work on the chunk before; over PCIe this is the full rate of the link;
//! - **direct**: the kernels read pinned host memory themselves, at the (lower) rate of reads
//!   by the SMs; the only way inside a graph, since the host need not know which experts have
//!   rows. Each weight crosses the link once: where row tiles share it, some blocks relay it
//!   to the others;
//! - **resident**: the weights are in HBM already.

mod chunks;
mod probe;
mod ring;

pub use chunks::{Chunk, chunks};
pub use probe::{LinkRates, measure_link};
pub use ring::Ring;

/// Way of the weights to the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transfer {
    /// Chosen by the plan.
    Auto,
    /// Read by the kernels from pinned host memory.
    Direct,
    /// Copied through a ring in HBM.
    Staged,
    /// Kept in HBM.
    Resident,
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Resident => "resident",
        })
    }
}

/// Bytes of HBM that a ring takes unless told otherwise.
pub const DEFAULT_RING_BYTES: usize = 256 << 20;
/// Bytes of a ring for experts of `expert_bytes`: [`DEFAULT_RING_BYTES`], or what three of
/// them need.
pub fn ring_bytes_for(expert_bytes: usize) -> usize {
    DEFAULT_RING_BYTES.max(RING_SLOTS * expert_bytes)
}

/// Slots of a ring: one being filled, one being used, one in reserve so that neither waits.
pub const RING_SLOTS: usize = 3;
/// Copies are merged up to this: each has a fixed cost, which short ones do not spread.
pub const CHUNK_BYTES: usize = 16 << 20;
