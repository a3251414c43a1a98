//! Register tiles: `MR` rows of packed A times `NR` columns of packed B.
//!
//! ```text
//! A panel: for each k unit MR words       B panel: for each k unit NR words
//! ```
//!
//! A word is an f32, or two neighbouring i8 along K widened to i16. Every tile adds the products of
//! an element in the order of K, one fused multiply-add a step.

use crate::Isa;

/// Adds the products of `units` words of K of one panel of A and one of B to a tile of sums
/// (`accumulate`), or starts it.
///
/// Safety: panels hold `units` words for each row or column; `out` is a tile of rows `stride`
/// elements apart; the processor has the instructions.
type Kernel<W, S> =
    unsafe fn(units: usize, a: *const W, b: *const W, out: *mut S, stride: usize, accumulate: bool);

/// A register tile.
#[derive(Clone, Copy)]
pub(super) struct Tile<W, S> {
    /// Rows.
    pub(super) mr: usize,
    /// Columns.
    pub(super) nr: usize,
    pub(super) kernel: Kernel<W, S>,
}

/// Most elements of a tile.
pub(super) const MAX_TILE: usize = 14 * 32;

/// The tile for f32 sums.
pub(super) fn f32_tile(isa: Isa) -> Tile<f32, f32> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => Tile {
            mr: 14,
            nr: 32,
            kernel: x86::f32_avx512,
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Tile {
            mr: 6,
            nr: 16,
            kernel: x86::f32_avx2,
        },
        _ => Tile {
            mr: 4,
            nr: 16,
            kernel: f32_portable,
        },
    }
}

/// The tile for i32 sums of i8 products.
pub(super) fn i32_tile(isa: Isa) -> Tile<[i16; 2], i32> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => Tile {
            mr: 14,
            nr: 32,
            kernel: x86::i32_avx512,
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Tile {
            mr: 6,
            nr: 16,
            kernel: x86::i32_avx2,
        },
        _ => Tile {
            mr: 4,
            nr: 16,
            kernel: i32_portable,
        },
    }
}

/// # Safety
/// As [`Kernel`] says.
unsafe fn f32_portable(
    units: usize,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    let mut sums = [[0.0f32; 16]; 4];
    // SAFETY: panels and tile are as large as the contract says.
    unsafe {
        for k in 0..units {
            let b = &*b.add(k * 16).cast::<[f32; 16]>();
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = *a.add(k * 4 + r);
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += x * b;
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                let out = out.add(r * stride + c);
                *out = if accumulate { *out + sum } else { sum };
            }
        }
    }
}

/// # Safety
/// As [`Kernel`] says.
unsafe fn i32_portable(
    units: usize,
    a: *const [i16; 2],
    b: *const [i16; 2],
    out: *mut i32,
    stride: usize,
    accumulate: bool,
) {
    let mut sums = [[0i32; 16]; 4];
    // SAFETY: panels and tile are as large as the contract says.
    unsafe {
        for k in 0..units {
            let b = &*b.add(k * 16).cast::<[[i16; 2]; 16]>();
            for (r, sums) in sums.iter_mut().enumerate() {
                let [x, y] = *a.add(k * 4 + r);
                for (sum, b) in sums.iter_mut().zip(b) {
                    // Of i8 values, so that one pair is far from overflow; sums wrap.
                    let pair = i32::from(x) * i32::from(b[0]) + i32::from(y) * i32::from(b[1]);
                    *sum = sum.wrapping_add(pair);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                let out = out.add(r * stride + c);
                *out = if accumulate {
                    (*out).wrapping_add(sum)
                } else {
                    sum
                };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// A kernel of `$mr` rows and two vectors of columns.
    macro_rules! tile {
        ($name:ident, $features:literal, $word:ty, $sum:ty, $mr:literal, $lanes:literal,
         $zero:expr, $broadcast:expr, $load:expr, $fma:expr, $load_sum:expr, $add:expr, $store:expr) => {
            /// # Safety
            /// As `Kernel` says.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(
                units: usize,
                a: *const $word,
                b: *const $word,
                out: *mut $sum,
                stride: usize,
                accumulate: bool,
            ) {
                let mut sums = [[$zero; 2]; $mr];
                // SAFETY: panels and tile are as large as the contract says.
                unsafe {
                    let (mut a, mut b) = (a, b);
                    for _ in 0..units {
                        let columns = [$load(b), $load(b.add($lanes))];
                        for r in 0..$mr {
                            let x = $broadcast(a.add(r));
                            sums[r][0] = $fma(sums[r][0], x, columns[0]);
                            sums[r][1] = $fma(sums[r][1], x, columns[1]);
                        }
                        a = a.add($mr);
                        b = b.add(2 * $lanes);
                    }
                    for r in 0..$mr {
                        for c in 0..2 {
                            let out = out.add(r * stride + c * $lanes);
                            let sum = match accumulate {
                                true => $add($load_sum(out), sums[r][c]),
                                false => sums[r][c],
                            };
                            $store(out, sum);
                        }
                    }
                }
            }
        };
    }

    tile!(
        f32_avx2,
        "avx2,fma",
        f32,
        f32,
        6,
        8,
        _mm256_setzero_ps(),
        |p: *const f32| _mm256_broadcast_ss(&*p),
        |p: *const f32| _mm256_loadu_ps(p),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |p: *mut f32| _mm256_loadu_ps(p),
        |x, y| _mm256_add_ps(x, y),
        |p: *mut f32, x| _mm256_storeu_ps(p, x)
    );

    tile!(
        f32_avx512,
        "avx512f",
        f32,
        f32,
        14,
        16,
        _mm512_setzero_ps(),
        |p: *const f32| _mm512_set1_ps(*p),
        |p: *const f32| _mm512_loadu_ps(p),
        |sum, x, y| _mm512_fmadd_ps(x, y, sum),
        |p: *mut f32| _mm512_loadu_ps(p),
        |x, y| _mm512_add_ps(x, y),
        |p: *mut f32, x| _mm512_storeu_ps(p, x)
    );

    tile!(
        i32_avx2,
        "avx2",
        [i16; 2],
        i32,
        6,
        8,
        _mm256_setzero_si256(),
        |p: *const [i16; 2]| _mm256_set1_epi32(p.cast::<i32>().read_unaligned()),
        |p: *const [i16; 2]| _mm256_loadu_si256(p.cast()),
        |sum, x, y| _mm256_add_epi32(sum, _mm256_madd_epi16(x, y)),
        |p: *mut i32| _mm256_loadu_si256(p.cast()),
        |x, y| _mm256_add_epi32(x, y),
        |p: *mut i32, x| _mm256_storeu_si256(p.cast(), x)
    );

    tile!(
        i32_avx512,
        "avx512f,avx512bw,avx512vnni",
        [i16; 2],
        i32,
        14,
        16,
        _mm512_setzero_si512(),
        |p: *const [i16; 2]| _mm512_set1_epi32(p.cast::<i32>().read_unaligned()),
        |p: *const [i16; 2]| _mm512_loadu_si512(p.cast()),
        |sum, x, y| _mm512_dpwssd_epi32(sum, x, y),
        |p: *mut i32| _mm512_loadu_si512(p.cast()),
        |x, y| _mm512_add_epi32(x, y),
        |p: *mut i32, x| _mm512_storeu_si512(p.cast(), x)
    );
}
