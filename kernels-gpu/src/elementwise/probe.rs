//! Reads memory as fast as the SMs can ask for it.

use crate::args::ReadArgs;
use crate::ptx::global;
use cuda_std::prelude::*;

/// Loads in flight of one thread.
const IN_FLIGHT: u64 = 4;

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
            let mut words = [[0u32; 4]; IN_FLIGHT as usize];
            for (i, word) in words.iter_mut().enumerate() {
                let vector = index + i as u64 * threads;
                *word = global::load_read_only_v4(args.source + vector * 16);
            }
            for [a, b, c, d] in words {
                mix ^= a ^ b ^ c ^ d;
            }
            index += IN_FLIGHT * threads;
        }
        while index < args.vectors {
            let [a, b, c, d] = global::load_read_only_v4(args.source + index * 16);
            mix ^= a ^ b ^ c ^ d;
            index += threads;
        }
        // Practically never true, but the compiler cannot know.
        global::store_if(mix == 0x5eed_f00d, args.sink, mix);
    }
}
