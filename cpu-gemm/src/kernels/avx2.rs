//! AVX2 dot products: widened multiply-adds, or AVX-VNNI for int8 where it exists.
//!
//! ```text
//! for each unit (16 rows x 128 B) of the panel, in the order of memory:
//!     x of the unit, expanded once to what the products take    [step][T] registers, 1 KiB at T = 4
//!     for each R rows:   R x T accumulators   T = 1: 4 x 1    T = 2: 4 x 2    T = 4: 2 x 4
//! ```
//!
//! Sixteen registers hold the accumulators of 8 outputs beside their operands, so those of all 16
//! rows live in the first-level cache and a block of them is loaded and stored once a unit. The
//! panel is read once, front to back, for any T.
//!
//! int8: both operands are widened to i16 and `vpmaddwd` adds pairs of exact products in i32.
//! (`vpmaddubsw` saturates on pairs such as \[255, 255\] . \[127, 127\]. Cutting the unsigned weight
//! into two nibbles avoids that, but takes as many instructions a product and measured no faster.)
//! AVX-VNNI multiplies unsigned by signed bytes into i32; the weights are offset as in
//! [`super::avx512`].
//!
//! bf16: a bf16 is the upper half of an f32, so a shift and a mask widen a pair, and fused
//! multiply-adds sum them. One output is 16 lanes in two registers; lane i adds the products of
//! elements 2i and 2i + 1 of each 32, and [`lane_sums`] ends in the tree of
//! [`super::portable::reduce`]. That order depends on K alone, and it is the one of the portable and
//! AVX-512 kernels: the three give the same bits.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_ROW_BYTES};
use asym_gemm_formats::e4m3;

use super::by_rows::ByRows;
use super::fp4::{Fp4, expand_avx2};
use super::{Body, Dot, Expanded, Panel};
use crate::isa::{Avx2, AvxVnni};
use crate::tile::Lanes;
use crate::vector::Avx2Vector;

/// 128 bytes of K of one row.
type UnitRow = [u8; UNIT_ROW_BYTES];
/// The rows of a unit.
struct UnitRows<'a> {
    rows: [&'a UnitRow; PANEL_ROWS],
    /// Bytes from a row to what is prefetched beside it; 0 for none.
    ahead: usize,
}
/// The accumulators of a panel.
type Sums<V, const T: usize> = [[V; T]; PANEL_ROWS];

/// Runs `body` compiled for AVX2 with FMA.
pub(super) fn run<B: Body>(token: Avx2, body: B) {
    #[target_feature(enable = "avx2,fma")]
    fn inner<B: Body>(token: Avx2, body: B) {
        body.run(ByRows(token));
    }
    // SAFETY: the token exists, so the features were detected.
    unsafe { inner(token, body) }
}

/// Runs `body` compiled for AVX2 with FMA and AVX-VNNI.
pub(super) fn run_vnni<B: Body>(token: AvxVnni, body: B) {
    #[target_feature(enable = "avx2,fma,avxvnni")]
    fn inner<B: Body>(token: AvxVnni, body: B) {
        body.run(ByRows(token));
    }
    // SAFETY: the token exists, so the features were detected.
    unsafe { inner(token, body) }
}

impl Dot for Avx2 {
    #[inline(always)]
    fn s8<const T: usize>(
        self,
        panel: Panel<'_>,
        x: [&[u8]; T],
        _sums: [i32; T],
    ) -> [Lanes<i32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe {
            match T {
                1 | 2 => s8_widened::<4, T>(panel, x),
                4 => s8_widened::<2, T>(panel, x),
                _ => unreachable!("token blocks are 1, 2 or 4 wide"),
            }
        }
    }

    #[inline(always)]
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe {
            match T {
                1 | 2 => bf16::<4, T>(panel, x),
                4 => bf16::<2, T>(panel, x),
                _ => unreachable!("token blocks are 1, 2 or 4 wide"),
            }
        }
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_avx2::<F>(panel, out) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_e4m3(panel, out) }
    }

    type Vector = Avx2Vector;

    #[inline(always)]
    fn vector(self) -> Self::Vector {
        self.into()
    }
}

impl Dot for AvxVnni {
    #[inline(always)]
    fn s8<const T: usize>(
        self,
        panel: Panel<'_>,
        x: [&[u8]; T],
        sums: [i32; T],
    ) -> [Lanes<i32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe {
            match T {
                1 | 2 => s8_vnni::<4, T>(panel, x, sums),
                4 => s8_vnni::<2, T>(panel, x, sums),
                _ => unreachable!("token blocks are 1, 2 or 4 wide"),
            }
        }
    }

    #[inline(always)]
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
        // SAFETY: the token exists, so the features were detected.
        unsafe {
            match T {
                1 | 2 => bf16::<4, T>(panel, x),
                4 => bf16::<2, T>(panel, x),
                _ => unreachable!("token blocks are 1, 2 or 4 wide"),
            }
        }
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_avx2::<F>(panel, out) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        // SAFETY: the token exists, so the features were detected.
        unsafe { expand_e4m3(panel, out) }
    }

    type Vector = Avx2Vector;

    #[inline(always)]
    fn vector(self) -> Self::Vector {
        self.into()
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn s8_widened<const R: usize, const T: usize>(panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<i32>; T] {
    let x = units(panel, x);
    let mut sums = [[_mm256_setzero_si256(); T]; PANEL_ROWS];
    for unit in 0..panel.units() {
        let x = of_unit(&x, unit);
        let mut wide = [[_mm256_setzero_si256(); T]; UNIT_ROW_BYTES / 16];
        for (step, wide) in wide.iter_mut().enumerate() {
            for (wide, x) in wide.iter_mut().zip(x) {
                *wide = widen(&x.as_chunks().0[step]);
            }
        }
        add_s8_widened::<R, T>(&UnitRows::new(panel, unit), &wide, &mut sums);
    }
    lanes_i32(&sums)
}

/// Adds the products of a unit, `R` rows at a time.
///
/// Not inlined, nor are its likes: where the compiler sees the sums of all rows as values it
/// spills them at every step.
#[target_feature(enable = "avx2")]
#[inline(never)]
fn add_s8_widened<const R: usize, const T: usize>(
    unit: &UnitRows<'_>,
    x: &[[__m256i; T]; UNIT_ROW_BYTES / 16],
    sums: &mut Sums<__m256i, T>,
) {
    for (rows, sums) in unit
        .rows
        .as_chunks::<R>()
        .0
        .iter()
        .zip(sums.as_chunks_mut::<R>().0)
    {
        unit.prefetch(rows);
        let mut acc = *sums;
        for (step, x) in x.iter().enumerate() {
            for (row, acc) in rows.iter().zip(&mut acc) {
                let w = widen(&row.as_chunks().0[step]);
                for t in 0..T {
                    acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(w, x[t]));
                }
            }
        }
        *sums = acc;
    }
}

#[target_feature(enable = "avx2,avxvnni")]
#[inline]
fn s8_vnni<const R: usize, const T: usize>(
    panel: Panel<'_>,
    x: [&[u8]; T],
    sums: [i32; T],
) -> [Lanes<i32>; T] {
    let x = units(panel, x);
    let mut acc = [[_mm256_setzero_si256(); T]; PANEL_ROWS];
    for unit in 0..panel.units() {
        add_s8_vnni::<R, T>(&UnitRows::new(panel, unit), &of_unit(&x, unit), &mut acc);
    }
    let mut out = lanes_i32(&acc);
    for (out, sum) in out.iter_mut().zip(sums) {
        for out in out {
            *out = out.wrapping_sub(sum.wrapping_mul(128));
        }
    }
    out
}

/// As [`add_s8_widened`].
#[target_feature(enable = "avx2,avxvnni")]
#[inline(never)]
fn add_s8_vnni<const R: usize, const T: usize>(
    unit: &UnitRows<'_>,
    x: &[&UnitRow; T],
    sums: &mut Sums<__m256i, T>,
) {
    let flip = _mm256_set1_epi8(i8::MIN);
    for (rows, sums) in unit
        .rows
        .as_chunks::<R>()
        .0
        .iter()
        .zip(sums.as_chunks_mut::<R>().0)
    {
        unit.prefetch(rows);
        let mut acc = *sums;
        for step in 0..UNIT_ROW_BYTES / 32 {
            for (row, acc) in rows.iter().zip(&mut acc) {
                let w = _mm256_xor_si256(load(&row.as_chunks().0[step]), flip);
                for t in 0..T {
                    let x = load(&x[t].as_chunks().0[step]);
                    acc[t] = _mm256_dpbusd_avx_epi32(acc[t], w, x);
                }
            }
        }
        *sums = acc;
    }
}

/// The even and the odd elements of 16 bf16, in f32.
#[target_feature(enable = "avx2")]
#[inline]
fn widen_bf16(pairs: &[u8; 32]) -> [__m256; 2] {
    let pairs = load(pairs);
    let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
        _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)),
    ]
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn bf16<const R: usize, const T: usize>(panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
    let x = units(panel, x);
    let mut acc = [[[_mm256_setzero_ps(); T]; PANEL_ROWS]; 2];
    for unit in 0..panel.units() {
        let x = of_unit(&x, unit);
        let mut wide = [[[_mm256_setzero_ps(); 2]; T]; UNIT_ROW_BYTES / 32];
        for (step, wide) in wide.iter_mut().enumerate() {
            for (wide, x) in wide.iter_mut().zip(x) {
                *wide = widen_bf16(&x.as_chunks().0[step]);
            }
        }
        add_bf16::<R, T>(&UnitRows::new(panel, unit), &wide, &mut acc);
    }
    let add = |a, b| _mm256_add_ps(a, b);
    let mut out = [[0f32; PANEL_ROWS]; T];
    for (t, out) in out.iter_mut().enumerate() {
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let half = |half: usize| {
                let acc = &acc[half].as_chunks::<8>().0[i];
                lane_sums(
                    acc.each_ref().map(|acc| _mm256_castps_si256(acc[t])),
                    |a, b| _mm256_castps_si256(add(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))),
                )
            };
            let sum = add(_mm256_castsi256_ps(half(0)), _mm256_castsi256_ps(half(1)));
            // SAFETY: `out` is 32 bytes; the store needs no alignment.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
    out
}

/// As [`add_s8_widened`]; `sums[half]` are lanes `8 * half..` of the outputs.
#[target_feature(enable = "avx2,fma")]
#[inline(never)]
fn add_bf16<const R: usize, const T: usize>(
    unit: &UnitRows<'_>,
    x: &[[[__m256; 2]; T]; UNIT_ROW_BYTES / 32],
    sums: &mut [Sums<__m256, T>; 2],
) {
    let [low, high] = sums;
    let (low, high) = (low.as_chunks_mut::<R>().0, high.as_chunks_mut::<R>().0);
    for (rows, (low, high)) in unit
        .rows
        .as_chunks::<R>()
        .0
        .iter()
        .zip(low.iter_mut().zip(high))
    {
        unit.prefetch(rows);
        for (half, sums) in [low, high].into_iter().enumerate() {
            let mut acc = *sums;
            for step in [half, half + 2] {
                for (row, acc) in rows.iter().zip(&mut acc) {
                    let [even, odd] = widen_bf16(&row.as_chunks().0[step]);
                    for (sum, [x_even, x_odd]) in acc.iter_mut().zip(&x[step]) {
                        *sum = _mm256_fmadd_ps(even, *x_even, *sum);
                        *sum = _mm256_fmadd_ps(odd, *x_odd, *sum);
                    }
                }
            }
            *sums = acc;
        }
    }
}

/// The bytes of 32 bf16 are found apart. With v = s eeee mmm:
///
/// - the upper byte of a normal value is 0x3c + (eee of the exponent), with the sign, by a
///   table of the upper nibble; the lower byte is the lower nibble of v, moved up;
/// - where eee = 0 the code is subnormal or has the exponent 1, and both bytes come from
///   tables of the lower nibble;
/// - NaN sets the exponent.
#[target_feature(enable = "avx2")]
#[inline]
fn expand_e4m3<'e>(panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
    /// By the upper nibble.
    const UPPER: [u8; 16] = [
        0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43, 0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2,
        0xc3,
    ];
    /// By the lower nibble, where the three upper exponent bits are 0.
    const UPPER_SMALL: [u8; 16] = {
        let mut table = [0; 16];
        let mut code = 0;
        while code < 16 {
            table[code] = (e4m3::to_bf16(code as u8) >> 8) as u8;
            code += 1;
        }
        table
    };
    /// The lower byte, likewise.
    const LOWER_SMALL: [u8; 16] = {
        let mut table = [0; 16];
        let mut code = 0;
        while code < 16 {
            table[code] = e4m3::to_bf16(code as u8) as u8;
            code += 1;
        }
        table
    };
    let (upper, upper_small, lower_small) = (table(UPPER), table(UPPER_SMALL), table(LOWER_SMALL));
    let byte = |b: u8| _mm256_set1_epi8(b as i8);
    let nibble = byte(0x0f);
    let unit = UnitRows::new(panel, 0);
    for (r, row) in unit.rows.into_iter().enumerate() {
        unit.prefetch(&[row]);
        for (quarter, codes) in row.as_chunks().0.iter().enumerate() {
            // Quarters 0, 2, 1, 3: unpacking works on halves of the register.
            let v = _mm256_permute4x64_epi64::<0b11_01_10_00>(load(codes));
            let low = _mm256_and_si256(v, nibble);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(v), nibble);
            let small = _mm256_cmpeq_epi8(_mm256_and_si256(v, byte(0x70)), byte(0));
            let nan = _mm256_cmpeq_epi8(_mm256_and_si256(v, byte(0x7f)), byte(0x7f));
            let sign = _mm256_and_si256(v, byte(0x80));
            let upper = _mm256_blendv_epi8(
                _mm256_shuffle_epi8(upper, high),
                _mm256_or_si256(_mm256_shuffle_epi8(upper_small, low), sign),
                small,
            );
            let lower = _mm256_blendv_epi8(
                _mm256_slli_epi16::<4>(low),
                _mm256_shuffle_epi8(lower_small, low),
                small,
            );
            // 0x43f0 of the formula becomes 0x7fc0.
            let upper = _mm256_or_si256(upper, _mm256_and_si256(nan, byte(0x7f)));
            let lower = _mm256_andnot_si256(_mm256_and_si256(nan, byte(0x30)), lower);
            let at = Expanded::line(out, r, quarter).cast::<__m256i>();
            // SAFETY: two registers in a line, which is aligned to 64 bytes.
            unsafe {
                _mm256_store_si256(at, _mm256_unpacklo_epi8(lower, upper));
                _mm256_store_si256(at.add(1), _mm256_unpackhi_epi8(lower, upper));
            }
        }
    }
    // SAFETY: the four lines of all rows are written.
    unsafe { out.assume_init_ref() }
}

/// A table of 16 bytes in both halves.
#[target_feature(enable = "avx2")]
#[inline]
fn table(bytes: [u8; 16]) -> __m256i {
    // SAFETY: 16 bytes; the load needs no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

impl<'a> UnitRows<'a> {
    #[inline(always)]
    fn new(panel: Panel<'a>, unit: usize) -> Self {
        let mut rows = [panel.row(unit, 0); PANEL_ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = panel.row(unit, r);
        }
        Self {
            rows,
            ahead: panel.prefetch(),
        }
    }

    /// Prefetches what lies ahead of `rows`, if weights come from memory. A few rows at a time: more
    /// lines than there are line fill buffers would stall the loads.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn prefetch(&self, rows: &[&UnitRow]) {
        if self.ahead > 0 {
            for row in rows {
                // May lie past the end; a prefetch never faults.
                let ahead = row.as_ptr().wrapping_add(self.ahead).cast();
                _mm_prefetch::<_MM_HINT_T0>(ahead);
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
            }
        }
    }
}

/// The sum over the lanes of each accumulator.
#[target_feature(enable = "avx2")]
#[inline]
fn lanes_i32<const T: usize>(acc: &Sums<__m256i, T>) -> [Lanes<i32>; T] {
    let mut out = [[0i32; PANEL_ROWS]; T];
    for (t, out) in out.iter_mut().enumerate() {
        let (out, _) = out.as_chunks_mut::<8>();
        let (acc, _) = acc.as_chunks::<8>();
        for (out, acc) in out.iter_mut().zip(acc) {
            let sum = lane_sums(acc.each_ref().map(|acc| acc[t]), |a, b| {
                _mm256_add_epi32(a, b)
            });
            // SAFETY: `out` is 32 bytes; the store needs no alignment.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), sum) };
        }
    }
    out
}

/// Lane i of the result is the sum over the lanes of `acc[i]`: in each half (0 + 2) + (1 + 3), then
/// the halves.
#[target_feature(enable = "avx2")]
#[inline]
fn lane_sums(acc: [__m256i; 8], add: impl Fn(__m256i, __m256i) -> __m256i) -> __m256i {
    // Four registers become one that holds one lane of each in both halves.
    let quarter = |i: usize| {
        let pair = |a, b| add(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let ab = pair(acc[i], acc[i + 1]);
        let cd = pair(acc[i + 2], acc[i + 3]);
        add(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
    };
    let (low, high) = (quarter(0), quarter(4));
    add(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    )
}

/// The part of each row of activations that belongs to a unit.
#[inline(always)]
fn of_unit<'a, const T: usize>(x: &[&'a [UnitRow]; T], unit: usize) -> [&'a UnitRow; T] {
    let mut rows = [&[0; UNIT_ROW_BYTES]; T];
    for (row, x) in rows.iter_mut().zip(x) {
        *row = &x[unit];
    }
    rows
}

/// Rows of activations in units.
#[inline(always)]
fn units<'a, const T: usize>(panel: Panel<'_>, x: [&'a [u8]; T]) -> [&'a [UnitRow]; T] {
    let mut units: [&[UnitRow]; T] = [&[]; T];
    for (units, x) in units.iter_mut().zip(x) {
        let (whole, rest) = x.as_chunks();
        assert!(
            rest.is_empty() && whole.len() == panel.units(),
            "as many units as activations"
        );
        *units = whole;
    }
    units
}

/// 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// 16 signed bytes as i16.
#[target_feature(enable = "avx2")]
#[inline]
fn widen(values: &[u8; 16]) -> __m256i {
    // SAFETY: 16 bytes; the load needs no alignment.
    _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
}
