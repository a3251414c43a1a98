//! Units of work that participants pull.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::{Line, TaskPanic, Workers};

/// Numbers handed out once each: a shared counter, or one for each part of the work.
///
/// A participant pulls from the part that is near to it (its NUMA node's weights, see
/// [`Placement::divide`](crate::topology::Placement::divide)) until that is empty, then from the next
/// ones, so that no participant is idle while there is work.
pub struct Tickets {
    parts: Box<[Line<Part>]>,
}

struct Part {
    next: AtomicUsize,
    end: usize,
}

impl Tickets {
    /// `0..count` from one counter.
    pub fn new(count: usize) -> Self {
        Self::of_parts(std::iter::once(0..count))
    }

    /// The numbers of all ranges; an empty list gives none.
    pub fn of_parts(parts: impl IntoIterator<Item = Range<usize>>) -> Self {
        let part = |range: Range<usize>| {
            Line(Part {
                next: AtomicUsize::new(range.start),
                end: range.end,
            })
        };
        Self {
            parts: parts.into_iter().map(part).collect(),
        }
    }

    /// `0..count` in one range for each thread, for work that should stay sequential.
    pub fn for_threads(count: usize, threads: usize) -> Self {
        let threads = threads.max(1);
        let bound = |thread| (count as u128 * thread as u128 / threads as u128) as usize;
        Self::of_parts((0..threads).map(|thread| bound(thread)..bound(thread + 1)))
    }

    /// A number that nobody has, of part `home` if it has any left; `None` when all are
    /// handed out. A `home` beyond the parts starts again at the first.
    pub fn next(&self, home: usize) -> Option<usize> {
        let parts = self.parts.len();
        (0..parts).find_map(|distance| {
            let Line(part) = &self.parts[(home % parts + distance) % parts];
            // The look first keeps an empty part's line shared, and its counter from growing.
            (part.next.load(Relaxed) < part.end)
                .then(|| part.next.fetch_add(1, Relaxed))
                .filter(|&ticket| ticket < part.end)
        })
    }
}

/// Calls `body(index, chunk)` for every `chunk_len` elements of `data` (the last may have fewer), in one
/// region. Each participant has a range of consecutive chunks, and helps the others when it is done.
///
/// # Errors
/// [`TaskPanic`] if a call panicked; other chunks may be unvisited then.
pub fn for_chunks<T: Send>(
    workers: &dyn Workers,
    data: &mut [T],
    chunk_len: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) -> Result<(), TaskPanic> {
    let chunks: Vec<_> = data.chunks_mut(chunk_len.max(1)).map(Mutex::new).collect();
    let tickets = Tickets::for_threads(chunks.len(), workers.threads());
    workers.run(&|participant| {
        while let Some(index) = tickets.next(participant) {
            // A number is handed out once, so nobody else has asked for this lock.
            if let Ok(mut chunk) = chunks[index].lock() {
                body(index, &mut chunk);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{RayonWorkers, SpinPool};

    #[test]
    fn one_part_is_a_counter() {
        let tickets = Tickets::new(3);
        let pulled: Vec<_> = (0..5).map(|home| tickets.next(home)).collect();
        assert_eq!(pulled, [Some(0), Some(1), Some(2), None, None]);
        assert_eq!(Tickets::new(0).next(0), None);
        assert_eq!(Tickets::of_parts([]).next(7), None);
    }

    #[test]
    fn the_home_part_comes_first_then_the_next_ones() {
        let tickets = Tickets::of_parts([0..2, 2..2, 2..4]);
        let pulled: Vec<_> = [2, 2, 2, 1, 0].map(|home| tickets.next(home)).into();
        assert_eq!(pulled, [Some(2), Some(3), Some(0), Some(1), None]);
        assert_eq!(Tickets::of_parts([0..1, 5..6]).next(3), Some(5));
    }

    #[test]
    fn each_number_is_handed_out_once() {
        const COUNT: usize = 10_000;
        let pool = SpinPool::start(4).expect("threads can be started");
        let tickets = Tickets::of_parts([0..COUNT / 3, COUNT / 3..COUNT]);
        let seen: Vec<_> = (0..COUNT).map(|_| AtomicUsize::new(0)).collect();
        pool.run(&|participant| {
            while let Some(ticket) = tickets.next(participant) {
                seen[ticket].fetch_add(1, Relaxed);
            }
        })
        .expect("nothing panics");
        assert!(seen.iter().all(|seen| seen.load(Relaxed) == 1));
    }

    #[test]
    fn the_ranges_of_threads_cover_everything() {
        for (count, threads) in [(0, 3), (2, 5), (17, 4), (16, 4), (5, 0)] {
            let tickets = Tickets::for_threads(count, threads);
            let mut numbers: Vec<_> = std::iter::from_fn(|| tickets.next(1)).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..count).collect::<Vec<_>>());
        }
        let tickets = Tickets::for_threads(10, 4);
        assert_eq!(
            [3, 0, 1].map(|thread| tickets.next(thread)),
            [Some(7), Some(0), Some(2)]
        );
    }

    #[test]
    fn every_chunk_is_visited_once_with_its_index() {
        let pool = SpinPool::start(3).expect("threads can be started");
        let workers: [&dyn Workers; 2] = [&pool, &RayonWorkers::new()];
        for workers in workers {
            for (len, chunk_len) in [(0, 4), (3, 4), (64, 4), (65, 4), (5, 0)] {
                let mut data = vec![0; len];
                for_chunks(workers, &mut data, chunk_len, |index, chunk| {
                    chunk.iter_mut().for_each(|value| *value += index + 1);
                })
                .expect("nothing panics");
                let expected = (0..len).map(|i| i / chunk_len.max(1) + 1);
                assert_eq!(data, expected.collect::<Vec<_>>());
            }
        }
    }
}
