//! Shared memory: matrix stores, vector loads, small asynchronous copies into it.

use core::arch::asm;

/// Stores four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of
/// matrix l / 8.
///
/// # Safety
/// The warp must be converged and each `address` 16 bytes of shared memory that no other
/// lane writes.
#[inline(always)]
pub(crate) unsafe fn store_matrix_x4(address: u32, r: [u32; 4]) {
    // SAFETY: the caller gives valid addresses and a converged warp.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{0}], {{{1}, {2}, {3}, {4}}};",
             in(reg32) address, in(reg32) r[0], in(reg32) r[1], in(reg32) r[2], in(reg32) r[3],
             options(nostack));
    }
}

/// Loads 16 bytes.
///
/// # Safety
/// `address` must be 16 aligned bytes of shared memory that hold data.
#[inline(always)]
pub(crate) unsafe fn load_v4(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("ld.shared.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
             out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(nostack));
    }
    [a, b, c, d]
}

/// Stores 16 bytes.
///
/// # Safety
/// `address` must be 16 aligned bytes of shared memory that are ours to write.
#[inline(always)]
pub(crate) unsafe fn store_v4(address: u32, v: [u32; 4]) {
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("st.shared.v4.b32 [{0}], {{{1}, {2}, {3}, {4}}};",
             in(reg32) address, in(reg32) v[0], in(reg32) v[1], in(reg32) v[2], in(reg32) v[3],
             options(nostack));
    }
}

/// Loads two bytes.
///
/// # Safety
/// `address` must be 2 aligned bytes of shared memory that hold data.
#[inline(always)]
pub(crate) unsafe fn load_u16(address: u32) -> u16 {
    let value: u16;
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("ld.shared.b16 {0}, [{1}];", out(reg16) value, in(reg32) address, options(nostack));
    }
    value
}

/// Loads two f32.
///
/// # Safety
/// `address` must be 8 aligned bytes of shared memory that hold data.
#[inline(always)]
pub(crate) unsafe fn load_f32x2(address: u32) -> [f32; 2] {
    let (a, b): (f32, f32);
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("ld.shared.v2.f32 {{{0}, {1}}}, [{2}];",
             out(reg32) a, out(reg32) b, in(reg32) address, options(nostack));
    }
    [a, b]
}

/// Loads an f32.
///
/// # Safety
/// `address` must be 4 aligned bytes of shared memory that hold data.
#[inline(always)]
pub(crate) unsafe fn load_f32(address: u32) -> f32 {
    // SAFETY: the caller gives a valid address.
    f32::from_bits(unsafe { load(address) })
}

/// Starts to copy one word from global memory that nothing writes during the kernel.
///
/// # Safety
/// `dst` must be 4 aligned bytes of shared memory that nobody reads before the copy has
/// landed, `source` 4 aligned bytes of global memory.
#[inline(always)]
pub(crate) unsafe fn copy_word_async(dst: u32, source: u64) {
    // SAFETY: the caller gives valid addresses.
    unsafe {
        asm!("cp.async.ca.shared.global [{0}], [{1}], 4;", in(reg32) dst, in(reg64) source,
             options(nostack));
    }
}

/// Loads one word.
///
/// # Safety
/// `address` must be 4 aligned bytes of shared memory that hold data.
#[inline(always)]
pub(crate) unsafe fn load(address: u32) -> u32 {
    let value: u32;
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("ld.shared.b32 {0}, [{1}];", out(reg32) value, in(reg32) address, options(nostack));
    }
    value
}

/// Stores one word.
///
/// # Safety
/// `address` must be 4 aligned bytes of shared memory that are ours to write.
#[inline(always)]
pub(crate) unsafe fn store(address: u32, value: u32) {
    // SAFETY: the caller gives a valid address.
    unsafe {
        asm!("st.shared.b32 [{0}], {1};", in(reg32) address, in(reg32) value, options(nostack));
    }
}
