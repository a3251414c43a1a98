//! Grouped GEMM: D[rows of a group] = A . B[weight]^T.
//!
//! ```text
//! pack     16 rows of A                    a group in the kernel's layout
//! panels   some panels of B times a block  D, rounded once
//! ```
//!
//! The tasks are numbered in this order (see [`crate::region`]). B is read where it lies, packed in
//! panels or row-major; only what is no whole panel (the last rows of N, or rows whose K is no whole
//! number of units) is copied, zero-padded, by the task that needs it.

use std::cell::Cell;
use std::marker::PhantomData;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};
use half::bf16;

use crate::CpuError;
use crate::kernels::{Body, Kernel, Multiply, Panel};
use crate::matrix::{
    Bf16Weights, Codes, Int8Rows, Int8Scaling, Int8Weights, MatrixMut, MatrixRef, WeightsRef,
};
use crate::pool::Workers;
use crate::product::{self, Panels, Tiles};
use crate::recipe::{self, MAX_EXACT_K, Recipe};
use crate::region::{Latch, Region};
use crate::shared::Shared;
use crate::tile::TOKENS;
use crate::tokens::{EncodedRow, Groups, row_bytes};
use crate::validate::{disjoint_rows, same};
use crate::workspace::Workspace;

/// Most rows of A in a block.
const BLOCK_ROWS: usize = 512;
/// Most panels of a task.
const TASK_PANELS: usize = 16;
/// Most groups of a pass on any instruction set.
const MAX_PASS: usize = 8;
/// Tasks that each thread should find.
const TASKS_A_THREAD: usize = 16;

/// Rows of A (and D) that use one weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRange {
    /// Index of the weight matrix.
    pub weight: usize,
    /// First row.
    pub start: usize,
    /// One past the last row.
    pub end: usize,
}

/// Element types that D can have.
pub trait Output: Copy + Send + Sync + sealed::Sealed {
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
}

impl Output for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Output for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_bits(asym_gemm_formats::bf16::encode(x))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// Shapes of a call that fit each other.
struct Shape {
    n: usize,
    k: usize,
}

fn validate<T>(
    a: (usize, usize),
    b: [usize; 3],
    groups: &[GroupRange],
    d: &MatrixMut<'_, T>,
) -> Result<Shape, CpuError> {
    let ((m, k), [matrices, n, b_k]) = (a, b);
    same("K of B", k, b_k)?;
    same("the number of rows of D", m, d.rows())?;
    same("the number of columns of D", n, d.cols())?;
    for (group, g) in groups.iter().enumerate() {
        if g.weight >= matrices {
            return Err(CpuError::ExpertOutOfRange {
                group,
                expert: g.weight,
                experts: matrices,
            });
        }
    }
    let ranges: Vec<_> = groups.iter().map(|g| (g.start, g.end)).collect();
    disjoint_rows(&ranges, m)?;
    if k == 0 {
        return Err(CpuError::Zero { what: "K" });
    }
    Ok(Shape { n, k })
}

/// bf16 operands, f32 sums.
pub(crate) fn bf16_gemm<O: Output>(
    kernel: Kernel,
    workers: &dyn Workers,
    workspace: &mut Workspace,
    a: MatrixRef<'_, bf16>,
    b: Bf16Weights<'_>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let codes = b.codes();
    let shape = validate((a.rows(), a.cols()), codes.shape(), groups, &d)?;
    let operands = Operands {
        a: |row: usize| EncodedRow {
            codes: bytemuck::cast_slice(a.row(row)),
            scales: &[1.0],
            sums: Some(&[0]),
        },
        b: codes,
        scales: None,
    };
    run::<recipe::Bf16, O>(kernel, workers, workspace, shape, &operands, groups, d)
}

/// int8 operands, i32 sums within a scale's reach.
pub(crate) fn int8_gemm<O: Output>(
    kernel: Kernel,
    workers: &dyn Workers,
    workspace: &mut Workspace,
    a: Int8Rows<'_>,
    b: Int8Weights<'_>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let codes = a.codes;
    let shape = validate((codes.rows(), codes.cols()), b.codes.shape(), groups, &d)?;
    let blocks = b.scaling.blocks(shape.k);
    same(
        "the number of scales of a row of A",
        blocks,
        a.scales.cols(),
    )?;
    if b.scaling == Int8Scaling::PerRow && shape.k > MAX_EXACT_K {
        return Err(CpuError::TooLarge {
            what: "K of an int8 GEMM with one scale a row",
            value: shape.k,
            limit: MAX_EXACT_K,
        });
    }
    let operands = Operands {
        a: |row: usize| EncodedRow {
            codes: bytemuck::cast_slice(codes.row(row)),
            scales: a.scales.row(row),
            sums: None,
        },
        b: b.codes,
        scales: Some(b.scales),
    };
    match b.scaling {
        Int8Scaling::PerRow => {
            run::<recipe::PerRow, O>(kernel, workers, workspace, shape, &operands, groups, d)
        }
        Int8Scaling::Block128 => {
            run::<recipe::Block128, O>(kernel, workers, workspace, shape, &operands, groups, d)
        }
    }
}

/// A, B and the scales of B's rows.
struct Operands<'a, A> {
    /// Row of A by number.
    a: A,
    b: Codes<'a>,
    /// [G, N, blocks]; ones if absent.
    scales: Option<WeightsRef<'a, f32>>,
}

/// At most [`BLOCK_ROWS`] rows of one group.
struct Block {
    weight: usize,
    /// First row of A and D.
    start: usize,
    rows: usize,
    /// First of its groups of 16.
    first_group: usize,
    /// Opens when all groups are packed.
    packed: Latch,
}

impl Block {
    fn groups(&self) -> usize {
        self.rows.div_ceil(TOKENS)
    }

    fn group_rows(&self, group: usize) -> usize {
        TOKENS.min(self.rows - group * TOKENS)
    }
}

fn run<'r, R: Recipe, O: Output>(
    kernel: Kernel,
    workers: &dyn Workers,
    workspace: &mut Workspace,
    shape: Shape,
    operands: &Operands<'r, impl Fn(usize) -> EncodedRow<'r> + Sync>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let mut blocks = Vec::new();
    let mut count = 0;
    for group in groups {
        for start in (group.start..group.end).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(group.end - start);
            blocks.push(Block {
                weight: group.weight,
                start,
                rows,
                first_group: count,
                packed: Latch::new(rows.div_ceil(TOKENS)),
            });
            count += rows.div_ceil(TOKENS);
        }
    }
    let panels = shape.n.div_ceil(PANEL_ROWS);
    let wanted = workers.threads() * TASKS_A_THREAD;
    let task_panels = (blocks.len() * panels / wanted).clamp(1, TASK_PANELS);
    let tasks_a_block = panels.div_ceil(task_panels);
    let tasks = count + blocks.len() * tasks_a_block;
    let stride = d.stride;
    let job = Job::<R, O, _> {
        operands,
        blocks: &blocks,
        groups: count,
        task_panels,
        tasks_a_block,
        x: Groups::new(
            count,
            row_bytes::<R>(shape.k),
            R::blocks(shape.k),
            &mut workspace.x,
        ),
        shape,
        d: Shared::new(d.data),
        stride,
        recipe: PhantomData,
    };
    Region::run(workers, tasks, &|region| {
        kernel.run(Worker { job: &job, region });
    })
}

/// Everything that the tasks share.
struct Job<'a, 'r, R, O, A> {
    operands: &'a Operands<'r, A>,
    blocks: &'a [Block],
    groups: usize,
    task_panels: usize,
    tasks_a_block: usize,
    x: Groups<'a>,
    shape: Shape,
    d: Shared<'a, O>,
    stride: usize,
    recipe: PhantomData<fn() -> R>,
}

/// Buffers that a thread keeps between calls.
#[derive(Default)]
struct Scratch {
    tiles: Tiles,
    /// Panels that had to be copied.
    copies: Vec<u8>,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// One thread's share of the region.
struct Worker<'a, 'r, R, O, A> {
    job: &'a Job<'a, 'r, R, O, A>,
    region: &'a Region,
}

impl<'r, R, O, A> Body for Worker<'_, 'r, R, O, A>
where
    R: Recipe,
    O: Output,
    A: Fn(usize) -> EncodedRow<'r> + Sync,
{
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Self { job, region } = self;
        let mut scratch = SCRATCH.take().unwrap_or_default();
        while let Some(task) = region.take() {
            if task < job.groups {
                job.pack(m, task);
            } else if !job.panels(m, region, task - job.groups, &mut scratch) {
                break;
            }
        }
        SCRATCH.set(Some(scratch));
    }
}

impl<'r, R, O, A> Job<'_, 'r, R, O, A>
where
    R: Recipe,
    O: Output,
    A: Fn(usize) -> EncodedRow<'r> + Sync,
{
    /// Gathers 16 rows of A.
    #[inline(always)]
    fn pack<M: Multiply>(&self, m: M, task: usize) {
        let of_task = |block: &Block| block.first_group <= task;
        let block = &self.blocks[self.blocks.partition_point(of_task) - 1];
        let group = task - block.first_group;
        let first = block.start + group * TOKENS;
        // SAFETY: each group belongs to one task, and readers wait for `packed`.
        unsafe {
            self.x.pack(m, task, block.group_rows(group), |t| {
                (self.operands.a)(first + t)
            });
        }
        block.packed.done();
    }

    /// Some panels of B times the rows of a block.
    #[inline(always)]
    fn panels<M: Multiply>(
        &self,
        m: M,
        region: &Region,
        task: usize,
        scratch: &mut Scratch,
    ) -> bool {
        let Operands { b, scales, .. } = self.operands;
        let block = &self.blocks[task / self.tasks_a_block];
        let first_panel = task % self.tasks_a_block * self.task_panels;
        let panels = self.shape.n.div_ceil(PANEL_ROWS);
        let count = self.task_panels.min(panels - first_panel);
        let rows = |p: usize| {
            let first = (first_panel + p) * PANEL_ROWS;
            (first, PANEL_ROWS.min(self.shape.n - first))
        };
        let units = row_bytes::<R>(self.shape.k) / UNIT_ROW_BYTES;
        let panel_bytes = units * UNIT_BYTES;
        let Scratch { tiles, copies } = scratch;
        copies.resize(count * panel_bytes, 0);
        for (p, copy) in copies.chunks_exact_mut(panel_bytes).enumerate() {
            let (first, rows) = rows(p);
            if b.panel(block.weight, first, rows, units).is_none() {
                b.copy_panel(block.weight, first, rows, copy);
            }
        }
        if !region.wait(&block.packed) {
            return false;
        }
        let passes = block.groups().div_ceil(M::GROUPS);
        let set = if passes == 1 { 1 } else { count };
        let mut first = 0;
        while first < block.groups() {
            let groups = M::GROUPS.min(block.groups() - first);
            let x: [_; MAX_PASS] = std::array::from_fn(|g| {
                let group = first + g.min(groups - 1);
                // SAFETY: the groups of the block are packed.
                unsafe {
                    self.x
                        .group(block.first_group + group, block.group_rows(group))
                }
            });
            let mut p = 0;
            while p < count {
                let in_set = set.min(count - p);
                product::multiply::<R, M>(
                    m,
                    &Panels {
                        count: in_set,
                        units,
                        panel: |i| {
                            let (first, rows) = rows(p + i);
                            let copy = &copies[(p + i) * panel_bytes..][..panel_bytes];
                            b.panel(block.weight, first, rows, units)
                                .unwrap_or(Panel::packed(copy))
                        },
                        scales: |i, k_block| match scales {
                            None => [1.0; PANEL_ROWS],
                            Some(scales) => {
                                let (first, rows) = rows(p + i);
                                std::array::from_fn(|r| match r < rows {
                                    true => scales.row(block.weight, first + r)[k_block],
                                    false => 0.0,
                                })
                            }
                        },
                        stride: b.panel_stride(units),
                        chunk_units: if passes == 1 {
                            usize::MAX
                        } else {
                            M::CHUNK_UNITS
                        },
                    },
                    &x[..groups],
                    tiles,
                );
                for i in 0..in_set {
                    let (column, columns) = rows(p + i);
                    for g in 0..groups {
                        let y = &tiles.y[i * groups + g];
                        let by_row = m.transpose(&y.to_words()).to_floats();
                        let valid = block.group_rows(first + g);
                        for (t, values) in by_row.0[..valid].iter().enumerate() {
                            let row = block.start + (first + g) * TOKENS + t;
                            // SAFETY: groups own their rows (validated disjoint) and tasks of one
                            // block their columns.
                            let out = unsafe { self.d.write(row * self.stride + column, columns) };
                            for (out, &value) in out.iter_mut().zip(values) {
                                *out = O::from_f32(value);
                            }
                        }
                    }
                }
                p += in_set;
            }
            first += groups;
        }
        true
    }
}
