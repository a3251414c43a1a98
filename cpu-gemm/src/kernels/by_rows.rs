//! Tile products from dot products, for instruction sets without tiles.
//!
//! Tokens are taken four, two or one at a time; their sums come out as rows [token][weight row] and
//! are transposed once for all 16.

use std::mem::MaybeUninit;

use asym_gemm_formats::bank::PANEL_ROWS;

use super::fp4::Fp4;
use super::{Dot, Expanded, Group, Multiply, Panel, Products, Span, TokenLayout};
use crate::tile::{Lanes, TOKENS, Tile};
use crate::vector::VectorMath;

/// [`Multiply`] by the dot products of `D`.
#[derive(Clone, Copy)]
pub(super) struct ByRows<D>(pub(super) D);

/// Runs `$body` for all `$count` tokens in blocks of 4, 2 and 1: in it `$width` is a constant and
/// `$first` the first token of the block.
macro_rules! for_token_blocks {
    ($count:expr, |$first:ident, $width:ident| $body:block) => {{
        let count: usize = $count;
        let mut $first = 0;
        while count - $first >= 4 {
            const $width: usize = 4;
            $body
            $first += 4;
        }
        if count - $first >= 2 {
            const $width: usize = 2;
            $body
            $first += 2;
        }
        if count - $first == 1 {
            const $width: usize = 1;
            $body
        }
    }};
}

impl<D: Dot> Multiply for ByRows<D> {
    const LAYOUT: TokenLayout = TokenLayout::Rows;
    /// 128 tokens: their rows and sums fit the second-level cache beside a panel.
    const GROUPS: usize = 8;

    #[inline(always)]
    fn s8(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, i32>) {
        // The code sums that undo an offset belong to one run.
        assert_eq!(w.run_count(), 1, "int8 sums end with a run");
        for (x, out) in x.iter().zip(out) {
            if x.tokens == 1 {
                let row = x.row(0, span.unit, w.units());
                let [products] = self.0.s8(w, [row], [x.sums[span.block][0]]);
                one_token(out, products);
                continue;
            }
            let mut by_token = Tile([[0u32; PANEL_ROWS]; TOKENS]);
            for_token_blocks!(x.tokens, |first, WIDTH| {
                let rows: [_; WIDTH] =
                    std::array::from_fn(|t| x.row(first + t, span.unit, w.units()));
                let sums = std::array::from_fn(|t| x.sums[span.block][first + t]);
                let products = self.0.s8(w, rows, sums);
                for (row, products) in by_token.0[first..].iter_mut().zip(products) {
                    *row = products.map(|p| p as u32);
                }
            });
            self.vector()
                .transpose_tile(&by_token, bytemuck::cast_mut(out));
        }
    }

    #[inline(always)]
    fn bf16(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, f32>) {
        for (x, out) in x.iter().zip(out) {
            if x.tokens == 1 {
                let mut sums = [0f32; PANEL_ROWS];
                for run in 0..w.run_count() {
                    let row = x.row(0, span.unit + run * w.units(), w.units());
                    let [products] = self.0.bf16(w.run(run), [row]);
                    for (sum, product) in sums.iter_mut().zip(products) {
                        *sum += product;
                    }
                }
                one_token(out, sums);
                continue;
            }
            let mut by_token = Tile([[0f32; PANEL_ROWS]; TOKENS]);
            for run in 0..w.run_count() {
                let panel = w.run(run);
                let first_unit = span.unit + run * w.units();
                for_token_blocks!(x.tokens, |first, WIDTH| {
                    let rows: [_; WIDTH] =
                        std::array::from_fn(|t| x.row(first + t, first_unit, w.units()));
                    let products = self.0.bf16(panel, rows);
                    for (row, products) in by_token.0[first..].iter_mut().zip(products) {
                        for (sum, product) in row.iter_mut().zip(products) {
                            *sum += product;
                        }
                    }
                });
            }
            self.vector()
                .transpose_tile(by_token.as_words(), out.as_words_mut());
        }
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        self.0.expand_fp4::<F>(panel, out)
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        self.0.expand_e4m3(panel, out)
    }

    type Vector = D::Vector;

    #[inline(always)]
    fn vector(self) -> Self::Vector {
        self.0.vector()
    }
}

/// Stores the sums of a group's only token. The other lanes become zero: what they held may be
/// subnormal as a number, which is slow to compute with.
#[inline(always)]
fn one_token<T: Copy + Default>(out: &mut Tile<T>, products: Lanes<T>) {
    for (out, product) in out.0.iter_mut().zip(products) {
        *out = [T::default(); TOKENS];
        out[0] = product;
    }
}
