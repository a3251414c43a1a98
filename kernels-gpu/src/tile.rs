//! Tile shapes of the grouped GEMM and the shared memory they need.
//!
//! Two consumer warpgroups share a tile; each owns 64 rows x 128 columns of
//! accumulators. Stacked along M they make the square tile, side by side along N
//! the one for experts with few rows, whose weights are then read once:
//!
//! ```text
//! M128N128: | consumer 0 |      M64N256: | consumer 0 | consumer 1 |
//!           | consumer 1 |
//! ```
//!
//! One stage holds 128 bytes of K (64 bf16 or 128 int8) of both operands, in rows of
//! 128 bytes with the 128-byte swizzle:
//!
//! ```text
//! stage 0 .. S-1: A tile | B tile     (each 1024-byte aligned)
//! staging         2 x 64 rows x 128 columns of bf16
//! barriers        full[S], empty[S]
//! ```

/// Bytes of K in one stage and of one swizzled row.
pub const STEP_BYTES: u32 = 128;
/// Weight rows of a panel.
pub const PANEL_ROWS: u32 = asym_gemm_formats::bank::PANEL_ROWS as u32;
/// Rows of D that one warpgroup accumulates.
pub const WARPGROUP_M: u32 = 64;
/// Columns of D that one warpgroup accumulates.
pub const WARPGROUP_N: u32 = 128;
/// Consumer warpgroups.
pub const CONSUMERS: u32 = 2;
/// Threads of a block: one producer warpgroup and the consumers.
pub const THREADS: u32 = 128 * (1 + CONSUMERS);
/// Rows that one TMA load of A takes.
pub const A_BOX_ROWS: u32 = 64;
/// Weight rows that one TMA load of B takes: 8 panels of 16.
pub const B_BOX_ROWS: u32 = 128;
/// Bytes of the staging area of one consumer for bf16 output.
pub const STAGING_BYTES: u32 = WARPGROUP_M * WARPGROUP_N * 2;

/// A tile shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of D (tokens).
    pub m: u32,
    /// Columns of D (weight rows).
    pub n: u32,
    /// Depth of the ring.
    pub stages: u32,
}

/// 128 x 128, six stages.
pub const M128N128: Tile = Tile {
    m: 128,
    n: 128,
    stages: 6,
};
/// 64 x 256, four stages: for experts of at most 64 rows.
pub const M64N256: Tile = Tile {
    m: 64,
    n: 256,
    stages: 4,
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

    /// Bytes of a stage: what one full barrier expects.
    pub const fn stage_bytes(self) -> u32 {
        self.a_bytes() + self.b_bytes()
    }

    /// Offset of the staging area.
    pub const fn staging_offset(self) -> u32 {
        self.stages * self.stage_bytes()
    }

    /// Offset of the full barriers; the empty ones follow.
    pub const fn barrier_offset(self) -> u32 {
        self.staging_offset() + CONSUMERS * STAGING_BYTES
    }

    /// Dynamic shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        self.barrier_offset() + 2 * self.stages * 8
    }

    /// Consumers stacked along M (the others lie side by side along N).
    pub const fn consumers_m(self) -> u32 {
        self.m / WARPGROUP_M
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
    let tiles = [M128N128, M64N256];
    let mut i = 0;
    while i < tiles.len() {
        let t = tiles[i];
        assert!(t.shared_bytes() <= SM90_SHARED);
        assert!(t.a_bytes().is_multiple_of(1024) && t.b_bytes().is_multiple_of(1024));
        assert!(t.m * t.n == CONSUMERS * WARPGROUP_M * WARPGROUP_N);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

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
