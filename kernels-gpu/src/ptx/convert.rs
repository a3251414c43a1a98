//! Conversions.

use core::arch::asm;

/// Two f32 rounded to bf16 (ties to even), `low` in the lower half.
#[inline(always)]
pub(crate) fn bf16x2(low: f32, high: f32) -> u32 {
    let packed: u32;
    // SAFETY: arithmetic on registers only.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {0}, {1}, {2};", out(reg32) packed, in(reg32) high, in(reg32) low,
             options(pure, nomem, nostack));
    }
    packed
}

/// `value`, as far as the compiler can tell a different one each time.
#[inline(always)]
pub(crate) fn opaque(value: u32) -> u32 {
    let copy: u32;
    // SAFETY: a move between registers.
    unsafe {
        asm!("mov.b32 {0}, {1};", out(reg32) copy, in(reg32) value, options(nomem, nostack));
    }
    copy
}

/// As [`opaque`], of 64 bits.
#[inline(always)]
pub(crate) fn opaque_u64(value: u64) -> u64 {
    let copy: u64;
    // SAFETY: a move between registers.
    unsafe {
        asm!("mov.b64 {0}, {1};", out(reg64) copy, in(reg64) value, options(nomem, nostack));
    }
    copy
}
