//! A device, its context, and what is compiled for it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cust::sys::{CUcontext, CUdevice};

use super::error::{DriverError, invalid};
use super::load::{Driver, load};
use super::module::KernelModule;
use super::ptx;

/// A context of the driver API, as cust and other libraries pass it.
pub type RawContext = CUcontext;

// CUdevice_attribute values (cuda.h).
const MULTIPROCESSOR_COUNT: c_int = 16;
const L2_CACHE_SIZE: c_int = 38;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;

/// A context and the reference to it that keeps it alive.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    raw: RawContext,
    device: CUdevice,
    /// Whether this is the primary context, retained by us.
    retained: bool,
}

// SAFETY: a context is a process-wide handle; the driver serialises calls on it, and the
// per-thread "current" state is handled by `enter`.
unsafe impl Send for Context {}
// SAFETY: as for Send; no method hands out unsynchronised interior state.
unsafe impl Sync for Context {}

impl Context {
    /// Makes this the calling thread's context until the guard goes; costs one query when
    /// it is already current.
    pub(super) fn enter(&self) -> Result<Current<'_>, DriverError> {
        self.driver.check_process()?;
        let api = &self.driver.api;
        let mut current: RawContext = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (api.context_get)(&mut current) };
        self.driver.check("cuCtxGetCurrent", code)?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is alive: retained by `self`, or kept alive by the
            // caller of `Gpu::from_raw_context`.
            let code = unsafe { (api.context_push)(self.raw) };
            self.driver.check("cuCtxPushCurrent", code)?;
        }
        Ok(Current {
            driver: self.driver,
            pushed,
            _context: PhantomData,
        })
    }

    pub(super) fn raw(&self) -> RawContext {
        self.raw
    }

    /// For destructors: `None` where the driver can no longer be called.
    pub(super) fn enter_to_release(&self) -> Option<Current<'_>> {
        match self.enter() {
            Ok(current) => Some(current),
            Err(DriverError::ForkedAfterInit { .. }) => None,
            Err(error) => {
                tracing::warn!(%error, "a GPU resource could not be released");
                None
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.retained && self.driver.check_process().is_ok() {
            // SAFETY: pairs with the retain in `Gpu::open`; everything that used the
            // context holds this object, so nothing is left.
            let code = unsafe { (self.driver.api.primary_release)(self.device) };
            self.driver.log_failure("cuDevicePrimaryCtxRelease", code);
        }
    }
}

/// A GPU's context being current on this thread; the previous one comes back when the
/// guard is dropped.
#[must_use = "the context is current only while the guard lives"]
pub struct Current<'a> {
    driver: &'static Driver,
    pushed: bool,
    /// Tied to its thread, and to the context.
    _context: PhantomData<(&'a Context, *mut ())>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: RawContext = ptr::null_mut();
            // SAFETY: the pointer is to a live handle; the guard never leaves the thread
            // that pushed.
            let code = unsafe { (self.driver.api.context_pop)(&mut popped) };
            self.driver.log_failure("cuCtxPopCurrent", code);
        }
    }
}

struct Properties {
    name: String,
    compute_capability: (u32, u32),
    sm_count: u32,
    l2_bytes: usize,
    total_memory: usize,
    max_shared_bytes: u32,
    numa_node: Option<u32>,
}

pub(super) struct GpuInner {
    ordinal: usize,
    properties: Properties,
    modules: Mutex<HashMap<String, Arc<KernelModule>>>,
    context: Arc<Context>,
}

/// A GPU with its context. Clones share it; it is closed when the last clone, buffer,
/// stream and kernel is gone.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<GpuInner>,
}

impl Gpu {
    /// Opens device `ordinal` with its primary context, the one that the CUDA runtime and
    /// libraries over it also use. Opening a device that is open returns the same one.
    ///
    /// # Errors
    ///
    /// As [`load`]; [`DriverError::NoDevice`] for a number out of range.
    pub fn open(ordinal: usize) -> Result<Self, DriverError> {
        let driver = load()?;
        let mut devices = driver
            .devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = devices.get(&ordinal).and_then(std::sync::Weak::upgrade) {
            return Ok(Self { inner });
        }
        let count = super::load::device_count()?;
        if ordinal >= count {
            return Err(DriverError::NoDevice { ordinal, count });
        }
        let device = device_at(driver, ordinal)?;
        let properties = Properties::read(driver, device)?;
        let mut raw: RawContext = ptr::null_mut();
        // SAFETY: the pointer is to a live handle and the device exists.
        let code = unsafe { (driver.api.primary_retain)(&mut raw, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        let gpu = Self::new(driver, raw, device, true, ordinal, properties);
        devices.insert(ordinal, Arc::downgrade(&gpu.inner));
        Ok(gpu)
    }

    /// Takes a context made by somebody else. It is not released when the `Gpu` goes.
    ///
    /// # Errors
    ///
    /// As [`load`]; [`DriverError::InvalidArgument`] for a null context.
    ///
    /// # Safety
    ///
    /// `context` is a valid driver-API context, and stays so until the last clone of the
    /// `Gpu` and everything made from it is gone.
    pub unsafe fn from_raw_context(context: RawContext) -> Result<Self, DriverError> {
        let driver = load()?;
        if context.is_null() {
            return Err(invalid("Gpu::from_raw_context", "the context is null"));
        }
        let mut device: CUdevice = 0;
        {
            let foreign = Context {
                driver,
                raw: context,
                device,
                retained: false,
            };
            let _current = foreign.enter()?;
            // SAFETY: the pointer is to a live handle and a context is current.
            let code = unsafe { (driver.api.context_device)(&mut device) };
            driver.check("cuCtxGetDevice", code)?;
        }
        let mut ordinal = 0;
        while device_at(driver, ordinal)? != device {
            ordinal += 1;
        }
        let properties = Properties::read(driver, device)?;
        Ok(Self::new(
            driver, context, device, false, ordinal, properties,
        ))
    }

    fn new(
        driver: &'static Driver,
        raw: RawContext,
        device: CUdevice,
        retained: bool,
        ordinal: usize,
        properties: Properties,
    ) -> Self {
        Self {
            inner: Arc::new(GpuInner {
                ordinal,
                properties,
                modules: Mutex::default(),
                context: Arc::new(Context {
                    driver,
                    raw,
                    device,
                    retained,
                }),
            }),
        }
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Whether something made in `context` is this GPU's.
    pub(super) fn is_in(&self, context: &Context) -> bool {
        self.inner.context.raw == context.raw
    }

    /// Makes this GPU's context the calling thread's until it is changed again. The
    /// methods of this crate do not need it; code that calls the driver itself may.
    ///
    /// # Errors
    ///
    /// [`DriverError::ForkedAfterInit`] in a fork, [`DriverError::Cuda`] if the driver
    /// refuses.
    pub fn make_current(&self) -> Result<(), DriverError> {
        let context = self.context();
        context.driver.check_process()?;
        // SAFETY: the context is alive, see `Context::enter`.
        let code = unsafe { (context.driver.api.context_set)(context.raw) };
        context.driver.check("cuCtxSetCurrent", code)
    }

    /// Makes this GPU's context the calling thread's while the guard lives.
    ///
    /// # Errors
    ///
    /// As [`Gpu::make_current`].
    pub fn enter(&self) -> Result<Current<'_>, DriverError> {
        self.inner.context.enter()
    }

    /// Waits for all work on the device's context.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`], also for a failure of earlier asynchronous work.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.enter()?;
        let driver = self.inner.context.driver;
        // SAFETY: a context is current.
        let code = unsafe { (driver.api.context_synchronize)() };
        driver.check("cuCtxSynchronize", code)
    }

    /// The context as the driver API passes it; valid while this `Gpu` lives.
    pub fn as_raw_context(&self) -> RawContext {
        self.inner.context.raw
    }

    /// The device's number, from 0, among those visible to the process.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// The device's name, as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.inner.properties.name
    }

    /// Compute capability, (major, minor): (9, 0) for sm_90.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.inner.properties.compute_capability
    }

    /// Number of streaming multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.inner.properties.sm_count
    }

    /// Size of the L2 cache in bytes.
    pub fn l2_bytes(&self) -> usize {
        self.inner.properties.l2_bytes
    }

    /// Device memory in bytes, used or not.
    pub fn total_memory(&self) -> usize {
        self.inner.properties.total_memory
    }

    /// The most shared memory a block can have, in bytes, static and dynamic together.
    pub fn max_shared_bytes(&self) -> u32 {
        self.inner.properties.max_shared_bytes
    }

    /// The NUMA node the device is attached to, where the system says.
    pub fn numa_node(&self) -> Option<u32> {
        self.inner.properties.numa_node
    }

    /// The CUDA version that the driver supports, (major, minor).
    pub fn driver_version(&self) -> (u32, u32) {
        self.inner.context.driver.version()
    }

    /// Device memory not in use, in bytes.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn free_memory(&self) -> Result<usize, DriverError> {
        let _current = self.enter()?;
        let driver = self.inner.context.driver;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live usizes and a context is current.
        let code = unsafe { (driver.api.mem_info)(&mut free, &mut total) };
        driver.check("cuMemGetInfo", code)?;
        Ok(free)
    }

    /// The embedded kernels of one family, compiled for this device at the first call and
    /// kept.
    ///
    /// # Errors
    ///
    /// [`DriverError::UnsupportedArchitecture`] if none of the family's targets runs on
    /// the device, [`DriverError::InvalidArgument`] for an unknown family,
    /// [`DriverError::DriverTooOld`] if the driver cannot read the PTX, and
    /// [`DriverError::Cuda`] with the compiler's log if it refuses it.
    pub fn module(&self, family: &str) -> Result<Arc<KernelModule>, DriverError> {
        // Held while compiling: a second caller waits for the one result.
        let mut modules = self
            .inner
            .modules
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(family) {
            return Ok(Arc::clone(module));
        }
        let module = Arc::new(KernelModule::load(self, self.text(family)?)?);
        modules.insert(family.to_owned(), Arc::clone(&module));
        Ok(module)
    }

    /// Whether a family's kernels are for this device and driver; nothing is compiled.
    ///
    /// # Errors
    ///
    /// As [`Gpu::module`], but for what only the compiler finds.
    pub fn check_module(&self, family: &str) -> Result<(), DriverError> {
        KernelModule::check_version(self, self.text(family)?)
    }

    /// The embedded PTX of a family for this device.
    fn text(&self, family: &str) -> Result<&'static str, DriverError> {
        let texts = ptx::embedded(family);
        if texts.is_empty() {
            return Err(invalid(
                "Gpu::module",
                format!("no kernel family {family:?} is embedded in this build"),
            ));
        }
        let targets: Vec<&str> = texts.iter().map(|&(target, _)| target).collect();
        let capability = self.compute_capability();
        let chosen = ptx::choose(capability, &targets)
            .ok_or_else(|| ptx::unsupported(self.name(), capability, family, &targets))?;
        Ok(texts[chosen].1)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("ordinal", &self.ordinal())
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

fn device_at(driver: &Driver, ordinal: usize) -> Result<CUdevice, DriverError> {
    let number = c_int::try_from(ordinal)
        .map_err(|_| invalid("Gpu::open", format!("device number {ordinal} is too large")))?;
    let mut device: CUdevice = 0;
    // SAFETY: the pointer is to a live handle.
    let code = unsafe { (driver.api.device_get)(&mut device, number) };
    driver.check("cuDeviceGet", code)?;
    Ok(device)
}

impl Properties {
    fn read(driver: &Driver, device: CUdevice) -> Result<Self, DriverError> {
        let attribute = |which: c_int| {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to a live c_int.
            let code = unsafe { (driver.api.device_attribute)(&mut value, which, device) };
            driver.check("cuDeviceGetAttribute", code)?;
            Ok::<u32, DriverError>(value.max(0) as u32)
        };
        let mut total_memory = 0;
        // SAFETY: the pointer is to a live usize.
        let code = unsafe { (driver.api.device_total_memory)(&mut total_memory, device) };
        driver.check("cuDeviceTotalMem", code)?;
        let name = read_text(|text, bytes| {
            // SAFETY: `text` has room for `bytes` bytes.
            let code = unsafe { (driver.api.device_name)(text, bytes, device) };
            driver.check("cuDeviceGetName", code)
        })?;
        let bus_id = driver.api.device_pci_bus_id.and_then(|call| {
            read_text(|text, bytes| {
                // SAFETY: `text` has room for `bytes` bytes.
                driver.check("cuDeviceGetPCIBusId", unsafe { call(text, bytes, device) })
            })
            .ok()
        });
        Ok(Self {
            name,
            compute_capability: (
                attribute(COMPUTE_CAPABILITY_MAJOR)?,
                attribute(COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(L2_CACHE_SIZE)? as usize,
            total_memory,
            max_shared_bytes: attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            numa_node: bus_id.and_then(|id| numa_node_of(&id)),
        })
    }
}

/// Lets a driver call fill a text buffer.
fn read_text(
    fill: impl FnOnce(*mut c_char, c_int) -> Result<(), DriverError>,
) -> Result<String, DriverError> {
    let mut text = [0u8; 256];
    fill(text.as_mut_ptr().cast(), text.len() as c_int - 1)?;
    // One byte was held back, so a terminator is there whatever the driver wrote.
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// The node of a PCI device; -1 in sysfs means that the system does not say.
fn numa_node_of(bus_id: &str) -> Option<u32> {
    let path = format!(
        "/sys/bus/pci/devices/{}/numa_node",
        bus_id.to_ascii_lowercase()
    );
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
