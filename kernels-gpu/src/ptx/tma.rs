//! Tensor Memory Accelerator: bulk tensor loads, and bulk copies of plain bytes.

use core::arch::asm;

/// Loads the box at (`x`, `y`) of a 2-D map.
///
/// # Safety
/// `dst` must be shared memory of the box's size, 1024-byte aligned, free to write;
/// `map` the address of a valid tensor map; `bar` must expect the box's bytes.
#[inline(always)]
pub(crate) unsafe fn load_2d(dst: u32, map: u64, x: u32, y: u32, bar: u32) {
    // SAFETY: the caller gives a valid destination, map and barrier.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{0}], [{1}, {{{2}, {3}}}], [{4}];",
             in(reg32) dst, in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) bar, options(nostack));
    }
}

/// Loads the box at (`x`, `y`, `z`) of a 3-D map.
///
/// # Safety
/// As [`load_2d`].
#[inline(always)]
pub(crate) unsafe fn load_3d(dst: u32, map: u64, x: u32, y: u32, z: u32, bar: u32) {
    // SAFETY: the caller gives a valid destination, map and barrier.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{0}], [{1}, {{{2}, {3}, {4}}}], [{5}];",
             in(reg32) dst, in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) bar, options(nostack));
    }
}

/// Loads the box at (0, 0, `unit`, `panel`, `slice`) of a bank's 5-D map.
///
/// # Safety
/// As [`load_2d`].
#[inline(always)]
pub(crate) unsafe fn load_panels(dst: u32, map: u64, unit: u32, panel: u32, slice: u32, bar: u32) {
    // SAFETY: the caller gives a valid destination, map and barrier.
    unsafe {
        asm!("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{0}], [{1}, {{{2}, {2}, {3}, {4}, {5}}}], [{6}];",
             in(reg32) dst, in(reg64) map, in(reg32) 0u32, in(reg32) unit, in(reg32) panel, in(reg32) slice, in(reg32) bar,
             options(nostack));
    }
}

/// Loads `bytes` contiguous bytes of global memory.
///
/// # Safety
/// `dst` must be that much shared memory, free to write, `source` that much global memory,
/// both and `bytes` multiples of 16; `bar` must expect the bytes.
#[inline(always)]
pub(crate) unsafe fn load_bytes(dst: u32, source: u64, bytes: u32, bar: u32) {
    // SAFETY: the caller gives valid ranges and a barrier.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, [{3}];",
             in(reg32) dst, in(reg64) source, in(reg32) bytes, in(reg32) bar, options(nostack));
    }
}

/// Stores `bytes` contiguous bytes of shared memory, and waits until they are written.
///
/// # Safety
/// `source` must be that much shared memory with data that the async proxy wrote, `dst` that
/// much global memory, both and `bytes` multiples of 16.
#[inline(always)]
pub(crate) unsafe fn store_bytes(dst: u64, source: u32, bytes: u32) {
    // SAFETY: the caller gives valid ranges.
    unsafe {
        asm!("cp.async.bulk.global.shared::cta.bulk_group [{0}], [{1}], {2};",
             "cp.async.bulk.commit_group;",
             "cp.async.bulk.wait_group 0;",
             in(reg64) dst, in(reg32) source, in(reg32) bytes, options(nostack));
    }
}

/// Orders accesses to global memory by ordinary instructions and by bulk copies.
#[inline(always)]
pub(crate) fn fence_global() {
    // SAFETY: a fence touches no memory of ours.
    unsafe { asm!("fence.proxy.async.global;", options(nostack)) }
}

/// Brings a tensor map into the descriptor cache.
///
/// # Safety
/// `map` must be the address of a valid tensor map.
#[inline(always)]
pub(crate) unsafe fn prefetch_map(map: u64) {
    // SAFETY: the caller gives a valid map.
    unsafe { asm!("prefetch.tensormap [{0}];", in(reg64) map, options(nostack)) }
}
