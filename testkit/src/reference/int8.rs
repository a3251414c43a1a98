//! INT8 products and experts in exactly defined f32 arithmetic.
//!
//! Every function here performs the operations that all backends must, in their
//! order; results are compared with [`bits_equal`](crate::compare::bits_equal).

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::int8::{self, BLOCK};
use asym_gemm_formats::{WeightFormat, bank, fma};

use super::ExpertWeights;
use super::gemm::{Operand, Scales};

/// A row-major matrix of INT8 codes with its scales.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedMatrix {
    /// Rows.
    pub rows: usize,
    /// Columns, the dimension that is summed over.
    pub cols: usize,
    /// Columns that share a scale: 128, or `cols` if a row has one.
    pub block: usize,
    /// [rows, cols].
    pub codes: Vec<i8>,
    /// [rows, ceil(cols / block)].
    pub scales: Vec<f32>,
}

impl QuantisedMatrix {
    /// `values` quantised by the recipe of `format`.
    ///
    /// # Panics
    /// If `format` is not an INT8 format or `values` is not `rows * cols` long.
    pub fn new(format: WeightFormat, values: &[f32], rows: usize, cols: usize) -> Self {
        let block = match format {
            WeightFormat::Int8PerRow => cols,
            WeightFormat::Int8Block128 => BLOCK,
            _ => panic!("{format} has no INT8 recipe"),
        };
        let mut out = Self::empty(rows, cols, block, values);
        let blocks = out.blocks();
        for row in 0..rows {
            let xs = &values[row * cols..(row + 1) * cols];
            let codes = &mut out.codes[row * cols..(row + 1) * cols];
            let scales = &mut out.scales[row * blocks..(row + 1) * blocks];
            match format {
                WeightFormat::Int8Block128 => int8::quantise_blocks(xs, codes, scales),
                _ => scales[0] = int8::quantise_per_row(xs, codes),
            }
        }
        out
    }

    /// `values` quantised for the down product: the per-row formula on each slice of
    /// 128 columns.
    ///
    /// # Panics
    /// If `values` is not `rows * cols` long.
    pub fn sliced(values: &[f32], rows: usize, cols: usize) -> Self {
        let mut out = Self::empty(rows, cols, bank::SLICE, values);
        let blocks = out.blocks();
        for row in 0..rows {
            let at = row * cols..(row + 1) * cols;
            let xs = values[at.clone()].chunks(bank::SLICE);
            let codes = out.codes[at].chunks_mut(bank::SLICE);
            let scales = &mut out.scales[row * blocks..(row + 1) * blocks];
            for ((xs, codes), scale) in xs.zip(codes).zip(scales) {
                *scale = int8::quantise_per_row(xs, codes);
            }
        }
        out
    }

    fn empty(rows: usize, cols: usize, block: usize, values: &[f32]) -> Self {
        assert!(cols > 0, "a row has columns");
        assert_eq!(
            values.len(),
            rows * cols,
            "elements of a {rows} x {cols} matrix"
        );
        Self {
            rows,
            cols,
            block,
            codes: vec![0; rows * cols],
            scales: vec![0.0; rows * cols.div_ceil(block)],
        }
    }

    /// Scales of a row.
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(self.block)
    }

    /// Codes times scales in f64, as an operand of [`grouped_gemm`](super::grouped_gemm).
    pub fn operand(&self) -> Operand {
        let scales = match self.blocks() {
            1 => Scales::PerRow(&self.scales),
            _ => Scales::Block128(&self.scales),
        };
        Operand::scaled(self.rows, self.cols, &self.codes, scales)
    }

    fn scale(&self, row: usize, block: usize) -> f32 {
        self.scales[row * self.blocks() + block]
    }
}

/// The integer sum of block `block` of row `i` of `a` and row `j` of `b`, as f32.
fn block_sum(a: &QuantisedMatrix, i: usize, b: &QuantisedMatrix, j: usize, block: usize) -> f32 {
    let width = a.block.min(b.block);
    let start = block * width;
    let end = a.cols.min(start + width);
    let sum: i64 = (start..end)
        .map(|k| a.codes[i * a.cols + k] as i64 * b.codes[j * b.cols + k] as i64)
        .sum();
    i32::try_from(sum).expect("the sum of a block fits i32 for K up to 133 144") as f32
}

/// D[m, n] = Σ_k A[m, k] · B[n, k], [A rows, B rows].
///
/// With one scale a row: `acc · (sa · sb)`. With one a block of 128: starting from 0,
/// for each block in order, `d = fma(acc_block, sa · sb, d)`; for a single block that is
/// the same number.
///
/// # Panics
/// If K or the blocks differ.
pub fn int8_gemm(a: &QuantisedMatrix, b: &QuantisedMatrix) -> Vec<f32> {
    assert_eq!(
        (a.cols, a.block),
        (b.cols, b.block),
        "K and block of A and B"
    );
    let mut out = Vec::with_capacity(a.rows * b.rows);
    for i in 0..a.rows {
        for j in 0..b.rows {
            out.push(if a.blocks() == 1 {
                block_sum(a, i, b, j, 0) * (a.scale(i, 0) * b.scale(j, 0))
            } else {
                (0..a.blocks()).fold(0.0, |d, block| {
                    let scale = a.scale(i, block) * b.scale(j, block);
                    fma(block_sum(a, i, b, j, block), scale, d)
                })
            });
        }
    }
    out
}

/// An expert with quantised matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantisedExpert {
    /// The recipe of all three matrices.
    pub format: WeightFormat,
    /// [I, H].
    pub gate: QuantisedMatrix,
    /// [I, H].
    pub up: QuantisedMatrix,
    /// [H, I].
    pub down: QuantisedMatrix,
    /// `[I]`.
    pub gate_bias: Option<Vec<f32>>,
    /// `[I]`.
    pub up_bias: Option<Vec<f32>>,
    /// `[H]`.
    pub down_bias: Option<Vec<f32>>,
}

impl ExpertWeights {
    /// The three matrices quantised by the recipe of `format`; biases stay f32.
    ///
    /// # Panics
    /// If `format` is not an INT8 format or lengths do not fit.
    pub fn quantise(&self, format: WeightFormat) -> QuantisedExpert {
        let (h, i) = (self.hidden, self.intermediate);
        QuantisedExpert {
            format,
            gate: QuantisedMatrix::new(format, &self.gate, i, h),
            up: QuantisedMatrix::new(format, &self.up, i, h),
            down: QuantisedMatrix::new(format, &self.down, h, i),
            gate_bias: self.gate_bias.clone(),
            up_bias: self.up_bias.clone(),
            down_bias: self.down_bias.clone(),
        }
    }
}

impl QuantisedExpert {
    /// y [T, H] of x [T, H]: [`int8_hidden`], then [`int8_down`].
    ///
    /// # Panics
    /// If `x` does not hold whole tokens.
    pub fn forward(&self, x: &[f32], act: Activation) -> Vec<f32> {
        let hidden = self.gate.cols;
        assert_eq!(x.len() % hidden, 0, "x is [T, {hidden}]");
        let x = QuantisedMatrix::new(self.format, x, x.len() / hidden, hidden);
        let h = int8_hidden(self, &x, act);
        int8_down(self, &QuantisedMatrix::sliced(&h, x.rows, self.gate.rows))
    }
}

/// h [T, I] in f32 before it is quantised: act of the products with gate and up, each
/// plus its bias.
///
/// `x` is quantised by the expert's recipe.
///
/// # Panics
/// If shapes disagree.
pub fn int8_hidden(expert: &QuantisedExpert, x: &QuantisedMatrix, act: Activation) -> Vec<f32> {
    let units = expert.gate.rows;
    let mut gate = int8_gemm(x, &expert.gate);
    let mut up = int8_gemm(x, &expert.up);
    add_bias(&mut gate, units, &expert.gate_bias);
    add_bias(&mut up, units, &expert.up_bias);
    gate.iter()
        .zip(&up)
        .map(|(&g, &u)| act.apply(g, u))
        .collect()
}

/// y [T, H] of h [T, I], quantised by slices of 128 ([`QuantisedMatrix::sliced`]).
///
/// One scale a row of down: `y = fma(acc_s, sh_s, y)` over the slices s in order, then
/// `y · sw`. One a block: `y = fma(acc_s, sh_s · sw_s, y)`. Then the bias.
///
/// # Panics
/// If shapes disagree.
pub fn int8_down(expert: &QuantisedExpert, h: &QuantisedMatrix) -> Vec<f32> {
    let down = &expert.down;
    assert_eq!(
        (h.cols, h.block),
        (down.cols, bank::SLICE),
        "h is sliced, [T, I]"
    );
    let mut out = Vec::with_capacity(h.rows * down.rows);
    for t in 0..h.rows {
        for n in 0..down.rows {
            let sums = (0..h.blocks()).map(|s| (s, block_sum(h, t, down, n, s)));
            out.push(match expert.format {
                WeightFormat::Int8Block128 => sums.fold(0.0, |y, (s, sum)| {
                    fma(sum, h.scale(t, s) * down.scale(n, s), y)
                }),
                _ => sums.fold(0.0, |y, (s, sum)| fma(sum, h.scale(t, s), y)) * down.scale(n, 0),
            });
        }
    }
    add_bias(&mut out, down.rows, &expert.down_bias);
    out
}

fn add_bias(values: &mut [f32], cols: usize, bias: &Option<Vec<f32>>) {
    if let Some(bias) = bias {
        assert_eq!(bias.len(), cols, "one bias a column");
        for row in values.chunks_mut(cols) {
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Bound, Output, check_close};
    use crate::generate::{Pattern, matrix};
    use crate::reference::{Expected, Group, grouped_gemm};

    const FORMATS: [WeightFormat; 2] = [WeightFormat::Int8PerRow, WeightFormat::Int8Block128];

    /// Two blocks of which the second is short; every operation by hand.
    #[test]
    fn products_known_by_hand() {
        let quantised = |block: usize, scales: Vec<f32>, first: i8, last: i8| {
            let mut codes = vec![0i8; 130];
            (codes[0], codes[129]) = (first, last);
            QuantisedMatrix {
                rows: 1,
                cols: 130,
                block,
                codes,
                scales,
            }
        };
        let a = quantised(130, vec![0.1], 127, -3);
        let b = quantised(130, vec![0.3], 100, 7);
        assert_eq!(int8_gemm(&a, &b), [(12700.0 - 21.0) * (0.1f32 * 0.3)]);
        let a = quantised(128, vec![0.1, 0.7], 127, -3);
        let b = quantised(128, vec![0.3, 0.9], 100, 7);
        let first = 12700.0f32 * (0.1 * 0.3);
        let want = (-21.0f32).mul_add(0.7 * 0.9, first);
        assert_eq!(int8_gemm(&a, &b), [want]);
    }

    #[test]
    fn down_follows_the_slices() {
        let (h, i) = (3, 300);
        for format in FORMATS {
            let expert = ExpertWeights::random(1, h, i, true).quantise(format);
            let hidden = matrix(Pattern::Gaussian, 2, 2, i);
            let codes = QuantisedMatrix::sliced(&hidden, 2, i);
            let y = int8_down(&expert, &codes);
            for t in 0..2 {
                for n in 0..h {
                    let mut want = 0f32;
                    for s in 0..3 {
                        let sum: i32 = (s * 128..i.min(s * 128 + 128))
                            .map(|k| {
                                codes.codes[t * i + k] as i32 * expert.down.codes[n * i + k] as i32
                            })
                            .sum();
                        let scale = codes.scales[t * 3 + s];
                        want = match format {
                            WeightFormat::Int8Block128 => {
                                (sum as f32).mul_add(scale * expert.down.scales[n * 3 + s], want)
                            }
                            _ => (sum as f32).mul_add(scale, want),
                        };
                    }
                    if format == WeightFormat::Int8PerRow {
                        want *= expert.down.scales[n];
                    }
                    want += expert.down_bias.as_ref().unwrap()[n];
                    assert_eq!(y[t * h + n].to_bits(), want.to_bits(), "{format} {t} {n}");
                }
            }
        }
    }

    /// Slices have the scale of their own maximum, by the per-row formula.
    #[test]
    fn slices_have_their_own_scales() {
        let mut h = vec![0f32; 260];
        (h[0], h[128], h[259]) = (2.0, -127.0, 1e-20);
        let q = QuantisedMatrix::sliced(&h, 1, 260);
        assert_eq!(q.scales, [2.0 / 127.0, 1.0, 1e-12]);
        assert_eq!((q.codes[0], q.codes[128], q.codes[259]), (127, -127, 0));
    }

    /// The exact f32 product is within the f32 bound of the f64 product of the same codes.
    #[test]
    fn agrees_with_the_f64_product_of_the_codes() {
        for format in FORMATS {
            for pattern in Pattern::ALL {
                let (m, n, k) = (7, 9, 301);
                let a = QuantisedMatrix::new(format, &matrix(pattern, 1, m, k), m, k);
                let b = QuantisedMatrix::new(format, &matrix(pattern, 2, n, k), n, k);
                let want = grouped_gemm(&a.operand(), &[b.operand()], &[Group::new(0..m, 0)]);
                let got = int8_gemm(&a, &b);
                let bound = Bound::f32_accumulated(Output::F32);
                check_close("int8", &got, &want, bound)
                    .unwrap_or_else(|e| panic!("{pattern:?}: {e}"));
            }
        }
    }

    /// Near the expert without quantisation: the codes cost one to two percent of a row.
    #[test]
    fn forward_is_near_the_unquantised_expert() {
        for format in FORMATS {
            for (h, i) in [(64, 128), (100, 33), (257, 300)] {
                let weights = ExpertWeights::random(3, h, i, true);
                let x = matrix(Pattern::Gaussian, 4, 5, h);
                let want: Expected = weights.exact(&x, Activation::SwiGlu);
                let got = weights.quantise(format).forward(&x, Activation::SwiGlu);
                check_close("expert", &got, &want, Bound::relative(0.1))
                    .and_then(|report| report.frobenius_below(0.03))
                    .and_then(|report| report.not_vacuous())
                    .unwrap_or_else(|e| panic!("{format} {h} {i}: {e}"));
            }
        }
    }

    /// A token's bits do not depend on the others; zero, tiny and NaN rows stay theirs.
    #[test]
    fn rows_are_independent() {
        let (h, i) = (130, 140);
        let expert = ExpertWeights::random(3, h, i, false).quantise(WeightFormat::Int8PerRow);
        let mut x = matrix(Pattern::TinyRows, 5, 6, h);
        x[3 * h + 7] = f32::NAN;
        let all = expert.forward(&x, Activation::SwiGlu);
        for t in 0..6 {
            let one = expert.forward(&x[t * h..(t + 1) * h], Activation::SwiGlu);
            let row = &all[t * h..(t + 1) * h];
            let bits = |row: &[f32]| row.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one), bits(row));
            assert!(row.iter().all(|y| y.is_nan() == (t == 3)), "{t}");
        }
    }
}
