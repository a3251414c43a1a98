//! A pool of threads that wait for the next region by spinning, then asleep.
//!
//! # Protocol
//!
//! `state` is the number of the region and whether it is open. One caller at a time, the one that
//! has the `turn`, opens a region: it stores the body, then the new state. A worker that sees it
//! raises its own `inside` flag and *reads the state again*; only if that still says open does it
//! read the body. The caller closes the state, then waits until every flag is down. All four
//! accesses are sequentially consistent, so either the worker sees the region closed or
//! the caller sees the worker inside: the body is never called after `run` returned, and workers
//! that did not come in time are not waited for. Each flag has a cache line to itself, so that
//! entering costs a worker no turn in a queue for a shared counter.
//!
//! Sleeping is announced in a bit set by the same pattern: a worker sets its bit and looks at the state
//! once more before it parks; whoever opens or joins a region looks at the bits afterwards. The
//! caller wakes the first sleepers, and those, as they come, a few others each: on a machine of very many
//! CPUs the caller is not held up by a system call for every one of them.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::{Body, Line, MAX_THREADS, Process, TaskPanic, Workers, in_region, participate};
use crate::CpuError;
use crate::topology;

/// How long a worker spins for the next region before it gives up its CPU.
const SPIN: Duration = Duration::from_micros(100);
/// Looks at the state between two looks at the clock.
const LOOKS: u32 = 64;
/// Times it then offers its CPU to others before it sleeps.
const YIELDS: u32 = 8;
/// Sleepers that the caller wakes, at about 2 us each. A chain of wakes costs each thread in it
/// the time that its CPU takes to come out of idleness, which is far more.
const CALLER_WAKES: usize = 16;
/// Sleepers that a worker then wakes.
const WORKER_WAKES: usize = 4;
/// How long a caller waits for the region of another before it runs alone. A few layers' worth;
/// bounded, as the other region might wait for this caller.
const PATIENCE: Duration = Duration::from_millis(20);
/// Looks at a flag before the closing caller also yields and checks that it is still in its process.
const CLOSING_LOOKS: u32 = 2048;

/// Number of the region, and whether it is open; or the end of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State(u64);

impl State {
    const OPEN: u64 = 1;
    const STOP: Self = Self(u64::MAX - 1);

    fn region(self) -> u64 {
        self.0 >> 1
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn opened_next(self) -> Self {
        Self((self.region() + 1) << 1 | Self::OPEN)
    }

    fn closed(self) -> Self {
        Self(self.0 & !Self::OPEN)
    }

    /// Whether a worker that has seen the regions up to `seen` has something to do.
    fn concerns(self, seen: u64) -> bool {
        self == Self::STOP || self.is_open() && self.region() != seen
    }
}

pub(super) struct Shared {
    state: Line<AtomicU64>,
    /// Written with the turn while no worker is inside; read by workers inside.
    body: UnsafeCell<Option<Body>>,
    /// Worker `i` has flag `i - 1`.
    inside: Box<[Line<AtomicBool>]>,
    sleepers: Line<Box<[AtomicU64]>>,
    threads: OnceLock<Vec<Thread>>,
    panicked: AtomicBool,
    panic: Mutex<Option<TaskPanic>>,
}

// SAFETY: `body` is the only field that is not Sync by itself; the protocol above orders its
// writes and reads.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(workers: usize) -> Self {
        Self {
            state: Line(AtomicU64::new(0)),
            body: UnsafeCell::new(None),
            inside: (0..workers).map(|_| Line(AtomicBool::new(false))).collect(),
            sleepers: Line(
                (0..workers.div_ceil(64))
                    .map(|_| AtomicU64::new(0))
                    .collect(),
            ),
            threads: OnceLock::new(),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    fn state(&self) -> State {
        State(self.state.0.load(SeqCst))
    }

    /// Opens a region and wakes the first sleepers.
    ///
    /// # Safety
    /// The caller has the turn, the last region is closed with nobody inside, and `close` is called
    /// before the body's borrow ends.
    unsafe fn open(&self, body: &(dyn Fn(usize) + Sync)) {
        // SAFETY: nobody is inside, and who comes in reads only after the state below.
        unsafe { *self.body.get() = Some(Body::new(body)) };
        self.state.0.swap(self.state().opened_next().0, SeqCst);
        self.wake(CALLER_WAKES);
    }

    /// Closes the region and waits for those inside, except where a fork left them behind.
    fn close(&self, process: Process) {
        self.state.0.swap(self.state().closed().0, SeqCst);
        for Line(flag) in &self.inside {
            let mut looks = 0;
            while flag.load(SeqCst) {
                spin_loop();
                looks += 1;
                if looks == CLOSING_LOOKS {
                    if process.left() {
                        return;
                    }
                    thread::yield_now();
                    looks = 0;
                }
            }
        }
    }

    /// The first panic of a worker in the region just closed.
    fn take_panic(&self) -> Result<(), TaskPanic> {
        if !self.panicked.swap(false, Relaxed) {
            return Ok(());
        }
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

    fn keep_panic(&self, panic: TaskPanic) {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(panic);
        self.panicked.store(true, Relaxed);
    }

    /// Wakes up to `count` sleepers.
    fn wake(&self, mut count: usize) {
        for (index, word) in self.sleepers.0.iter().enumerate() {
            let mut bits = word.load(SeqCst);
            while bits != 0 {
                if count == 0 {
                    return;
                }
                let lowest = bits & bits.wrapping_neg();
                if word.fetch_and(!lowest, SeqCst) & lowest != 0
                    && let Some(threads) = self.threads.get()
                {
                    threads[index * 64 + lowest.trailing_zeros() as usize].unpark();
                    count -= 1;
                }
                bits &= !lowest;
            }
        }
    }

    /// The life of worker `index`.
    fn work(&self, index: usize) {
        let inside = &self.inside[index - 1].0;
        let mut seen = 0;
        while self.wait(seen, index - 1) != State::STOP {
            inside.swap(true, SeqCst);
            let state = self.state();
            if state.is_open() && state.region() != seen {
                seen = state.region();
                self.wake(WORKER_WAKES);
                // SAFETY: the region was open after the flag went up, so its body was stored, and
                // its caller waits for the flag to go down.
                let body = unsafe { (*self.body.get()).map(|body| body.get()) };
                if let Some(body) = body
                    && let Err(panic) = participate(body, index)
                {
                    self.keep_panic(panic);
                }
            }
            inside.store(false, Release);
        }
    }

    /// Waits for a region after `seen`, or for the end.
    fn wait(&self, seen: u64, slot: usize) -> State {
        let bit = 1u64 << (slot % 64);
        loop {
            let start = Instant::now();
            while start.elapsed() < SPIN {
                for _ in 0..LOOKS {
                    let state = State(self.state.0.load(Relaxed));
                    if state.concerns(seen) {
                        return state;
                    }
                    spin_loop();
                }
            }
            for _ in 0..YIELDS {
                thread::yield_now();
                let state = self.state();
                if state.concerns(seen) {
                    return state;
                }
            }
            let sleepers = &self.sleepers.0[slot / 64];
            sleepers.fetch_or(bit, SeqCst);
            if !self.state().concerns(seen) {
                // An early return, by a token left from before, only means another round.
                thread::park();
            }
            sleepers.fetch_and(!bit, SeqCst);
        }
    }
}

/// One caller at a time, with a bound on waiting for it.
#[derive(Default)]
struct Turn {
    queue: Mutex<Queue>,
    freed: Condvar,
}

#[derive(Default)]
struct Queue {
    taken: bool,
    waiting: usize,
}

impl Turn {
    fn take(&self, patience: Duration) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.taken {
            queue.waiting += 1;
            queue = self
                .freed
                .wait_timeout_while(queue, patience, |queue| queue.taken)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            queue.waiting -= 1;
        }
        !std::mem::replace(&mut queue.taken, true)
    }

    fn give_back(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.taken = false;
        if queue.waiting > 0 {
            self.freed.notify_one();
        }
    }
}

/// Threads of its own that spin for about 100 us after a region, so that the next one starts
/// within a microsecond, and sleep after that.
///
/// - The calling thread takes part: a pool of `n` starts `n - 1` threads.
/// - Callers on several threads take turns; one that waited 20 ms runs its region alone.
/// - In a child process after `fork` the pool has no threads, and regions run on the caller.
/// - Dropping the pool ends its threads.
pub struct SpinPool {
    pub(super) shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    turn: Turn,
    process: Process,
}

impl SpinPool {
    /// A pool of `threads` (1..=[`MAX_THREADS`]), the caller counted; not more than the CPUs in
    /// the affinity mask, as a spinning thread without a CPU holds up the others.
    ///
    /// # Errors
    /// [`CpuError::ThreadCount`], or [`CpuError::ThreadStart`] if the system refuses one.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(CpuError::ThreadCount {
                origin: "a pool",
                value: threads.to_string(),
            });
        }
        Self::start(threads.min(topology::affinity().len().max(1)))
    }

    /// A pool of one thread for each of `cpus`: worker `i` stays on `cpus[i]`. The first is left for the
    /// caller, which is not moved.
    ///
    /// # Errors
    /// [`CpuError::CpuUnavailable`] for a CPU that is outside of the affinity mask or
    /// named twice, and as [`SpinPool::new`].
    pub fn pinned(cpus: &[usize]) -> Result<Self, CpuError> {
        let allowed = topology::affinity();
        for (i, &cpu) in cpus.iter().enumerate() {
            if !allowed.contains(&cpu) || cpus[..i].contains(&cpu) {
                return Err(CpuError::CpuUnavailable { cpu });
            }
        }
        let pool = Self::new(cpus.len())?;
        for (handle, &cpu) in pool.handles.iter().zip(&cpus[1..]) {
            topology::pin(handle, cpu)?;
        }
        Ok(pool)
    }

    /// `threads` without a look at the CPUs there are.
    pub(super) fn start(threads: usize) -> Result<Self, CpuError> {
        let workers = threads - 1;
        let mut pool = Self {
            shared: Arc::new(Shared::new(workers)),
            handles: Vec::with_capacity(workers),
            turn: Turn::default(),
            process: Process::current(),
        };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            // Linux cuts names at 15 bytes.
            let handle = thread::Builder::new()
                .name(format!("asym-gemm-{index}"))
                .spawn(move || shared.work(index))
                .map_err(|error| CpuError::ThreadStart {
                    threads,
                    reason: error.to_string(),
                })?;
            pool.handles.push(handle);
        }
        let threads = pool.handles.iter().map(|handle| handle.thread().clone());
        pool.shared.threads.get_or_init(|| threads.collect());
        Ok(pool)
    }
}

impl Workers for SpinPool {
    fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) -> Result<(), TaskPanic> {
        let alone = self.handles.is_empty() || in_region() || self.process.left();
        if alone || !self.turn.take(PATIENCE) {
            return participate(body, 0);
        }
        // SAFETY: this thread has the turn, the last holder of it closed its region, and nothing
        // between here and `close` unwinds.
        unsafe { self.shared.open(body) };
        let own = participate(body, 0);
        self.shared.close(self.process);
        if self.process.left() {
            // The body forked: the locks below may be held by threads that are not here.
            return own;
        }
        let others = self.shared.take_panic();
        self.turn.give_back();
        own.and(others)
    }
}

impl Drop for SpinPool {
    fn drop(&mut self) {
        let handles = std::mem::take(&mut self.handles);
        if self.process.left() {
            // Neither joined nor detached: they are not threads of this process.
            std::mem::forget(handles);
            return;
        }
        self.shared.state.0.swap(State::STOP.0, SeqCst);
        for handle in &handles {
            handle.thread().unpark();
        }
        for handle in handles {
            // A worker catches the panics of its bodies; there is nothing else to hear from it.
            let _ = handle.join();
        }
    }
}
