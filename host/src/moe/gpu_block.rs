//! The GPU side of an MoE block: upload, experts, weighted sum, download.

use super::block::Forward;
use super::gpu::{GpuExperts, grown};
use super::layout::{GroupRange, Packed};
use super::{ExpertBank, MoeError};
use crate::driver::{DeviceBuffer, DriverError, Gpu, Kernel, Stream};
use crate::transfer::Transfer;
use asym_gemm_formats::activation::Activation;
use asym_gemm_kernels_gpu::args::CombineArgs;
use asym_gemm_kernels_gpu::elementwise::{COMBINE_THREADS, FAMILY};
use std::ffi::c_void;
use std::sync::Arc;

/// Buffers that grow with the largest call so far.
#[derive(Debug, Default)]
struct Buffers {
    x: Option<DeviceBuffer<f32>>,
    y: Option<DeviceBuffer<f32>>,
    shared: Option<DeviceBuffer<f32>>,
    shared_weights: Option<DeviceBuffer<f32>>,
    output_index: Option<DeviceBuffer<i32>>,
    weights: Option<DeviceBuffer<f32>>,
    out: Option<DeviceBuffer<f32>>,
}

/// One MoE block's experts on one GPU, with its stream and buffers.
#[derive(Debug)]
pub struct GpuBlock {
    gpu: Gpu,
    stream: Stream,
    hidden: usize,
    experts: GpuExperts,
    shared: Option<GpuExperts>,
    combine: Kernel,
    buffers: Buffers,
}

impl GpuBlock {
    pub(super) fn new(
        gpu: &Gpu,
        experts: Arc<ExpertBank>,
        shared: Option<Arc<ExpertBank>>,
        transfer: Transfer,
        ring_bytes: Option<usize>,
    ) -> Result<Self, MoeError> {
        Ok(Self {
            gpu: gpu.clone(),
            stream: Stream::new(gpu)?,
            hidden: experts.geometry().hidden,
            experts: GpuExperts::new(gpu, experts, transfer, ring_bytes)?,
            shared: shared
                .map(|bank| GpuExperts::new(gpu, bank, transfer, ring_bytes))
                .transpose()?,
            combine: gpu.module(FAMILY)?.function("combine")?,
            buffers: Buffers::default(),
        })
    }

    /// The transfer in use; never `Auto`.
    pub fn transfer(&self) -> Transfer {
        self.experts.transfer()
    }

    /// Fills all scratch with NaN bytes; see [`GpuExperts::poison_scratch`].
    ///
    /// # Errors
    /// If the driver fails.
    pub fn poison_scratch(&mut self) -> Result<(), DriverError> {
        self.experts.poison_scratch()?;
        if let Some(shared) = &mut self.shared {
            shared.poison_scratch()?;
        }
        let b = &mut self.buffers;
        for buffer in [
            &mut b.x,
            &mut b.y,
            &mut b.shared,
            &mut b.shared_weights,
            &mut b.weights,
            &mut b.out,
        ] {
            buffer
                .as_mut()
                .map_or(Ok(()), |buffer| buffer.fill_bytes(0xff))?;
        }
        b.output_index
            .as_mut()
            .map_or(Ok(()), |buffer| buffer.fill_bytes(0xff))
    }

    /// Starts y[rows of `groups`] and, if `with_shared`, the shared expert's rows.
    pub(super) fn start(
        &mut self,
        f: &Forward<'_>,
        groups: &[GroupRange],
        with_shared: bool,
        activation: Activation,
    ) -> Result<Vec<String>, MoeError> {
        let started = self.enqueue(f, groups, with_shared, activation);
        if started.is_err() {
            // What was enqueued before the error still uses our buffers and the banks.
            self.wait()?;
        }
        started
    }

    fn enqueue(
        &mut self,
        f: &Forward<'_>,
        groups: &[GroupRange],
        with_shared: bool,
        activation: Activation,
    ) -> Result<Vec<String>, MoeError> {
        let (gpu, b) = (&self.gpu, &mut self.buffers);
        let x = grown(&mut b.x, gpu, f.x.len())?;
        let y = grown(&mut b.y, gpu, f.packed.rows * self.hidden)?;
        // SAFETY: buffers and banks live in self until `finish` or `wait`; packed rows name
        // tokens of this x.
        unsafe {
            x.copy_from_host_async(0, f.x, &self.stream)?;
            let mut plan =
                self.experts
                    .enqueue(x, f.packed, groups, activation, y, &self.stream)?;
            if let (true, Some(shared)) = (with_shared, &mut self.shared) {
                let rows = grown(&mut b.shared, gpu, f.x.len())?;
                let all = every_token(f.tokens);
                let more = shared.enqueue(x, &all, &all.groups, activation, rows, &self.stream)?;
                plan.kernels.extend(more.kernels);
            }
            plan.kernels.sort_unstable();
            plan.kernels.dedup();
            Ok(plan.kernels.iter().map(ToString::to_string).collect())
        }
    }

    /// Waits and brings y[rows of `groups`] and the shared expert's rows to the host.
    pub(super) fn finish(
        &mut self,
        f: &Forward<'_>,
        groups: &[GroupRange],
        with_shared: bool,
        y: &mut [f32],
    ) -> Result<Option<Vec<f32>>, MoeError> {
        self.wait()?;
        if let Some(device) = &self.buffers.y {
            for run in runs(groups) {
                let elements = run.start * self.hidden..run.end * self.hidden;
                device.copy_to_host_at(elements.start, &mut y[elements])?;
            }
        }
        match (&self.buffers.shared, &self.shared, with_shared) {
            (Some(device), Some(_), true) => {
                let mut rows = vec![0.0; f.x.len()];
                device.copy_to_host_at(0, &mut rows)?;
                Ok(Some(rows))
            }
            _ => Ok(None),
        }
    }

    /// The whole block on the GPU: output [T, H] and the kernels that ran.
    pub(super) fn forward(
        &mut self,
        f: &Forward<'_>,
        activation: Activation,
    ) -> Result<(Vec<f32>, Vec<String>), MoeError> {
        let kernels = self.start(f, &f.packed.groups, true, activation)?;
        let combined = self.enqueue_combine(f);
        self.wait()?;
        combined?;
        let mut out = vec![0.0; f.x.len()];
        if let Some(device) = &self.buffers.out {
            device.copy_to_host_at(0, &mut out)?;
        }
        Ok((out, kernels))
    }

    fn enqueue_combine(&mut self, f: &Forward<'_>) -> Result<(), MoeError> {
        if f.tokens == 0 {
            return Ok(());
        }
        let (gpu, b) = (&self.gpu, &mut self.buffers);
        let output_index = grown(&mut b.output_index, gpu, f.packed.output_index.len())?;
        let weights = grown(&mut b.weights, gpu, f.routing.weights.len())?;
        let shared_weights = grown(&mut b.shared_weights, gpu, f.shared_weights.len())?;
        let out = grown(&mut b.out, gpu, f.x.len())?;
        // SAFETY: copies from pageable memory have left it when the calls return; the kernel
        // runs over buffers of the sizes grown above, which live in self until `wait`.
        unsafe {
            output_index.copy_from_host_async(0, &f.packed.output_index, &self.stream)?;
            weights.copy_from_host_async(0, &f.routing.weights, &self.stream)?;
            shared_weights.copy_from_host_async(0, &f.shared_weights, &self.stream)?;
            let mut args = CombineArgs {
                y: b.y.as_ref().map_or(0, DeviceBuffer::as_raw),
                output_index: output_index.as_raw(),
                weights: weights.as_raw(),
                partials: 0,
                partial_stride: 0,
                shared: match (&self.shared, &b.shared) {
                    (Some(_), Some(rows)) => rows.as_raw(),
                    _ => 0,
                },
                shared_weights: shared_weights.as_raw(),
                out: out.as_raw(),
                hidden: self.hidden as u32,
                top_k: f.routing.top_k as u32,
                partial_count: 0,
                out_bf16: 0,
            };
            let mut params = [(&raw mut args).cast::<c_void>()];
            let columns = (self.hidden as u32).div_ceil(COMBINE_THREADS);
            let grid = (f.tokens as u32, columns, 1);
            let stream = self.stream.as_raw();
            self.combine
                .launch(grid, (COMBINE_THREADS, 1, 1), 0, stream, &mut params)?;
        }
        Ok(())
    }

    /// Waits for all that was enqueued, kernels and copies; for each of them, also after one
    /// has failed, since all read memory that the caller may free next.
    fn wait(&self) -> Result<(), MoeError> {
        let computed = self.stream.synchronize();
        let copied = self.experts.synchronize_copies();
        let shared = self
            .shared
            .as_ref()
            .map_or(Ok(()), GpuExperts::synchronize_copies);
        Ok(computed.and(copied).and(shared)?)
    }
}

impl Drop for GpuBlock {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::warn!(%error, "waiting for an MoE block's GPU work before freeing it");
        }
    }
}

/// Every token once, in order, for one expert.
fn every_token(tokens: usize) -> Packed {
    Packed {
        rows: tokens,
        m_indices: vec![0; tokens],
        output_index: (0..tokens as i32).collect(),
        source_token: (0..tokens as i32).collect(),
        groups: match tokens {
            0 => Vec::new(),
            _ => vec![GroupRange {
                expert: 0,
                start: 0,
                end: tokens,
            }],
        },
    }
}

/// Row ranges of `groups` (ascending), neighbours joined.
fn runs(groups: &[GroupRange]) -> Vec<std::ops::Range<usize>> {
    let mut out: Vec<std::ops::Range<usize>> = Vec::new();
    for g in groups {
        match out.last_mut() {
            Some(last) if last.end == g.start => last.end = g.end,
            _ => out.push(g.start..g.end),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_rows_are_fetched_together() {
        let group = |start, end| GroupRange {
            expert: 0,
            start,
            end,
        };
        assert_eq!(runs(&[group(0, 3), group(3, 5), group(7, 8)]), [0..5, 7..8]);
    }
}
