//! Borrowed views of the operands, checked when they are made.

use super::GemmError;
use super::format::{MatrixFormat, check_scales};
use crate::driver::{DeviceBuffer, Gpu, PinnedBuffer};
use bytemuck::Pod;
use half::bf16;

/// Rows that TMA loads start at multiples of this.
pub(super) const ROW_ALIGN: usize = 16;

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix<'a, T: Pod> {
    buffer: &'a DeviceBuffer<T>,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// A row-major matrix in device memory that a kernel writes.
#[derive(Debug)]
pub struct DeviceMatrixMut<'a, T: Pod> {
    view: DeviceMatrix<'a, T>,
}

impl<'a, T: Pod> DeviceMatrix<'a, T> {
    /// `rows` rows of `columns` elements, `stride` elements apart, from the buffer's start.
    ///
    /// # Errors
    /// If the rows overlap or the buffer is too short.
    pub fn new(
        buffer: &'a DeviceBuffer<T>,
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<Self, GemmError> {
        let needed = match rows {
            0 => Some(0),
            _ => (rows - 1)
                .checked_mul(stride)
                .and_then(|n| n.checked_add(columns)),
        };
        if stride < columns || needed.is_none_or(|n| n > buffer.len()) {
            return Err(GemmError::Shape {
                what: "matrix view",
                reason: format!(
                    "{rows} rows of {columns}, stride {stride}, do not fit {} elements",
                    buffer.len()
                ),
            });
        }
        Ok(Self {
            buffer,
            rows,
            columns,
            stride,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Device address of the first element.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.as_raw()
    }

    /// An error that names `what` if the memory is another GPU's.
    pub(crate) fn check_on(&self, gpu: &Gpu, what: &'static str) -> Result<(), GemmError> {
        match self.buffer.is_on(gpu) {
            true => Ok(()),
            false => Err(GemmError::OtherGpu { what }),
        }
    }
}

impl<'a, T: Pod> DeviceMatrixMut<'a, T> {
    /// As [`DeviceMatrix::new`], of a buffer that nobody else uses meanwhile.
    ///
    /// # Errors
    /// If the rows overlap or the buffer is too short.
    pub fn new(
        buffer: &'a mut DeviceBuffer<T>,
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<Self, GemmError> {
        Ok(Self {
            view: DeviceMatrix::new(buffer, rows, columns, stride)?,
        })
    }

    /// The same matrix, to be read.
    pub fn view(&self) -> &DeviceMatrix<'a, T> {
        &self.view
    }
}

/// The A operand, [M, K].
#[derive(Clone, Copy, Debug)]
pub enum Activations<'a> {
    /// bf16.
    Bf16(DeviceMatrix<'a, bf16>),
    /// int8 codes with scales [M, 1] (per row) or [M, ceil(K / 128)] (blocks).
    Int8 {
        /// [M, K].
        codes: DeviceMatrix<'a, i8>,
        /// f32 scales.
        scales: DeviceMatrix<'a, f32>,
    },
    /// fp8 e4m3 codes with scales [M, 1] (per token), [1, 1] (per tensor) or
    /// [M, ceil(K / 128)] (blocks).
    Fp8 {
        /// [M, K].
        codes: DeviceMatrix<'a, u8>,
        /// f32 scales.
        scales: DeviceMatrix<'a, f32>,
    },
}

impl Activations<'_> {
    pub(crate) fn check_on(&self, gpu: &Gpu) -> Result<(), GemmError> {
        match self {
            Self::Bf16(m) => m.check_on(gpu, "A"),
            Self::Int8 { codes, scales } => {
                codes.check_on(gpu, "A")?;
                scales.check_on(gpu, "A scales")
            }
            Self::Fp8 { codes, scales } => {
                codes.check_on(gpu, "A")?;
                scales.check_on(gpu, "A scales")
            }
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Bf16(m) => m.rows(),
            Self::Int8 { codes, .. } => codes.rows(),
            Self::Fp8 { codes, .. } => codes.rows(),
        }
    }

    pub(crate) fn k(&self) -> usize {
        match self {
            Self::Bf16(m) => m.columns(),
            Self::Int8 { codes, .. } => codes.columns(),
            Self::Fp8 { codes, .. } => codes.columns(),
        }
    }

    /// Address of the first element and bytes from one row to the next.
    pub(super) fn place(&self) -> (u64, usize) {
        match self {
            Self::Bf16(m) => (m.address(), m.stride() * 2),
            Self::Int8 { codes, .. } => (codes.address(), codes.stride()),
            Self::Fp8 { codes, .. } => (codes.address(), codes.stride()),
        }
    }

    /// Bytes of an element.
    pub(super) fn element_bytes(&self) -> usize {
        match self {
            Self::Bf16(_) => 2,
            Self::Int8 { .. } | Self::Fp8 { .. } => 1,
        }
    }

    /// The scales, if the format has any.
    pub(super) fn scales(&self) -> Option<&DeviceMatrix<'_, f32>> {
        match self {
            Self::Bf16(_) => None,
            Self::Int8 { scales, .. } | Self::Fp8 { scales, .. } => Some(scales),
        }
    }
}

/// Where B's bytes are.
#[derive(Clone, Copy, Debug)]
pub enum WeightMemory<'a> {
    /// Pinned host memory: staged or direct.
    Pinned(&'a PinnedBuffer),
    /// Device memory: resident.
    Device(&'a DeviceBuffer<u8>),
}

/// The B operand: `count` row-major matrices [N, K], one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    pub(crate) memory: WeightMemory<'a>,
    pub(crate) format: MatrixFormat,
    pub(crate) count: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) scales: Option<DeviceMatrix<'a, f32>>,
}

impl<'a> Weights<'a> {
    /// `count` matrices of `n` rows of `k` elements of `format`.
    ///
    /// `scales`, on the device, have one of [`MatrixFormat::scale_shapes`].
    ///
    /// # Errors
    /// If the memory is too short, the scales do not fit, or a dimension is 0.
    pub fn new(
        memory: WeightMemory<'a>,
        format: impl TryInto<MatrixFormat, Error: Into<GemmError>>,
        count: usize,
        n: usize,
        k: usize,
        scales: Option<DeviceMatrix<'a, f32>>,
    ) -> Result<Self, GemmError> {
        let format = format.try_into().map_err(Into::into)?;
        let what = "weights";
        let have = match memory {
            WeightMemory::Pinned(buffer) => buffer.len(),
            WeightMemory::Device(buffer) => buffer.len(),
        };
        let row_bytes = k.checked_mul(format.element_bytes());
        let needed = row_bytes
            .and_then(|r| r.checked_mul(n))
            .and_then(|m| m.checked_mul(count));
        if count == 0 || n == 0 || k == 0 || needed.is_none_or(|bytes| bytes > have) {
            return Err(GemmError::Shape {
                what,
                reason: format!("{count} x [{n}, {k}] {format} do not fit {have} bytes"),
            });
        }
        check_scales(format, scales.as_ref(), count, n, k)?;
        Ok(Self {
            memory,
            format,
            count,
            n,
            k,
            scales,
        })
    }

    pub(crate) fn check_on(&self, gpu: &Gpu) -> Result<(), GemmError> {
        if let Some(scales) = &self.scales {
            scales.check_on(gpu, "weight scales")?;
        }
        match self.memory {
            WeightMemory::Device(buffer) if !buffer.is_on(gpu) => {
                Err(GemmError::OtherGpu { what: "weights" })
            }
            // Pinned memory is registered for every GPU.
            _ => Ok(()),
        }
    }

    /// Bytes of one matrix.
    pub fn matrix_bytes(&self) -> usize {
        self.n * self.row_bytes()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.k * self.format.element_bytes()
    }

    /// Bytes from one row to the next where kernels read them: TMA takes multiples of 16, so
    /// other rows are copied first.
    pub(super) fn pitch(&self) -> usize {
        self.row_bytes().next_multiple_of(ROW_ALIGN)
    }

    /// Whether kernels can read the rows where they are.
    pub(super) fn is_aligned(&self) -> bool {
        self.pitch() == self.row_bytes()
    }

    /// Address of the first row for the GPU.
    pub(super) fn address(&self) -> u64 {
        match self.memory {
            WeightMemory::Pinned(buffer) => buffer.device_ptr(),
            WeightMemory::Device(buffer) => buffer.as_raw(),
        }
    }
}

/// The D operand, [M, N].
#[derive(Debug)]
pub enum Output<'a> {
    /// f32.
    F32(DeviceMatrixMut<'a, f32>),
    /// bf16, rounded once.
    Bf16(DeviceMatrixMut<'a, bf16>),
}

impl Output<'_> {
    pub(crate) fn check_on(&self, gpu: &Gpu) -> Result<(), GemmError> {
        match self {
            Self::F32(m) => m.view().check_on(gpu, "D"),
            Self::Bf16(m) => m.view().check_on(gpu, "D"),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::F32(m) => m.view().rows(),
            Self::Bf16(m) => m.view().rows(),
        }
    }

    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::F32(m) => m.view().columns(),
            Self::Bf16(m) => m.view().columns(),
        }
    }

    pub(crate) fn stride(&self) -> usize {
        match self {
            Self::F32(m) => m.view().stride(),
            Self::Bf16(m) => m.view().stride(),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::F32(m) => m.view().address(),
            Self::Bf16(m) => m.view().address(),
        }
    }

    pub(crate) fn element_bytes(&self) -> usize {
        match self {
            Self::F32(_) => 4,
            Self::Bf16(_) => 2,
        }
    }
}
