//! Checked problems as addresses and strides, for executors other than this crate's.

use super::job::{Job, check_overlaps};
use super::view::{C, Layout, Matrix, MatrixMut};
use super::{DenseError, Gemm, Multiply, Output};

/// An operand: address and bytes of its memory, and strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedOperand {
    /// Address of the first element.
    pub address: usize,
    /// Bytes from there to the last element's end.
    pub bytes: usize,
    /// Elements from one row of op(X) to the next.
    pub row_step: usize,
    /// Elements from one column of op(X) to the next.
    pub col_step: usize,
}

/// D = α·A·B + β·C after all checks; ops and storage orders have become strides, and D's rows lie
/// side by side in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checked<S> {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Length of the sums; 0 if A and B must not be read.
    pub k: usize,
    /// Factor of the product.
    pub alpha: S,
    /// Factor of C.
    pub beta: S,
    /// A, m x k.
    pub a: CheckedOperand,
    /// B, k x n.
    pub b: CheckedOperand,
    /// C, m x n, if it is read.
    pub c: Option<CheckedOperand>,
    /// D, m x n.
    pub d: CheckedOperand,
}

/// Collects problems of one call.
pub struct Checker<T: Multiply<D>, D: Output<T::Scalar>> {
    jobs: Vec<Job<T, D>>,
}

impl<T: Multiply<D>, D: Output<T::Scalar>> Default for Checker<T, D> {
    fn default() -> Self {
        Self { jobs: Vec::new() }
    }
}

impl<T: Multiply<D>, D: Output<T::Scalar>> std::fmt::Debug for Checker<T, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checker of {} problems", self.jobs.len())
    }
}

impl<T: Multiply<D>, D: Output<T::Scalar>> Checker<T, D> {
    /// Adds a problem. The memory is not touched.
    ///
    /// # Errors
    /// Operands that are not what `gemm` asks for, or a missing C.
    pub fn add<LA: Layout, LB: Layout, LD: Layout>(
        &mut self,
        gemm: &Gemm<T::Scalar>,
        a: &Matrix<'_, T, LA>,
        b: &Matrix<'_, T, LB>,
        c: &C<'_, D, LD>,
        d: &mut MatrixMut<'_, D, LD>,
    ) -> Result<(), DenseError> {
        self.jobs.push(Job::new(gemm, a, b, c, d)?);
        Ok(())
    }

    /// The problems.
    ///
    /// # Errors
    /// [`DenseError::Overlap`].
    pub fn finish(self) -> Result<Vec<Checked<T::Scalar>>, DenseError> {
        check_overlaps(&self.jobs)?;
        Ok(self.jobs.iter().map(Job::checked).collect())
    }
}
