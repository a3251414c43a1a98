//! Loaded kernels: the driver's compiler, functions and their attributes.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use cust::sys::{CUfunction, CUmodule};

use super::error::{DriverError, invalid};
use super::gpu::{Context, Gpu};
use super::ptx;

// CUjit_option values (cuda.h).
const JIT_INFO_LOG_BUFFER: c_int = 3;
const JIT_INFO_LOG_BUFFER_SIZE: c_int = 4;
const JIT_ERROR_LOG_BUFFER: c_int = 5;
const JIT_ERROR_LOG_BUFFER_SIZE: c_int = 6;

// CUfunction_attribute values (cuda.h).
const MAX_THREADS_PER_BLOCK: c_int = 0;
const STATIC_SHARED_BYTES: c_int = 1;
const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;

const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: u32 = 222;
const CUDA_ERROR_NOT_FOUND: u32 = 500;

const LOG_BYTES: usize = 16 * 1024;

/// Parameters of a kernel fit in this many bytes, so there are no more of them.
const MAX_PARAMETER_BYTES: usize = 32_764;

/// A loaded module of kernels.
pub struct KernelModule {
    context: Arc<Context>,
    raw: CUmodule,
    max_shared_bytes: u32,
}

// SAFETY: a module is a handle of its context, which any thread may use; see `Context`.
unsafe impl Send for KernelModule {}
// SAFETY: as for Send; the driver serialises calls on a module.
unsafe impl Sync for KernelModule {}

impl KernelModule {
    /// Compiles PTX for the GPU's device.
    ///
    /// # Errors
    ///
    /// [`DriverError::DriverTooOld`] if the text's ISA version is newer than the driver,
    /// [`DriverError::Cuda`] with the compiler's log if it refuses the text.
    pub fn load(gpu: &Gpu, text: &str) -> Result<Self, DriverError> {
        Self::check_version(gpu, text)?;
        let driver = gpu.context().driver;
        let image = CString::new(text)
            .map_err(|_| invalid("KernelModule::load", "the PTX text holds a NUL byte"))?;

        let _current = gpu.enter()?;
        let mut info = vec![0u8; LOG_BYTES];
        let mut errors = vec![0u8; LOG_BYTES];
        let mut options = [
            JIT_INFO_LOG_BUFFER,
            JIT_INFO_LOG_BUFFER_SIZE,
            JIT_ERROR_LOG_BUFFER,
            JIT_ERROR_LOG_BUFFER_SIZE,
        ];
        // Sizes travel in the pointer itself; one byte is held back for a terminator.
        let size = ptr::without_provenance_mut::<c_void>(LOG_BYTES - 1);
        let mut values: [*mut c_void; 4] = [
            info.as_mut_ptr().cast(),
            size,
            errors.as_mut_ptr().cast(),
            size,
        ];
        let mut raw: CUmodule = ptr::null_mut();
        // SAFETY: the image is NUL-terminated PTX; both option arrays have the stated
        // length and their buffers the stated size; a context is current.
        let code = unsafe {
            (driver.api.module_load)(
                &mut raw,
                image.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == CUDA_ERROR_UNSUPPORTED_PTX_VERSION {
            let (major, minor) = driver.version();
            return Err(DriverError::DriverTooOld {
                driver: (major, minor),
                needed: needed_driver(text).unwrap_or((major, minor + 1)),
            });
        }
        driver.check_with_log("cuModuleLoadDataEx", code, || log_text(&errors))?;
        let info = log_text(&info);
        if !info.is_empty() {
            tracing::debug!(log = info, "PTX compiled");
        }
        Ok(Self {
            context: Arc::clone(gpu.context()),
            raw,
            max_shared_bytes: gpu.max_shared_bytes(),
        })
    }

    /// Whether the driver knows the text's ISA version.
    pub(super) fn check_version(gpu: &Gpu, text: &str) -> Result<(), DriverError> {
        let driver = gpu.driver_version();
        match needed_driver(text) {
            Some(needed) if needed > driver => Err(DriverError::DriverTooOld { driver, needed }),
            _ => Ok(()),
        }
    }

    /// The kernel of this name. The handle keeps the module loaded.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] if the module has no such kernel.
    pub fn function(self: &Arc<Self>, name: &'static str) -> Result<Kernel, DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        let missing = || {
            invalid(
                "KernelModule::function",
                format!("the module has no kernel {name:?}"),
            )
        };
        let symbol = CString::new(name).map_err(|_| missing())?;
        let mut raw: CUfunction = ptr::null_mut();
        // SAFETY: the pointer is to a live handle, the name is NUL-terminated, and the
        // module is loaded in the current context.
        let code = unsafe { (driver.api.module_function)(&mut raw, self.raw, symbol.as_ptr()) };
        if code == CUDA_ERROR_NOT_FOUND {
            return Err(missing());
        }
        driver.check("cuModuleGetFunction", code)?;
        let attribute = |which: c_int| {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to a live c_int and the function was just found.
            let code = unsafe { (driver.api.function_attribute)(&mut value, which, raw) };
            driver.check("cuFuncGetAttribute", code)?;
            Ok::<u32, DriverError>(value.max(0) as u32)
        };
        Ok(Kernel {
            name,
            raw,
            max_threads: attribute(MAX_THREADS_PER_BLOCK)?,
            static_shared_bytes: attribute(STATIC_SHARED_BYTES)?,
            parameters: self.count_parameters(raw),
            module: Arc::clone(self),
        })
    }

    /// Number of parameters of a kernel, where the driver tells (CUDA 12.4 and on).
    fn count_parameters(&self, function: CUfunction) -> Option<usize> {
        let call = self.context.driver.api.function_parameter?;
        let (mut offset, mut bytes) = (0, 0);
        (0..=MAX_PARAMETER_BYTES).find(|&index| {
            // SAFETY: both pointers are to live usizes; an index past the last parameter
            // is an error code, which ends the count.
            (unsafe { call(function, index, &mut offset, &mut bytes) }) != 0
        })
    }
}

impl Drop for KernelModule {
    fn drop(&mut self) {
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: every function handle holds this module, so none is left.
            let code = unsafe { (driver.api.module_unload)(self.raw) };
            driver.log_failure("cuModuleUnload", code);
        }
    }
}

impl std::fmt::Debug for KernelModule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelModule").finish_non_exhaustive()
    }
}

/// A kernel of a loaded module; clones are cheap. Launching is in `launch.rs`.
#[derive(Clone, Debug)]
pub struct Kernel {
    name: &'static str,
    pub(super) raw: CUfunction,
    pub(super) max_threads: u32,
    static_shared_bytes: u32,
    pub(super) parameters: Option<usize>,
    module: Arc<KernelModule>,
}

// SAFETY: a function is a handle of its module, which `module` keeps; see `KernelModule`.
unsafe impl Send for Kernel {}
// SAFETY: as for Send.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// The kernel's name in its module.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The most threads that a block of this kernel can have (registers bound it).
    pub fn max_threads_per_block(&self) -> u32 {
        self.max_threads
    }

    pub(super) fn context(&self) -> &Context {
        &self.module.context
    }

    /// Bytes of dynamic shared memory that a block can have beside the static ones.
    pub(super) fn dynamic_shared_limit(&self) -> u32 {
        self.module
            .max_shared_bytes
            .saturating_sub(self.static_shared_bytes)
    }

    /// Allows launches with up to `bytes` of dynamic shared memory; needed above 48 KiB.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] if the device does not have that much for a block.
    pub fn set_dynamic_shared(&self, bytes: u32) -> Result<(), DriverError> {
        let limit = self.dynamic_shared_limit();
        let value = match c_int::try_from(bytes) {
            Ok(value) if bytes <= limit => value,
            _ => {
                return Err(invalid(
                    "Kernel::set_dynamic_shared",
                    format!(
                        "{} asks for {bytes} bytes of shared memory, a block can have {limit}",
                        self.name
                    ),
                ));
            }
        };
        let _current = self.context().enter()?;
        let driver = self.context().driver;
        // SAFETY: the function's module is loaded in the current context.
        let code = unsafe {
            (driver.api.set_function_attribute)(self.raw, MAX_DYNAMIC_SHARED_BYTES, value)
        };
        driver.check("cuFuncSetAttribute", code)
    }
}

/// The CUDA version of the first driver that can read a PTX text, if it names an ISA version.
fn needed_driver(text: &str) -> Option<(u32, u32)> {
    ptx::isa_version(text).map(ptx::driver_for_isa)
}

/// The text that the driver's compiler left in a zero-filled buffer.
fn log_text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&b| b == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end])
        .trim_end()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_ends_at_its_terminator() {
        assert_eq!(log_text(b"ptxas error\n\0\0\0"), "ptxas error");
        assert_eq!(log_text(b"full"), "full");
        assert_eq!(log_text(&[0; 4]), "");
    }
}
