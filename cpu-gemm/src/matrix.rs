//! Borrowed row-major matrices with strides, in elements.

use crate::CpuError;
use crate::validate::same;

/// Checks that rows of `cols` elements, `stride` apart from element `before` on, fit a buffer.
fn check_rows(
    what: &'static str,
    len: usize,
    before: usize,
    rows: usize,
    cols: usize,
    stride: usize,
) -> Result<(), CpuError> {
    if stride < cols {
        return Err(CpuError::Stride {
            what: "a row stride",
            stride,
            least: cols,
        });
    }
    let needed = match rows.checked_sub(1) {
        Some(last) => last
            .saturating_mul(stride)
            .saturating_add(cols)
            .saturating_add(before),
        None => 0,
    };
    if needed > len {
        return Err(CpuError::TooShort {
            what,
            needed,
            actual: len,
        });
    }
    Ok(())
}

/// A [rows, cols] matrix.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> MatrixRef<'a, T> {
    /// Views `data`; consecutive rows are `stride` elements apart.
    ///
    /// # Errors
    /// A stride below `cols`, or `data` too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Result<Self, CpuError> {
        check_rows("a matrix", data.len(), 0, rows, cols, stride)?;
        Ok(Self {
            data,
            rows,
            cols,
            stride,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data[row * self.stride..][..self.cols]
    }
}

/// A [rows, cols] matrix to write to.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    pub(crate) data: &'a mut [T],
    rows: usize,
    cols: usize,
    pub(crate) stride: usize,
}

impl<'a, T> MatrixMut<'a, T> {
    /// Views `data`; consecutive rows are `stride` elements apart.
    ///
    /// # Errors
    /// A stride below `cols`, or `data` too short.
    pub fn new(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self, CpuError> {
        check_rows("a matrix", data.len(), 0, rows, cols, stride)?;
        Ok(Self {
            data,
            rows,
            cols,
            stride,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// The B operands of a grouped GEMM: [groups, rows, cols], that is [G, N, K].
#[derive(Clone, Copy, Debug)]
pub struct WeightsRef<'a, T> {
    data: &'a [T],
    groups: usize,
    rows: usize,
    cols: usize,
    group_stride: usize,
    row_stride: usize,
}

impl<'a, T> WeightsRef<'a, T> {
    /// Views `data` as `shape` = [groups, rows, cols] with `strides` = [group, row].
    ///
    /// # Errors
    /// A row stride below `cols`, or `data` too short. Matrices may overlap (a group stride of 0
    /// gives all groups the same one).
    pub fn new(data: &'a [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self, CpuError> {
        let [groups, rows, cols] = shape;
        let [group_stride, row_stride] = strides;
        if let Some(last) = groups.checked_sub(1) {
            let before = last.saturating_mul(group_stride);
            check_rows("the weights", data.len(), before, rows, cols, row_stride)?;
        }
        Ok(Self {
            data,
            groups,
            rows,
            cols,
            group_stride,
            row_stride,
        })
    }

    /// Number of weight matrices G.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Rows N of each.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns K of each.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Row `row` of matrix `group`.
    ///
    /// # Panics
    /// If there is no such matrix or row.
    pub fn row(&self, group: usize, row: usize) -> &'a [T] {
        assert!(
            group < self.groups && row < self.rows,
            "row {row} of matrix {group}"
        );
        &self.data[group * self.group_stride + row * self.row_stride..][..self.cols]
    }
}

/// What one scale of an int8 GEMM covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int8Scaling {
    /// A whole row of K: D = acc * (sa * sb).
    PerRow,
    /// 128 columns of a row: the blocks of K are added in order, in f32.
    Block128,
}

impl Int8Scaling {
    /// Scales of a row of `k` elements.
    pub fn blocks(self, k: usize) -> usize {
        match self {
            Self::PerRow => 1,
            Self::Block128 => k.div_ceil(asym_gemm_formats::int8::BLOCK),
        }
    }
}

/// The quantised A operand of an int8 GEMM.
#[derive(Clone, Copy, Debug)]
pub struct Int8Rows<'a> {
    pub(crate) codes: MatrixRef<'a, i8>,
    pub(crate) scales: MatrixRef<'a, f32>,
}

impl<'a> Int8Rows<'a> {
    /// Codes [M, K] and scales [M, blocks].
    ///
    /// # Errors
    /// Different numbers of rows.
    pub fn new(codes: MatrixRef<'a, i8>, scales: MatrixRef<'a, f32>) -> Result<Self, CpuError> {
        same("the number of rows of scales", codes.rows(), scales.rows())?;
        Ok(Self { codes, scales })
    }

    /// The codes [M, K].
    pub fn codes(&self) -> MatrixRef<'a, i8> {
        self.codes
    }

    /// The scales [M, blocks].
    pub fn scales(&self) -> MatrixRef<'a, f32> {
        self.scales
    }
}

/// The quantised B operands of an int8 GEMM.
#[derive(Clone, Copy, Debug)]
pub struct Int8Weights<'a> {
    pub(crate) codes: WeightsRef<'a, i8>,
    pub(crate) scales: WeightsRef<'a, f32>,
    pub(crate) scaling: Int8Scaling,
}

impl<'a> Int8Weights<'a> {
    /// Codes [G, N, K] and scales [G, N, blocks].
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn new(
        codes: WeightsRef<'a, i8>,
        scales: WeightsRef<'a, f32>,
        scaling: Int8Scaling,
    ) -> Result<Self, CpuError> {
        same(
            "the number of matrices of scales",
            codes.groups(),
            scales.groups(),
        )?;
        same("the number of rows of scales", codes.rows(), scales.rows())?;
        same(
            "the number of scales of a row",
            scaling.blocks(codes.cols()),
            scales.cols(),
        )?;
        Ok(Self {
            codes,
            scales,
            scaling,
        })
    }
}
