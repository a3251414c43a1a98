//! A consumer warpgroup: wgmma over the stages, then the epilogue.

use super::courier;
use super::epilogue::Fragment;
use super::format::{Format, Scales};
use super::kernel::{DeviceGroups, has_values};
use super::pipeline::{Pipeline, Shared};
use crate::args::GemmArgs;
use crate::ptx::wgmma::{self, Accumulator};
use crate::ptx::{mbarrier, shared, sync};
use crate::schedule::TileWalker;
use crate::tile::{STEP_BYTES, Tile, WARPGROUP_M};
use asym_gemm_formats::fma;

/// What a consumer thread needs to know of its place in the block.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) tile: Tile,
    pub(super) memory: Shared,
    /// Warp among the consumers (0..8).
    pub(super) warp: u32,
    pub(super) lane: u32,
    /// Where the warpgroup lies in the tile.
    pub(super) row: u32,
    pub(super) column: u32,
}

impl Place {
    #[inline(always)]
    fn new(tile: Tile, memory: Shared, consumer: u32, thread: u32) -> Self {
        let along_m = tile.consumers_m() > 1;
        Self {
            tile,
            memory,
            warp: consumer * 4 + thread / 32,
            lane: thread % 32,
            row: if along_m { consumer * WARPGROUP_M } else { 0 },
            column: if along_m {
                0
            } else {
                consumer * tile.warpgroup_n()
            },
        }
    }

    /// First of this thread's two rows (8 apart) in the tile.
    #[inline(always)]
    pub(super) fn thread_row(&self) -> u32 {
        self.row + self.warp % 4 * 16 + self.lane / 4
    }

    /// First of this thread's columns in the tile.
    #[inline(always)]
    pub(super) fn thread_column(&self) -> u32 {
        self.column + self.lane % 4 * 2
    }

    /// Descriptors of A and B in stage `slot`, known to be the same in all lanes: wgmma takes
    /// them from uniform registers.
    ///
    /// # Safety
    /// The warp must be converged.
    #[inline(always)]
    unsafe fn descriptors(&self, slot: u32) -> (u64, u64) {
        // SAFETY: the caller keeps the warp converged.
        let stage = unsafe { sync::broadcast_lane0(self.memory.stage(slot)) };
        (
            wgmma::descriptor(stage + self.row * STEP_BYTES),
            wgmma::descriptor(stage + self.tile.a_bytes() + self.column * STEP_BYTES),
        )
    }
}

/// Computes this warpgroup's part of every tile of the block.
///
/// # Safety
/// All 128 threads of consumer `consumer` call it, converged, with arguments that keep
/// [`GemmArgs`]'s promises.
#[inline(always)]
pub(super) unsafe fn run<F: Format, A: Accumulator>(
    tile: Tile,
    consumer: u32,
    thread: u32,
    args: &GemmArgs,
    mut walker: TileWalker<DeviceGroups>,
    memory: Shared,
) {
    let place = Place::new(tile, memory, consumer, thread);
    let (mut stages, mut values) = (memory.stages(), memory.values());
    while let Some(coord) = walker.next_tile() {
        // SAFETY: the caller's contract carries over; stages and values are used between
        // their full barrier and their release.
        unsafe {
            let mut sums = A::zeroed();
            if F::PER_STEP {
                stepwise_sum::<F, A>(&place, args, &mut stages, &mut sums);
            } else {
                plain_sum::<F, A>(&place, args, &mut stages, &mut sums);
            }
            if args.relay.couriers != 0 && consumer == 0 && thread == 0 {
                courier::count_tile(args, &coord);
            }
            let fragment = Fragment::new(&place, &coord);
            if has_values::<F>(args) {
                values.wait_full();
                fragment.finish::<F, A>(args, memory.tile_values(values.slot), &mut sums);
                release(&place, values.empty());
                values.advance();
            }
            fragment.store(args, &sums);
        }
    }
}

/// One accumulator over all of K; a stage is released once the next one's products are in
/// flight, so that the tensor cores never wait.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn plain_sum<F: Format, A: Accumulator>(
    place: &Place,
    args: &GemmArgs,
    stages: &mut Pipeline,
    sums: &mut A,
) {
    let mut step = 0;
    let mut previous = 0;
    // SAFETY: the caller's contract; each stage is read after its full barrier.
    unsafe {
        while step < args.k_steps {
            let (a, b) = place.descriptors(stages.slot);
            stages.wait_full();
            wgmma::fence();
            F::step(sums, a, b, step);
            wgmma::commit();
            wgmma::wait_all_but_one();
            if step > 0 {
                release(place, previous);
            }
            previous = stages.empty();
            stages.advance();
            step += 1;
        }
        sums.wait_all();
        release(place, previous);
    }
}

/// Each step's product, scaled and added to f32 sums while the other consumer's products
/// fill the tensor cores.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn stepwise_sum<F: Format, A: Accumulator>(
    place: &Place,
    args: &GemmArgs,
    stages: &mut Pipeline,
    sums: &mut A,
) {
    let mut step = 0;
    // SAFETY: the caller's contract; each stage is read after its full barrier.
    unsafe {
        let mut product = A::zeroed();
        while step < args.k_steps {
            let (a, b) = place.descriptors(stages.slot);
            stages.wait_full();
            wgmma::fence();
            F::step(&mut product, a, b, 0);
            wgmma::commit();
            let scales = StepScales::<A>::load::<F>(place, stages.slot);
            product.wait_all();
            release(place, stages.empty());
            stages.advance();
            for i in 0..A::REGISTERS {
                let value = F::value(product.get(i));
                let sum = sums.get(i);
                sums.set(
                    i,
                    if F::STEP_SCALES {
                        fma(value, scales.of::<F>(i), sum)
                    } else {
                        sum + value
                    },
                );
            }
            step += 1;
        }
    }
}

/// Most columns of one thread that have their own scale in each step: 16 pairs.
const PAIRS: usize = 16;

/// One step's scales of a thread's rows and columns.
struct StepScales<A> {
    rows: [f32; 2],
    columns: [[f32; 2]; PAIRS],
    sums: core::marker::PhantomData<A>,
}

impl<A: Accumulator> StepScales<A> {
    /// Reads the scales of stage `slot`.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn load<F: Format>(place: &Place, slot: u32) -> Self {
        const { assert!(A::COLUMNS as usize / 8 <= PAIRS || !F::STEP_SCALES) };
        let base = place.memory.step_scales(slot);
        let columns = base + place.tile.m * 4;
        let mut scales = Self {
            rows: [1.0; 2],
            columns: [[1.0; 2]; PAIRS],
            sums: core::marker::PhantomData,
        };
        // SAFETY: the values came with the stage.
        unsafe {
            if matches!(F::ROWS, Scales::Step) {
                let row = base + place.thread_row() * 4;
                scales.rows = [shared::load_f32(row), shared::load_f32(row + 8 * 4)];
            }
            if matches!(F::COLUMNS, Scales::StepBlock) {
                let block = shared::load_f32(columns + place.column / 128 * 4);
                scales.rows = [scales.rows[0] * block, scales.rows[1] * block];
            }
            if matches!(F::COLUMNS, Scales::Step) {
                let column = columns + place.thread_column() * 4;
                for j in 0..PAIRS {
                    scales.columns[j] = shared::load_f32x2(column + j as u32 * 32);
                }
            }
        }
        scales
    }

    /// The scale of accumulator register `index`.
    #[inline(always)]
    fn of<F: Format>(&self, index: usize) -> f32 {
        let row = self.rows[index % 4 / 2];
        match F::COLUMNS {
            Scales::Step => row * self.columns[index / 4][index % 2],
            _ => row,
        }
    }
}

/// Gives a buffer back to those who fill it: one arrival a warp.
///
/// # Safety
/// `empty` must be a buffer's empty barrier, and this warp done with the buffer.
#[inline(always)]
unsafe fn release(place: &Place, empty: u32) {
    if place.lane == 0 {
        // SAFETY: the caller names a live barrier.
        unsafe { mbarrier::arrive(empty) }
    }
}
