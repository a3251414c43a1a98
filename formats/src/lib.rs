//! Number formats, quantisation recipes and weight layouts.
//!
//! Everything here is plain arithmetic, shared by the CPU kernels, the GPU
//! kernels (this crate also compiles for `nvptx64`) and the scalar reference,
//! so that the three agree bit for bit:
//!
//! - [`bf16`], [`e4m3`], [`e2m1`]: codecs. Rounding is to nearest, ties to even; NaN stays
//!   NaN where the format has one; e4m3 and e2m1 saturate. [`e8m0`]: scales that are powers of
//!   two. [`e5m2`]: read only.
//! - [`int8`]: the two INT8 recipes, one scale a row ([`int8::per_row_scale`]) or
//!   one scale a row and 128 columns ([`int8::block_scale`]).
//! - [`fp8`]: e4m3 weights with one scale a block of 128 x 128.
//! - [`nvfp4`], [`mxfp4`]: e2m1 weights with a scale for each 16 or 32 columns of a row.
//! - [`int4`]: groups of 4-bit integers, read only.
//! - [`activation`]: the gated activations of MoE experts over one fixed
//!   polynomial for `exp`.
//! - [`bank`]: where each byte of an expert lies in the weight bank.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(core_float_math))]

#[cfg(feature = "std")]
extern crate std;

pub mod activation;
pub mod bank;
pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod e5m2;
pub mod e8m0;
pub mod fp8;
pub mod int4;
pub mod int8;
pub mod mxfp4;
pub mod nvfp4;

/// How the weights of a bank or of a GEMM's B operand are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// bfloat16, no scales.
    Bf16,
    /// INT8, one f32 scale for each output row (all of K).
    Int8PerRow,
    /// INT8, one f32 scale for each output row and 128 columns of K.
    Int8Block128,
    /// FP8 E4M3, one f32 scale for each block of 128 output rows and 128 columns of K.
    Fp8Block128,
    /// FP4 E2M1, one E4M3 scale for each output row and 16 columns of K, one f32 scale a matrix.
    Nvfp4,
    /// FP4 E2M1, one UE8M0 scale for each output row and 32 columns of K.
    Mxfp4,
}

impl WeightFormat {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Bf16,
        Self::Int8PerRow,
        Self::Int8Block128,
        Self::Fp8Block128,
        Self::Nvfp4,
        Self::Mxfp4,
    ];

    /// Bytes of one stored element, rounded up: two of fp4 share one.
    pub const fn element_bytes(self) -> usize {
        self.element_bits().div_ceil(8)
    }

    /// Bits of one stored element, without its scales.
    pub const fn element_bits(self) -> usize {
        match self {
            Self::Bf16 => 16,
            Self::Int8PerRow | Self::Int8Block128 | Self::Fp8Block128 => 8,
            Self::Nvfp4 | Self::Mxfp4 => 4,
        }
    }

    /// Bytes of one activation as the kernels multiply it with these weights: int8 for int8,
    /// else bf16.
    pub const fn activation_bytes(self) -> usize {
        match self {
            Self::Int8PerRow | Self::Int8Block128 => 1,
            Self::Bf16 | Self::Fp8Block128 | Self::Nvfp4 | Self::Mxfp4 => 2,
        }
    }

    /// In fp4 the columns of a row that share a scale, which lies beside their codes.
    pub const fn scale_group(self) -> Option<usize> {
        match self {
            Self::Nvfp4 => Some(nvfp4::BLOCK),
            Self::Mxfp4 => Some(mxfp4::BLOCK),
            _ => None,
        }
    }

    /// The name used on the command line, in logs and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8PerRow => "int8",
            Self::Int8Block128 => "int8-block128",
            Self::Fp8Block128 => "fp8",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

impl core::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// `a * b + c` with one rounding, on every target.
///
/// The result is that of IEEE 754 fusedMultiplyAdd, so the CPU kernels
/// (`vfmadd`), the GPU kernels (`fma.rn.f32`) and this function agree bit for bit.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::f32::math::mul_add(a, b, c);
    #[cfg(all(not(target_arch = "nvptx64"), feature = "std"))]
    return a.mul_add(b, c);
    #[cfg(all(not(target_arch = "nvptx64"), not(feature = "std")))]
    return libm::fmaf(a, b, c);
}

/// 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 to an integer, ties to even.
pub const ROUND_MAGIC: f32 = 12_582_912.0;

/// Rounds to the nearest integer, ties to even. Exact for |x| < 2^22.
#[inline(always)]
pub fn round_half_even(x: f32) -> f32 {
    (x + ROUND_MAGIC) - ROUND_MAGIC
}

/// The larger of `a` and `b`; NaN if `b` is NaN.
///
/// Unlike `f32::max`, which drops NaN: a row that holds NaN must not look finite.
#[inline(always)]
pub fn max_keep_nan(a: f32, b: f32) -> f32 {
    // `!(a >= b)` is true when b is larger and when either is NaN; the second
    // clause keeps a NaN that is already in `a`.
    if a >= b || a.is_nan() { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_half_even_ties() {
        for (x, want) in [
            (0.5, 0.0),
            (1.5, 2.0),
            (2.5, 2.0),
            (-0.5, 0.0),
            (-1.5, -2.0),
            (126.5, 126.0),
        ] {
            assert_eq!(round_half_even(x), want, "{x}");
        }
    }

    #[test]
    fn max_keeps_nan_from_either_side() {
        assert!(max_keep_nan(f32::NAN, 1.0).is_nan());
        assert!(max_keep_nan(1.0, f32::NAN).is_nan());
        assert_eq!(max_keep_nan(1.0, 2.0), 2.0);
    }
}
