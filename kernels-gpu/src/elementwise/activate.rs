//! h = act(gate, up) from the gate-up product in the bank's interleaved column order.

use super::ROW_THREADS;
use super::reduce::{block_max, magnitude_bits};
use crate::args::ActivateArgs;
use crate::ptx::global;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::{bf16, int8};
use cuda_std::prelude::*;

/// h of this thread's column in the block's row and slice.
///
/// # Safety
/// `args.gate_up` must cover the grid.
#[inline(always)]
unsafe fn hidden(args: &ActivateArgs) -> f32 {
    let row = thread::block_idx_x() as u64;
    let slice = thread::block_idx_y();
    let i = thread::thread_idx_x();
    if slice * ROW_THREADS + i >= args.intermediate {
        return 0.0;
    }
    // 16 gate columns, then their 16 up columns.
    let column = slice * 2 * ROW_THREADS + i / 16 * 32 + i % 16;
    let base = args.gate_up + (row * (args.slices * 2 * ROW_THREADS) as u64 + column as u64) * 4;
    // SAFETY: row and column are inside the product.
    let (gate, up) = unsafe {
        (
            global::load_read_only_f32(base),
            global::load_read_only_f32(base + 16 * 4),
        )
    };
    let activation = if args.clamped != 0 {
        Activation::ClampedSwiGlu {
            limit: args.limit,
            alpha: args.alpha,
        }
    } else {
        Activation::SwiGlu
    };
    activation.apply(gate, up)
}

/// Index of this thread's element of h.
#[inline(always)]
fn index(args: &ActivateArgs) -> u64 {
    let row = thread::block_idx_x() as u64;
    (row * args.slices as u64 + thread::block_idx_y() as u64) * ROW_THREADS as u64
        + thread::thread_idx_x() as u64
}

/// # Safety
/// Launched with a grid of (rows, slices), blocks of [`ROW_THREADS`] and buffers as
/// [`ActivateArgs`] says.
#[kernel(threads = 128)]
pub(crate) unsafe fn activate_bf16(args: ActivateArgs) {
    // SAFETY: the launcher keeps the kernel's contract.
    unsafe {
        let code = bf16::encode(hidden(&args));
        global::store_u16(args.h + index(&args) * 2, code);
    }
}

/// # Safety
/// As [`activate_bf16`]; 16 bytes of dynamic shared memory.
#[kernel(threads = 128)]
pub(crate) unsafe fn activate_s8(args: ActivateArgs) {
    // SAFETY: the launcher keeps the kernel's contract; the block stays converged.
    unsafe {
        let h = hidden(&args);
        let amax = block_max(magnitude_bits(h), shared::dynamic_shared_base());
        let scale = int8::per_row_scale(f32::from_bits(amax));
        let element = index(&args);
        if thread::thread_idx_x() == 0 {
            global::store(
                args.scales + element / ROW_THREADS as u64 * 4,
                scale.to_bits(),
            );
        }
        global::store_u8(args.h + element, int8::encode(h, 1.0 / scale) as u32);
    }
}
