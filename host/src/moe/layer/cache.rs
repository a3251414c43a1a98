//! Whole experts in HBM, under a budget in bytes.
//!
//! A cell is filled on a stream of its own once the products that may read it are done;
//! the next forward's products wait for the fill. Neither waits on the host.

use super::super::{ExpertBank, MoeError};
use super::cells::Cells;
use super::residency::Cached;
use crate::driver::{DeviceBuffer, DriverError, Event, Gpu, Stream};
use asym_gemm_formats::bank::BankGeometry;

/// A layer's experts on one device.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) cached: Cached,
    memory: Option<Memory>,
}

#[derive(Debug)]
struct Memory {
    buffer: DeviceBuffer<u8>,
    cells: Cells,
    fills: Stream,
    filled: Event,
}

impl Cache {
    /// As many cells as `bytes` and the device have room for; half as many, and so on, where it
    /// has less.
    pub(super) fn new(gpu: &Gpu, geometry: &BankGeometry, bytes: usize) -> Result<Self, MoeError> {
        let mut cells = (bytes / geometry.expert_bytes()).min(geometry.experts);
        let buffer = loop {
            if cells == 0 {
                return Ok(Self {
                    cached: Cached::new(geometry.experts, 0),
                    memory: None,
                });
            }
            match DeviceBuffer::<u8>::alloc(gpu, cells * geometry.expert_bytes()) {
                Err(DriverError::OutOfMemory { .. }) => {
                    cells /= 2;
                    tracing::warn!(cells, "device memory is short: the expert cache shrinks");
                }
                made => break made?,
            }
        };
        let run = (1, buffer.len());
        Ok(Self {
            cached: Cached::new(geometry.experts, cells),
            memory: Some(Memory {
                cells: Cells::new(gpu, geometry, buffer.as_raw(), run, cells)?,
                buffer,
                fills: Stream::new(gpu)?,
                filled: Event::untimed(gpu)?,
            }),
        })
    }

    pub(super) fn cells(&self) -> Option<&Cells> {
        self.memory.as_ref().map(|memory| &memory.cells)
    }

    /// Bytes of HBM.
    pub(super) fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.buffer.len())
    }

    /// Makes `compute` wait for the fills so far.
    pub(super) fn join(&self, compute: &Stream) -> Result<(), DriverError> {
        match &self.memory {
            Some(memory) => compute.wait(&memory.filled),
            None => Ok(()),
        }
    }

    /// Starts to fill `cell` with `expert` after `unused`, the last product that may read the
    /// cell; from now on the cell is the expert's.
    ///
    /// # Safety
    /// The bank stays alive and unchanged until the copy is done.
    pub(super) unsafe fn fill(
        &mut self,
        bank: &ExpertBank,
        cell: usize,
        expert: usize,
        unused: &Event,
    ) -> Result<(), MoeError> {
        let Some(memory) = &self.memory else {
            return Ok(());
        };
        let bytes = bank.geometry().expert_bytes();
        let source = &bank.bytes()[expert * bytes..][..bytes];
        // Until the copy is enqueued the cell holds nothing that anybody may use.
        self.cached.evict(cell);
        memory.fills.wait(unused)?;
        // SAFETY: the caller keeps the bank; events order the copy after the cell's readers and
        // before its next ones.
        unsafe {
            memory
                .buffer
                .copy_from_host_async(cell * bytes, source, &memory.fills)?;
        }
        memory.filled.record(&memory.fills)?;
        self.cached.place(cell, expert);
        Ok(())
    }

    /// Waits for the fills so far.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        match &self.memory {
            Some(memory) => memory.fills.synchronize(),
            None => Ok(()),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            tracing::warn!(%error, "waiting for copies into an expert cache before freeing it");
        }
    }
}
