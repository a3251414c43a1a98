//! What layers share: the CPU's threads, the policy, the devices with their rings and scratch.

use super::super::MoeError;
use super::super::division::{Divide, Division, ForwardTimes, LayerShape};
#[cfg(feature = "cuda")]
use super::devices::Devices;
use asym_gemm_cpu::Engine;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shared by layers; one forward at a time.
pub(super) struct Runtime(Mutex<State>);

impl Runtime {
    pub(super) fn new(state: State) -> Self {
        Self(Mutex::new(state))
    }

    /// The state; after a panic under the lock as that left it, which the next forward's
    /// [`State::settle`] puts right.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Runtime`].
pub(super) struct State {
    pub(super) engine: Engine,
    pub(super) policy: Box<dyn Divide>,
    /// The last forward, while the policy does not know what it took.
    pub(super) unobserved: Option<(Division, LayerShape, ForwardTimes)>,
    #[cfg(feature = "cuda")]
    pub(super) devices: Devices,
}

impl State {
    /// Number of devices that can take work.
    pub(super) fn device_count(&self) -> usize {
        #[cfg(feature = "cuda")]
        return self.devices.list.len();
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// Whether the last forward's work may still run.
    pub(super) fn in_flight(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.devices.in_flight;
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Waits for the last forward, so that its buffers can be used again, and tells the policy what
    /// it took.
    ///
    /// # Errors
    /// If its work failed.
    pub(super) fn settle(&mut self) -> Result<(), MoeError> {
        #[cfg(feature = "cuda")]
        self.devices.settle()?;
        if let Some((division, shape, mut times)) = self.unobserved.take() {
            times.gpu_seconds = self.gpu_seconds()?;
            self.policy.observe(&division, &shape, &times);
        }
        #[cfg(feature = "cuda")]
        self.devices.start_over();
        Ok(())
    }

    fn gpu_seconds(&self) -> Result<f64, MoeError> {
        #[cfg(feature = "cuda")]
        return Ok(self.devices.gpu_seconds()?);
        #[cfg(not(feature = "cuda"))]
        Ok(0.0)
    }
}
