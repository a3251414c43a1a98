//! What the link really does on this machine.

use crate::driver::{DeviceBuffer, DriverError, Event, Gpu, PinnedBuffer, Stream};
use asym_gemm_kernels_gpu::args::ReadArgs;
use asym_gemm_kernels_gpu::elementwise;
use std::ffi::c_void;

/// Measured rates in GB/s (10^9 bytes a second), medians.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct LinkRates {
    /// Pinned host memory to HBM by the copy engine.
    pub copy_engine: f64,
    /// Pinned host memory read by the SMs.
    pub sm_read: f64,
    /// HBM read by the SMs.
    pub hbm_read: f64,
}

/// Timed rounds of each measurement; the median counts.
const ROUNDS: usize = 5;

/// Measures the link with a buffer of `bytes` (at least 64 MiB for a fair figure).
///
/// # Errors
/// If memory is short or the driver fails.
pub fn measure_link(gpu: &Gpu, bytes: usize) -> Result<LinkRates, DriverError> {
    let bytes = bytes.next_multiple_of(16);
    let mut host = PinnedBuffer::alloc(gpu, bytes)?;
    host.as_mut_slice().fill(1);
    let device = DeviceBuffer::<u8>::zeroed(gpu, bytes)?;
    let sink = DeviceBuffer::<u32>::zeroed(gpu, 1)?;
    let stream = Stream::new(gpu)?;
    let kernel = gpu.module(elementwise::FAMILY)?.function("read_probe")?;
    let rate = |work: &mut dyn FnMut() -> Result<(), DriverError>| {
        let mut seconds = Vec::with_capacity(ROUNDS);
        for round in 0..=ROUNDS {
            let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
            start.record(&stream)?;
            work()?;
            end.record(&stream)?;
            stream.synchronize()?;
            if round > 0 {
                seconds.push(f64::from(end.elapsed_ms(&start)?) * 1e-3);
            }
        }
        seconds.sort_by(f64::total_cmp);
        Ok::<f64, DriverError>(bytes as f64 / seconds[ROUNDS / 2] / 1e9)
    };
    let read = |source: u64| {
        let mut args = ReadArgs {
            source,
            vectors: bytes as u64 / 16,
            sink: sink.as_raw(),
        };
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the kernel reads `bytes` at `source`, which both callers allocated, and
        // may write one word at `sink`.
        unsafe {
            kernel.launch(
                (gpu.sm_count() * 8, 1, 1),
                (256, 1, 1),
                0,
                stream.as_raw(),
                &mut params,
            )
        }
    };
    Ok(LinkRates {
        copy_engine: rate(&mut || {
            // SAFETY: the host buffer outlives the synchronisation in `rate`.
            unsafe { device.copy_from_host_async(0, host.as_slice(), &stream) }
        })?,
        sm_read: rate(&mut || read(host.device_ptr()))?,
        hbm_read: rate(&mut || read(device.as_raw()))?,
    })
}
