//! The producer: one thread that keeps the stages full.

use super::kernel::{DeviceGroups, Maps};
use super::pipeline::Shared;
use crate::args::{GemmArgs, weight_layout};
use crate::ptx::{global, mbarrier, tma};
use crate::relay::{UNIT_BYTES, UNIT_STEPS, unit, units};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{A_BOX_ROWS, B_BOX_BYTES, B_BOX_ROWS, STEP_BYTES, Tile};

/// Bytes of a tensor map.
const MAP_BYTES: u64 = 128;

/// Loads every stage of every tile of this block.
///
/// # Safety
/// One thread of the block calls it, with the maps and groups that `args` promises.
#[inline(always)]
pub(super) unsafe fn run(
    tile: Tile,
    step_k: u32,
    maps: Maps,
    args: &GemmArgs,
    mut walker: TileWalker<DeviceGroups>,
    shared: Shared,
) {
    let mut stages = shared.stages();
    // SAFETY: the host encoded the maps for exactly these boxes.
    unsafe {
        tma::prefetch_map(maps.a);
        while let Some(coord) = walker.next_tile() {
            let boxes = tile.used_boxes(coord.column, args.n);
            let mut step = 0;
            while step < args.k_steps {
                stages.wait_empty();
                let full = stages.full();
                mbarrier::arrive_expect_bytes(full, tile.a_bytes() + boxes * B_BOX_BYTES);
                let a = shared.stage(stages.slot());
                load_a(tile, a, maps.a, step * step_k, coord.row, full);
                let b = a + tile.a_bytes();
                if args.relay.couriers == 0 {
                    let mut index = 0;
                    while index < boxes {
                        let dst = b + index * B_BOX_BYTES;
                        load_box(dst, maps.b, args, &coord, index, step, step_k, full);
                        index += 1;
                    }
                } else {
                    load_relayed(tile, b, args, &coord, boxes, step, full);
                }
                stages.advance();
                step += 1;
            }
        }
    }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn load_a(tile: Tile, stage: u32, map: u64, k: u32, row: u32, full: u32) {
    // SAFETY: boxes of 64 rows fill the tile's A part.
    unsafe {
        tma::load_2d(stage, map, k, row, full);
        if tile.m > A_BOX_ROWS {
            let second = stage + A_BOX_ROWS * STEP_BYTES;
            tma::load_2d(second, map, k, row + A_BOX_ROWS, full);
        }
    }
}

/// Loads box `index` of the tile's weights for one step, from where the maps say they are.
///
/// # Safety
/// As [`run`], with `dst` a free box in shared memory.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "coordinates of one box, in registers"
)]
pub(super) unsafe fn load_box(
    dst: u32,
    rows_map: u64,
    args: &GemmArgs,
    coord: &TileCoord,
    index: u32,
    step: u32,
    step_k: u32,
    full: u32,
) {
    let weight = coord.weight - args.first_weight;
    let column = coord.column + index * B_BOX_ROWS;
    // SAFETY: what lies outside the map is zero-filled and still counted.
    unsafe {
        if args.b_layout == weight_layout::ROWS {
            tma::load_3d(dst, rows_map, step * step_k, column, weight, full);
        } else {
            let map = args.b_maps + weight as u64 * MAP_BYTES;
            let panel = column / crate::tile::PANEL_ROWS;
            // Either N spans several slices (gate and up) or K does (down).
            let n_slice = panel / args.panels_per_slice.max(1);
            let k_slice = step / args.units_per_slice.max(1);
            let unit = step - k_slice * args.units_per_slice;
            let panel = panel - n_slice * args.panels_per_slice;
            tma::load_panels(dst, map, unit, panel, n_slice + k_slice, full);
        }
    }
}

/// Loads the tile's weights for one step from the relay's ring, once they are there.
///
/// # Safety
/// As [`run`], with couriers in the grid.
#[inline(always)]
unsafe fn load_relayed(
    tile: Tile,
    dst: u32,
    args: &GemmArgs,
    coord: &TileCoord,
    boxes: u32,
    step: u32,
    full: u32,
) {
    let relay = &args.relay;
    // SAFETY: the host never makes a ring without slots.
    unsafe { core::hint::assert_unchecked(relay.slots > 0) };
    let first = coord.column_tile * units(tile, args.k_steps);
    let in_unit = step % UNIT_STEPS;
    let mut index = 0;
    while index < boxes {
        let number = first + unit(tile, step, index);
        let slot = number % relay.slots;
        // SAFETY: a courier fills the slot with this unit, which stays there until this
        // block, among others, has counted its tile as done.
        unsafe {
            if in_unit == 0 {
                global::wait_acquire(relay.state + slot as u64 * 4, |filled| filled == number + 1);
                tma::fence_global();
            }
            let source =
                relay.ring + slot as u64 * UNIT_BYTES as u64 + (in_unit * B_BOX_BYTES) as u64;
            tma::load_bytes(dst + index * B_BOX_BYTES, source, B_BOX_BYTES, full);
        }
        index += 1;
    }
}
