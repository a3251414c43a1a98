//! Global memory accesses with the width and the cache path spelled out.
//!
//! Every function's contract: the address must be aligned to the access and inside an
//! allocation that the kernel may read (or write) there. `read_only` loads go through
//! the non-coherent path: nothing may write those bytes while the kernel runs.

use core::arch::asm;

/// Loads a word that nothing writes during the kernel.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_read_only(address: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("ld.global.nc.b32 {0}, [{1}];", out(reg32) value, in(reg64) address,
             options(pure, readonly, nostack));
    }
    value
}

/// Loads an f32 that nothing writes during the kernel.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_read_only_f32(address: u64) -> f32 {
    // SAFETY: the caller keeps the module's contract.
    f32::from_bits(unsafe { load_read_only(address) })
}

/// Loads 2 bytes that nothing writes during the kernel.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_read_only_u16(address: u64) -> u16 {
    let value: u16;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("ld.global.nc.b16 {0}, [{1}];", out(reg16) value, in(reg64) address,
             options(pure, readonly, nostack));
    }
    value
}

/// Loads 16 bytes that nothing writes during the kernel.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_read_only_v4(address: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("ld.global.nc.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
             out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address,
             options(pure, readonly, nostack));
    }
    [a, b, c, d]
}

/// Stores a word.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn store(address: u64, value: u32) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("st.global.b32 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack));
    }
}

/// Stores a word if `condition`.
///
/// # Safety
/// See the module's contract; without the condition the address is not used.
#[inline(always)]
pub(crate) unsafe fn store_if(condition: bool, address: u64, value: u32) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {0}, 0;", "@p st.global.b32 [{1}], {2};", "}}",
             in(reg32) condition as u32, in(reg64) address, in(reg32) value, options(nostack));
    }
}

/// Stores 2 bytes.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn store_u16(address: u64, value: u16) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("st.global.b16 [{0}], {1};", in(reg64) address, in(reg16) value, options(nostack));
    }
}

/// Stores one byte, the low one of `value`.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn store_u8(address: u64, value: u32) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("st.global.b8 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack));
    }
}

/// Stores 8 bytes if `condition`.
///
/// # Safety
/// See the module's contract; without the condition the address is not used.
#[inline(always)]
pub(crate) unsafe fn store_v2_if(condition: bool, address: u64, a: u32, b: u32) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {0}, 0;",
             "@p st.global.v2.b32 [{1}], {{{2}, {3}}};", "}}",
             in(reg32) condition as u32, in(reg64) address, in(reg32) a, in(reg32) b,
             options(nostack));
    }
}

/// Stores 16 bytes if `condition`.
///
/// # Safety
/// See the module's contract; without the condition the address is not used.
#[inline(always)]
pub(crate) unsafe fn store_v4_if(condition: bool, address: u64, v: [u32; 4]) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {0}, 0;",
             "@p st.global.v4.b32 [{1}], {{{2}, {3}, {4}, {5}}};", "}}",
             in(reg32) condition as u32, in(reg64) address, in(reg32) v[0], in(reg32) v[1],
             in(reg32) v[2], in(reg32) v[3], options(nostack));
    }
}

/// Stores 2 bytes if `condition`.
///
/// # Safety
/// See the module's contract; without the condition the address is not used.
#[inline(always)]
pub(crate) unsafe fn store_u16_if(condition: bool, address: u64, value: u16) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {0}, 0;", "@p st.global.b16 [{1}], {2};", "}}",
             in(reg32) condition as u32, in(reg64) address, in(reg16) value, options(nostack));
    }
}

/// Waits until the word at `address` satisfies `ready`; what its writer released before is
/// visible then.
///
/// # Safety
/// See the module's contract; other blocks write the word with [`release`] or
/// [`add_release`] only.
#[inline(always)]
pub(crate) unsafe fn wait_acquire(address: u64, ready: impl Fn(u32) -> bool) {
    /// Polls, some hundred nanoseconds each, after which a writer must have died.
    const MAX_POLLS: u32 = 1 << 28;
    let mut polls = 0;
    loop {
        let value: u32;
        // SAFETY: the caller keeps the module's contract.
        unsafe {
            asm!("ld.acquire.gpu.global.b32 {0}, [{1}];", out(reg32) value, in(reg64) address,
                 options(nostack));
        }
        if ready(value) {
            return;
        }
        polls += 1;
        if polls == MAX_POLLS {
            // SAFETY: trap ends the kernel with an error that the host sees.
            unsafe { core::arch::nvptx::trap() }
        }
    }
}

/// Writes a word after everything that this thread did or acquired.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn release(address: u64, value: u32) {
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("st.release.gpu.global.b32 [{0}], {1};", in(reg64) address, in(reg32) value,
             options(nostack));
    }
}

/// Adds to a word after everything that this thread did or acquired; gives the old value.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn add_release(address: u64, value: u32) -> u32 {
    let old: u32;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("atom.acq_rel.gpu.global.add.u32 {0}, [{1}], {2};", out(reg32) old,
             in(reg64) address, in(reg32) value, options(nostack));
    }
    old
}
