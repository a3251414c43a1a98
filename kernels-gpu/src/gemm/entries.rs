//! The kernels' entry points, the ring they share and the split into roles.

use super::scaling::{Bf16, Int8Blocks, Int8PerRow, Int8Slices, Scaling};
use super::{Operands, consumer, producer};
use crate::args::{GemmArgs, Group};
use crate::ptx::{global, mbarrier, sync};
use crate::schedule::{Groups, TileWalker};
use crate::tile::{CONSUMERS, M64N256, M128N128, Tile};
use cuda_std::prelude::*;

/// Groups in global memory.
#[derive(Clone, Copy)]
pub(super) struct DeviceGroups {
    address: u64,
    count: u32,
}

impl Groups for DeviceGroups {
    #[inline(always)]
    fn count(&self) -> u32 {
        self.count
    }

    #[inline(always)]
    fn get(&self, index: u32) -> Group {
        // SAFETY: index is below count, and the host wrote `count` groups before the launch.
        let [start, end, weight, reserved] =
            unsafe { global::load_read_only_v4(self.address + index as u64 * 16) };
        Group {
            start,
            end,
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

/// A role's position in the ring of stages.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    /// Shared address of stage 0.
    pub(super) base: u32,
    barriers: u32,
    stages: u32,
    /// Current stage.
    pub(super) slot: u32,
    /// Flips each time the ring wraps.
    pub(super) phase: u32,
}

impl Ring {
    #[inline(always)]
    fn new(base: u32, tile: Tile) -> Self {
        let barriers = base + tile.barrier_offset();
        Self {
            base,
            barriers,
            stages: tile.stages,
            slot: 0,
            phase: 0,
        }
    }

    /// Barrier that completes when the stage's bytes have landed.
    #[inline(always)]
    pub(super) fn full(&self) -> u32 {
        self.barriers + self.slot * 8
    }

    /// Barrier that completes when the consumers have released the stage.
    #[inline(always)]
    pub(super) fn empty(&self) -> u32 {
        self.barriers + (self.stages + self.slot) * 8
    }

    #[inline(always)]
    pub(super) fn stage_address(&self, tile: Tile) -> u32 {
        self.base + self.slot * tile.stage_bytes()
    }

    #[inline(always)]
    pub(super) fn advance(&mut self, tile: Tile) {
        self.slot += 1;
        if self.slot == tile.stages {
            self.slot = 0;
            self.phase ^= 1;
        }
    }
}

/// Registers of a producer thread: it holds addresses and counters only.
const PRODUCER_REGISTERS: u32 = 40;
/// Registers of a consumer thread: 40 + 2 x 232 = 3 x 168, what the launch allocates.
const CONSUMER_REGISTERS: u32 = 232;

/// # Safety
/// Launched with `tile::THREADS` threads and the tile's shared memory, and with arguments
/// that keep [`GemmArgs`]'s promises.
#[inline(always)]
unsafe fn grouped_gemm<S: Scaling>(tile: Tile, operands: Operands, maps: Maps, args: &GemmArgs) {
    // SAFETY: the host refuses K = 0; knowing it keeps the K loops free of an empty case.
    unsafe { core::hint::assert_unchecked(args.k_steps > 0) };
    let thread = thread::thread_idx_x();
    let mut ring = Ring::new(shared::dynamic_shared_base(), tile);
    // SAFETY: one thread initialises each barrier before anybody uses it; after the block
    // barrier every warp takes one role for good.
    unsafe {
        if thread == 0 {
            while ring.slot < tile.stages {
                mbarrier::init(ring.full(), 1);
                mbarrier::init(ring.empty(), CONSUMERS * 4);
                ring.slot += 1;
            }
            mbarrier::fence_init();
        }
        thread::sync_threads();
        ring.slot = 0;
        let groups = DeviceGroups {
            address: args.groups,
            count: args.group_count,
        };
        let walker = TileWalker::new(
            groups,
            args.n,
            tile.m,
            tile.n,
            thread::block_idx_x(),
            thread::grid_dim_x(),
        );
        let warpgroup = sync::broadcast_lane0(thread / 128);
        if warpgroup == 0 {
            sync::registers_down::<PRODUCER_REGISTERS>();
            if thread == 0 {
                producer::run(tile, operands.step_k(), maps, args, walker, ring);
            }
        } else {
            sync::registers_up::<CONSUMER_REGISTERS>();
            consumer::run::<S>(tile, warpgroup - 1, thread % 128, args, walker, ring);
        }
    }
}

macro_rules! entry {
    ($name:ident, $scaling:ty, $operands:expr, $tile:expr) => {
        /// # Safety
        /// See [`grouped_gemm`].
        #[kernel(threads = 384, min_blocks = 1)]
        pub(crate) unsafe fn $name(
            #[grid_constant] a_map: &TensorMap,
            #[grid_constant] b_map: &TensorMap,
            args: GemmArgs,
        ) {
            let maps = Maps {
                a: a_map.address(),
                b: b_map.address(),
            };
            // SAFETY: the launcher keeps the kernel's contract.
            unsafe { grouped_gemm::<$scaling>($tile, $operands, maps, &args) }
        }
    };
}

entry!(
    sm90_bf16_grouped_gemm_128x128x64,
    Bf16,
    Operands::Bf16,
    M128N128
);
entry!(
    sm90_bf16_grouped_gemm_64x256x64,
    Bf16,
    Operands::Bf16,
    M64N256
);
entry!(
    sm90_s8_per_row_grouped_gemm_128x128x128,
    Int8PerRow,
    Operands::Int8PerRow,
    M128N128
);
entry!(
    sm90_s8_per_row_grouped_gemm_64x256x128,
    Int8PerRow,
    Operands::Int8PerRow,
    M64N256
);
entry!(
    sm90_s8_slices_grouped_gemm_128x128x128,
    Int8Slices,
    Operands::Int8Slices,
    M128N128
);
entry!(
    sm90_s8_slices_grouped_gemm_64x256x128,
    Int8Slices,
    Operands::Int8Slices,
    M64N256
);
entry!(
    sm90_s8_blocks_grouped_gemm_128x128x128,
    Int8Blocks,
    Operands::Int8Blocks,
    M128N128
);
entry!(
    sm90_s8_blocks_grouped_gemm_64x256x128,
    Int8Blocks,
    Operands::Int8Blocks,
    M64N256
);
