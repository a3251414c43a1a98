//! Lanes in one 512-bit register.

use std::arch::x86_64::*;

use super::Vector;
use crate::isa::{Amx, Avx512Bf16, Avx512Vnni};
use crate::tile::{Lanes, TOKENS};

/// Lanes in one 512-bit register. A value is proof of the features.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vector(());

impl From<Amx> for Avx512Vector {
    #[inline(always)]
    fn from(_token: Amx) -> Self {
        Self(())
    }
}

impl From<Avx512Bf16> for Avx512Vector {
    #[inline(always)]
    fn from(_token: Avx512Bf16) -> Self {
        Self(())
    }
}

impl From<Avx512Vnni> for Avx512Vector {
    #[inline(always)]
    fn from(_token: Avx512Vnni) -> Self {
        Self(())
    }
}

type F = __m512;
type I = __m512i;

impl Vector for Avx512Vector {
    type F = F;
    type I = I;

    #[inline(always)]
    fn load(self, x: &Lanes<f32>) -> F {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: F, out: &mut Lanes<f32>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), x);
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn at_least(self, x: F, bound: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_max_ps(bound, x) }
    }

    #[inline(always)]
    fn at_most(self, x: F, bound: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_min_ps(bound, x) }
    }

    #[inline(always)]
    fn nan_to_zero(self, x: F) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x) }
    }

    #[inline(always)]
    fn load_int(self, x: &Lanes<i32>) -> I {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_int(self, x: I, out: &mut Lanes<u32>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            _mm512_storeu_si512(out.as_mut_ptr().cast(), x);
        }
    }

    #[inline(always)]
    fn splat_int(self, x: u32) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_set1_epi32(x as i32) }
    }

    #[inline(always)]
    fn add_int(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_slli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_srli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn max_int(self, a: I, b: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_max_epu32(a, b) }
    }

    #[inline(always)]
    fn if_greater(self, a: I, b: I, yes: I, no: I) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_mask_mov_epi32(no, _mm512_cmpgt_epi32_mask(a, b), yes) }
    }

    #[inline(always)]
    fn to_float(self, x: I) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn to_int(self, x: F) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_cvttps_epi32(x) }
    }

    #[inline(always)]
    fn bits(self, x: F) -> I {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_castps_si512(x) }
    }

    #[inline(always)]
    fn as_float(self, x: I) -> F {
        // SAFETY: the features were detected, as the value proves.
        unsafe { _mm512_castsi512_ps(x) }
    }

    #[inline(always)]
    fn store_halves(self, x: I, out: &mut Lanes<u16>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the registers, and no alignment is needed.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(x));
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut Lanes<u8>) {
        // SAFETY: the features were detected, as the value proves; the lanes are as long as the
        // register, and no alignment is needed.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x)) }
    }

    #[inline(always)]
    fn write_line(self, x: I, out: &mut [u8; 64], stream: bool) {
        let out = out.as_mut_ptr().cast::<I>();
        // SAFETY: the features were detected, as the value proves; `out` is as long as the register,
        // and aligned to its length where that matters.
        unsafe {
            if stream && out.is_aligned() {
                _mm512_stream_si512(out, x);
            } else {
                _mm512_storeu_si512(out, x);
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

#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(rows: [I; TOKENS]) -> [I; TOKENS] {
    // After this, register 4g + c holds in quarter q the column 4q + c of rows 4g..4g + 4.
    let mut blocks = rows;
    for g in 0..4 {
        let [a, b, c, d] = [
            rows[4 * g],
            rows[4 * g + 1],
            rows[4 * g + 2],
            rows[4 * g + 3],
        ];
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        blocks[4 * g] = _mm512_unpacklo_epi64(ab_low, cd_low);
        blocks[4 * g + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
        blocks[4 * g + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        blocks[4 * g + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    let mut columns = blocks;
    for c in 0..4 {
        let (rows_0, rows_4) = (blocks[c], blocks[4 + c]);
        let (rows_8, rows_12) = (blocks[8 + c], blocks[12 + c]);
        // Quarters 0 and 2, then 1 and 3, of two registers each.
        let even_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(rows_0, rows_4);
        let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(rows_8, rows_12);
        let odd_low = _mm512_shuffle_i32x4::<0b11_01_11_01>(rows_0, rows_4);
        let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(rows_8, rows_12);
        columns[c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_low, even_high);
        columns[4 + c] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_low, odd_high);
        columns[8 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_low, even_high);
        columns[12 + c] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_low, odd_high);
    }
    columns
}
