//! Starting the driver, once for the process.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::process;
use std::ptr;
use std::sync::{Mutex, OnceLock, Weak};

use super::error::DriverError;
use super::gpu::GpuInner;
use super::library::{self, Api, CuResult};

/// The embedded kernels are PTX ISA 8.0, which CUDA 12.0 introduced.
const OLDEST_DRIVER: (u32, u32) = (12, 0);

const CUDA_ERROR_NO_DEVICE: CuResult = 100;

/// The loaded and initialised driver; [`load()`] gives it.
pub struct Driver {
    pub(super) api: Api,
    version: (u32, u32),
    process: u32,
    /// The devices that are open, so that each is compiled for once.
    pub(super) devices: Mutex<HashMap<usize, Weak<GpuInner>>>,
}

/// Loads libcuda, checks its version and initialises it. The first call decides; later
/// calls return the same answer.
///
/// # Errors
///
/// [`DriverError::NoDriver`] without a usable library, [`DriverError::DriverTooOld`]
/// below CUDA 12.0, [`DriverError::NoDevice`] when the driver has no GPU,
/// [`DriverError::ForkedAfterInit`] in a fork of the process that loaded it, and
/// [`DriverError::Cuda`] for any other refusal.
pub fn load() -> Result<&'static Driver, DriverError> {
    static DRIVER: OnceLock<Result<Driver, DriverError>> = OnceLock::new();
    let driver = DRIVER
        .get_or_init(Driver::start)
        .as_ref()
        .map_err(DriverError::clone)?;
    driver.check_process()?;
    Ok(driver)
}

/// Number of devices that the driver shows to this process; 0 if it has none.
///
/// # Errors
///
/// As [`load`].
pub fn device_count() -> Result<usize, DriverError> {
    match load() {
        Ok(driver) => driver.device_count(),
        Err(DriverError::NoDevice { .. }) => Ok(0),
        Err(error) => Err(error),
    }
}

/// What can be said about the driver without initialising it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Probe {
    /// Why no driver library could be opened; `None` if one was.
    pub missing: Option<String>,
    /// The CUDA version that the driver supports, (major, minor).
    pub driver_version: Option<(u32, u32)>,
    /// NVIDIA device files of the machine (`/dev/nvidia0` and on).
    pub device_files: usize,
}

/// Looks for a driver without starting it, so that the process can still fork and use
/// the GPU in its children.
pub fn probe() -> Probe {
    let device_files = fs::read_dir("/dev").map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| is_device_file(&entry.file_name().to_string_lossy()))
            .count()
    });
    let api = library::open().and_then(Api::resolve);
    let (missing, driver_version) = match &api {
        Ok(api) => (None, read_version(api).ok()),
        Err(error) => (Some(error.to_string()), None),
    };
    Probe {
        missing,
        driver_version,
        device_files,
    }
}

fn is_device_file(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

fn read_version(api: &Api) -> Result<(u32, u32), DriverError> {
    let mut version: c_int = 0;
    // SAFETY: the pointer is to a live c_int; this call works before cuInit.
    let code = unsafe { (api.driver_version)(&mut version) };
    check(api, "cuDriverGetVersion", code)?;
    let version = version.max(0) as u32;
    Ok((version / 1000, version % 1000 / 10))
}

/// Turns a result code into an error that keeps it.
fn check(api: &Api, call: &'static str, code: CuResult) -> Result<(), DriverError> {
    check_with_log(api, call, code, String::new)
}

fn check_with_log(
    api: &Api,
    call: &'static str,
    code: CuResult,
    log: impl FnOnce() -> String,
) -> Result<(), DriverError> {
    if code == 0 {
        return Ok(());
    }
    let mut text: *const c_char = ptr::null();
    // SAFETY: the pointer is to a live pointer, which receives a static string or null.
    let found = unsafe { (api.error_name)(code, &mut text) } == 0 && !text.is_null();
    let name = if found {
        // SAFETY: the driver returned a static NUL-terminated string.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    } else {
        "unknown error".to_owned()
    };
    Err(DriverError::Cuda {
        call,
        code,
        name,
        log: log(),
    })
}

impl Driver {
    fn start() -> Result<Self, DriverError> {
        let api = Api::resolve(library::open()?)?;
        let version = read_version(&api)?;
        if version < OLDEST_DRIVER {
            return Err(DriverError::DriverTooOld {
                driver: version,
                needed: OLDEST_DRIVER,
            });
        }
        // SAFETY: cuInit takes no pointers; 0 is its only flag value.
        let code = unsafe { (api.init)(0) };
        if code == CUDA_ERROR_NO_DEVICE {
            return Err(DriverError::NoDevice {
                ordinal: 0,
                count: 0,
            });
        }
        check(&api, "cuInit", code)?;
        Ok(Self {
            api,
            version,
            process: process::id(),
            devices: Mutex::default(),
        })
    }

    /// The CUDA version that the driver supports, (major, minor).
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    fn device_count(&self) -> Result<usize, DriverError> {
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live c_int.
        let code = unsafe { (self.api.device_count)(&mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(count.max(0) as usize)
    }

    /// Refuses to go on in a fork: the driver's threads and mappings stayed behind.
    pub(super) fn check_process(&self) -> Result<(), DriverError> {
        let child = process::id();
        if child == self.process {
            return Ok(());
        }
        Err(DriverError::ForkedAfterInit {
            parent: self.process,
            child,
        })
    }

    pub(super) fn check(&self, call: &'static str, code: CuResult) -> Result<(), DriverError> {
        check(&self.api, call, code)
    }

    pub(super) fn check_with_log(
        &self,
        call: &'static str,
        code: CuResult,
        log: impl FnOnce() -> String,
    ) -> Result<(), DriverError> {
        check_with_log(&self.api, call, code, log)
    }

    /// For destructors: a failure is logged, since nobody is left to return it to.
    pub(super) fn log_failure(&self, call: &'static str, code: CuResult) {
        if let Err(error) = self.check(call, code) {
            tracing::warn!(%error, "releasing a GPU resource failed");
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbered_device_files_count() {
        let names = [
            "nvidia0",
            "nvidia12",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia",
            "null",
        ];
        let counted: Vec<_> = names.into_iter().filter(|n| is_device_file(n)).collect();
        assert_eq!(counted, ["nvidia0", "nvidia12"]);
    }
}
