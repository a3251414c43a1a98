//! Micro-kernels: the products of one panel of A and one of B, in registers.
//!
//! A panel of A holds `ROWS` rows, one of B `COLS` columns, cell after cell of k:
//!
//! ```text
//! a  k=0: a[0] .. a[ROWS-1]   k=1: ...        b  k=0: b[0] .. b[COLS-1]   k=1: ...
//! sums [ROWS, COLS] += sum over k of a[k]^T b[k], in ascending k
//! ```

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use crate::kernels::Kernel;

/// Register tiles of one instruction set. `a` holds whole cells of `ROWS`, `b` as many of `COLS`, and
/// `sums` is `ROWS * COLS` long; implementations check that. Methods are `#[inline(always)]` and take
/// on the target features of the [`Body`] that they are called from.
pub(crate) trait Micro: Copy {
    /// Rows of A in a panel.
    const ROWS: usize;
    /// Columns of B in a panel.
    const COLS: usize;

    /// One fused multiply-add for each k.
    fn f32(self, a: &[f32], b: &[f32], sums: &mut [f32]);

    /// Two products of 16-bit values for each cell, added modulo 2^32.
    fn i32(self, a: &[[i16; 2]], b: &[[i16; 2]], sums: &mut [i32]);
}

/// A piece of work that is compiled once for each instruction set; see
/// [`kernels::Body`](crate::kernels::Body).
pub(crate) trait Body {
    /// What it gives.
    type Output;

    /// Does the work.
    fn run<M: Micro>(self, m: M) -> Self::Output;
}

/// Runs `body`, compiled for the instruction set of `kernel`.
pub(crate) fn run<B: Body>(kernel: Kernel, body: B) -> B::Output {
    match kernel {
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2(token) => avx2::run(token, body),
        #[cfg(target_arch = "x86_64")]
        Kernel::AvxVnni(token) => avx2::run(token.into(), body),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512Vnni(token) => avx512::run(token, body),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512Bf16(token) => avx512::run(token.into(), body),
        #[cfg(target_arch = "x86_64")]
        Kernel::Amx(token) => {
            let token = crate::isa::Avx512Bf16::from(token);
            avx512::run(token.into(), body)
        }
        Kernel::Portable | Kernel::EmulatedAmx => body.run(portable::Portable),
    }
}

/// The number of cells of k, after checking the lengths that pointers rely on.
#[inline(always)]
fn cells<M: Micro, T, S>(a: &[T], b: &[T], sums: &[S]) -> usize {
    let cells = a.len() / M::ROWS;
    assert!(
        a.len() == cells * M::ROWS && b.len() == cells * M::COLS && sums.len() == M::ROWS * M::COLS,
        "panels of {} and {} cells, {} sums",
        a.len(),
        b.len(),
        sums.len()
    );
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Features, Isa};

    struct Check;

    impl Body for Check {
        type Output = ();

        #[inline(always)]
        fn run<M: Micro>(self, m: M) {
            for k in [0, 1, 2, 7, 64] {
                let value = |i: usize, salt: usize| ((i * 37 + salt * 11) % 23) as i16 - 11;
                let a: Vec<_> = (0..k * M::ROWS).map(|i| [value(i, 1), value(i, 2)]).collect();
                let b: Vec<_> = (0..k * M::COLS).map(|i| [value(i, 3), value(i, 4)]).collect();
                let mut ints = vec![5; M::ROWS * M::COLS];
                m.i32(&a, &b, &mut ints);
                let first = |x: &[[i16; 2]]| x.iter().map(|x| f32::from(x[0]) * 0.1).collect();
                let (a32, b32): (Vec<f32>, Vec<f32>) = (first(&a), first(&b));
                let mut floats = vec![0.5; M::ROWS * M::COLS];
                m.f32(&a32, &b32, &mut floats);
                for (at, (&int, &float)) in ints.iter().zip(&floats).enumerate() {
                    let (row, col) = (at / M::COLS, at % M::COLS);
                    let (mut want_int, mut want_float) = (5, 0.5f32);
                    for k in 0..k {
                        let (x, y) = (k * M::ROWS + row, k * M::COLS + col);
                        let dot = |h: usize| i32::from(a[x][h]) * i32::from(b[y][h]);
                        want_int += dot(0) + dot(1);
                        want_float = a32[x].mul_add(b32[y], want_float);
                    }
                    assert_eq!(int, want_int, "element {row}, {col}, k = {k}");
                    assert_eq!(float.to_bits(), want_float.to_bits(), "{row}, {col}, k = {k}");
                }
            }
        }
    }

    #[test]
    fn tiles_are_chains_of_fused_multiply_adds() {
        for isa in Isa::ALL {
            if Features::detect().contains(isa.required()) {
                run(Kernel::best(isa.most()), Check);
            } else {
                println!("skipped on this processor: {isa}");
            }
        }
    }
}
