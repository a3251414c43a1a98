//! Buffers that tasks of one region write and read in parts.

use std::marker::PhantomData;

/// Borrows a slice for use by several threads. Who may touch which element when is decided
/// by the tasks and latches of a region.
pub(crate) struct Shared<'a, T> {
    base: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are reached only through `read` and `write`, whose contracts forbid races.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            base: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// Elements `start..start + count`.
    ///
    /// # Safety
    /// While the result lives nobody writes any of them, and earlier writes by other threads
    /// happened before this call (a latch was waited for).
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[inline(always)]
    pub(crate) unsafe fn read(&self, start: usize, count: usize) -> &[T] {
        self.check(start, count);
        // SAFETY: in bounds, checked above; not written meanwhile, by this function's contract.
        unsafe { std::slice::from_raw_parts(self.base.add(start), count) }
    }

    /// All elements.
    ///
    /// # Safety
    /// As [`Shared::read`].
    #[inline(always)]
    pub(crate) unsafe fn read_all(&self) -> &[T] {
        // SAFETY: passed on from the caller.
        unsafe { self.read(0, self.len) }
    }

    /// Elements `start..start + count`, to write.
    ///
    /// # Safety
    /// While the result lives nobody else reads or writes any of them.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's duty")]
    pub(crate) unsafe fn write(&self, start: usize, count: usize) -> &mut [T] {
        self.check(start, count);
        // SAFETY: in bounds, checked above; not aliased, by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), count) }
    }

    #[inline(always)]
    fn check(&self, start: usize, count: usize) {
        assert!(
            start <= self.len && count <= self.len - start,
            "elements {start}..+{count} of {}",
            self.len
        );
    }
}
