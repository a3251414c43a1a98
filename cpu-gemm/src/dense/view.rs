//! Borrowed matrices whose storage order is part of their type.

use std::marker::PhantomData;

use super::DenseError;

/// Storage orders.
pub trait Layout: Copy + Send + Sync + std::fmt::Debug + private::Sealed + 'static {
    /// The other order.
    type Other: Layout<Other = Self>;
    /// Whether the elements of a row are neighbours.
    const ROW_MAJOR: bool;
}

/// The elements of a row are neighbours; the leading dimension leads to the next row.
#[derive(Clone, Copy, Debug)]
pub struct RowMajor;

/// The elements of a column are neighbours; the leading dimension leads to the next column.
#[derive(Clone, Copy, Debug)]
pub struct ColMajor;

impl Layout for RowMajor {
    type Other = ColMajor;
    const ROW_MAJOR: bool = true;
}

impl Layout for ColMajor {
    type Other = RowMajor;
    const ROW_MAJOR: bool = false;
}

mod private {
    /// There is no third order.
    pub trait Sealed {}
    impl Sealed for super::RowMajor {}
    impl Sealed for super::ColMajor {}
}

/// Shape and leading dimension, without memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row (row-major) or column (column-major) to the next.
    pub ld: usize,
}

impl Extent {
    /// Elements from the first to one past the last.
    ///
    /// # Errors
    /// A leading dimension under the length of a row or column, or under 1; an extent that no
    /// address reaches.
    pub fn needed<L: Layout>(&self, what: &'static str) -> Result<usize, DenseError> {
        let (major, minor) = self.major_minor::<L>();
        if self.ld < minor.max(1) {
            return Err(DenseError::LeadingDimension {
                needed: minor.max(1),
                actual: self.ld,
            });
        }
        if major == 0 || minor == 0 {
            return Ok(0);
        }
        (major - 1)
            .checked_mul(self.ld)
            .and_then(|n| n.checked_add(minor))
            .filter(|&n| n <= isize::MAX as usize / 16)
            .ok_or(DenseError::TooLarge { what })
    }

    /// Rows and elements of a row, or columns and elements of a column.
    pub fn major_minor<L: Layout>(&self) -> (usize, usize) {
        match L::ROW_MAJOR {
            true => (self.rows, self.cols),
            false => (self.cols, self.rows),
        }
    }
}

/// A matrix that is read.
#[derive(Debug)]
pub struct Matrix<'a, T, L: Layout = RowMajor> {
    pub(super) data: *const T,
    pub(super) extent: Extent,
    marker: PhantomData<(&'a [T], L)>,
}

impl<T, L: Layout> Clone for Matrix<'_, T, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, L: Layout> Copy for Matrix<'_, T, L> {}

// SAFETY: it is a shared borrow of T.
unsafe impl<T: Sync, L: Layout> Send for Matrix<'_, T, L> {}
// SAFETY: as above.
unsafe impl<T: Sync, L: Layout> Sync for Matrix<'_, T, L> {}

impl<'a, T, L: Layout> Matrix<'a, T, L> {
    /// `rows` x `cols` elements at the start of `data`, `ld` from one row (or column) to the next.
    ///
    /// # Errors
    /// Too little data, or a leading dimension under the length of a row or column.
    pub fn new(data: &'a [T], rows: usize, cols: usize, ld: usize) -> Result<Self, DenseError> {
        let extent = Extent { rows, cols, ld };
        check_length(extent.needed::<L>("the matrix")?, data.len())?;
        Ok(Self {
            data: data.as_ptr(),
            extent,
            marker: PhantomData,
        })
    }

    /// A matrix without gaps.
    ///
    /// # Errors
    /// Too little data.
    pub fn packed(data: &'a [T], rows: usize, cols: usize) -> Result<Self, DenseError> {
        Self::new(data, rows, cols, packed_ld::<L>(rows, cols))
    }

    /// A matrix at an address.
    ///
    /// # Errors
    /// A leading dimension under the length of a row or column.
    ///
    /// # Safety
    /// The elements that shape and leading dimension reach are valid to read for `'a`, and nobody
    /// writes them meanwhile but a call that gets them as its C and its D.
    pub unsafe fn from_raw(data: *const T, extent: Extent) -> Result<Self, DenseError> {
        extent.needed::<L>("the matrix")?;
        Ok(Self {
            data,
            extent,
            marker: PhantomData,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.extent.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.extent.cols
    }

    /// Elements from one row (or column) to the next.
    pub fn ld(&self) -> usize {
        self.extent.ld
    }

    /// Rows `first..first + rows`.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn row_range(self, first: usize, rows: usize) -> Result<Self, DenseError> {
        if first.checked_add(rows).is_none_or(|end| end > self.rows()) {
            return Err(DenseError::TooShort {
                what: "the range of rows",
                needed: first.saturating_add(rows),
                actual: self.rows(),
            });
        }
        let step = if L::ROW_MAJOR { self.extent.ld } else { 1 };
        Ok(Self {
            data: self.data.wrapping_add(first * step),
            extent: Extent {
                rows,
                ..self.extent
            },
            marker: PhantomData,
        })
    }

    /// The same memory as the transposed matrix.
    pub fn transposed(self) -> Matrix<'a, T, L::Other> {
        Matrix {
            data: self.data,
            extent: transposed(self.extent),
            marker: PhantomData,
        }
    }
}

/// A matrix that is written.
#[derive(Debug)]
pub struct MatrixMut<'a, T, L: Layout = RowMajor> {
    pub(super) data: *mut T,
    pub(super) extent: Extent,
    marker: PhantomData<(&'a mut [T], L)>,
}

// SAFETY: it is an exclusive borrow of its elements.
unsafe impl<T: Send, L: Layout> Send for MatrixMut<'_, T, L> {}
// SAFETY: a shared reference to it gives no access to the elements.
unsafe impl<T: Sync, L: Layout> Sync for MatrixMut<'_, T, L> {}

impl<'a, T, L: Layout> MatrixMut<'a, T, L> {
    /// As [`Matrix::new`], of data that nobody else uses meanwhile.
    ///
    /// # Errors
    /// Too little data, or a leading dimension under the length of a row or column.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize, ld: usize) -> Result<Self, DenseError> {
        let extent = Extent { rows, cols, ld };
        check_length(extent.needed::<L>("the matrix")?, data.len())?;
        Ok(Self {
            data: data.as_mut_ptr(),
            extent,
            marker: PhantomData,
        })
    }

    /// A matrix without gaps.
    ///
    /// # Errors
    /// Too little data.
    pub fn packed(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, DenseError> {
        Self::new(data, rows, cols, packed_ld::<L>(rows, cols))
    }

    /// A matrix at an address.
    ///
    /// # Errors
    /// A leading dimension under the length of a row or column.
    ///
    /// # Safety
    /// The elements that shape and leading dimension reach are valid to read and write for `'a`,
    /// and nobody else uses them meanwhile but a call that gets them as its C and its D. Elements
    /// between the rows or columns may be others'.
    pub unsafe fn from_raw(data: *mut T, extent: Extent) -> Result<Self, DenseError> {
        extent.needed::<L>("the matrix")?;
        Ok(Self {
            data,
            extent,
            marker: PhantomData,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.extent.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.extent.cols
    }

    /// Elements from one row (or column) to the next.
    pub fn ld(&self) -> usize {
        self.extent.ld
    }

    /// A shorter borrow.
    pub fn reborrow(&mut self) -> MatrixMut<'_, T, L> {
        MatrixMut {
            data: self.data,
            extent: self.extent,
            marker: PhantomData,
        }
    }

    /// The same memory as the transposed matrix.
    pub fn transposed(self) -> MatrixMut<'a, T, L::Other> {
        MatrixMut {
            data: self.data,
            extent: transposed(self.extent),
            marker: PhantomData,
        }
    }

    /// The first `rows` rows and the others; all of them are first if there are fewer.
    pub fn split_rows(self, rows: usize) -> (Self, Self) {
        let first = rows.min(self.extent.rows);
        let step = if L::ROW_MAJOR { self.extent.ld } else { 1 };
        let part = |rows, offset: usize| Self {
            data: self.data.wrapping_add(offset),
            extent: Extent {
                rows,
                ..self.extent
            },
            marker: PhantomData,
        };
        (part(first, 0), part(self.extent.rows - first, first * step))
    }

    /// The first `cols` columns and the others.
    pub fn split_cols(self, cols: usize) -> (Self, Self) {
        let (first, second) = self.transposed().split_rows(cols);
        (first.back(), second.back())
    }
}

impl<'a, T, L: Layout> MatrixMut<'a, T, L> {
    /// [`Self::transposed`] back to a layout named by the caller's type.
    fn back<M: Layout>(self) -> MatrixMut<'a, T, M> {
        MatrixMut {
            data: self.data,
            extent: transposed(self.extent),
            marker: PhantomData,
        }
    }
}

/// C of D = α·op(A)·op(B) + β·C.
#[derive(Debug)]
pub enum C<'a, T, L: Layout = RowMajor> {
    /// There is none: β is 0.
    None,
    /// D's old contents.
    InPlace,
    /// Another matrix.
    Matrix(Matrix<'a, T, L>),
}

impl<T, L: Layout> Clone for C<'_, T, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, L: Layout> Copy for C<'_, T, L> {}

/// `count` equal matrices, `stride` elements from one to the next (0: all the same one).
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, T, L: Layout = RowMajor> {
    first: Matrix<'a, T, L>,
    stride: usize,
    count: usize,
}

impl<'a, T, L: Layout> Strided<'a, T, L> {
    /// Matrices of `extent` in `data`.
    ///
    /// # Errors
    /// Too little data, or a leading dimension under the length of a row or column.
    pub fn new(
        data: &'a [T],
        extent: Extent,
        stride: usize,
        count: usize,
    ) -> Result<Self, DenseError> {
        check_length(batch_needed::<L>(extent, stride, count)?, data.len())?;
        Ok(Self {
            first: Matrix {
                data: data.as_ptr(),
                extent,
                marker: PhantomData,
            },
            stride,
            count,
        })
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Matrix `index`, if there is one.
    pub fn get(&self, index: usize) -> Option<Matrix<'a, T, L>> {
        (index < self.count).then(|| Matrix {
            data: self.first.data.wrapping_add(index * self.stride),
            ..self.first
        })
    }

    /// The matrices.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Matrix<'a, T, L>> + use<'a, T, L> {
        let (first, stride) = (self.first, self.stride);
        (0..self.count).map(move |i| Matrix {
            data: first.data.wrapping_add(i * stride),
            ..first
        })
    }
}

/// `count` equal matrices of D, `stride` elements from one to the next, without overlap: one after
/// the other, or side by side inside the leading dimension.
#[derive(Debug)]
pub struct StridedMut<'a, T, L: Layout = RowMajor> {
    first: MatrixMut<'a, T, L>,
    stride: usize,
    count: usize,
}

impl<'a, T, L: Layout> StridedMut<'a, T, L> {
    /// Matrices of `extent` in `data`.
    ///
    /// # Errors
    /// Too little data, a leading dimension under the length of a row or column, or overlap.
    pub fn new(
        data: &'a mut [T],
        extent: Extent,
        stride: usize,
        count: usize,
    ) -> Result<Self, DenseError> {
        check_length(batch_needed::<L>(extent, stride, count)?, data.len())?;
        check_apart::<L>(extent, stride, count)?;
        Ok(Self {
            first: MatrixMut {
                data: data.as_mut_ptr(),
                extent,
                marker: PhantomData,
            },
            stride,
            count,
        })
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The matrices.
    pub fn into_matrices(
        self,
    ) -> impl ExactSizeIterator<Item = MatrixMut<'a, T, L>> + use<'a, T, L> {
        let (data, extent, stride) = (self.first.data, self.first.extent, self.stride);
        (0..self.count).map(move |i| MatrixMut {
            data: data.wrapping_add(i * stride),
            extent,
            marker: PhantomData,
        })
    }
}

/// Elements that a strided batch reaches.
///
/// # Errors
/// As [`Extent::needed`].
pub fn batch_needed<L: Layout>(
    extent: Extent,
    stride: usize,
    count: usize,
) -> Result<usize, DenseError> {
    let what = "the strided batch";
    let one = extent.needed::<L>(what)?;
    if count == 0 || one == 0 {
        return Ok(0);
    }
    (count - 1)
        .checked_mul(stride)
        .and_then(|n| n.checked_add(one))
        .filter(|&n| n <= isize::MAX as usize / 16)
        .ok_or(DenseError::TooLarge { what })
}

/// Whether the matrices of a strided batch share no element.
///
/// # Errors
/// [`DenseError::BatchStride`] if they do; otherwise as [`Extent::needed`].
pub fn check_apart<L: Layout>(
    extent: Extent,
    stride: usize,
    count: usize,
) -> Result<(), DenseError> {
    let needed = extent.needed::<L>("D")?;
    let (_, minor) = extent.major_minor::<L>();
    let one_after_the_other = stride >= needed;
    let side_by_side = stride >= minor
        && (count.saturating_sub(1))
            .checked_mul(stride)
            .and_then(|n| n.checked_add(minor))
            .is_some_and(|n| n <= extent.ld);
    match count <= 1 || needed == 0 || one_after_the_other || side_by_side {
        true => Ok(()),
        false => Err(DenseError::BatchStride { stride, needed }),
    }
}

fn check_length(needed: usize, actual: usize) -> Result<(), DenseError> {
    match needed <= actual {
        true => Ok(()),
        false => Err(DenseError::TooShort {
            what: "the view",
            needed,
            actual,
        }),
    }
}

/// The smallest leading dimension.
pub fn packed_ld<L: Layout>(rows: usize, cols: usize) -> usize {
    let extent = Extent { rows, cols, ld: 1 };
    extent.major_minor::<L>().1.max(1)
}

fn transposed(extent: Extent) -> Extent {
    Extent {
        rows: extent.cols,
        cols: extent.rows,
        ld: extent.ld,
    }
}
