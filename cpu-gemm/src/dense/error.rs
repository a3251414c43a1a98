//! What can be wrong with a dense GEMM.

use crate::CpuError;
use crate::pool::TaskPanic;

/// Everything [`dense`](crate::dense) refuses. Arguments are checked before any memory is touched, so
/// an error other than [`DenseError::TaskPanic`] leaves every D as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DenseError {
    /// Rows (or columns, in column-major order) would overlap.
    #[error(
        "the leading dimension is {leading}; lines of {least} elements need at least {least}"
    )]
    LeadingDimension {
        /// Elements from one line to the next.
        leading: usize,
        /// Elements of a line.
        least: usize,
    },
    /// The elements end before the matrix does.
    #[error("the matrix reaches {needed} elements, the slice has {found}")]
    TooShort {
        /// Elements that shape, leading dimension and stride reach; `usize::MAX` also where
        /// they reach further than any slice.
        needed: usize,
        /// Elements given.
        found: usize,
    },
    /// Matrices of a strided batch would write the same element.
    #[error(
        "matrices of a batch {stride} elements apart overlap: they must be {least} apart, or \
         interleaved within the leading dimension"
    )]
    Overlap {
        /// Elements from one matrix to the next.
        stride: usize,
        /// Elements that one matrix spans.
        least: usize,
    },
    /// An operand has another shape than the parameters ask for.
    #[error(
        "problem {problem}: {operand} is {rows} x {cols}, the parameters ask for \
         {expected_rows} x {expected_cols} as stored"
    )]
    Shape {
        /// Position of the problem in the call.
        problem: usize,
        /// `A`, `B`, `C` or `D`.
        operand: &'static str,
        /// Rows of the view.
        rows: usize,
        /// Columns of the view.
        cols: usize,
        /// Rows before op.
        expected_rows: usize,
        /// Columns before op.
        expected_cols: usize,
    },
    /// A batch of operands has another number of matrices than D has.
    #[error("{operand} is a batch of {found} matrices, D one of {expected}")]
    Count {
        /// `A`, `B` or `C`.
        operand: &'static str,
        /// Matrices of D.
        expected: usize,
        /// Matrices of the operand.
        found: usize,
    },
    /// The groups' sizes do not add up to the number of problems.
    #[error("the groups have {expected} problems together, {found} were given")]
    GroupSizes {
        /// The sum of the sizes; `usize::MAX` also where it is larger.
        expected: usize,
        /// Problems given.
        found: usize,
    },
    /// The rows of a packed operand and `m_indices` do not fit each other or the weights.
    #[error("row {row} of the packed matrix names expert {expert}, there are {experts}")]
    Expert {
        /// The row.
        row: usize,
        /// What its entry says.
        expert: i32,
        /// Number of weight matrices.
        experts: usize,
    },
    /// A parallel task panicked; what was computed is incomplete.
    #[error(transparent)]
    TaskPanic(#[from] TaskPanic),
    /// The threads could not do the work.
    #[error(transparent)]
    Engine(#[from] CpuError),
}
