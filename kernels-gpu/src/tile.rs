//! Tile shapes of the grouped GEMM and the shared memory they need.
//!
//! Two consumer warpgroups share a tile, 64 rows of accumulators each. They are stacked
//! along M, or lie side by side along N in the tile for experts with few rows, whose
//! weights are then read once:
//!
//! ```text
//! M128N256, M128N192, M128N128: | consumer 0 |      M64N256: | consumer 0 | consumer 1 |
//!                               | consumer 1 |
//! ```
//!
//! One stage holds 128 bytes of K (64 bf16, or 128 int8 or e4m3) of both operands, in rows
//! of 128 bytes with the 128-byte swizzle:
//!
//! ```text
//! stage 0 .. S-1   A tile | B tile                  (each 1024-byte aligned)
//! staging          8 warps x 16 rows of bf16: 64 columns, or all and 16 bytes
//! step scales      C x 4 steps x (f32 for each row | f32 for each column)
//! tile values      2 x (coordinates | row scales, column scales, bias: f32)
//! barriers         full and empty: S of the stages, C of the scales, 2 of the values
//! ```

/// Bytes of K in one stage and of one swizzled row.
pub const STEP_BYTES: u32 = 128;
/// Weight rows of a panel.
pub const PANEL_ROWS: u32 = asym_gemm_formats::bank::PANEL_ROWS as u32;
/// Rows of D that one warpgroup accumulates.
pub const WARPGROUP_M: u32 = 64;
/// Consumer warpgroups.
pub const CONSUMERS: u32 = 2;
/// Threads of a block: one producer warpgroup and the consumers.
pub const THREADS: u32 = 128 * (1 + CONSUMERS);
/// Rows that one TMA load of A takes.
pub const A_BOX_ROWS: u32 = 64;
/// Weight rows that one TMA load of B takes: 4 panels of 16.
pub const B_BOX_ROWS: u32 = 64;
/// Bytes of one box of B in shared memory.
pub const B_BOX_BYTES: u32 = B_BOX_ROWS * STEP_BYTES;
/// Rows of D that one warp accumulates and stages.
pub const WARP_ROWS: u32 = 16;
/// Columns of D that a warp stages at a time: one swizzled row of bf16.
pub const STAGING_COLUMNS: u32 = STEP_BYTES / 2;
/// Bytes of one warp's staging area for 64 columns of bf16.
pub const STAGING_BYTES: u32 = WARP_ROWS * STEP_BYTES;
/// Steps of K whose scales come together: four neighbours of a row of scales are one access
/// to the L2 cache.
pub const SCALE_STEPS: u32 = 4;
/// Buffers of tile values: one in use, one being filled.
pub const VALUE_BUFFERS: u32 = 2;

/// Bytes of a tile's coordinates, as the consumers read them.
pub const COORDINATES_BYTES: u32 = 32;

/// A tile shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of D (tokens).
    pub m: u32,
    /// Columns of D (weight rows).
    pub n: u32,
    /// Depth of the ring.
    pub stages: u32,
    /// Bytes of one warp's staging area: [`STAGING_BYTES`], or room for whole rows.
    pub staging_bytes: u32,
    /// Buffers of [`SCALE_STEPS`] steps' scales; none in a tile for formats without them.
    pub scale_buffers: u32,
}

/// Bytes from one row of `columns` bf16 to the next in a staging area: 16 more than the row has,
/// so that eight rows' chunks lie in different banks.
const fn row_pitch(columns: u32) -> u32 {
    columns * 2 + 16
}

/// Staging area of a warp for whole rows of `columns` bf16.
const fn whole_rows(columns: u32) -> u32 {
    WARP_ROWS * row_pitch(columns)
}

/// 128 x 256, four stages: the least traffic for each operation, where one accumulator a
/// thread and element suffices.
pub const M128N256: Tile = Tile {
    m: 128,
    n: 256,
    stages: 4,
    staging_bytes: STAGING_BYTES,
    scale_buffers: 0,
};
/// 128 x 192, four stages: the widest that leaves registers for a second accumulator.
pub const M128N192: Tile = Tile {
    m: 128,
    n: 192,
    stages: 4,
    staging_bytes: whole_rows(192),
    scale_buffers: 2,
};
/// 128 x 128, four stages: where scales of columns take registers too.
pub const M128N128: Tile = Tile {
    m: 128,
    n: 128,
    stages: 4,
    staging_bytes: whole_rows(128),
    scale_buffers: 4,
};
/// 64 x 256, four stages: for experts of at most 64 rows.
pub const M64N256: Tile = Tile {
    m: 64,
    n: 256,
    stages: 4,
    staging_bytes: whole_rows(128),
    scale_buffers: 2,
};

impl Tile {
    /// Bytes of A in a stage.
    pub const fn a_bytes(self) -> u32 {
        self.m * STEP_BYTES
    }

    /// Bytes of B in a stage.
    pub const fn b_bytes(self) -> u32 {
        self.n * STEP_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        self.a_bytes() + self.b_bytes()
    }

    /// Offset of the staging area.
    pub const fn staging_offset(self) -> u32 {
        self.stages * self.stage_bytes()
    }

    /// Bytes from one whole row to the next in a warp's staging area.
    pub const fn staging_pitch(self) -> u32 {
        row_pitch(self.warpgroup_n())
    }

    /// Offset of the scales of steps.
    pub const fn step_scales_offset(self) -> u32 {
        self.staging_offset() + CONSUMERS * 4 * self.staging_bytes
    }

    /// Bytes of one step's scales: rows, then columns.
    pub const fn step_scales_bytes(self) -> u32 {
        (self.m + self.n) * 4
    }

    /// Offset of the values that come with each tile.
    pub const fn values_offset(self) -> u32 {
        self.step_scales_offset() + self.scale_buffers * SCALE_STEPS * self.step_scales_bytes()
    }

    /// Bytes of one tile's values: coordinates, row scales, column scales, bias.
    pub const fn values_bytes(self) -> u32 {
        COORDINATES_BYTES + (self.m + 2 * self.n) * 4
    }

    /// Offset of the barriers.
    pub const fn barrier_offset(self) -> u32 {
        self.values_offset() + VALUE_BUFFERS * self.values_bytes()
    }

    /// Dynamic shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        self.barrier_offset() + 2 * (self.stages + self.scale_buffers + VALUE_BUFFERS) * 8
    }

    /// Consumers stacked along M (the others lie side by side along N).
    pub const fn consumers_m(self) -> u32 {
        self.m / WARPGROUP_M
    }

    /// Columns of D that one warpgroup accumulates.
    pub const fn warpgroup_n(self) -> u32 {
        self.n * self.consumers_m() / CONSUMERS
    }

    /// Boxes of B in a stage.
    pub const fn b_boxes(self) -> u32 {
        self.n / B_BOX_ROWS
    }

    /// Boxes of B that have weight rows, in a tile at `column` of `n`: others are not loaded,
    /// since their columns are not stored.
    #[inline(always)]
    pub const fn used_boxes(self, column: u32, n: u32) -> u32 {
        let needed = (n - column).div_ceil(B_BOX_ROWS);
        if needed < self.b_boxes() {
            needed
        } else {
            self.b_boxes()
        }
    }
}

/// XOR of the 16-byte chunk index with the row, as TMA and wgmma's 128-byte swizzle do:
/// the byte offset of chunk `chunk` (0..8) of row `row` in a tile of 128-byte rows.
pub const fn swizzled_chunk(row: u32, chunk: u32) -> u32 {
    row * STEP_BYTES + ((chunk ^ (row & 7)) << 4)
}

const _: () = {
    /// Dynamic shared memory that a block may ask for on sm_90.
    const SM90_SHARED: u32 = 232_448;
    let tiles = [M128N256, M128N192, M128N128, M64N256];
    let mut i = 0;
    while i < tiles.len() {
        let t = tiles[i];
        assert!(t.shared_bytes() <= SM90_SHARED);
        assert!(t.a_bytes().is_multiple_of(1024) && t.b_bytes().is_multiple_of(1024));
        assert!(t.barrier_offset().is_multiple_of(8));
        assert!(t.stages.is_power_of_two() && VALUE_BUFFERS.is_power_of_two());
        assert!(t.scale_buffers == 0 || t.scale_buffers.is_power_of_two());
        assert!(t.m * t.n == CONSUMERS * WARPGROUP_M * t.warpgroup_n());
        // Tiles of formats that add step by step hold whole rows.
        assert!(t.staging_bytes >= STAGING_BYTES);
        assert!(t.scale_buffers == 0 || t.staging_bytes == WARP_ROWS * t.staging_pitch());
        assert!(t.staging_pitch() % 128 == 16);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_past_n_are_not_used() {
        for (column, n, want) in [
            (0, 1, 1),
            (0, 64, 1),
            (0, 65, 2),
            (192, 4096, 3),
            (4032, 4096, 1),
        ] {
            assert_eq!(M128N192.used_boxes(column, n), want);
        }
    }

    #[test]
    fn swizzle_is_a_bijection_without_bank_conflicts() {
        let mut seen = [false; 64 * 8];
        for row in 0..64 {
            for chunk in 0..8 {
                let offset = swizzled_chunk(row, chunk);
                assert_eq!(offset % 16, 0);
                assert!(!std::mem::replace(&mut seen[offset as usize / 16], true));
            }
        }
        // Eight rows of one chunk, as stmatrix writes and wgmma reads them, touch all 32 banks.
        for chunk in 0..8 {
            let mut banks = [0; 32];
            for row in 0..8 {
                for word in 0..4 {
                    banks[(swizzled_chunk(row, chunk) as usize / 4 + word) % 32] += 1;
                }
            }
            assert_eq!(banks, [1; 32]);
        }
    }
}
