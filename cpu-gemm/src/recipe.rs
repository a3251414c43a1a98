//! How each weight format rounds its operands and scales its sums.
//!
//! These bodies are written once and compiled for every instruction set (see
//! [`crate::kernels`]); the int8 ones define the result to the last bit.
//!
//! A product is a sum over *blocks* of K: y = 0; for each block in order, y = y + scaled sum of
//! the block. For the product with h the blocks are the slices of I, for the one with x they
//! are what one scale covers: all of K, or 128 of it.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{PANEL_ROWS, SLICE, UNIT_ROW_BYTES};
use asym_gemm_formats::{bf16, int8};
use bytemuck::Pod;

use crate::kernels::fp4::Fp4;
use crate::kernels::{Group, Multiply, Panel, Products, Span};
use crate::tile::{Lanes, TOKENS, Tile};
use crate::vector::{Vector, VectorMath};

/// Largest K whose i8 x i8 sums always fit an i32: K * 128 * 128 < 2^31.
pub(crate) const MAX_EXACT_K: usize = (i32::MAX / (128 * 128)) as usize;

/// The arithmetic of one weight format.
pub(crate) trait Recipe {
    /// A stored activation.
    type Code: Pod + Default + Send + Sync;
    /// The sum of a block.
    type Sum: Pod + Default;
    /// Whether K of the product with x is cut into blocks of 128.
    const BLOCKED_X: bool;
    /// Whether the slices of h are blocks with scales of their own; else I is one block.
    const BLOCKED_H: bool;
    /// Whether down has a scale for each weight row and slice.
    const DOWN_ROWS_SCALED: bool;
    /// Whether sums are integers, the same on every instruction set.
    const EXACT: bool;
    /// Bytes of an activation row that meet one unit of weights.
    const X_UNIT_BYTES: usize = UNIT_ROW_BYTES;
    /// Units of weights in a block of 128.
    const BLOCK_UNITS: usize = SLICE * size_of::<Self::Code>() / Self::X_UNIT_BYTES;

    /// Scales (and sums) of an activation row of `k` elements, at least 1.
    fn blocks(k: usize) -> usize {
        if Self::BLOCKED_X {
            k.div_ceil(int8::BLOCK)
        } else {
            1
        }
    }

    /// Rounds one row of x.
    fn encode<V: Vector>(
        v: V,
        x: &[f32],
        codes: &mut [Self::Code],
        scales: &mut [f32],
        sums: &mut [i32],
    );

    /// Rounds the elements of h that belong to one slice: up to 128 rows of 16 tokens become the
    /// words of each token, with the scale and the sum of its codes.
    fn encode_hidden<V: Vector>(
        v: V,
        h: &[Lanes<f32>],
        words: &mut [Lanes<u32>],
        scales: &mut Lanes<f32>,
        sums: &mut Lanes<i32>,
    );

    /// The sums of the part of K that `span` and the panel name.
    fn multiply<M: Multiply>(
        m: M,
        panel: Panel<'_>,
        x: &[Group<'_>],
        span: Span,
        sums: Products<'_, Self::Sum>,
    );

    /// The scale of 16 tokens in a weight row.
    fn scale<V: Vector>(v: V, tokens: V::F, row: f32) -> V::F;

    /// Sums of one weight row in the first block, scaled.
    fn first<V: Vector>(v: V, sums: &Lanes<Self::Sum>, scale: V::F) -> V::F;

    /// y plus the scaled sums of a later block.
    fn add<V: Vector>(v: V, sums: &Lanes<Self::Sum>, scale: V::F, y: V::F) -> V::F;
}

/// Scales one block of a tile and adds it to `y`, or writes it there if it is the first. Without
/// `rows` the weight rows have no scales.
#[inline(always)]
pub(crate) fn add_block<R: Recipe, V: Vector>(
    v: V,
    first: bool,
    sums: &Tile<R::Sum>,
    rows: Option<&Lanes<f32>>,
    tokens: &Lanes<f32>,
    y: &mut Tile<f32>,
) {
    let tokens = v.load(tokens);
    for r in 0..PANEL_ROWS {
        let scale = match rows {
            Some(rows) => R::scale(v, tokens, rows[r]),
            None => tokens,
        };
        let (sums, y) = (&sums.0[r], &mut y.0[r]);
        v.store(
            match first {
                true => R::first(v, sums, scale),
                false => R::add(v, sums, scale, v.load(y)),
            },
            y,
        );
    }
}

/// bf16 weights and activations, f32 sums.
pub(crate) struct Bf16;

impl Recipe for Bf16 {
    type Code = u16;
    type Sum = f32;
    const BLOCKED_X: bool = false;
    const BLOCKED_H: bool = false;
    const DOWN_ROWS_SCALED: bool = false;
    const EXACT: bool = false;

    #[inline(always)]
    fn encode<V: Vector>(v: V, x: &[f32], codes: &mut [u16], scales: &mut [f32], sums: &mut [i32]) {
        let (lanes, rest) = x.as_chunks::<TOKENS>();
        let (codes, code_rest) = codes.as_chunks_mut::<TOKENS>();
        for (code, x) in codes.iter_mut().zip(lanes) {
            v.store_halves(v.encode_bf16(v.load(x)), code);
        }
        for (code, &x) in code_rest.iter_mut().zip(rest) {
            *code = bf16::encode(x);
        }
        scales.fill(1.0);
        sums.fill(0);
    }

    #[inline(always)]
    fn encode_hidden<V: Vector>(
        v: V,
        h: &[Lanes<f32>],
        words: &mut [Lanes<u32>],
        _scales: &mut Lanes<f32>,
        _sums: &mut Lanes<i32>,
    ) {
        words.fill([0; TOKENS]);
        for (pair, words) in h.chunks(2).zip(words) {
            let mut word = v.encode_bf16(v.load(&pair[0]));
            if let Some(second) = pair.get(1) {
                let second = v.encode_bf16(v.load(second));
                word = v.or(word, v.shift_left::<16>(second));
            }
            v.store_int(word, words);
        }
    }

    #[inline(always)]
    fn multiply<M: Multiply>(
        m: M,
        panel: Panel<'_>,
        x: &[Group<'_>],
        span: Span,
        sums: Products<'_, f32>,
    ) {
        m.bf16(panel, x, span, sums);
    }

    #[inline(always)]
    fn scale<V: Vector>(_v: V, tokens: V::F, _row: f32) -> V::F {
        tokens
    }

    #[inline(always)]
    fn first<V: Vector>(v: V, sums: &Lanes<f32>, _scale: V::F) -> V::F {
        v.load(sums)
    }

    #[inline(always)]
    fn add<V: Vector>(v: V, sums: &Lanes<f32>, _scale: V::F, y: V::F) -> V::F {
        v.add(y, v.load(sums))
    }
}

/// fp8 weights in blocks of 128 x 128, bf16 activations, f32 sums inside a block.
///
/// A unit of weights is one block of K; it becomes two units of bf16, exactly, before it is
/// multiplied.
pub(crate) struct Fp8;

impl Recipe for Fp8 {
    type Code = u16;
    type Sum = f32;
    const BLOCKED_X: bool = true;
    const BLOCKED_H: bool = true;
    const DOWN_ROWS_SCALED: bool = true;
    const EXACT: bool = false;
    const X_UNIT_BYTES: usize = 2 * UNIT_ROW_BYTES;

    #[inline(always)]
    fn encode<V: Vector>(v: V, x: &[f32], codes: &mut [u16], scales: &mut [f32], sums: &mut [i32]) {
        Bf16::encode(v, x, codes, scales, sums);
    }

    #[inline(always)]
    fn encode_hidden<V: Vector>(
        v: V,
        h: &[Lanes<f32>],
        words: &mut [Lanes<u32>],
        scales: &mut Lanes<f32>,
        sums: &mut Lanes<i32>,
    ) {
        Bf16::encode_hidden(v, h, words, scales, sums);
    }

    #[inline(always)]
    fn multiply<M: Multiply>(
        m: M,
        panel: Panel<'_>,
        x: &[Group<'_>],
        span: Span,
        sums: Products<'_, f32>,
    ) {
        assert_eq!(panel.total_units(), 1, "a block of K is one unit");
        let mut expanded = MaybeUninit::uninit();
        let expanded = m.expand_e4m3(panel, &mut expanded);
        let span = Span {
            unit: 2 * span.unit,
            ..span
        };
        m.bf16(expanded.panel(), x, span, sums);
    }

    #[inline(always)]
    fn scale<V: Vector>(v: V, _tokens: V::F, row: f32) -> V::F {
        v.splat(row)
    }

    #[inline(always)]
    fn first<V: Vector>(v: V, sums: &Lanes<f32>, scale: V::F) -> V::F {
        v.mul(v.load(sums), scale)
    }

    #[inline(always)]
    fn add<V: Vector>(v: V, sums: &Lanes<f32>, scale: V::F, y: V::F) -> V::F {
        v.fma(v.load(sums), scale, y)
    }
}

/// fp4 weights, bf16 activations, f32 sums inside a block of 128 of K.
///
/// As [`Fp8`], with the scales of 16 or 32 columns expanded into the bf16 values. What is scaled
/// after a block is the scale of the whole matrix.
pub(crate) struct Expanding<F>(PhantomData<F>);

impl<F: Fp4> Recipe for Expanding<F> {
    type Code = u16;
    type Sum = f32;
    const BLOCKED_X: bool = true;
    const BLOCKED_H: bool = true;
    const DOWN_ROWS_SCALED: bool = true;
    const EXACT: bool = false;
    const X_UNIT_BYTES: usize = Fp8::X_UNIT_BYTES;

    #[inline(always)]
    fn encode<V: Vector>(v: V, x: &[f32], codes: &mut [u16], scales: &mut [f32], sums: &mut [i32]) {
        Bf16::encode(v, x, codes, scales, sums);
    }

    #[inline(always)]
    fn encode_hidden<V: Vector>(
        v: V,
        h: &[Lanes<f32>],
        words: &mut [Lanes<u32>],
        scales: &mut Lanes<f32>,
        sums: &mut Lanes<i32>,
    ) {
        Bf16::encode_hidden(v, h, words, scales, sums);
    }

    #[inline(always)]
    fn multiply<M: Multiply>(
        m: M,
        panel: Panel<'_>,
        x: &[Group<'_>],
        span: Span,
        sums: Products<'_, f32>,
    ) {
        assert_eq!(panel.total_units(), 1, "a block of K is one unit");
        let mut expanded = MaybeUninit::uninit();
        let expanded = m.expand_fp4::<F>(panel, &mut expanded);
        let span = Span {
            unit: 2 * span.unit,
            ..span
        };
        m.bf16(expanded.panel(), x, span, sums);
    }

    #[inline(always)]
    fn scale<V: Vector>(v: V, tokens: V::F, row: f32) -> V::F {
        Fp8::scale(v, tokens, row)
    }

    #[inline(always)]
    fn first<V: Vector>(v: V, sums: &Lanes<f32>, scale: V::F) -> V::F {
        Fp8::first(v, sums, scale)
    }

    #[inline(always)]
    fn add<V: Vector>(v: V, sums: &Lanes<f32>, scale: V::F, y: V::F) -> V::F {
        Fp8::add(v, sums, scale, y)
    }
}

/// Quantises `x` with the scale that `scale_of` makes of its largest magnitude; returns the scale
/// and the sum of the codes.
///
/// The maximum is taken over magnitudes as integers, where NaN is above infinity, so that no
/// vector maximum can drop it.
#[inline(always)]
fn quantise<V: Vector>(
    v: V,
    x: &[f32],
    codes: &mut [i8],
    scale_of: impl Fn(f32) -> f32,
) -> (f32, i32) {
    let (lanes, rest) = x.as_chunks::<TOKENS>();
    let mut amax = v.splat_int(0);
    for x in lanes {
        amax = v.max_int(amax, v.and(v.bits(v.load(x)), v.splat_int(0x7fff_ffff)));
    }
    let mut largest = [0; TOKENS];
    v.store_int(amax, &mut largest);
    let magnitudes = rest.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    let amax = largest.into_iter().chain(magnitudes).fold(0, u32::max);
    let scale = scale_of(f32::from_bits(amax));
    let inverse = 1.0 / scale;
    let (code_lanes, code_rest) = codes.as_chunks_mut::<TOKENS>();
    let mut sums = v.splat_int(0);
    for (code, x) in code_lanes.iter_mut().zip(lanes) {
        let encoded = v.encode_int8(v.load(x), v.splat(inverse));
        sums = v.add_int(sums, encoded);
        v.store_bytes(encoded, bytemuck::cast_mut(code));
    }
    let mut sum = [0; TOKENS];
    v.store_int(sums, &mut sum);
    let mut sum: i32 = sum.into_iter().fold(0, u32::wrapping_add) as i32;
    for (code, &x) in code_rest.iter_mut().zip(rest) {
        *code = int8::encode(x, inverse);
        sum += i32::from(*code);
    }
    (scale, sum)
}

/// Quantises the up to 128 elements that each of 16 tokens has in a slice, four to a word.
#[inline(always)]
fn quantise_hidden<V: Vector>(
    v: V,
    h: &[Lanes<f32>],
    words: &mut [Lanes<u32>],
    scales: &mut Lanes<f32>,
    sums: &mut Lanes<i32>,
) {
    let mut amax = v.splat_int(0);
    for row in h {
        let magnitude = v.and(v.bits(v.load(row)), v.splat_int(0x7fff_ffff));
        amax = v.max_int(amax, magnitude);
    }
    let mut largest = [0; TOKENS];
    v.store_int(amax, &mut largest);
    *scales = largest.map(|amax| int8::per_row_scale(f32::from_bits(amax)));
    let inverse = v.div(v.splat(1.0), v.load(scales));
    let mut sum = v.splat_int(0);
    words.fill([0; TOKENS]);
    for (four, words) in h.chunks(4).zip(words) {
        let mut word = v.splat_int(0);
        // Highest byte first; a short last chunk leaves the bytes above it zero.
        for i in (0..4).rev() {
            word = v.shift_left::<8>(word);
            if let Some(row) = four.get(i) {
                let code = v.encode_int8(v.load(row), inverse);
                sum = v.add_int(sum, code);
                word = v.or(word, v.and(code, v.splat_int(0xff)));
            }
        }
        v.store_int(word, words);
    }
    v.store_int(sum, bytemuck::cast_mut(sums));
}

/// int8 with one scale a row.
pub(crate) struct PerRow;

/// int8 with one scale a row and 128 columns.
pub(crate) struct Block128;

/// The parts that both int8 recipes share.
macro_rules! int8_recipe {
    ($name:ident, blocked: $blocked:literal, $scale:path) => {
        impl Recipe for $name {
            type Code = i8;
            type Sum = i32;
            const BLOCKED_X: bool = $blocked;
            const BLOCKED_H: bool = true;
            const DOWN_ROWS_SCALED: bool = $blocked;
            const EXACT: bool = true;

            #[inline(always)]
            fn encode<V: Vector>(
                v: V,
                x: &[f32],
                codes: &mut [i8],
                scales: &mut [f32],
                sums: &mut [i32],
            ) {
                let span = if $blocked {
                    int8::BLOCK
                } else {
                    x.len().max(1)
                };
                let blocks = x.chunks(span).zip(codes.chunks_mut(span));
                for (((x, codes), scale), sum) in blocks.zip(scales).zip(sums) {
                    (*scale, *sum) = quantise(v, x, codes, $scale);
                }
            }

            #[inline(always)]
            fn encode_hidden<V: Vector>(
                v: V,
                h: &[Lanes<f32>],
                words: &mut [Lanes<u32>],
                scales: &mut Lanes<f32>,
                sums: &mut Lanes<i32>,
            ) {
                quantise_hidden(v, h, words, scales, sums);
            }

            #[inline(always)]
            fn multiply<M: Multiply>(
                m: M,
                panel: Panel<'_>,
                x: &[Group<'_>],
                span: Span,
                sums: Products<'_, i32>,
            ) {
                m.s8(panel, x, span, sums);
            }

            #[inline(always)]
            fn scale<V: Vector>(v: V, tokens: V::F, row: f32) -> V::F {
                v.mul(tokens, v.splat(row))
            }

            #[inline(always)]
            fn first<V: Vector>(v: V, sums: &Lanes<i32>, scale: V::F) -> V::F {
                v.mul(v.to_float(v.load_int(sums)), scale)
            }

            #[inline(always)]
            fn add<V: Vector>(v: V, sums: &Lanes<i32>, scale: V::F, y: V::F) -> V::F {
                v.fma(v.to_float(v.load_int(sums)), scale, y)
            }
        }
    };
}

int8_recipe!(PerRow, blocked: false, int8::per_row_scale);
int8_recipe!(Block128, blocked: true, int8::block_scale);
