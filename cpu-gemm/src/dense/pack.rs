//! Panels of cells, gathered from matrices of any order.

use super::element::Input;
use super::element::sealed::Sum as _;
use super::view::Strided;

/// A packed operand's cell.
pub(super) type Cell<T> = <<T as Input>::Total as super::element::sealed::Sum>::Cell;

/// The panel whose lines are rows `first..first + width` of `matrix` [lines, k], those that do not exist
/// zero: `out[cell * width + line]`.
///
/// # Safety
/// The elements of `matrix` are readable and nobody writes them meanwhile.
#[inline(always)]
pub(super) unsafe fn panel<T: Input>(
    matrix: &Strided<T>,
    first: usize,
    width: usize,
    out: &mut [Cell<T>],
) {
    let lines = width.min(matrix.rows - first);
    let per_cell = T::Total::K;
    let whole = matrix.cols / per_cell;
    if lines < width {
        out.fill(bytemuck::Zeroable::zeroed());
    }
    for (cell, out) in out.chunks_exact_mut(width).enumerate() {
        let k = cell * per_cell;
        // SAFETY: lines and k below exist in the matrix; the caller's promise holds on.
        unsafe {
            if cell == whole {
                for (line, out) in out[..lines].iter_mut().enumerate() {
                    *out = T::cell(read(matrix, first + line, k), T::zeroed());
                }
            } else if lines == width && matrix.row_step == 1 {
                let from = matrix.at(first, k).cast_const();
                let second = (per_cell - 1) * matrix.col_step;
                for (line, out) in out.iter_mut().enumerate() {
                    let from = from.wrapping_add(line);
                    *out = T::cell(from.read(), from.wrapping_add(second).read());
                }
            } else {
                for (line, out) in out[..lines].iter_mut().enumerate() {
                    let second = read(matrix, first + line, k + per_cell - 1);
                    *out = T::cell(read(matrix, first + line, k), second);
                }
            }
        }
    }
}

/// # Safety
/// As [`panel`], for this element.
#[inline(always)]
unsafe fn read<T: Copy>(matrix: &Strided<T>, line: usize, k: usize) -> T {
    // SAFETY: by the caller's promise.
    unsafe { matrix.at(line, k).read() }
}
