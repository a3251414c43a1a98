//! Threads that a parallel region runs on.
//!
//! A region is one closure, called at the same time on the calling thread and on some workers;
//! it divides its work by pulling [`Tickets`]. [`Workers`] is the contract,
//! kept so weak that no caller can deadlock: *any* number of participants from one up is correct.
//!
//! ```text
//! caller   open ── body(0) ───────────── close ── wait for those inside ── return
//! worker 1      └─ body(1) ─────────┘
//! worker 2            └─ body(2) ──────────┘        (late, still inside at close)
//! worker 3                                   └─ finds it closed, touches nothing
//! ```
//!
//! [`SpinPool`] hands regions over fast, as its workers spin for a while after each one: until 16 of 16
//! threads of a virtual machine were in a region, 3.7 us passed, and 21 us with rayon (median;
//! `benches/benches/cpu_pool.rs`). [`RayonWorkers`] borrows the rayon pool that the caller runs in.

mod default;
mod on_rayon;
mod spin;
#[cfg(test)]
mod tests;
mod tickets;

pub use default::{MAX_THREADS, THREADS_VARIABLE, default_workers};
pub use on_rayon::RayonWorkers;
pub use spin::SpinPool;
pub use tickets::{Tickets, for_chunks};

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Something that runs parallel regions.
pub trait Workers: Send + Sync {
    /// The most participants that a region can have, the caller included; at least 1.
    fn threads(&self) -> usize;

    /// Calls `body(0)` on this thread and `body(i)`, for some of the `i` in `1..threads()`, on
    /// others at the same time, each `i` at most once. Returns when every call that was started
    /// has returned.
    ///
    /// How many take part depends on what the others are doing, so `body` must get all of the
    /// work done also where it is called only once. A region inside a region, or while
    /// the workers stay busy with another one, runs on the calling thread alone.
    ///
    /// # Errors
    /// [`TaskPanic`] if a call panicked; the others have finished by then, and the workers can be
    /// used again.
    fn run(&self, body: &(dyn Fn(usize) + Sync)) -> Result<(), TaskPanic>;
}

/// A parallel region whose body panicked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("participant {participant} of a parallel region panicked: {message}")]
pub struct TaskPanic {
    /// The index that the body was called with.
    pub participant: usize,
    /// What it said.
    pub message: String,
}

impl TaskPanic {
    fn new(participant: usize, payload: Box<dyn Any + Send>) -> Self {
        let message = match payload.downcast::<String>() {
            Ok(text) => *text,
            Err(payload) => match payload.downcast::<&'static str>() {
                Ok(text) => (*text).to_owned(),
                Err(payload) => {
                    // Its destructor could panic once more, outside of any catch.
                    std::mem::forget(payload);
                    "a payload that is no text".to_owned()
                }
            },
        };
        Self {
            participant,
            message,
        }
    }
}

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is executing the body of a region.
fn in_region() -> bool {
    IN_REGION.get()
}

/// Calls the body as one participant; a panic ends here.
fn participate(body: &(dyn Fn(usize) + Sync), participant: usize) -> Result<(), TaskPanic> {
    let outer = IN_REGION.replace(true);
    let result = catch_unwind(AssertUnwindSafe(|| body(participant)));
    IN_REGION.set(outer);
    result.map_err(|payload| TaskPanic::new(participant, payload))
}

/// A value with a cache line (and the neighbour that is prefetched with it) to itself.
#[repr(align(128))]
struct Line<T>(T);

/// A body that outlives its borrow in the type system only.
#[derive(Clone, Copy)]
struct Body(*const (dyn Fn(usize) + Sync + 'static));

// SAFETY: what it points to is Sync; the pointer is dereferenced through `get` alone.
unsafe impl Send for Body {}
// SAFETY: as above.
unsafe impl Sync for Body {}

impl Body {
    fn new<'a>(body: &'a (dyn Fn(usize) + Sync + 'a)) -> Self {
        let pointer: *const (dyn Fn(usize) + Sync + 'a) = body;
        // SAFETY: the two types differ in a lifetime bound only, and `get` demands that the
        // borrow still lasts.
        Self(unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + 'a),
                *const (dyn Fn(usize) + Sync + 'static),
            >(pointer)
        })
    }

    /// # Safety
    /// The borrow given to `new` must last as long as the result is used.
    unsafe fn get<'a>(self) -> &'a (dyn Fn(usize) + Sync) {
        // SAFETY: by the caller's promise the closure is alive.
        unsafe { &*self.0 }
    }
}

/// The process that owns some threads. A child after `fork` has the memory of its parent but
/// only the thread that forked: waiting for others there would never end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// The first process that asked, before any fork that copied the answer.
    fn first() -> Self {
        static FIRST: AtomicU32 = AtomicU32::new(0);
        let current = Self::current();
        match FIRST.compare_exchange(0, current.0, Relaxed, Relaxed) {
            Ok(_) => current,
            Err(first) => Self(first),
        }
    }

    /// Whether the calling thread is not in that process.
    pub(crate) fn left(self) -> bool {
        self != Self::current()
    }
}
