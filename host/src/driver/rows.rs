//! Copies of rows from one pitch to another.

use super::error::DriverError;
use super::gpu::Gpu;
use super::stream::Stream;
use std::ffi::c_void;
use std::ptr;

/// The driver's `CU_MEMORYTYPE_UNIFIED`: the address says where the memory is.
const UNIFIED: u32 = 4;

/// `CUDA_MEMCPY2D` of the driver's API.
#[repr(C)]
pub(super) struct Copy2d {
    source: Place2d,
    target: Place2d,
    row_bytes: usize,
    rows: usize,
}

/// One end of a [`Copy2d`].
#[repr(C)]
struct Place2d {
    x_bytes: usize,
    y: usize,
    memory: u32,
    host: *const c_void,
    device: u64,
    array: *const c_void,
    pitch: usize,
}

impl Place2d {
    fn new(address: u64, pitch: usize) -> Self {
        Self {
            x_bytes: 0,
            y: 0,
            memory: UNIFIED,
            host: ptr::null(),
            device: address,
            array: ptr::null(),
            pitch,
        }
    }
}

/// Rows in memory: the address of the first, and bytes from one to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) address: u64,
    pub(crate) pitch: usize,
}

/// Starts to copy `rows` rows of `row_bytes`, in stream order.
///
/// # Errors
/// If rows overlap, or the driver fails or is too old for it.
///
/// # Safety
/// Both ends must be memory of the GPU, or pinned host memory, that holds the rows, stays alive,
/// and is used by nobody else until the copy is done.
pub(crate) unsafe fn copy_rows(
    gpu: &Gpu,
    target: Rows,
    source: Rows,
    row_bytes: usize,
    rows: usize,
    stream: &Stream,
) -> Result<(), DriverError> {
    if rows == 0 || row_bytes == 0 {
        return Ok(());
    }
    let refused = |reason: String| DriverError::InvalidArgument {
        call: "copy_rows",
        reason,
    };
    if row_bytes > target.pitch || row_bytes > source.pitch {
        return Err(refused(format!(
            "rows of {row_bytes} bytes are {} and {} bytes apart",
            source.pitch, target.pitch
        )));
    }
    let copy = Copy2d {
        source: Place2d::new(source.address, source.pitch),
        target: Place2d::new(target.address, target.pitch),
        row_bytes,
        rows,
    };
    let context = gpu.context();
    let _current = context.enter()?;
    let driver = context.driver;
    let call = driver
        .api
        .copy_rows
        .ok_or_else(|| refused("the driver library has no cuMemcpy2DAsync_v2".into()))?;
    // SAFETY: the caller answers for both ends; the struct is read before the call returns.
    let code = unsafe { call(&copy, stream.as_raw()) };
    driver.check("cuMemcpy2DAsync", code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_is_the_drivers() {
        assert_eq!(size_of::<Place2d>(), 56);
        assert_eq!(size_of::<Copy2d>(), 128);
        assert_eq!(std::mem::offset_of!(Place2d, device), 32);
        assert_eq!(std::mem::offset_of!(Copy2d, row_bytes), 112);
    }
}
