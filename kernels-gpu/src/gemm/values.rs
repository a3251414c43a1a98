//! Three warps that tell the consumers which tile comes next, and bring scales and biases to
//! shared memory: of a whole tile, and of four steps at a time. Columns past N and rows past
//! the group repeat the last one. Loops stay loops (bounds are opaque), to keep the addresses
//! in few registers.

use super::format::{Format, Scales};
use super::kernel::DeviceGroups;
use super::pipeline::Shared;
use crate::args::{ColumnTable, GemmArgs};
use crate::ptx::convert::opaque;
use crate::ptx::{mbarrier, shared};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{B_BOX_ROWS, SCALE_STEPS, Tile};
use core::ops::Range;

/// Threads that copy: all of the producer's warpgroup but its first warp.
pub(super) const THREADS: u32 = 96;
/// Arrivals that fill a buffer of tile values: each thread's copies, and the coordinates.
pub(super) const TILE_ARRIVALS: u32 = THREADS + 1;

/// Loads the values of every tile of this block.
///
/// # Safety
/// [`THREADS`] threads of the block call it, with the tables that `args` promises.
#[inline(always)]
pub(super) unsafe fn run<F: Format>(
    tile: Tile,
    thread: u32,
    args: &GemmArgs,
    mut walker: TileWalker<DeviceGroups>,
    memory: Shared,
) {
    let (mut scales, mut values) = (memory.scales(), memory.values());
    // SAFETY: tables cover the group's rows, all columns and all steps; buffers are written
    // between their release and their full barrier.
    unsafe {
        loop {
            let next = walker.next_tile();
            values.wait_empty();
            if thread == 0 {
                memory.put_coordinates(values.slot(), next);
                mbarrier::arrive(values.full());
            }
            let Some(coord) = next else {
                mbarrier::arrive_after_copies(values.full());
                return;
            };
            let copy = Copy {
                tile,
                thread,
                args,
                coord,
            };
            copy.values::<F>(memory.tile_values(values.slot()));
            mbarrier::arrive_after_copies(values.full());
            values.advance();
            let mut step = 0;
            while F::STEP_SCALES && step < args.k_steps {
                scales.wait_empty();
                let steps = step..(step + SCALE_STEPS).min(args.k_steps);
                copy.scales::<F>(steps, memory.step_scales(scales.slot(), 0));
                mbarrier::arrive_after_copies(scales.full());
                scales.advance();
                step += SCALE_STEPS;
            }
        }
    }
}

/// One thread's share of the copies for one tile.
struct Copy<'a> {
    tile: Tile,
    thread: u32,
    args: &'a GemmArgs,
    coord: TileCoord,
}

impl Copy<'_> {
    /// The tile's values: what enters at the end of K.
    ///
    /// # Safety
    /// As [`run`], with `rows` a free buffer.
    #[inline(always)]
    unsafe fn values<F: Format>(&self, rows: u32) {
        let columns = rows + self.tile.m * 4;
        let args = self.args;
        // SAFETY: the caller's promise.
        unsafe {
            if matches!(F::ROWS, Scales::End) {
                self.rows(0..1, rows);
            }
            if matches!(F::COLUMNS, Scales::End) {
                self.columns(&args.b_scales, 0..1, columns);
            }
            if args.bias.base != 0 {
                self.columns(&args.bias, 0..1, columns + self.tile.n * 4);
            }
        }
    }

    /// The scales of steps `steps`.
    ///
    /// # Safety
    /// As [`run`], with `rows` a free buffer.
    #[inline(always)]
    unsafe fn scales<F: Format>(&self, steps: Range<u32>, rows: u32) {
        let columns = rows + self.tile.m * 4;
        let table = &self.args.b_scales;
        // SAFETY: the caller's promise.
        unsafe {
            if matches!(F::ROWS, Scales::Step) {
                self.rows(steps.clone(), rows);
            }
            match F::COLUMNS {
                Scales::Step => self.columns(table, steps, columns),
                Scales::StepBlock => self.boxes(table, steps, columns),
                _ => {}
            }
        }
    }

    /// A's scales of the K blocks `blocks`: one a row of the tile, for each block.
    ///
    /// # Safety
    /// As [`run`], with `dst` free.
    #[inline(always)]
    unsafe fn rows(&self, blocks: Range<u32>, dst: u32) {
        let mut row = self.thread;
        while row < opaque(self.tile.m) {
            let source = (self.coord.row + row).min(self.coord.row_end - 1) as u64;
            let address = self.args.a_scales + source * self.args.a_scale_stride as u64 * 4;
            // SAFETY: the row is inside the group, the blocks by the caller's promise.
            unsafe { self.blocks(address, 4, blocks.clone(), dst + row * 4) };
            row += THREADS;
        }
    }

    /// A table's values of the K blocks `blocks`: one a column of the tile, for each block.
    ///
    /// # Safety
    /// As [`run`], with `dst` free.
    #[inline(always)]
    unsafe fn columns(&self, table: &ColumnTable, blocks: Range<u32>, dst: u32) {
        let mut column = self.thread;
        while column < opaque(self.tile.n) {
            let last = (self.coord.column + column).min(self.args.n - 1);
            let address = table.address(self.coord.weight, last);
            // SAFETY: the column is below N, the blocks by the caller's promise.
            unsafe {
                self.blocks(
                    address,
                    table.block_stride,
                    blocks.clone(),
                    dst + column * 4,
                )
            };
            column += THREADS;
        }
    }

    /// A table's values of the K blocks `blocks`: one for each box of 64 columns.
    ///
    /// # Safety
    /// As [`run`], with `dst` free.
    #[inline(always)]
    unsafe fn boxes(&self, table: &ColumnTable, blocks: Range<u32>, dst: u32) {
        if self.thread < self.tile.b_boxes() {
            let column = (self.coord.column + self.thread * B_BOX_ROWS).min(self.args.n - 1);
            let address = table.address(self.coord.weight, column);
            // SAFETY: the column is below N.
            unsafe { self.blocks(address, table.block_stride, blocks, dst + self.thread * 4) }
        }
    }

    /// The values of one row or column: neighbours in memory, a step's table apart in `dst`.
    ///
    /// # Safety
    /// As [`run`], with `dst` free and `source` the value of block 0.
    #[inline(always)]
    unsafe fn blocks(&self, source: u64, stride: u64, blocks: Range<u32>, dst: u32) {
        let (mut block, mut dst) = (blocks.start, dst);
        while block < opaque(blocks.end) {
            // SAFETY: the caller's promise.
            unsafe { shared::copy_word_async(dst, source + block as u64 * stride) };
            block += 1;
            dst += self.tile.step_scales_bytes();
        }
    }
}
