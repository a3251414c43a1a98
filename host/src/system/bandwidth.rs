//! Measuring how fast threads read main memory.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

const PASSES: usize = 3;

/// Reads `bytes` of memory, divided among `threads`, and returns the best rate of three
/// passes in GB/s (10^9 bytes a second).
///
/// `bytes` should be several times the last-level cache, or the cache is measured. Each
/// thread reads memory that it touched first, so on a NUMA machine its own node's. `None`
/// if the memory cannot be had or there is nothing to measure. Meaningful in optimised
/// builds only.
pub fn dram_read_rate(threads: usize, bytes: usize) -> Option<f64> {
    let words = bytes.checked_div(threads)? / size_of::<u64>();
    if words == 0 {
        return None;
    }
    let mut shares = Vec::new();
    for _ in 0..threads {
        let mut share: Vec<u64> = Vec::new();
        share.try_reserve_exact(words).ok()?;
        shares.push(share);
    }
    let barrier = Barrier::new(threads);
    let spans: Vec<[(Instant, Instant); PASSES]> = thread::scope(|scope| {
        let workers: Vec<_> = shares
            .into_iter()
            .map(|share| {
                let barrier = &barrier;
                scope.spawn(move || read_share(share, words, barrier))
            })
            .collect();
        workers.into_iter().filter_map(|w| w.join().ok()).collect()
    });
    let read_bytes = (words * size_of::<u64>() * threads) as f64;
    (0..PASSES)
        .filter_map(|pass| {
            let first = spans.iter().map(|span| span[pass].0).min()?;
            let last = spans.iter().map(|span| span[pass].1).max()?;
            let seconds = last.duration_since(first).as_secs_f64();
            (seconds > 0.0).then(|| read_bytes / seconds * 1e-9)
        })
        .max_by(f64::total_cmp)
}

fn read_share(
    mut share: Vec<u64>,
    words: usize,
    barrier: &Barrier,
) -> [(Instant, Instant); PASSES] {
    share.extend(0..words as u64);
    std::array::from_fn(|_| {
        barrier.wait();
        let start = Instant::now();
        let sum = black_box(share.as_slice())
            .iter()
            .fold(0u64, |sum, &word| sum.wrapping_add(word));
        black_box(sum);
        (start, Instant::now())
    })
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
        assert_eq!(dram_read_rate(2, 15), None);
        assert_eq!(dram_read_rate(1, usize::MAX), None);
    }
}
