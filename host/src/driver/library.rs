//! Finding and opening libcuda, and the typed functions that this crate calls in it.
//!
//! cust's bindings return a Rust enum, in which a code that a newer driver invented
//! would be an invalid value. Everything here therefore returns the plain `u32`, and
//! the few functions that the bindings lack are declared beside the rest.

use std::env;
use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cust::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};

use super::error::DriverError;
use super::symbols;

/// Environment variable with a path to use instead of `libcuda.so.1`.
pub const LIBRARY_VARIABLE: &str = "ASYM_GEMM_LIBCUDA";

/// A result code of the driver API.
pub(super) type CuResult = u32;

/// An opened driver library. It stays mapped until the process ends.
pub(super) struct Library {
    handle: libloading::Library,
}

/// Opens the driver library, once for the process; the first answer stays.
pub(super) fn open() -> Result<&'static Library, DriverError> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| match env::var_os(LIBRARY_VARIABLE) {
            Some(path) => Library::open(&path),
            None => Library::open(&OsString::from("libcuda.so.1")),
        })
        .as_ref()
        .map_err(|reason| DriverError::NoDriver {
            reason: reason.clone(),
        })
}

impl Library {
    fn open(path: &OsString) -> Result<Self, String> {
        // SAFETY: opening runs the library's initialisers. The path is the system's
        // driver or one that the user chose to trust through the environment.
        let handle = unsafe { libloading::Library::new(path) }.map_err(|error| {
            let mut reason = error.to_string();
            if let Some(cause) = std::error::Error::source(&error) {
                reason = format!("{reason}: {cause}");
            }
            format!("cannot load {}: {reason}", path.to_string_lossy())
        })?;
        Ok(Self { handle })
    }

    /// The address of a symbol, if the library has it.
    pub(super) fn address(&self, name: &CStr) -> Option<*mut ()> {
        // SAFETY: only the address is taken; callers give it the type that the driver
        // API documents for the name.
        let symbol = unsafe { self.handle.get::<*mut ()>(name.to_bytes_with_nul()) }.ok()?;
        let address = *symbol;
        (!address.is_null()).then_some(address)
    }
}

macro_rules! functions {
    (
        required { $($name:ident = $symbol:literal ($($argument:ty),* $(,)?);)* }
        optional { $($late:ident = $late_symbol:literal ($($late_argument:ty),* $(,)?);)* }
    ) => {
        /// The driver functions that this crate calls.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> CuResult,)*
            $(pub(super) $late: Option<unsafe extern "C" fn($($late_argument),*) -> CuResult>,)*
        }

        impl Api {
            /// Looks every function up; a missing required one makes the library
            /// unusable.
            pub(super) fn resolve(library: &Library) -> Result<Self, DriverError> {
                let find = |name: &CStr| {
                    library.address(name).filter(|&address| !symbols::is_trampoline(address))
                };
                let need = |name: &CStr| {
                    find(name).ok_or_else(|| DriverError::NoDriver {
                        reason: format!("the driver library has no {}", name.to_string_lossy()),
                    })
                };
                Ok(Self {
                    $(
                        // SAFETY: the driver API documents this type for the symbol.
                        $name: unsafe {
                            std::mem::transmute::<
                                *mut (),
                                unsafe extern "C" fn($($argument),*) -> CuResult,
                            >(need($symbol)?)
                        },
                    )*
                    $(
                        // SAFETY: the driver API documents this type for the symbol.
                        $late: find($late_symbol).map(|address| unsafe {
                            std::mem::transmute::<
                                *mut (),
                                unsafe extern "C" fn($($late_argument),*) -> CuResult,
                            >(address)
                        }),
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        init = c"cuInit"(c_uint);
        driver_version = c"cuDriverGetVersion"(*mut c_int);
        error_name = c"cuGetErrorName"(CuResult, *mut *const c_char);
        device_count = c"cuDeviceGetCount"(*mut c_int);
        device_get = c"cuDeviceGet"(*mut CUdevice, c_int);
        device_attribute = c"cuDeviceGetAttribute"(*mut c_int, c_int, CUdevice);
        device_name = c"cuDeviceGetName"(*mut c_char, c_int, CUdevice);
        device_total_memory = c"cuDeviceTotalMem_v2"(*mut usize, CUdevice);
        primary_retain = c"cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
        primary_release = c"cuDevicePrimaryCtxRelease_v2"(CUdevice);
        context_get = c"cuCtxGetCurrent"(*mut CUcontext);
        context_set = c"cuCtxSetCurrent"(CUcontext);
        context_push = c"cuCtxPushCurrent_v2"(CUcontext);
        context_pop = c"cuCtxPopCurrent_v2"(*mut CUcontext);
        context_device = c"cuCtxGetDevice"(*mut CUdevice);
        context_synchronize = c"cuCtxSynchronize"();
        module_load = c"cuModuleLoadDataEx"(
            *mut CUmodule, *const c_void, c_uint, *mut c_int, *mut *mut c_void,
        );
        module_unload = c"cuModuleUnload"(CUmodule);
        module_function = c"cuModuleGetFunction"(*mut CUfunction, CUmodule, *const c_char);
        function_attribute = c"cuFuncGetAttribute"(*mut c_int, c_int, CUfunction);
        set_function_attribute = c"cuFuncSetAttribute"(CUfunction, c_int, c_int);
        launch = c"cuLaunchKernel"(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
            CUstream, *mut *mut c_void, *mut *mut c_void,
        );
        stream_create = c"cuStreamCreateWithPriority"(*mut CUstream, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy_v2"(CUstream);
        stream_synchronize = c"cuStreamSynchronize"(CUstream);
        stream_query = c"cuStreamQuery"(CUstream);
        stream_wait = c"cuStreamWaitEvent"(CUstream, CUevent, c_uint);
        stream_begin_capture = c"cuStreamBeginCapture_v2"(CUstream, c_int);
        stream_end_capture = c"cuStreamEndCapture"(CUstream, *mut CUgraph);
        graph_destroy = c"cuGraphDestroy"(CUgraph);
        graph_exec_destroy = c"cuGraphExecDestroy"(CUgraphExec);
        graph_launch = c"cuGraphLaunch"(CUgraphExec, CUstream);
        event_create = c"cuEventCreate"(*mut CUevent, c_uint);
        event_destroy = c"cuEventDestroy_v2"(CUevent);
        event_record = c"cuEventRecord"(CUevent, CUstream);
        event_synchronize = c"cuEventSynchronize"(CUevent);
        event_query = c"cuEventQuery"(CUevent);
        event_elapsed = c"cuEventElapsedTime"(*mut f32, CUevent, CUevent);
        mem_info = c"cuMemGetInfo_v2"(*mut usize, *mut usize);
        mem_alloc = c"cuMemAlloc_v2"(*mut CUdeviceptr, usize);
        mem_free = c"cuMemFree_v2"(CUdeviceptr);
        mem_set = c"cuMemsetD8Async"(CUdeviceptr, u8, usize, CUstream);
        copy_to_device = c"cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream);
        copy_to_host = c"cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream);
        copy_on_device = c"cuMemcpyDtoDAsync_v2"(CUdeviceptr, CUdeviceptr, usize, CUstream);
        host_alloc = c"cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        host_free = c"cuMemFreeHost"(*mut c_void);
        host_register = c"cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
        host_unregister = c"cuMemHostUnregister"(*mut c_void);
        host_device_pointer = c"cuMemHostGetDevicePointer_v2"(
            *mut CUdeviceptr, *mut c_void, c_uint,
        );
    }
    optional {
        device_pci_bus_id = c"cuDeviceGetPCIBusId"(*mut c_char, c_int, CUdevice);
        function_parameter = c"cuFuncGetParamInfo"(CUfunction, usize, *mut usize, *mut usize);
        graph_instantiate = c"cuGraphInstantiateWithFlags"(*mut CUgraphExec, CUgraph, u64);
        copy_rows = c"cuMemcpy2DAsync_v2"(*const super::rows::Copy2d, CUstream);
        launch_ex = c"cuLaunchKernelEx"(
            *const super::launch::LaunchConfigRaw, CUfunction, *mut *mut c_void, *mut *mut c_void,
        );
        tensor_map_encode_tiled = c"cuTensorMapEncodeTiled"(
            *mut c_void, c_int, c_uint, CUdeviceptr, *const u64, *const u64, *const u32,
            *const u32, c_int, c_int, c_int, c_int,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_in_the_reason() {
        let reason = Library::open(&OsString::from("/no/such/libcuda.so.1"))
            .err()
            .expect("there is no such file");
        assert!(reason.contains("/no/such/libcuda.so.1"), "{reason}");
    }

    #[test]
    fn a_library_without_the_driver_api_is_refused() {
        let library = Library::open(&OsString::from("libc.so.6")).expect("libc is there");
        match Api::resolve(&library) {
            Err(DriverError::NoDriver { reason }) => assert!(reason.contains("cuInit"), "{reason}"),
            Err(other) => panic!("unexpected {other}"),
            Ok(_) => panic!("libc is not a driver"),
        }
    }
}
