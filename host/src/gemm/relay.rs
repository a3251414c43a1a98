//! Device memory of the relay: what couriers bring from host memory, for all row tiles.

use crate::driver::{DeviceBuffer, DriverError, Gpu, Stream};
use asym_gemm_kernels_gpu::args::{GemmArgs, RelayArgs};
use asym_gemm_kernels_gpu::relay::{UNIT_BYTES, units};
use asym_gemm_kernels_gpu::tile::Tile;

/// Blocks that copy. Eight with 64 KiB in flight reach the link's rate; these have three
/// times that, and the others still compute faster than weights arrive.
const COURIERS: u32 = 12;
/// Bytes of the ring, unless a column tile needs more: well inside the L2 cache.
const RING_BYTES: u64 = 24 << 20;
/// Column tiles that the ring holds at least: one in use, one arriving.
const MIN_COLUMN_TILES: u32 = 2;

/// The relay's ring and hand-over words, which grow with the largest launch so far.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    ring: Option<DeviceBuffer<u8>>,
    state: Option<DeviceBuffer<u32>>,
}

impl Relay {
    /// Prepares a launch of `args` with `tile` on `stream`: memory that is large enough, with
    /// nothing in it yet.
    ///
    /// # Errors
    /// If memory is short or the driver fails.
    ///
    /// # Safety
    /// The last launch that used this relay comes before this one in stream order.
    pub(crate) unsafe fn prepare(
        &mut self,
        gpu: &Gpu,
        tile: Tile,
        args: &GemmArgs,
        stream: &Stream,
    ) -> Result<RelayArgs, DriverError> {
        let per_tile = units(tile, args.k_steps);
        let slots = (RING_BYTES / u64::from(UNIT_BYTES)) as u32;
        let slots = slots.max(per_tile.saturating_mul(MIN_COLUMN_TILES));
        let column_tiles = args.group_count as usize * args.n.div_ceil(tile.n) as usize;
        let ring = grown(&mut self.ring, gpu, slots as usize * UNIT_BYTES as usize)?.as_raw();
        let state = grown(&mut self.state, gpu, slots as usize + column_tiles)?;
        // SAFETY: the caller orders launches.
        unsafe { state.fill_bytes_async(0, stream)? };
        Ok(RelayArgs {
            ring,
            state: state.as_raw(),
            slots,
            couriers: COURIERS.min(gpu.sm_count() / 4).max(1),
        })
    }
}

/// The buffer in `slot`, replaced by a larger one if it is shorter than `len`. Freeing waits
/// for the device, so earlier launches are done with the old one.
fn grown<'a, T: bytemuck::Pod>(
    slot: &'a mut Option<DeviceBuffer<T>>,
    gpu: &Gpu,
    len: usize,
) -> Result<&'a DeviceBuffer<T>, DriverError> {
    let buffer = match slot.take() {
        Some(buffer) if buffer.len() >= len => buffer,
        _ => DeviceBuffer::alloc(gpu, len)?,
    };
    Ok(slot.insert(buffer))
}
