//! Products of weight panels and groups of tokens, for each instruction set.
//!
//! [`Multiply`] is what a processor offers to the rest of the crate: 16 weight rows times groups of
//! 16 tokens. Two kinds of kernels implement it:
//!
//! - [`amx`] multiplies tiles: weights as stored, tokens as columns;
//! - [`by_rows`] builds it from [`Dot`], the dot products of a panel with one, two or four rows of
//!   activations, which AVX-512, AVX2 and plain Rust implement.
//!
//! Everything around a product (scales, activation function, requantisation) is written once as
//! [`Body`]s in plain Rust. [`Kernel::run`] compiles a body for the instruction set at hand, so that
//! its loops become wide vector code there while every operation, and so every bit, stays the
//! same: rustc neither reorders nor contracts floating-point operations.

pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod by_rows;
mod operands;
mod portable;

use asym_gemm_formats::WeightFormat;

#[cfg(target_arch = "x86_64")]
use crate::isa::{Amx, Avx512Bf16, Avx512Vnni};
use crate::isa::{Features, Isa};
use crate::tile::{Lanes, Tile};
use amx::Emulated;
use by_rows::ByRows;
pub(crate) use operands::{Group, Panel, Products, Span, TokenLayout};
use portable::Portable;

/// Products of 16 weight rows with groups of 16 tokens.
///
/// `x` holds 1 to [`Multiply::GROUPS`] groups, `out` one tile for each: row = weight row, lane =
/// token; lanes of tokens that do not exist are unspecified. `span.unit` plus the panel's units lie
/// inside K. Methods are `#[inline(always)]` and take on the target features of the
/// [`Body`] they are called from.
pub(crate) trait Multiply: Copy {
    /// How the groups are laid out.
    const LAYOUT: TokenLayout;
    /// Groups that one reading of the weights serves.
    const GROUPS: usize;
    /// Units of K after which another panel's turn comes, if the weights are read more than once.
    const CHUNK_UNITS: usize;

    /// Exact i32 sums (the caller bounds K) of i8 weights and i8 activations.
    fn s8(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, i32>);

    /// f32 sums of bf16 weights and bf16 activations. The order of a token's additions depends on
    /// the panel alone, never on the other tokens or on how K was cut into spans.
    fn bf16(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, f32>);

    /// Rows become columns.
    fn transpose(self, tile: &Tile<u32>) -> Tile<u32>;
}

/// Dot products of a panel with `T` (1, 2 or 4) rows of activations.
///
/// The panel is one run; each row of `x` is as long as a panel row. Implementations check that.
/// Methods are `#[inline(always)]`, as those of [`Multiply`].
pub(crate) trait Dot: Copy {
    /// Exact i32 sums (the caller bounds K) of i8 weights and i8 activations. `sums[t]` is the sum of
    /// `x[t]`, for instruction sets that offset the weights to unsigned.
    fn s8<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T], sums: [i32; T])
    -> [Lanes<i32>; T];

    /// f32 sums of bf16 weights and bf16 activations. The order of the additions depends on K
    /// alone, never on `T`.
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T];

    /// Rows become columns.
    #[inline(always)]
    fn transpose(self, tile: &Tile<u32>) -> Tile<u32> {
        tile.transposed()
    }
}

/// A piece of work that is compiled once for each instruction set. Implement `run` with
/// `#[inline(always)]`: it then takes on the target features of its caller.
pub(crate) trait Body {
    /// Does the work.
    fn run<M: Multiply>(self, m: M);
}

/// The instruction set that a call uses, with the proof that it may.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    /// Plain Rust.
    Portable,
    /// AVX-512 with VNNI; bf16 is widened to f32 for fused multiply-adds.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    /// AVX-512 with VNNI and BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    /// AMX int8 and bf16 tiles, AVX-512 around them.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// What `Amx` does, in plain Rust.
    EmulatedAmx,
}

impl Kernel {
    /// The fastest kernel that `allowed` and this processor have.
    pub(crate) fn best(allowed: Features) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(token) = Amx::new(allowed) {
                return Self::Amx(token);
            }
            if let Some(token) = Avx512Bf16::new(allowed) {
                return Self::Avx512Bf16(token);
            }
            if let Some(token) = Avx512Vnni::new(allowed) {
                return Self::Avx512Vnni(token);
            }
        }
        let _ = allowed;
        Self::Portable
    }

    pub(crate) fn isa(self) -> Isa {
        match self {
            Self::Portable => Isa::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) | Self::Avx512Bf16(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => Isa::Amx,
            Self::EmulatedAmx => Isa::Amx,
        }
    }

    pub(crate) fn name(self, format: WeightFormat) -> &'static str {
        match (self, format) {
            (Self::Portable, WeightFormat::Bf16) => "portable_bf16",
            (Self::Portable, _) => "portable_s8",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Vnni(_), WeightFormat::Bf16) => "avx512_bf16_fma_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Bf16(_), WeightFormat::Bf16) => "avx512_bf16_dot_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Vnni(_) | Self::Avx512Bf16(_), _) => "avx512_s8_dot_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Amx(_), WeightFormat::Bf16) => "amx_bf16_1x3",
            #[cfg(target_arch = "x86_64")]
            (Self::Amx(_), _) => "amx_s8_1x3",
            (Self::EmulatedAmx, WeightFormat::Bf16) => "amx_emulated_bf16_1x3",
            (Self::EmulatedAmx, _) => "amx_emulated_s8_1x3",
        }
    }

    /// Runs `body`, compiled for this instruction set.
    pub(crate) fn run<B: Body>(self, body: B) {
        match self {
            Self::Portable => body.run(ByRows(Portable)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(token) => avx512::run_vnni(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(token) => avx512::run_bf16(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(token) => amx::run(token, body),
            Self::EmulatedAmx => body.run(amx::Tiles(Emulated)),
        }
    }
}
