//! Dividing threads and weights over NUMA nodes.
//!
//! Each node gets threads in proportion to its cores and weights in proportion to its threads, so that
//! every thread streams about as many bytes, all of its own node's memory. On one node everything
//! is the identity. All of it is arithmetic on a [`Topology`]; nothing is moved or pinned here.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Cpu, Topology};

/// The part of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeShare {
    /// The node; `None` where the machine names none.
    pub node: Option<u32>,
    /// A CPU for each of its threads, one a physical core as long as there are cores.
    pub cpus: Vec<usize>,
}

/// Threads on nodes, numbered so that each node's are consecutive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    shares: Vec<NodeShare>,
}

impl Placement {
    /// Places `threads` on the CPUs of `topology`, not more than there are and at least one.
    ///
    /// Nodes without memory or without CPUs hold no weights; CPUs of the former are used after those
    /// of every other node.
    pub fn new(topology: &Topology, threads: usize) -> Self {
        let nodes = usable_nodes(topology);
        let threads = threads.clamp(1, topology.cpus.len().max(1));
        let cores: Vec<usize> = nodes.iter().map(|node| node.cores).collect();
        let cpus: Vec<usize> = nodes.iter().map(|node| node.cpus.len()).collect();
        let capacity = if threads <= cores.iter().sum() {
            cores
        } else {
            cpus
        };
        let shares = nodes
            .into_iter()
            .zip(deal(threads, &capacity))
            .filter(|(_, threads)| *threads > 0)
            .map(|(node, threads)| NodeShare {
                node: node.id,
                cpus: node.cpus[..threads.min(node.cpus.len())].to_vec(),
            })
            .collect();
        Self { shares }
    }

    /// The nodes that have threads.
    pub fn shares(&self) -> &[NodeShare] {
        &self.shares
    }

    /// Threads placed; at least 1.
    pub fn threads(&self) -> usize {
        self.shares.iter().map(|share| share.cpus.len()).sum()
    }

    /// The CPU of each thread, for [`SpinPool::pinned`](crate::pool::SpinPool::pinned).
    pub fn cpus(&self) -> Vec<usize> {
        self.shares
            .iter()
            .flat_map(|share| share.cpus.clone())
            .collect()
    }

    /// The position in [`Placement::shares`] of a thread's node. Threads beyond those placed
    /// start again at the first.
    pub fn share_of(&self, thread: usize) -> usize {
        let mut thread = thread % self.threads();
        for (position, share) in self.shares.iter().enumerate() {
            match thread.checked_sub(share.cpus.len()) {
                Some(rest) => thread = rest,
                None => return position,
            }
        }
        0
    }

    /// Divides `items` (experts, panels) into one range for each share, in order and without gaps,
    /// in proportion to threads.
    pub fn divide(&self, items: usize) -> Vec<Range<usize>> {
        let total = self.threads();
        let mut threads = 0;
        let mut start = 0;
        self.shares
            .iter()
            .map(|share| {
                threads += share.cpus.len();
                let end = (items as u128 * threads as u128 / total as u128) as usize;
                let range = start..end;
                start = end;
                range
            })
            .collect()
    }

    /// Divides `bytes` likewise, at multiples of `granule` (a page, an expert) only.
    pub fn divide_bytes(&self, bytes: usize, granule: usize) -> Vec<Range<usize>> {
        let granule = granule.max(1);
        self.divide(bytes.div_ceil(granule))
            .into_iter()
            .map(|range| {
                let clip = |granules: usize| granules.saturating_mul(granule).min(bytes);
                clip(range.start)..clip(range.end)
            })
            .collect()
    }

    /// The share that [`Placement::divide`] gives an item to.
    pub fn share_of_item(&self, item: usize, items: usize) -> usize {
        let ranges = self.divide(items);
        ranges
            .iter()
            .position(|range| range.contains(&item))
            .unwrap_or(0)
    }
}

/// A node that can hold threads and weights.
struct UsableNode {
    id: Option<u32>,
    /// First CPUs of the cores, then their siblings.
    cpus: Vec<usize>,
    cores: usize,
}

fn usable_nodes(topology: &Topology) -> Vec<UsableNode> {
    let has_memory = |id: u32| {
        let mut nodes = topology.numa.nodes.iter();
        nodes.any(|node| node.id == id && node.memory_bytes > 0)
    };
    let mut by_node: BTreeMap<Option<u32>, Vec<Cpu>> = BTreeMap::new();
    let mut strays = Vec::new();
    for &cpu in &topology.cpus {
        match cpu.node.filter(|&id| has_memory(id)) {
            Some(id) => by_node.entry(Some(id)).or_default().push(cpu),
            None => strays.push(cpu),
        }
    }
    if by_node.is_empty() {
        if strays.is_empty() {
            // A thread runs somewhere, whatever the system says.
            strays.push(Cpu {
                id: 0,
                core: None,
                node: None,
            });
        }
        by_node.insert(None, std::mem::take(&mut strays));
    }
    let mut nodes: Vec<UsableNode> = by_node
        .into_iter()
        .map(|(id, cpus)| cores_first(id, &cpus))
        .collect();
    for stray in strays {
        if let Some(least) = nodes.iter_mut().min_by_key(|node| node.cpus.len()) {
            least.cpus.push(stray.id);
        }
    }
    nodes
}

fn cores_first(id: Option<u32>, cpus: &[Cpu]) -> UsableNode {
    let mut seen = Vec::new();
    let (first, siblings): (Vec<&Cpu>, Vec<&Cpu>) = cpus.iter().partition(|cpu| {
        let core = cpu.core.unwrap_or(cpu.id);
        let new = !seen.contains(&core);
        seen.push(core);
        new
    });
    UsableNode {
        id,
        cores: first.len(),
        cpus: first.iter().chain(&siblings).map(|cpu| cpu.id).collect(),
    }
}

/// Deals `count` in proportion to `capacity`, the remainder to the largest fractions and among
/// equals to the first. No part exceeds its capacity unless the sum of all does.
fn deal(count: usize, capacity: &[usize]) -> Vec<usize> {
    let total: usize = capacity.iter().sum::<usize>().max(1);
    let mut parts: Vec<usize> = capacity.iter().map(|c| count * c / total).collect();
    let mut order: Vec<usize> = (0..capacity.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(count * capacity[i] % total));
    let dealt: usize = parts.iter().sum();
    for &i in order.iter().take(count - dealt) {
        parts[i] += 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{NumaNode, NumaNodes};

    /// Nodes of (cores, threads of each core, GiB), CPUs numbered as Linux does: first all
    /// cores, then all siblings.
    fn machine(nodes: &[(usize, usize, u64)]) -> Topology {
        let cores: usize = nodes.iter().map(|node| node.0).sum();
        let mut cpus = Vec::new();
        let mut numa = Vec::new();
        let mut first = 0;
        for (id, &(count, threads, gib)) in (0..).zip(nodes) {
            let mut own = Vec::new();
            for thread in 0..threads {
                for core in first..first + count {
                    own.push(thread * cores + core);
                    cpus.push(Cpu {
                        id: thread * cores + core,
                        core: Some(core),
                        node: Some(id),
                    });
                }
            }
            first += count;
            numa.push(NumaNode {
                id,
                cpus: own,
                memory_bytes: gib << 30,
            });
        }
        cpus.sort_by_key(|cpu| cpu.id);
        Topology {
            cpus,
            numa: NumaNodes { nodes: numa },
        }
    }

    fn within(mut topology: Topology, mask: Range<usize>) -> Topology {
        topology.cpus.retain(|cpu| mask.contains(&cpu.id));
        topology
    }

    fn whole(items: usize) -> Vec<Range<usize>> {
        std::iter::once(0..items).collect()
    }

    fn counts(placement: &Placement) -> Vec<(u32, usize)> {
        let shares = placement.shares().iter();
        shares
            .map(|share| (share.node.expect("named"), share.cpus.len()))
            .collect()
    }

    /// What must hold of every placement.
    fn check(topology: &Topology, threads: usize) -> Placement {
        let placement = Placement::new(topology, threads);
        let cpus = placement.cpus();
        assert_eq!(cpus.len(), threads.clamp(1, topology.cpus.len()));
        let mut distinct = cpus.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), cpus.len(), "a CPU has one thread: {cpus:?}");
        for items in [0, 1, 7, 128, 1000] {
            let ranges = placement.divide(items);
            assert_eq!(ranges.len(), placement.shares().len());
            let mut next = 0;
            for (position, range) in ranges.iter().enumerate() {
                assert_eq!(range.start, next);
                next = range.end;
                for item in range.clone() {
                    assert_eq!(placement.share_of_item(item, items), position);
                }
                // Within one item of the exact part.
                let exact = items as f64 * placement.shares()[position].cpus.len() as f64
                    / placement.threads() as f64;
                assert!((range.len() as f64 - exact).abs() < 1.0, "{ranges:?}");
            }
            assert_eq!(next, items);
        }
        placement
    }

    #[test]
    fn one_node_is_the_identity() {
        let placement = check(&machine(&[(16, 1, 128)]), 16);
        assert_eq!(placement.cpus(), (0..16).collect::<Vec<_>>());
        assert_eq!(placement.divide(128), whole(128));
        assert_eq!(placement.divide_bytes(1000, 64), whole(1000));
        assert!((0..40).all(|thread| placement.share_of(thread) == 0));
    }

    #[test]
    fn a_machine_that_says_nothing_is_one_node() {
        let cpus = [2, 5, 6].map(|id| Cpu {
            id,
            core: None,
            node: None,
        });
        let topology = Topology {
            cpus: cpus.to_vec(),
            numa: NumaNodes { nodes: vec![] },
        };
        let placement = check(&topology, 2);
        let expected = NodeShare {
            node: None,
            cpus: vec![2, 5],
        };
        assert_eq!(placement.shares(), [expected]);
        let empty = Topology {
            cpus: vec![],
            numa: NumaNodes { nodes: vec![] },
        };
        let placement = Placement::new(&empty, 4);
        assert_eq!(placement.threads(), 1);
        assert_eq!(placement.share_of(3), 0);
        assert_eq!(placement.divide(128), whole(128));
    }

    #[test]
    fn two_nodes_get_halves_and_cores_come_before_siblings() {
        let topology = machine(&[(8, 2, 64), (8, 2, 64)]);
        let placement = check(&topology, 16);
        assert_eq!(placement.cpus(), (0..16).collect::<Vec<_>>());
        assert_eq!(placement.divide(128), [0..64, 64..128]);
        assert_eq!((placement.share_of(7), placement.share_of(8)), (0, 1));
        assert_eq!(placement.share_of(16), 0);
        let odd = check(&topology, 5);
        assert_eq!(counts(&odd), [(0, 3), (1, 2)]);
        let siblings = check(&topology, 20);
        assert_eq!(siblings.shares()[0].cpus[8..], [16, 17]);
        assert_eq!(siblings.shares()[1].cpus[8..], [24, 25]);
        check(&topology, 1000);
    }

    #[test]
    fn four_uneven_nodes_get_parts_by_their_cores() {
        let topology = machine(&[(12, 1, 32), (4, 1, 32), (8, 1, 32), (8, 1, 32)]);
        for threads in 1..=33 {
            check(&topology, threads);
        }
        let placement = check(&topology, 16);
        assert_eq!(counts(&placement), [(0, 6), (1, 2), (2, 4), (3, 4)]);
        assert_eq!(placement.divide(32), [0..12, 12..16, 16..24, 24..32]);
    }

    #[test]
    fn a_mask_in_one_node_leaves_the_others_out() {
        let topology = within(machine(&[(8, 1, 64), (8, 1, 64)]), 8..12);
        let placement = check(&topology, 8);
        assert_eq!(counts(&placement), [(1, 4)]);
        assert_eq!(placement.divide(10), whole(10));
        let across = within(machine(&[(8, 1, 64), (8, 1, 64)]), 6..12);
        assert_eq!(counts(&check(&across, 3)), [(0, 1), (1, 2)]);
    }

    #[test]
    fn a_node_without_memory_lends_its_cpus_last() {
        let topology = machine(&[(4, 1, 64), (4, 1, 0), (4, 1, 64)]);
        let placement = check(&topology, 8);
        assert_eq!(placement.cpus(), [0, 1, 2, 3, 8, 9, 10, 11]);
        let all = check(&topology, 12);
        assert_eq!(counts(&all), [(0, 6), (2, 6)]);
    }

    #[test]
    fn bytes_are_cut_at_granules() {
        let placement = Placement::new(&machine(&[(3, 1, 1), (1, 1, 1)]), 4);
        let page = 4096;
        let ranges = placement.divide_bytes(10 * page + 5, page);
        assert_eq!(ranges, [0..8 * page, 8 * page..10 * page + 5]);
        assert_eq!(placement.divide_bytes(0, page), [0..0, 0..0]);
        let huge = placement.divide_bytes(usize::MAX, 0);
        assert_eq!(huge.last().map(|range| range.end), Some(usize::MAX));
    }
}
