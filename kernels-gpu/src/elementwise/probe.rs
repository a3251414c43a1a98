//! Reads memory as fast as the SMs can ask for it.

use crate::args::ReadArgs;
use crate::ptx::global;
use cuda_std::prelude::*;

/// Loads in flight of one thread.
const IN_FLIGHT: u64 = 4;

#[inline(always)]
fn fold([a, b, c, d]: [u32; 4]) -> u32 {
    a ^ b ^ c ^ d
}

/// # Safety
/// Launched with blocks of 256 and buffers as [`ReadArgs`] says.
#[kernel(threads = 256)]
pub(crate) unsafe fn read_probe(args: ReadArgs) {
    let threads = thread::grid_dim_x() as u64 * thread::block_dim_x() as u64;
    let mut index = thread::index_1d() as u64;
    let mut mix = 0;
    // SAFETY: every index read is below `vectors`.
    unsafe {
        while index + (IN_FLIGHT - 1) * threads < args.vectors {
            let load = |i: u64| global::load_read_only_v4(args.source + (index + i * threads) * 16);
            // All four are asked for before the first is used.
            let words = [load(0), load(1), load(2), load(3)];
            mix ^= fold(words[0]) ^ fold(words[1]) ^ fold(words[2]) ^ fold(words[3]);
            index += IN_FLIGHT * threads;
        }
        while index < args.vectors {
            mix ^= fold(global::load_read_only_v4(args.source + index * 16));
            index += threads;
        }
        // Practically never true, but the compiler cannot know.
        global::store_if(mix == 0x5eed_f00d, args.sink, mix);
    }
}
