//! Transaction barriers in shared memory.

use core::arch::asm;

/// Waits longer than this many tries end in a trap: a lost signal must not hang the GPU.
/// A try suspends the thread for up to about a microsecond, so this is minutes.
const MAX_TRIES: u32 = 1 << 27;

/// Initialises the barrier at `bar` for `count` arrivals.
///
/// # Safety
/// `bar` must be 8 bytes of shared memory, aligned, that nobody uses yet.
#[inline(always)]
pub(crate) unsafe fn init(bar: u32, count: u32) {
    // SAFETY: the caller owns the barrier's memory.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) bar, in(reg32) count, options(nostack));
    }
}

/// Makes initialisations visible to the async proxy; a block barrier must follow.
#[inline(always)]
pub(crate) fn fence_init() {
    // SAFETY: a fence touches no memory of ours.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}

/// Arrives once and announces `bytes` of asynchronous copies.
///
/// # Safety
/// `bar` must be an initialised barrier and `bytes` what the copies really bring,
/// zero-filled parts included; otherwise waiters hang.
#[inline(always)]
pub(crate) unsafe fn arrive_expect_bytes(bar: u32, bytes: u32) {
    // SAFETY: the caller gives a live barrier.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};",
             in(reg32) bar, in(reg32) bytes, options(nostack));
    }
}

/// Arrives once.
///
/// # Safety
/// `bar` must be an initialised barrier.
#[inline(always)]
pub(crate) unsafe fn arrive(bar: u32) {
    // SAFETY: the caller gives a live barrier.
    unsafe {
        asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) bar, options(nostack));
    }
}

/// Waits until the phase of parity `parity` is complete.
///
/// # Safety
/// `bar` must be an initialised barrier.
#[inline(always)]
pub(crate) unsafe fn wait(bar: u32, parity: u32) {
    // SAFETY: the caller gives a live barrier; the trap ends the kernel with an error that
    // the host sees. A loop in asm stays one loop: LLVM would unroll it.
    unsafe {
        asm!("{{", ".reg .pred p;", ".reg .b32 tries;", "mov.b32 tries, 0;",
             "$$again:",
             "mbarrier.try_wait.parity.shared::cta.b64 p, [{0}], {1};",
             "@p bra $$done;",
             "add.u32 tries, tries, 1;",
             "setp.lt.u32 p, tries, {2};",
             "@p bra $$again;",
             "trap;",
             "$$done:", "}}",
             in(reg32) bar, in(reg32) parity, const MAX_TRIES, options(nostack));
    }
}

/// Arrives once when this thread's `cp.async` copies so far have landed. Counts as one of the
/// barrier's arrivals.
///
/// # Safety
/// `bar` must be an initialised barrier.
#[inline(always)]
pub(crate) unsafe fn arrive_after_copies(bar: u32) {
    // SAFETY: the caller gives a live barrier.
    unsafe {
        asm!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{0}];", in(reg32) bar, options(nostack));
    }
}
