//! What it costs to hand a parallel region to the workers, for both kinds of them.
//!
//! - `empty`: the body does nothing; what the caller pays where nobody can help in time.
//! - `met`: the body ends when all participants are in it, or after 2 ms; the time until everybody
//!   works. `there` is the mean number of participants that came.
//! - `100 us`: that much work of one thread in 64 tickets; what a small region gains.
//!
//! Each is measured back to back, and after 1 ms of idleness, when spinning workers sleep.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use asym_gemm_cpu::pool::{RayonWorkers, SpinPool, Workers};
use asym_gemm_cpu::topology::default_threads;

type Failure = Box<dyn std::error::Error>;

const IDLE: Duration = Duration::from_millis(1);
const GIVE_UP: Duration = Duration::from_millis(2);
const TICKETS: usize = 64;

fn main() -> Result<(), Failure> {
    let all = default_threads();
    let mut counts = vec![1, 2, all.saturating_sub(2).max(1), all];
    counts.sort_unstable();
    counts.dedup();
    let steps = steps_of(Duration::from_micros(100)) / TICKETS as u64;
    println!("us: median (p99)");
    println!("| workers | threads | region | back to back | there | after 1 ms | there |");
    println!("|---|---|---|---|---|---|---|");
    for threads in counts {
        report("spin", &SpinPool::new(threads)?, steps);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()?;
        pool.install(|| report("rayon", &RayonWorkers::new(), steps));
    }
    Ok(())
}

fn report(kind: &str, workers: &dyn Workers, steps: u64) {
    let threads = workers.threads();
    type Region<'a> = &'a dyn Fn(&dyn Workers) -> Once;
    let regions: [(&str, Region); 3] = [
        ("empty", &empty),
        ("met", &met),
        ("100 us", &|workers| work(workers, steps)),
    ];
    for (name, region) in regions {
        let hot = Times::of(5000, || region(workers));
        let idle = Times::of(300, || {
            thread::sleep(IDLE);
            region(workers)
        });
        println!("| {kind} | {threads} | {name} | {hot} | {idle} |");
    }
}

/// One region: its time in us and how many took part.
struct Once {
    us: f64,
    there: usize,
}

/// Many of them.
struct Times {
    median: f64,
    p99: f64,
    there: f64,
}

impl Times {
    fn of(rounds: usize, region: impl Fn() -> Once) -> Self {
        let mut regions: Vec<Once> = (0..rounds).map(|_| region()).collect();
        let there: usize = regions.iter().map(|once| once.there).sum();
        regions.sort_by(|a, b| a.us.total_cmp(&b.us));
        Self {
            median: regions[rounds / 2].us,
            p99: regions[rounds * 99 / 100].us,
            there: there as f64 / rounds as f64,
        }
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.2} ({:.1}) | {:.1}",
            self.median, self.p99, self.there
        )
    }
}

fn timed(workers: &dyn Workers, body: impl Fn(&AtomicUsize, Instant) + Sync) -> Once {
    let there = AtomicUsize::new(0);
    let start = Instant::now();
    let result = workers.run(&|_| {
        there.fetch_add(1, Relaxed);
        body(&there, start);
    });
    let us = start.elapsed().as_secs_f64() * 1e6;
    result.expect("the bodies below do not panic");
    Once {
        us,
        there: there.into_inner(),
    }
}

fn empty(workers: &dyn Workers) -> Once {
    timed(workers, |_, _| ())
}

fn met(workers: &dyn Workers) -> Once {
    let threads = workers.threads();
    timed(workers, |there, start| {
        let mut looks = 0u32;
        while there.load(Relaxed) < threads {
            spin_loop();
            looks += 1;
            if looks.is_multiple_of(64) && start.elapsed() > GIVE_UP {
                return;
            }
        }
    })
}

fn work(workers: &dyn Workers, steps: u64) -> Once {
    let next = AtomicUsize::new(0);
    timed(workers, |_, _| {
        while next.fetch_add(1, Relaxed) < TICKETS {
            busy(steps);
        }
    })
}

/// A chain of multiplications: time without memory.
fn busy(steps: u64) {
    let mut value = black_box(1u64);
    for _ in 0..steps {
        value = value.wrapping_mul(6364136223846793005).wrapping_add(1);
    }
    black_box(value);
}

/// Steps of `busy` that take so long on one thread.
fn steps_of(time: Duration) -> u64 {
    const STEPS: u64 = 10_000_000;
    let start = Instant::now();
    busy(STEPS);
    (STEPS as f64 * time.as_secs_f64() / start.elapsed().as_secs_f64()) as u64
}
