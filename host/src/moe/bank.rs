//! The weights of one layer's experts in one host allocation.
//!
//! The layout is `asym_gemm_formats::bank`; CPU and GPU read the same bytes.

use super::MoeError;
#[cfg(feature = "cuda")]
use crate::driver::{DriverError, Gpu, PinnedBuffer};
use crate::system::zeroed;
use asym_gemm_cpu::{BankRef, CpuError, ExpertSource, pack_expert};
use asym_gemm_formats::bank::BankGeometry;
use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;

/// Plain memory is allocated in these, so that a bank starts on a cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CacheLine([u8; 64]);

/// Memory of a bank.
enum Memory {
    /// Ordinary memory: CPU only.
    Plain(Vec<CacheLine>),
    /// Page-locked and mapped for the GPU.
    #[cfg(feature = "cuda")]
    Pinned(PinnedBuffer),
}

/// Refuses a shape that makes no bank, before its size is computed and allocated.
fn check(geometry: BankGeometry) -> Result<(), MoeError> {
    match BankRef::new(geometry, &[]) {
        // Of the length, which is not that of a bank yet.
        Ok(_) | Err(CpuError::Mismatch { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Weights of one layer's experts, packed.
pub struct ExpertBank {
    geometry: BankGeometry,
    memory: Memory,
}

impl std::fmt::Debug for ExpertBank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertBank")
            .field("geometry", &self.geometry)
            .field("pinned", &self.is_pinned())
            .finish()
    }
}

impl ExpertBank {
    /// Packs every expert into ordinary memory, for the CPU.
    ///
    /// `source(e)` gives expert e's weights; `packed` is called after each expert.
    ///
    /// # Errors
    /// If a dimension is 0 or too large, or a bias has the wrong length.
    pub fn plain<S: ExpertSource>(
        geometry: BankGeometry,
        source: impl Fn(usize) -> S + Sync,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        check(geometry)?;
        let lines = geometry.bank_bytes().div_ceil(size_of::<CacheLine>());
        let memory = Memory::Plain(zeroed("the expert bank", lines, CacheLine::zeroed())?);
        Self { geometry, memory }.fill(source, packed)
    }

    /// Packs every expert into memory that `gpu` can fetch from.
    ///
    /// # Errors
    /// As [`Self::plain`]; also if the memory cannot be page-locked.
    #[cfg(feature = "cuda")]
    pub fn pinned<S: ExpertSource>(
        gpu: &Gpu,
        geometry: BankGeometry,
        source: impl Fn(usize) -> S + Sync,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        check(geometry)?;
        let memory = Memory::Pinned(PinnedBuffer::alloc(gpu, geometry.bank_bytes())?);
        Self { geometry, memory }.fill(source, packed)
    }

    /// As [`Self::pinned`], or in ordinary memory where that much cannot be pinned:
    /// [`Self::is_pinned`] tells. GPUs fetch from it more slowly then, through the driver's buffers.
    ///
    /// # Errors
    /// As [`Self::plain`].
    #[cfg(feature = "cuda")]
    pub fn pinned_or_plain<S: ExpertSource>(
        gpu: &Gpu,
        geometry: BankGeometry,
        source: impl Fn(usize) -> S + Sync,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        check(geometry)?;
        match PinnedBuffer::alloc(gpu, geometry.bank_bytes()) {
            Ok(buffer) => {
                let memory = Memory::Pinned(buffer);
                Self { geometry, memory }.fill(source, packed)
            }
            Err(error @ DriverError::OutOfMemory { .. }) => {
                tracing::warn!(%error, "the expert bank stays in ordinary memory: copies to the \
                     GPU are slower");
                Self::plain(geometry, source, packed)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn fill<S: ExpertSource>(
        mut self,
        source: impl Fn(usize) -> S + Sync,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        let geometry = self.geometry;
        self.bytes_mut()
            .par_chunks_exact_mut(geometry.expert_bytes())
            .enumerate()
            .try_for_each(|(expert, out)| {
                pack_expert(geometry, out, &source(expert))?;
                packed();
                Ok::<(), MoeError>(())
            })?;
        Ok(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.memory {
            Memory::Plain(lines) => bytemuck::cast_slice_mut(lines),
            #[cfg(feature = "cuda")]
            Memory::Pinned(buffer) => buffer.as_mut_slice(),
        };
        &mut bytes[..self.geometry.bank_bytes()]
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        let bytes = match &self.memory {
            Memory::Plain(lines) => bytemuck::cast_slice(lines),
            #[cfg(feature = "cuda")]
            Memory::Pinned(buffer) => buffer.as_slice(),
        };
        &bytes[..self.geometry.bank_bytes()]
    }

    /// Shape and format.
    pub fn geometry(&self) -> BankGeometry {
        self.geometry
    }

    /// Whether a GPU can fetch from it.
    pub fn is_pinned(&self) -> bool {
        !matches!(self.memory, Memory::Plain(_))
    }

    /// Device address of the first byte, if the bank is pinned.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_address(&self) -> Option<u64> {
        match &self.memory {
            Memory::Plain(_) => None,
            Memory::Pinned(buffer) => Some(buffer.device_ptr()),
        }
    }

    /// The bank as the CPU kernels take it.
    ///
    /// # Errors
    /// If the geometry is one that the CPU kernels refuse.
    pub fn view(&self) -> Result<BankRef<'_>, MoeError> {
        Ok(BankRef::new(self.geometry, self.bytes())?)
    }
}
