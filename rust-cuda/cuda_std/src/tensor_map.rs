//! Tensor maps (`CUtensorMap`) as kernel parameters.

/// A TMA descriptor, encoded by the driver (`cuTensorMapEncodeTiled`) and opaque.
///
/// The hardware wants 64-byte alignment. rustc cannot pass an over-aligned
/// struct to a kernel, so the type is aligned to 8 and `cuda_builder` raises the
/// alignment of the 128-byte parameter in the PTX. A kernel takes it as
/// `#[grid_constant] map: &TensorMap`: see [`kernel`](crate::kernel).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// Generic address of the descriptor, for `cp.async.bulk.tensor` and
    /// `prefetch.tensormap`.
    #[inline(always)]
    #[must_use]
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self) as u64
    }
}

const _: () = assert!(size_of::<TensorMap>() == 128 && align_of::<TensorMap>() == 8);
