//! fp4 weights become bf16 in registers, exactly, before they are multiplied.
//!
//! The product of an e2m1 code and the scale of its group has few bits enough for bf16, in either
//! format. So a table holds, for each of the 256 scales, the 16 products: 8 KiB, which stay in the
//! first-level cache. A group of 16 columns costs one look-up of 32 bytes and one permutation.

use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{FP4_ROW_BYTES, FP4_UNIT_K, PANEL_ROWS, UNIT_ROW_BYTES};
use asym_gemm_formats::{mxfp4, nvfp4};

use super::{Expanded, Panel};

/// For each scale the bf16 value of each code.
pub(crate) type Products = [[u16; 16]; 256];

/// Columns that one look-up serves, in either format.
const COLUMNS: usize = 16;

/// A format whose units hold e2m1 codes and their scales.
pub(crate) trait Fp4 {
    /// Columns that share a scale: 16 or 32.
    const GROUP: usize;
    /// Scales of a row in a unit.
    const ROW_SCALES: usize = FP4_UNIT_K / Self::GROUP;

    /// The bf16 value of each scale and code.
    fn products() -> &'static Products;
}

/// E4M3 scales of 16 columns.
pub(crate) struct Nvfp4;

/// UE8M0 scales of 32 columns.
pub(crate) struct Mxfp4;

/// Fills a table by `$of(scale, code)`.
macro_rules! table {
    ($of:path) => {{
        let mut table = [[0; 16]; 256];
        let mut i = 0;
        while i < 256 * 16 {
            table[i / 16][i % 16] = $of((i / 16) as u8, (i % 16) as u8);
            i += 1;
        }
        table
    }};
}

impl Fp4 for Nvfp4 {
    const GROUP: usize = nvfp4::BLOCK;

    #[inline(always)]
    fn products() -> &'static Products {
        static TABLE: Products = table!(nvfp4::bf16_of);
        &TABLE
    }
}

impl Fp4 for Mxfp4 {
    const GROUP: usize = mxfp4::BLOCK;

    #[inline(always)]
    fn products() -> &'static Products {
        static TABLE: Products = table!(mxfp4::bf16_of);
        &TABLE
    }
}

/// The codes of a row, 16 columns at a time, and the products of their scale.
#[inline(always)]
fn row<F: Fp4>(unit: &[u8], r: usize) -> impl Iterator<Item = (&[u8; 8], &'static [u16; 16])> {
    let (codes, scales) = unit.split_at(PANEL_ROWS * FP4_ROW_BYTES);
    let codes = &codes[r * FP4_ROW_BYTES..][..FP4_ROW_BYTES];
    let scales = &scales[r * F::ROW_SCALES..][..F::ROW_SCALES];
    let columns = codes.as_chunks::<{ COLUMNS / 2 }>().0.iter().enumerate();
    columns.map(move |(i, codes)| {
        let scale = scales[i * COLUMNS / F::GROUP];
        (codes, &F::products()[usize::from(scale)])
    })
}

/// The bf16 values of the first unit of a panel, in plain Rust.
#[inline(always)]
pub(super) fn expand_plain<'e, F: Fp4>(
    panel: Panel<'_>,
    out: &'e mut MaybeUninit<Expanded>,
) -> &'e Expanded {
    let out = out.write(Expanded([[[0; UNIT_ROW_BYTES]; PANEL_ROWS]; 2]));
    for r in 0..PANEL_ROWS {
        for (i, (codes, products)) in row::<F>(panel.fp4_unit(), r).enumerate() {
            let row = &mut out.0[i / 4][r];
            let values = &mut row.as_chunks_mut::<2>().0[i % 4 * COLUMNS..][..COLUMNS];
            for (pair, &codes) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                pair[0] = products[usize::from(codes & 15)].to_le_bytes();
                pair[1] = products[usize::from(codes >> 4)].to_le_bytes();
            }
        }
    }
    out
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{expand_avx2, expand_avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// Fetches the unit that lies `panel.prefetch()` bytes ahead, line by line.
    #[target_feature(enable = "sse")]
    #[inline]
    fn prefetch(panel: Panel<'_>) {
        if panel.prefetch() == 0 {
            return;
        }
        for line in panel.fp4_unit().iter().step_by(64) {
            // May lie past the end; a prefetch never faults.
            let ahead = (&raw const *line).wrapping_add(panel.prefetch());
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
    }

    /// 32 columns at a time: nibbles become word indices, the upper 16 into a second table of
    /// products, and one permutation of the two tables gives all values.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub(in crate::kernels) fn expand_avx512<'e, F: Fp4>(
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        prefetch(panel);
        let unit = panel.fp4_unit();
        let (codes, scales) = unit.split_at(PANEL_ROWS * FP4_ROW_BYTES);
        let nibbles = _mm512_set1_epi16(0x0f);
        // Words 16 to 31 look up the second table.
        let second = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(0x10));
        let rows = codes.as_chunks::<FP4_ROW_BYTES>().0.iter();
        for (r, (codes, scales)) in rows.zip(scales.chunks_exact(F::ROW_SCALES)).enumerate() {
            for (quarter, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
                let products = |half: usize| {
                    let scale = scales[(quarter * 32 + half * COLUMNS) / F::GROUP];
                    let products = &F::products()[usize::from(scale)];
                    // SAFETY: 32 bytes; the load needs no alignment.
                    unsafe { _mm256_loadu_si256(products.as_ptr().cast()) }
                };
                let table = match F::GROUP {
                    COLUMNS => {
                        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(products(0)), products(1))
                    }
                    _ => _mm512_broadcast_i64x4(products(0)),
                };
                // SAFETY: 16 bytes; the load needs no alignment.
                let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
                // A byte's low nibble in the lower word, its high one in the upper.
                let wide = _mm512_cvtepu8_epi32(codes);
                let spread = _mm512_or_si512(wide, _mm512_slli_epi32::<12>(wide));
                // (spread & nibbles) | second
                let index = _mm512_ternarylogic_epi32::<0xea>(spread, nibbles, second);
                let values = _mm512_permutexvar_epi16(index, table);
                // SAFETY: a line is 64 bytes and aligned to as many.
                unsafe { _mm512_store_si512(Expanded::line(out, r, quarter).cast(), values) };
            }
        }
        // SAFETY: the four lines of all rows are written.
        unsafe { out.assume_init_ref() }
    }

    /// 16 columns at a time: the products' lower and upper bytes are looked up apart.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(in crate::kernels) fn expand_avx2<'e, F: Fp4>(
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        prefetch(panel);
        // Even bytes, then odd ones, of 8 words.
        let apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        let nibbles = _mm_set1_epi8(0x0f);
        for r in 0..PANEL_ROWS {
            for (i, (codes, products)) in row::<F>(panel.fp4_unit(), r).enumerate() {
                let half = |half: usize| {
                    let words = &products[half * 8..][..8];
                    // SAFETY: 16 bytes; the load needs no alignment.
                    let words = unsafe { _mm_loadu_si128(words.as_ptr().cast()) };
                    _mm_shuffle_epi8(words, apart)
                };
                let (low, high) = (half(0), half(1));
                let lower = _mm_unpacklo_epi64(low, high);
                let upper = _mm_unpackhi_epi64(low, high);
                let codes = _mm_cvtsi64_si128(i64::from_le_bytes(*codes));
                let codes = _mm_unpacklo_epi8(codes, _mm_srli_epi16::<4>(codes));
                let index = _mm_and_si128(codes, nibbles);
                let lower = _mm_shuffle_epi8(lower, index);
                let upper = _mm_shuffle_epi8(upper, index);
                let at = Expanded::line(out, r, i / 2).cast::<__m128i>();
                // SAFETY: a line is 64 bytes and aligned to as many; this is one of its halves.
                unsafe {
                    let at = at.add(i % 2 * 2);
                    _mm_store_si128(at, _mm_unpacklo_epi8(lower, upper));
                    _mm_store_si128(at.add(1), _mm_unpackhi_epi8(lower, upper));
                }
            }
        }
        // SAFETY: the four lines of all rows are written.
        unsafe { out.assume_init_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::kernels::{Body, Kernel, Multiply};
    use asym_gemm_formats::bank::fp4_unit_bytes;

    struct Expand<'a, F> {
        unit: &'a [u8],
        out: &'a mut [[[u8; 128]; 16]; 2],
        format: std::marker::PhantomData<F>,
    }

    impl<F: Fp4> Body for Expand<'_, F> {
        #[inline(always)]
        fn run<M: Multiply>(self, m: M) {
            let mut out = MaybeUninit::uninit();
            let panel = Panel::of_units(self.unit, self.unit.len());
            *self.out = m.expand_fp4::<F>(panel, &mut out).0;
        }
    }

    /// All 256 scales with all codes, in every column of a unit, on every kernel of the processor.
    fn expands_exactly<F: Fp4>(bf16_of: fn(u8, u8) -> u16) {
        let kernels = Isa::ALL.map(|isa| Kernel::best(isa.most()));
        let kernels = kernels
            .into_iter()
            .chain([Isa::Avx2, Isa::Avx512].map(|isa| Kernel::best(isa.required())));
        for kernel in kernels.chain([Kernel::EmulatedAmx]) {
            for shift in 0..=u8::MAX {
                let unit: Vec<u8> = (0..fp4_unit_bytes(F::GROUP))
                    .map(|i| match i.checked_sub(1024) {
                        None => (i as u8).wrapping_mul(31).wrapping_add(shift),
                        Some(scale) => (scale as u8).wrapping_add(shift),
                    })
                    .collect();
                let mut out = [[[0xa5; 128]; 16]; 2];
                kernel.run(Expand::<F> {
                    unit: &unit,
                    out: &mut out,
                    format: std::marker::PhantomData,
                });
                for (row, k) in (0..16).flat_map(|row| (0..128).map(move |k| (row, k))) {
                    let code = unit[row * 64 + k / 2] >> (k % 2 * 4) & 15;
                    let scale = unit[1024 + row * F::ROW_SCALES + k / F::GROUP];
                    let bytes = &out[k / 64][row][k % 64 * 2..][..2];
                    assert_eq!(
                        u16::from_le_bytes([bytes[0], bytes[1]]),
                        bf16_of(scale, code),
                        "code {code}, scale {scale:#04x} at row {row}, column {k} on {kernel:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn nvfp4_expands_to_its_exact_values() {
        expands_exactly::<Nvfp4>(nvfp4::bf16_of);
    }

    #[test]
    fn mxfp4_expands_to_its_exact_values() {
        expands_exactly::<Mxfp4>(mxfp4::bf16_of);
    }
}
