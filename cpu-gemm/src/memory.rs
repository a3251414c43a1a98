//! Large blocks of memory.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::CpuError;
use crate::pool::{Workers, for_chunks};

/// Huge pages of x86-64; also a good alignment elsewhere.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed bytes that start at a multiple of 2 MiB, in huge pages where the system grants them: a
/// stream through weights then misses the TLB once in 2 MiB, not once in 4 KiB.
#[derive(Debug)]
pub struct HugeBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory, like a Box<[u8]>.
unsafe impl Send for HugeBuffer {}
// SAFETY: as above.
unsafe impl Sync for HugeBuffer {}

impl HugeBuffer {
    /// `len` bytes, each page written first by the participant in whose range of the buffer it
    /// lies: on a NUMA machine that places it.
    ///
    /// # Errors
    /// [`CpuError::Memory`] where the system has not so much. (Systems that promise more than they have
    /// end the process instead: ask what is available before.)
    pub fn zeroed(workers: &dyn Workers, len: usize) -> Result<Self, CpuError> {
        let refused = CpuError::Memory { bytes: len };
        let layout = Self::layout(len).ok_or(refused.clone())?;
        // SAFETY: the layout is at least one page, so not empty.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(refused)?;
        let buffer = Self { start, len };
        // SAFETY: the allocation has as many bytes, and uninitialised is what they are.
        let pages = unsafe {
            std::slice::from_raw_parts_mut(start.as_ptr().cast::<MaybeUninit<u8>>(), layout.size())
        };
        advise_huge(pages);
        let bytes = &mut pages[..len];
        for_chunks(workers, bytes, HUGE_PAGE, |_, chunk| {
            chunk.fill(MaybeUninit::new(0));
        })?;
        Ok(buffer)
    }

    /// Whole huge pages: the kernel gives one only where all of it belongs to the mapping.
    fn layout(len: usize) -> Option<Layout> {
        let size = len.max(1).checked_next_multiple_of(HUGE_PAGE)?;
        Layout::from_size_align(size, HUGE_PAGE).ok()
    }
}

/// Asks for huge pages for the whole ones in `memory`, which should not have been touched yet.
#[cfg(target_os = "linux")]
pub(crate) fn advise_huge<T>(memory: &mut [T]) {
    let skipped = memory.as_ptr().cast::<u8>().align_offset(HUGE_PAGE);
    let size = size_of_val(memory).saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
    if size > 0 {
        let start = memory.as_mut_ptr().cast::<u8>().wrapping_add(skipped);
        // SAFETY: whole pages inside one allocation. Advice: a refusal changes nothing.
        unsafe { libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn advise_huge<T>(_: &mut [T]) {}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `zeroed` with this layout, which the length determines.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

impl Deref for HugeBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `zeroed` initialised all bytes before it gave the buffer away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for HugeBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::SpinPool;

    #[test]
    fn buffers_are_zeroed_aligned_and_writable() {
        let pool = SpinPool::new(2).expect("threads can be started");
        for len in [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 77] {
            let mut buffer = HugeBuffer::zeroed(&pool, len).expect("the memory is there");
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&byte| byte == 0));
            assert!(buffer.as_ptr().addr().is_multiple_of(HUGE_PAGE));
            buffer.fill(7);
            assert!(buffer.iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let pool = SpinPool::new(1).expect("no threads to start");
        for bytes in [usize::MAX, isize::MAX as usize] {
            let refused = HugeBuffer::zeroed(&pool, bytes).map(|buffer| buffer.len());
            assert_eq!(refused, Err(CpuError::Memory { bytes }));
        }
    }
}
