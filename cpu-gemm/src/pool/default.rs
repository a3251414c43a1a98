//! The pool that calls use when they are given none.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{Process, SpinPool, Workers};
use crate::CpuError;
use crate::topology;

/// Environment variable with the number of threads of [`default_workers`].
pub const THREADS_VARIABLE: &str = "ASYM_GEMM_THREADS";

/// The most threads that a pool accepts; no machine of today has as many cores.
pub const MAX_THREADS: usize = 1024;

/// The pool of this process, started by the first call: a [`SpinPool`] of
/// [`topology::default_threads`] or, where it is set and not empty, of `ASYM_GEMM_THREADS`. A child
/// process after `fork` gets a pool of its own.
///
/// # Errors
/// [`CpuError::ThreadCount`] if the variable holds anything but 1..=1024, and
/// [`CpuError::ThreadStart`]; a later call tries again.
pub fn default_workers() -> Result<Arc<dyn Workers>, CpuError> {
    struct Entry {
        process: Process,
        pool: Arc<SpinPool>,
    }
    // Not a lock, which a fork could leave taken. Entries are never freed: the current one lives as
    // long as the process, and a child must not touch the threads of its parent's.
    static CURRENT: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());

    loop {
        let found = CURRENT.load(Ordering::Acquire);
        // SAFETY: the pointer is null or came from Box::leak below.
        if let Some(entry) = unsafe { found.as_ref() }
            && !entry.process.left()
        {
            return Ok(Arc::clone(&entry.pool) as Arc<dyn Workers>);
        }
        let entry = Box::new(Entry {
            process: Process::current(),
            pool: Arc::new(SpinPool::new(configured_threads()?)?),
        });
        let entry = Box::into_raw(entry);
        let stored = CURRENT.compare_exchange(found, entry, Ordering::AcqRel, Ordering::Acquire);
        if stored.is_err() {
            // Another thread was first.
            // SAFETY: from Box::into_raw above, and never published.
            drop(unsafe { Box::from_raw(entry) });
        }
    }
}

fn configured_threads() -> Result<usize, CpuError> {
    match std::env::var_os(THREADS_VARIABLE) {
        Some(text) if !text.is_empty() => parse_threads(&text.to_string_lossy()),
        _ => Ok(topology::default_threads().min(MAX_THREADS)),
    }
}

fn parse_threads(text: &str) -> Result<usize, CpuError> {
    text.trim()
        .parse()
        .ok()
        .filter(|threads| (1..=MAX_THREADS).contains(threads))
        .ok_or_else(|| CpuError::ThreadCount {
            origin: THREADS_VARIABLE,
            value: text.to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_holds_1_to_1024() {
        assert_eq!(parse_threads("1"), Ok(1));
        assert_eq!(parse_threads(" 16 "), Ok(16));
        assert_eq!(parse_threads("1024"), Ok(1024));
        for bad in ["0", "1025", "-1", "x", "1.5", "99999999999999999999"] {
            let error = parse_threads(bad).expect_err(bad);
            assert!(error.to_string().contains(THREADS_VARIABLE), "{error}");
            assert!(error.to_string().contains(bad), "{error}");
        }
    }

    #[test]
    fn callers_share_one_pool() {
        let first = default_workers().expect("threads can be started");
        let second = default_workers().expect("threads can be started");
        assert!(Arc::ptr_eq(&first, &second));
        assert!(first.threads() <= topology::affinity().len());
    }
}
