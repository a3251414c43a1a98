//! Host memory that the GPU reads at the link's full rate and the CPU as its own.
//!
//! The pages are mapped, given to the node of the GPU, backed by huge pages where the
//! system has them and touched from several threads before they are registered with the
//! driver: that is faster than to let the driver fault them in, and huge pages serve the
//! CPU's streams of weights too. Never write-combined: the CPU would read such memory
//! uncached.

use std::ffi::{c_int, c_void};
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::thread;

use cust::sys::CUdeviceptr;

use super::error::{DriverError, invalid};
use super::gpu::{Context, Gpu};
use crate::system::{LockLimit, Memory, NumaNodes, Threads};

// CU_MEMHOSTREGISTER_* and CU_MEMHOSTALLOC_* share these values (cuda.h).
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;

const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// A thread that touches less than this costs more to start than it saves.
const TOUCH_BYTES_PER_THREAD: usize = 64 << 20;
const MAX_TOUCH_THREADS: usize = 16;

/// Pinned host memory, mapped for the device; zero at first.
pub struct PinnedBuffer {
    context: Arc<Context>,
    device_pointer: CUdeviceptr,
    memory: HostMemory,
}

enum HostMemory {
    /// Nothing was asked for.
    Empty,
    /// Our mapping, registered with the driver.
    Registered(Mapping),
    /// The driver's allocation.
    Driver { pointer: NonNull<u8>, len: usize },
    /// Somebody else's memory, registered with the driver.
    Borrowed { pointer: NonNull<u8>, len: usize },
}

// SAFETY: the memory is owned (or lent for the buffer's life) and reached through `&self`
// and `&mut self` only; the driver handles are usable from any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as for Send; `&self` gives shared reads only.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Pins `bytes` of zeroed memory on the NUMA node of the GPU.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] (`"pinned host"`) if the system has not that much
    /// memory available or the driver refuses to pin it; its text has the available
    /// memory and the lock limit.
    pub fn alloc(gpu: &Gpu, bytes: usize) -> Result<Self, DriverError> {
        Self::alloc_on(gpu, bytes, gpu.numa_node())
    }

    /// As [`PinnedBuffer::alloc`], on another NUMA node; `None` leaves it to the system.
    ///
    /// # Errors
    ///
    /// As [`PinnedBuffer::alloc`].
    pub fn alloc_on(gpu: &Gpu, bytes: usize, node: Option<u32>) -> Result<Self, DriverError> {
        let mut buffer = Self {
            context: Arc::clone(gpu.context()),
            device_pointer: 0,
            memory: HostMemory::Empty,
        };
        if bytes == 0 {
            return Ok(buffer);
        }
        // Touching more than there is would bring the kernel's killer, not an error.
        if let Some(available) = Memory::read().usable_bytes().filter(|&a| a < bytes as u64) {
            return Err(refused(bytes, format!("{available} bytes available")));
        }
        let mapping = Mapping::new(bytes)
            .map_err(|error| refused(bytes, format!("mapping it failed: {error}")))?;
        if let Some(node) = node.filter(|_| NumaNodes::read().count() > 1)
            && let Err(error) = mapping.prefer_node(node)
        {
            tracing::warn!(node, %error, "pinned memory could not be bound to the GPU's node");
        }
        mapping.touch();
        let driver = gpu.context().driver;
        let _current = gpu.enter()?;
        // SAFETY: the range is mapped, page-aligned and lives until it is unregistered.
        let code = unsafe {
            (driver.api.host_register)(
                mapping.pointer().cast().as_ptr(),
                mapping.registered_bytes(),
                PORTABLE | DEVICE_MAP,
            )
        };
        buffer.memory = match driver.check("cuMemHostRegister", code) {
            Ok(()) => HostMemory::Registered(mapping),
            Err(registering) => {
                drop(mapping);
                tracing::warn!(bytes, error = %registering, "registering host memory failed: \
                     the driver allocates it");
                allocate_by_driver(gpu, bytes)
                    .map_err(|allocating| refused(bytes, format!("{registering}; {allocating}")))?
            }
        };
        buffer.device_pointer = buffer.find_device_pointer()?;
        Ok(buffer)
    }

    /// Pins memory that somebody else owns, for as long as the buffer lives.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] (`"pinned host"`) if the driver refuses to pin it;
    /// [`DriverError::InvalidArgument`] for a null pointer or no bytes.
    ///
    /// # Safety
    ///
    /// `pointer..pointer + bytes` is mapped, initialised memory that stays so for the
    /// buffer's life, that no other registration overlaps, and that nothing else reads or
    /// writes while a `&mut` to this buffer is used, or writes while a `&` is.
    pub unsafe fn register(gpu: &Gpu, pointer: *mut u8, bytes: usize) -> Result<Self, DriverError> {
        let start = NonNull::new(pointer)
            .filter(|_| (1..=isize::MAX as usize).contains(&bytes))
            .ok_or_else(|| invalid("PinnedBuffer::register", "the range is empty"))?;
        let driver = gpu.context().driver;
        let _current = gpu.enter()?;
        // SAFETY: the caller keeps the range mapped for the buffer's life.
        let code =
            unsafe { (driver.api.host_register)(pointer.cast(), bytes, PORTABLE | DEVICE_MAP) };
        driver
            .check("cuMemHostRegister", code)
            .map_err(|error| refused(bytes, error.to_string()))?;
        let mut buffer = Self {
            context: Arc::clone(gpu.context()),
            device_pointer: 0,
            memory: HostMemory::Borrowed {
                pointer: start,
                len: bytes,
            },
        };
        buffer.device_pointer = buffer.find_device_pointer()?;
        Ok(buffer)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            HostMemory::Empty => 0,
            HostMemory::Registered(mapping) => mapping.len,
            HostMemory::Driver { len, .. } | HostMemory::Borrowed { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn host_pointer(&self) -> NonNull<u8> {
        match &self.memory {
            HostMemory::Empty => NonNull::dangling(),
            HostMemory::Registered(mapping) => mapping.pointer(),
            HostMemory::Driver { pointer, .. } | HostMemory::Borrowed { pointer, .. } => *pointer,
        }
    }

    /// The host address.
    pub fn as_ptr(&self) -> *const u8 {
        self.host_pointer().as_ptr()
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes (zeroed when mapped or allocated) live as long
        // as `self`; device writes are the launching caller's to order.
        unsafe { std::slice::from_raw_parts(self.host_pointer().as_ptr(), self.len()) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the reference the only one.
        unsafe { std::slice::from_raw_parts_mut(self.host_pointer().as_ptr(), self.len()) }
    }

    /// The address under which kernels and copies of every GPU of the process reach the
    /// memory; 0 if it is empty.
    pub fn device_ptr(&self) -> u64 {
        self.device_pointer
    }

    fn find_device_pointer(&self) -> Result<CUdeviceptr, DriverError> {
        let driver = self.context.driver;
        let mut pointer: CUdeviceptr = 0;
        // SAFETY: the pointer is to a live handle, and the memory was just registered or
        // allocated with the device-map flag in the current context.
        let code = unsafe {
            (driver.api.host_device_pointer)(&mut pointer, self.host_pointer().as_ptr().cast(), 0)
        };
        driver.check("cuMemHostGetDevicePointer", code)?;
        Ok(pointer)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let pointer: *mut c_void = self.host_pointer().as_ptr().cast();
        let memory = std::mem::replace(&mut self.memory, HostMemory::Empty);
        let released = self.context.enter_to_release().is_some_and(|_current| {
            let driver = self.context.driver;
            let (call, code) = match &memory {
                HostMemory::Empty => return true,
                HostMemory::Registered(_) | HostMemory::Borrowed { .. } => {
                    // SAFETY: registered when the buffer was made, and unregistered once;
                    // our mapping is unmapped after this.
                    ("cuMemHostUnregister", unsafe {
                        (driver.api.host_unregister)(pointer)
                    })
                }
                HostMemory::Driver { .. } => {
                    // SAFETY: allocated by cuMemHostAlloc and freed once.
                    ("cuMemFreeHost", unsafe { (driver.api.host_free)(pointer) })
                }
            };
            driver.log_failure(call, code);
            code == 0
        });
        if !released {
            // The device may still reach it: better lost than unmapped under its hands.
            std::mem::forget(memory);
        }
    }
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("len", &self.len())
            .field("device_ptr", &format_args!("{:#x}", self.device_pointer))
            .finish_non_exhaustive()
    }
}

/// The way out when registering is refused (some virtual machines): the driver decides
/// where the pages lie. Called with the context current.
fn allocate_by_driver(gpu: &Gpu, bytes: usize) -> Result<HostMemory, DriverError> {
    let driver = gpu.context().driver;
    let mut pointer: *mut c_void = ptr::null_mut();
    // SAFETY: the pointer is to a live pointer.
    let code = unsafe { (driver.api.host_alloc)(&mut pointer, bytes, PORTABLE | DEVICE_MAP) };
    driver.check("cuMemHostAlloc", code)?;
    let pointer = NonNull::new(pointer.cast::<u8>())
        .ok_or_else(|| invalid("cuMemHostAlloc", "the driver returned a null pointer"))?;
    // SAFETY: the driver has just allocated `bytes` bytes there for us alone.
    unsafe { pointer.write_bytes(0, bytes) };
    Ok(HostMemory::Driver {
        pointer,
        len: bytes,
    })
}

fn refused(bytes: usize, why: String) -> DriverError {
    DriverError::OutOfMemory {
        what: "pinned host",
        bytes: bytes as u64,
        detail: format!("{why}; lock limit {}", LockLimit::read()),
    }
}

/// An anonymous mapping whose start is aligned to a huge page.
struct Mapping {
    base: NonNull<u8>,
    mapped_bytes: usize,
    skip: usize,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let mapped_bytes = len
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|bytes| bytes.checked_add(HUGE_PAGE_BYTES))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new anonymous mapping at an address of the system's choice.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let address = base.addr().get();
        let mapping = Self {
            base,
            mapped_bytes,
            skip: address.next_multiple_of(HUGE_PAGE_BYTES) - address,
            len,
        };
        // SAFETY: the range lies in the mapping; the advice changes no contents. Where the
        // system has no huge pages it is refused, and small ones do.
        unsafe {
            libc::madvise(
                mapping.pointer().as_ptr().cast(),
                mapping.registered_bytes(),
                libc::MADV_HUGEPAGE,
            );
        }
        Ok(mapping)
    }

    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: `skip` is below the huge page by which the mapping is longer than `len`.
        unsafe { self.base.add(self.skip) }
    }

    /// Whole pages from `pointer` on.
    fn registered_bytes(&self) -> usize {
        self.len.next_multiple_of(PAGE_BYTES)
    }

    /// Asks for the pages, none of which is there yet, on one node; others serve when it
    /// is full.
    fn prefer_node(&self, node: u32) -> io::Result<()> {
        let mut mask = [0u64; 16];
        let word = mask
            .get_mut(node as usize / 64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word = 1 << (node % 64);
        // SAFETY: the range lies in the mapping and the mask has the stated number of bits
        // (the system call counts one more than it reads).
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.pointer().as_ptr(),
                self.registered_bytes(),
                libc::MPOL_PREFERRED as c_int,
                mask.as_ptr(),
                mask.len() * 64 + 1,
                0,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Brings every page in, zeroed, from several threads.
    fn touch(&self) {
        let bytes = self.registered_bytes();
        let threads = (bytes / TOUCH_BYTES_PER_THREAD)
            .clamp(1, Threads::read().default_count().min(MAX_TOUCH_THREADS));
        thread::scope(|scope| {
            for range in shares(bytes, threads) {
                let part = PartPointer(self.pointer());
                scope.spawn(move || part.touch(range));
            }
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping made in `new`, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// The mapping's start on its way to a touching thread.
#[derive(Clone, Copy)]
struct PartPointer(NonNull<u8>);

// SAFETY: threads write disjoint ranges of a mapping that outlives their scope.
unsafe impl Send for PartPointer {}

impl PartPointer {
    fn touch(self, range: Range<usize>) {
        for offset in range.step_by(PAGE_BYTES) {
            // SAFETY: `shares` covers the mapped range and no more. Zero is what the page
            // holds; volatile, so that the write stays.
            unsafe { self.0.add(offset).write_volatile(0) };
        }
    }
}

/// Divides `bytes` among threads at huge-page boundaries.
fn shares(bytes: usize, threads: usize) -> impl Iterator<Item = Range<usize>> {
    let share = bytes.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
    (0..bytes)
        .step_by(share)
        .map(move |start| start..(start + share).min(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_range_once_at_huge_page_boundaries() {
        for bytes in [
            1,
            4096,
            HUGE_PAGE_BYTES,
            3 * HUGE_PAGE_BYTES + 4096,
            1 << 30,
        ] {
            for threads in [1, 2, 3, 7, 16] {
                let mut end = 0;
                let mut count = 0;
                for share in shares(bytes, threads) {
                    assert_eq!(share.start, end);
                    assert!(share.start.is_multiple_of(HUGE_PAGE_BYTES));
                    end = share.end;
                    count += 1;
                }
                assert_eq!(end, bytes, "{bytes} over {threads}");
                assert!(count <= threads);
            }
        }
    }

    #[test]
    fn a_mapping_is_aligned_zeroed_and_writable_to_its_last_byte() {
        for len in [1, 4095, 4096, 4097, 5 * HUGE_PAGE_BYTES + 3] {
            let mapping = Mapping::new(len).expect("mapping is small");
            mapping.touch();
            assert!(
                mapping
                    .pointer()
                    .addr()
                    .get()
                    .is_multiple_of(HUGE_PAGE_BYTES)
            );
            // SAFETY: the mapping has `len` zeroed bytes and is this test's alone.
            let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.pointer().as_ptr(), len) };
            assert!(bytes.iter().all(|&b| b == 0));
            bytes[len - 1] = 7;
            assert_eq!(bytes[len - 1], 7);
        }
    }

    #[test]
    fn an_absurd_length_is_an_error() {
        for len in [
            usize::MAX,
            isize::MAX as usize,
            isize::MAX as usize - PAGE_BYTES,
        ] {
            assert!(Mapping::new(len).is_err());
        }
    }

    #[test]
    fn a_refusal_names_pinned_host_memory_with_its_limits() {
        let text = refused(1 << 40, "5 bytes available".into()).to_string();
        assert!(text.contains("pinned host memory"), "{text}");
        assert!(text.contains("1099511627776"), "{text}");
        assert!(text.contains("5 bytes available; lock limit"), "{text}");
    }
}
