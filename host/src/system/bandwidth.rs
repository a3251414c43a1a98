//! Measuring how fast threads read main memory.

use asym_gemm_cpu::HugeBuffer;
use asym_gemm_cpu::pool::SpinPool;
use asym_gemm_cpu::probe::dram;

use super::Memory;

const ROUNDS: usize = 3;

/// How fast `threads` read `bytes` of memory, in GB/s (10^9 bytes a second), as
/// [`dram::read_rate`] measures it.
///
/// `bytes` should be several times the last-level cache, or the cache is measured. `None` if the
/// memory or the threads cannot be had or there is nothing to measure. Meaningful in optimised
/// builds only.
pub fn dram_read_rate(threads: usize, bytes: usize) -> Option<f64> {
    let usable = Memory::read().usable_bytes();
    if usable.is_some_and(|usable| usable < bytes as u64) {
        return None;
    }
    let workers = SpinPool::new(threads).ok()?;
    let buffer = HugeBuffer::zeroed(&workers, bytes).ok()?;
    let rate = dram::read_rate(&workers, &buffer, ROUNDS).ok()?;
    Some(rate.gb_per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_positive_and_finite_for_any_thread_count() {
        for threads in [1, 2, 3] {
            let rate = dram_read_rate(threads, 1 << 20).expect("a megabyte is there");
            assert!(rate.is_finite() && rate > 0.0, "{rate} with {threads}");
        }
    }

    #[test]
    fn nothing_to_measure_is_none() {
        assert_eq!(dram_read_rate(0, 1 << 20), None);
        assert_eq!(dram_read_rate(2, 0), None);
        assert_eq!(dram_read_rate(1, usize::MAX), None);
    }
}
