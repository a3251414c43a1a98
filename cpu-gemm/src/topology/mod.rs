//! What the machine lets this process use: CPUs, time and cores.
//!
//! Each fact comes from a pure function over text that the kernel writes, or over a tree of
//! such files whose root is an argument. Nothing here fails on a system that hides a fact: it
//! says less.

pub mod cgroup;
#[cfg(test)]
mod fixture;
mod machine;
mod nodes;
mod pin;
mod placement;
mod threads;

pub use machine::{Cpu, Topology};
pub use nodes::{NumaNode, NumaNodes, meminfo_bytes};
pub(crate) use pin::pin;
pub use placement::{NodeShare, Placement};
pub use threads::{Threads, affinity, default_threads};

/// Where Linux describes CPUs and nodes.
const SYSTEM: &str = "/sys/devices/system";

/// Reads a list of numbers as the kernel writes them: `0-3,8,10-11`. `None` if it is not
/// such a list.
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first > 1 << 20 {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read_as_the_kernel_writes_them() {
        assert_eq!(
            parse_list("0-3,8,10-11\n"),
            Some(vec![0, 1, 2, 3, 8, 10, 11])
        );
        assert_eq!(parse_list("5"), Some(vec![5]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        for bad in ["x", "3-1", "1-", "0-99999999999"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }
}
