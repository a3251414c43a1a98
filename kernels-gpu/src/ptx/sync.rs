//! Barriers, shuffles and register reallocation.

use core::arch::asm;

/// Waits for `THREADS` threads at the named barrier `ID`; 0 is the block's.
///
/// # Safety
/// All threads that take part must arrive, warp by warp converged.
#[inline(always)]
pub(crate) unsafe fn barrier_wait<const ID: u32, const THREADS: u32>() {
    // SAFETY: the caller keeps the arrival rule.
    unsafe { asm!("bar.sync {0}, {1};", const ID, const THREADS, options(nostack)) }
}

/// Arrives at the named barrier `ID` of `THREADS` threads, and does not wait.
///
/// # Safety
/// As [`barrier_wait`].
#[inline(always)]
pub(crate) unsafe fn barrier_arrive<const ID: u32, const THREADS: u32>() {
    // SAFETY: the caller keeps the arrival rule.
    unsafe { asm!("bar.arrive {0}, {1};", const ID, const THREADS, options(nostack)) }
}

/// Waits for all lanes of the warp and orders their accesses to memory.
///
/// # Safety
/// All 32 lanes must arrive.
#[inline(always)]
pub(crate) unsafe fn warp() {
    // SAFETY: the caller keeps the arrival rule.
    unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) }
}

/// Lane 0's value in every lane.
///
/// # Safety
/// The whole warp must be converged.
#[inline(always)]
pub(crate) unsafe fn broadcast_lane0(value: u32) -> u32 {
    let result: u32;
    // SAFETY: the caller keeps the warp converged.
    unsafe {
        asm!("shfl.sync.idx.b32 {0}, {1}, 0, 31, 0xffffffff;",
             out(reg32) result, in(reg32) value, options(nostack));
    }
    result
}

/// The value of the lane whose index differs in the bits of `MASK`.
///
/// # Safety
/// The whole warp must be converged.
#[inline(always)]
pub(crate) unsafe fn shuffle_xor<const MASK: u32>(value: u32) -> u32 {
    let result: u32;
    // SAFETY: the caller keeps the warp converged.
    unsafe {
        asm!("shfl.sync.bfly.b32 {0}, {1}, {2}, 31, 0xffffffff;",
             out(reg32) result, in(reg32) value, const MASK, options(nostack));
    }
    result
}

/// Gives registers back: at most `N` a thread from here on.
///
/// # Safety
/// All warps of the warpgroup must execute it, converged.
#[inline(always)]
pub(crate) unsafe fn registers_down<const N: u32>() {
    // SAFETY: the caller keeps the warpgroup converged.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const N, options(nostack)) }
}

/// Takes registers, waiting until they are free: `N` a thread from here on.
///
/// # Safety
/// All warps of the warpgroup must execute it, converged.
#[inline(always)]
pub(crate) unsafe fn registers_up<const N: u32>() {
    // SAFETY: the caller keeps the warpgroup converged.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const N, options(nostack)) }
}
