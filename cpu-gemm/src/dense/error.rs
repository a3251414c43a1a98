//! What can be wrong with a GEMM over strided matrices.

use crate::CpuError;

/// Operands that do not fit their memory, the problem or each other. Everything is checked
/// before memory is touched, so an error leaves D as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DenseError {
    /// The memory is shorter than the matrices reach.
    #[error("{what} reaches {needed} elements, its memory has {actual}")]
    TooShort {
        /// The view.
        what: &'static str,
        /// Elements that shape and strides reach.
        needed: usize,
        /// Elements there are.
        actual: usize,
    },
    /// Shape and strides reach beyond what an address can name.
    #[error("{what} reaches beyond the address space")]
    TooLarge {
        /// The view.
        what: &'static str,
    },
    /// Rows (or columns) would overlap.
    #[error("the leading dimension is {actual}; rows or columns of {needed} elements need as many")]
    LeadingDimension {
        /// Elements of a row (row-major) or column (column-major), at least 1.
        needed: usize,
        /// The leading dimension given, in elements.
        actual: usize,
    },
    /// A matrix is not what m, n, k and its op ask for.
    #[error("{what} is {actual:?}, the problem needs {needed:?} (rows, columns)")]
    Shape {
        /// The operand: A, B, C or D.
        what: &'static str,
        /// Rows and columns that it needs.
        needed: (usize, usize),
        /// Rows and columns that it has.
        actual: (usize, usize),
    },
    /// β is not 0 and there is no C.
    #[error("beta is not 0, so C is read; give it, or C::InPlace")]
    MissingC,
    /// A batch whose operands are not equally many.
    #[error("the batch has {d} of D and {actual} of {what}")]
    BatchCount {
        /// The operand: A, B or C.
        what: &'static str,
        /// Matrices of that operand.
        actual: usize,
        /// Matrices of D.
        d: usize,
    },
    /// D shares elements with another operand, or with another problem's D.
    #[error("D of problem {problem} overlaps {with}; only C may be D itself, exactly")]
    Overlap {
        /// Number of the problem in the call.
        problem: usize,
        /// What it overlaps.
        with: &'static str,
    },
    /// Matrices of a strided D overlap each other.
    #[error("matrices of D {stride} elements apart overlap; each reaches {needed}")]
    BatchStride {
        /// Elements from one matrix to the next.
        stride: usize,
        /// Elements that one matrix reaches.
        needed: usize,
    },
    /// The threads failed.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
