//! What can go wrong between this process and a GPU.

/// An error of the GPU driver layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// No usable driver library: the machine has no NVIDIA driver, or not for this
    /// process (a container started without it).
    #[error("no NVIDIA driver: {reason}")]
    NoDriver {
        /// What was tried and what the loader said.
        reason: String,
    },
    /// The driver is older than what this build needs.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but CUDA {}.{} or newer is needed: update the driver",
        driver.0, driver.1, needed.0, needed.1
    )]
    DriverTooOld {
        /// CUDA version of the installed driver, (major, minor).
        driver: (u32, u32),
        /// Lowest CUDA version that will do, (major, minor).
        needed: (u32, u32),
    },
    /// There is no device with this number.
    #[error("no GPU {ordinal}: {count} visible (see CUDA_VISIBLE_DEVICES)")]
    NoDevice {
        /// The number asked for, from 0.
        ordinal: usize,
        /// How many devices the driver shows to this process.
        count: usize,
    },
    /// No embedded kernel of this family runs on the device.
    #[error("{device} is {have}: {kernel} needs {needs}")]
    UnsupportedArchitecture {
        /// The device's name.
        device: String,
        /// Its architecture, as `sm_89`.
        have: String,
        /// The architectures that have the kernel, as `sm_90a` or `sm_80 or sm_90a`.
        needs: String,
        /// The kernel family.
        kernel: String,
    },
    /// A driver call failed.
    #[error("{call} failed: {name} ({code}){}{log}", if log.is_empty() { "" } else { "\n" })]
    Cuda {
        /// The function of the driver API.
        call: &'static str,
        /// The driver's result code, as it returned it.
        code: u32,
        /// The driver's name for the code.
        name: String,
        /// What the driver's compiler printed, where it was involved; else empty.
        log: String,
    },
    /// An argument breaks a rule of the call; nothing was done.
    #[error("{call}: {reason}")]
    InvalidArgument {
        /// The function that was called.
        call: &'static str,
        /// The rule and the offending value.
        reason: String,
    },
    /// Memory was refused.
    #[error("out of {what} memory: {bytes} bytes refused ({detail})")]
    OutOfMemory {
        /// `"device"` or `"pinned host"`.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// What is left, which limits apply.
        detail: String,
    },
    /// The process was forked after the driver had started; its state does not survive
    /// that. Start GPU work in the child, or use a fresh process (exec, spawn).
    #[error(
        "the GPU driver was started in process {parent} and cannot be used in its fork {child}: \
         start it after forking, or exec a new process"
    )]
    ForkedAfterInit {
        /// The process that started the driver.
        parent: u32,
        /// This process.
        child: u32,
    },
}

impl DriverError {
    /// The driver's result code, where a driver call failed.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Cuda { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Shorthand for a refused argument.
pub(super) fn invalid(call: &'static str, reason: impl Into<String>) -> DriverError {
    DriverError::InvalidArgument {
        call,
        reason: reason.into(),
    }
}
