//! Views of GPU memory.

use crate::driver::{DeviceBuffer, Gpu, PinnedBuffer};
use crate::gemm::GemmError;
use asym_gemm_cpu::dense::{C, DenseError, Element, Extent, Layout, Matrix, MatrixMut, RowMajor};
use asym_gemm_kernels_gpu::dense::Elements;
use bytemuck::Pod;
use half::{bf16, f16};

/// Elements that the GPU has kernels for.
pub trait GpuElement: Element {
    /// The kernel's name of the type.
    const ELEMENTS: Elements;
}

impl GpuElement for f32 {
    const ELEMENTS: Elements = Elements::F32;
}
impl GpuElement for f16 {
    const ELEMENTS: Elements = Elements::F16;
}
impl GpuElement for bf16 {
    const ELEMENTS: Elements = Elements::Bf16;
}
impl GpuElement for i8 {
    const ELEMENTS: Elements = Elements::S8;
}

/// A view `M` ([`Matrix`] or [`MatrixMut`]) of memory that a GPU reaches and the host must not use
/// as its own: only [`super::GpuGemm`] takes it.
#[derive(Clone, Copy, Debug)]
pub struct OnGpu<M> {
    pub(super) view: M,
    pub(super) memory: Memory,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// The GPU of that ordinal.
    Device(usize),
    /// Anybody's; the caller answered for it.
    Raw,
    /// The host's, pinned.
    Pinned,
}

impl<'a, T: Pod, L: Layout> OnGpu<Matrix<'a, T, L>> {
    /// `extent` from element `offset` of a device buffer on.
    ///
    /// # Errors
    /// If the buffer is too short, or the leading dimension shorter than a row (or column).
    pub fn device(
        gpu: &Gpu,
        buffer: &'a DeviceBuffer<T>,
        offset: usize,
        extent: Extent,
    ) -> Result<Self, GemmError> {
        check_on(gpu, buffer)?;
        check::<L>(extent, offset, buffer.len())?;
        let address = buffer.as_raw() as usize + offset * size_of::<T>();
        // SAFETY: the borrow keeps the elements, which OnGpu gives to GPU kernels only.
        let view = unsafe { Matrix::from_raw(std::ptr::without_provenance(address), extent)? };
        Ok(Self {
            view,
            memory: Memory::Device(gpu.ordinal()),
        })
    }

    /// `extent` from byte `offset` of pinned host memory on; copied to the device by each call.
    ///
    /// # Errors
    /// As [`Self::device`]; an offset that is no multiple of the element's size.
    pub fn pinned(
        buffer: &'a PinnedBuffer,
        offset: usize,
        extent: Extent,
    ) -> Result<Self, GemmError> {
        if !offset.is_multiple_of(size_of::<T>()) {
            return Err(GemmError::Shape {
                what: "pinned view",
                reason: format!("offset {offset} is no multiple of {} bytes", size_of::<T>()),
            });
        }
        let elements = buffer.len() / size_of::<T>();
        check::<L>(extent, offset / size_of::<T>(), elements)?;
        let pointer = buffer.as_ptr().wrapping_add(offset).cast();
        // SAFETY: the borrow keeps the elements; pinned memory is page-aligned.
        let view = unsafe { Matrix::from_raw(pointer, extent)? };
        Ok(Self {
            view,
            memory: Memory::Pinned,
        })
    }

    /// `extent` at a device address of another library.
    ///
    /// # Errors
    /// A leading dimension shorter than a row (or column).
    ///
    /// # Safety
    /// The elements are readable on the GPU of the call until it has returned.
    pub unsafe fn from_raw(address: u64, extent: Extent) -> Result<Self, GemmError> {
        let pointer = std::ptr::without_provenance(address as usize);
        // SAFETY: the caller's promise; OnGpu gives the address to GPU kernels only.
        let view = unsafe { Matrix::from_raw(pointer, extent)? };
        Ok(Self {
            view,
            memory: Memory::Raw,
        })
    }
}

impl<'a, T: Pod, L: Layout> OnGpu<MatrixMut<'a, T, L>> {
    /// `extent` from element `offset` of a device buffer on.
    ///
    /// # Errors
    /// If the buffer is too short, or the leading dimension shorter than a row (or column).
    pub fn device_mut(
        gpu: &Gpu,
        buffer: &'a mut DeviceBuffer<T>,
        offset: usize,
        extent: Extent,
    ) -> Result<Self, GemmError> {
        check_on(gpu, buffer)?;
        check::<L>(extent, offset, buffer.len())?;
        let address = buffer.as_raw() as usize + offset * size_of::<T>();
        // SAFETY: the borrow keeps the elements, which OnGpu gives to GPU kernels only.
        let view =
            unsafe { MatrixMut::from_raw(std::ptr::without_provenance_mut(address), extent)? };
        Ok(Self {
            view,
            memory: Memory::Device(gpu.ordinal()),
        })
    }

    /// `extent` at a device address of another library, or one of several disjoint parts of a
    /// buffer.
    ///
    /// # Errors
    /// A leading dimension shorter than a row (or column).
    ///
    /// # Safety
    /// The elements are the call's alone on its GPU until it has returned.
    pub unsafe fn from_raw_mut(address: u64, extent: Extent) -> Result<Self, GemmError> {
        let pointer = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: the caller's promise; OnGpu gives the address to GPU kernels only.
        let view = unsafe { MatrixMut::from_raw(pointer, extent)? };
        Ok(Self {
            view,
            memory: Memory::Raw,
        })
    }

    /// The first `rows` rows and the others.
    pub fn split_rows(self, rows: usize) -> (Self, Self) {
        let memory = self.memory;
        let (first, second) = self.view.split_rows(rows);
        (
            Self {
                view: first,
                memory,
            },
            Self {
                view: second,
                memory,
            },
        )
    }
}

/// One product on the GPU.
#[derive(Debug)]
pub struct GpuProblem<'a, T, D, LA = RowMajor, LB = RowMajor, LD = RowMajor>
where
    LA: Layout,
    LB: Layout,
    LD: Layout,
{
    /// A.
    pub a: OnGpu<Matrix<'a, T, LA>>,
    /// B.
    pub b: OnGpu<Matrix<'a, T, LB>>,
    /// C: D's old contents, or another matrix; `None` if β is 0.
    pub c: Option<OnGpu<Matrix<'a, D, LD>>>,
    /// Whether C is D's old contents (`c` is not looked at then).
    pub in_place: bool,
    /// D.
    pub d: OnGpu<MatrixMut<'a, D, LD>>,
}

impl<'a, T, D, LA: Layout, LB: Layout, LD: Layout> GpuProblem<'a, T, D, LA, LB, LD> {
    /// A product without C.
    pub fn new(
        a: OnGpu<Matrix<'a, T, LA>>,
        b: OnGpu<Matrix<'a, T, LB>>,
        d: OnGpu<MatrixMut<'a, D, LD>>,
    ) -> Self {
        Self {
            a,
            b,
            c: None,
            in_place: false,
            d,
        }
    }

    /// C as the checks take it.
    pub(super) fn c_view(&self) -> C<'a, D, LD> {
        match &self.c {
            _ if self.in_place => C::InPlace,
            Some(c) => C::Matrix(c.view),
            None => C::None,
        }
    }
}

fn check_on<T: Pod>(gpu: &Gpu, buffer: &DeviceBuffer<T>) -> Result<(), GemmError> {
    match buffer.is_on(gpu) {
        true => Ok(()),
        false => Err(GemmError::OtherGpu { what: "a matrix" }),
    }
}

fn check<L: Layout>(extent: Extent, offset: usize, actual: usize) -> Result<(), DenseError> {
    let needed = extent.needed::<L>("the matrix")?.saturating_add(offset);
    match needed <= actual {
        true => Ok(()),
        false => Err(DenseError::TooShort {
            what: "the view",
            needed,
            actual,
        }),
    }
}
