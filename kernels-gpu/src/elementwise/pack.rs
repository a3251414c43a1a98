//! Packed activation rows for the first expert product.

use super::ROW_THREADS;
use super::reduce::{block_max, magnitude_bits};
use crate::args::PackRowsArgs;
use crate::ptx::global;
use asym_gemm_formats::{bf16, int8};
use cuda_std::prelude::*;

/// The token of this block's packed row, or `None` for padding.
///
/// # Safety
/// `args.source` must cover the grid.
#[inline(always)]
unsafe fn token_row(args: &PackRowsArgs) -> Option<u64> {
    let row = thread::block_idx_x() as u64;
    // SAFETY: one entry a block.
    let token = unsafe { global::load_read_only(args.source + row * 4) } as i32;
    if token < 0 {
        return None;
    }
    let element_bytes = if args.x_bf16 != 0 { 2 } else { 4 };
    Some(args.x + token as u64 * args.x_stride * element_bytes)
}

/// Column `k` of the token, 0 past the end and for padding.
///
/// # Safety
/// `row` must be the address of a row of x.
#[inline(always)]
unsafe fn value(args: &PackRowsArgs, row: Option<u64>, k: u32) -> f32 {
    match row {
        Some(row) if k < args.hidden => {
            // SAFETY: k is inside the row.
            unsafe {
                if args.x_bf16 != 0 {
                    bf16::decode(global::load_read_only_u16(row + k as u64 * 2))
                } else {
                    global::load_read_only_f32(row + k as u64 * 4)
                }
            }
        }
        _ => 0.0,
    }
}

/// # Safety
/// Launched with one block of [`ROW_THREADS`] a packed row and buffers as [`PackRowsArgs`] says.
#[kernel(threads = 128)]
pub(crate) unsafe fn pack_rows_bf16(args: PackRowsArgs) {
    // SAFETY: the launcher keeps the kernel's contract; every k written is below `padded`.
    unsafe {
        let row = token_row(&args);
        let out = args.out + thread::block_idx_x() as u64 * args.padded as u64 * 2;
        let mut k = thread::thread_idx_x();
        while k < args.padded {
            let code = bf16::encode(value(&args, row, k));
            global::store_u16(out + k as u64 * 2, code);
            k += ROW_THREADS;
        }
    }
}

/// # Safety
/// As [`pack_rows_bf16`]; 16 bytes of dynamic shared memory.
#[kernel(threads = 128)]
pub(crate) unsafe fn pack_rows_s8_per_row(args: PackRowsArgs) {
    // SAFETY: the launcher keeps the kernel's contract; the block stays converged at the reduction.
    unsafe {
        let packed = thread::block_idx_x() as u64;
        let row = token_row(&args);
        let mut amax = 0;
        let mut k = thread::thread_idx_x();
        while k < args.hidden {
            amax = amax.max(magnitude_bits(value(&args, row, k)));
            k += ROW_THREADS;
        }
        let amax = block_max(amax, shared::dynamic_shared_base());
        let scale = int8::per_row_scale(f32::from_bits(amax));
        let inv = 1.0 / scale;
        if thread::thread_idx_x() == 0 {
            global::store(args.scales + packed * 4, scale.to_bits());
        }
        let out = args.out + packed * args.padded as u64;
        let mut k = thread::thread_idx_x();
        while k < args.padded {
            let code = int8::encode(value(&args, row, k), inv);
            global::store_u8(out + k as u64, code as u32);
            k += ROW_THREADS;
        }
    }
}

/// # Safety
/// As [`pack_rows_s8_per_row`]; `padded` is a multiple of 128, one scale for each 128.
#[kernel(threads = 128)]
pub(crate) unsafe fn pack_rows_s8_blocks(args: PackRowsArgs) {
    // SAFETY: the launcher keeps the kernel's contract; all threads run the same blocks of 128.
    unsafe {
        let packed = thread::block_idx_x() as u64;
        let row = token_row(&args);
        let blocks = args.padded / ROW_THREADS;
        let mut block = 0;
        while block < blocks {
            let k = block * ROW_THREADS + thread::thread_idx_x();
            let x = value(&args, row, k);
            let amax = block_max(magnitude_bits(x), shared::dynamic_shared_base());
            let scale = int8::block_scale(f32::from_bits(amax));
            if thread::thread_idx_x() == 0 {
                let index = packed * blocks as u64 + block as u64;
                global::store(args.scales + index * 4, scale.to_bits());
            }
            let code = int8::encode(x, 1.0 / scale);
            global::store_u8(
                args.out + packed * args.padded as u64 + k as u64,
                code as u32,
            );
            block += 1;
        }
    }
}
