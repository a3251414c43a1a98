//! Main memory: how much there is, how much may be locked.

use std::fmt;
use std::fs;
use std::path::Path;

use asym_gemm_cpu::topology::{cgroup, meminfo_bytes};

/// Main memory in bytes. `None` where the system does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// All memory of the machine.
    pub total_bytes: Option<u64>,
    /// What can be taken without swapping.
    pub available_bytes: Option<u64>,
    /// What the control group still allows; `None` also for no limit.
    pub group_left_bytes: Option<u64>,
}

impl Memory {
    /// Reads `/proc/meminfo` and the control group.
    pub fn read() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self {
            total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
            group_left_bytes: cgroup::memory_left(Path::new(cgroup::ROOT), &cgroup::membership()),
        }
    }

    /// What this process can take: the available memory within the group's limit.
    pub fn usable_bytes(&self) -> Option<u64> {
        match (self.available_bytes, self.group_left_bytes) {
            (Some(available), Some(left)) => Some(available.min(left)),
            (one, other) => one.or(other),
        }
    }
}

/// Host memory that an allocation cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} needs {bytes} bytes of host memory{}", usable.map_or_else(String::new, |usable| format!("; {usable} are available")))]
pub struct MemoryShort {
    /// What the memory is for.
    pub what: String,
    /// Bytes needed.
    pub bytes: u64,
    /// Bytes available, if known.
    pub usable: Option<u64>,
}

/// Allocations below this are tried without asking what is available.
const ASK_BYTES: u64 = 64 << 20;

/// `len` copies of `zero`, or an error where the memory is not there: a size that a file
/// states must not end the process, nor invite the system to kill it.
pub(crate) fn zeroed<T: Copy>(what: &str, len: usize, zero: T) -> Result<Vec<T>, MemoryShort> {
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    let short = |usable| MemoryShort {
        what: what.to_owned(),
        bytes,
        usable,
    };
    if bytes >= ASK_BYTES {
        let usable = Memory::read().usable_bytes();
        if usable.is_some_and(|usable| usable < bytes) {
            return Err(short(usable));
        }
    }
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| short(None))?;
    values.resize(len, zero);
    Ok(values)
}

/// The limit on memory locked by `mlock` (`ulimit -l`), in bytes; `None` is unlimited.
/// Pinning by the GPU driver is not bound by it on most systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LockLimit {
    /// The limit in force.
    pub soft_bytes: Option<u64>,
    /// What the process may raise it to.
    pub hard_bytes: Option<u64>,
}

impl LockLimit {
    /// Asks the system.
    #[cfg(unix)]
    pub fn read() -> Self {
        let mut limit = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: the pointer is to a live rlimit. If the call fails, it stays unlimited.
        unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
        let finite = |value| (value != libc::RLIM_INFINITY).then_some(value);
        Self {
            soft_bytes: finite(limit.rlim_cur),
            hard_bytes: finite(limit.rlim_max),
        }
    }

    /// Asks the system, which has no such limit.
    #[cfg(not(unix))]
    pub fn read() -> Self {
        Self {
            soft_bytes: None,
            hard_bytes: None,
        }
    }
}

impl fmt::Display for LockLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.soft_bytes {
            Some(bytes) => write!(f, "{bytes} bytes"),
            None => f.write_str("unlimited"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_bounds_the_available_memory() {
        let memory = |available_bytes, group_left_bytes| Memory {
            total_bytes: None,
            available_bytes,
            group_left_bytes,
        };
        assert_eq!(memory(Some(10), Some(4)).usable_bytes(), Some(4));
        assert_eq!(memory(Some(10), Some(40)).usable_bytes(), Some(10));
        assert_eq!(memory(Some(10), None).usable_bytes(), Some(10));
        assert_eq!(memory(None, Some(4)).usable_bytes(), Some(4));
        assert_eq!(memory(None, None).usable_bytes(), None);
    }

    #[test]
    fn lock_limits_print_as_bytes_or_unlimited() {
        let limit = |soft_bytes| LockLimit {
            soft_bytes,
            hard_bytes: None,
        };
        assert_eq!(limit(Some(8192)).to_string(), "8192 bytes");
        assert_eq!(limit(None).to_string(), "unlimited");
    }
}
