//! The kernels: tiles of all problems.

use super::elements::{Bf16, F16, F32, Kind, Operands, S8, Sums, load_c, store_d};
use super::load::Side;
use super::{
    BUFFER_BYTES, DenseArgs, Problem, ROW_BYTES, STEP_BYTES, TILE, find_problem, flags, tile_place,
};
use crate::ptx::{global, sync};
use core::mem::offset_of;
use cuda_std::prelude::*;

/// Reads problem `index`.
///
/// # Safety
/// The list is where `args` says.
#[inline(always)]
unsafe fn read(args: &DenseArgs, index: u32) -> Problem {
    let base = args.problems + index as u64 * size_of::<Problem>() as u64;
    let pair = |v: [u32; 4]| {
        let join = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        (join(v[0], v[1]), join(v[2], v[3]))
    };
    // SAFETY: a problem is eight vectors of 16 bytes, which nothing writes meanwhile.
    unsafe {
        let vector = |i: u64| global::load_read_only_v4(base + i * 16);
        let ((a, b), (c, d)) = (pair(vector(0)), pair(vector(1)));
        let ((a_row, a_k), (b_col, b_k)) = (pair(vector(2)), pair(vector(3)));
        let ((c_row, c_col), (d_row, d_col)) = (pair(vector(4)), pair(vector(5)));
        let ([m, n, k, first_tile], [alpha, beta, flags, reserved]) = (vector(6), vector(7));
        Problem {
            a,
            b,
            c,
            d,
            a_row,
            a_k,
            b_col,
            b_k,
            c_row,
            c_col,
            d_row,
            d_col,
            m,
            n,
            k,
            first_tile,
            alpha,
            beta,
            flags,
            reserved,
        }
    }
}

/// The problem that tile `tile` belongs to.
///
/// # Safety
/// As [`read`].
#[inline(always)]
unsafe fn find(args: &DenseArgs, tile: u32) -> Problem {
    let index = if args.uniform != 0 {
        tile / args.uniform
    } else {
        find_problem(args.count, tile, |i| {
            let at =
                i as u64 * size_of::<Problem>() as u64 + offset_of!(Problem, first_tile) as u64;
            // SAFETY: the number is below the count.
            unsafe { global::load_read_only(args.problems + at) }
        })
    };
    // SAFETY: as above.
    unsafe { read(args, index) }
}

/// All tiles of this block.
///
/// # Safety
/// As the kernels.
#[inline(always)]
unsafe fn run<K: Kind>(args: &DenseArgs) {
    let mut tile = thread::block_idx_x();
    while tile < args.tiles {
        // SAFETY: the caller's promise; the block is converged.
        unsafe {
            let problem = find(args, tile);
            let row_tiles = problem.m.div_ceil(TILE);
            let column_tiles = problem.n.div_ceil(TILE);
            core::hint::assert_unchecked(column_tiles != 0 && column_tiles <= u32::MAX / 64);
            let (row, column) = tile_place(tile - problem.first_tile, row_tiles, column_tiles);
            let mut sums: Sums = core::mem::zeroed();
            multiply::<K>(&problem, row * TILE, column * TILE, &mut sums);
            output::<K>(&problem, row * TILE, column * TILE, &sums);
        }
        tile += thread::grid_dim_x();
    }
}

/// Sums over K of the tile at `row`, `column`.
///
/// # Safety
/// As the kernels, the block converged.
#[inline(always)]
unsafe fn multiply<K: Kind>(problem: &Problem, row: u32, column: u32, sums: &mut Sums) {
    let thread = thread::thread_idx_x();
    let (warp, lane) = (thread / 32, thread % 32);
    let (g, t) = (lane / 4, lane % 4);
    let base = shared::dynamic_shared_base();
    let a = Side {
        base: problem.a,
        first: row,
        rows: problem.m,
        k: problem.k,
        row_step: problem.a_row,
        k_step: problem.a_k,
        vector: problem.flags & flags::A_VECTOR != 0,
    };
    let b = Side {
        base: problem.b,
        first: column,
        rows: problem.n,
        k: problem.k,
        row_step: problem.b_col,
        k_step: problem.b_k,
        vector: problem.flags & flags::B_VECTOR != 0,
    };
    let step = STEP_BYTES / K::BYTES;
    let b_offset = TILE * ROW_BYTES;
    if problem.k == 0 {
        return;
    }
    // SAFETY: buffers are written and read with a barrier in between: the one that is written
    // was last read before the previous barrier. All threads run the same steps.
    unsafe {
        let mut next = (a.load::<K>(thread, 0), b.load::<K>(thread, 0));
        let mut k = 0;
        let mut buffer = base;
        loop {
            a.store(thread, &next.0, buffer);
            b.store(thread, &next.1, buffer + b_offset);
            thread::sync_threads();
            k += step;
            let more = k < problem.k;
            if more {
                next = (a.load::<K>(thread, k), b.load::<K>(thread, k));
            }
            sync::warp();
            let at = Operands {
                a: buffer + (warp / 2 * 32 + g) * ROW_BYTES,
                b: buffer + b_offset + warp % 2 * 32 * ROW_BYTES,
                g,
                t,
            };
            K::multiply(sums, at);
            if !more {
                break;
            }
            buffer = 2 * base + BUFFER_BYTES - buffer;
        }
        // The next tile's first step writes the first buffer.
        thread::sync_threads();
    }
}

/// D's elements of this thread.
///
/// # Safety
/// As the kernels.
#[inline(always)]
unsafe fn output<K: Kind>(problem: &Problem, row: u32, column: u32, sums: &Sums) {
    let thread = thread::thread_idx_x();
    let (warp, lane) = (thread / 32, thread % 32);
    let row = row + warp / 2 * 32 + lane / 4;
    let column = column + warp % 2 * 32 + lane % 4 * 2;
    let wide = problem.flags & flags::D_WIDE != 0;
    let bytes = if wide { 4 } else { K::BYTES as u64 };
    for (fragment, sums) in sums.iter().enumerate() {
        for (i, &sum) in sums.iter().enumerate() {
            let row = row + fragment as u32 / 4 * 16 + i as u32 / 2 * 8;
            let column = column + fragment as u32 % 4 * 8 + i as u32 % 2;
            let exists = row < problem.m && column < problem.n;
            let offset = |r: u64, c: u64| (row as u64 * r + column as u64 * c) * bytes;
            // SAFETY: elements that exist are inside C and D.
            unsafe {
                let c = if problem.c != 0 {
                    let address = problem.c + offset(problem.c_row, problem.c_col);
                    Some(load_c::<K>(wide, exists, address))
                } else {
                    None
                };
                let value = K::finish(problem.alpha, sum, problem.beta, c);
                let address = problem.d + offset(problem.d_row, problem.d_col);
                store_d::<K>(wide, exists, address, value);
            }
        }
    }
}

/// # Safety
/// Launched with blocks of [`super::THREADS`] and [`super::SHARED_BYTES`] of dynamic shared
/// memory, over problems as [`DenseArgs`] says.
#[kernel(threads = 128)]
pub(crate) unsafe fn sm80_f32_dense_gemm_64x64(args: DenseArgs) {
    // SAFETY: the launcher keeps the contract.
    unsafe { run::<F32>(&args) }
}

/// # Safety
/// As [`sm80_f32_dense_gemm_64x64`].
#[kernel(threads = 128)]
pub(crate) unsafe fn sm80_f16_dense_gemm_64x64(args: DenseArgs) {
    // SAFETY: the launcher keeps the contract.
    unsafe { run::<F16>(&args) }
}

/// # Safety
/// As [`sm80_f32_dense_gemm_64x64`].
#[kernel(threads = 128)]
pub(crate) unsafe fn sm80_bf16_dense_gemm_64x64(args: DenseArgs) {
    // SAFETY: the launcher keeps the contract.
    unsafe { run::<Bf16>(&args) }
}

/// # Safety
/// As [`sm80_f32_dense_gemm_64x64`].
#[kernel(threads = 128)]
pub(crate) unsafe fn sm80_s8_dense_gemm_64x64(args: DenseArgs) {
    // SAFETY: the launcher keeps the contract.
    unsafe { run::<S8>(&args) }
}
