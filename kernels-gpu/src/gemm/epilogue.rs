//! From accumulators to D: scales, bias, rounding, stores.
//!
//! Bounds are predicates on single instructions, not branches around them.

use super::scaling::Scaling;
use crate::args::{GemmArgs, gemm_flags};
use crate::ptx::wgmma::Accumulator;
use crate::ptx::{convert, global, shared, sync};
use crate::schedule::TileCoord;
use crate::tile::{STEP_BYTES, WARPGROUP_M, swizzled_chunk};

/// Where one thread's accumulators lie in D.
///
/// Register `4j + i` is row `row[i / 2]`, column `column + 8j + i % 2`.
#[derive(Clone, Copy)]
pub(super) struct Fragment {
    /// First row of the warpgroup.
    warpgroup_row: u32,
    /// First column of the warpgroup.
    warpgroup_column: u32,
    rows: [u32; 2],
    row_end: u32,
    column: u32,
    /// Addresses of B's scale and of the bias for the warpgroup's first column: its columns
    /// lie in one segment of the tables, so the division is done once a tile.
    b_scales: u64,
    bias: u64,
}

impl Fragment {
    /// The fragment of `thread` (0..128) in the warpgroup at (`row`, `column`) of a tile.
    #[inline(always)]
    pub(super) fn new(
        coord: TileCoord,
        row: u32,
        column: u32,
        thread: u32,
        args: &GemmArgs,
    ) -> Self {
        let lane = thread % 32;
        let warpgroup_row = coord.row + row;
        let warpgroup_column = coord.column + column;
        let first = warpgroup_row + thread / 32 * 16 + lane / 4;
        // A tile's right half can lie past N: nothing of it is stored.
        let table_column = warpgroup_column.min(args.n - 1);
        Self {
            warpgroup_row,
            warpgroup_column,
            rows: [first, first + 8],
            row_end: coord.row_end,
            column: warpgroup_column + lane % 4 * 2,
            b_scales: args.b_scales.address(coord.weight, table_column),
            bias: args.bias.address(coord.weight, table_column),
        }
    }

    /// Scales of the two rows for K block `block`; rows past the group repeat its last one.
    ///
    /// # Safety
    /// `args.a_scales` must hold the block for every row of the group.
    #[inline(always)]
    pub(super) unsafe fn a_scales(&self, args: &GemmArgs, block: u32) -> [f32; 2] {
        let load = |row: u32| {
            let row = row.min(self.row_end - 1) as u64;
            let index = row * args.a_scale_stride as u64 + block as u64;
            // SAFETY: the row is inside the group, the block by the caller's promise.
            unsafe { global::load_read_only_f32(args.a_scales + index * 4) }
        };
        [load(self.rows[0]), load(self.rows[1])]
    }

    /// The same fragment, in values that the compiler cannot know to be the same: what is
    /// computed from them inside a loop stays there, and out of the registers around it.
    #[inline(always)]
    pub(super) fn reload(&self) -> Self {
        Self {
            column: convert::opaque(self.column),
            ..*self
        }
    }

    /// Offset in a table of the fragment's column `8j + i`, from the warpgroup's first one;
    /// columns past N repeat the last.
    #[inline(always)]
    fn table_offset(&self, args: &GemmArgs, stride: u32, j: usize, i: usize) -> u64 {
        let column = (self.column + 8 * j as u32 + i as u32).min(args.n - 1);
        (column.saturating_sub(self.warpgroup_column) * stride) as u64
    }

    /// Address of B's scale for register column `8j + i`.
    #[inline(always)]
    pub(super) fn b_scale_address(&self, args: &GemmArgs, j: usize, i: usize) -> u64 {
        self.b_scales + self.table_offset(args, args.b_scales.column_stride, j, i)
    }

    /// Address of D's f32 for register `4j + i`, and whether it exists.
    #[inline(always)]
    fn d_element(&self, args: &GemmArgs, j: usize, i: usize) -> (bool, u64) {
        let row = self.rows[i / 2];
        let column = self.column + 8 * j as u32 + (i & 1) as u32;
        let exists = row < self.row_end && column < args.n;
        (
            exists,
            args.d + (row as u64 * args.d_stride + column as u64) * 4,
        )
    }

    /// Applies what enters at the end of K: scales of rows and columns, bias.
    ///
    /// # Safety
    /// The tables of `args` must cover the group's rows and all N columns.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Scaling>(&self, args: &GemmArgs, sums: &mut Accumulator) {
        // SAFETY: the caller's promise covers all addresses.
        unsafe {
            if S::COLUMNS_AT_END {
                let a_scale = if S::PER_STEP {
                    [1.0; 2]
                } else {
                    self.a_scales(args, 0)
                };
                for j in 0..16 {
                    for i in 0..4 {
                        let b_scale =
                            global::load_read_only_f32(self.b_scale_address(args, j, i & 1));
                        let sum = sums[4 * j + i];
                        sums[4 * j + i] = if S::PER_STEP {
                            sum * b_scale
                        } else {
                            sum.to_bits() as i32 as f32 * (a_scale[i / 2] * b_scale)
                        };
                    }
                }
            }
            if args.bias.base != 0 {
                for j in 0..16 {
                    for i in 0..4 {
                        let offset = self.table_offset(args, args.bias.column_stride, j, i & 1);
                        sums[4 * j + i] += global::load_read_only_f32(self.bias + offset);
                    }
                }
            }
        }
    }

    /// Stores the sums as D's type.
    ///
    /// # Safety
    /// All threads of the warpgroup must call it, converged; `staging` is the warpgroup's own.
    #[inline(always)]
    pub(super) unsafe fn store(
        &self,
        args: &GemmArgs,
        sums: &Accumulator,
        staging: u32,
        consumer: u32,
        thread: u32,
    ) {
        // SAFETY: the caller's promise; addresses come from `d_address` or are bounded alike.
        unsafe {
            if args.flags & gemm_flags::D_BF16 != 0 {
                self.store_bf16(args, sums, staging, consumer, thread);
            } else {
                self.store_f32(args, sums);
            }
        }
    }

    /// Four lanes write 32 contiguous bytes of a row: whole sectors, straight from registers.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn store_f32(&self, args: &GemmArgs, sums: &Accumulator) {
        let vector = args.flags & gemm_flags::D_VECTOR != 0;
        for j in 0..16 {
            for half in 0..2 {
                let [low, high] = [sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]];
                let (exists, address) = self.d_element(args, j, 2 * half);
                let (high_exists, _) = self.d_element(args, j, 2 * half + 1);
                // SAFETY: elements that exist are inside D; with D_VECTOR rows are 8-byte
                // aligned and N is even, so that both of a pair exist or neither.
                unsafe {
                    if vector {
                        global::store_v2_if(exists, address, low.to_bits(), high.to_bits());
                    } else {
                        global::store_if(exists, address, low.to_bits());
                        global::store_if(high_exists, address + 4, high.to_bits());
                    }
                }
            }
        }
    }

    /// Through shared memory, so that a row's 128 bytes are written together:
    /// 64 x 128 bf16 as two swizzled halves of 64 columns.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn store_bf16(
        &self,
        args: &GemmArgs,
        sums: &Accumulator,
        staging: u32,
        consumer: u32,
        thread: u32,
    ) {
        const HALF_BYTES: u32 = WARPGROUP_M * STEP_BYTES;
        let lane = thread % 32;
        let row = thread / 32 * 16 + lane % 16;
        // SAFETY: staging belongs to this warpgroup; D addresses are bounded below.
        unsafe {
            // The last tile's reads of the staging area are done.
            warpgroup_barrier(consumer);
            for half in 0..2u32 {
                for pair in 0..4u32 {
                    let first = (half * 32 + pair * 8) as usize;
                    let chunk = 2 * pair + lane / 16;
                    shared::store_matrix_x4(
                        staging + half * HALF_BYTES + swizzled_chunk(row, chunk),
                        [
                            convert::bf16x2(sums[first], sums[first + 1]),
                            convert::bf16x2(sums[first + 2], sums[first + 3]),
                            convert::bf16x2(sums[first + 4], sums[first + 5]),
                            convert::bf16x2(sums[first + 6], sums[first + 7]),
                        ],
                    );
                }
            }
            warpgroup_barrier(consumer);
            let vector = args.flags & gemm_flags::D_VECTOR != 0;
            for round in 0..8u32 {
                // 16 lanes take the 16 chunks of one row: 256 contiguous bytes.
                let index = round * 128 + thread;
                let (row, chunk) = (index / 16, index % 16);
                let d_row = self.warpgroup_row + row;
                let column = self.warpgroup_column + chunk * 8;
                if d_row < self.row_end && column < args.n {
                    let source = staging + chunk / 8 * HALF_BYTES + swizzled_chunk(row, chunk % 8);
                    let value = shared::load_v4(source);
                    let address = args.d + (d_row as u64 * args.d_stride + column as u64) * 2;
                    if vector {
                        global::store_v4(address, value);
                    } else {
                        for i in 0..8 {
                            if column + i < args.n {
                                let word = value[i as usize / 2];
                                let half = if i % 2 == 0 { word } else { word >> 16 };
                                global::store_u16(address + i as u64 * 2, half as u16);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Named barrier of one consumer warpgroup.
///
/// # Safety
/// All 128 threads of the consumer arrive.
#[inline(always)]
unsafe fn warpgroup_barrier(consumer: u32) {
    // SAFETY: ids 1 and 2 are used by nobody else; the id is a constant so that ptxas does
    // not reserve all sixteen barriers.
    unsafe {
        if consumer == 0 {
            sync::bar_sync::<1, 128>();
        } else {
            sync::bar_sync::<2, 128>();
        }
    }
}
