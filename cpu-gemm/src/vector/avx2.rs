//! Lanes in two 256-bit registers.

use std::arch::x86_64::*;

use super::Vector;
use crate::isa::{Avx2, AvxVnni};
use crate::tile::{Lanes, TOKENS};

/// Lanes in two 256-bit registers. A value is proof of the features.
#[derive(Clone, Copy)]
pub(crate) struct Avx2Vector(());

impl From<Avx2> for Avx2Vector {
    #[inline(always)]
    fn from(_token: Avx2) -> Self {
        Self(())
    }
}

impl From<AvxVnni> for Avx2Vector {
    #[inline(always)]
    fn from(_token: AvxVnni) -> Self {
        Self(())
    }
}

type F = [__m256; 2];
type I = [__m256i; 2];

impl Vector for Avx2Vector {
    type F = F;
    type I = I;

    #[inline(always)]
    fn load(self, x: &Lanes<f32>) -> F {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            [
                _mm256_loadu_ps(x.as_ptr()),
                _mm256_loadu_ps(x[8..].as_ptr()),
            ]
        }
    }

    #[inline(always)]
    fn store(self, x: F, out: &mut Lanes<f32>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), x[1]);
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn at_least(self, x: F, bound: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_max_ps(bound[0], x[0]), _mm256_max_ps(bound[1], x[1])] }
    }

    #[inline(always)]
    fn at_most(self, x: F, bound: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_min_ps(bound[0], x[0]), _mm256_min_ps(bound[1], x[1])] }
    }

    #[inline(always)]
    fn nan_to_zero(self, x: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe {
            [
                _mm256_and_ps(x[0], _mm256_cmp_ps::<_CMP_ORD_Q>(x[0], x[0])),
                _mm256_and_ps(x[1], _mm256_cmp_ps::<_CMP_ORD_Q>(x[1], x[1])),
            ]
        }
    }

    #[inline(always)]
    fn load_int(self, x: &Lanes<i32>) -> I {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            [
                _mm256_loadu_si256(x.as_ptr().cast()),
                _mm256_loadu_si256(x[8..].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn store_int(self, x: I, out: &mut Lanes<u32>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out[8..].as_mut_ptr().cast(), x[1]);
        }
    }

    #[inline(always)]
    fn splat_int(self, x: u32) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_set1_epi32(x as i32); 2] }
    }

    #[inline(always)]
    fn add_int(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe {
            [
                _mm256_sll_epi32(a[0], _mm_cvtsi32_si128(N as i32)),
                _mm256_sll_epi32(a[1], _mm_cvtsi32_si128(N as i32)),
            ]
        }
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe {
            [
                _mm256_srl_epi32(a[0], _mm_cvtsi32_si128(N as i32)),
                _mm256_srl_epi32(a[1], _mm_cvtsi32_si128(N as i32)),
            ]
        }
    }

    #[inline(always)]
    fn max_int(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_max_epu32(a[0], b[0]), _mm256_max_epu32(a[1], b[1])] }
    }

    #[inline(always)]
    fn if_greater(self, a: I, b: I, yes: I, no: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe {
            [
                _mm256_blendv_epi8(no[0], yes[0], _mm256_cmpgt_epi32(a[0], b[0])),
                _mm256_blendv_epi8(no[1], yes[1], _mm256_cmpgt_epi32(a[1], b[1])),
            ]
        }
    }

    #[inline(always)]
    fn to_float(self, x: I) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
    }

    #[inline(always)]
    fn to_int(self, x: F) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_cvttps_epi32(x[0]), _mm256_cvttps_epi32(x[1])] }
    }

    #[inline(always)]
    fn bits(self, x: F) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_castps_si256(x[0]), _mm256_castps_si256(x[1])] }
    }

    #[inline(always)]
    fn as_float(self, x: I) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { [_mm256_castsi256_ps(x[0]), _mm256_castsi256_ps(x[1])] }
    }

    #[inline(always)]
    fn store_halves(self, x: I, out: &mut Lanes<u16>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            let low = _mm256_set1_epi32(0xffff);
            let packed =
                _mm256_packus_epi32(_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            _mm256_storeu_si256(
                out.as_mut_ptr().cast(),
                _mm256_permute4x64_epi64::<0b11_01_10_00>(packed),
            );
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut Lanes<u8>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the
        // register, and no alignment is needed.
        unsafe {
            // Quarters of the halves alternate after packing.
            let halves = _mm256_packs_epi32(x[0], x[1]);
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(halves),
                _mm256_extracti128_si256::<1>(halves),
            );
            _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn write_line(self, x: I, out: &mut [u8; 64], stream: bool) {
        let out = out.as_mut_ptr().cast::<I>();
        // SAFETY: the features were detected, as the value proves; `out` is as long as the
        // registers, and aligned to theirs where that matters.
        unsafe {
            if stream && out.is_aligned() {
                _mm256_stream_si256(out.cast(), x[0]);
                _mm256_stream_si256(out.cast::<__m256i>().add(1), x[1]);
            } else {
                _mm256_storeu_si256(out.cast(), x[0]);
                _mm256_storeu_si256(out.cast::<__m256i>().add(1), x[1]);
            }
        }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn transpose(self, rows: [I; TOKENS]) -> [I; TOKENS] {
        // SAFETY: the features were detected, as the value proves.
        unsafe { transpose(rows) }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn transpose(rows: [I; TOKENS]) -> [I; TOKENS] {
    let mut out = rows;
    for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
        let rows: [__m256i; 8] = std::array::from_fn(|r| rows[row + r][column / 8]);
        // Pairs of rows, then fours; after this register 2g + h, of rows 4g.., holds the columns
        // 2h and 2h + 1 (and 4 more) in each half.
        let pair = |r: usize| {
            let (a, b) = (rows[r], rows[r + 1]);
            [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)]
        };
        let fours = |r: usize| {
            let ([a, b], [c, d]) = (pair(r), pair(r + 2));
            [
                _mm256_unpacklo_epi64(a, c),
                _mm256_unpackhi_epi64(a, c),
                _mm256_unpacklo_epi64(b, d),
                _mm256_unpackhi_epi64(b, d),
            ]
        };
        let (top, bottom) = (fours(0), fours(4));
        for c in 0..4 {
            out[column + c][row / 8] = _mm256_permute2x128_si256::<0x20>(top[c], bottom[c]);
            out[column + c + 4][row / 8] = _mm256_permute2x128_si256::<0x31>(top[c], bottom[c]);
        }
    }
    out
}
