//! A token's output from its experts' rows, in slot order, and other devices' sums.

use super::COMBINE_THREADS;
use crate::args::CombineArgs;
use crate::ptx::global;
use asym_gemm_formats::{bf16, fma};
use cuda_std::prelude::*;

/// # Safety
/// Launched with a grid of (T, ceil(hidden / 256)), blocks of [`COMBINE_THREADS`] and buffers
/// as [`CombineArgs`] says.
#[kernel(threads = 256)]
pub(crate) unsafe fn combine(args: CombineArgs) {
    let token = thread::block_idx_x() as u64;
    let column = thread::block_idx_y() * COMBINE_THREADS + thread::thread_idx_x();
    if column >= args.hidden {
        return;
    }
    let mut sum = 0.0;
    let mut slot = 0;
    // SAFETY: slots and columns are in range; a skipped slot's row is not read.
    unsafe {
        while slot < args.top_k {
            let index = (token * args.top_k as u64 + slot as u64) * 4;
            let row = global::load_read_only(args.output_index + index) as i32;
            if row >= 0 {
                let weight = global::load_read_only_f32(args.weights + index);
                let element = row as u64 * args.hidden as u64 + column as u64;
                sum = fma(
                    weight,
                    global::load_read_only_f32(args.y + element * 4),
                    sum,
                );
            }
            slot += 1;
        }
        let element = token * args.hidden as u64 + column as u64;
        let mut part = 0;
        while part < args.partial_count {
            let at = part as u64 * args.partial_stride + element;
            sum += global::load_read_only_f32(args.partials + at * 4);
            part += 1;
        }
        if args.shared != 0 {
            let weight = global::load_read_only_f32(args.shared_weights + token * 4);
            sum = fma(
                weight,
                global::load_read_only_f32(args.shared + element * 4),
                sum,
            );
        }
        if args.out_bf16 != 0 {
            global::store_u16(args.out + element * 2, bf16::encode(sum));
        } else {
            global::store(args.out + element * 4, sum.to_bits());
        }
    }
}
