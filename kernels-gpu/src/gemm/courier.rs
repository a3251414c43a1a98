//! A courier: one thread of a block that only moves weights from host memory to the relay's
//! ring (see [`crate::relay`]).

use super::kernel::{DeviceGroups, Maps};
use super::pipeline::Shared;
use super::producer::load_box;
use crate::args::GemmArgs;
use crate::ptx::convert::opaque;
use crate::ptx::{global, mbarrier, tma};
use crate::relay::{BUFFERS, COMPLETE, UNIT_BYTES, UNIT_STEPS, units};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{B_BOX_BYTES, Tile};

/// Copies every unit of courier `courier`.
///
/// # Safety
/// One thread of the block calls it, with the maps, groups and ring that `args` promises.
#[inline(always)]
pub(super) unsafe fn run(
    tile: Tile,
    step_k: u32,
    maps: Maps,
    args: &GemmArgs,
    columns: TileWalker<DeviceGroups>,
    shared: Shared,
    courier: u32,
) {
    let relay = &args.relay;
    let mut loads = Units::new(tile, args, columns, courier);
    let (mut loaded, mut stored) = (shared.stages(), shared.stages());
    let mut in_flight = 0;
    // SAFETY: buffers are used between their load and the end of their store; a slot is
    // written once all that read its last unit have said so.
    unsafe {
        loop {
            while in_flight < BUFFERS {
                let Some((coord, unit)) = loads.next() else {
                    break;
                };
                shared.put_unit(loaded.slot(), loads.first + unit);
                let buffer = shared.relay_buffer(loaded.slot());
                load_unit(
                    tile,
                    step_k,
                    maps,
                    args,
                    &coord,
                    unit,
                    buffer,
                    loaded.full(),
                );
                loaded.advance();
                in_flight += 1;
            }
            if in_flight == 0 {
                return;
            }
            stored.wait_full();
            let number = shared.unit_in(stored.slot());
            wait_free(args, loads.per_tile, number);
            let slot = number % relay.slots;
            let steps = unit_steps(tile, args.k_steps, number % loads.per_tile);
            tma::store_bytes(
                relay.ring + slot as u64 * UNIT_BYTES as u64,
                shared.relay_buffer(stored.slot()),
                steps * B_BOX_BYTES,
            );
            tma::fence_global();
            global::release(relay.state + slot as u64 * 4, number + 1);
            stored.advance();
            in_flight -= 1;
        }
    }
}

/// Units of one courier in their order, each with its column tile.
struct Units {
    columns: TileWalker<DeviceGroups>,
    coord: Option<TileCoord>,
    tile: Tile,
    n: u32,
    /// Units of a column tile.
    per_tile: u32,
    /// Number of the column tile's first unit.
    first: u32,
    /// Next unit, counted from the column tile's first.
    next: u32,
    step: u32,
}

impl Units {
    #[inline(always)]
    fn new(
        tile: Tile,
        args: &GemmArgs,
        mut columns: TileWalker<DeviceGroups>,
        courier: u32,
    ) -> Self {
        let per_tile = units(tile, args.k_steps);
        // SAFETY: K is not 0 and the host never makes a ring without slots.
        unsafe {
            core::hint::assert_unchecked(per_tile > 0);
            core::hint::assert_unchecked(args.relay.slots > 0);
        }
        Self {
            coord: columns.next_tile(),
            columns,
            tile,
            n: args.n,
            per_tile,
            first: 0,
            next: courier,
            step: args.relay.couriers,
        }
    }

    #[inline(always)]
    fn next(&mut self) -> Option<(TileCoord, u32)> {
        while let Some(coord) = self.coord {
            let unit = self.next;
            if unit < self.per_tile {
                self.next += self.step;
                // Boxes past N have no bytes.
                if unit % self.tile.b_boxes() < self.tile.used_boxes(coord.column, self.n) {
                    return Some((coord, unit));
                }
                continue;
            }
            self.next -= self.per_tile;
            self.first += self.per_tile;
            self.coord = self.columns.next_tile();
        }
        None
    }
}

/// Steps of K in unit `unit` of a column tile: the last ones may have fewer.
#[inline(always)]
fn unit_steps(tile: Tile, k_steps: u32, unit: u32) -> u32 {
    (k_steps - unit / tile.b_boxes() * UNIT_STEPS).min(UNIT_STEPS)
}

/// Starts to load a unit from host memory.
///
/// # Safety
/// As [`run`], with a free `buffer` and its barrier.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "one phase of `run`, split off for reading"
)]
unsafe fn load_unit(
    tile: Tile,
    step_k: u32,
    maps: Maps,
    args: &GemmArgs,
    coord: &TileCoord,
    unit: u32,
    buffer: u32,
    full: u32,
) {
    let steps = unit_steps(tile, args.k_steps, unit);
    let index = unit % tile.b_boxes();
    let first = unit / tile.b_boxes() * UNIT_STEPS;
    let mut step = 0;
    // SAFETY: the buffer holds a unit; the caller's contract.
    unsafe {
        mbarrier::arrive_expect_bytes(full, steps * B_BOX_BYTES);
        while step < opaque(steps) {
            let dst = buffer + step * B_BOX_BYTES;
            load_box(dst, maps.b, args, coord, index, first + step, step_k, full);
            step += 1;
        }
    }
}

/// Waits until the slot of unit `number` is free: all tiles that used its last unit are done.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn wait_free(args: &GemmArgs, per_tile: u32, number: u32) {
    let relay = &args.relay;
    if number >= relay.slots {
        let column_tile = (number - relay.slots) / per_tile;
        let done = relay.state + (relay.slots as u64 + column_tile as u64) * 4;
        // SAFETY: the host gives a word for each slot and column tile.
        unsafe {
            global::wait_acquire(done, |count| count & COMPLETE != 0);
            tma::fence_global();
        }
    }
}

/// Counts a tile as done: all its loads from the ring have landed.
///
/// # Safety
/// One thread of the block calls it, once a tile, in a grid with couriers.
#[inline(always)]
pub(super) unsafe fn count_tile(args: &GemmArgs, coord: &TileCoord) {
    let relay = &args.relay;
    let done = relay.state + (relay.slots as u64 + coord.column_tile as u64) * 4;
    // SAFETY: the host gives a word for each slot and column tile.
    unsafe {
        if global::add_release(done, 1) + 1 == coord.row_tiles {
            global::add_release(done, COMPLETE);
        }
    }
}
