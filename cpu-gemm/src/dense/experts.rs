//! A grouped GEMM whose problems are runs of rows.

use super::run::{self, Item};
use super::{Batch, DenseError, Input, Order, RowMajor, Stored, Sum, View, ViewMut};
use crate::Engine;

/// `d[r] = a[r] · w[m_indices[r]]^T` for each row r of packed activations: `a` is [rows, K], `w` a batch
/// of expert weights [N, K], `d` [rows, N]. Rows whose entry is -1 belong to nobody: they are
/// neither read nor written.
///
/// Padding rows, which `m_indices` gives to an expert, are computed as all others and change none of
/// them.
///
/// # Errors
/// [`DenseError::Expert`], [`DenseError::Count`] where `m_indices` has not an entry for each row,
/// [`DenseError::Shape`], and nothing is written; [`DenseError::TaskPanic`].
pub fn grouped_nt<T, O, LW>(
    engine: &Engine,
    a: View<'_, T, RowMajor>,
    w: &Batch<'_, T, LW>,
    m_indices: &[i32],
    mut d: ViewMut<'_, O, RowMajor>,
) -> Result<(), DenseError>
where
    T: Input,
    O: Stored<T::Total>,
    LW: Order,
{
    if m_indices.len() != a.rows() {
        return Err(DenseError::Count {
            operand: "m_indices",
            expected: a.rows(),
            found: m_indices.len(),
        });
    }
    let shape = |operand, rows, cols, expected_rows, expected_cols| {
        match (rows, cols) == (expected_rows, expected_cols) {
            true => Ok(()),
            false => Err(DenseError::Shape {
                problem: 0,
                operand,
                rows,
                cols,
                expected_rows,
                expected_cols,
            }),
        }
    };
    shape("B", w.rows(), w.cols(), d.cols(), a.cols())?;
    shape("D", d.rows(), d.cols(), a.rows(), w.rows())?;
    let (a, d) = (a.strided(), d.strided());
    let mut items = Vec::new();
    let mut row = 0;
    for run in m_indices.chunk_by(|one, other| one == other) {
        let expert = usize::try_from(run[0]).unwrap_or(usize::MAX);
        if run[0] != -1 && expert >= w.count() {
            return Err(DenseError::Expert {
                row,
                expert: run[0],
                experts: w.count(),
            });
        }
        if run[0] != -1 {
            items.push(Item {
                a: a.rows_at(row, run.len()),
                b: w.get(expert).strided(),
                c: None,
                d: d.rows_at(row, run.len()),
                alpha: T::Total::ONE,
                beta: T::Total::ZERO,
            });
        }
        row += run.len();
    }
    run::run(engine, &items)
}
