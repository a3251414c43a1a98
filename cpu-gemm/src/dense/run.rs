//! From jobs to tiles.
//!
//! ```text
//! task: rows x cols of D
//!   for each 256 of K             sums in D itself where it can hold them, else in a buffer
//!     pack B  cols x 256
//!     for each BLOCK_ROWS rows
//!       pack A
//!       for each panel of B: for each panel of A: tile
//!   D = alpha * sums + beta * C
//! ```

use std::cell::RefCell;

use super::job::Job;
use super::kernels::{self, MAX_TILE, Tile};
use super::pack::{MAX_BLOCK_K, Side, Words};
use super::partition::{Task, cut};
use super::{DenseError, Element, Multiply, Output, Scalar};
use crate::region::Region;
use crate::{Engine, Isa};
use half::{bf16, f16};

/// Rows of A that stay in the second-level cache.
const BLOCK_ROWS: usize = 168;
/// Tasks that each thread should find where there are many problems.
const TASKS_A_THREAD: usize = 4;

/// Elements that the CPU has kernels for.
pub trait CpuElement: Element + Words + private::Tiles {}

impl CpuElement for f32 {}
impl CpuElement for f16 {}
impl CpuElement for bf16 {}
impl CpuElement for i8 {}

mod private {
    use super::*;

    /// The register tiles of an element type.
    pub trait Tiles: Element + Words {
        #[doc(hidden)]
        fn tile(isa: Isa) -> TileOf<Self>;
    }

    /// See [`Tile`].
    pub struct TileOf<T: Element + Words>(pub(in crate::dense) Tile<T::Word, T::Scalar>);

    impl Tiles for f32 {
        fn tile(isa: Isa) -> TileOf<Self> {
            TileOf(kernels::f32_tile(isa))
        }
    }
    impl Tiles for f16 {
        fn tile(isa: Isa) -> TileOf<Self> {
            TileOf(kernels::f32_tile(isa))
        }
    }
    impl Tiles for bf16 {
        fn tile(isa: Isa) -> TileOf<Self> {
            TileOf(kernels::f32_tile(isa))
        }
    }
    impl Tiles for i8 {
        fn tile(isa: Isa) -> TileOf<Self> {
            TileOf(kernels::i32_tile(isa))
        }
    }
}

/// Memory that a thread keeps between calls: 64-bit words, so that any element type is aligned.
#[derive(Default)]
struct Scratch {
    a: Vec<u64>,
    b: Vec<u64>,
    sums: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `len` elements of a buffer that grows.
fn take<T: bytemuck::Pod>(buffer: &mut Vec<u64>, len: usize) -> &mut [T] {
    let words = (len * size_of::<T>()).div_ceil(8);
    if buffer.len() < words {
        buffer.resize(words, 0);
    }
    &mut bytemuck::cast_slice_mut(&mut buffer[..words])[..len]
}

/// Computes all jobs in one parallel region.
pub(super) fn run<T, D>(engine: &Engine, jobs: &[Job<T, D>]) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let tile = T::tile(engine.isa()).0;
    let workers = engine.workers();
    let threads = workers.threads();
    // Threads that one of many problems gets for itself.
    let share = (threads * TASKS_A_THREAD).div_ceil(jobs.len().max(1));
    let mut tasks = Vec::new();
    for (number, job) in jobs.iter().enumerate() {
        let shape = [job.m, job.n, job.k];
        cut(
            number,
            shape,
            (tile.mr, tile.nr),
            share.min(threads),
            &mut tasks,
        );
    }
    if tasks.is_empty() {
        return Ok(());
    }
    // The longest first, so that none is left over for the end.
    let work = |t: &Task| t.rows.len() * t.cols.len() * jobs[t.problem].k.max(1);
    tasks.sort_by_key(|t| std::cmp::Reverse(work(t)));
    Region::run(workers.as_ref(), tasks.len(), &|region| {
        SCRATCH.with_borrow_mut(|scratch| {
            while let Some(index) = region.take() {
                let task = &tasks[index];
                // SAFETY: jobs were checked; tasks of D are disjoint, and C is read by the task
                // that writes the same elements of D.
                unsafe { compute(&jobs[task.problem], task, tile, scratch) };
            }
        });
    })?;
    Ok(())
}

/// Computes one task.
///
/// # Safety
/// The job's addresses are valid, and nobody else uses the task's part of D.
unsafe fn compute<T, D>(
    job: &Job<T, D>,
    task: &Task,
    tile: Tile<T::Word, T::Scalar>,
    scratch: &mut Scratch,
) where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let (rows, cols) = (task.rows.len(), task.cols.len());
    let d = job
        .d
        .data
        .wrapping_add(task.rows.start * job.d.rows + task.cols.start);
    // D holds the sums itself if it has their type and C is not under them.
    let same_type = std::any::TypeId::of::<D>() == std::any::TypeId::of::<T::Scalar>();
    let in_d = same_type && !job.in_place() && job.k > 0;
    let (sums, stride) = match in_d {
        true => (d.cast::<T::Scalar>(), job.d.rows),
        false if job.k > 0 => {
            let buffer = take::<T::Scalar>(&mut scratch.sums, rows * cols);
            (buffer.as_mut_ptr(), cols)
        }
        false => (std::ptr::null_mut(), 0),
    };
    let block_k = MAX_BLOCK_K;
    let mut k = 0;
    while k < job.k {
        let depth = block_k.min(job.k - k);
        let units = depth.div_ceil(T::UNIT);
        let b = take::<T::Word>(&mut scratch.b, cols.next_multiple_of(tile.nr) * units);
        let side = Side {
            data: job
                .b
                .data
                .wrapping_add(task.cols.start * job.b.cols + k * job.b.rows),
            step: job.b.cols,
            k_step: job.b.rows,
        };
        // SAFETY: columns of the task and elements k..k + depth exist.
        unsafe { side.pack(cols, depth, tile.nr, b) };
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let count = BLOCK_ROWS.min(rows - first);
            let a = take::<T::Word>(&mut scratch.a, count.next_multiple_of(tile.mr) * units);
            let side = Side {
                data: job
                    .a
                    .data
                    .wrapping_add((task.rows.start + first) * job.a.rows + k * job.a.cols),
                step: job.a.rows,
                k_step: job.a.cols,
            };
            // SAFETY: as above; the block's sums are this task's own.
            unsafe {
                side.pack(count, depth, tile.mr, a);
                let block = Block {
                    units,
                    sums: sums.add(first * stride),
                    stride,
                    accumulate: k > 0,
                };
                block.multiply(tile, (count, a), (cols, b));
            }
        }
        k += depth;
    }
    let plain = job.alpha == T::Scalar::ONE && job.c.is_none();
    if in_d && plain {
        return;
    }
    for r in 0..rows {
        let row = |data: *const D, step: usize| {
            data.wrapping_add((task.rows.start + r) * step + task.cols.start)
        };
        let c = job.c.map(|c| row(c.data, c.rows));
        let d = d.wrapping_add(r * job.d.rows);
        for i in 0..cols {
            // SAFETY: the element is inside C, D and the sums.
            unsafe {
                let c = c.map(|c| (*c.add(i)).widen());
                let value = match job.k > 0 {
                    true => {
                        let sum = *sums.add(r * stride + i);
                        T::Scalar::finish(job.alpha, sum, job.beta, c)
                    }
                    false => match c {
                        Some(c) => T::Scalar::scaled(job.beta, c),
                        None => T::Scalar::ZERO,
                    },
                };
                *d.add(i) = D::round(value);
            }
        }
    }
}

/// Some rows of a task, for one block of K.
struct Block<S> {
    units: usize,
    sums: *mut S,
    stride: usize,
    accumulate: bool,
}

impl<S: Scalar> Block<S> {
    /// All tiles of `rows` packed rows and `cols` packed columns.
    ///
    /// # Safety
    /// The panels hold them, and the sums are the caller's own.
    unsafe fn multiply<W>(
        &self,
        tile: Tile<W, S>,
        (rows, a): (usize, &[W]),
        (cols, b): (usize, &[W]),
    ) {
        let Tile { mr, nr, kernel } = tile;
        let mut edge = [S::ZERO; MAX_TILE];
        for (col, b) in (0..cols).step_by(nr).zip(b.chunks_exact(self.units * nr)) {
            for (row, a) in (0..rows).step_by(mr).zip(a.chunks_exact(self.units * mr)) {
                let (tile_rows, tile_cols) = (mr.min(rows - row), nr.min(cols - col));
                // SAFETY: panels have `units` words for each row and column; a whole tile lies
                // inside the sums, another one goes through `edge`, which holds the largest.
                unsafe {
                    let out = self.sums.add(row * self.stride + col);
                    if tile_rows == mr && tile_cols == nr {
                        let (a, b) = (a.as_ptr(), b.as_ptr());
                        kernel(self.units, a, b, out, self.stride, self.accumulate);
                        continue;
                    }
                    for r in 0..tile_rows {
                        let line = &mut edge[r * nr..][..tile_cols];
                        if self.accumulate {
                            let old =
                                std::slice::from_raw_parts(out.add(r * self.stride), tile_cols);
                            line.copy_from_slice(old);
                        }
                    }
                    let (a, b) = (a.as_ptr(), b.as_ptr());
                    kernel(self.units, a, b, edge.as_mut_ptr(), nr, self.accumulate);
                    for r in 0..tile_rows {
                        let line = &edge[r * nr..][..tile_cols];
                        std::slice::from_raw_parts_mut(out.add(r * self.stride), tile_cols)
                            .copy_from_slice(line);
                    }
                }
            }
        }
    }
}
