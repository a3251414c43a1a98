//! A parallel region: numbered tasks that threads take one after the other.
//!
//! Tasks are numbered so that each waits only for tasks with smaller numbers. A number
//! is taken from one counter, hence everything that a task can wait for is already
//! being run by a thread that is awake: the region ends however many threads take part, one
//! included, and needs no barrier. Threads of unequal speed share the work evenly.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::CpuError;
use crate::pool::Workers;

/// Busy turns before a waiting thread offers its CPU to others.
const SPINS: u32 = 2000;

/// The tasks of one call.
pub(crate) struct Region {
    next: AtomicUsize,
    tasks: usize,
    /// Set when a task panicked: its latches never open.
    broken: AtomicBool,
}

impl Region {
    /// Runs `worker` on the threads of `workers`; each takes tasks until none is left.
    ///
    /// # Errors
    /// [`CpuError::TaskPanic`] if a task panicked.
    pub(crate) fn run(
        workers: &dyn Workers,
        tasks: usize,
        worker: &(dyn Fn(&Self) + Sync),
    ) -> Result<(), CpuError> {
        let region = Self {
            next: AtomicUsize::new(0),
            tasks,
            broken: AtomicBool::new(false),
        };
        workers.run(&|_| {
            let guard = BreakOnPanic(&region);
            worker(&region);
            std::mem::forget(guard);
        })?;
        Ok(())
    }

    /// The next task for the calling thread.
    #[inline]
    pub(crate) fn take(&self) -> Option<usize> {
        if self.broken.load(Ordering::Relaxed) {
            return None;
        }
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.tasks).then_some(task)
    }

    /// Waits until `latch` is open. False if it never will be.
    #[inline]
    pub(crate) fn wait(&self, latch: &Latch) -> bool {
        let mut spins = 0;
        while latch.0.load(Ordering::Acquire) != 0 {
            if self.broken.load(Ordering::Relaxed) {
                return false;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        true
    }
}

/// Marks the region when dropped, which happens where its thread unwinds. (Asking whether the thread
/// is panicking would also be true of a call that a destructor makes during an outer panic.)
struct BreakOnPanic<'a>(&'a Region);

impl Drop for BreakOnPanic<'_> {
    fn drop(&mut self) {
        self.0.broken.store(true, Ordering::Relaxed);
    }
}

/// Opens when a number of tasks have been reported done. What they wrote is then visible.
pub(crate) struct Latch(AtomicUsize);

impl Latch {
    pub(crate) fn new(tasks: usize) -> Self {
        Self(AtomicUsize::new(tasks))
    }

    /// Reports one task. True for the last one, which then sees what all others wrote.
    #[inline]
    pub(crate) fn done(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::SpinPool;

    #[test]
    fn tasks_wait_for_earlier_ones_and_run_once() {
        let pool = SpinPool::new(2).unwrap();
        for _ in 0..200 {
            let latches: Vec<Latch> = (0..64).map(|_| Latch::new(1)).collect();
            let counts: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
            Region::run(&pool, 64, &|region| {
                while let Some(task) = region.take() {
                    if task > 0 {
                        assert!(region.wait(&latches[task - 1]));
                        assert_eq!(counts[task - 1].load(Ordering::Relaxed), 1);
                    }
                    counts[task].fetch_add(1, Ordering::Relaxed);
                    latches[task].done();
                }
            })
            .unwrap();
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_frees_those_who_wait() {
        let pool = SpinPool::new(2).unwrap();
        let never = Latch::new(1);
        let failed = Region::run(&pool, 8, &|region| {
            while let Some(task) = region.take() {
                if task == 0 {
                    panic!("task zero");
                }
                region.wait(&never);
            }
        });
        assert!(
            matches!(&failed, Err(CpuError::TaskPanic(panic)) if panic.message == "task zero"),
            "{failed:?}"
        );
    }
}
