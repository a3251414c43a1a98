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
