//! From accumulators to D: scales, bias, rounding, stores.
//!
//! A warp's 16 rows are its own from here on: no barrier of more than a warp. Bounds are
//! predicates on single instructions, not branches around them.

use super::consumer::Place;
use super::format::{Format, Scales};
use crate::args::{GemmArgs, gemm_flags};
use crate::ptx::wgmma::Accumulator;
use crate::ptx::{convert, global, shared, sync};
use crate::schedule::TileCoord;
use crate::tile::{STAGING_COLUMNS, WARP_ROWS, swizzled_chunk};

/// Where one thread's accumulators lie in D.
///
/// Register `4j + i` is row `row + i / 2 * 8`, column `column + 8j + i % 2`.
pub(super) struct Fragment<'a> {
    place: &'a Place,
    /// First row and column of the warp.
    warp_row: u32,
    warp_column: u32,
    row_end: u32,
}

impl<'a> Fragment<'a> {
    /// The fragment of the thread at `place` in a tile.
    #[inline(always)]
    pub(super) fn new(place: &'a Place, coord: &TileCoord) -> Self {
        Self {
            place,
            warp_row: coord.row + place.row + place.warp % 4 * WARP_ROWS,
            warp_column: coord.column + place.column,
            row_end: coord.row_end,
        }
    }

    /// Applies what enters at the end of K: scales of rows and columns, bias, from the tile's
    /// values at `values` in shared memory.
    ///
    /// # Safety
    /// The values must be there.
    #[inline(always)]
    pub(super) unsafe fn finish<F: Format, A: Accumulator>(
        &self,
        args: &GemmArgs,
        values: u32,
        sums: &mut A,
    ) {
        let place = self.place;
        let row = values + place.thread_row() * 4;
        let column = values + (place.tile.m + place.thread_column()) * 4;
        let bias = column + place.tile.n * 4;
        // SAFETY: the caller's promise.
        unsafe {
            let mut rows = [1.0; 2];
            if matches!(F::ROWS, Scales::End) {
                rows = [shared::load_f32(row), shared::load_f32(row + 8 * 4)];
            }
            if matches!(F::COLUMNS, Scales::End) {
                for j in 0..A::REGISTERS / 4 {
                    let columns = shared::load_f32x2(column + j as u32 * 32);
                    for i in 0..4 {
                        let value = match F::PER_STEP {
                            true => sums.get(4 * j + i),
                            false => F::value(sums.get(4 * j + i)),
                        };
                        let scale = match F::ROWS {
                            Scales::End => rows[i / 2] * columns[i % 2],
                            _ => columns[i % 2],
                        };
                        sums.set(4 * j + i, value * scale);
                    }
                }
            }
            if args.bias.base != 0 {
                for j in 0..A::REGISTERS / 4 {
                    let bias = shared::load_f32x2(bias + j as u32 * 32);
                    for i in 0..4 {
                        sums.set(4 * j + i, sums.get(4 * j + i) + bias[i % 2]);
                    }
                }
            }
        }
    }

    /// Stores the sums as D's type.
    ///
    /// # Safety
    /// Whole warps call it, converged, with D as `args` promises.
    #[inline(always)]
    pub(super) unsafe fn store<A: Accumulator>(&self, args: &GemmArgs, sums: &A) {
        // SAFETY: the caller's promise.
        unsafe {
            if args.flags & gemm_flags::D_BF16 != 0 {
                self.store_bf16(args, sums);
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
    unsafe fn store_f32<A: Accumulator>(&self, args: &GemmArgs, sums: &A) {
        let vector = args.flags & gemm_flags::D_VECTOR != 0;
        let lane = self.place.lane;
        let first_column = self.warp_column + lane % 4 * 2;
        for half in 0..2 {
            let row = self.warp_row + lane / 4 + half * 8;
            let address = args.d + (row as u64 * args.d_stride + first_column as u64) * 4;
            for j in 0..A::REGISTERS / 4 {
                let at = 4 * j + 2 * half as usize;
                let [low, high] = [sums.get(at).to_bits(), sums.get(at + 1).to_bits()];
                let column = first_column + 8 * j as u32;
                let exists = row < self.row_end && column < args.n;
                let high_exists = row < self.row_end && column + 1 < args.n;
                let address = address + j as u64 * 32;
                // SAFETY: elements that exist are inside D; with D_VECTOR rows are 8-byte
                // aligned and N is even, so that both of a pair exist or neither.
                unsafe {
                    if vector {
                        global::store_v2_if(exists, address, low, high);
                    } else {
                        global::store_if(exists, address, low);
                        global::store_if(high_exists, address + 4, high);
                    }
                }
            }
        }
    }

    /// Through shared memory, so that a row's 128 bytes are written together: 64 columns at a
    /// time, swizzled.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn store_bf16<A: Accumulator>(&self, args: &GemmArgs, sums: &A) {
        let vector = args.flags & gemm_flags::D_VECTOR != 0;
        let lane = self.place.lane;
        let staging = self.place.memory.staging(self.place.warp);
        // Eight lanes take the eight chunks of one row, four rows a round.
        let (row, chunk) = (lane / 8, lane % 8);
        let first_row = self.warp_row + row;
        let first_column = self.warp_column + chunk * 8;
        let first = args.d + (first_row as u64 * args.d_stride + first_column as u64) * 2;
        for part in 0..A::COLUMNS / STAGING_COLUMNS {
            // SAFETY: staging belongs to this warp; elements that exist are inside D, and
            // with D_VECTOR chunks are aligned and exist as a whole.
            unsafe {
                // The last part's reads of the staging area are done.
                sync::warp();
                for pair in 0..4 {
                    let at = (part * 32 + pair * 8) as usize;
                    let two = |i: usize| convert::bf16x2(sums.get(at + i), sums.get(at + i + 1));
                    shared::store_matrix_x4(
                        staging + swizzled_chunk(lane % 16, 2 * pair + lane / 16),
                        [two(0), two(2), two(4), two(6)],
                    );
                }
                sync::warp();
                let column = first_column + part * STAGING_COLUMNS;
                for round in 0..4 {
                    let value = shared::load_v4(staging + swizzled_chunk(row + 4 * round, chunk));
                    let address = first
                        + (u64::from(4 * round) * args.d_stride
                            + u64::from(part * STAGING_COLUMNS))
                            * 2;
                    let row_exists = first_row + 4 * round < self.row_end;
                    if vector {
                        global::store_v4_if(row_exists && column < args.n, address, value);
                    } else {
                        for i in 0..8 {
                            let word = value[i as usize / 2];
                            let half = if i % 2 == 0 { word } else { word >> 16 };
                            global::store_u16_if(
                                row_exists && column + i < args.n,
                                address + i as u64 * 2,
                                half as u16,
                            );
                        }
                    }
                }
            }
        }
    }
}
