//! Borrowed matrices whose order of elements is part of their type.

use std::marker::PhantomData;

use super::DenseError;

/// Rows lie one after the other: element (i, j) is at `i * leading + j`.
#[derive(Clone, Copy, Debug)]
pub struct RowMajor;

/// Columns lie one after the other: element (i, j) is at `i + j * leading`.
#[derive(Clone, Copy, Debug)]
pub struct ColMajor;

/// [`RowMajor`] or [`ColMajor`].
pub trait Order: Copy + Send + Sync + 'static + sealed::Order {}

mod sealed {
    pub trait Order {
        const ROWS: bool;
    }
    impl Order for super::RowMajor {
        const ROWS: bool = true;
    }
    impl Order for super::ColMajor {
        const ROWS: bool = false;
    }
}

impl Order for RowMajor {}
impl Order for ColMajor {}

/// Number, length and distance of the lines (rows or columns) of a matrix.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    cols: usize,
    leading: usize,
}

impl Shape {
    /// Lines, and elements of each.
    fn lines<L: Order>(self) -> (usize, usize) {
        match L::ROWS {
            true => (self.rows, self.cols),
            false => (self.cols, self.rows),
        }
    }

    /// Elements from the first to the last, both included.
    fn span<L: Order>(self) -> Result<usize, DenseError> {
        let (lines, len) = self.lines::<L>();
        if self.leading < len {
            return Err(DenseError::LeadingDimension {
                leading: self.leading,
                least: len,
            });
        }
        Ok(match (lines, len) {
            (0, _) | (_, 0) => 0,
            _ => (lines - 1).saturating_mul(self.leading).saturating_add(len),
        })
    }

    /// Elements from one row to the next, and from one column to the next.
    fn steps<L: Order>(self) -> (usize, usize) {
        match L::ROWS {
            true => (self.leading, 1),
            false => (1, self.leading),
        }
    }
}

fn long_enough(needed: usize, found: usize) -> Result<(), DenseError> {
    match needed <= found {
        true => Ok(()),
        false => Err(DenseError::TooShort { needed, found }),
    }
}

/// A matrix to read.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T, L = RowMajor> {
    base: *const T,
    shape: Shape,
    data: PhantomData<(&'a [T], L)>,
}

// SAFETY: it stands for a `&[T]`.
unsafe impl<T: Sync, L> Send for View<'_, T, L> {}
// SAFETY: as above.
unsafe impl<T: Sync, L> Sync for View<'_, T, L> {}

impl<'a, T, L: Order> View<'a, T, L> {
    /// Views `rows` x `cols` elements of `data`; `leading` is the distance in elements from one row
    /// (column, for [`ColMajor`]) to the next. The last one need not be as long as that.
    ///
    /// # Errors
    /// [`DenseError::LeadingDimension`], [`DenseError::TooShort`].
    pub fn new(
        data: &'a [T],
        rows: usize,
        cols: usize,
        leading: usize,
    ) -> Result<Self, DenseError> {
        let shape = Shape {
            rows,
            cols,
            leading,
        };
        long_enough(shape.span::<L>()?, data.len())?;
        Ok(Self {
            base: data.as_ptr(),
            shape,
            data: PhantomData,
        })
    }

    /// The same without gaps: the leading dimension is the length of a row (column).
    ///
    /// # Errors
    /// [`DenseError::TooShort`].
    pub fn packed(data: &'a [T], rows: usize, cols: usize) -> Result<Self, DenseError> {
        Self::new(data, rows, cols, if L::ROWS { cols } else { rows })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    pub(super) fn strided(&self) -> Strided<T> {
        Strided::new::<L>(self.base.cast_mut(), self.shape)
    }
}

/// A matrix to write.
#[derive(Debug)]
pub struct ViewMut<'a, T, L = RowMajor> {
    base: *mut T,
    shape: Shape,
    data: PhantomData<(&'a mut [T], L)>,
}

// SAFETY: it stands for a `&mut [T]` of the elements of the matrix.
unsafe impl<T: Send, L> Send for ViewMut<'_, T, L> {}
// SAFETY: as above; a shared one gives no access.
unsafe impl<T: Sync, L> Sync for ViewMut<'_, T, L> {}

impl<'a, T, L: Order> ViewMut<'a, T, L> {
    /// Views `data` as [`View::new`] does. Elements between the rows (columns) are never touched.
    ///
    /// # Errors
    /// [`DenseError::LeadingDimension`], [`DenseError::TooShort`].
    pub fn new(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
        leading: usize,
    ) -> Result<Self, DenseError> {
        let shape = Shape {
            rows,
            cols,
            leading,
        };
        long_enough(shape.span::<L>()?, data.len())?;
        Ok(Self {
            base: data.as_mut_ptr(),
            shape,
            data: PhantomData,
        })
    }

    /// The same without gaps: the leading dimension is the length of a row (column).
    ///
    /// # Errors
    /// [`DenseError::TooShort`].
    pub fn packed(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, DenseError> {
        Self::new(data, rows, cols, if L::ROWS { cols } else { rows })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Rows `..row`, and the others. `None` if there are fewer.
    pub fn split_rows(self, row: usize) -> Option<(Self, Self)> {
        let Shape { rows, cols, .. } = self.shape;
        let rest = rows.checked_sub(row)?;
        Some(self.split((row, cols), (row, 0), (rest, cols)))
    }

    /// Columns `..col`, and the others. `None` if there are fewer.
    pub fn split_cols(self, col: usize) -> Option<(Self, Self)> {
        let Shape { rows, cols, .. } = self.shape;
        let rest = cols.checked_sub(col)?;
        Some(self.split((rows, col), (0, col), (rows, rest)))
    }

    /// A first part, and a second one that starts at element `at`; they have no element in common.
    fn split(
        self,
        (first_rows, first_cols): (usize, usize),
        at: (usize, usize),
        (rows, cols): (usize, usize),
    ) -> (Self, Self) {
        let (row_step, col_step) = self.shape.steps::<L>();
        let part = |base, rows, cols| Self {
            base,
            shape: Shape {
                rows,
                cols,
                ..self.shape
            },
            data: PhantomData,
        };
        // An empty part may start beyond the slice; it is never read or written.
        let offset = (at.0.wrapping_mul(row_step)).wrapping_add(at.1.wrapping_mul(col_step));
        (
            part(self.base, first_rows, first_cols),
            part(self.base.wrapping_add(offset), rows, cols),
        )
    }

    pub(super) fn strided(&mut self) -> Strided<T> {
        Strided::new::<L>(self.base, self.shape)
    }
}

/// Matrices of one shape at a fixed distance, to read. They may overlap; distance 0 is one matrix
/// for all problems.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a, T, L = RowMajor> {
    first: View<'a, T, L>,
    stride: usize,
    count: usize,
}

impl<'a, T, L: Order> Batch<'a, T, L> {
    /// `count` matrices that start `stride` elements apart; `rows`, `cols` and `leading` as in
    /// [`View::new`].
    ///
    /// # Errors
    /// [`DenseError::LeadingDimension`], [`DenseError::TooShort`].
    pub fn new(
        data: &'a [T],
        (rows, cols, leading): (usize, usize, usize),
        stride: usize,
        count: usize,
    ) -> Result<Self, DenseError> {
        let shape = Shape {
            rows,
            cols,
            leading,
        };
        long_enough(batch_span::<L>(shape, stride, count)?, data.len())?;
        Ok(Self {
            first: View {
                base: data.as_ptr(),
                shape,
                data: PhantomData,
            },
            stride,
            count,
        })
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows of each matrix.
    pub fn rows(&self) -> usize {
        self.first.rows()
    }

    /// Columns of each matrix.
    pub fn cols(&self) -> usize {
        self.first.cols()
    }

    /// Matrix `index`.
    ///
    /// # Panics
    /// If there is none.
    pub fn get(&self, index: usize) -> View<'a, T, L> {
        assert!(index < self.count, "matrix {index} of {}", self.count);
        View {
            base: self.first.base.wrapping_add(index.wrapping_mul(self.stride)),
            ..self.first
        }
    }
}

/// Matrices of one shape at a fixed distance, to write: one behind the other, or interleaved within
/// the leading dimension, as the heads of [tokens, heads, dim] are.
#[derive(Debug)]
pub struct BatchMut<'a, T, L = RowMajor> {
    first: ViewMut<'a, T, L>,
    stride: usize,
    count: usize,
}

impl<'a, T, L: Order> BatchMut<'a, T, L> {
    /// As [`Batch::new`], of matrices that have no element in common.
    ///
    /// # Errors
    /// [`DenseError::LeadingDimension`], [`DenseError::TooShort`], [`DenseError::Overlap`].
    pub fn new(
        data: &'a mut [T],
        (rows, cols, leading): (usize, usize, usize),
        stride: usize,
        count: usize,
    ) -> Result<Self, DenseError> {
        let shape = Shape {
            rows,
            cols,
            leading,
        };
        let least = shape.span::<L>()?;
        long_enough(batch_span::<L>(shape, stride, count)?, data.len())?;
        let (_, len) = shape.lines::<L>();
        let all_in_a_line = count
            .saturating_sub(1)
            .saturating_mul(stride)
            .saturating_add(len);
        let interleaved = stride >= len && all_in_a_line <= leading;
        if count > 1 && stride < least && !interleaved {
            return Err(DenseError::Overlap { stride, least });
        }
        Ok(Self {
            first: ViewMut {
                base: data.as_mut_ptr(),
                shape,
                data: PhantomData,
            },
            stride,
            count,
        })
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The matrices, in order.
    pub fn into_views(self) -> impl ExactSizeIterator<Item = ViewMut<'a, T, L>> {
        let Self {
            first,
            stride,
            count,
        } = self;
        (0..count).map(move |index| ViewMut {
            base: first.base.wrapping_add(index.wrapping_mul(stride)),
            shape: first.shape,
            data: PhantomData,
        })
    }
}

/// Elements from the first of the first matrix to the last of the last one.
fn batch_span<L: Order>(shape: Shape, stride: usize, count: usize) -> Result<usize, DenseError> {
    Ok(match (shape.span::<L>()?, count) {
        (0, _) | (_, 0) => 0,
        (span, _) => (count - 1).saturating_mul(stride).saturating_add(span),
    })
}

/// A matrix without its lifetime, order and mutability: what tasks address.
#[derive(Debug)]
pub(super) struct Strided<T> {
    pub(super) base: *mut T,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements from one row to the next.
    pub(super) row_step: usize,
    /// Elements from one column to the next.
    pub(super) col_step: usize,
}

impl<T> Clone for Strided<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Strided<T> {}

impl<T> Strided<T> {
    fn new<L: Order>(base: *mut T, shape: Shape) -> Self {
        let (row_step, col_step) = shape.steps::<L>();
        Self {
            base,
            rows: shape.rows,
            cols: shape.cols,
            row_step,
            col_step,
        }
    }

    /// The same elements with rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        Self {
            base: self.base,
            rows: self.cols,
            cols: self.rows,
            row_step: self.col_step,
            col_step: self.row_step,
        }
    }

    /// `rows` rows from `row` on.
    pub(super) fn rows_at(self, row: usize, rows: usize) -> Self {
        Self {
            base: self.at(row, 0),
            rows,
            ..self
        }
    }

    /// Where element (row, col) is. In bounds for elements of the matrix, as `View` and `ViewMut` checked.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, col: usize) -> *mut T {
        self.base
            .wrapping_add(row.wrapping_mul(self.row_step))
            .wrapping_add(col.wrapping_mul(self.col_step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_leading_dimensions_are_checked() {
        let data = [0u8; 14];
        assert!(View::<_, RowMajor>::new(&data, 3, 4, 5).is_ok());
        assert!(View::<_, ColMajor>::new(&data, 4, 3, 5).is_ok());
        assert_eq!(
            View::<_, RowMajor>::new(&data, 3, 5, 5).err(),
            Some(DenseError::TooShort {
                needed: 15,
                found: 14
            })
        );
        assert_eq!(
            View::<_, ColMajor>::new(&data, 6, 2, 5).err(),
            Some(DenseError::LeadingDimension {
                leading: 5,
                least: 6
            })
        );
        assert!(View::<_, RowMajor>::new(&data, 0, 5, 5).is_ok());
        assert!(View::<_, RowMajor>::new(&data, 1 << 40, 0, 0).is_ok());
        assert_eq!(
            View::<_, RowMajor>::new(&data, usize::MAX, 2, usize::MAX).err(),
            Some(DenseError::TooShort {
                needed: usize::MAX,
                found: 14
            })
        );
    }

    #[test]
    fn batches_to_write_must_not_overlap() {
        let mut data = [0u8; 64];
        let mut check = |shape, stride, count| {
            BatchMut::<_, RowMajor>::new(&mut data, shape, stride, count).map(|batch| batch.count)
        };
        assert_eq!(check((2, 3, 4), 7, 3), Ok(3));
        assert_eq!(
            check((2, 3, 4), 6, 3).err(),
            Some(DenseError::Overlap {
                stride: 6,
                least: 7
            })
        );
        // Interleaved: two matrices side by side in rows of eight, but three do not fit.
        assert_eq!(check((2, 3, 8), 4, 2), Ok(2));
        assert!(check((2, 3, 8), 4, 3).is_err());
        assert!(check((2, 3, 8), 2, 2).is_err());
        assert_eq!(check((2, 3, 4), 0, 1), Ok(1));
        assert!(check((2, 3, 4), 0, 2).is_err());
        assert_eq!(check((0, 3, 4), 0, 9), Ok(9));
        assert!(Batch::<_, RowMajor>::new(&data, (2, 3, 4), 0, 1 << 50).is_ok());
        assert!(Batch::<_, RowMajor>::new(&data, (2, 3, 4), 1, 59).is_err());
    }

    #[test]
    fn views_split_into_disjoint_parts() {
        let mut data = [0u8; 12];
        let view = ViewMut::<_, RowMajor>::packed(&mut data, 3, 4).unwrap();
        let (mut top, bottom) = view.split_rows(1).unwrap();
        let (left, mut right) = bottom.split_cols(3).unwrap();
        assert_eq!((top.rows(), top.cols()), (1, 4));
        assert_eq!((left.rows(), left.cols()), (2, 3));
        assert_eq!((right.rows(), right.cols()), (2, 1));
        // SAFETY: (1, 0) and (0, 3) exist in these parts, which nobody else looks at.
        unsafe {
            *right.strided().at(1, 0) = 1;
            *top.strided().at(0, 3) = 2;
        }
        assert!(left.split_cols(4).is_none() && right.split_rows(3).is_none());
        assert_eq!(data, [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]);
    }
}
