//! Warp-wide matrix products on registers: 16 x 8 sums, 32 bytes of K.

use core::arch::asm;

/// Defines one instruction as a function.
macro_rules! mma {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The warp must be converged.
        #[inline(always)]
        pub(crate) unsafe fn $name(d: &mut [u32; 4], a: [u32; 4], b: [u32; 2]) {
            let [mut w, mut x, mut y, mut z] = *d;
            // SAFETY: the caller keeps the warp converged.
            unsafe {
                asm!(concat!($text,
                     " {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                     inout(reg32) w, inout(reg32) x, inout(reg32) y, inout(reg32) z,
                     in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                     in(reg32) b[0], in(reg32) b[1], options(nomem, nostack));
            }
            *d = [w, x, y, z];
        }
    };
}

mma!(
    /// f16 products, f32 sums.
    f16_16x8x16,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
);
mma!(
    /// bf16 products, f32 sums.
    bf16_16x8x16,
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
);
mma!(
    /// s8 products, s32 sums that wrap around.
    s8_16x8x32,
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
);
