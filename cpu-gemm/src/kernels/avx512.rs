//! AVX-512 dot products: VNNI for int8, BF16 or fused multiply-adds for bf16.
//!
//! ```text
//! unit: 16 rows x 128 B = 2 registers a row          accumulators: R rows x T tokens = 16
//!
//!        k 0..63 B   64..127 B                       T = 1: 16 x 1    decode
//! row 0  [ zmm    ][ zmm     ]                       T = 2:  8 x 2
//! row 1  [ zmm    ][ zmm     ]   . x[t] (zmm)        T = 4:  4 x 4    8 loads for 16 products
//! ```
//!
//! Lanes hold different k of one output, so each of the 16 accumulators ends in a sum
//! over its lanes; [`reduce`] does all 16 at once. One output is one accumulator, whatever R
//! and T: its additions come in the same order for every number of tokens.
//!
//! VNNI multiplies unsigned by signed bytes. w ^ 0x80 is w + 128 as unsigned, so the sum comes
//! out 128 * sum(x) too large; that is taken off at the end, modulo 2^32 and therefore
//! exactly. (Offsetting the weights and not the activations needs one number a token, and no sums
//! stored with the weights.)
//!
//! NOTE: `vdpbf16ps` treats subnormal operands and results as zero, whatever the mode of the
//! floating-point unit.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_ROW_BYTES};
use asym_gemm_formats::e4m3;

use super::by_rows::ByRows;
use super::fp4::{Fp4, expand_avx512};
use super::{Body, Dot, Expanded, Panel};
use crate::isa::{Avx512Bf16, Avx512Vnni};
use crate::tile::Lanes;
use crate::vector::Avx512Vector;

/// Accumulators of a block: half of the register file, so that operands fit beside them.
const ACCUMULATORS: usize = 16;

/// Runs `body` compiled for AVX-512 with VNNI.
pub(super) fn run_vnni<B: Body>(token: Avx512Vnni, body: B) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    fn inner<B: Body>(token: Avx512Vnni, body: B) {
        body.run(ByRows(token));
    }
    // SAFETY: the token exists, so the features were detected.
    unsafe { inner(token, body) }
}

/// Runs `body` compiled for AVX-512 with VNNI and BF16.
pub(super) fn run_bf16<B: Body>(token: Avx512Bf16, body: B) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512bf16")]
    fn inner<B: Body>(token: Avx512Bf16, body: B) {
        body.run(ByRows(token));
    }
    // SAFETY: the token exists, so the features were detected.
    unsafe { inner(token, body) }
}

impl Dot for Avx512Vnni {
    #[inline(always)]
    fn s8<const T: usize>(
        self,
        panel: Panel<'_>,
        x: [&[u8]; T],
        sums: [i32; T],
    ) -> [Lanes<i32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe { s8(panel, x, sums) }
    }

    #[inline(always)]
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe { bf16_fma(panel, x) }
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_avx512::<F>(panel, out) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_e4m3(panel, out) }
    }

    type Vector = Avx512Vector;

    #[inline(always)]
    fn vector(self) -> Self::Vector {
        self.into()
    }
}

impl Dot for Avx512Bf16 {
    #[inline(always)]
    fn s8<const T: usize>(
        self,
        panel: Panel<'_>,
        x: [&[u8]; T],
        sums: [i32; T],
    ) -> [Lanes<i32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe { s8(panel, x, sums) }
    }

    #[inline(always)]
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe { bf16_dot(panel, x) }
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_avx512::<F>(panel, out) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_e4m3(panel, out) }
    }

    type Vector = Avx512Vector;

    #[inline(always)]
    fn vector(self) -> Self::Vector {
        self.into()
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn s8<const T: usize>(panel: Panel<'_>, x: [&[u8]; T], sums: [i32; T]) -> [Lanes<i32>; T] {
    let flip = _mm512_set1_epi8(i8::MIN);
    let x = x.map(|x| {
        assert_eq!(
            x.len(),
            panel.units() * UNIT_ROW_BYTES,
            "as many units as activations"
        );
        x.as_ptr().cast()
    });
    let mut out = [[0i32; PANEL_ROWS]; T];
    let step = |acc, w, x| _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, flip), x);
    let add = |a, b| _mm512_add_epi32(a, b);
    let mut block = |first: usize, rows: usize, sum: __m512i| {
        let mut lanes = [0i32; ACCUMULATORS];
        // SAFETY: `lanes` is 64 bytes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
        for (t, out) in out.iter_mut().enumerate() {
            for (r, out) in out[first..first + rows].iter_mut().enumerate() {
                *out = lanes[t * rows + r].wrapping_sub(sums[t].wrapping_mul(128));
            }
        }
    };
    // SAFETY: each x[t] points to the panel's units, asserted above.
    unsafe { panel_blocks(panel, x, step, add, &mut block) };
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn bf16_dot<const T: usize>(panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
    bf16(panel, x, |acc, w, x| {
        _mm512_castps_si512(_mm512_dpbf16_ps(
            _mm512_castsi512_ps(acc),
            as_bf16(w),
            as_bf16(x),
        ))
    })
}

/// 32 codes at a time, as words. A normal value is its code moved up by 4, the exponent's bias added
/// and the sign in its place. Codes 0 to 7 (subnormal) and 0x7f (NaN) are off by a difference that
/// a table holds; it never reaches the sign.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn expand_e4m3<'e>(
    panel: Panel<'_>,
    out: &'e mut MaybeUninit<Expanded>,
) -> &'e Expanded {
    /// What the formula lacks, at the code + 1 (mod 128): NaN, then the subnormal codes.
    const MISSING: [u16; 32] = {
        let mut table = [0; 32];
        let mut i = 0;
        while i < 9 {
            let code = if i == 0 { 0x7f } else { i - 1 };
            let formula = (code << 4) + BIAS;
            table[i as usize] = e4m3::to_bf16(code as u8).wrapping_sub(formula);
            i += 1;
        }
        table
    };
    /// 127 - 7 in the exponent's place.
    const BIAS: u16 = 0x3c00;
    let word = |w: u16| _mm512_set1_epi16(w as i16);
    // SAFETY: 64 bytes; the load needs no alignment.
    let missing = unsafe { _mm512_loadu_si512(MISSING.as_ptr().cast()) };
    for r in 0..PANEL_ROWS {
        let row = panel.row(0, r);
        for line in row.iter().step_by(64) {
            // May lie past the end; a prefetch never faults.
            let ahead = (&raw const *line).wrapping_add(panel.prefetch());
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
        for (quarter, codes) in row.as_chunks::<32>().0.iter().enumerate() {
            // SAFETY: 32 bytes; the load needs no alignment.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
            // The sign fills the upper half of a word.
            let v = _mm512_cvtepi8_epi16(codes);
            let shifted = _mm512_and_si512(_mm512_slli_epi16::<4>(v), word(0x87f0));
            let next = _mm512_and_si512(_mm512_add_epi16(v, word(1)), word(0x7f));
            let special = _mm512_cmple_epu16_mask(next, word(8));
            let normal = _mm512_add_epi16(shifted, word(BIAS));
            let bf16 = _mm512_mask_add_epi16(
                normal,
                special,
                normal,
                _mm512_permutexvar_epi16(next, missing),
            );
            // SAFETY: a line is 64 bytes and aligned to as many.
            unsafe { _mm512_store_si512(Expanded::line(out, r, quarter).cast(), bf16) };
        }
    }
    // SAFETY: the four lines of all rows are written.
    unsafe { out.assume_init_ref() }
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn bf16_fma<const T: usize>(panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let even = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
    let odd = |v| _mm512_castsi512_ps(_mm512_and_si512(v, upper));
    bf16(panel, x, |acc, w, x| {
        let acc = _mm512_fmadd_ps(even(w), even(x), _mm512_castsi512_ps(acc));
        _mm512_castps_si512(_mm512_fmadd_ps(odd(w), odd(x), acc))
    })
}

/// The parts that both bf16 kernels share; `step(acc, w, x)` adds the products of 32 elements.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn bf16<const T: usize>(
    panel: Panel<'_>,
    x: [&[u8]; T],
    step: impl Fn(__m512i, __m512i, __m512i) -> __m512i,
) -> [Lanes<f32>; T] {
    let x = x.map(|x| {
        assert_eq!(
            x.len(),
            panel.units() * UNIT_ROW_BYTES,
            "as many units as activations"
        );
        x.as_ptr().cast()
    });
    let mut out = [[0f32; PANEL_ROWS]; T];
    let add = |a, b| {
        _mm512_castps_si512(_mm512_add_ps(
            _mm512_castsi512_ps(a),
            _mm512_castsi512_ps(b),
        ))
    };
    let mut block = |first: usize, rows: usize, sum: __m512i| {
        let mut lanes = [0f32; ACCUMULATORS];
        // SAFETY: `lanes` is 64 bytes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
        for (out, lanes) in out.iter_mut().zip(lanes.chunks_exact(rows)) {
            out[first..first + rows].copy_from_slice(lanes);
        }
    };
    // SAFETY: each x[t] points to the panel's units, asserted above.
    unsafe { panel_blocks(panel, x, step, add, &mut block) };
    out
}

/// All 16 rows against all tokens. `block(first, rows, sums)` receives the outputs of rows
/// `first..first + rows`: lane `t * rows + r` is token t, row `first + r`.
///
/// # Safety
/// Each `x[t]` must be readable for the 128 bytes of each of the panel's units.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn panel_blocks<const T: usize>(
    panel: Panel<'_>,
    x: [*const u8; T],
    step: impl Fn(__m512i, __m512i, __m512i) -> __m512i,
    add: impl Fn(__m512i, __m512i) -> __m512i,
    block: &mut impl FnMut(usize, usize, __m512i),
) {
    // SAFETY: passed on from the caller.
    unsafe {
        match T {
            1 => row_blocks::<16, T>(panel, x, step, add, block),
            2 => row_blocks::<8, T>(panel, x, step, add, block),
            4 => row_blocks::<4, T>(panel, x, step, add, block),
            _ => unreachable!("token blocks are 1, 2 or 4 wide"),
        }
    }
}

/// [`panel_blocks`] with `R * T` = 16 accumulators.
///
/// # Safety
/// Each `x[t]` must be readable for `panel.len() / 16` bytes.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn row_blocks<const R: usize, const T: usize>(
    panel: Panel<'_>,
    x: [*const u8; T],
    step: impl Fn(__m512i, __m512i, __m512i) -> __m512i,
    add: impl Fn(__m512i, __m512i) -> __m512i,
    block: &mut impl FnMut(usize, usize, __m512i),
) {
    const REGISTER_BYTES: usize = 64;
    let base = panel.as_ptr();
    for first in (0..PANEL_ROWS).step_by(R) {
        let mut acc = [_mm512_setzero_si512(); ACCUMULATORS];
        for unit in 0..panel.units() {
            for half in (0..UNIT_ROW_BYTES).step_by(REGISTER_BYTES) {
                // SAFETY: inside the 128 bytes of unit `unit`.
                let x = x.map(|x| unsafe {
                    _mm512_loadu_si512(x.add(unit * UNIT_ROW_BYTES + half).cast())
                });
                for r in 0..R {
                    let offset =
                        unit * panel.unit_stride() + (first + r) * panel.row_stride() + half;
                    // May lie past the end; a prefetch never faults.
                    let ahead = base.wrapping_add(offset + panel.prefetch());
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    // SAFETY: first + r < 16, so the 64 bytes lie in unit `unit`, all of whose
                    // rows the constructors of `Panel` checked.
                    let w = unsafe { _mm512_loadu_si512(base.add(offset).cast()) };
                    for t in 0..T {
                        acc[t * R + r] = step(acc[t * R + r], w, x[t]);
                    }
                }
            }
        }
        block(first, R, reduce(acc, &add));
    }
}

/// Lane i of the result is the sum over the lanes of `acc[i]`.
///
/// Each sum is taken in the order of [`super::portable::reduce`], whatever i: pairs of registers
/// are interleaved and added until one is left.
#[target_feature(enable = "avx512f")]
#[inline]
fn reduce(acc: [__m512i; ACCUMULATORS], add: &impl Fn(__m512i, __m512i) -> __m512i) -> __m512i {
    // Within quarters: four registers become one that holds one lane of each in every quarter.
    let quarters: [__m512i; 4] = std::array::from_fn(|i| {
        let pair = |a, b| add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let ab = pair(acc[4 * i], acc[4 * i + 1]);
        let cd = pair(acc[4 * i + 2], acc[4 * i + 3]);
        add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
    });
    // Across quarters: even ones against odd ones, twice.
    let across = |a, b| {
        add(
            _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
        )
    };
    across(
        across(quarters[0], quarters[1]),
        across(quarters[2], quarters[3]),
    )
}

/// The same 512 bits, as the BF16 intrinsics want them.
#[target_feature(enable = "avx512f")]
#[inline]
fn as_bf16(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes in which every pattern is valid.
    unsafe { std::mem::transmute(v) }
}
