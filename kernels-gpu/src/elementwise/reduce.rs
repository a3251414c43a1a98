//! Maximum over a block of four warps.

use crate::ptx::sync;
use cuda_std::prelude::*;

/// Magnitude bits: as unsigned integers they order like |x|, with NaN on top.
#[inline(always)]
pub(super) fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// The largest `value` of the 128 threads of the block, in every thread.
///
/// Uses 16 bytes of shared memory at `scratch`; the closing barrier lets it be used again.
///
/// # Safety
/// All 128 threads of the block call it, converged, with 16 bytes of shared memory.
#[inline(always)]
pub(super) unsafe fn block_max(value: u32, scratch: u32) -> u32 {
    let thread = thread::thread_idx_x();
    // SAFETY: the block is converged; each warp writes its own word of `scratch`.
    unsafe {
        let mut value = value;
        value = value.max(sync::shuffle_xor::<16>(value));
        value = value.max(sync::shuffle_xor::<8>(value));
        value = value.max(sync::shuffle_xor::<4>(value));
        value = value.max(sync::shuffle_xor::<2>(value));
        value = value.max(sync::shuffle_xor::<1>(value));
        if thread % 32 == 0 {
            crate::ptx::shared::store(scratch + thread / 32 * 4, value);
        }
        thread::sync_threads();
        let [a, b, c, d] = crate::ptx::shared::load_v4(scratch);
        thread::sync_threads();
        a.max(b).max(c.max(d))
    }
}
