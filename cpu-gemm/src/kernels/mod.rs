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
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod by_rows;
pub(crate) mod fp4;
mod operands;
mod portable;

use std::mem::MaybeUninit;

use asym_gemm_formats::WeightFormat;

#[cfg(target_arch = "x86_64")]
use crate::isa::{Amx, Avx2, Avx512Bf16, Avx512Vnni, AvxVnni};
use crate::isa::{Features, Isa};
use crate::tile::Lanes;
use crate::vector::Vector;
use amx::Emulated;
use by_rows::ByRows;
use fp4::Fp4;
pub(crate) use operands::{Expanded, Group, Panel, Products, Span, TokenLayout, prefetch_bytes};
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

    /// Exact i32 sums (the caller bounds K) of i8 weights and i8 activations.
    fn s8(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, i32>);

    /// f32 sums of bf16 weights and bf16 activations. The order of a token's additions depends on
    /// the panel alone, never on the other tokens.
    fn bf16(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, f32>);

    /// The bf16 values of one unit of e4m3 weights; see [`Dot::expand_e4m3`].
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded;

    /// The bf16 values of the first unit of a panel of fp4; see [`Dot::expand_fp4`].
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded;

    /// Arithmetic on lanes.
    type Vector: Vector;

    /// A value of it.
    fn vector(self) -> Self::Vector;
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

    /// Writes the bf16 values of the first unit of a panel of e4m3. Every code has its exact value;
    /// NaN stays NaN of its sign.
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded;

    /// Writes the bf16 values of the first unit of a panel of fp4: the exact products of codes
    /// and scales.
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded;

    /// Arithmetic on lanes.
    type Vector: Vector;

    /// A value of it.
    fn vector(self) -> Self::Vector;
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
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX2 with FMA and AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni(AvxVnni),
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
            if let Some(token) = AvxVnni::new(allowed) {
                return Self::AvxVnni(token);
            }
            if let Some(token) = Avx2::new(allowed) {
                return Self::Avx2(token);
            }
        }
        let _ = allowed;
        Self::Portable
    }

    pub(crate) fn isa(self) -> Isa {
        match self {
            Self::Portable => Isa::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) | Self::AvxVnni(_) => Isa::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) | Self::Avx512Bf16(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => Isa::Amx,
            Self::EmulatedAmx => Isa::Amx,
        }
    }

    pub(crate) fn name(self, format: WeightFormat) -> &'static str {
        // One name for each of bf16, e4m3, nvfp4, mxfp4 and int8.
        let names: [&'static str; 5] = match self {
            Self::Portable => [
                "portable_bf16",
                "portable_e4m3",
                "portable_nvfp4",
                "portable_mxfp4",
                "portable_s8",
            ],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => [
                "avx2_bf16_fma_2x4",
                "avx2_e4m3_fma_2x4",
                "avx2_nvfp4_fma_2x4",
                "avx2_mxfp4_fma_2x4",
                "avx2_s8_madd_2x4",
            ],
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni(_) => [
                "avx2_bf16_fma_2x4",
                "avx2_e4m3_fma_2x4",
                "avx2_nvfp4_fma_2x4",
                "avx2_mxfp4_fma_2x4",
                "avx2_s8_dot_2x4",
            ],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => [
                "avx512_bf16_fma_4x4",
                "avx512_e4m3_fma_4x4",
                "avx512_nvfp4_fma_4x4",
                "avx512_mxfp4_fma_4x4",
                "avx512_s8_dot_4x4",
            ],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => [
                "avx512_bf16_dot_4x4",
                "avx512_e4m3_dot_4x4",
                "avx512_nvfp4_dot_4x4",
                "avx512_mxfp4_dot_4x4",
                "avx512_s8_dot_4x4",
            ],
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => [
                "amx_bf16_1x3",
                "amx_e4m3_1x3",
                "amx_nvfp4_1x3",
                "amx_mxfp4_1x3",
                "amx_s8_1x3",
            ],
            Self::EmulatedAmx => [
                "amx_emulated_bf16_1x3",
                "amx_emulated_e4m3_1x3",
                "amx_emulated_nvfp4_1x3",
                "amx_emulated_mxfp4_1x3",
                "amx_emulated_s8_1x3",
            ],
        };
        names[match format {
            WeightFormat::Bf16 => 0,
            WeightFormat::Fp8Block128 => 1,
            WeightFormat::Nvfp4 => 2,
            WeightFormat::Mxfp4 => 3,
            WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => 4,
        }]
    }

    /// The kernel for `tokens` tokens of a recipe whose sums are exact on every instruction set.
    ///
    /// One or two tokens leave most of a tile empty: dot products then read the weights a little
    /// faster.
    pub(crate) fn for_few_tokens(self, tokens: usize) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(token) if tokens <= 2 => Self::Avx512Bf16(token.into()),
            other => {
                let _ = tokens;
                other
            }
        }
    }

    /// Runs `body`, compiled for this instruction set.
    pub(crate) fn run<B: Body>(self, body: B) {
        match self {
            Self::Portable => body.run(ByRows(Portable)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(token) => avx2::run(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni(token) => avx2::run_vnni(token, body),
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

#[cfg(test)]
mod tests {
    use super::*;
    use asym_gemm_formats::bank::UNIT_BYTES;
    use asym_gemm_formats::e4m3;

    struct Expand<'a> {
        unit: &'a [u8],
        out: &'a mut [[[u8; 128]; 16]; 2],
    }

    impl Body for Expand<'_> {
        #[inline(always)]
        fn run<M: Multiply>(self, m: M) {
            let mut out = MaybeUninit::uninit();
            *self.out = m.expand_e4m3(Panel::packed(self.unit), &mut out).0;
        }
    }

    /// All 256 codes in every column of a unit, on every kernel of the processor.
    #[test]
    fn e4m3_expands_to_its_exact_values() {
        let kernels = Isa::ALL.map(|isa| Kernel::best(isa.most()));
        let kernels = kernels
            .into_iter()
            .chain([Isa::Avx2, Isa::Avx512].map(|isa| Kernel::best(isa.required())));
        for kernel in kernels.chain([Kernel::EmulatedAmx]) {
            for shift in 0..=u8::MAX {
                let unit: [u8; UNIT_BYTES] = std::array::from_fn(|i| (i as u8).wrapping_add(shift));
                let mut out = [[[0xa5; 128]; 16]; 2];
                kernel.run(Expand {
                    unit: &unit,
                    out: &mut out,
                });
                for (i, &code) in unit.iter().enumerate() {
                    let (row, k) = (i / 128, i % 128);
                    let bytes = &out[k / 64][row][k % 64 * 2..][..2];
                    assert_eq!(
                        u16::from_le_bytes([bytes[0], bytes[1]]),
                        e4m3::to_bf16(code),
                        "{code:#04x} at row {row}, column {k} on {kernel:?}"
                    );
                }
            }
        }
    }

    /// Which kernels each kind of processor gets; the table is restricted to what this processor
    /// offers.
    #[test]
    fn a_mask_selects_no_more_than_it_names() {
        let avx_vnni = Features::AVX2.and(Features::AVXVNNI);
        let bw = Features::AVX2
            .and(Features::AVX512F)
            .and(Features::AVX512BW);
        let vnni = bw.and(Features::AVX512VNNI);
        let bf16 = vnni.and(Features::AVX512BF16);
        let tiles = bf16.and(Features::AMX_TILE);
        let amx = tiles.and(Features::AMX_INT8).and(Features::AMX_BF16);
        for (mask, [int8, wide, e4m3]) in [
            (
                Features::NONE,
                ["portable_s8", "portable_bf16", "portable_e4m3"],
            ),
            (
                Features::AVXVNNI,
                ["portable_s8", "portable_bf16", "portable_e4m3"],
            ),
            (
                Features::AVX2,
                ["avx2_s8_madd_2x4", "avx2_bf16_fma_2x4", "avx2_e4m3_fma_2x4"],
            ),
            (
                avx_vnni,
                ["avx2_s8_dot_2x4", "avx2_bf16_fma_2x4", "avx2_e4m3_fma_2x4"],
            ),
            (
                bw,
                ["avx2_s8_madd_2x4", "avx2_bf16_fma_2x4", "avx2_e4m3_fma_2x4"],
            ),
            (
                bw.and(Features::AVX512BF16),
                ["avx2_s8_madd_2x4", "avx2_bf16_fma_2x4", "avx2_e4m3_fma_2x4"],
            ),
            (
                vnni,
                [
                    "avx512_s8_dot_4x4",
                    "avx512_bf16_fma_4x4",
                    "avx512_e4m3_fma_4x4",
                ],
            ),
            (
                bf16,
                [
                    "avx512_s8_dot_4x4",
                    "avx512_bf16_dot_4x4",
                    "avx512_e4m3_dot_4x4",
                ],
            ),
            (
                tiles,
                [
                    "avx512_s8_dot_4x4",
                    "avx512_bf16_dot_4x4",
                    "avx512_e4m3_dot_4x4",
                ],
            ),
            (amx, ["amx_s8_1x3", "amx_bf16_1x3", "amx_e4m3_1x3"]),
        ] {
            if !Features::detect().contains(mask) {
                println!("skipped on this processor: {mask:?}");
                continue;
            }
            let kernel = Kernel::best(mask);
            assert_eq!(kernel.name(WeightFormat::Int8PerRow), int8, "{mask:?}");
            assert_eq!(kernel.name(WeightFormat::Bf16), wide, "{mask:?}");
            assert_eq!(kernel.name(WeightFormat::Fp8Block128), e4m3, "{mask:?}");
        }
    }
}
