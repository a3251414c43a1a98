//! The producer: one thread that keeps the ring full.

use super::entries::{DeviceGroups, Maps, Ring};
use crate::args::{GemmArgs, weight_layout};
use crate::ptx::{mbarrier, tma};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{A_BOX_ROWS, B_BOX_ROWS, STEP_BYTES, Tile};

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
    mut ring: Ring,
) {
    // SAFETY: the host encoded the maps for exactly these boxes.
    unsafe {
        tma::prefetch_map(maps.a);
        while let Some(coord) = walker.next_tile() {
            let mut step = 0;
            while step < args.k_steps {
                mbarrier::wait(ring.empty(), ring.phase ^ 1);
                let full = ring.full();
                mbarrier::arrive_expect_bytes(full, tile.stage_bytes());
                let stage = ring.stage_address(tile);
                load_a(tile, stage, maps.a, step * step_k, coord.row, full);
                let b = stage + tile.a_bytes();
                load_b(tile, b, maps.b, args, &coord, step, step_k, full);
                ring.advance(tile);
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
            tma::load_2d(
                stage + A_BOX_ROWS * STEP_BYTES,
                map,
                k,
                row + A_BOX_ROWS,
                full,
            );
        }
    }
}

/// # Safety
/// As [`run`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "one phase of `run`, split off for reading"
)]
unsafe fn load_b(
    tile: Tile,
    stage: u32,
    map: u64,
    args: &GemmArgs,
    coord: &TileCoord,
    step: u32,
    step_k: u32,
    full: u32,
) {
    let weight = coord.weight - args.first_weight;
    let mut loaded = 0;
    while loaded < tile.n {
        let dst = stage + loaded * STEP_BYTES;
        let column = coord.column + loaded;
        // SAFETY: boxes of 128 weight rows fill the tile's B part; what lies outside the
        // map is zero-filled and still counted.
        unsafe {
            if args.b_layout == weight_layout::ROWS {
                tma::load_3d(dst, map, step * step_k, column, weight, full);
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
        loaded += B_BOX_ROWS;
    }
}
