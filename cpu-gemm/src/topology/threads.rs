//! How many threads this process should use.

use std::path::Path;

use super::{Topology, cgroup};

/// What bounds the threads of this process, and the number chosen from it.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Threads {
    /// CPUs that the scheduler may use for this process.
    pub affinity: Vec<usize>,
    /// CPU time that the control group allows, in CPUs; `None` for no limit.
    pub quota: Option<f64>,
    /// Physical cores behind `affinity`; `None` where the system does not say.
    pub physical_cores: Option<usize>,
    default: usize,
}

impl Threads {
    /// Reads the affinity mask, the control group and the topology.
    pub fn read() -> Self {
        let quota = cgroup::cpu_quota(Path::new(cgroup::ROOT), &cgroup::membership());
        let topology = Topology::read();
        let cpus = topology.cpus.iter().map(|cpu| cpu.id).collect();
        Self::choose(cpus, quota, topology.physical_cores())
    }

    fn choose(affinity: Vec<usize>, quota: Option<f64>, physical_cores: Option<usize>) -> Self {
        let mut default = affinity.len();
        if let Some(cores) = physical_cores {
            default = default.min(cores);
        }
        if let Some(quota) = quota {
            // Rounded down: a thread more than the quota makes all of them wait.
            default = default.min(quota.floor() as usize);
        }
        Self {
            affinity,
            quota,
            physical_cores,
            default: default.max(1),
        }
    }

    /// The number of compute threads to start when the caller names none: one a physical
    /// core in the affinity mask, no more than the whole CPUs of the quota, at least 1.
    pub fn default_count(&self) -> usize {
        self.default
    }
}

/// The number of compute threads to start when the caller names none, as
/// [`Threads::default_count`] of a fresh reading.
pub fn default_threads() -> usize {
    Threads::read().default_count()
}

/// CPUs that the scheduler may use for the calling thread, ascending.
// The mask is enlarged until the kernel's fits.
#[cfg(target_os = "linux")]
pub fn affinity() -> Vec<usize> {
    let mut mask = vec![0u64; 16];
    while mask.len() <= 1 << 14 {
        // SAFETY: the mask has the stated number of bytes; 0 is this thread.
        let result = unsafe {
            libc::sched_getaffinity(0, size_of_val(mask.as_slice()), mask.as_mut_ptr().cast())
        };
        if result == 0 {
            return set_bits(&mask);
        }
        mask = vec![0; mask.len() * 2];
    }
    fallback()
}

/// CPUs that the scheduler may use for the calling thread, ascending.
#[cfg(not(target_os = "linux"))]
pub fn affinity() -> Vec<usize> {
    fallback()
}

fn fallback() -> Vec<usize> {
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

#[cfg(any(target_os = "linux", test))]
fn set_bits(mask: &[u64]) -> Vec<usize> {
    (0..mask.len() * 64)
        .filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(cpus: usize, quota: Option<f64>, cores: Option<usize>) -> usize {
        Threads::choose((0..cpus).collect(), quota, cores).default_count()
    }

    #[test]
    fn the_default_is_the_smallest_bound_and_at_least_one() {
        assert_eq!(count(96, None, Some(48)), 48);
        assert_eq!(count(96, None, None), 96);
        assert_eq!(count(96, Some(7.65), Some(48)), 7);
        assert_eq!(count(8, Some(4.0), Some(4)), 4);
        assert_eq!(count(4, Some(1.5), Some(2)), 1);
        assert_eq!(count(4, Some(0.5), Some(2)), 1);
        assert_eq!(count(2, Some(64.0), Some(2)), 2);
        assert_eq!(count(0, None, None), 1);
    }

    #[test]
    fn mask_bits_number_the_cpus() {
        assert_eq!(set_bits(&[0b1011, 0, 1]), [0, 1, 3, 128]);
    }

    #[test]
    fn the_mask_agrees_with_the_standard_library() {
        // available_parallelism is the mask bounded by the quota, so never above it.
        let threads = Threads::read();
        let std_count = std::thread::available_parallelism().map_or(1, usize::from);
        assert!(threads.affinity.len() >= std_count);
        assert!(threads.default_count() <= std_count);
    }
}
