//! Tiles in plain Rust.

use super::{Micro, cells};

/// 4 x 8 tiles.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Micro for Portable {
    const ROWS: usize = 4;
    const COLS: usize = 8;

    #[inline(always)]
    fn f32(self, a: &[f32], b: &[f32], sums: &mut [f32]) {
        cells::<Self, _, _>(a, b, sums);
        for (a, b) in a.chunks_exact(Self::ROWS).zip(b.chunks_exact(Self::COLS)) {
            for (a, sums) in a.iter().zip(sums.chunks_exact_mut(Self::COLS)) {
                for (b, sum) in b.iter().zip(sums) {
                    *sum = a.mul_add(*b, *sum);
                }
            }
        }
    }

    #[inline(always)]
    fn i32(self, a: &[[i16; 2]], b: &[[i16; 2]], sums: &mut [i32]) {
        cells::<Self, _, _>(a, b, sums);
        for (a, b) in a.chunks_exact(Self::ROWS).zip(b.chunks_exact(Self::COLS)) {
            for (a, sums) in a.iter().zip(sums.chunks_exact_mut(Self::COLS)) {
                for (b, sum) in b.iter().zip(sums) {
                    let [low, high] = [0, 1].map(|h| i32::from(a[h]) * i32::from(b[h]));
                    *sum = sum.wrapping_add(low).wrapping_add(high);
                }
            }
        }
    }
}
