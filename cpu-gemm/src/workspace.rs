//! Memory that calls reuse.

use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use crate::memory::advise_huge;
use crate::pool::Process;

/// One cache line.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory that grows and starts at a cache line. It keeps what an earlier call left in it.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `len` elements, of unspecified value.
    pub(crate) fn take<T: Pod>(&mut self, len: usize) -> &mut [T] {
        const {
            assert!(64 % size_of::<T>() == 0 && align_of::<T>() <= 64);
        }
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        if self.0.len() < lines {
            // Not `resize`: nothing of the old contents needs copying. Zero pages come unmapped, so
            // that it is not too late to ask for huge ones.
            self.0 = Vec::new();
            self.0 = bytemuck::allocation::zeroed_vec(lines);
            advise_huge(&mut self.0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}

/// The buffers of one running call.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Rounded rows of x.
    pub(crate) codes: Buffer,
    pub(crate) scales: Buffer,
    pub(crate) sums: Buffer,
    /// x by groups of 16 tokens.
    pub(crate) x: GroupBuffers,
    /// h by groups of 16 tokens.
    pub(crate) h: GroupBuffers,
    /// h before rounding, where a slice is divided among tasks.
    pub(crate) staged: Buffer,
    /// Unweighted expert outputs.
    pub(crate) y: Buffer,
}

/// Groups of 16 tokens.
#[derive(Default)]
pub(crate) struct GroupBuffers {
    pub(crate) bytes: Buffer,
    pub(crate) scales: Buffer,
    pub(crate) sums: Buffer,
}

/// Workspaces that are not in use. Calls at the same time have one each; a call after
/// another finds its memory mapped.
#[derive(Clone)]
pub(crate) struct Workspaces {
    process: Process,
    free: Arc<Mutex<Vec<Workspace>>>,
}

impl Default for Workspaces {
    fn default() -> Self {
        Self {
            process: Process::current(),
            free: Arc::default(),
        }
    }
}

impl Workspaces {
    /// Runs `call` with a workspace of its own.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Workspace) -> R) -> R {
        let free = self.free().and_then(|mut free| free.pop());
        let mut workspace = free.unwrap_or_default();
        let result = call(&mut workspace);
        if let Some(mut free) = self.free() {
            free.push(workspace);
        }
        result
    }

    /// The free ones, if they can be had: no more after a panic under the lock, and maybe not in a
    /// child process, where a thread that does not exist there can hold it for ever.
    fn free(&self) -> Option<MutexGuard<'_, Vec<Workspace>>> {
        if self.process.left() {
            self.free.try_lock().ok()
        } else {
            self.free.lock().ok()
        }
    }
}

impl std::fmt::Debug for Workspaces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspaces").finish_non_exhaustive()
    }
}
