//! Token rows packed by expert on the GPU, in the order of atomic additions.

use super::run::GpuGemm;
use crate::driver::{DeviceBuffer, Stream};
use crate::gemm::GemmError;
use asym_gemm_kernels_gpu::dense::FAMILY;
use asym_gemm_kernels_gpu::dense::scatter::{PLAN_THREADS, ROW_THREADS, ScatterArgs};
use std::ffi::c_void;

/// Where token rows go.
#[derive(Clone, Copy, Debug)]
pub struct ScatterPlan<'a> {
    /// [T, top_k], experts; ids outside `0..experts` are skipped slots.
    pub ids: &'a DeviceBuffer<i32>,
    /// Slots of a token.
    pub top_k: usize,
    /// Number of experts.
    pub experts: usize,
    /// Each expert's rows start at a multiple of this power of two.
    pub alignment: usize,
}

/// What [`GpuGemm::scatter`] made. The order of an expert's rows changes from call to call;
/// `output_index` says where each slot's row is.
#[derive(Debug)]
pub struct Scattered {
    /// Rows of padding included.
    pub rows: usize,
    /// x_packed, rows of `words` 4-byte words, as many as there can be at most.
    pub packed: DeviceBuffer<u32>,
    /// Expert of each packed row, padding included; -1 past `rows`.
    pub m_indices: DeviceBuffer<i32>,
    /// [T, top_k]: packed row of each slot, -1 for a skipped one.
    pub output_index: DeviceBuffer<i32>,
}

impl GpuGemm {
    /// Copies the rows of `x` [T, words] to their experts. Rows of padding are not written.
    ///
    /// # Errors
    /// Lengths that do not fit, an alignment that is no power of two, more than 2^31 rows, or a
    /// driver that fails.
    pub fn scatter(
        &mut self,
        x: &DeviceBuffer<u32>,
        words: usize,
        plan: ScatterPlan<'_>,
        stream: &Stream,
    ) -> Result<Scattered, GemmError> {
        let ScatterPlan {
            ids,
            top_k,
            experts,
            alignment,
        } = plan;
        let what = "scatter";
        let tokens = ids.len().checked_div(top_k).unwrap_or(0);
        let padding = experts
            .min(ids.len())
            .checked_mul(alignment.saturating_sub(1));
        let capacity = padding.and_then(|p| p.checked_add(ids.len()));
        let limit = i32::MAX as usize;
        let counts = [ids.len(), experts, words].iter().all(|&x| x <= limit);
        let capacity = capacity.filter(|&c| c <= limit && counts);
        if tokens * top_k != ids.len() || tokens.saturating_mul(words) > x.len() {
            return Err(GemmError::Shape {
                what,
                reason: format!(
                    "{} ids of {top_k} a token for {} words of rows of {words}",
                    ids.len(),
                    x.len()
                ),
            });
        }
        let (Some(capacity), true) = (capacity, alignment.is_power_of_two()) else {
            return Err(GemmError::Unsupported {
                what,
                reason: format!(
                    "{} slots aligned to {alignment}; alignments are powers of two, rows fewer than 2^31",
                    ids.len()
                ),
            });
        };
        let gpu = &self.gpu;
        let on_gpu = x.is_on(gpu) && ids.is_on(gpu) && stream.is_on(gpu);
        if !on_gpu {
            return Err(GemmError::OtherGpu { what });
        }
        let out = Scattered {
            rows: 0,
            packed: DeviceBuffer::alloc(gpu, (capacity * words).max(1))?,
            m_indices: DeviceBuffer::alloc(gpu, capacity.max(1))?,
            output_index: DeviceBuffer::alloc(gpu, ids.len().max(1))?,
        };
        let next = DeviceBuffer::<u32>::alloc(gpu, experts.max(1))?;
        let rows = DeviceBuffer::<u32>::alloc(gpu, 1)?;
        let mut args = ScatterArgs {
            ids: ids.as_raw(),
            next: next.as_raw(),
            m_indices: out.m_indices.as_raw(),
            output_index: out.output_index.as_raw(),
            rows: rows.as_raw(),
            x: x.as_raw(),
            packed: out.packed.as_raw(),
            slots: ids.len() as u32,
            top_k: top_k as u32,
            experts: experts as u32,
            alignment: alignment as u32,
            capacity: capacity as u32,
            words: words as u32,
        };
        let module = gpu.module(FAMILY)?;
        let (plan, copy) = (
            module.function("scatter_plan")?,
            module.function("scatter_rows")?,
        );
        let mut params = [(&raw mut args).cast::<c_void>()];
        let stream_raw = stream.as_raw();
        // SAFETY: buffers have the lengths that the arguments say and live until the wait below.
        let launched = unsafe {
            plan.launch((1, 1, 1), (PLAN_THREADS, 1, 1), 16, stream_raw, &mut params)
                .and_then(|()| match ids.len() {
                    0 => Ok(()),
                    slots => {
                        let grid = (slots as u32, 1, 1);
                        copy.launch(grid, (ROW_THREADS, 1, 1), 16, stream_raw, &mut params)
                    }
                })
        };
        let waited = stream.synchronize();
        launched?;
        waited?;
        let count = rows.to_vec()?.first().map_or(0, |&r| r as usize);
        Ok(Scattered { rows: count, ..out })
    }
}
