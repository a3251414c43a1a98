//! NUMA nodes.

use std::fs;
use std::path::Path;

use super::{SYSTEM, parse_list};

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: Vec<usize>,
    /// Its memory in bytes.
    pub memory_bytes: u64,
}

/// The NUMA nodes of the machine, by number; none where the system does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct NumaNodes {
    /// The nodes.
    pub nodes: Vec<NumaNode>,
}

impl NumaNodes {
    /// Those of this machine.
    pub fn read() -> Self {
        Self::under(Path::new(SYSTEM))
    }

    /// Those that the tree under `root` (`/sys/devices/system`) describes.
    pub fn under(root: &Path) -> Self {
        let mut nodes: Vec<NumaNode> = fs::read_dir(root.join("node"))
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
                    memory_bytes: meminfo_bytes(&read("meminfo"), "MemTotal").unwrap_or(0),
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

/// A field of a meminfo file in bytes. Its lines are `Name: 123 kB`, with `Node 0 ` before them
/// in the files of single nodes.
pub fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    meminfo.lines().find_map(|line| {
        let (label, value) = line.split_once(':')?;
        let value = value.trim().strip_suffix("kB")?.trim();
        (label.split_whitespace().last() == Some(name))
            .then(|| value.parse::<u64>().ok())?
            .and_then(|kib| kib.checked_mul(1024))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fixture::Tree;

    #[test]
    fn fields_are_read_from_both_forms_of_meminfo() {
        let whole =
            "MemTotal:       24683656 kB\nMemAvailable:   100 kB\nHugePages_Total:       0\n";
        assert_eq!(meminfo_bytes(whole, "MemTotal"), Some(24_683_656 * 1024));
        assert_eq!(meminfo_bytes(whole, "MemAvailable"), Some(102_400));
        assert_eq!(meminfo_bytes(whole, "MemFree"), None);
        assert_eq!(meminfo_bytes(whole, "HugePages_Total"), None);
        let node = "Node 0 MemTotal:  8 kB\nNode 0 MemFree: 4 kB\n";
        assert_eq!(meminfo_bytes(node, "MemTotal"), Some(8192));
        assert_eq!(
            meminfo_bytes("MemTotal: 99999999999999999 kB", "MemTotal"),
            None
        );
    }

    #[test]
    fn nodes_are_read_in_order_and_memoryless_ones_do_not_count() {
        let tree = Tree::new()
            .node(1, "4-7", 2)
            .node(0, "0-3", 1)
            .node(2, "", 0)
            .file("node/online", "0-2\n");
        let numa = NumaNodes::under(tree.root());
        let ids: Vec<_> = numa.nodes.iter().map(|node| node.id).collect();
        assert_eq!(ids, [0, 1, 2]);
        assert_eq!(numa.nodes[1].memory_bytes, 2048);
        assert_eq!(numa.count(), 2);
        assert_eq!(numa.of_cpu(5), Some(1));
        assert_eq!(numa.of_cpu(9), None);
        assert_eq!(NumaNodes::under(Path::new("/no/such/tree")).count(), 1);
    }
}
