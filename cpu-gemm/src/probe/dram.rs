//! How fast the workers together read main memory.

use std::hint::black_box;
use std::time::Instant;

use super::median;
use super::read::{DISTANCES, Reader};
use crate::CpuError;
use crate::pool::{Tickets, Workers};

/// Read at once by one worker: large against the prefetch distances, small against its range.
const CHUNK: usize = 1 << 20;

/// Result of [`read_rate`]. GB are 10^9 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct DramRate {
    /// Median of the rounds with the best prefetch distance: the ceiling to compare with.
    pub gb_per_second: f64,
    /// The best single round.
    pub best_gb_per_second: f64,
    /// That distance in bytes; 0 is none.
    pub prefetch_distance: usize,
    /// Instruction set of the reader.
    pub reader: &'static str,
    /// Participants that the workers have.
    pub threads: usize,
}

/// Reads `buffer` with each prefetch distance, `rounds` times each, in turn.
///
/// The buffer should be several times the last-level cache and touched before; a
/// [`HugeBuffer`](crate::HugeBuffer) is. Each participant streams a range of its own, and helps the
/// others when it is done, as one CPU of a shared machine may be slower than the next.
///
/// # Errors
/// [`CpuError::Zero`] if there is nothing to read.
pub fn read_rate(
    workers: &dyn Workers,
    buffer: &[u8],
    rounds: usize,
) -> Result<DramRate, CpuError> {
    for (what, count) in [("the buffer to read", buffer.len()), ("rounds", rounds)] {
        if count == 0 {
            return Err(CpuError::Zero { what });
        }
    }
    let reader = Reader::best();
    let mut rates = DISTANCES.map(|_| Vec::with_capacity(rounds));
    for _ in 0..rounds {
        for (rates, distance) in rates.iter_mut().zip(DISTANCES) {
            rates.push(read_once(workers, reader, buffer, distance)?);
        }
    }
    let medians = rates.clone().map(|rates| median(rates).unwrap_or(0.0));
    let best = (0..DISTANCES.len())
        .max_by(|&i, &j| medians[i].total_cmp(&medians[j]))
        .unwrap_or(0);
    Ok(DramRate {
        gb_per_second: medians[best],
        best_gb_per_second: rates.into_iter().flatten().fold(0.0, f64::max),
        prefetch_distance: DISTANCES[best],
        reader: reader.name(),
        threads: workers.threads(),
    })
}

/// GB/s of one pass.
fn read_once(
    workers: &dyn Workers,
    reader: Reader,
    buffer: &[u8],
    distance: usize,
) -> Result<f64, CpuError> {
    let tickets = Tickets::for_threads(buffer.len().div_ceil(CHUNK), workers.threads());
    let start = Instant::now();
    workers.run(&|participant| {
        let mut sum = 0u64;
        while let Some(chunk) = tickets.next(participant) {
            let end = buffer.len().min((chunk + 1) * CHUNK);
            sum = sum.wrapping_add(reader.read(&buffer[chunk * CHUNK..end], distance));
        }
        black_box(sum);
    })?;
    let seconds = start.elapsed().as_secs_f64().max(1e-9);
    Ok(buffer.len() as f64 / seconds * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HugeBuffer;
    use crate::pool::{RayonWorkers, SpinPool};

    #[test]
    fn a_rate_is_positive_for_any_workers_and_length() {
        let pool = SpinPool::new(2).expect("threads can be started");
        let workers: [&dyn Workers; 2] = [&pool, &RayonWorkers::new()];
        for workers in workers {
            for len in [1, CHUNK - 1, 3 * CHUNK + 5] {
                let buffer = HugeBuffer::zeroed(workers, len).expect("the memory is there");
                let rate = read_rate(workers, &buffer, 2).expect("there is something to read");
                assert!(rate.gb_per_second > 0.0 && rate.gb_per_second.is_finite());
                assert!(rate.best_gb_per_second >= rate.gb_per_second, "{rate:?}");
                assert!(DISTANCES.contains(&rate.prefetch_distance));
                assert_eq!(rate.threads, workers.threads());
            }
        }
    }

    #[test]
    fn nothing_to_measure_is_an_error() {
        let pool = SpinPool::new(1).expect("no threads to start");
        assert_eq!(
            read_rate(&pool, &[], 1),
            Err(CpuError::Zero {
                what: "the buffer to read"
            })
        );
        assert_eq!(
            read_rate(&pool, &[1], 0),
            Err(CpuError::Zero { what: "rounds" })
        );
    }
}
