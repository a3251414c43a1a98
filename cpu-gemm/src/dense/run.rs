//! All problems of a call as tasks of parallel regions.
//!
//! D is divided into blocks, and each block takes tasks of three kinds, numbered in this order:
//!
//! ```text
//! pack A   some panels of A over all k     widened, contiguous
//! pack B   some panels of B over all k
//! tile     some panels of A x some of B    sums of a tile in the L2 cache, then D
//! ```
//!
//! Tiles wait for the packing of their block only, and blocks of all problems share a region, so
//! that small problems fill the threads together. How D is divided changes no bit of it.

use super::DenseError;
use super::element::{Input, Stored, Sum};
use super::micro::{self, Body, Micro};
use super::pack::{self, Cell};
use super::view::Strided;
use crate::Engine;
use crate::region::{Latch, Region};
use crate::shared::Shared;

/// Most rows or columns of a block. Packing an operand once for so many of the other's lines costs
/// next to nothing, and no more than twice as many lines are ever held packed.
const BLOCK: usize = 2048;
/// Packed bytes after which a region ends and the next one starts.
const REGION_BYTES: usize = 64 << 20;
/// Cells of k that a tile goes over at once: the panel of B stays in the L1 cache, the panels of A in L2.
const STEP: usize = 256;
/// Most rows and columns of a tile.
const TILE: (usize, usize) = (192, 128);
/// Elements of an operand that one packing task gathers.
const PACK: usize = 32 << 10;
/// Tasks that each thread should find.
const TASKS_A_THREAD: usize = 4;

/// One problem, its D row-major: whoever has a column-major one transposes everything.
pub(super) struct Item<T, O, S> {
    /// op(A), [m, k].
    pub(super) a: Strided<T>,
    /// op(B)^T, [n, k].
    pub(super) b: Strided<T>,
    /// [m, n]; `None`: D.
    pub(super) c: Option<Strided<O>>,
    pub(super) d: Strided<O>,
    pub(super) alpha: S,
    pub(super) beta: S,
}

// SAFETY: the pointers stand for `&[T]`, `&[O]` and `&mut [O]` of the calling thread's borrows; tasks
// write disjoint parts of D.
unsafe impl<T: Sync, O: Send + Sync, S: Sync> Sync for Item<T, O, S> {}

impl<T: Input, O, S: Sum> Item<T, O, S> {
    /// Values of k that are looked at.
    fn k(&self) -> usize {
        match self.alpha == S::ZERO {
            true => 0,
            false => self.a.cols,
        }
    }
}

/// A part of one problem's D.
struct Block<'i, T, O, S> {
    item: &'i Item<T, O, S>,
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
    /// Cells of k.
    cells: usize,
    /// Where its panels of A and of B begin among all packed cells.
    a_cells: usize,
    b_cells: usize,
    tasks: Tasks,
    packed: Latch,
}

/// How a block's work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tasks {
    first: usize,
    /// Panels of A and of B, and how many of them one task packs.
    panels: (usize, usize),
    pack: (usize, usize),
    /// Tiles along the rows and along the columns.
    tiles: (usize, usize),
}

impl Tasks {
    fn packing(&self) -> (usize, usize) {
        (
            self.panels.0.div_ceil(self.pack.0),
            self.panels.1.div_ceil(self.pack.1),
        )
    }

    fn count(&self) -> usize {
        let (a, b) = self.packing();
        a + b + self.tiles.0 * self.tiles.1
    }
}

/// Computes all items, whose parts of D are disjoint.
pub(super) fn run<T, O, S>(engine: &Engine, items: &[Item<T, O, S>]) -> Result<(), DenseError>
where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    let (kernel, _, _) = engine.parts();
    micro::run(kernel, Call { engine, items })
}

/// The calling thread's part, which needs the sizes of the panels.
struct Call<'e, 'i, T, O, S> {
    engine: &'e Engine,
    items: &'i [Item<T, O, S>],
}

impl<T, O, S> Body for Call<'_, '_, T, O, S>
where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    type Output = Result<(), DenseError>;

    #[inline(always)]
    fn run<M: Micro>(self, _: M) -> Self::Output {
        regions(self, (M::ROWS, M::COLS))
    }
}

fn regions<T, O, S>(call: Call<'_, '_, T, O, S>, panel: (usize, usize)) -> Result<(), DenseError>
where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    let mut blocks = Vec::new();
    let mut cells = 0;
    let mut parts = call.items.iter().flat_map(parts_of).peekable();
    while let Some((item, row, col)) = parts.next() {
        let rows = BLOCK.min(item.d.rows - row);
        let cols = BLOCK.min(item.d.cols - col);
        let depth = item.k().div_ceil(S::K);
        let panels = (rows.div_ceil(panel.0), cols.div_ceil(panel.1));
        let a_cells = cells;
        let b_cells = a_cells + panels.0 * panel.0 * depth;
        cells = b_cells + panels.1 * panel.1 * depth;
        let pack = |lines: usize| (PACK / (lines * item.k().max(1))).max(1);
        blocks.push(Block {
            item,
            row,
            rows,
            col,
            cols,
            cells: depth,
            a_cells,
            b_cells,
            tasks: Tasks {
                first: 0,
                panels: if depth == 0 { (0, 0) } else { panels },
                pack: (pack(panel.0), pack(panel.1)),
                tiles: (1, 1),
            },
            packed: Latch::new(0),
        });
        if cells * size_of::<Cell<T>>() >= REGION_BYTES || parts.peek().is_none() {
            region(call.engine, &mut blocks, cells, panel)?;
            blocks.clear();
            cells = 0;
        }
    }
    Ok(())
}

/// The first rows and columns of an item's blocks.
fn parts_of<T, O, S>(
    item: &Item<T, O, S>,
) -> impl Iterator<Item = (&Item<T, O, S>, usize, usize)> {
    let rows = (0..item.d.rows).step_by(BLOCK);
    rows.flat_map(move |row| {
        (0..item.d.cols)
            .step_by(BLOCK)
            .map(move |col| (item, row, col))
    })
}

fn region<T, O, S>(
    engine: &Engine,
    blocks: &mut [Block<'_, T, O, S>],
    cells: usize,
    panel: (usize, usize),
) -> Result<(), DenseError>
where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    let (kernel, workers, workspaces) = engine.parts();
    let threads = workers.threads();
    let least = match threads {
        1 => 1,
        _ => (threads * TASKS_A_THREAD).div_ceil(blocks.len()),
    };
    let mut tasks = 0;
    for block in blocks.iter_mut() {
        block.tasks.tiles = tiles((block.rows, block.cols), panel, least);
        block.tasks.first = tasks;
        let (a, b) = block.tasks.packing();
        block.packed = Latch::new(a + b);
        tasks += block.tasks.count();
    }
    let blocks = &*blocks;
    workspaces.with(|workspace| {
        let cells = Shared::new(workspace.panels.take::<Cell<T>>(cells));
        Region::run(workers, tasks, &|region| {
            micro::run(
                kernel,
                Participant {
                    region,
                    blocks,
                    cells: &cells,
                },
            );
        })
    })?;
    Ok(())
}

/// Tiles along rows and columns: none larger than [`TILE`], at least `least` together where
/// there are as many panels, as square as may be.
fn tiles(size: (usize, usize), panel: (usize, usize), least: usize) -> (usize, usize) {
    let panels = (size.0.div_ceil(panel.0), size.1.div_ceil(panel.1));
    let mut tiles = (
        panels.0.div_ceil((TILE.0 / panel.0).max(1)),
        panels.1.div_ceil((TILE.1 / panel.1).max(1)),
    );
    while tiles.0 * tiles.1 < least && tiles != panels {
        let (rows, cols) = (panels.0.div_ceil(tiles.0), panels.1.div_ceil(tiles.1));
        if cols * panel.1 >= rows * panel.0 && cols > 1 || rows == 1 {
            tiles.1 += 1;
        } else {
            tiles.0 += 1;
        }
    }
    tiles
}

/// Share `part` of `0..count`, in equal parts.
fn share(count: usize, parts: usize, part: usize) -> (usize, usize) {
    (count * part / parts, count * (part + 1) / parts)
}

/// One thread in a region.
struct Participant<'p, 'i, T: Input, O, S> {
    region: &'p Region,
    blocks: &'p [Block<'i, T, O, S>],
    cells: &'p Shared<'p, Cell<T>>,
}

impl<T, O, S> Body for Participant<'_, '_, T, O, S>
where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    type Output = ();

    #[inline(always)]
    fn run<M: Micro>(self, m: M) {
        let mut sums = Vec::new();
        while let Some(task) = self.region.take() {
            let after = self.blocks.partition_point(|b| b.tasks.first <= task);
            let block = &self.blocks[after - 1];
            let (a, b) = block.tasks.packing();
            let task = task - block.tasks.first;
            if task < a + b {
                // SAFETY: each packing task is one thread's.
                unsafe { pack::<M, _, _, _>(block, task, self.cells) };
                block.packed.done();
            } else if self.region.wait(&block.packed) {
                // SAFETY: the block is packed, and each tile is one thread's.
                unsafe { tile(m, block, task - a - b, self.cells, &mut sums) };
            }
        }
    }
}

/// Packs the panels of a block's packing task.
///
/// # Safety
/// Nobody else packs them, and nobody reads them before the block's latch opened.
#[inline(always)]
unsafe fn pack<M, T, O, S>(block: &Block<'_, T, O, S>, task: usize, cells: &Shared<'_, Cell<T>>)
where
    M: Micro,
    T: Input<Total = S>,
    S: Sum,
{
    let (a_tasks, _) = block.tasks.packing();
    let (a, b) = (
        block.item.a.rows_at(block.row, block.rows),
        block.item.b.rows_at(block.col, block.cols),
    );
    // SAFETY: passed on from the caller.
    unsafe {
        if task < a_tasks {
            let first = task * block.tasks.pack.0;
            let end = block.tasks.panels.0.min(first + block.tasks.pack.0);
            panels(&a, M::ROWS, block.cells, (first, end), block.a_cells, cells);
        } else {
            let first = (task - a_tasks) * block.tasks.pack.1;
            let end = block.tasks.panels.1.min(first + block.tasks.pack.1);
            panels(&b, M::COLS, block.cells, (first, end), block.b_cells, cells);
        }
    }
}

/// Packs panels `first..end` of `width` lines of `matrix`.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn panels<T: Input>(
    matrix: &Strided<T>,
    width: usize,
    depth: usize,
    (first, end): (usize, usize),
    start: usize,
    cells: &Shared<'_, Cell<T>>,
) {
    for panel in first..end {
        let len = width * depth;
        // SAFETY: by the caller's promise nobody else touches these cells; the matrix is borrowed
        // for the whole call.
        unsafe {
            let out = cells.write(start + panel * len, len);
            pack::panel(matrix, panel * width, width, out);
        }
    }
}

/// Computes one tile of a block.
///
/// # Safety
/// The block is packed, and nobody else computes this tile.
#[inline(always)]
unsafe fn tile<M, T, O, S>(
    m: M,
    block: &Block<'_, T, O, S>,
    tile: usize,
    cells: &Shared<'_, Cell<T>>,
    sums: &mut Vec<S>,
) where
    M: Micro,
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    let panels = (
        block.rows.div_ceil(M::ROWS),
        block.cols.div_ceil(M::COLS),
    );
    let tiles = block.tasks.tiles;
    let (first_row, end_row) = share(panels.0, tiles.0, tile % tiles.0);
    let (first_col, end_col) = share(panels.1, tiles.1, tile / tiles.0);
    let one = M::ROWS * M::COLS;
    sums.clear();
    sums.resize((end_row - first_row) * (end_col - first_col) * one, S::ZERO);
    let (a_len, b_len) = (M::ROWS * block.cells, M::COLS * block.cells);
    for start in (0..block.cells).step_by(STEP) {
        let count = STEP.min(block.cells - start);
        let mut of_panel = sums.chunks_exact_mut(one);
        for col in first_col..end_col {
            let b = block.b_cells + col * b_len + start * M::COLS;
            for row in first_row..end_row {
                let a = block.a_cells + row * a_len + start * M::ROWS;
                // SAFETY: packed, so nobody writes them in this region any more.
                let (a, b) = unsafe {
                    (
                        cells.read(a, count * M::ROWS),
                        cells.read(b, count * M::COLS),
                    )
                };
                if let Some(sums) = of_panel.next() {
                    S::tile(m, a, b, sums);
                }
            }
        }
    }
    let mut of_panel = sums.chunks_exact(one);
    for col in first_col..end_col {
        for row in first_row..end_row {
            if let Some(sums) = of_panel.next() {
                let (row, col) = (row * M::ROWS, col * M::COLS);
                let size = (
                    M::ROWS.min(block.rows - row),
                    M::COLS.min(block.cols - col),
                );
                // SAFETY: these elements belong to this tile alone.
                unsafe {
                    finish(
                        block.item,
                        (block.row + row, block.col + col),
                        size,
                        sums,
                        M::COLS,
                    );
                }
            }
        }
    }
}

/// D = α·sums + β·C for a part of one problem.
///
/// # Safety
/// Nobody else touches these elements of D meanwhile.
#[inline(always)]
unsafe fn finish<T, O, S>(
    item: &Item<T, O, S>,
    (first_row, first_col): (usize, usize),
    (rows, cols): (usize, usize),
    sums: &[S],
    width: usize,
) where
    T: Input<Total = S>,
    O: Stored<S>,
    S: Sum,
{
    let has_sum = item.k() > 0;
    for (row, sums) in sums.chunks_exact(width).take(rows).enumerate() {
        let at = |matrix: &Strided<O>| matrix.at(first_row + row, first_col);
        let out = at(&item.d);
        let addend = match &item.c {
            _ if item.beta == S::ZERO => None,
            None => Some(out.cast_const()),
            Some(c) => Some(at(c).cast_const()),
        };
        // SAFETY: the elements exist, as the shapes were compared, and columns are contiguous in C
        // and D; C is borrowed for reading or D itself.
        unsafe {
            match addend {
                None => {
                    for (col, &sum) in sums[..cols].iter().enumerate() {
                        let sum = has_sum.then_some(sum);
                        out.add(col)
                            .write(O::store(S::blend(item.alpha, sum, item.beta, None)));
                    }
                }
                Some(c) => {
                    for (col, &sum) in sums[..cols].iter().enumerate() {
                        let sum = has_sum.then_some(sum);
                        let c = c.add(col).read().load();
                        out.add(col)
                            .write(O::store(S::blend(item.alpha, sum, item.beta, Some(c))));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_panels_and_feed_all_threads() {
        for size in [(1, 1), (5, 300), (2048, 2048), (2048, 1), (1024, 1024)] {
            for panel in [(6, 16), (14, 32), (4, 8)] {
                for least in [1, 8, 1000] {
                    let (rows, cols) = tiles(size, panel, least);
                    let panels = (size.0.div_ceil(panel.0), size.1.div_ceil(panel.1));
                    assert!(rows <= panels.0 && cols <= panels.1);
                    assert!(rows * cols >= least.min(panels.0 * panels.1));
                    let mut next = 0;
                    for part in 0..rows {
                        let (first, end) = share(panels.0, rows, part);
                        assert!(first == next && end > first);
                        assert!((end - first) * panel.0 <= TILE.0);
                        next = end;
                    }
                    assert_eq!(next, panels.0);
                }
            }
        }
    }
}
