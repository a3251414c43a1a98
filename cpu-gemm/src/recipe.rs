//! How each weight format rounds its operands and scales its sums.
//!
//! These bodies are written once and compiled for every instruction set (see
//! [`crate::kernels`]); the int8 ones define the result to the last bit.

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES};
use asym_gemm_formats::{bf16, fma, int8};

use crate::kernels::{Dot, Lanes};

/// Largest K whose i8 x i8 sums always fit an i32: K * 128 * 128 < 2^31.
pub(crate) const MAX_EXACT_K: usize = (i32::MAX / (128 * 128)) as usize;

/// One row of activations as the kernels read it.
pub(crate) struct Row<'a, C> {
    /// K codes, zero-padded to whole units.
    pub(crate) codes: &'a [C],
    /// One for each block of K.
    pub(crate) scales: &'a [f32],
    /// The sum of the codes of each block.
    pub(crate) sums: &'a [i32],
}

/// The arithmetic of one weight format.
pub(crate) trait Recipe {
    /// A stored activation.
    type Code: Copy + Default + Send + Sync;
    /// Activations in the 128 bytes of a unit's row.
    const UNIT_K: usize;

    /// Scales (and sums) of an activation row of `k` elements, at least 1.
    fn blocks(k: usize) -> usize;

    /// Rounds one row of x. `codes` may be longer than `x`; the rest is left alone.
    fn encode(x: &[f32], codes: &mut [Self::Code], scales: &mut [f32], sums: &mut [i32]);

    /// Rounds the at most 128 elements of h that belong to one slice.
    fn encode_hidden(h: &[f32], codes: &mut [Self::Code], scale: &mut f32, sum: &mut i32);

    /// x . w for all of K, scaled. `scales` holds the weight scales of each block of K.
    fn panel<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &[Lanes<f32>],
        x: &[Row<'_, Self::Code>; T],
    ) -> [Lanes<f32>; T];

    /// Adds h . w of one slice to `y`. `scales` holds the slice's block scales.
    fn add_down_slice<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &Lanes<f32>,
        h: &[Row<'_, Self::Code>; T],
        y: [&mut Lanes<f32>; T],
    );

    /// Applies what scales down over all slices.
    fn finish_down(y: &mut Lanes<f32>, row_scales: &Lanes<f32>);
}

/// bf16 weights and activations, f32 sums.
pub(crate) struct Bf16;

impl Recipe for Bf16 {
    type Code = u16;
    const UNIT_K: usize = 64;

    fn blocks(_k: usize) -> usize {
        1
    }

    #[inline(always)]
    fn encode(x: &[f32], codes: &mut [u16], _scales: &mut [f32], _sums: &mut [i32]) {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = bf16::encode(x);
        }
    }

    #[inline(always)]
    fn encode_hidden(h: &[f32], codes: &mut [u16], _scale: &mut f32, _sum: &mut i32) {
        Self::encode(h, codes, &mut [], &mut []);
    }

    #[inline(always)]
    fn panel<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        _scales: &[Lanes<f32>],
        x: &[Row<'_, u16>; T],
    ) -> [Lanes<f32>; T] {
        dot.bf16(panel, x.each_ref().map(|x| x.codes))
    }

    #[inline(always)]
    fn add_down_slice<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        _scales: &Lanes<f32>,
        h: &[Row<'_, u16>; T],
        y: [&mut Lanes<f32>; T],
    ) {
        let sums = dot.bf16(panel, h.each_ref().map(|h| h.codes));
        for (y, sums) in y.into_iter().zip(&sums) {
            for (y, sum) in y.iter_mut().zip(sums) {
                *y += sum;
            }
        }
    }

    #[inline(always)]
    fn finish_down(_y: &mut Lanes<f32>, _row_scales: &Lanes<f32>) {}
}

/// fp8 weights in blocks of 128 x 128, bf16 activations, f32 sums inside a block.
///
/// A unit is one block of K. Its weights become bf16, exactly, before they are multiplied.
pub(crate) struct Fp8;

impl Fp8 {
    /// x . w of one unit without its scale.
    #[inline(always)]
    fn unit<D: Dot, const T: usize>(
        dot: D,
        unit: &[u8; UNIT_BYTES],
        x: [&[u16]; T],
    ) -> [Lanes<f32>; T] {
        let mut expanded = [0; 2 * UNIT_BYTES];
        dot.expand_e4m3(unit, &mut expanded);
        dot.bf16(&expanded, x)
    }
}

impl Recipe for Fp8 {
    type Code = u16;
    const UNIT_K: usize = 128;

    fn blocks(_k: usize) -> usize {
        1
    }

    #[inline(always)]
    fn encode(x: &[f32], codes: &mut [u16], scales: &mut [f32], sums: &mut [i32]) {
        Bf16::encode(x, codes, scales, sums);
    }

    #[inline(always)]
    fn encode_hidden(h: &[f32], codes: &mut [u16], scale: &mut f32, sum: &mut i32) {
        Bf16::encode_hidden(h, codes, scale, sum);
    }

    #[inline(always)]
    fn panel<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &[Lanes<f32>],
        x: &[Row<'_, u16>; T],
    ) -> [Lanes<f32>; T] {
        let mut out = [[0f32; PANEL_ROWS]; T];
        let (units, _) = panel.as_chunks::<UNIT_BYTES>();
        for (block, (unit, scales)) in units.iter().zip(scales).enumerate() {
            let codes = x
                .each_ref()
                .map(|x| &x.codes[block * Self::UNIT_K..][..Self::UNIT_K]);
            let acc = Self::unit(dot, unit, codes);
            for t in 0..T {
                for r in 0..PANEL_ROWS {
                    out[t][r] = fma(acc[t][r], scales[r], out[t][r]);
                }
            }
        }
        out
    }

    #[inline(always)]
    fn add_down_slice<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &Lanes<f32>,
        h: &[Row<'_, u16>; T],
        y: [&mut Lanes<f32>; T],
    ) {
        let unit = panel.first_chunk().expect("a down panel is one unit");
        let acc = Self::unit(dot, unit, h.each_ref().map(|h| h.codes));
        for (y, acc) in y.into_iter().zip(&acc) {
            for r in 0..PANEL_ROWS {
                y[r] = fma(acc[r], scales[r], y[r]);
            }
        }
    }

    #[inline(always)]
    fn finish_down(_y: &mut Lanes<f32>, _row_scales: &Lanes<f32>) {}
}

/// Quantises `x` with the scale that `scale_of` makes of its largest magnitude.
///
/// The maximum is taken over magnitudes as integers, where NaN is above infinity, so that no
/// vector maximum can drop it.
#[inline(always)]
fn quantise(x: &[f32], codes: &mut [i8], scale_of: impl Fn(f32) -> f32) -> (f32, i32) {
    let mut amax = 0u32;
    for x in x {
        amax = amax.max(x.to_bits() & 0x7fff_ffff);
    }
    let scale = scale_of(f32::from_bits(amax));
    let inverse = 1.0 / scale;
    let mut sum = 0i32;
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = int8::encode(x, inverse);
        sum += i32::from(*code);
    }
    (scale, sum)
}

/// The codes and sums of `T` rows, as [`Dot::s8`] wants them.
#[inline(always)]
fn operands<'a, const T: usize>(x: &[Row<'a, i8>; T]) -> ([&'a [i8]; T], [i32; T]) {
    (
        x.each_ref().map(|x| x.codes),
        x.each_ref().map(|x| x.sums[0]),
    )
}

/// int8 with one scale a row.
pub(crate) struct PerRow;

impl Recipe for PerRow {
    type Code = i8;
    const UNIT_K: usize = 128;

    fn blocks(_k: usize) -> usize {
        1
    }

    #[inline(always)]
    fn encode(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        (scales[0], sums[0]) = quantise(x, codes, int8::per_row_scale);
    }

    #[inline(always)]
    fn encode_hidden(h: &[f32], codes: &mut [i8], scale: &mut f32, sum: &mut i32) {
        (*scale, *sum) = quantise(h, codes, int8::per_row_scale);
    }

    #[inline(always)]
    fn panel<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &[Lanes<f32>],
        x: &[Row<'_, i8>; T],
    ) -> [Lanes<f32>; T] {
        let (codes, sums) = operands(x);
        let acc = dot.s8(panel, codes, sums);
        let mut out = [[0f32; PANEL_ROWS]; T];
        for t in 0..T {
            for r in 0..PANEL_ROWS {
                out[t][r] = acc[t][r] as f32 * (x[t].scales[0] * scales[0][r]);
            }
        }
        out
    }

    #[inline(always)]
    fn add_down_slice<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        _scales: &Lanes<f32>,
        h: &[Row<'_, i8>; T],
        y: [&mut Lanes<f32>; T],
    ) {
        let (codes, sums) = operands(h);
        let acc = dot.s8(panel, codes, sums);
        for ((y, acc), h) in y.into_iter().zip(&acc).zip(h) {
            for (y, &acc) in y.iter_mut().zip(acc) {
                *y = fma(acc as f32, h.scales[0], *y);
            }
        }
    }

    #[inline(always)]
    fn finish_down(y: &mut Lanes<f32>, row_scales: &Lanes<f32>) {
        for (y, scale) in y.iter_mut().zip(row_scales) {
            *y *= scale;
        }
    }
}

/// int8 with one scale a row and 128 columns.
pub(crate) struct Block128;

impl Recipe for Block128 {
    type Code = i8;
    const UNIT_K: usize = 128;

    fn blocks(k: usize) -> usize {
        k.div_ceil(int8::BLOCK)
    }

    #[inline(always)]
    fn encode(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        let blocks = x.chunks(int8::BLOCK).zip(codes.chunks_mut(int8::BLOCK));
        for (((x, codes), scale), sum) in blocks.zip(scales).zip(sums) {
            (*scale, *sum) = quantise(x, codes, int8::block_scale);
        }
    }

    #[inline(always)]
    fn encode_hidden(h: &[f32], codes: &mut [i8], scale: &mut f32, sum: &mut i32) {
        PerRow::encode_hidden(h, codes, scale, sum);
    }

    #[inline(always)]
    fn panel<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &[Lanes<f32>],
        x: &[Row<'_, i8>; T],
    ) -> [Lanes<f32>; T] {
        let mut out = [[0f32; PANEL_ROWS]; T];
        // A block of scales covers one unit.
        for (block, (unit, scales)) in panel.chunks_exact(UNIT_BYTES).zip(scales).enumerate() {
            let codes = x
                .each_ref()
                .map(|x| &x.codes[block * int8::BLOCK..][..int8::BLOCK]);
            let acc = dot.s8(unit, codes, x.each_ref().map(|x| x.sums[block]));
            for t in 0..T {
                let scale = x[t].scales[block];
                for r in 0..PANEL_ROWS {
                    out[t][r] = fma(acc[t][r] as f32, scale * scales[r], out[t][r]);
                }
            }
        }
        out
    }

    #[inline(always)]
    fn add_down_slice<D: Dot, const T: usize>(
        dot: D,
        panel: &[u8],
        scales: &Lanes<f32>,
        h: &[Row<'_, i8>; T],
        y: [&mut Lanes<f32>; T],
    ) {
        let (codes, sums) = operands(h);
        let acc = dot.s8(panel, codes, sums);
        for ((y, acc), h) in y.into_iter().zip(&acc).zip(h) {
            for r in 0..PANEL_ROWS {
                y[r] = fma(acc[r] as f32, h.scales[0] * scales[r], y[r]);
            }
        }
    }

    #[inline(always)]
    fn finish_down(_y: &mut Lanes<f32>, _row_scales: &Lanes<f32>) {}
}
