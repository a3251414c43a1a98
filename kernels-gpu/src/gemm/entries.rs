//! The kernels' entry points: a format and a tile each.

use super::Operands;
use super::format::{Bf16, Fp8Blocks, Fp8PerRow, Int8Blocks, Int8PerRow, Int8Slices};
use super::kernel::{Maps, grouped_gemm};
use crate::args::GemmArgs;
use crate::tile::{M64N256, M128N128, M128N192, M128N256, Tile};
use cuda_std::prelude::*;

macro_rules! entry {
    ($name:ident, $format:ident, $tile:ident) => {
        /// # Safety
        /// See [`grouped_gemm`].
        #[kernel(threads = 384, min_blocks = 1)]
        pub(crate) unsafe fn $name(
            #[grid_constant] a_map: &TensorMap,
            #[grid_constant] b_map: &TensorMap,
            args: GemmArgs,
        ) {
            const TILE: Tile = $tile;
            const REGISTERS: usize = TILE.warpgroup_n() as usize / 2;
            let maps = Maps {
                a: a_map.address(),
                b: b_map.address(),
            };
            // SAFETY: the launcher keeps the kernel's contract.
            unsafe {
                grouped_gemm::<$format, [f32; REGISTERS]>(TILE, Operands::$format, maps, &args)
            }
        }
    };
}

entry!(sm90_bf16_grouped_gemm_128x256x64, Bf16, M128N256);
entry!(sm90_bf16_grouped_gemm_64x256x64, Bf16, M64N256);
entry!(
    sm90_s8_per_row_grouped_gemm_128x256x128,
    Int8PerRow,
    M128N256
);
entry!(sm90_s8_per_row_grouped_gemm_64x256x128, Int8PerRow, M64N256);
entry!(
    sm90_s8_slices_grouped_gemm_128x192x128,
    Int8Slices,
    M128N192
);
entry!(sm90_s8_slices_grouped_gemm_64x256x128, Int8Slices, M64N256);
entry!(
    sm90_s8_blocks_grouped_gemm_128x128x128,
    Int8Blocks,
    M128N128
);
entry!(sm90_s8_blocks_grouped_gemm_64x256x128, Int8Blocks, M64N256);
entry!(
    sm90_e4m3_per_row_grouped_gemm_128x192x128,
    Fp8PerRow,
    M128N192
);
entry!(
    sm90_e4m3_per_row_grouped_gemm_64x256x128,
    Fp8PerRow,
    M64N256
);
entry!(
    sm90_e4m3_blocks_grouped_gemm_128x192x128,
    Fp8Blocks,
    M128N192
);
entry!(sm90_e4m3_blocks_grouped_gemm_64x256x128, Fp8Blocks, M64N256);
