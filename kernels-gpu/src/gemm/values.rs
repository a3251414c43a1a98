//! Three warps that tell the consumers which tile comes next, and bring scales and biases to
//! shared memory: of a whole tile, and of four steps at a time. Columns past N and rows past
//! the group repeat the last one. Loops stay loops (bounds are opaque), to keep the addresses
//! in few registers.
//!
//! A tile's own values are copied asynchronously, word by word. Scales of steps go through
//! registers: four steps of a row are 16 bytes in memory, mostly, and one request; word by
//! word they would be four, and requests are what the memory pipeline is short of beside TMA.

use super::format::{Format, Scales};
use super::kernel::DeviceGroups;
use super::pipeline::Shared;
use crate::args::{ColumnTable, GemmArgs};
use crate::ptx::convert::{opaque, opaque_u64};
use crate::ptx::{global, mbarrier, shared, sync};
use crate::schedule::{TileCoord, TileWalker};
use crate::tile::{B_BOX_ROWS, SCALE_STEPS, Tile};

/// Threads that copy: all of the producer's warpgroup but its first warp.
pub(super) const THREADS: u32 = 96;
/// Arrivals that fill a buffer of tile values: each thread's copies, and the coordinates.
pub(super) const TILE_ARRIVALS: u32 = THREADS + 1;
/// Arrivals that fill a buffer of step scales: one a warp.
pub(super) const SCALE_ARRIVALS: u32 = THREADS / 32;

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
            if F::STEP_SCALES {
                let items = StepItems::new::<F>(tile, thread, args, &coord);
                let mut step = 0;
                let mut next = items.load(step);
                while step < args.k_steps {
                    scales.wait_empty();
                    items.store(memory.step_scales(scales.slot(), 0), &next);
                    sync::warp();
                    if thread % 32 == 0 {
                        mbarrier::arrive(scales.full());
                    }
                    scales.advance();
                    step += SCALE_STEPS;
                    // On their way while the next buffer is waited for.
                    next = items.load(step);
                }
            }
        }
    }
}

/// Rows and columns of a tile whose step scales one thread brings: every 96th.
const ITEMS: usize = 4;

/// One thread's rows and columns of a tile, and where their scales are.
struct StepItems<'a> {
    tile: Tile,
    thread: u32,
    args: &'a GemmArgs,
    /// Rows, then columns or boxes of them, of the tile.
    count: u32,
    /// Of the scales of step 0; of the last item's where there are fewer.
    addresses: [u64; ITEMS],
}

impl<'a> StepItems<'a> {
    #[inline(always)]
    fn new<F: Format>(tile: Tile, thread: u32, args: &'a GemmArgs, coord: &TileCoord) -> Self {
        // Columns of D that have one item.
        let (columns, width) = match F::COLUMNS {
            Scales::Step => (tile.n, 1),
            Scales::StepBlock => (tile.b_boxes(), B_BOX_ROWS),
            _ => (0, 1),
        };
        let count = tile.m + columns;
        let addresses = core::array::from_fn(|i| {
            let item = (thread + i as u32 * THREADS).min(count - 1);
            if item < tile.m {
                let row = (coord.row + item).min(coord.row_end - 1) as u64;
                args.a_scales + row * args.a_scale_stride as u64 * 4
            } else {
                let column = coord.column + (item - tile.m) * width;
                args.b_scales.address(coord.weight, column.min(args.n - 1))
            }
        });
        Self {
            tile,
            thread,
            args,
            count,
            addresses,
        }
    }

    /// Item `index` of this thread; a constant index after unrolling.
    #[inline(always)]
    fn item(&self, index: usize) -> u32 {
        self.thread + index as u32 * THREADS
    }

    /// Whether any thread has an item `index`.
    #[inline(always)]
    fn exists(&self, index: usize) -> bool {
        index as u32 * THREADS < self.count
    }

    /// Starts to load the scales of steps `step` to `step + 3`, as far as there are.
    ///
    /// # Safety
    /// The tables cover all steps.
    #[inline(always)]
    unsafe fn load(&self, step: u32) -> [[u32; SCALE_STEPS as usize]; ITEMS] {
        let mut scales = [[0; SCALE_STEPS as usize]; ITEMS];
        for (index, scales) in scales.iter_mut().enumerate() {
            if !self.exists(index) {
                continue;
            }
            let stride = match self.item(index) < self.tile.m {
                true => 4,
                // Asked for again each time rather than kept in registers.
                false => opaque_u64(self.args.b_scales.block_stride),
            };
            let address = self.addresses[index] + step as u64 * stride;
            let whole = step + SCALE_STEPS <= self.args.k_steps;
            // SAFETY: what is below `k_steps` exists.
            unsafe {
                if whole && stride == 4 && address % 16 == 0 {
                    *scales = global::load_read_only_v4(address);
                } else {
                    for (block, scale) in scales.iter_mut().enumerate() {
                        if step + (block as u32) < self.args.k_steps {
                            *scale = global::load_read_only(address + block as u64 * stride);
                        }
                    }
                }
            }
        }
        scales
    }

    /// Puts scales where the consumers read them: a step's table after the other.
    ///
    /// # Safety
    /// The buffer at `dst` is free.
    #[inline(always)]
    unsafe fn store(&self, dst: u32, scales: &[[u32; SCALE_STEPS as usize]; ITEMS]) {
        for (index, scales) in scales.iter().enumerate() {
            let item = self.item(index);
            if !self.exists(index) || item >= self.count {
                continue;
            }
            for (block, &scale) in scales.iter().enumerate() {
                let at = dst + item * 4 + block as u32 * self.tile.step_scales_bytes();
                // SAFETY: the caller's promise.
                unsafe { shared::store(at, scale) };
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
                self.rows(rows);
            }
            if matches!(F::COLUMNS, Scales::End) {
                self.columns(&args.b_scales, columns);
            }
            if args.bias.base != 0 {
                self.columns(&args.bias, columns + self.tile.n * 4);
            }
        }
    }

    /// A's scales, one a row of the tile.
    ///
    /// # Safety
    /// As [`run`], with `dst` free.
    #[inline(always)]
    unsafe fn rows(&self, dst: u32) {
        let mut row = self.thread;
        while row < opaque(self.tile.m) {
            let source = (self.coord.row + row).min(self.coord.row_end - 1) as u64;
            let address = self.args.a_scales + source * self.args.a_scale_stride as u64 * 4;
            // SAFETY: the row is inside the group.
            unsafe { shared::copy_word_async(dst + row * 4, address) };
            row += THREADS;
        }
    }

    /// A table's values, one a column of the tile.
    ///
    /// # Safety
    /// As [`run`], with `dst` free.
    #[inline(always)]
    unsafe fn columns(&self, table: &ColumnTable, dst: u32) {
        let mut column = self.thread;
        while column < opaque(self.tile.n) {
            let last = (self.coord.column + column).min(self.args.n - 1);
            let address = table.address(self.coord.weight, last);
            // SAFETY: the column is below N.
            unsafe { shared::copy_word_async(dst + column * 4, address) };
            column += THREADS;
        }
    }
}
