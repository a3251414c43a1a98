//! One warp that brings scales and biases to shared memory: those of a stage with the stage,
//! those of a tile with the tile. Columns past N and rows past the group repeat the last one.

use super::format::{Format, Scales};
use super::kernel::{DeviceGroups, has_values};
use super::pipeline::Shared;
use crate::args::{ColumnTable, GemmArgs};
use crate::ptx::{mbarrier, shared};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{B_BOX_ROWS, Tile};

/// Loads the values of every tile of this block.
///
/// # Safety
/// One warp of the block calls it, converged, with the tables that `args` promises.
#[inline(always)]
pub(super) unsafe fn run<F: Format>(
    tile: Tile,
    lane: u32,
    args: &GemmArgs,
    mut walker: TileWalker<DeviceGroups>,
    memory: Shared,
) {
    let (mut stages, mut values) = (memory.stages(), memory.values());
    // SAFETY: tables cover the group's rows, all columns and all steps; buffers are written
    // between their release and their full barrier.
    unsafe {
        while let Some(coord) = walker.next_tile() {
            if has_values::<F>(args) {
                values.wait_empty();
                let rows = memory.tile_values(values.slot);
                let columns = rows + tile.m * 4;
                if matches!(F::ROWS, Scales::End) {
                    copy_rows(tile, lane, args, &coord, 0, rows);
                }
                if matches!(F::COLUMNS, Scales::End) {
                    copy_columns(tile, lane, args, &args.b_scales, &coord, 0, columns);
                }
                if args.bias.base != 0 {
                    copy_columns(
                        tile,
                        lane,
                        args,
                        &args.bias,
                        &coord,
                        0,
                        columns + tile.n * 4,
                    );
                }
                mbarrier::arrive_after_copies(values.full());
                values.advance();
            }
            let mut step = 0;
            while F::STEP_SCALES && step < args.k_steps {
                stages.wait_empty();
                let rows = memory.step_scales(stages.slot);
                let columns = rows + tile.m * 4;
                if matches!(F::ROWS, Scales::Step) {
                    copy_rows(tile, lane, args, &coord, step, rows);
                }
                if matches!(F::COLUMNS, Scales::Step) {
                    copy_columns(tile, lane, args, &args.b_scales, &coord, step, columns);
                }
                if matches!(F::COLUMNS, Scales::StepBlock) && lane < tile.b_boxes() {
                    let column = (coord.column + lane * B_BOX_ROWS).min(args.n - 1);
                    let source = args.b_scales.address(coord.weight, column);
                    shared::copy_word_async(
                        columns + lane * 4,
                        source + step as u64 * args.b_scales.block_stride,
                    );
                }
                mbarrier::arrive_after_copies(stages.full());
                stages.advance();
                step += 1;
            }
        }
    }
}

/// A's scales of K block `block`, one a row of the tile.
///
/// # Safety
/// As [`run`], with `dst` free.
#[inline(always)]
unsafe fn copy_rows(
    tile: Tile,
    lane: u32,
    args: &GemmArgs,
    coord: &TileCoord,
    block: u32,
    dst: u32,
) {
    let mut row = lane;
    while row < tile.m {
        let source = (coord.row + row).min(coord.row_end - 1) as u64;
        let index = source * args.a_scale_stride as u64 + block as u64;
        // SAFETY: the row is inside the group, the block by the caller's promise.
        unsafe { shared::copy_word_async(dst + row * 4, args.a_scales + index * 4) };
        row += 32;
    }
}

/// A table's values of K block `block`, one a column of the tile.
///
/// # Safety
/// As [`run`], with `dst` free.
#[inline(always)]
unsafe fn copy_columns(
    tile: Tile,
    lane: u32,
    args: &GemmArgs,
    table: &ColumnTable,
    coord: &TileCoord,
    block: u32,
    dst: u32,
) {
    let mut first = 0;
    while first < tile.n {
        // The columns of a box lie in one segment of the table: one division for all.
        let column = (coord.column + first).min(args.n - 1);
        let base = table.address(coord.weight, column) + block as u64 * table.block_stride;
        let last = args.n - 1 - column;
        let mut offset = lane;
        while offset < B_BOX_ROWS {
            let source = base + (offset.min(last) * table.column_stride) as u64;
            // SAFETY: the column is below N.
            unsafe { shared::copy_word_async(dst + (first + offset) * 4, source) };
            offset += 32;
        }
        first += B_BOX_ROWS;
    }
}
