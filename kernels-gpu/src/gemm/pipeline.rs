//! Buffers in shared memory that one role fills and another empties, and where they lie.

use crate::ptx::{mbarrier, shared};
use crate::schedule::TileCoord;
use crate::tile::{self, Tile};

/// A role's position in a ring of buffers with a full and an empty barrier each.
#[derive(Clone, Copy)]
pub(super) struct Pipeline {
    barriers: u32,
    /// A power of two, so that one counter is buffer and phase.
    depth: u32,
    position: u32,
}

impl Pipeline {
    #[inline(always)]
    const fn new(barriers: u32, depth: u32) -> Self {
        Self {
            barriers,
            depth,
            position: 0,
        }
    }

    /// Current buffer.
    #[inline(always)]
    pub(super) fn slot(&self) -> u32 {
        self.position & (self.depth - 1)
    }

    /// Flips each time the ring wraps.
    #[inline(always)]
    fn phase(&self) -> u32 {
        self.position / self.depth & 1
    }

    /// Initialises all barriers for `fill` arrivals of those that fill a buffer and `empty` of
    /// those that empty it.
    ///
    /// # Safety
    /// One thread does it before anybody uses them.
    #[inline(always)]
    pub(super) unsafe fn initialise(mut self, fill: u32, empty: u32) {
        while self.position < self.depth {
            // SAFETY: the caller's contract.
            unsafe {
                mbarrier::init(self.full(), fill);
                mbarrier::init(self.empty(), empty);
            }
            self.advance();
        }
    }

    /// Barrier that completes when the buffer is filled.
    #[inline(always)]
    pub(super) fn full(&self) -> u32 {
        self.barriers + self.slot() * 8
    }

    /// Barrier that completes when the buffer is free again.
    #[inline(always)]
    pub(super) fn empty(&self) -> u32 {
        self.barriers + (self.depth + self.slot()) * 8
    }

    /// Waits until the buffer is filled.
    ///
    /// # Safety
    /// The barriers are initialised.
    #[inline(always)]
    pub(super) unsafe fn wait_full(&self) {
        // SAFETY: the caller's contract.
        unsafe { mbarrier::wait(self.full(), self.phase()) }
    }

    /// Waits until the buffer is free; at once in the first round.
    ///
    /// # Safety
    /// The barriers are initialised.
    #[inline(always)]
    pub(super) unsafe fn wait_empty(&self) {
        // SAFETY: the caller's contract.
        unsafe { mbarrier::wait(self.empty(), self.phase() ^ 1) }
    }

    /// Goes to the next buffer.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.position += 1;
    }
}

/// The block's shared memory (see [`crate::tile`]).
#[derive(Clone, Copy)]
pub(super) struct Shared {
    base: u32,
    tile: Tile,
}

impl Shared {
    #[inline(always)]
    pub(super) const fn new(base: u32, tile: Tile) -> Self {
        Self { base, tile }
    }

    /// The stages' pipeline.
    #[inline(always)]
    pub(super) const fn stages(&self) -> Pipeline {
        Pipeline::new(self.base + self.tile.barrier_offset(), self.tile.stages)
    }

    /// The pipeline of step scales, four steps a buffer.
    #[inline(always)]
    pub(super) const fn scales(&self) -> Pipeline {
        let before = 2 * self.tile.stages * 8;
        Pipeline::new(
            self.base + self.tile.barrier_offset() + before,
            self.tile.scale_buffers,
        )
    }

    /// The pipeline of tile values.
    #[inline(always)]
    pub(super) const fn values(&self) -> Pipeline {
        let before = 2 * (self.tile.stages + self.tile.scale_buffers) * 8;
        Pipeline::new(
            self.base + self.tile.barrier_offset() + before,
            tile::VALUE_BUFFERS,
        )
    }

    /// Operands of stage `slot`.
    #[inline(always)]
    pub(super) const fn stage(&self, slot: u32) -> u32 {
        self.base + slot * self.tile.stage_bytes()
    }

    /// Scales of step `step` in buffer `slot`: a row each, then a column each.
    #[inline(always)]
    pub(super) const fn step_scales(&self, slot: u32, step: u32) -> u32 {
        let index = slot * tile::SCALE_STEPS + step % tile::SCALE_STEPS;
        self.base + self.tile.step_scales_offset() + index * self.tile.step_scales_bytes()
    }

    /// Coordinates of the tile in buffer `slot`.
    #[inline(always)]
    pub(super) const fn coordinates(&self, slot: u32) -> u32 {
        self.base + self.tile.values_offset() + slot * self.tile.values_bytes()
    }

    /// Values of the tile in buffer `slot`: row scales, column scales, bias.
    #[inline(always)]
    pub(super) const fn tile_values(&self, slot: u32) -> u32 {
        self.coordinates(slot) + tile::COORDINATES_BYTES
    }

    /// Writes a tile's coordinates, or that there is no tile any more.
    ///
    /// # Safety
    /// The buffer is free.
    #[inline(always)]
    pub(super) unsafe fn put_coordinates(&self, slot: u32, coord: Option<TileCoord>) {
        let at = self.coordinates(slot);
        // Every tile has a row, so that its end is not 0.
        let [row, row_end, column, column_tile, row_tiles] = match coord {
            Some(c) => [c.row, c.row_end, c.column, c.column_tile, c.row_tiles],
            None => [0; 5],
        };
        // SAFETY: the caller's promise.
        unsafe {
            shared::store_v4(at, [row, row_end, column, column_tile]);
            shared::store(at + 16, row_tiles);
        }
    }

    /// The coordinates written by [`Self::put_coordinates`], but for the weight.
    ///
    /// # Safety
    /// The buffer is full.
    #[inline(always)]
    pub(super) unsafe fn coordinates_of(&self, slot: u32) -> Option<TileCoord> {
        let at = self.coordinates(slot);
        // SAFETY: the caller's promise.
        let [row, row_end, column, column_tile] = unsafe { shared::load_v4(at) };
        (row_end > 0).then_some(TileCoord {
            row,
            row_end,
            column,
            weight: 0,
            column_tile,
            // SAFETY: as above.
            row_tiles: unsafe { shared::load(at + 16) },
        })
    }

    /// Staging area of consumer warp `warp` (0..8).
    #[inline(always)]
    pub(super) const fn staging(&self, warp: u32) -> u32 {
        self.base + self.tile.staging_offset() + warp * self.tile.staging_bytes
    }

    /// Notes that a courier's buffer `index` holds unit `number`, where others keep tile values.
    ///
    /// # Safety
    /// The block is a courier.
    #[inline(always)]
    pub(super) unsafe fn put_unit(&self, index: u32, number: u32) {
        // SAFETY: the caller's promise.
        unsafe { shared::store(self.coordinates(0) + index * 4, number) }
    }

    /// The unit in a courier's buffer `index`.
    ///
    /// # Safety
    /// The block is a courier, and the buffer was filled.
    #[inline(always)]
    pub(super) unsafe fn unit_in(&self, index: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { shared::load(self.coordinates(0) + index * 4) }
    }

    /// A courier's buffer, in the place of stages.
    #[inline(always)]
    pub(super) const fn relay_buffer(&self, index: u32) -> u32 {
        self.base + index * crate::relay::UNIT_BYTES
    }
}
