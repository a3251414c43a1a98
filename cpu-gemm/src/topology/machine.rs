//! CPUs, the cores they share and the nodes they belong to.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{NumaNodes, SYSTEM, affinity, parse_list};

/// One logical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: usize,
    /// The lowest CPU of its physical core; `None` where the system does not say.
    pub core: Option<usize>,
    /// Its NUMA node; `None` where the system does not say.
    pub node: Option<u32>,
}

/// The CPUs that this process may use, and the nodes of the machine.
///
/// Guests often hide which CPUs share a core: then each CPU counts as a core, or its `core`
/// is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The CPUs, ascending.
    pub cpus: Vec<Cpu>,
    /// All nodes, also those without usable CPUs.
    pub numa: NumaNodes,
}

impl Topology {
    /// That of this machine, within the affinity mask of the calling thread.
    pub fn read() -> Self {
        Self::under(Path::new(SYSTEM), &affinity())
    }

    /// What the tree under `root` (`/sys/devices/system`) says of the CPUs in `mask`. Those that
    /// are offline are left out.
    pub fn under(root: &Path, mask: &[usize]) -> Self {
        let numa = NumaNodes::under(root);
        let online = fs::read_to_string(root.join("cpu/online"))
            .ok()
            .and_then(|text| parse_list(&text))
            .filter(|online| !online.is_empty());
        let mut ids: Vec<usize> = mask
            .iter()
            .copied()
            .filter(|cpu| online.as_ref().is_none_or(|online| online.contains(cpu)))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        let cpus = ids
            .into_iter()
            .map(|id| Cpu {
                id,
                core: core_of(root, id),
                node: numa.of_cpu(id),
            })
            .collect();
        Self { cpus, numa }
    }

    /// Distinct physical cores behind the CPUs; `None` if that of any is unknown.
    pub fn physical_cores(&self) -> Option<usize> {
        let cores: BTreeSet<usize> = self
            .cpus
            .iter()
            .map(|cpu| cpu.core)
            .collect::<Option<_>>()?;
        (!cores.is_empty()).then_some(cores.len())
    }
}

fn core_of(root: &Path, cpu: usize) -> Option<usize> {
    let folder = root.join(format!("cpu/cpu{cpu}/topology"));
    // The second is the name in kernels before 5.3.
    let text = ["core_cpus_list", "thread_siblings_list"]
        .iter()
        .find_map(|file| fs::read_to_string(folder.join(file)).ok())?;
    parse_list(&text)?.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fixture::Tree;

    fn cores(tree: &Tree, mask: &[usize]) -> Option<usize> {
        Topology::under(tree.root(), mask).physical_cores()
    }

    #[test]
    fn hyper_threads_are_one_core() {
        let adjacent = Tree::new().siblings("core_cpus_list", &["0-1", "0-1", "2-3", "2-3"]);
        assert_eq!(cores(&adjacent, &[0, 1, 2, 3]), Some(2));
        let split = Tree::new().siblings("thread_siblings_list", &["0,2", "1,3", "0,2", "1,3"]);
        assert_eq!(cores(&split, &[0, 1, 2, 3]), Some(2));
        // The mask may hold one of two siblings.
        assert_eq!(cores(&split, &[0, 1]), Some(2));
        assert_eq!(cores(&split, &[1, 3]), Some(1));
    }

    #[test]
    fn a_hybrid_machine_counts_both_kinds_of_core() {
        // Two cores with hyper-threads, four without.
        let lists = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"];
        let tree = Tree::new().siblings("core_cpus_list", &lists);
        assert_eq!(cores(&tree, &[0, 1, 2, 3, 4, 5, 6, 7]), Some(6));
    }

    #[test]
    fn a_guest_that_hides_hyper_threads_has_a_core_for_each_cpu() {
        let lists: Vec<String> = (0..16).map(|cpu| cpu.to_string()).collect();
        let lists: Vec<&str> = lists.iter().map(String::as_str).collect();
        let tree = Tree::new().siblings("core_cpus_list", &lists);
        assert_eq!(cores(&tree, &(0..16).collect::<Vec<_>>()), Some(16));
    }

    #[test]
    fn an_incomplete_topology_is_not_guessed() {
        let tree = Tree::new().siblings("core_cpus_list", &["0-1", "0-1"]);
        assert_eq!(cores(&tree, &[0, 1, 2]), None);
        assert_eq!(cores(&tree, &[]), None);
        let nothing = Topology::under(Path::new("/no/such/tree"), &[3, 1, 3]);
        assert_eq!(nothing.physical_cores(), None);
        let ids: Vec<_> = nothing.cpus.iter().map(|cpu| cpu.id).collect();
        assert_eq!(ids, [1, 3]);
    }

    #[test]
    fn offline_cpus_are_left_out() {
        let tree = Tree::new()
            .siblings("core_cpus_list", &["0", "1-2", "1-2", "3"])
            .file("cpu/online", "0,2-3\n")
            .node(0, "0,2", 8)
            .node(1, "3", 8);
        let topology = Topology::under(tree.root(), &[0, 1, 2, 3]);
        let found: Vec<_> = topology
            .cpus
            .iter()
            .map(|cpu| (cpu.id, cpu.core, cpu.node))
            .collect();
        let expected = [
            (0, Some(0), Some(0)),
            (2, Some(1), Some(0)),
            (3, Some(3), Some(1)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn this_machine_has_the_cpus_of_its_mask() {
        let topology = Topology::read();
        assert_eq!(topology.cpus.len(), affinity().len());
        assert!(
            topology
                .physical_cores()
                .is_none_or(|cores| cores <= topology.cpus.len())
        );
    }
}
