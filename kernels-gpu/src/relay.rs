//! How weights in host memory cross the link once, however many row tiles use them.
//!
//! The first blocks of the grid are *couriers*: they compute nothing, but copy the weights of
//! each column tile, in the order in which tiles are numbered, into a ring in device memory.
//! The others load their weights from that ring.
//!
//! ```text
//! courier   TMA box: host -> shared    wait done[column tile of the slot's last unit]
//!           bulk copy: shared -> slot  filled[slot] = unit + 1
//! producer  wait filled[slot]          bulk copy: slot -> stage
//! consumer  after the last step        done[column tile] += 1
//! ```
//!
//! A *unit* is what one slot holds: one box of 64 weight rows for up to four steps of K, as
//! it will lie in shared memory, swizzle included. Units are numbered by column tile, then
//! step, then box; unit u goes to slot u mod S and is copied by courier u mod C.

use crate::tile::{B_BOX_BYTES, Tile};

/// Steps of K in one unit.
pub const UNIT_STEPS: u32 = 4;
/// Bytes of one unit.
pub const UNIT_BYTES: u32 = UNIT_STEPS * B_BOX_BYTES;
/// Units that a courier has in flight, in the shared memory of its stages.
pub const BUFFERS: u32 = 4;
/// Set in `done[column tile]` when its last row tile is done.
pub const COMPLETE: u32 = 1 << 31;

/// Units of one column tile.
#[inline(always)]
pub const fn units(tile: Tile, k_steps: u32) -> u32 {
    k_steps.div_ceil(UNIT_STEPS) * tile.b_boxes()
}

/// The unit of a column tile that holds `step` of box `b_box`.
#[inline(always)]
pub const fn unit(tile: Tile, step: u32, b_box: u32) -> u32 {
    step / UNIT_STEPS * tile.b_boxes() + b_box
}

const _: () = {
    use crate::tile::{M64N256, M128N128, M128N192, M128N256};
    let tiles = [M128N256, M128N192, M128N128, M64N256];
    let mut i = 0;
    while i < tiles.len() {
        assert!(BUFFERS * UNIT_BYTES <= tiles[i].staging_offset());
        // A courier uses the stages' pipeline.
        assert!(BUFFERS == tiles[i].stages);
        i += 1;
    }
};
