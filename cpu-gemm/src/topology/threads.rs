//! How many threads this process should use.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::cgroup;
use super::parse_list;

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
        let affinity = affinity();
        let quota = cgroup::cpu_quota(Path::new(cgroup::ROOT), &cgroup::membership());
        let physical = physical_cores(Path::new("/sys/devices/system/cpu"), &affinity);
        Self::choose(affinity, quota, physical)
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

/// Distinct cores behind the CPUs: those that name the same siblings are one core.
fn physical_cores(root: &Path, cpus: &[usize]) -> Option<usize> {
    let mut cores = BTreeSet::new();
    for cpu in cpus {
        let folder = root.join(format!("cpu{cpu}/topology"));
        let text = ["core_cpus_list", "thread_siblings_list"]
            .iter()
            .find_map(|file| fs::read_to_string(folder.join(file)).ok())?;
        cores.insert(parse_list(&text)?);
    }
    (!cores.is_empty()).then_some(cores.len())
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

    fn topology(file: &str, siblings: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (cpu, list) in siblings.iter().enumerate() {
            let folder = root.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&folder).expect("creatable");
            fs::write(folder.join(file), format!("{list}\n")).expect("writable");
        }
        root
    }

    #[test]
    fn hyper_threads_are_one_core() {
        let adjacent = topology("core_cpus_list", &["0-1", "0-1", "2-3", "2-3"]);
        assert_eq!(physical_cores(adjacent.path(), &[0, 1, 2, 3]), Some(2));
        let split = topology("thread_siblings_list", &["0,2", "1,3", "0,2", "1,3"]);
        assert_eq!(physical_cores(split.path(), &[0, 1, 2, 3]), Some(2));
        // The mask may hold one of two siblings.
        assert_eq!(physical_cores(split.path(), &[0, 1]), Some(2));
        assert_eq!(physical_cores(split.path(), &[1, 3]), Some(1));
    }

    #[test]
    fn a_hybrid_machine_counts_both_kinds_of_core() {
        // Two cores with hyper-threads, four without.
        let lists = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"];
        let root = topology("core_cpus_list", &lists);
        let cpus: Vec<_> = (0..8).collect();
        assert_eq!(physical_cores(root.path(), &cpus), Some(6));
    }

    #[test]
    fn an_incomplete_topology_is_not_guessed() {
        let root = topology("core_cpus_list", &["0-1", "0-1"]);
        assert_eq!(physical_cores(root.path(), &[0, 1, 2]), None);
        assert_eq!(physical_cores(root.path(), &[]), None);
        assert_eq!(physical_cores(Path::new("/no/such/tree"), &[0]), None);
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
