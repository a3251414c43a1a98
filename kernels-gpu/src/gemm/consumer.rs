//! A consumer warpgroup: wgmma over the stages, then the epilogue.

use super::courier;
use super::epilogue::{Fragment, Pending};
use super::format::{Format, Scales};
use super::pipeline::{Pipeline, Shared};
use crate::args::GemmArgs;
use crate::ptx::wgmma::{self, Accumulator};
use crate::ptx::{mbarrier, shared, sync};
use crate::tile::{B_BOX_ROWS, SCALE_STEPS, STEP_BYTES, Tile, WARPGROUP_M};
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

/// Makes the second consumer start one step after the first.
///
/// Two that start together stay together: they would share the tensor cores, and then both
/// leave them idle while they scale or round. A step apart, one multiplies meanwhile.
struct Lag {
    consumer: u32,
    pending: bool,
}

impl Lag {
    const BARRIER: u32 = 1;
    const THREADS: u32 = 256;

    #[inline(always)]
    fn new(consumer: u32) -> Self {
        Self {
            consumer,
            pending: true,
        }
    }

    /// The second consumer waits, before its first step.
    ///
    /// # Safety
    /// All threads of the consumer call it, converged; the first consumer has a step to do.
    #[inline(always)]
    unsafe fn wait(&mut self) {
        if self.pending && self.consumer == 1 {
            self.pending = false;
            // SAFETY: the caller's promise.
            unsafe { sync::barrier_wait::<{ Self::BARRIER }, { Self::THREADS }>() };
        }
    }

    /// The first consumer has done a step.
    ///
    /// # Safety
    /// All threads of the consumer call it, converged.
    #[inline(always)]
    unsafe fn end(&mut self) {
        if self.pending {
            self.pending = false;
            // SAFETY: the caller's promise.
            unsafe { sync::barrier_arrive::<{ Self::BARRIER }, { Self::THREADS }>() };
        }
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
    memory: Shared,
) {
    let place = Place::new(tile, memory, consumer, thread);
    let (mut stages, mut scales, mut values) = (memory.stages(), memory.scales(), memory.values());
    let mut lag = Lag::new(consumer);
    let mut pending = Pending::none();
    loop {
        // SAFETY: the caller's contract carries over; stages and values are used between
        // their full barrier and their release.
        unsafe {
            values.wait_full();
            if memory.coordinates_of(values.slot()).is_none() {
                break;
            }
            lag.wait();
            let mut sums = A::zeroed();
            if F::PER_STEP {
                stepwise_sum::<F, A>(&place, args, &mut stages, &mut scales, &mut lag, &mut sums);
            } else {
                plain_sum::<F, A>(&place, args, &mut stages, &mut lag, &mut sums, &pending);
            }
            // Read again rather than kept in registers.
            let Some(coord) = memory.coordinates_of(values.slot()) else {
                break;
            };
            if args.relay.couriers != 0 && consumer == 0 && thread == 0 {
                courier::count_tile(args, &coord);
            }
            let fragment = Fragment::new(&place, &coord);
            fragment.finish::<F, A>(&place, args, memory.tile_values(values.slot()), &mut sums);
            release(&place, values.empty());
            values.advance();
            pending = fragment.output(&place, args, &sums);
            pending.store_first(&place, args);
            if F::PER_STEP {
                pending.store_rest(&place, args, 0);
            }
        }
    }
    if !F::PER_STEP {
        // SAFETY: the caller's contract.
        unsafe { pending.store_rest(&place, args, 0) };
    }
}

/// One accumulator over all of K; a stage is released once the next one's products are in
/// flight, so that the tensor cores never wait. The last tile's output is stored meanwhile, a
/// part in each step.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn plain_sum<F: Format, A: Accumulator>(
    place: &Place,
    args: &GemmArgs,
    stages: &mut Pipeline,
    lag: &mut Lag,
    sums: &mut A,
    pending: &Pending<A>,
) {
    let mut step = 0;
    let mut previous = 0;
    // SAFETY: the caller's contract; each stage is read after its full barrier.
    unsafe {
        while step < args.k_steps {
            let (a, b) = place.descriptors(stages.slot());
            stages.wait_full();
            wgmma::fence();
            F::step(sums, a, b, step);
            wgmma::commit();
            pending.store_in_step(place, args, step);
            wgmma::wait_all_but_one();
            if step > 0 {
                release(place, previous);
                lag.end();
            }
            previous = stages.empty();
            stages.advance();
            step += 1;
        }
        sums.wait_all();
        release(place, previous);
        lag.end();
        pending.store_rest(place, args, args.k_steps);
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
    scales: &mut Pipeline,
    lag: &mut Lag,
    sums: &mut A,
) {
    let mut step = 0;
    // SAFETY: the caller's contract; stages and scales are read after their full barriers.
    unsafe {
        let mut product = A::zeroed();
        while step < args.k_steps {
            let (a, b) = place.descriptors(stages.slot());
            stages.wait_full();
            wgmma::fence();
            F::step(&mut product, a, b, 0);
            wgmma::commit();
            if F::STEP_SCALES && step % SCALE_STEPS == 0 {
                scales.wait_full();
            }
            let step_scales = StepScales::load::<F>(place, scales.slot(), step);
            product.wait_all();
            release(place, stages.empty());
            stages.advance();
            lag.end();
            step_scales.add::<F, A>(&product, sums);
            step += 1;
            if F::STEP_SCALES && (step % SCALE_STEPS == 0 || step == args.k_steps) {
                release(place, scales.empty());
                scales.advance();
            }
        }
    }
}

/// Most boxes of 64 columns that a warpgroup accumulates where blocks of them share a scale.
const BOXES: usize = 3;

/// One step's scales of a thread's rows and columns.
struct StepScales {
    /// Of the two rows, times the box's if boxes have scales.
    rows: [[f32; 2]; BOXES],
    /// Where the columns' scales are, if columns have scales.
    columns: u32,
}

impl StepScales {
    /// Finds step `step`'s scales in buffer `slot`.
    ///
    /// # Safety
    /// The buffer is full.
    #[inline(always)]
    unsafe fn load<F: Format>(place: &Place, slot: u32, step: u32) -> Self {
        let base = place.memory.step_scales(slot, step);
        let columns = base + place.tile.m * 4;
        let mut rows = [[1.0; 2]; BOXES];
        // SAFETY: the caller's promise.
        unsafe {
            if matches!(F::ROWS, Scales::Step) {
                let row = base + place.thread_row() * 4;
                rows = [[shared::load_f32(row), shared::load_f32(row + 8 * 4)]; BOXES];
            }
            if matches!(F::COLUMNS, Scales::StepBlock) {
                let first = columns + place.column / B_BOX_ROWS * 4;
                for index in 0..BOXES.min((place.tile.warpgroup_n() / B_BOX_ROWS) as usize) {
                    let scale = shared::load_f32(first + index as u32 * 4);
                    rows[index] = [rows[index][0] * scale, rows[index][1] * scale];
                }
            }
        }
        Self {
            rows,
            columns: columns + place.thread_column() * 4,
        }
    }

    /// Adds the scaled product to the sums.
    ///
    /// # Safety
    /// The buffer is still full, and the warp converged.
    #[inline(always)]
    unsafe fn add<F: Format, A: Accumulator>(&self, product: &A, sums: &mut A) {
        for j in 0..A::REGISTERS / 4 {
            let mut columns = [1.0; 2];
            if matches!(F::COLUMNS, Scales::Step) {
                // SAFETY: the caller's promise.
                unsafe {
                    if j % 8 == 0 {
                        // Loads stay behind it: too many ahead of their use would spill.
                        sync::warp();
                    }
                    columns = shared::load_f32x2(self.columns + j as u32 * 32);
                }
            }
            for i in 0..4 {
                let value = F::value(product.get(4 * j + i));
                let sum = sums.get(4 * j + i);
                let row = self.rows[j / 8][i / 2];
                let next = match F::COLUMNS {
                    Scales::Step => fma(value, row * columns[i % 2], sum),
                    _ if F::STEP_SCALES => fma(value, row, sum),
                    _ => sum + value,
                };
                sums.set(4 * j + i, next);
            }
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
