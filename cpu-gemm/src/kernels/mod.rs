//! Micro-kernels: 16 weight rows against a few tokens.
//!
//! [`Dot`] is what an instruction set implements: the dot products of one panel (16 rows,
//! K cut into 128-byte units, see `asym_gemm_formats::bank`) with one, two or four rows of
//! activations. Everything around it (scales, activation function, requantisation) is
//! written once as [`Body`]s in plain Rust. [`Kernel::run`] compiles a body for the
//! instruction set at hand, so that its loops become wide vector code there while every
//! operation, and so every bit, stays the same: rustc neither reorders nor contracts
//! floating-point operations.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES};

#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Avx512Bf16, Avx512Vnni, AvxVnni};
use crate::isa::{Features, Isa};
pub(crate) use portable::Portable;

/// One value for each row of a panel.
pub(crate) type Lanes<T> = [T; PANEL_ROWS];

/// Dot products of a panel with `T` (1, 2 or 4) rows of activations.
///
/// `panel` is a whole number of units; each row of `x` holds as many elements as a panel
/// row. Implementations check that. Methods are `#[inline(always)]` and take on the target
/// features of the [`Body`] they are called from.
pub(crate) trait Dot: Copy {
    /// Exact i32 sums (the caller bounds K) of i8 weights and i8 activations. `sums[t]` is the sum of
    /// `x[t]`, for instruction sets that offset the weights to unsigned.
    fn s8<const T: usize>(self, panel: &[u8], x: [&[i8]; T], sums: [i32; T]) -> [Lanes<i32>; T];

    /// f32 sums of bf16 weights and bf16 activations. The order of the additions depends on K
    /// alone, never on `T`.
    fn bf16<const T: usize>(self, panel: &[u8], x: [&[u16]; T]) -> [Lanes<f32>; T];

    /// Writes the bf16 values of one unit of e4m3 (16 rows x 128) as two units of bf16 (16 rows x 64
    /// each), K in order. Every code has its exact value; NaN stays NaN of its sign.
    fn expand_e4m3(self, unit: &[u8; UNIT_BYTES], out: &mut [u8; 2 * UNIT_BYTES]);
}

/// A piece of work that is compiled once for each instruction set. Implement `run` with
/// `#[inline(always)]`: it then takes on the target features of its caller.
pub(crate) trait Body {
    /// Does the work.
    fn run<D: Dot>(self, dot: D);
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
}

impl Kernel {
    /// The fastest kernel that `allowed` and this processor have.
    pub(crate) fn best(allowed: Features) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
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
        }
    }

    pub(crate) fn name(self, format: WeightFormat) -> &'static str {
        match (self, format) {
            (Self::Portable, WeightFormat::Bf16) => "portable_bf16",
            (Self::Portable, WeightFormat::Fp8Block128) => "portable_e4m3",
            (Self::Portable, _) => "portable_s8",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2(_) | Self::AvxVnni(_), WeightFormat::Bf16) => "avx2_bf16_fma_2x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2(_) | Self::AvxVnni(_), WeightFormat::Fp8Block128) => "avx2_e4m3_fma_2x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2(_), _) => "avx2_s8_madd_2x4",
            #[cfg(target_arch = "x86_64")]
            (Self::AvxVnni(_), _) => "avx2_s8_dot_2x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Vnni(_), WeightFormat::Bf16) => "avx512_bf16_fma_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Bf16(_), WeightFormat::Bf16) => "avx512_bf16_dot_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Vnni(_), WeightFormat::Fp8Block128) => "avx512_e4m3_fma_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Bf16(_), WeightFormat::Fp8Block128) => "avx512_e4m3_dot_4x4",
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512Vnni(_) | Self::Avx512Bf16(_), _) => "avx512_s8_dot_4x4",
        }
    }

    /// Runs `body`, compiled for this instruction set.
    pub(crate) fn run<B: Body>(self, body: B) {
        match self {
            Self::Portable => body.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(token) => avx2::run(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni(token) => avx2::run_vnni(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(token) => avx512::run_vnni(token, body),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(token) => avx512::run_bf16(token, body),
        }
    }
}

/// Runs `$body` for all `$count` tokens in blocks of 4, 2 and 1: in it `$width` is a constant and
/// `$first` the first token of the block.
macro_rules! for_token_blocks {
    ($count:expr, |$first:ident, $width:ident| $body:block) => {{
        let count: usize = $count;
        let mut $first = 0;
        while count - $first >= 4 {
            const $width: usize = 4;
            $body
            $first += $width;
        }
        if count - $first >= 2 {
            const $width: usize = 2;
            $body
            $first += $width;
        }
        if count - $first >= 1 {
            const $width: usize = 1;
            $body
        }
    }};
}
pub(crate) use for_token_blocks;

#[cfg(test)]
mod tests {
    use super::*;
    use asym_gemm_formats::e4m3;

    struct Expand<'a> {
        unit: &'a [u8; UNIT_BYTES],
        out: &'a mut [u8; 2 * UNIT_BYTES],
    }

    impl Body for Expand<'_> {
        #[inline(always)]
        fn run<D: Dot>(self, dot: D) {
            dot.expand_e4m3(self.unit, self.out);
        }
    }

    /// All 256 codes in every column of a unit, on every kernel of the processor.
    #[test]
    fn e4m3_expands_to_its_exact_values() {
        let detected = Features::detect();
        for mask in [
            Features::NONE,
            Features::AVX2,
            Features::AVX2.and(Features::AVXVNNI),
            Isa::Avx512.required(),
            Isa::Avx512.required().and(Features::AVX512BF16),
        ] {
            let kernel = Kernel::best(mask.common(detected));
            for shift in 0..=u8::MAX {
                let unit = std::array::from_fn(|i| (i as u8).wrapping_add(shift));
                let mut out = [0xa5; 2 * UNIT_BYTES];
                kernel.run(Expand {
                    unit: &unit,
                    out: &mut out,
                });
                for (i, &code) in unit.iter().enumerate() {
                    let (row, k) = (i / 128, i % 128);
                    let at = k / 64 * UNIT_BYTES + row * 128 + k % 64 * 2;
                    let got = u16::from_le_bytes([out[at], out[at + 1]]);
                    assert_eq!(
                        got,
                        e4m3::to_bf16(code),
                        "{code:#04x} at row {row}, column {k} on {kernel:?}"
                    );
                }
            }
        }
    }

    /// Which kernels each kind of processor gets; without the features only the portable row
    /// can be seen, so the table is restricted to what this processor offers.
    #[test]
    fn a_mask_selects_no_more_than_it_names() {
        let avx_vnni = Features::AVX2.and(Features::AVXVNNI);
        let bw = Features::AVX2
            .and(Features::AVX512F)
            .and(Features::AVX512BW);
        let vnni = bw.and(Features::AVX512VNNI);
        let bf16 = vnni.and(Features::AVX512BF16);
        for (mask, int8, wide) in [
            (Features::NONE, "portable_s8", "portable_bf16"),
            (Features::AVXVNNI, "portable_s8", "portable_bf16"),
            (Features::AVX2, "avx2_s8_madd_2x4", "avx2_bf16_fma_2x4"),
            (avx_vnni, "avx2_s8_dot_2x4", "avx2_bf16_fma_2x4"),
            (bw, "avx2_s8_madd_2x4", "avx2_bf16_fma_2x4"),
            (
                bw.and(Features::AVX512BF16),
                "avx2_s8_madd_2x4",
                "avx2_bf16_fma_2x4",
            ),
            (vnni, "avx512_s8_dot_4x4", "avx512_bf16_fma_4x4"),
            (bf16, "avx512_s8_dot_4x4", "avx512_bf16_dot_4x4"),
        ] {
            if !Features::detect().contains(mask) {
                println!("skipped on this processor: {mask:?}");
                continue;
            }
            let kernel = Kernel::best(mask);
            assert_eq!(kernel.name(WeightFormat::Int8PerRow), int8, "{mask:?}");
            assert_eq!(kernel.name(WeightFormat::Bf16), wide, "{mask:?}");
        }
    }
}
