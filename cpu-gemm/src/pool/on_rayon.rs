//! Regions on the rayon pool of the caller.
//!
//! The helpers are detached tasks that share ownership of the region, not tasks of a scope: a scope
//! waits for tasks that no thread has started, and the threads that should start them may be
//! waiting for the caller. A task that starts late finds the region closed.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Body, Process, TaskPanic, Workers, in_region, participate};

/// Tasks that may wait in rayon's queues, for each of its threads. More than a few appear only
/// where the pool's threads are blocked; regions then run with fewer.
const QUEUED_TASKS: usize = 16;

/// The rayon pool that the caller runs in (`ThreadPool::install`), else the global one.
///
/// rayon does not survive a `fork`: its pools have no threads in the child, and locks that they held
/// stay locked. In a process whose parent has used this type, regions run on the caller.
pub struct RayonWorkers {
    process: Process,
    queued: Arc<AtomicUsize>,
}

impl RayonWorkers {
    /// Starts nothing: the pool is looked up by each call.
    pub fn new() -> Self {
        Self {
            process: Process::first(),
            queued: Arc::new(AtomicUsize::new(0)),
        }
    }
}

impl Default for RayonWorkers {
    fn default() -> Self {
        Self::new()
    }
}

impl Workers for RayonWorkers {
    fn threads(&self) -> usize {
        if self.process.left() {
            // Not even this question is safe to ask.
            1
        } else {
            rayon::current_num_threads()
        }
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) -> Result<(), TaskPanic> {
        let threads = self.threads();
        if threads == 1 || in_region() {
            return participate(body, 0);
        }
        let region = Arc::new(Region::new(body));
        for participant in 1..threads {
            if self.queued.fetch_add(1, Relaxed) >= threads * QUEUED_TASKS {
                self.queued.fetch_sub(1, Relaxed);
                break;
            }
            let (region, queued) = (Arc::clone(&region), Arc::clone(&self.queued));
            rayon::spawn(move || {
                queued.fetch_sub(1, Relaxed);
                region.join(participant);
            });
        }
        let own = participate(body, 0);
        region.close(self.process);
        if self.process.left() {
            return own;
        }
        own.and(region.panic())
    }
}

/// One region: `state` counts who is inside, and has [`Region::CLOSED`] added when it is over.
struct Region {
    state: AtomicUsize,
    body: Body,
    panic: Mutex<Option<TaskPanic>>,
}

impl Region {
    const CLOSED: usize = 1 << (usize::BITS - 1);

    fn new(body: &(dyn Fn(usize) + Sync)) -> Self {
        Self {
            state: AtomicUsize::new(0),
            body: Body::new(body),
            panic: Mutex::new(None),
        }
    }

    fn join(&self, participant: usize) {
        if self.state.fetch_add(1, AcqRel) & Self::CLOSED == 0 {
            // SAFETY: counted before the region closed, so its caller waits for the count to fall.
            let body = unsafe { self.body.get() };
            if let Err(panic) = participate(body, participant) {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(panic);
            }
        }
        self.state.fetch_sub(1, AcqRel);
    }

    /// Lets nobody in any more and waits for those inside, except where a fork left them behind.
    fn close(&self, process: Process) {
        const LOOKS: u32 = 2048;
        self.state.fetch_or(Self::CLOSED, AcqRel);
        let mut looks = 0;
        while self.state.load(Acquire) != Self::CLOSED {
            spin_loop();
            looks += 1;
            if looks == LOOKS {
                if process.left() {
                    return;
                }
                std::thread::yield_now();
                looks = 0;
            }
        }
    }

    fn panic(&self) -> Result<(), TaskPanic> {
        match self
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            Some(panic) => Err(panic),
            None => Ok(()),
        }
    }
}
