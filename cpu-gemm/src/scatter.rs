//! A row-major matrix that tasks write rectangles of at the same time.

use std::marker::PhantomData;

/// Borrows a matrix for writing from several threads.
pub(crate) struct Scatter<'a, T> {
    base: *mut T,
    len: usize,
    stride: usize,
    matrix: PhantomData<&'a mut [T]>,
}

// SAFETY: only `row` reaches the elements, and its contract forbids two threads the same ones.
unsafe impl<T: Send> Sync for Scatter<'_, T> {}

impl<'a, T> Scatter<'a, T> {
    pub(crate) fn new(matrix: &'a mut [T], stride: usize) -> Self {
        Self {
            base: matrix.as_mut_ptr(),
            len: matrix.len(),
            stride,
            matrix: PhantomData,
        }
    }

    /// Columns `column..column + count` of a row.
    ///
    /// # Safety
    /// While the result lives no other result may cover any of its elements.
    ///
    /// # Panics
    /// If the columns lie outside the matrix.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's duty")]
    pub(crate) unsafe fn row(&self, row: usize, column: usize, count: usize) -> &mut [T] {
        // In this order nothing can wrap: a row number past the matrix fails before the product.
        assert!(
            count <= self.stride && column <= self.stride - count,
            "inside a row"
        );
        assert!(row <= self.len / self.stride, "inside the matrix");
        let start = row * self.stride + column;
        assert!(
            start <= self.len && count <= self.len - start,
            "inside the matrix"
        );
        // SAFETY: in bounds, asserted above; not aliased, by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), count) }
    }
}
