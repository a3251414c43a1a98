//! Borrowed matrices: row-major with strides in elements, or packed in panels.

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};
use asym_gemm_formats::fp8;
use bytemuck::Pod;
use half::bf16;

use crate::CpuError;
use crate::kernels::Panel;
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

mod sealed {
    pub trait Sealed {}
    impl Sealed for i8 {}
    impl Sealed for u8 {}
    impl Sealed for half::bf16 {}
}

/// Elements of weights: bf16, int8 codes, or e4m3 codes as bytes.
pub trait WeightElement: Pod + sealed::Sealed {}

impl WeightElement for i8 {}
impl WeightElement for u8 {}
impl WeightElement for bf16 {}

/// The B operands of a grouped GEMM [G, N, K] in panels, as a weight bank stores them: each 16 rows
/// are consecutive units of 16 rows x 128 bytes along K, zero-padded to whole units. A panel
/// is read as one stream, which short rows are not.
#[derive(Clone, Copy, Debug)]
pub struct PackedRef<'a, T> {
    bytes: &'a [u8],
    shape: [usize; 3],
    element: std::marker::PhantomData<T>,
}

impl<'a, T: WeightElement> PackedRef<'a, T> {
    /// Bytes of [groups, rows, cols] = [G, N, K] in panels.
    ///
    /// # Errors
    /// A size beyond the address space.
    pub fn bytes(shape: [usize; 3]) -> Result<usize, CpuError> {
        let [groups, rows, cols] = shape;
        rows.div_ceil(PANEL_ROWS)
            .checked_mul(UNIT_BYTES)
            .and_then(|bytes| bytes.checked_mul(units::<T>(cols)))
            .and_then(|bytes| bytes.checked_mul(groups))
            .ok_or(CpuError::TooLarge {
                what: "the packed weights, in bytes,",
                value: usize::MAX,
                limit: isize::MAX as usize,
            })
    }

    /// Views `bytes` as packed weights of `shape` = [G, N, K].
    ///
    /// # Errors
    /// Another length than [`PackedRef::bytes`].
    pub fn new(bytes: &'a [u8], shape: [usize; 3]) -> Result<Self, CpuError> {
        same(
            "the packed weights, in bytes,",
            Self::bytes(shape)?,
            bytes.len(),
        )?;
        Ok(Self {
            bytes,
            shape,
            element: std::marker::PhantomData,
        })
    }
}

impl<T: WeightElement> WeightsRef<'_, T> {
    /// Packs the matrices into `out`, which [`PackedRef::new`] then views.
    ///
    /// # Errors
    /// Another length than [`PackedRef::bytes`].
    pub fn pack(&self, out: &mut [u8]) -> Result<(), CpuError> {
        let shape = [self.groups, self.rows, self.cols];
        same(
            "the packed weights, in bytes,",
            PackedRef::<T>::bytes(shape)?,
            out.len(),
        )?;
        let panel_bytes = units::<T>(self.cols) * UNIT_BYTES;
        let panels = self.rows.div_ceil(PANEL_ROWS);
        if panel_bytes == 0 {
            return Ok(());
        }
        for (i, panel) in out.chunks_exact_mut(panel_bytes).enumerate() {
            let first = i % panels * PANEL_ROWS;
            copy_panel(panel, PANEL_ROWS.min(self.rows - first), |r| {
                bytemuck::cast_slice(self.row(i / panels, first + r))
            });
        }
        Ok(())
    }
}

/// Units of a row of `cols` elements.
fn units<T>(cols: usize) -> usize {
    cols.div_ceil(UNIT_ROW_BYTES / size_of::<T>())
}

/// Fills a panel from the bytes of its first `rows` rows; the rest becomes zero.
fn copy_panel<'b>(panel: &mut [u8], rows: usize, row: impl Fn(usize) -> &'b [u8]) {
    panel.fill(0);
    for r in 0..rows {
        let units = panel.chunks_exact_mut(UNIT_BYTES);
        for (unit, bytes) in units.zip(row(r).chunks(UNIT_ROW_BYTES)) {
            unit[r * UNIT_ROW_BYTES..][..bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// Weights in either layout, as bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codes<'a> {
    /// Rows of `shape[2] * element_bytes` bytes; strides in bytes.
    Rows {
        bytes: &'a [u8],
        shape: [usize; 3],
        element_bytes: usize,
        group_stride: usize,
        row_stride: usize,
    },
    /// Panels.
    Packed { bytes: &'a [u8], shape: [usize; 3] },
}

impl<'a, T: WeightElement> From<WeightsRef<'a, T>> for Codes<'a> {
    fn from(weights: WeightsRef<'a, T>) -> Self {
        Self::Rows {
            bytes: bytemuck::cast_slice(weights.data),
            shape: [weights.groups, weights.rows, weights.cols],
            element_bytes: size_of::<T>(),
            group_stride: weights.group_stride * size_of::<T>(),
            row_stride: weights.row_stride * size_of::<T>(),
        }
    }
}

impl<'a, T: WeightElement> From<PackedRef<'a, T>> for Codes<'a> {
    fn from(weights: PackedRef<'a, T>) -> Self {
        Self::Packed {
            bytes: weights.bytes,
            shape: weights.shape,
        }
    }
}

impl<'a> Codes<'a> {
    /// [G, N, K].
    pub(crate) fn shape(&self) -> [usize; 3] {
        match *self {
            Self::Rows { shape, .. } | Self::Packed { shape, .. } => shape,
        }
    }

    /// Rows `first..first + 16` of a matrix where they lie, if they are a whole panel of `units`
    /// units; `rows` of them exist.
    #[inline(always)]
    pub(crate) fn panel(
        &self,
        group: usize,
        first: usize,
        rows: usize,
        units: usize,
    ) -> Option<Panel<'a>> {
        match *self {
            Self::Rows {
                bytes,
                shape,
                element_bytes,
                group_stride,
                row_stride,
            } => {
                let whole =
                    rows == PANEL_ROWS && shape[2] * element_bytes == units * UNIT_ROW_BYTES;
                let start = group * group_stride + first * row_stride;
                whole.then(|| Panel::row_major(&bytes[start..], row_stride, units))
            }
            Self::Packed { bytes, shape } => {
                let panel_bytes = units * UNIT_BYTES;
                let panels = shape[1].div_ceil(PANEL_ROWS);
                let start = (group * panels + first / PANEL_ROWS) * panel_bytes;
                Some(Panel::packed(&bytes[start..][..panel_bytes]))
            }
        }
    }

    /// Copies rows `first..first + rows` of a row-major matrix into a panel.
    pub(crate) fn copy_panel(&self, group: usize, first: usize, rows: usize, panel: &mut [u8]) {
        if let Self::Rows {
            bytes,
            shape,
            element_bytes,
            group_stride,
            row_stride,
        } = *self
        {
            copy_panel(panel, rows, |r| {
                let start = group * group_stride + (first + r) * row_stride;
                &bytes[start..][..shape[2] * element_bytes]
            });
        }
    }
}

/// The bf16 B operands of a GEMM, row-major ([`WeightsRef`]) or packed ([`PackedRef`]).
#[derive(Clone, Copy, Debug)]
pub struct Bf16Weights<'a>(Codes<'a>);

impl<'a> From<WeightsRef<'a, bf16>> for Bf16Weights<'a> {
    fn from(weights: WeightsRef<'a, bf16>) -> Self {
        Self(weights.into())
    }
}

impl<'a> From<PackedRef<'a, bf16>> for Bf16Weights<'a> {
    fn from(weights: PackedRef<'a, bf16>) -> Self {
        Self(weights.into())
    }
}

impl<'a> Bf16Weights<'a> {
    pub(crate) fn codes(self) -> Codes<'a> {
        self.0
    }
}

/// int8 codes of the B operands, row-major ([`WeightsRef`]) or packed ([`PackedRef`]).
#[derive(Clone, Copy, Debug)]
pub struct Int8Codes<'a>(Codes<'a>);

impl<'a> From<WeightsRef<'a, i8>> for Int8Codes<'a> {
    fn from(weights: WeightsRef<'a, i8>) -> Self {
        Self(weights.into())
    }
}

impl<'a> From<PackedRef<'a, i8>> for Int8Codes<'a> {
    fn from(weights: PackedRef<'a, i8>) -> Self {
        Self(weights.into())
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
    pub(crate) codes: Codes<'a>,
    pub(crate) scales: WeightsRef<'a, f32>,
    pub(crate) scaling: Int8Scaling,
}

impl<'a> Int8Weights<'a> {
    /// Codes [G, N, K] and scales [G, N, blocks].
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn new(
        codes: impl Into<Int8Codes<'a>>,
        scales: WeightsRef<'a, f32>,
        scaling: Int8Scaling,
    ) -> Result<Self, CpuError> {
        let Int8Codes(codes) = codes.into();
        let [groups, rows, cols] = codes.shape();
        same("the number of matrices of scales", groups, scales.groups())?;
        same("the number of rows of scales", rows, scales.rows())?;
        same(
            "the number of scales of a row",
            scaling.blocks(cols),
            scales.cols(),
        )?;
        Ok(Self {
            codes,
            scales,
            scaling,
        })
    }
}

/// e4m3 codes of the B operands, row-major ([`WeightsRef`]) or packed ([`PackedRef`]).
#[derive(Clone, Copy, Debug)]
pub struct Fp8Codes<'a>(Codes<'a>);

impl<'a> From<WeightsRef<'a, u8>> for Fp8Codes<'a> {
    fn from(weights: WeightsRef<'a, u8>) -> Self {
        Self(weights.into())
    }
}

impl<'a> From<PackedRef<'a, u8>> for Fp8Codes<'a> {
    fn from(weights: PackedRef<'a, u8>) -> Self {
        Self(weights.into())
    }
}

/// The fp8 B operands of a GEMM: e4m3 codes with one scale for each 128 rows and 128 columns.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Weights<'a> {
    pub(crate) codes: Codes<'a>,
    pub(crate) scales: WeightsRef<'a, f32>,
}

impl<'a> Fp8Weights<'a> {
    /// Codes [G, N, K] and scales [G, N/128, K/128], rounded up.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn new(
        codes: impl Into<Fp8Codes<'a>>,
        scales: WeightsRef<'a, f32>,
    ) -> Result<Self, CpuError> {
        let Fp8Codes(codes) = codes.into();
        let [groups, rows, cols] = codes.shape();
        let blocks = |len: usize| len.div_ceil(fp8::BLOCK);
        same("the number of matrices of scales", groups, scales.groups())?;
        same("the number of rows of scales", blocks(rows), scales.rows())?;
        same(
            "the number of columns of scales",
            blocks(cols),
            scales.cols(),
        )?;
        Ok(Self { codes, scales })
    }
}
