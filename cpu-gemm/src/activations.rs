//! The rounded or quantised activations of one call.

use rayon::prelude::*;

use crate::kernels::{Body, Dot, Kernel};
use crate::recipe::{Recipe, Row};

/// Rows of x, encoded once a call and read by every task: codes zero-padded along K to whole
/// units, scales and code sums beside them.
pub(crate) struct Activations<R: Recipe> {
    codes: Vec<R::Code>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    k_padded: usize,
    blocks: usize,
}

impl<R: Recipe> Activations<R> {
    /// Rounds f32 rows `x`, each `k` long.
    pub(crate) fn encode(kernel: Kernel, x: &[f32], k: usize) -> Self {
        Self::build(x.len() / k, k, |row, codes, scales, sums| {
            kernel.run(EncodeRow::<R> {
                x: &x[row * k..][..k],
                codes,
                scales,
                sums,
            });
        })
    }

    /// `rows` rows of `k` codes, written by `fill(row, codes, scales, sums)`.
    pub(crate) fn build(
        rows: usize,
        k: usize,
        fill: impl Fn(usize, &mut [R::Code], &mut [f32], &mut [i32]) + Sync,
    ) -> Self {
        let k_padded = k.next_multiple_of(R::UNIT_K);
        let blocks = R::blocks(k);
        let mut codes = vec![R::Code::default(); rows * k_padded];
        let mut scales = vec![0f32; rows * blocks];
        let mut sums = vec![0i32; rows * blocks];
        codes
            .par_chunks_mut(k_padded)
            .zip(scales.par_chunks_mut(blocks))
            .zip(sums.par_chunks_mut(blocks))
            .enumerate()
            .for_each(|(row, ((codes, scales), sums))| fill(row, &mut codes[..k], scales, sums));
        Self {
            codes,
            scales,
            sums,
            k_padded,
            blocks,
        }
    }

    /// Row `row` as a kernel reads it.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> Row<'_, R::Code> {
        Row {
            codes: &self.codes[row * self.k_padded..][..self.k_padded],
            scales: &self.scales[row * self.blocks..][..self.blocks],
            sums: &self.sums[row * self.blocks..][..self.blocks],
        }
    }
}

struct EncodeRow<'a, R: Recipe> {
    x: &'a [f32],
    codes: &'a mut [R::Code],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
}

impl<R: Recipe> Body for EncodeRow<'_, R> {
    #[inline(always)]
    fn run<D: Dot>(self, _dot: D) {
        R::encode(self.x, self.codes, self.scales, self.sums);
    }
}
