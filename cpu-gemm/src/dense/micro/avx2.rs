//! Tiles in 256-bit registers.

use std::arch::x86_64::*;

use super::{Body, Micro, cells};
use crate::isa::Avx2;

/// Lanes of a register.
const LANES: usize = 8;

/// 6 x 16 tiles: 12 registers of sums, two of B, one of A.
#[derive(Clone, Copy)]
struct Tile(Avx2);

/// Runs `body`, compiled for the token's features.
pub(super) fn run<B: Body>(token: Avx2, body: B) -> B::Output {
    #[target_feature(enable = "avx2,fma")]
    fn enabled<B: Body>(token: Avx2, body: B) -> B::Output {
        body.run(Tile(token))
    }
    // SAFETY: the features were detected, as the token proves.
    unsafe { enabled(token, body) }
}

impl Micro for Tile {
    const ROWS: usize = 6;
    const COLS: usize = 2 * LANES;

    #[inline(always)]
    fn f32(self, a: &[f32], b: &[f32], sums: &mut [f32]) {
        let cells = cells::<Self, _, _>(a, b, sums);
        let (mut a, mut b, sums) = (a.as_ptr(), b.as_ptr(), sums.as_mut_ptr());
        // SAFETY: the features were detected, as the value proves; the pointers stay inside the slices,
        // whose lengths `cells` checked, or one past their ends.
        unsafe {
            let mut tile = [[_mm256_setzero_ps(); 2]; Self::ROWS];
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm256_loadu_ps(sums.add(row * Self::COLS));
                tile[1] = _mm256_loadu_ps(sums.add(row * Self::COLS + LANES));
            }
            for _ in 0..cells {
                let columns = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(LANES))];
                for (row, tile) in tile.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*a.add(row));
                    tile[0] = _mm256_fmadd_ps(x, columns[0], tile[0]);
                    tile[1] = _mm256_fmadd_ps(x, columns[1], tile[1]);
                }
                a = a.add(Self::ROWS);
                b = b.add(Self::COLS);
            }
            for (row, tile) in tile.iter().enumerate() {
                _mm256_storeu_ps(sums.add(row * Self::COLS), tile[0]);
                _mm256_storeu_ps(sums.add(row * Self::COLS + LANES), tile[1]);
            }
        }
    }

    #[inline(always)]
    fn i32(self, a: &[[i16; 2]], b: &[[i16; 2]], sums: &mut [i32]) {
        let cells = cells::<Self, _, _>(a, b, sums);
        let (mut a, mut b) = (a.as_ptr().cast::<i32>(), b.as_ptr().cast::<__m256i>());
        let sums = sums.as_mut_ptr().cast::<__m256i>();
        // SAFETY: as above; a cell is 32 bits, and unaligned loads are asked for.
        unsafe {
            let mut tile = [[_mm256_setzero_si256(); 2]; Self::ROWS];
            for (row, tile) in tile.iter_mut().enumerate() {
                tile[0] = _mm256_loadu_si256(sums.add(2 * row));
                tile[1] = _mm256_loadu_si256(sums.add(2 * row + 1));
            }
            for _ in 0..cells {
                let columns = [_mm256_loadu_si256(b), _mm256_loadu_si256(b.add(1))];
                for (row, tile) in tile.iter_mut().enumerate() {
                    let x = _mm256_set1_epi32(a.add(row).read_unaligned());
                    tile[0] = _mm256_add_epi32(tile[0], _mm256_madd_epi16(x, columns[0]));
                    tile[1] = _mm256_add_epi32(tile[1], _mm256_madd_epi16(x, columns[1]));
                }
                a = a.add(Self::ROWS);
                b = b.add(2);
            }
            for (row, tile) in tile.iter().enumerate() {
                _mm256_storeu_si256(sums.add(2 * row), tile[0]);
                _mm256_storeu_si256(sums.add(2 * row + 1), tile[1]);
            }
        }
    }
}
