//! What a grouped GEMM will do, as a value that prints.

use super::{GemmError, WeightMemory};
use crate::transfer::Transfer;

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
    /// Blocks that relay weights from host memory to the others; 0 if each loads its own.
    pub couriers: u32,
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
            couriers: 0,
            weight_bytes: 0,
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} ({}), {} chunks, {} couriers, {:.1} MB of weights",
            self.kernel,
            self.transfer,
            self.transfer_source,
            self.chunks,
            self.couriers,
            self.weight_bytes as f64 / 1e6
        )
    }
}

/// The transfer for weights in `memory`, and where the choice came from.
///
/// Over PCIe the copy engine is faster than reads by the SMs, so those are for callers that
/// ask for them.
///
/// # Errors
/// If the weights cannot come that way from where they are.
pub(super) fn choose_transfer(
    requested: Transfer,
    memory: WeightMemory<'_>,
) -> Result<(Transfer, &'static str), GemmError> {
    let place = match (requested, memory) {
        (Transfer::Auto, WeightMemory::Pinned(_)) => {
            return Ok((Transfer::Staged, "default for pinned host memory"));
        }
        (Transfer::Auto, WeightMemory::Device(_)) => {
            return Ok((Transfer::Resident, "weights are on the device"));
        }
        (Transfer::Staged | Transfer::Direct, WeightMemory::Pinned(_))
        | (Transfer::Resident, WeightMemory::Device(_)) => return Ok((requested, "requested")),
        (_, WeightMemory::Pinned(_)) => "in pinned host memory",
        (_, WeightMemory::Device(_)) => "on the device",
    };
    Err(GemmError::Unsupported {
        what: "transfer",
        reason: format!("{requested} is not possible for weights {place}"),
    })
}
