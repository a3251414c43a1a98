//! Streams and events.
//!
//! Written over the raw calls: cust's `Stream` drops the non-blocking flag, so that its
//! streams wait for the legacy default stream, and its `Event` has no handle to pass on.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use cust::sys::{CUevent, CUstream};

use super::error::{DriverError, invalid};
use super::gpu::{Context, Gpu};

/// A stream as the driver API passes it; cust's `Stream::as_inner` gives one.
pub type RawStream = CUstream;

// CUstream_flags and CUevent_flags values (cuda.h).
const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;

const CUDA_ERROR_NOT_READY: u32 = 600;

/// The stream that each thread has of its own in every context (`CU_STREAM_PER_THREAD`).
/// Blocking copies go through it: unlike `cuMemcpyHtoD` from pageable memory, a copy
/// followed by a synchronise has arrived in device memory when the call returns, and
/// unlike the legacy stream it does not disturb a capture on another thread.
pub(super) fn per_thread() -> RawStream {
    ptr::without_provenance_mut(2)
}

/// Work for a GPU in order. Streams do not wait for each other, nor for the legacy
/// default stream, except through [`Stream::wait`].
pub struct Stream {
    context: Arc<Context>,
    raw: RawStream,
    owned: bool,
}

// SAFETY: a stream is a handle of its context, which any thread may use; see `Context`.
unsafe impl Send for Stream {}
// SAFETY: as for Send; the driver serialises calls on a stream.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new non-blocking stream of normal priority.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn new(gpu: &Gpu) -> Result<Self, DriverError> {
        Self::with_priority(gpu, 0)
    }

    /// A new non-blocking stream; lower numbers come first, out-of-range ones are clamped
    /// by the driver (commonly to -5..=0).
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn with_priority(gpu: &Gpu, priority: i32) -> Result<Self, DriverError> {
        let _current = gpu.enter()?;
        let driver = gpu.context().driver;
        let mut raw: RawStream = ptr::null_mut();
        // SAFETY: the pointer is to a live handle and a context is current.
        let code =
            unsafe { (driver.api.stream_create)(&mut raw, STREAM_NON_BLOCKING, priority as c_int) };
        driver.check("cuStreamCreateWithPriority", code)?;
        Ok(Self {
            context: Arc::clone(gpu.context()),
            raw,
            owned: true,
        })
    }

    /// Wraps a stream made by somebody else; it is not destroyed with the wrapper. Null is
    /// the legacy default stream.
    ///
    /// # Safety
    ///
    /// `raw` is null or a stream of `gpu`'s context, and stays alive as long as the
    /// wrapper.
    pub unsafe fn from_raw(gpu: &Gpu, raw: RawStream) -> Self {
        Self {
            context: Arc::clone(gpu.context()),
            raw,
            owned: false,
        }
    }

    /// The handle; valid while the stream lives.
    pub fn as_raw(&self) -> RawStream {
        self.raw
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether the stream is `gpu`'s.
    pub fn is_on(&self, gpu: &Gpu) -> bool {
        gpu.is_in(&self.context)
    }

    /// Waits until all work submitted so far is done.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`], also for a failure of the work itself.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the stream is alive, as `self` or its maker guarantees.
        let code = unsafe { (driver.api.stream_synchronize)(self.raw) };
        driver.check("cuStreamSynchronize", code)
    }

    /// Whether all work submitted so far is done.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`], also for a failure of the work itself.
    pub fn is_idle(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: as in `synchronize`.
        match unsafe { (driver.api.stream_query)(self.raw) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => driver.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Later work of this stream starts only after the point that `event` recorded. The
    /// host does not wait. The event may be another GPU's.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: stream and event are alive; flag 0 is the default.
        let code = unsafe { (driver.api.stream_wait)(self.raw, event.raw, 0) };
        driver.check("cuStreamWaitEvent", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: made in `with_priority` and destroyed once. Pending work still runs
            // to its end (cuStreamDestroy).
            let code = unsafe { (driver.api.stream_destroy)(self.raw) };
            driver.log_failure("cuStreamDestroy", code);
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stream").field(&self.raw).finish()
    }
}

/// A point in a stream.
pub struct Event {
    context: Arc<Context>,
    raw: CUevent,
    timed: bool,
}

// SAFETY: an event is a handle of its context, which any thread may use; see `Context`.
unsafe impl Send for Event {}
// SAFETY: as for Send; the driver serialises calls on an event.
unsafe impl Sync for Event {}

impl Event {
    /// An event that also notes the time.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn new(gpu: &Gpu) -> Result<Self, DriverError> {
        Self::create(gpu, true)
    }

    /// An event for order alone, which costs the device less.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    pub fn untimed(gpu: &Gpu) -> Result<Self, DriverError> {
        Self::create(gpu, false)
    }

    fn create(gpu: &Gpu, timed: bool) -> Result<Self, DriverError> {
        let _current = gpu.enter()?;
        let driver = gpu.context().driver;
        let flags = if timed { 0 } else { EVENT_DISABLE_TIMING };
        let mut raw: CUevent = ptr::null_mut();
        // SAFETY: the pointer is to a live handle and a context is current.
        let code = unsafe { (driver.api.event_create)(&mut raw, flags) };
        driver.check("cuEventCreate", code)?;
        Ok(Self {
            context: Arc::clone(gpu.context()),
            raw,
            timed,
        })
    }

    /// Moves the event to the end of what `stream` has been given so far.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses, as for a stream of another GPU.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: event and stream are alive.
        let code = unsafe { (driver.api.event_record)(self.raw, stream.raw) };
        driver.check("cuEventRecord", code)
    }

    /// Waits until the recorded point is reached; returns at once if none was recorded.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`], also for a failure of the work before the point.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the event is alive.
        let code = unsafe { (driver.api.event_synchronize)(self.raw) };
        driver.check("cuEventSynchronize", code)
    }

    /// Whether the recorded point is reached.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`], also for a failure of the work before the point.
    pub fn is_reached(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: the event is alive.
        match unsafe { (driver.api.event_query)(self.raw) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds from `start` to this event; both must have been reached.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] if either is untimed; [`DriverError::Cuda`] if
    /// either was not recorded or not yet reached.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f32, DriverError> {
        if !(self.timed && start.timed) {
            return Err(invalid("Event::elapsed_ms", "the event was made untimed"));
        }
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a live f32 and both events are alive.
        let code = unsafe { (driver.api.event_elapsed)(&mut milliseconds, start.raw, self.raw) };
        driver.check("cuEventElapsedTime", code)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: made in `create` and destroyed once; a stream that waits for the
            // event keeps what it needs (cuEventDestroy).
            let code = unsafe { (driver.api.event_destroy)(self.raw) };
            driver.log_failure("cuEventDestroy", code);
        }
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event")
            .field("raw", &self.raw)
            .field("timed", &self.timed)
            .finish_non_exhaustive()
    }
}
