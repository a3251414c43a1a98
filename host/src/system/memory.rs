//! Main memory: how much there is, where it lies, how much may be locked.

use std::fmt;
use std::fs;
use std::path::Path;

use asym_gemm_cpu::topology::{cgroup, parse_list};

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
            total_bytes: field_bytes(&meminfo, "MemTotal"),
            available_bytes: field_bytes(&meminfo, "MemAvailable"),
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

/// A field of a meminfo file, whose lines are `Name: 123 kB`, with `Node 0 ` before them
/// in the files of single nodes.
fn field_bytes(meminfo: &str, name: &str) -> Option<u64> {
    meminfo.lines().find_map(|line| {
        let (label, value) = line.split_once(':')?;
        let value = value.trim().strip_suffix("kB")?.trim();
        (label.split_whitespace().last() == Some(name))
            .then(|| value.parse::<u64>().ok())?
            .map(|kib| kib * 1024)
    })
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

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: Vec<usize>,
    /// Its memory in bytes.
    pub memory_bytes: u64,
}

/// The NUMA nodes of the machine, by number; none where the system does not say.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NumaNodes {
    /// The nodes.
    pub nodes: Vec<NumaNode>,
}

impl NumaNodes {
    /// Reads the topology.
    pub fn read() -> Self {
        Self::under(Path::new("/sys/devices/system/node"))
    }

    fn under(root: &Path) -> Self {
        let mut nodes: Vec<NumaNode> = fs::read_dir(root)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let id = entry
                    .file_name()
                    .to_str()?
                    .strip_prefix("node")?
                    .parse()
                    .ok()?;
                let read = |file| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
                Some(NumaNode {
                    id,
                    cpus: parse_list(&read("cpulist")).unwrap_or_default(),
                    memory_bytes: field_bytes(&read("meminfo"), "MemTotal").unwrap_or(0),
                })
            })
            .collect();
        nodes.sort_by_key(|node| node.id);
        Self { nodes }
    }

    /// Number of nodes that have memory; at least 1.
    pub fn count(&self) -> usize {
        let with_memory = self.nodes.iter().filter(|node| node.memory_bytes > 0);
        with_memory.count().max(1)
    }

    /// The node that a CPU belongs to.
    pub fn of_cpu(&self, cpu: usize) -> Option<u32> {
        let node = self.nodes.iter().find(|node| node.cpus.contains(&cpu))?;
        Some(node.id)
    }
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
    fn fields_are_read_from_both_forms_of_meminfo() {
        let whole =
            "MemTotal:       24683656 kB\nMemAvailable:   100 kB\nHugePages_Total:       0\n";
        assert_eq!(field_bytes(whole, "MemTotal"), Some(24_683_656 * 1024));
        assert_eq!(field_bytes(whole, "MemAvailable"), Some(102_400));
        assert_eq!(field_bytes(whole, "MemFree"), None);
        assert_eq!(field_bytes(whole, "HugePages_Total"), None);
        let node = "Node 0 MemTotal:  8 kB\nNode 0 MemFree: 4 kB\n";
        assert_eq!(field_bytes(node, "MemTotal"), Some(8192));
    }

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
    fn nodes_are_read_in_order_and_memoryless_ones_do_not_count() {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (name, cpus, kib) in [("node1", "4-7", 2), ("node0", "0-3", 1), ("node2", "", 0)] {
            let folder = root.path().join(name);
            fs::create_dir(&folder).expect("creatable");
            fs::write(folder.join("cpulist"), format!("{cpus}\n")).expect("writable");
            let meminfo = format!("Node 0 MemTotal: {kib} kB\n");
            fs::write(folder.join("meminfo"), meminfo).expect("writable");
        }
        fs::write(root.path().join("online"), "0-2\n").expect("writable");
        let numa = NumaNodes::under(root.path());
        let ids: Vec<_> = numa.nodes.iter().map(|node| node.id).collect();
        assert_eq!(ids, [0, 1, 2]);
        assert_eq!(numa.nodes[1].memory_bytes, 2048);
        assert_eq!(numa.count(), 2);
        assert_eq!(numa.of_cpu(5), Some(1));
        assert_eq!(numa.of_cpu(9), None);
        assert_eq!(NumaNodes::under(Path::new("/no/such/tree")).count(), 1);
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
