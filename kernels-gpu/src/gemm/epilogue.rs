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
use crate::tile::{STAGING_COLUMNS, STEP_BYTES, WARP_ROWS, swizzled_chunk};

/// Where one warp's accumulators lie in D.
///
/// A thread's register `4j + i` is row `lane / 4 + i / 2 * 8`, column `8j + lane % 4 * 2 + i % 2`
/// of it.
#[derive(Clone, Copy)]
pub(super) struct Fragment {
    row: u32,
    column: u32,
    row_end: u32,
}

impl Fragment {
    /// The fragment of the warp at `place` in a tile.
    #[inline(always)]
    pub(super) fn new(place: &Place, coord: &TileCoord) -> Self {
        Self {
            row: coord.row + place.row + place.warp % 4 * WARP_ROWS,
            column: coord.column + place.column,
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
        place: &Place,
        args: &GemmArgs,
        values: u32,
        sums: &mut A,
    ) {
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
                    if j % 8 == 0 {
                        // Loads stay behind it: too many ahead of their use would spill.
                        sync::warp();
                    }
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

    /// Rounds the sums to bf16, to be stored later; f32 is stored at once.
    ///
    /// # Safety
    /// Whole warps call it, converged, with D as `args` promises.
    #[inline(always)]
    pub(super) unsafe fn output<A: Accumulator>(
        &self,
        place: &Place,
        args: &GemmArgs,
        sums: &A,
    ) -> Pending<A> {
        let mut fragment = *self;
        if args.flags & gemm_flags::D_BF16 == 0 {
            // SAFETY: the caller's promise.
            unsafe { self.store_f32(place, args, sums) };
            fragment.row_end = 0;
        }
        Pending {
            fragment,
            packed: sums.pack(),
        }
    }

    /// Stores the sums.
    ///
    /// # Safety
    /// Whole warps call it, converged, with D as `args` promises. The tile's staging area holds
    /// all of the warp's rows.
    #[inline(always)]
    pub(super) unsafe fn store<A: Accumulator>(&self, place: &Place, args: &GemmArgs, sums: &A) {
        const ROWS: u32 = gemm_flags::D_BF16 | gemm_flags::D_VECTOR;
        // SAFETY: the caller's promise.
        unsafe {
            if args.flags & ROWS == ROWS {
                self.store_rows(place, args, sums);
            } else {
                let pending = self.output(place, args, sums);
                pending.store_first(place, args);
                pending.store_rest(place, args, 0);
            }
        }
    }

    /// All of the warp's rows through shared memory at once: eight lanes take 128 bytes of a
    /// row, four rows an instruction, with nothing to wait for between them.
    ///
    /// # Safety
    /// As [`Self::store`], for bf16 with D_VECTOR.
    #[inline(always)]
    unsafe fn store_rows<A: Accumulator>(&self, place: &Place, args: &GemmArgs, sums: &A) {
        let pitch = place.tile.staging_pitch();
        let staging = place.memory.staging(place.warp);
        let packed = sums.pack();
        let (row, chunk) = (place.lane / 8, place.lane % 8);
        let column = self.column + chunk * 8;
        let d = args.d + ((self.row + row) as u64 * args.d_stride + column as u64) * 2;
        // SAFETY: staging belongs to this warp; rows and columns that exist are inside D, and
        // with D_VECTOR chunks are aligned and exist as a whole.
        unsafe {
            // The last tile's rows have been read.
            sync::warp();
            let first = staging + place.lane % 16 * pitch + place.lane / 16 * 16;
            for pair in 0..A::REGISTERS / 8 {
                let word = |i: usize| A::packed(&packed, 4 * pair + i);
                shared::store_matrix_x4(
                    first + pair as u32 * 32,
                    [word(0), word(1), word(2), word(3)],
                );
            }
            sync::warp();
            let source = staging + row * pitch + chunk * 16;
            for round in 0..WARP_ROWS / 4 {
                let exists = self.row + row + 4 * round < self.row_end;
                let d = d + u64::from(4 * round) * args.d_stride * 2;
                for part in 0..A::COLUMNS / STAGING_COLUMNS {
                    let value = shared::load_v4(source + 4 * round * pitch + part * STEP_BYTES);
                    global::store_v4_if(
                        exists && column + part * STAGING_COLUMNS < args.n,
                        d + u64::from(part * STEP_BYTES),
                        value,
                    );
                }
            }
        }
    }

    /// Four lanes write 32 contiguous bytes of a row: whole sectors, straight from registers.
    ///
    /// # Safety
    /// As [`Self::output`].
    #[inline(always)]
    unsafe fn store_f32<A: Accumulator>(&self, place: &Place, args: &GemmArgs, sums: &A) {
        let vector = args.flags & gemm_flags::D_VECTOR != 0;
        let first_column = self.column + place.lane % 4 * 2;
        for half in 0..2 {
            let row = self.row + place.lane / 4 + half * 8;
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
}

/// A warp's output in bf16, not yet stored.
pub(super) struct Pending<A: Accumulator> {
    fragment: Fragment,
    packed: A::Packed,
}

impl<A: Accumulator> Pending<A> {
    /// Parts that are stored one at a time.
    const PARTS: u32 = A::COLUMNS / STAGING_COLUMNS;
    /// Parts for which there are no registers while the next tile is summed.
    const AT_ONCE: u32 = Self::PARTS.saturating_sub(2);

    /// Nothing to store.
    #[inline(always)]
    pub(super) fn none() -> Self {
        Self {
            fragment: Fragment {
                row: 0,
                column: 0,
                row_end: 0,
            },
            packed: A::zeroed().pack(),
        }
    }

    /// Stores what must not wait.
    ///
    /// # Safety
    /// Whole warps call it, converged, with D as `args` promises.
    #[inline(always)]
    pub(super) unsafe fn store_first(&self, place: &Place, args: &GemmArgs) {
        for part in 0..Self::AT_ONCE {
            // SAFETY: the caller's promise.
            unsafe { self.store(place, args, part) };
        }
    }

    /// Stores the part that may wait until step `step` of the next tile, if there is one.
    ///
    /// # Safety
    /// As [`Self::store_first`].
    #[inline(always)]
    pub(super) unsafe fn store_in_step(&self, place: &Place, args: &GemmArgs, step: u32) {
        for part in Self::AT_ONCE..Self::PARTS {
            if part - Self::AT_ONCE == step {
                // SAFETY: the caller's promise.
                unsafe { self.store(place, args, part) };
            }
        }
    }

    /// Stores the parts that may wait until step `step` or longer.
    ///
    /// # Safety
    /// As [`Self::store_first`].
    #[inline(always)]
    pub(super) unsafe fn store_rest(&self, place: &Place, args: &GemmArgs, step: u32) {
        for part in Self::AT_ONCE..Self::PARTS {
            if part - Self::AT_ONCE >= step {
                // SAFETY: the caller's promise.
                unsafe { self.store(place, args, part) };
            }
        }
    }

    /// Through shared memory, so that a row's 128 bytes are written together: 64 columns,
    /// swizzled. `part` is a constant after unrolling.
    ///
    /// # Safety
    /// As [`Self::store_first`].
    #[inline(always)]
    unsafe fn store(&self, place: &Place, args: &GemmArgs, part: u32) {
        if self.fragment.row >= self.fragment.row_end {
            return;
        }
        // Addresses that the compiler takes for new ones: it would compute all of them ahead of
        // the caller's loop, and has no registers for that.
        let lane = convert::opaque(place.lane);
        let staging = place.memory.staging(place.warp);
        let first_column = self.fragment.column + part * STAGING_COLUMNS;
        // SAFETY: staging belongs to this warp; elements that exist are inside D, and with
        // D_VECTOR chunks are aligned and exist as a whole.
        unsafe {
            // The last part's reads of the staging area are done.
            sync::warp();
            for pair in 0..4 {
                let at = (part * 16 + pair * 4) as usize;
                let word = |i: usize| A::packed(&self.packed, at + i);
                shared::store_matrix_x4(
                    staging + swizzled_chunk(lane % 16, 2 * pair + lane / 16),
                    [word(0), word(1), word(2), word(3)],
                );
            }
            sync::warp();
            if args.flags & gemm_flags::D_VECTOR != 0 {
                self.store_chunks(lane, args, staging, first_column);
            } else {
                self.store_elements(lane, args, staging, first_column);
            }
        }
    }

    /// Eight lanes take the eight chunks of one row, four rows a round.
    ///
    /// # Safety
    /// As [`Self::store`], with the part at `column` staged.
    #[inline(always)]
    unsafe fn store_chunks(&self, lane: u32, args: &GemmArgs, staging: u32, column: u32) {
        let (row, chunk) = (lane / 8, lane % 8);
        let first_row = self.fragment.row + row;
        let column = column + chunk * 8;
        let first = args.d + (first_row as u64 * args.d_stride + column as u64) * 2;
        for round in 0..4 {
            let exists = first_row + 4 * round < self.fragment.row_end && column < args.n;
            let address = first + u64::from(4 * round) * args.d_stride * 2;
            // SAFETY: the caller's promise.
            unsafe {
                let value = shared::load_v4(staging + swizzled_chunk(row + 4 * round, chunk));
                global::store_v4_if(exists, address, value);
            }
        }
    }

    /// The lanes take a row's elements one by one.
    ///
    /// # Safety
    /// As [`Self::store`], with the part at `column` staged.
    #[inline(always)]
    unsafe fn store_elements(&self, lane: u32, args: &GemmArgs, staging: u32, column: u32) {
        // A bound that the compiler does not know keeps this a loop.
        let end = convert::opaque(WARP_ROWS * STAGING_COLUMNS);
        let mut index = lane;
        while index < end {
            let (row, offset) = (index / STAGING_COLUMNS, index % STAGING_COLUMNS);
            let (d_row, column) = (self.fragment.row + row, column + offset);
            let exists = d_row < self.fragment.row_end && column < args.n;
            let address = args.d + (d_row as u64 * args.d_stride + column as u64) * 2;
            // SAFETY: the caller's promise.
            unsafe {
                let at = staging + swizzled_chunk(row, offset / 8) + offset % 8 * 2;
                global::store_u16_if(exists, address, shared::load_u16(at));
            }
            index += 32;
        }
    }
}
