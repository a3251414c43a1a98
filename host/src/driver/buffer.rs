//! Device memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use cust::sys::CUdeviceptr;

use super::error::{DriverError, invalid};
use super::gpu::{Context, Gpu, RawContext};
use super::stream::{RawStream, Stream, per_thread};

const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;

/// An array in device memory, freed on drop.
///
/// The blocking copies are ordered neither before nor after work on other streams:
/// synchronise the stream (or event) that uses the buffer first. What they wrote has
/// arrived when they return.
pub struct DeviceBuffer<T: Pod> {
    context: Arc<Context>,
    pointer: CUdeviceptr,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Memory for `len` elements, with whatever was in it before. No elements is fine and
    /// allocates nothing.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] (`"device"`); [`DriverError::InvalidArgument`] if the
    /// size in bytes overflows.
    pub fn alloc(gpu: &Gpu, len: usize) -> Result<Self, DriverError> {
        let bytes = byte_length::<T>(len)?;
        let mut pointer: CUdeviceptr = 0;
        if bytes > 0 {
            let _current = gpu.enter()?;
            let driver = gpu.context().driver;
            // SAFETY: the pointer is to a live handle and a context is current.
            let code = unsafe { (driver.api.mem_alloc)(&mut pointer, bytes) };
            if code == CUDA_ERROR_OUT_OF_MEMORY {
                let free = gpu.free_memory()?;
                return Err(DriverError::OutOfMemory {
                    what: "device",
                    bytes: bytes as u64,
                    detail: format!(
                        "{free} of {} bytes free on GPU {}",
                        gpu.total_memory(),
                        gpu.ordinal()
                    ),
                });
            }
            driver.check("cuMemAlloc", code)?;
        }
        Ok(Self {
            context: Arc::clone(gpu.context()),
            pointer,
            len,
            _elements: PhantomData,
        })
    }

    /// As [`DeviceBuffer::alloc`], with all bytes zero.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::alloc`].
    pub fn zeroed(gpu: &Gpu, len: usize) -> Result<Self, DriverError> {
        let mut buffer = Self::alloc(gpu, len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// A copy of `values`.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::alloc`].
    pub fn from_slice(gpu: &Gpu, values: &[T]) -> Result<Self, DriverError> {
        let mut buffer = Self::alloc(gpu, values.len())?;
        buffer.copy_from_host(values)?;
        Ok(buffer)
    }

    /// Whether the memory is `gpu`'s.
    pub fn is_on(&self, gpu: &Gpu) -> bool {
        gpu.is_in(&self.context)
    }

    /// The context that the memory belongs to.
    pub fn as_raw_context(&self) -> RawContext {
        self.context.raw()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn byte_len(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address, 0 if the buffer is empty; valid while the buffer lives.
    pub fn as_raw(&self) -> u64 {
        self.pointer
    }

    /// Fills the buffer from `values`, which must have the buffer's length.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] for another length; [`DriverError::Cuda`] if the
    /// driver refuses, also for a failure of earlier asynchronous work.
    pub fn copy_from_host(&mut self, values: &[T]) -> Result<(), DriverError> {
        same_length("DeviceBuffer::copy_from_host", self.len, values.len())?;
        self.copy_from_host_at(0, values)
    }

    /// Overwrites the elements from `offset` on with `values`.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host`], for a range that ends past the buffer.
    pub fn copy_from_host_at(&mut self, offset: usize, values: &[T]) -> Result<(), DriverError> {
        let stream = per_thread();
        // SAFETY: `values` is borrowed until the wait below has returned.
        unsafe { self.start_copy_from_host(offset, values, stream) }?;
        self.wait_for(stream)
    }

    /// Fills `values`, which must have the buffer's length, from the buffer.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host`].
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<(), DriverError> {
        same_length("DeviceBuffer::copy_to_host", self.len, values.len())?;
        self.copy_to_host_at(0, values)
    }

    /// Fills `values` with the elements from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host`], for a range that ends past the buffer.
    pub fn copy_to_host_at(&self, offset: usize, values: &mut [T]) -> Result<(), DriverError> {
        let stream = per_thread();
        // SAFETY: `values` is borrowed until the wait below has returned.
        unsafe { self.start_copy_to_host(offset, values, stream) }?;
        self.wait_for(stream)
    }

    /// All elements.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host`].
    pub fn to_vec(&self) -> Result<Vec<T>, DriverError> {
        let mut values = vec![T::zeroed(); self.len];
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// Sets every byte of the buffer.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses, also for a failure of earlier
    /// asynchronous work.
    pub fn fill_bytes(&mut self, value: u8) -> Result<(), DriverError> {
        if self.byte_len() == 0 {
            return Ok(());
        }
        let stream = per_thread();
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the buffer has this many bytes.
        let code = unsafe { (driver.api.mem_set)(self.pointer, value, self.byte_len(), stream) };
        driver.check("cuMemsetD8Async", code)?;
        self.wait_for(stream)
    }

    /// Starts to set every byte to `value`, in stream order.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    ///
    /// # Safety
    ///
    /// Until it is done, the buffer is not dropped, nor used in another order than streams
    /// and events establish.
    pub unsafe fn fill_bytes_async(&self, value: u8, stream: &Stream) -> Result<(), DriverError> {
        if self.byte_len() == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        let (bytes, stream) = (self.byte_len(), stream.as_raw());
        // SAFETY: the buffer has this many bytes; the caller keeps it.
        let code = unsafe { (driver.api.mem_set)(self.pointer, value, bytes, stream) };
        driver.check("cuMemsetD8Async", code)
    }

    /// Starts to overwrite the elements from `offset` on with `values`, in stream order.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host_at`].
    ///
    /// # Safety
    ///
    /// Until the copy is done, `values` stays alive and unchanged and the buffer is not
    /// dropped, nor used in another order than streams and events establish.
    pub unsafe fn copy_from_host_async(
        &self,
        offset: usize,
        values: &[T],
        stream: &Stream,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.start_copy_from_host(offset, values, stream.as_raw()) }
    }

    /// Starts to fill `values` with the elements from `offset` on, in stream order.
    ///
    /// # Errors
    ///
    /// As [`DeviceBuffer::copy_from_host_at`].
    ///
    /// # Safety
    ///
    /// Until the copy is done, `values` stays alive and is neither read nor written, and
    /// the buffer is not dropped.
    pub unsafe fn copy_to_host_async(
        &self,
        offset: usize,
        values: &mut [T],
        stream: &Stream,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.start_copy_to_host(offset, values, stream.as_raw()) }
    }

    /// Starts to overwrite the elements from `offset` on with `source_range` of another
    /// buffer of the same GPU, in stream order.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] for a range outside either buffer;
    /// [`DriverError::Cuda`] if the driver refuses.
    ///
    /// # Safety
    ///
    /// Until the copy is done, neither buffer is dropped, nor used in another order than
    /// streams and events establish.
    pub unsafe fn copy_from_device_async(
        &self,
        offset: usize,
        source: &Self,
        source_range: Range<usize>,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let call = "DeviceBuffer::copy_from_device_async";
        let len = source_range.len();
        let from = source.address_of(call, source_range.start, len)?;
        let to = self.address_of(call, offset, len)?;
        if len * size_of::<T>() == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: both ranges were checked against their buffers; the caller keeps them.
        let code =
            unsafe { (driver.api.copy_on_device)(to, from, len * size_of::<T>(), stream.as_raw()) };
        driver.check("cuMemcpyDtoDAsync", code)
    }

    /// # Safety
    ///
    /// As [`DeviceBuffer::copy_from_host_async`]; `stream` is a stream of this context.
    unsafe fn start_copy_from_host(
        &self,
        offset: usize,
        values: &[T],
        stream: RawStream,
    ) -> Result<(), DriverError> {
        let to = self.address_of("DeviceBuffer::copy_from_host", offset, values.len())?;
        let bytes = size_of_val(values);
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the range was checked against the buffer; the caller keeps `values`.
        let code =
            unsafe { (driver.api.copy_to_device)(to, values.as_ptr().cast(), bytes, stream) };
        driver.check("cuMemcpyHtoDAsync", code)
    }

    /// # Safety
    ///
    /// As [`DeviceBuffer::copy_to_host_async`]; `stream` is a stream of this context.
    unsafe fn start_copy_to_host(
        &self,
        offset: usize,
        values: &mut [T],
        stream: RawStream,
    ) -> Result<(), DriverError> {
        let from = self.address_of("DeviceBuffer::copy_to_host", offset, values.len())?;
        let bytes = size_of_val(values);
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the range was checked against the buffer; any bytes are a valid `T: Pod`;
        // the caller keeps `values`.
        let code =
            unsafe { (driver.api.copy_to_host)(values.as_mut_ptr().cast(), from, bytes, stream) };
        driver.check("cuMemcpyDtoHAsync", code)
    }

    fn wait_for(&self, stream: RawStream) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the per-thread stream exists in every context.
        let code = unsafe { (driver.api.stream_synchronize)(stream) };
        driver.check("cuStreamSynchronize", code)
    }

    fn address_of(
        &self,
        call: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<CUdeviceptr, DriverError> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(invalid(
                call,
                format!(
                    "{len} elements from {offset} on, but the buffer has {}",
                    self.len
                ),
            ));
        }
        Ok(self.pointer + (offset * size_of::<T>()) as u64)
    }
}

impl<T: Pod> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.pointer == 0 {
            return;
        }
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: allocated in `alloc` and freed once; cuMemFree waits for the device's
            // work, so a kernel that still uses the memory has ended.
            let code = unsafe { (driver.api.mem_free)(self.pointer) };
            driver.log_failure("cuMemFree", code);
        }
    }
}

impl<T: Pod> std::fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("address", &format_args!("{:#x}", self.pointer))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Starts to fill `to` from the device address `from`, in stream order.
///
/// # Errors
///
/// [`DriverError::Cuda`] if the driver refuses.
///
/// # Safety
///
/// `to.len()` bytes at `from` are allocated in `gpu`'s context, of which `stream` is; until the
/// copy is done they stay so, and `to` stays alive and is neither read nor written.
pub unsafe fn copy_address_to_host_async(
    gpu: &Gpu,
    from: u64,
    to: &mut [u8],
    stream: &Stream,
) -> Result<(), DriverError> {
    if to.is_empty() {
        return Ok(());
    }
    let _current = gpu.enter()?;
    let driver = gpu.context().driver;
    // SAFETY: the caller's contract.
    let code = unsafe {
        (driver.api.copy_to_host)(to.as_mut_ptr().cast(), from, to.len(), stream.as_raw())
    };
    driver.check("cuMemcpyDtoHAsync", code)
}

fn byte_length<T>(len: usize) -> Result<usize, DriverError> {
    len.checked_mul(size_of::<T>())
        .filter(|&bytes| bytes <= isize::MAX as usize)
        .ok_or_else(|| {
            invalid(
                "DeviceBuffer::alloc",
                format!("{len} elements of {} bytes are too many", size_of::<T>()),
            )
        })
}

fn same_length(call: &'static str, buffer: usize, values: usize) -> Result<(), DriverError> {
    if buffer == values {
        return Ok(());
    }
    Err(invalid(
        call,
        format!("the buffer has {buffer} elements, the slice {values}"),
    ))
}
