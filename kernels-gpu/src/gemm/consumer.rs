//! A consumer warpgroup: wgmma over the stages, then the epilogue.

use super::courier;
use super::epilogue::{Fragment, Pending};
use super::format::{Format, Scales};
use super::pipeline::{Pipeline, Shared};
use crate::args::GemmArgs;
use crate::ptx::convert::opaque;
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

    /// Descriptors of A and B in the stage at `stage`; the same in all lanes.
    #[inline(always)]
    fn descriptors(&self, stage: u32) -> (u32, u32) {
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

/// Whose products go to the tensor cores next, where consumers also scale and add in between.
///
/// Products of both that are under way together end together, and then both consumers leave
/// the tensor cores idle while they add. So the products of one are queued behind the other's:
/// it adds while the other's run.
///
/// Not where each element has a scale of its own: multiplying those takes a consumer as long as
/// its product takes the tensor cores, and waiting for turns would come on top.
struct Turn {
    consumer: u32,
}

impl Turn {
    const FIRST: u32 = 1;
    const SECOND: u32 = 2;
    const THREADS: u32 = 256;

    /// Whether consumers of a format take turns.
    #[inline(always)]
    const fn taken<F: Format>() -> bool {
        F::PER_STEP && !matches!(F::COLUMNS, Scales::Step)
    }

    /// # Safety
    /// All threads of the consumer call it, converged.
    #[inline(always)]
    unsafe fn new<F: Format>(consumer: u32) -> Self {
        if Self::taken::<F>() && consumer == 1 {
            // SAFETY: the caller's promise. The first turn is the first consumer's.
            unsafe { sync::barrier_arrive::<{ Self::FIRST }, { Self::THREADS }>() }
        }
        Self { consumer }
    }

    /// Waits for this consumer's turn.
    ///
    /// # Safety
    /// All threads of the consumer call it, converged, once before each [`Self::pass`].
    #[inline(always)]
    unsafe fn wait<F: Format>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            if !Self::taken::<F>() {
                return;
            }
            if self.consumer == 0 {
                sync::barrier_wait::<{ Self::FIRST }, { Self::THREADS }>();
            } else {
                sync::barrier_wait::<{ Self::SECOND }, { Self::THREADS }>();
            }
        }
    }

    /// Gives the turn to the other consumer.
    ///
    /// # Safety
    /// All threads of the consumer call it, converged, once after each [`Self::wait`].
    #[inline(always)]
    unsafe fn pass<F: Format>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            if !Self::taken::<F>() {
                return;
            }
            if self.consumer == 0 {
                sync::barrier_arrive::<{ Self::SECOND }, { Self::THREADS }>();
            } else {
                sync::barrier_arrive::<{ Self::FIRST }, { Self::THREADS }>();
            }
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
    // SAFETY: the caller's contract.
    let turn = unsafe { Turn::new::<F>(consumer) };
    let mut pending = Pending::none();
    loop {
        // SAFETY: the caller's contract carries over; stages and values are used between
        // their full barrier and their release.
        unsafe {
            values.wait_full();
            if memory.coordinates_of(values.slot()).is_none() {
                break;
            }
            let mut sums = A::zeroed();
            if F::PER_STEP {
                stepwise_sum::<F, A>(&place, args, &mut stages, &mut scales, &turn, &mut sums);
            } else {
                lag.wait();
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
            if F::PER_STEP {
                fragment.store::<A>(&place, args, &sums);
            } else {
                pending = fragment.output(&place, args, &sums);
                pending.store_first(&place, args);
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
            // From lane 0, so that descriptors are in uniform registers from here on.
            let stage = sync::broadcast_lane0(place.memory.stage(stages.slot()));
            let (a, b) = place.descriptors(stage);
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
    turn: &Turn,
    sums: &mut A,
) {
    // Opaque, or the compiler would write the first step out on its own.
    let mut step = opaque(0);
    // SAFETY: the caller's contract; stages and scales are read after their full barriers.
    unsafe {
        let mut product = A::zeroed();
        let (mut a, mut b) = place.descriptors(place.memory.stage(stages.slot()));
        stages.wait_full();
        loop {
            turn.wait::<F>();
            wgmma::fence();
            F::step(&mut product, a, b, 0);
            wgmma::commit();
            turn.pass::<F>();
            // While these run, all that the next steps need and that does not need the product.
            if F::STEP_SCALES && step % SCALE_STEPS == 0 {
                scales.wait_full();
            }
            let step_scales = StepScales::<A>::load::<F>(place, scales.slot(), step);
            step += 1;
            if F::STEP_SCALES && (step % SCALE_STEPS == 0 || step == args.k_steps) {
                release(place, scales.empty());
                scales.advance();
            }
            let empty = stages.empty();
            stages.advance();
            (a, b) = place.descriptors(place.memory.stage(stages.slot()));
            if step < args.k_steps {
                stages.wait_full();
            }
            product.wait_all();
            release(place, empty);
            step_scales.add::<F>(&product, sums);
            if step == args.k_steps {
                break;
            }
        }
    }
}

/// Most boxes of 64 columns that a warpgroup accumulates where blocks of them share a scale.
const BOXES: usize = 3;

/// One step's scales of a thread's elements.
struct StepScales<A> {
    /// Of the two rows, times the box's if boxes have scales.
    rows: [[f32; 2]; BOXES],
    /// Of each element, if columns have scales.
    elements: A,
}

impl<A: Accumulator> StepScales<A> {
    /// Takes step `step`'s scales from buffer `slot`, and multiplies those of rows with those of
    /// columns.
    ///
    /// # Safety
    /// The buffer is full.
    #[inline(always)]
    unsafe fn load<F: Format>(place: &Place, slot: u32, step: u32) -> Self {
        let base = place.memory.step_scales(slot, step);
        let columns = base + place.tile.m * 4;
        let mut scales = Self {
            rows: [[1.0; 2]; BOXES],
            elements: A::zeroed(),
        };
        // SAFETY: the caller's promise.
        unsafe {
            if matches!(F::ROWS, Scales::Step) {
                let row = base + place.thread_row() * 4;
                scales.rows = [[shared::load_f32(row), shared::load_f32(row + 8 * 4)]; BOXES];
            }
            match F::COLUMNS {
                Scales::StepBlock => {
                    let first = columns + place.column / B_BOX_ROWS * 4;
                    let boxes = BOXES.min((place.tile.warpgroup_n() / B_BOX_ROWS) as usize);
                    for (index, rows) in scales.rows[..boxes].iter_mut().enumerate() {
                        let scale = shared::load_f32(first + index as u32 * 4);
                        *rows = rows.map(|row| row * scale);
                    }
                }
                Scales::Step => {
                    let columns = columns + place.thread_column() * 4;
                    for j in 0..A::REGISTERS / 4 {
                        let pair = shared::load_f32x2(columns + j as u32 * 32);
                        for i in 0..4 {
                            let scale = scales.rows[0][i / 2] * pair[i % 2];
                            scales.elements.set(4 * j + i, scale);
                        }
                    }
                    scales.elements.settle();
                }
                _ => {}
            }
        }
        scales
    }

    /// Adds the scaled product to the sums.
    #[inline(always)]
    fn add<F: Format>(&self, product: &A, sums: &mut A) {
        for j in 0..A::REGISTERS / 4 {
            for i in 0..4 {
                let at = 4 * j + i;
                let (value, sum) = (F::value(product.get(at)), sums.get(at));
                let next = match F::COLUMNS {
                    Scales::Step => fma(value, self.elements.get(at), sum),
                    _ if F::STEP_SCALES => fma(value, self.rows[j / 8][i / 2], sum),
                    _ => sum + value,
                };
                sums.set(at, next);
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
