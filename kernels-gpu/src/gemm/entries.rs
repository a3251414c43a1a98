//! The kernels' entry points: a format and a tile each, in the format's module.

use super::kernel::{Maps, grouped_gemm};
use super::{Operands, format};
use crate::args::GemmArgs;
use crate::tile::{self, Tile};
use cuda_std::prelude::*;

macro_rules! entry {
    ($family:literal, $format:ident, $name:ident, $tile:ident) => {
        /// # Safety
        /// See [`grouped_gemm`].
        #[cfg(feature = $family)]
        #[kernel(threads = 384, min_blocks = 1)]
        pub(crate) unsafe fn $name(
            #[grid_constant] a_map: &TensorMap,
            #[grid_constant] b_map: &TensorMap,
            args: GemmArgs,
        ) {
            const TILE: Tile = tile::$tile;
            const REGISTERS: usize = TILE.warpgroup_n() as usize / 2;
            let maps = Maps {
                a: a_map.address(),
                b: b_map.address(),
            };
            // SAFETY: the launcher keeps the kernel's contract.
            unsafe {
                grouped_gemm::<format::$format, [f32; REGISTERS]>(
                    TILE,
                    Operands::$format,
                    maps,
                    &args,
                )
            }
        }
    };
}

entry!(
    "gemm-bf16",
    Bf16,
    sm90_bf16_grouped_gemm_128x256x64,
    M128N256
);
entry!("gemm-bf16", Bf16, sm90_bf16_grouped_gemm_64x256x64, M64N256);
entry!(
    "gemm-s8-per-row",
    Int8PerRow,
    sm90_s8_per_row_grouped_gemm_128x256x128,
    M128N256
);
entry!(
    "gemm-s8-per-row",
    Int8PerRow,
    sm90_s8_per_row_grouped_gemm_64x256x128,
    M64N256
);
entry!(
    "gemm-s8-slices",
    Int8Slices,
    sm90_s8_slices_grouped_gemm_128x192x128,
    M128N192
);
entry!(
    "gemm-s8-slices",
    Int8Slices,
    sm90_s8_slices_grouped_gemm_64x256x128,
    M64N256
);
entry!(
    "gemm-s8-blocks",
    Int8Blocks,
    sm90_s8_blocks_grouped_gemm_128x128x128,
    M128N128
);
entry!(
    "gemm-s8-blocks",
    Int8Blocks,
    sm90_s8_blocks_grouped_gemm_64x256x128,
    M64N256
);
entry!(
    "gemm-e4m3-per-row",
    Fp8PerRow,
    sm90_e4m3_per_row_grouped_gemm_128x192x128,
    M128N192
);
entry!(
    "gemm-e4m3-per-row",
    Fp8PerRow,
    sm90_e4m3_per_row_grouped_gemm_64x256x128,
    M64N256
);
entry!(
    "gemm-e4m3-blocks",
    Fp8Blocks,
    sm90_e4m3_blocks_grouped_gemm_128x192x128,
    M128N192
);
entry!(
    "gemm-e4m3-blocks",
    Fp8Blocks,
    sm90_e4m3_blocks_grouped_gemm_64x256x128,
    M64N256
);
