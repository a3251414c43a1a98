//! A consumer warpgroup: wgmma over the ring's stages, then the epilogue.

use super::entries::{DeviceGroups, Ring};
use super::epilogue::Fragment;
use super::scaling::Scaling;
use crate::args::GemmArgs;
use crate::ptx::wgmma::{self, Accumulator};
use crate::ptx::{global, mbarrier};
use crate::schedule::TileWalker;
use crate::tile::{STEP_BYTES, Tile, WARPGROUP_M, WARPGROUP_N};
use asym_gemm_formats::fma;

/// Computes this warpgroup's part of every tile of the block.
///
/// # Safety
/// All 128 threads of consumer `consumer` call it, converged, with arguments that keep
/// [`GemmArgs`]'s promises.
#[inline(always)]
pub(super) unsafe fn run<S: Scaling>(
    tile: Tile,
    consumer: u32,
    thread: u32,
    args: &GemmArgs,
    mut walker: TileWalker<DeviceGroups>,
    mut ring: Ring,
) {
    let (m_part, n_part) = if tile.consumers_m() == 1 {
        (0, consumer)
    } else {
        (consumer, 0)
    };
    let a0 = wgmma::descriptor(ring.base + m_part * WARPGROUP_M * STEP_BYTES);
    let b0 = wgmma::descriptor(ring.base + tile.a_bytes() + n_part * WARPGROUP_N * STEP_BYTES);
    let staging = ring.base + tile.staging_offset() + consumer * crate::tile::STAGING_BYTES;
    while let Some(coord) = walker.next_tile() {
        let fragment = Fragment::new(
            coord,
            m_part * WARPGROUP_M,
            n_part * WARPGROUP_N,
            thread,
            args,
        );
        // SAFETY: the caller's contract carries over; stages are used between their full
        // barrier and their release.
        unsafe {
            let mut sums: Accumulator = core::mem::zeroed();
            if S::PER_STEP {
                scaled_sum::<S>(tile, thread, args, &fragment, a0, b0, &mut ring, &mut sums);
            } else {
                plain_sum::<S>(tile, thread, args, a0, b0, &mut ring, &mut sums);
            }
            fragment.finish::<S>(args, &mut sums);
            fragment.store(args, &sums, staging, consumer, thread);
        }
    }
}

/// One accumulator over all of K; a stage is released once the next one's products are in
/// flight, so that the tensor cores never wait.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn plain_sum<S: Scaling>(
    tile: Tile,
    thread: u32,
    args: &GemmArgs,
    a0: u64,
    b0: u64,
    ring: &mut Ring,
    sums: &mut Accumulator,
) {
    let mut step = 0;
    let mut previous = 0;
    // SAFETY: the caller's contract; each stage is read after its full barrier.
    unsafe {
        while step < args.k_steps {
            mbarrier::wait(ring.full(), ring.phase);
            let offset = (ring.slot * (tile.stage_bytes() >> 4)) as u64;
            wgmma::fence();
            S::step(sums, a0 + offset, b0 + offset, step);
            wgmma::commit();
            wgmma::wait_all_but_one();
            if step > 0 {
                release(thread, previous);
            }
            previous = ring.empty();
            ring.advance(tile);
            step += 1;
        }
        wgmma::wait_all(sums);
        release(thread, previous);
    }
}

/// The exact i32 product of each step, scaled into f32 sums: the other consumer's products
/// fill the tensor cores meanwhile.
///
/// # Safety
/// As [`run`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "one phase of `run`, split off for reading"
)]
unsafe fn scaled_sum<S: Scaling>(
    tile: Tile,
    thread: u32,
    args: &GemmArgs,
    fragment: &Fragment,
    a0: u64,
    b0: u64,
    ring: &mut Ring,
    sums: &mut Accumulator,
) {
    let mut step = 0;
    // SAFETY: the caller's contract; each stage is read after its full barrier, and scale
    // tables cover every row, column and step of the call.
    unsafe {
        let mut product: Accumulator = core::mem::zeroed();
        while step < args.k_steps {
            let a_scale = fragment.a_scales(args, step);
            let column_block = step as u64 * args.b_scales.block_stride;
            mbarrier::wait(ring.full(), ring.phase);
            let offset = (ring.slot * (tile.stage_bytes() >> 4)) as u64;
            wgmma::fence();
            S::step(&mut product, a0 + offset, b0 + offset, 0);
            wgmma::commit();
            wgmma::wait_all(&mut product);
            release(thread, ring.empty());
            ring.advance(tile);
            let fragment = fragment.reload();
            for j in 0..16 {
                for i in 0..4 {
                    let mut scale = a_scale[i / 2];
                    if S::COLUMN_STEPS {
                        let address = fragment.b_scale_address(args, j, i & 1) + column_block;
                        scale *= global::load_read_only_f32(address);
                    }
                    let value = product[4 * j + i].to_bits() as i32 as f32;
                    sums[4 * j + i] = fma(value, scale, sums[4 * j + i]);
                }
            }
            step += 1;
        }
    }
}

/// Gives a stage back to the producer: one arrival a warp.
///
/// # Safety
/// `empty` must be a stage's empty barrier, and this warp done with the stage.
#[inline(always)]
unsafe fn release(thread: u32, empty: u32) {
    if thread % 32 == 0 {
        // SAFETY: the caller names a live barrier.
        unsafe { mbarrier::arrive(empty) }
    }
}
