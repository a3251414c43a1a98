//! Grouped GEMM over plain row-major operands: D[rows of a group] = A . B[weight]^T.
//!
//! A task is 64 rows of one B matrix against all rows of one group. It copies those rows into
//! panels first (zero-padding N and K), so that the panel kernels serve every shape and stride;
//! with few rows of A the copy costs about as much as the product.

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};
use half::bf16;
use rayon::prelude::*;

use crate::CpuError;
use crate::activations::Activations;
use crate::kernels::{Body, Dot, Kernel, Lanes, for_token_blocks};
use crate::matrix::{Int8Rows, Int8Scaling, Int8Weights, MatrixMut, MatrixRef, WeightsRef};
use crate::recipe::{self, MAX_EXACT_K, Recipe};
use crate::scatter::Scatter;
use crate::validate::{disjoint_rows, same};

/// Panels of a task.
const TASK_PANELS: usize = 4;

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
pub trait Output: Copy + Send + sealed::Sealed {
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

/// B as a task packs it: row bytes in units, scales by block of K.
trait Operand: Sync {
    /// Writes row `row` of matrix `group` to the row of a panel that begins with `out`.
    fn pack_row(&self, group: usize, row: usize, out: &mut PanelRow<'_>);
    /// Scale of `row` for block `block`.
    fn scale(&self, group: usize, row: usize, block: usize) -> f32;
}

/// One row of a panel: 128 bytes in each unit.
struct PanelRow<'a> {
    panel: &'a mut [u8],
    row: usize,
}

impl PanelRow<'_> {
    /// Copies `codes`, `N` bytes each; `unit_k` = 128 / N of them lie in a unit.
    fn fill<T: Copy, const N: usize>(&mut self, codes: &[T], to_bytes: impl Fn(T) -> [u8; N]) {
        let units = self.panel.chunks_exact_mut(UNIT_BYTES);
        for (codes, unit) in codes.chunks(UNIT_ROW_BYTES / N).zip(units) {
            let bytes = &mut unit[self.row * UNIT_ROW_BYTES..][..UNIT_ROW_BYTES];
            let (bytes, _) = bytes.as_chunks_mut::<N>();
            for (bytes, &code) in bytes.iter_mut().zip(codes) {
                *bytes = to_bytes(code);
            }
        }
    }
}

impl Operand for WeightsRef<'_, bf16> {
    fn pack_row(&self, group: usize, row: usize, out: &mut PanelRow<'_>) {
        out.fill(self.row(group, row), bf16::to_le_bytes);
    }

    fn scale(&self, _group: usize, _row: usize, _block: usize) -> f32 {
        1.0
    }
}

impl Operand for Int8Weights<'_> {
    fn pack_row(&self, group: usize, row: usize, out: &mut PanelRow<'_>) {
        out.fill(self.codes.row(group, row), i8::to_le_bytes);
    }

    fn scale(&self, group: usize, row: usize, block: usize) -> f32 {
        self.scales.row(group, row)[block]
    }
}

/// Shapes of a call that fit each other.
struct Shape {
    n: usize,
    k: usize,
}

fn validate<T>(
    a: (usize, usize),
    b: (usize, usize, usize),
    groups: &[GroupRange],
    d: &MatrixMut<'_, T>,
) -> Result<Shape, CpuError> {
    let ((m, k), (matrices, n, b_k)) = (a, b);
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
    a: MatrixRef<'_, bf16>,
    b: WeightsRef<'_, bf16>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let shape = validate(
        (a.rows(), a.cols()),
        (b.groups(), b.rows(), b.cols()),
        groups,
        &d,
    )?;
    let a = Activations::<recipe::Bf16>::build(a.rows(), shape.k, |row, codes, _, _| {
        for (code, x) in codes.iter_mut().zip(a.row(row)) {
            *code = x.to_bits();
        }
    });
    run(kernel, shape, &a, &b, groups, d);
    Ok(())
}

/// int8 operands, i32 sums within a scale's reach.
pub(crate) fn int8_gemm<O: Output>(
    kernel: Kernel,
    a: Int8Rows<'_>,
    b: Int8Weights<'_>,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) -> Result<(), CpuError> {
    let codes = a.codes;
    let shape = validate(
        (codes.rows(), codes.cols()),
        (b.codes.groups(), b.codes.rows(), b.codes.cols()),
        groups,
        &d,
    )?;
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
    match b.scaling {
        Int8Scaling::PerRow => {
            let a = int8_rows::<recipe::PerRow>(a, shape.k);
            run(kernel, shape, &a, &b, groups, d);
        }
        Int8Scaling::Block128 => {
            let a = int8_rows::<recipe::Block128>(a, shape.k);
            run(kernel, shape, &a, &b, groups, d);
        }
    }
    Ok(())
}

fn int8_rows<R: Recipe<Code = i8>>(a: Int8Rows<'_>, k: usize) -> Activations<R> {
    let span = k.div_ceil(R::blocks(k)).next_multiple_of(R::UNIT_K);
    Activations::build(a.codes.rows(), k, |row, codes, scales, sums| {
        codes.copy_from_slice(a.codes.row(row));
        scales.copy_from_slice(a.scales.row(row));
        for (sum, codes) in sums.iter_mut().zip(codes.chunks(span)) {
            *sum = codes.iter().map(|&code| i32::from(code)).sum();
        }
    })
}

fn run<R: Recipe, O: Output>(
    kernel: Kernel,
    shape: Shape,
    a: &Activations<R>,
    b: &impl Operand,
    groups: &[GroupRange],
    d: MatrixMut<'_, O>,
) {
    let stride = d.stride;
    let d = Scatter::new(d.data, stride);
    let tasks_a_group = shape.n.div_ceil(TASK_PANELS * PANEL_ROWS);
    (0..groups.len() * tasks_a_group)
        .into_par_iter()
        .for_each_init(Panels::default, |panels, task| {
            let group = groups[task / tasks_a_group];
            if group.start == group.end {
                return;
            }
            let first_row = task % tasks_a_group * TASK_PANELS * PANEL_ROWS;
            let rows = (TASK_PANELS * PANEL_ROWS).min(shape.n - first_row);
            panels.pack::<R>(b, group.weight, first_row, rows, shape.k);
            kernel.run(Task::<R, O> {
                a,
                panels,
                group,
                first_row,
                rows,
                d: &d,
            });
        });
}

/// Up to [`TASK_PANELS`] panels of B, packed.
#[derive(Default)]
struct Panels {
    bytes: Vec<u8>,
    panel_bytes: usize,
    scales: Vec<Vec<Lanes<f32>>>,
}

impl Panels {
    fn pack<R: Recipe>(
        &mut self,
        b: &impl Operand,
        group: usize,
        first_row: usize,
        rows: usize,
        k: usize,
    ) {
        let panels = rows.div_ceil(PANEL_ROWS);
        self.panel_bytes = k.div_ceil(R::UNIT_K) * UNIT_BYTES;
        self.bytes.clear();
        self.bytes.resize(panels * self.panel_bytes, 0);
        let blocks = R::blocks(k);
        self.scales.clear();
        self.scales.resize(panels, vec![[0.0; PANEL_ROWS]; blocks]);
        for row in 0..rows {
            let (panel, lane) = (row / PANEL_ROWS, row % PANEL_ROWS);
            let mut out = PanelRow {
                panel: &mut self.bytes[panel * self.panel_bytes..][..self.panel_bytes],
                row: lane,
            };
            b.pack_row(group, first_row + row, &mut out);
            for block in 0..blocks {
                self.scales[panel][block][lane] = b.scale(group, first_row + row, block);
            }
        }
    }
}

/// The product of one group's rows with packed panels.
struct Task<'a, R: Recipe, O> {
    a: &'a Activations<R>,
    panels: &'a Panels,
    group: GroupRange,
    first_row: usize,
    rows: usize,
    d: &'a Scatter<'a, O>,
}

impl<R: Recipe, O: Output> Body for Task<'_, R, O> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let Self { group, panels, .. } = self;
        for_token_blocks!(group.end - group.start, |first, WIDTH| {
            let a: [_; WIDTH] = std::array::from_fn(|t| self.a.row(group.start + first + t));
            let packed = panels.bytes.chunks_exact(panels.panel_bytes);
            for (i, (panel, scales)) in packed.zip(&panels.scales).enumerate() {
                let sums = R::panel(dot, panel, scales, &a);
                let column = self.first_row + i * PANEL_ROWS;
                let count = PANEL_ROWS.min(self.rows - i * PANEL_ROWS);
                for (t, sums) in sums.iter().enumerate() {
                    // SAFETY: groups own their rows (validated disjoint) and tasks of one
                    // group their columns.
                    let out = unsafe { self.d.row(group.start + first + t, column, count) };
                    for (out, &sum) in out.iter_mut().zip(sums) {
                        *out = O::from_f32(sum);
                    }
                }
            }
        });
    }
}
