//! Grouped GEMM for sm_90a: D[rows of group g] = A[rows of group g] · B[weight of g]^T.
//!
//! One persistent block an SM, three warpgroups: a producer whose single thread feeds a
//! ring of shared-memory stages by TMA (warps beside it bring scales and biases), and two
//! consumers that issue wgmma on them. Full and empty mbarriers carry the hand-over in both
//! directions; the producer runs ahead across tiles, so that a tile's epilogue overlaps the
//! next tile's loads. A tile's bf16 output is stored during the next tile's first steps.
//!
//! ```text
//! producer: for tile: for k: wait empty[s] -> expect bytes -> TMA A, TMA B -> s = s + 1
//! values:   for tile: scales of rows and columns, bias; for 4 steps of k: their scales
//! consumer: for tile: for k: wait full[s] -> 4 x wgmma -> release
//!                     epilogue: scales, bias, rounding -> D
//! ```
//!
//! Formats without a scale for each step sum over all of K in the tensor cores. The others,
//! and all of fp8, whose tensor-core sums are short of bits, add each step's product to f32
//! sums outside of them, one consumer while the other's products are under way.
//!
//! Rows are independent in the product, so a tile that runs past its group loads the
//! neighbour's rows (or TMA's zeros) and simply does not store them: any row start and
//! any count are right, whatever the padding holds.
//!
//! B comes row-major or from a bank's panels, from HBM or from pinned host memory: only
//! its tensor maps differ. Where several row tiles need the same weights from host memory,
//! some blocks relay them ([`crate::relay`]). The order of K is the same for every tile
//! shape, so results depend neither on the transfer nor on the number of rows.

use crate::tile::{M64N256, M128N128, M128N192, M128N256, Tile};

#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod consumer;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod courier;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod entries;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod epilogue;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod format;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod kernel;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod pipeline;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod producer;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod values;

/// Element type of the operands and where their scales enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operands {
    /// bf16, no scales; f32 accumulation over all of K.
    Bf16,
    /// int8, a scale for each row of A and of B: one exact i32 sum over K, scaled at the end.
    Int8PerRow,
    /// int8, a scale for each row and 128 of K of A, and for each row of B.
    Int8Slices,
    /// int8, a scale for each row and 128 of K of both.
    Int8Blocks,
    /// e4m3, a scale for each row of A and of B (or one for all): sums of 128 of K are added
    /// in f32 and scaled at the end.
    Fp8PerRow,
    /// e4m3, a scale for each row and 128 of K of A, and for each 128 rows and 128 of K of B.
    Fp8Blocks,
}

impl Operands {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::Bf16,
        Self::Int8PerRow,
        Self::Int8Slices,
        Self::Int8Blocks,
        Self::Fp8PerRow,
        Self::Fp8Blocks,
    ];

    /// Name of the PTX module with this kind's kernels.
    pub const fn family(self) -> &'static str {
        match self {
            Self::Bf16 => "gemm-bf16",
            Self::Int8PerRow => "gemm-s8-per-row",
            Self::Int8Slices => "gemm-s8-slices",
            Self::Int8Blocks => "gemm-s8-blocks",
            Self::Fp8PerRow => "gemm-e4m3-per-row",
            Self::Fp8Blocks => "gemm-e4m3-blocks",
        }
    }

    /// Elements of K in one step of 128 bytes.
    pub const fn step_k(self) -> u32 {
        match self {
            Self::Bf16 => 64,
            _ => 128,
        }
    }
}

/// The tile for groups of at most `max_rows` rows.
///
/// Up to 64 rows the weights are read once and no row tile is half empty. Beyond, the widest
/// for which the accumulators fit in registers.
pub const fn choose_tile(operands: Operands, max_rows: usize) -> Tile {
    if max_rows <= M64N256.m as usize {
        return M64N256;
    }
    match operands {
        Operands::Bf16 | Operands::Int8PerRow => M128N256,
        Operands::Int8Blocks => M128N128,
        _ => M128N192,
    }
}

/// The kernel's symbol for `operands` and `tile`, or `None` if there is no such tile.
pub const fn kernel_name(operands: Operands, tile: Tile) -> Option<&'static str> {
    Some(match (operands, tile.m, tile.n) {
        (Operands::Bf16, 128, 256) => "sm90_bf16_grouped_gemm_128x256x64",
        (Operands::Bf16, 64, 256) => "sm90_bf16_grouped_gemm_64x256x64",
        (Operands::Int8PerRow, 128, 256) => "sm90_s8_per_row_grouped_gemm_128x256x128",
        (Operands::Int8PerRow, 64, 256) => "sm90_s8_per_row_grouped_gemm_64x256x128",
        (Operands::Int8Slices, 128, 192) => "sm90_s8_slices_grouped_gemm_128x192x128",
        (Operands::Int8Slices, 64, 256) => "sm90_s8_slices_grouped_gemm_64x256x128",
        (Operands::Int8Blocks, 128, 128) => "sm90_s8_blocks_grouped_gemm_128x128x128",
        (Operands::Int8Blocks, 64, 256) => "sm90_s8_blocks_grouped_gemm_64x256x128",
        (Operands::Fp8PerRow, 128, 192) => "sm90_e4m3_per_row_grouped_gemm_128x192x128",
        (Operands::Fp8PerRow, 64, 256) => "sm90_e4m3_per_row_grouped_gemm_64x256x128",
        (Operands::Fp8Blocks, 128, 192) => "sm90_e4m3_blocks_grouped_gemm_128x192x128",
        (Operands::Fp8Blocks, 64, 256) => "sm90_e4m3_blocks_grouped_gemm_64x256x128",
        _ => return None,
    })
}
