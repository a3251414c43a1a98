//! Accesses to single elements of global memory, and their conversions.
//!
//! Every function's contract is that of [`super::global`]; without the condition the address is
//! not used and the value is 0.

use core::arch::asm;

/// Loads a word if `condition`.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_if(condition: bool, address: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {1}, 0;", "mov.b32 {0}, 0;",
             "@p ld.global.b32 {0}, [{2}];", "}}",
             out(reg32) value, in(reg32) condition as u32, in(reg64) address,
             options(readonly, nostack));
    }
    value
}

/// Loads two bytes if `condition`.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_u16_if(condition: bool, address: u64) -> u32 {
    let value: u16;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {1}, 0;", "mov.b16 {0}, 0;",
             "@p ld.global.b16 {0}, [{2}];", "}}",
             out(reg16) value, in(reg32) condition as u32, in(reg64) address,
             options(readonly, nostack));
    }
    value as u32
}

/// Loads a byte if `condition`.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_u8_if(condition: bool, address: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {1}, 0;", "mov.b32 {0}, 0;",
             "@p ld.global.u8 {0}, [{2}];", "}}",
             out(reg32) value, in(reg32) condition as u32, in(reg64) address,
             options(readonly, nostack));
    }
    value
}

/// Loads 16 aligned bytes if `condition`.
///
/// # Safety
/// See the module's contract.
#[inline(always)]
pub(crate) unsafe fn load_v4_if(condition: bool, address: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller keeps the module's contract.
    unsafe {
        asm!("{{", ".reg .pred p;", "setp.ne.b32 p, {4}, 0;",
             "mov.b32 {0}, 0;", "mov.b32 {1}, 0;", "mov.b32 {2}, 0;", "mov.b32 {3}, 0;",
             "@p ld.global.v4.b32 {{{0}, {1}, {2}, {3}}}, [{5}];", "}}",
             out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
             in(reg32) condition as u32, in(reg64) address,
             options(readonly, nostack));
    }
    [a, b, c, d]
}

/// An f16's value.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u32) -> f32 {
    let value: u32;
    // SAFETY: arithmetic on registers only.
    unsafe {
        asm!("cvt.f32.f16 {0}, {1};", out(reg32) value, in(reg16) bits as u16,
             options(pure, nomem, nostack));
    }
    f32::from_bits(value)
}

/// Rounds to f16, ties to even.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers only.
    unsafe {
        asm!("cvt.rn.f16.f32 {0}, {1};", out(reg16) bits, in(reg32) value.to_bits(),
             options(pure, nomem, nostack));
    }
    bits
}
