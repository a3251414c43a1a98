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
use std::ops::Range;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES};
use asym_gemm_formats::fp8;
use bytemuck::Pod;
use half::bf16;

use crate::CpuError;
use crate::engine::Compiled;
use crate::kernels::{Body, Kernel, Multiply, Panel};
use crate::matrix::{
    Bf16Weights, Codes, Fp8Weights, Int8Rows, Int8Scaling, Int8Weights, MatrixMut, MatrixRef,
    WeightsRef,
};
use crate::pool::Workers;
use crate::product::{self, Tiles, Weights};
use crate::recipe::{self, MAX_EXACT_K, Recipe};
use crate::region::{Latch, Region};
use crate::rows::{self, RowWriter};
use crate::shared::Shared;
use crate::tile::{Lanes, TOKENS};
use crate::tokens::{EncodedRow, Groups, pass, row_bytes};
use crate::validate::{disjoint_rows, same};
use crate::vector::{FromLanes, Vector};
use crate::workspace::{Buffer, Workspace};

/// Most rows of A in a block.
const BLOCK_ROWS: usize = 512;
/// Most panels of a task.
const TASK_PANELS: usize = 16;
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
#[expect(private_bounds, reason = "sealed")]
pub trait Output: Pod + Send + Sync + FromLanes + Compiled {
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
        scales: RowScales::One,
    };
    run::<recipe::Bf16, O>(kernel, workers, workspace, shape, &operands, groups, d)
}

/// bf16 A, fp8 B, f32 sums.
pub(crate) fn fp8_gemm<O: Output>(
    kernel: Kernel,
    workers: &dyn Workers,
    workspace: &mut Workspace,
    a: MatrixRef<'_, bf16>,
    b: Fp8Weights<'_>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let shape = validate((a.rows(), a.cols()), b.codes.shape(), groups, &d)?;
    // The rows of A have no scales of their own.
    let ones = vec![1.0; recipe::Fp8::blocks(shape.k)];
    let operands = Operands {
        a: |row: usize| EncodedRow {
            codes: bytemuck::cast_slice(a.row(row)),
            scales: &ones,
            sums: Some(&[]),
        },
        b: b.codes,
        scales: RowScales::Each128(b.scales),
    };
    run::<recipe::Fp8, O>(kernel, workers, workspace, shape, &operands, groups, d)
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
        scales: RowScales::EachRow(b.scales),
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
    scales: RowScales<'a>,
}

/// What B's rows are scaled with.
#[derive(Clone, Copy)]
enum RowScales<'a> {
    /// Nothing.
    One,
    /// [G, N, blocks].
    EachRow(WeightsRef<'a, f32>),
    /// [G, N/128, blocks].
    Each128(WeightsRef<'a, f32>),
}

/// At most [`BLOCK_ROWS`] rows of one group.
struct Block {
    weight: usize,
    /// First row of A and D.
    start: usize,
    rows: usize,
    /// First of its groups of 16.
    first_group: usize,
    kernel: Kernel,
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
                kernel: if R::EXACT {
                    kernel.for_few_tokens(rows)
                } else {
                    kernel
                },
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
    let stream = rows::streams::<O>(d.rows() * d.cols());
    let job = Job::<R, O, _> {
        operands,
        blocks: &blocks,
        x: Groups::new(
            count,
            row_bytes::<R>(shape.k),
            R::blocks(shape.k),
            &mut workspace.x,
        ),
        shape,
        d: Shared::new(d.data),
        stride,
        stream,
        recipe: PhantomData,
    };
    Region::run(workers, tasks, &|region| {
        let mut scratch = SCRATCH.take().unwrap_or_default();
        while let Some(task) = region.take() {
            if task < count {
                let block = job.block_of_group(task);
                block.kernel.run(Pack {
                    job: &job,
                    block,
                    task,
                });
                continue;
            }
            let (block, range) = (
                (task - count) / tasks_a_block,
                (task - count) % tasks_a_block,
            );
            let block = &blocks[block];
            if !region.wait(&block.packed) {
                break;
            }
            let first = range * task_panels;
            block.kernel.run(Multiplication {
                job: &job,
                block,
                panels: first..panels.min(first + task_panels),
                scratch: &mut scratch,
            });
        }
        SCRATCH.set(Some(scratch));
    })
}

/// Everything that the tasks share.
struct Job<'a, 'r, R, O, A> {
    operands: &'a Operands<'r, A>,
    blocks: &'a [Block],
    x: Groups<'a>,
    shape: Shape,
    d: Shared<'a, O>,
    stride: usize,
    /// Whether D passes the caches by.
    stream: bool,
    recipe: PhantomData<fn() -> R>,
}

impl<R, O, A> Job<'_, '_, R, O, A> {
    /// The block that a group belongs to.
    fn block_of_group(&self, group: usize) -> &Block {
        let of_group = |block: &Block| block.first_group <= group;
        &self.blocks[self.blocks.partition_point(of_group) - 1]
    }
}

/// Buffers that a thread keeps between calls.
#[derive(Default)]
struct Scratch {
    tiles: Tiles,
    /// Panels that had to be copied.
    copies: Vec<u8>,
    /// Parts of rows of D.
    runs: Buffer,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Gathers 16 rows of A.
struct Pack<'j, 'a, 'r, R, O, A> {
    job: &'j Job<'a, 'r, R, O, A>,
    block: &'j Block,
    task: usize,
}

impl<'r, R, O, A> Body for Pack<'_, '_, 'r, R, O, A>
where
    R: Recipe,
    O: Output,
    A: Fn(usize) -> EncodedRow<'r> + Sync,
{
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Self { job, block, task } = self;
        let group = task - block.first_group;
        let first = block.start + group * TOKENS;
        // SAFETY: each group belongs to one task, and readers wait for `packed`.
        unsafe {
            job.x.pack(m, task, block.group_rows(group), |t| {
                (job.operands.a)(first + t)
            });
        }
        block.packed.done();
    }
}

/// Some panels of B times the rows of a block.
struct Multiplication<'j, 'a, 'r, R, O, A> {
    job: &'j Job<'a, 'r, R, O, A>,
    block: &'j Block,
    panels: Range<usize>,
    scratch: &'j mut Scratch,
}

/// The panels of a task, where they lie or copied.
struct TaskPanels<'t> {
    b: Codes<'t>,
    scales: RowScales<'t>,
    copies: &'t [u8],
    weight: usize,
    /// First panel of the task.
    first: usize,
    /// Rows N of B.
    n: usize,
    units: usize,
}

impl TaskPanels<'_> {
    /// First row of panel `p`, and how many exist.
    #[inline(always)]
    fn rows(&self, p: usize) -> (usize, usize) {
        let first = (self.first + p) * PANEL_ROWS;
        (first, PANEL_ROWS.min(self.n - first))
    }
}

impl Weights for TaskPanels<'_> {
    #[inline(always)]
    fn panel(&self, p: usize) -> Panel<'_> {
        let (first, rows) = self.rows(p);
        match self.b.panel(self.weight, first, rows, self.units) {
            Some(panel) => panel,
            None => {
                let panel_bytes = self.units * UNIT_BYTES;
                Panel::packed(&self.copies[p * panel_bytes..][..panel_bytes])
            }
        }
    }

    #[inline(always)]
    fn scales(&self, p: usize, block: usize) -> Lanes<f32> {
        let (first, rows) = self.rows(p);
        let mut lanes = [1.0; PANEL_ROWS];
        match &self.scales {
            RowScales::One => {}
            RowScales::EachRow(scales) => {
                for (r, lane) in lanes[..rows].iter_mut().enumerate() {
                    *lane = scales.row(self.weight, first + r)[block];
                }
            }
            RowScales::Each128(scales) => {
                lanes = [scales.row(self.weight, first / fp8::BLOCK)[block]; PANEL_ROWS];
            }
        }
        lanes
    }
}

impl<R: Recipe, O: Output, A> Body for Multiplication<'_, '_, '_, R, O, A> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Self {
            job,
            block,
            panels,
            scratch:
                Scratch {
                    tiles,
                    copies,
                    runs,
                },
        } = self;
        let units = row_bytes::<R>(job.shape.k) / R::X_UNIT_BYTES;
        let panel_bytes = units * UNIT_BYTES;
        let count = panels.len();
        copies.resize(copies.len().max(count * panel_bytes), 0);
        let all = |first: usize| {
            let first = first * PANEL_ROWS;
            (first, PANEL_ROWS.min(job.shape.n - first))
        };
        for (p, copy) in panels.clone().zip(copies.chunks_exact_mut(panel_bytes)) {
            let (first, rows) = all(p);
            let b = &job.operands.b;
            if b.panel(block.weight, first, rows, units).is_none() {
                b.copy_panel(block.weight, first, rows, copy);
            }
        }
        let v = m.vector();
        let mut first = 0;
        while first < block.groups() {
            let groups = M::GROUPS.min(block.groups() - first);
            // SAFETY: the groups of the block are packed.
            let x = unsafe { pass(&job.x, block.first_group, block.rows, first, groups) };
            let x = &x[..groups];
            let first_column = panels.start * PANEL_ROWS;
            // SAFETY: blocks own their rows (validated disjoint) and tasks of one block their
            // columns.
            let mut rows = unsafe {
                RowWriter::new(
                    &job.d,
                    (block.start + first * TOKENS) * job.stride + first_column,
                    job.stride,
                    (count * PANEL_ROWS).min(job.shape.n - first_column),
                    runs,
                    job.stream,
                )
            };
            for p in 0..count {
                let weights = TaskPanels {
                    b: job.operands.b,
                    scales: job.operands.scales,
                    copies: &copies[p * panel_bytes..],
                    weight: block.weight,
                    first: panels.start + p,
                    n: job.shape.n,
                    units,
                };
                let shape = product::Shape {
                    panels: 1,
                    units,
                    in_cache: first > 0,
                };
                let products = product::multiply::<R, M>(m, &weights, shape, x, tiles);
                let scales = weights.scales(0, 0);
                for (g, x) in x.iter().enumerate() {
                    let scaled = products.scaled(v, 0, g, x, &scales);
                    rows.put(v, p, g, x.tokens, &scaled);
                }
            }
            first += groups;
        }
        v.fence();
    }
}
