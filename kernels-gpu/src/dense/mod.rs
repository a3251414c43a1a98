//! General GEMM over strided matrices, for sm_80 and later: D = α·A·B + β·C for a list of problems.
//!
//! One persistent launch computes all problems. A block takes tiles of [`TILE`] x [`TILE`] elements
//! of D, found in the list by the number of its first tile; four warps compute 32 x 32 each.
//!
//! ```text
//! A tile, B tile:  64 rows (of A; columns of B) x 64 bytes of K, rows 80 bytes apart
//! buffers:         2: one is multiplied while the next step's elements are on their way
//! ```
//!
//! Elements come 16 bytes at a time where K is contiguous and aligned, and one by one, each under
//! its own bound, everywhere else: any stride, size and address is right. f16, bf16 and s8 use
//! `mma.sync`, f32 one fused multiply-add a product. Each element's order of sums depends on K
//! alone.
//!
//! [`scatter`] packs token rows by expert with atomic additions.

/// Name of the PTX module.
pub const FAMILY: &str = "dense";
/// Rows and columns of a tile of D.
pub const TILE: u32 = 64;
/// Threads of a block.
pub const THREADS: u32 = 128;
/// Bytes of K in a step.
pub const STEP_BYTES: u32 = 64;
/// Bytes from one row in shared memory to the next: no bank conflicts.
pub const ROW_BYTES: u32 = STEP_BYTES + 16;
/// Bytes of A and B of one step.
pub const BUFFER_BYTES: u32 = 2 * TILE * ROW_BYTES;
/// Dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = 2 * BUFFER_BYTES;
/// Blocks of an SM that registers and shared memory allow.
pub const BLOCKS_PER_SM: u32 = 3;

pub mod scatter;

#[cfg(all(target_arch = "nvptx64", feature = "dense"))]
mod elements;
#[cfg(all(target_arch = "nvptx64", feature = "dense"))]
mod kernel;
#[cfg(all(target_arch = "nvptx64", feature = "dense"))]
mod load;

/// Element types of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elements {
    /// f32; sums, α and β in f32.
    F32,
    /// f16; sums, α and β in f32.
    F16,
    /// bf16; sums, α and β in f32.
    Bf16,
    /// s8; sums, α and β in i32.
    S8,
}

impl Elements {
    /// Symbol of the kernel.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::F32 => "sm80_f32_dense_gemm_64x64",
            Self::F16 => "sm80_f16_dense_gemm_64x64",
            Self::Bf16 => "sm80_bf16_dense_gemm_64x64",
            Self::S8 => "sm80_s8_dense_gemm_64x64",
        }
    }
}

/// Bits of [`Problem::flags`].
pub mod flags {
    /// D and C have the sums' type; otherwise A's.
    pub const D_WIDE: u32 = 1;
    /// A's K is contiguous and its rows are 16-byte aligned.
    pub const A_VECTOR: u32 = 2;
    /// B's K is contiguous and its columns are 16-byte aligned.
    pub const B_VECTOR: u32 = 4;
}

/// One problem, 16-byte aligned in device memory. Strides are in elements.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Device address of A.
    pub a: u64,
    /// Device address of B.
    pub b: u64,
    /// Device address of C, or 0 if it is not read.
    pub c: u64,
    /// Device address of D.
    pub d: u64,
    /// From one row of A to the next.
    pub a_row: u64,
    /// From one k of A to the next.
    pub a_k: u64,
    /// From one column of B to the next.
    pub b_col: u64,
    /// From one k of B to the next.
    pub b_k: u64,
    /// From one row of C to the next.
    pub c_row: u64,
    /// From one column of C to the next.
    pub c_col: u64,
    /// From one row of D to the next.
    pub d_row: u64,
    /// From one column of D to the next.
    pub d_col: u64,
    /// Rows of D.
    pub m: u32,
    /// Columns of D.
    pub n: u32,
    /// Length of the sums; 0: A and B are not read.
    pub k: u32,
    /// Number of the problem's first tile.
    pub first_tile: u32,
    /// Bits of α.
    pub alpha: u32,
    /// Bits of β.
    pub beta: u32,
    /// See [`flags`].
    pub flags: u32,
    /// Fills the struct to 128 bytes.
    pub reserved: u32,
}

const _: () = assert!(size_of::<Problem>() == 128);

impl Problem {
    /// Number of tiles; `None` if there are too many for one launch.
    pub fn tiles(&self) -> Option<u32> {
        self.m.div_ceil(TILE).checked_mul(self.n.div_ceil(TILE))
    }
}

/// A launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DenseArgs {
    /// Device address of `[Problem; count]`, ascending by first tile, none without tiles.
    pub problems: u64,
    /// Number of problems; at least 1.
    pub count: u32,
    /// Number of tiles of all problems.
    pub tiles: u32,
    /// Tiles of each problem if all have the same number; otherwise 0.
    pub uniform: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub reserved: u32,
}

/// Number of the last problem whose first tile is not after `tile`, of `count` whose first tiles
/// `first` gives.
#[inline(always)]
pub fn find_problem(count: u32, tile: u32, first: impl Fn(u32) -> u32) -> u32 {
    let (mut low, mut high) = (0, count);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if first(middle) <= tile {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// Row and column tile of tile `tile` of a problem: in bands of [`BAND`] row tiles, so that the
/// blocks of one wave share operands in L2.
#[inline(always)]
pub const fn tile_place(tile: u32, row_tiles: u32, column_tiles: u32) -> (u32, u32) {
    let band = tile / (BAND * column_tiles);
    let first = band * BAND;
    let rows = if row_tiles - first < BAND {
        row_tiles - first
    } else {
        BAND
    };
    let local = tile - first * column_tiles;
    (first + local % rows, local / rows)
}

/// Row tiles of a band.
pub const BAND: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_found_by_tile() {
        let first = [0, 3, 4, 10, 11];
        for tile in 0..14 {
            let want = first.iter().rposition(|&f| f <= tile).unwrap();
            let got = find_problem(first.len() as u32, tile, |i| first[i as usize]);
            assert_eq!(got as usize, want);
        }
    }

    #[test]
    fn each_place_once() {
        for (rows, columns) in [(1, 1), (1, 9), (16, 3), (17, 2), (40, 5)] {
            let mut seen = vec![false; (rows * columns) as usize];
            for tile in 0..rows * columns {
                let (r, c) = tile_place(tile, rows, columns);
                assert!(r < rows && c < columns);
                assert!(!std::mem::replace(
                    &mut seen[(r * columns + c) as usize],
                    true
                ));
            }
        }
    }
}
