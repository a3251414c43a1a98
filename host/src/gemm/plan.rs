//! What a grouped GEMM will do, as a value that prints.

use crate::transfer::Transfer;
use asym_gemm_kernels_gpu::tile::{M64N256, M128N128, Tile};

/// Kernel, tile and transfer of a call, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// Symbol of the kernel.
    pub kernel: &'static str,
    /// Transfer used; never `Auto`.
    pub transfer: Transfer,
    /// Where that choice came from.
    pub transfer_source: &'static str,
    /// Copies through the ring.
    pub chunks: usize,
    /// Weight bytes that cross the link (or, resident, are read from HBM).
    pub weight_bytes: usize,
}

impl Plan {
    /// The plan of a call without rows: no launch, no byte moved.
    pub(super) fn nothing(transfer: Transfer) -> Self {
        Self {
            kernel: "none",
            transfer,
            transfer_source: "no rows",
            chunks: 0,
            weight_bytes: 0,
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} ({}), {} chunks, {:.1} MB of weights",
            self.kernel,
            self.transfer,
            self.transfer_source,
            self.chunks,
            self.weight_bytes as f64 / 1e6
        )
    }
}

/// The tile for groups of at most `max_rows` rows: up to 64 rows the weights are read once
/// and no row tile is half empty.
pub fn choose_tile(max_rows: usize) -> Tile {
    if max_rows <= M64N256.m as usize {
        M64N256
    } else {
        M128N128
    }
}

/// The transfer for weights in pinned memory.
///
/// Direct reads fetch an expert once for each row tile, so they are right only where the
/// caller asks for them or nothing else is possible; the copy engine is faster over PCIe.
pub(super) fn choose_transfer(requested: Transfer) -> (Transfer, &'static str) {
    match requested {
        Transfer::Auto => (Transfer::Staged, "default for pinned host memory"),
        other => (other, "requested"),
    }
}
