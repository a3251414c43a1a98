//! Graphs recorded by stream capture.

use std::ptr;
use std::sync::Arc;

use cust::sys::{CUgraph, CUgraphExec};

use super::error::{DriverError, invalid};
use super::gpu::Context;
use super::stream::Stream;

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: calls that a capture forbids are refused on the
/// capturing thread alone.
const CAPTURE_THREAD_LOCAL: i32 = 1;

/// Work recorded from a stream, to be launched any number of times.
pub struct Graph {
    context: Arc<Context>,
    raw: CUgraphExec,
}

// SAFETY: an executable graph is a handle of its context; `launch` is unsafe and its
// contract orders uses.
unsafe impl Send for Graph {}

impl Stream {
    /// Records what `work` submits to this stream instead of running it.
    ///
    /// Work on other streams joins the recording by waiting for an event of this one and
    /// must be joined back the same way before `work` returns.
    ///
    /// # Errors
    ///
    /// What `work` returns; [`DriverError::Cuda`] if something in it cannot be captured (a
    /// synchronise, an allocation); [`DriverError::InvalidArgument`] on the legacy default
    /// stream. The stream is out of capture mode again in every case.
    pub fn capture<E: From<DriverError>>(
        &self,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        if self.as_raw().is_null() {
            let reason = "the legacy default stream cannot be captured";
            return Err(invalid("Stream::capture", reason).into());
        }
        let driver = self.context().driver;
        let _current = self.context().enter()?;
        // SAFETY: the stream is alive and the mode is one of the enumeration's.
        let code =
            unsafe { (driver.api.stream_begin_capture)(self.as_raw(), CAPTURE_THREAD_LOCAL) };
        driver.check("cuStreamBeginCapture", code)?;
        let capturing = Capturing(self);
        let outcome = work(self);
        let recorded = capturing.end();
        outcome?;
        Ok(recorded?.instantiate()?)
    }
}

/// A capture in progress; ends with it even if the closure unwinds.
struct Capturing<'a>(&'a Stream);

impl Capturing<'_> {
    fn end(self) -> Result<Recorded, DriverError> {
        let stream = self.0;
        std::mem::forget(self);
        let mut raw: CUgraph = ptr::null_mut();
        let driver = stream.context().driver;
        // SAFETY: the pointer is to a live handle and the stream is capturing.
        let code = unsafe { (driver.api.stream_end_capture)(stream.as_raw(), &mut raw) };
        let recorded = Recorded {
            context: Arc::clone(stream.context()),
            raw,
        };
        driver.check("cuStreamEndCapture", code)?;
        Ok(recorded)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        // Reached only when the closure unwinds; the half-made graph is dropped.
        drop(Capturing(self.0).end());
    }
}

/// The graph before instantiation.
struct Recorded {
    context: Arc<Context>,
    raw: CUgraph,
}

impl Recorded {
    fn instantiate(self) -> Result<Graph, DriverError> {
        let driver = self.context.driver;
        let Some(call) = driver.api.graph_instantiate else {
            return Err(DriverError::DriverTooOld {
                driver: driver.version(),
                needed: (12, 0),
            });
        };
        let mut raw: CUgraphExec = ptr::null_mut();
        let _current = self.context.enter()?;
        // SAFETY: the pointer is to a live handle and the graph is alive.
        let code = unsafe { call(&mut raw, self.raw, 0) };
        driver.check("cuGraphInstantiate", code)?;
        Ok(Graph {
            context: Arc::clone(&self.context),
            raw,
        })
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: the graph came from the end of a capture and is destroyed once.
            let code = unsafe { (driver.api.graph_destroy)(self.raw) };
            driver.log_failure("cuGraphDestroy", code);
        }
    }
}

impl Graph {
    /// Starts the recorded work on `stream`; returns before it has run.
    ///
    /// # Errors
    ///
    /// [`DriverError::Cuda`] if the driver refuses.
    ///
    /// # Safety
    ///
    /// What was promised for the recorded launches and copies holds again now: the memory
    /// that they use is still allocated and not in conflicting use. `stream` belongs to the
    /// context that the graph was recorded in.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let driver = self.context.driver;
        // SAFETY: graph and stream are alive; the caller answers for the memory.
        let code = unsafe { (driver.api.graph_launch)(self.raw, stream.as_raw()) };
        driver.check("cuGraphLaunch", code)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(_current) = self.context.enter_to_release() {
            let driver = self.context.driver;
            // SAFETY: instantiated once and destroyed once; a launch that is running keeps
            // what it needs (cuGraphExecDestroy).
            let code = unsafe { (driver.api.graph_exec_destroy)(self.raw) };
            driver.log_failure("cuGraphExecDestroy", code);
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}
