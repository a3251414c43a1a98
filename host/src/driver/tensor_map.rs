//! Tensor maps: how TMA finds a box of a tensor in global memory.

use std::ffi::{c_int, c_uint};

use super::error::{DriverError, invalid};
use super::load::load;

const MAX_RANK: usize = 5;
const MAX_SIZE: u64 = 1 << 31;
const MAX_STRIDE_BYTES: u64 = 1 << 40;
const MAX_BOX: u32 = 256;
const SWIZZLE_BYTES: u64 = 128;

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorElement {
    /// 8 bits of any meaning: int8, fp8, packed fp4.
    U8,
    /// 16-bit integer.
    U16,
    /// 32-bit integer.
    U32,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
}

impl TensorElement {
    /// Size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::F32 => 4,
        }
    }

    /// `CUtensorMapDataType`.
    const fn code(self) -> c_int {
        match self {
            Self::U8 => 0,
            Self::U16 => 1,
            Self::U32 => 2,
            Self::F16 => 6,
            Self::F32 => 7,
            Self::Bf16 => 9,
        }
    }
}

/// How much of a line an L2 miss fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum L2Promotion {
    /// What was asked for.
    #[default]
    None,
    /// 64 bytes.
    Bytes64,
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    Bytes256,
}

/// What a [`TensorMap`] describes. Dimension 0 is the innermost, contiguous one.
#[derive(Clone, Copy, Debug)]
pub struct TensorMapDesc<'a> {
    /// Element type.
    pub element: TensorElement,
    /// Device address of element 0: a multiple of 16.
    pub global_address: u64,
    /// Elements in each of 1 to 5 dimensions, each 1 to 2^31.
    pub sizes: &'a [u64],
    /// Bytes from one index to the next in dimensions 1 and on (one fewer than `sizes`):
    /// multiples of 16 below 2^40.
    pub strides_bytes: &'a [u64],
    /// Elements of the box in each dimension, each 1 to 256; the innermost must come to a
    /// multiple of 16 bytes, and to at most 128 with `swizzle128`.
    pub box_sizes: &'a [u32],
    /// Permute 16-byte units in shared memory within 8 rows of 128 bytes; the destination
    /// must then be aligned to 1024 bytes (to 128 otherwise).
    pub swizzle128: bool,
    /// L2 promotion.
    pub l2_promotion: L2Promotion,
}

/// An encoded tensor map: 128 bytes that a kernel takes as a `__grid_constant__` parameter
/// or reads from device memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// Checks the description and lets the driver encode it. Box elements outside the
    /// tensor read as zero and are not written. A context must be current: the driver
    /// refuses otherwise, see [`Gpu::enter`](super::Gpu::enter).
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] naming the broken rule; as
    /// [`load`](super::load()) without a driver; [`DriverError::DriverTooOld`] if it
    /// cannot encode tensor maps; [`DriverError::Cuda`] if it refuses.
    pub fn encode(desc: &TensorMapDesc<'_>) -> Result<Self, DriverError> {
        desc.validate()
            .map_err(|reason| invalid("TensorMap::encode", reason))?;
        let driver = load()?;
        let Some(call) = driver.api.tensor_map_encode_tiled else {
            return Err(DriverError::DriverTooOld {
                driver: driver.version(),
                needed: (12, 0),
            });
        };
        let mut map = Self([0; 16]);
        let element_strides = [1u32; MAX_RANK];
        // SAFETY: the destination is 128 bytes aligned to 64; the arrays have `rank`
        // (strides: rank - 1) entries, as `validate` checked; the call only encodes, it
        // does not touch the tensor.
        let code = unsafe {
            call(
                (&raw mut map).cast(),
                desc.element.code(),
                desc.sizes.len() as c_uint,
                desc.global_address,
                desc.sizes.as_ptr(),
                desc.strides_bytes.as_ptr(),
                desc.box_sizes.as_ptr(),
                element_strides.as_ptr(),
                0, // CU_TENSOR_MAP_INTERLEAVE_NONE
                if desc.swizzle128 { 3 } else { 0 },
                desc.l2_promotion as c_int,
                0, // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
            )
        };
        driver.check_with_log("cuTensorMapEncodeTiled", code, || format!("{desc:?}"))?;
        Ok(map)
    }

    /// The descriptor's bytes, to be copied to device memory.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl TensorMapDesc<'_> {
    fn validate(&self) -> Result<(), String> {
        let rank = self.sizes.len();
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(format!("rank {rank} is outside 1..={MAX_RANK}"));
        }
        if self.strides_bytes.len() != rank - 1 {
            return Err(format!(
                "{} strides for rank {rank}: one for each dimension but the innermost",
                self.strides_bytes.len()
            ));
        }
        if self.box_sizes.len() != rank {
            return Err(format!(
                "{} box sizes for rank {rank}",
                self.box_sizes.len()
            ));
        }
        if self.global_address == 0 || !self.global_address.is_multiple_of(16) {
            return Err(format!(
                "global address {:#x} is not a non-null multiple of 16",
                self.global_address
            ));
        }
        for (dimension, &size) in self.sizes.iter().enumerate() {
            if !(1..=MAX_SIZE).contains(&size) {
                return Err(format!(
                    "size {size} of dimension {dimension} is outside 1..=2^31"
                ));
            }
        }
        for (index, &stride) in self.strides_bytes.iter().enumerate() {
            if !stride.is_multiple_of(16) || stride >= MAX_STRIDE_BYTES {
                return Err(format!(
                    "stride {stride} of dimension {} is not a multiple of 16 bytes below 2^40",
                    index + 1
                ));
            }
        }
        for (dimension, &size) in self.box_sizes.iter().enumerate() {
            if !(1..=MAX_BOX).contains(&size) {
                return Err(format!(
                    "box size {size} of dimension {dimension} is outside 1..={MAX_BOX}"
                ));
            }
        }
        let inner_bytes = u64::from(self.box_sizes[0]) * self.element.bytes();
        if !inner_bytes.is_multiple_of(16) {
            return Err(format!(
                "the box is {inner_bytes} bytes wide, which is not a multiple of 16"
            ));
        }
        if self.swizzle128 && inner_bytes > SWIZZLE_BYTES {
            return Err(format!(
                "the box is {inner_bytes} bytes wide, the 128-byte swizzle allows {SWIZZLE_BYTES}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: TensorMapDesc<'static> = TensorMapDesc {
        element: TensorElement::Bf16,
        global_address: 0x7000_0000_0010,
        sizes: &[4096, 1000, 8],
        strides_bytes: &[8192, 8_192_000],
        box_sizes: &[64, 128, 1],
        swizzle128: true,
        l2_promotion: L2Promotion::Bytes256,
    };

    #[test]
    fn the_descriptor_has_the_size_and_alignment_of_cuda_h() {
        assert_eq!(size_of::<TensorMap>(), 128);
        assert_eq!(align_of::<TensorMap>(), 64);
        assert_eq!(L2Promotion::Bytes256 as c_int, 3);
    }

    #[test]
    fn descriptions_at_the_limits_pass() {
        let limits = [
            GOOD,
            TensorMapDesc {
                sizes: &[1 << 31, 1, 1],
                ..GOOD
            },
            TensorMapDesc {
                strides_bytes: &[16, (1 << 40) - 16],
                ..GOOD
            },
            TensorMapDesc {
                box_sizes: &[8, 256, 256],
                ..GOOD
            },
            TensorMapDesc {
                swizzle128: false,
                box_sizes: &[256, 256, 1],
                ..GOOD
            },
            TensorMapDesc {
                sizes: &[64],
                strides_bytes: &[],
                box_sizes: &[8],
                ..GOOD
            },
            TensorMapDesc {
                sizes: &[64; 5],
                strides_bytes: &[128; 4],
                box_sizes: &[16; 5],
                element: TensorElement::U8,
                ..GOOD
            },
        ];
        for desc in limits {
            assert_eq!(desc.validate(), Ok(()), "{desc:?}");
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        let broken = [
            (TensorMapDesc { sizes: &[], ..GOOD }, "rank 0"),
            (
                TensorMapDesc {
                    sizes: &[8; 6],
                    ..GOOD
                },
                "rank 6",
            ),
            (
                TensorMapDesc {
                    strides_bytes: &[8192],
                    ..GOOD
                },
                "1 strides",
            ),
            (
                TensorMapDesc {
                    box_sizes: &[64, 128],
                    ..GOOD
                },
                "2 box sizes",
            ),
            (
                TensorMapDesc {
                    global_address: 0,
                    ..GOOD
                },
                "global address 0x0",
            ),
            (
                TensorMapDesc {
                    global_address: 0x108,
                    ..GOOD
                },
                "global address 0x108",
            ),
            (
                TensorMapDesc {
                    sizes: &[4096, 0, 8],
                    ..GOOD
                },
                "size 0 of dimension 1",
            ),
            (
                TensorMapDesc {
                    sizes: &[4096, 1, (1 << 31) + 1],
                    ..GOOD
                },
                "size 2147483649 of dimension 2",
            ),
            (
                TensorMapDesc {
                    strides_bytes: &[8200, 16],
                    ..GOOD
                },
                "stride 8200 of dimension 1",
            ),
            (
                TensorMapDesc {
                    strides_bytes: &[16, 1 << 40],
                    ..GOOD
                },
                "stride 1099511627776 of dimension 2",
            ),
            (
                TensorMapDesc {
                    box_sizes: &[64, 257, 1],
                    ..GOOD
                },
                "box size 257",
            ),
            (
                TensorMapDesc {
                    box_sizes: &[64, 1, 0],
                    ..GOOD
                },
                "box size 0 of dimension 2",
            ),
            (
                TensorMapDesc {
                    box_sizes: &[12, 1, 1],
                    ..GOOD
                },
                "24 bytes wide",
            ),
            (
                TensorMapDesc {
                    box_sizes: &[128, 1, 1],
                    ..GOOD
                },
                "swizzle allows 128",
            ),
        ];
        for (desc, want) in broken {
            match TensorMap::encode(&desc) {
                Err(DriverError::InvalidArgument { reason, .. }) => {
                    assert!(reason.contains(want), "{reason} lacks {want}");
                }
                other => panic!("{desc:?} gave {other:?}"),
            }
        }
    }
}
