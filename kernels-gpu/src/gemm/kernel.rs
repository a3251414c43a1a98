//! The kernel's set-up and the split of its blocks and warpgroups into roles.

use super::format::Format;
use super::pipeline::Shared;
use super::{Operands, consumer, courier, producer, values};
use crate::args::{GemmArgs, Group};
use crate::ptx::wgmma::Accumulator;
use crate::ptx::{global, mbarrier, sync};
use crate::schedule::{Groups, TileWalker};
use crate::tile::{CONSUMERS, Tile};
use cuda_std::prelude::*;

/// Groups in global memory; one that the call has no weight or rows for is empty.
#[derive(Clone, Copy)]
pub(super) struct DeviceGroups {
    address: u64,
    count: u32,
    rows: u32,
    weight_end: u32,
}

impl Groups for DeviceGroups {
    #[inline(always)]
    fn count(&self) -> u32 {
        self.count
    }

    #[inline(always)]
    fn get(&self, index: u32) -> Group {
        // SAFETY: index is below count, and the host promises `count` groups.
        let [start, end, weight, reserved] =
            unsafe { global::load_read_only_v4(self.address + index as u64 * 16) };
        let valid = start <= end && end <= self.rows && weight < self.weight_end;
        Group {
            start,
            end: if valid { end } else { start },
            weight,
            reserved,
        }
    }
}

/// Addresses of the tensor maps in the kernel's parameters.
#[derive(Clone, Copy)]
pub(super) struct Maps {
    /// A, 2-D.
    pub(super) a: u64,
    /// B if it is row-major, 3-D; otherwise unused.
    pub(super) b: u64,
}

/// Registers of a producer thread: addresses and counters.
const PRODUCER_REGISTERS: u32 = 56;
/// Registers of a consumer thread: 56 + 2 x 224 = 3 x 168, what the launch allocates.
const CONSUMER_REGISTERS: u32 = 224;

/// # Safety
/// Launched with `tile::THREADS` threads and the tile's shared memory, and with arguments
/// that keep [`GemmArgs`]'s promises.
#[inline(always)]
pub(super) unsafe fn grouped_gemm<F: Format, A: Accumulator>(
    tile: Tile,
    operands: Operands,
    maps: Maps,
    args: &GemmArgs,
) {
    // SAFETY: the host refuses K = 0; knowing it keeps the K loops free of an empty case.
    unsafe { core::hint::assert_unchecked(args.k_steps > 0) };
    let thread = thread::thread_idx_x();
    let block = thread::block_idx_x();
    let shared = Shared::new(shared::dynamic_shared_base(), tile);
    let couriers = args.relay.couriers;
    let is_courier = block < couriers;
    // SAFETY: one thread initialises each barrier before anybody uses it; after the block
    // barrier every warp takes one role for good.
    unsafe {
        if thread == 0 {
            shared.stages().initialise(1, CONSUMERS * 4);
            shared
                .scales()
                .initialise(values::SCALE_ARRIVALS, CONSUMERS * 4);
            shared
                .values()
                .initialise(values::TILE_ARRIVALS, CONSUMERS * 4);
            mbarrier::fence_init();
        }
        thread::sync_threads();
        let groups = DeviceGroups {
            address: args.groups,
            count: args.group_count,
            rows: args.rows,
            weight_end: args.weight_end,
        };
        let warpgroup = sync::broadcast_lane0(thread / 128);
        if is_courier {
            if thread == 0 {
                let columns = TileWalker::columns(groups, args.n, tile.n);
                courier::run(tile, operands.step_k(), maps, args, columns, shared, block);
            }
            return;
        }
        let (block, blocks) = (block - couriers, thread::grid_dim_x() - couriers);
        if warpgroup == 0 {
            sync::registers_down::<PRODUCER_REGISTERS>();
            let mut walker = TileWalker::new(groups, args.n, tile.m, tile.n, block, blocks);
            if couriers > 0 {
                walker = walker.by_columns();
            }
            if thread == 0 {
                producer::run(tile, operands.step_k(), maps, args, walker, shared);
            } else if thread >= 32 {
                values::run::<F>(tile, thread - 32, args, walker, shared);
            }
        } else {
            sync::registers_up::<CONSUMER_REGISTERS>();
            consumer::run::<F, A>(tile, warpgroup - 1, thread % 128, args, shared);
        }
    }
}
