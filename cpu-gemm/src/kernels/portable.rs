//! Dot products in plain Rust.
//!
//! The bf16 sums keep 16 lanes, lane i adding the products of elements 2i and 2i+1 of each
//! 32, and end in the tree of [`reduce`]: the grouping that 512-bit registers give. A
//! product of two bf16 is exact in f32 (unless it under- or overflows), so this equals the
//! AVX2 and AVX-512 kernels of fused multiply-adds.

use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_ROW_BYTES};
use asym_gemm_formats::e4m3;

use super::fp4::{Fp4, expand_plain};
use super::{Dot, Expanded, Panel};
use crate::tile::Lanes;
use crate::vector::PlainVector;

/// The bf16 code of each e4m3 code.
const BF16_OF_E4M3: [u16; 256] = {
    let mut table = [0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3::to_bf16(code as u8);
        code += 1;
    }
    table
};

/// The dot products of this module.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Dot for Portable {
    type Vector = PlainVector;

    #[inline(always)]
    fn vector(self) -> PlainVector {
        PlainVector
    }

    #[inline(always)]
    fn s8<const T: usize>(
        self,
        panel: Panel<'_>,
        x: [&[u8]; T],
        _sums: [i32; T],
    ) -> [Lanes<i32>; T] {
        x.map(|x| {
            let mut acc = [0i32; PANEL_ROWS];
            let (x, _) = x.as_chunks::<UNIT_ROW_BYTES>();
            assert_eq!(panel.units(), x.len(), "as many units as activations");
            for (unit, x) in x.iter().enumerate() {
                // Widened to i16 first: sums of such products become `pmaddwd` and its like.
                let x = x.map(|x| i16::from(x as i8));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let row = panel.row(unit, r).map(|w| i16::from(w as i8));
                    for (&w, &x) in row.iter().zip(&x) {
                        *acc += i32::from(w) * i32::from(x);
                    }
                }
            }
            acc
        })
    }

    #[inline(always)]
    fn bf16<const T: usize>(self, panel: Panel<'_>, x: [&[u8]; T]) -> [Lanes<f32>; T] {
        x.map(|x| {
            let mut acc = [[0f32; 16]; PANEL_ROWS];
            let (x, _) = x.as_chunks::<UNIT_ROW_BYTES>();
            assert_eq!(panel.units(), x.len(), "as many units as activations");
            for (unit, x) in x.iter().enumerate() {
                let (x, _) = x.as_chunks::<64>();
                for (r, acc) in acc.iter_mut().enumerate() {
                    let (halves, _) = panel.row(unit, r).as_chunks::<64>();
                    for (w, x) in halves.iter().zip(x) {
                        add_products(acc, w, x);
                    }
                }
            }
            acc.map(reduce)
        })
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        expand_plain::<F>(panel, out)
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        let out = out.write(Expanded([[[0; UNIT_ROW_BYTES]; PANEL_ROWS]; 2]));
        for (half, unit) in out.0.iter_mut().enumerate() {
            for (r, row) in unit.iter_mut().enumerate() {
                let codes = &panel.row(0, r).as_chunks::<{ UNIT_ROW_BYTES / 2 }>().0[half];
                for (out, &code) in row.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *out = BF16_OF_E4M3[usize::from(code)].to_le_bytes();
                }
            }
        }
        out
    }
}

/// acc[i] += w[2i] x[2i], then += w[2i+1] x[2i+1].
#[inline(always)]
fn add_products(acc: &mut [f32; 16], w: &[u8; 64], x: &[u8; 64]) {
    let (w, _) = w.as_chunks::<4>();
    let (x, _) = x.as_chunks::<4>();
    for ((acc, w), x) in acc.iter_mut().zip(w).zip(x) {
        let (w, x) = (u32::from_le_bytes(*w), u32::from_le_bytes(*x));
        let even = f32::from_bits(w << 16) * f32::from_bits(x << 16);
        let odd = f32::from_bits(w & 0xffff_0000) * f32::from_bits(x & 0xffff_0000);
        *acc = (*acc + even) + odd;
    }
}

/// The sum of 16 lanes in the one order that every kernel uses: in each quarter
/// (0 + 2) + (1 + 3), then the quarters (0 + 1) + (2 + 3).
#[inline(always)]
pub(super) fn reduce(lanes: [f32; 16]) -> f32 {
    let quarter = |q: usize| (lanes[q] + lanes[q + 2]) + (lanes[q + 1] + lanes[q + 3]);
    (quarter(0) + quarter(4)) + (quarter(8) + quarter(12))
}
