//! Grouped GEMM in f64.

use std::ops::Range;

use asym_gemm_formats::int8::BLOCK;

use super::Expected;

/// What an operand's stored elements are multiplied with.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// Nothing.
    None,
    /// One scale a row, `[rows]`.
    PerRow(&'a [f32]),
    /// One scale for each row and 128 columns, [rows, ceil(k / 128)].
    Block128(&'a [f32]),
    /// One scale for each 128 x 128 tile, [ceil(rows / 128), ceil(k / 128)].
    Tile128(&'a [f32]),
}

/// A row-major operand [rows, k] in f64, exactly as stored: element times scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    rows: usize,
    k: usize,
    values: Vec<f64>,
}

impl Operand {
    /// f32 or bf16 values as they are.
    ///
    /// # Panics
    /// If `values` is not `rows * k` long.
    pub fn plain(rows: usize, k: usize, values: &[f32]) -> Self {
        Self::scaled(rows, k, values, Scales::None)
    }

    /// INT8 codes (or, as f32, decoded FP8 elements) with their scales.
    ///
    /// # Panics
    /// If the lengths do not fit the shape.
    pub fn scaled<T: Copy + Into<f64>>(
        rows: usize,
        k: usize,
        elements: &[T],
        scales: Scales<'_>,
    ) -> Self {
        assert_eq!(
            elements.len(),
            rows * k,
            "elements of a {rows} x {k} operand"
        );
        let blocks = k.div_ceil(BLOCK);
        let (table, want) = match scales {
            Scales::None => (&[][..], 0),
            Scales::PerRow(s) => (s, rows),
            Scales::Block128(s) => (s, rows * blocks),
            Scales::Tile128(s) => (s, rows.div_ceil(BLOCK) * blocks),
        };
        assert_eq!(table.len(), want, "scales of a {rows} x {k} operand");
        let scale = |row: usize, col: usize| match scales {
            Scales::None => 1.0,
            Scales::PerRow(s) => s[row] as f64,
            Scales::Block128(s) => s[row * blocks + col / BLOCK] as f64,
            Scales::Tile128(s) => s[row / BLOCK * blocks + col / BLOCK] as f64,
        };
        let values = elements
            .iter()
            .enumerate()
            .map(|(i, &x)| x.into() * scale(i / k, i % k))
            .collect();
        Self { rows, k, values }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, the dimension that is summed over.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Row `row`.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.k..(row + 1) * self.k]
    }
}

/// Rows of A that are multiplied with one B.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Rows of A and D.
    pub rows: Range<usize>,
    /// Which B; `None` (a negative id) leaves the rows out.
    pub expert: Option<usize>,
}

impl Group {
    /// Rows `rows` with expert `expert`; a negative one leaves the rows out.
    pub fn new(rows: Range<usize>, expert: i32) -> Self {
        Self {
            rows,
            expert: usize::try_from(expert).ok(),
        }
    }

    /// The groups of a contiguous packing: `counts[e]` rows for each expert in turn.
    pub fn contiguous(counts: &[usize]) -> Vec<Self> {
        let mut start = 0;
        (0i32..)
            .zip(counts)
            .map(|(expert, &count)| {
                start += count;
                Self::new(start - count..start, expert)
            })
            .collect()
    }

    /// The groups of a masked packing: `counts[e]` valid rows at the start of `stride`
    /// rows for each expert.
    pub fn masked(counts: &[usize], stride: usize) -> Vec<Self> {
        assert!(
            counts.iter().all(|&n| n <= stride),
            "count above the stride"
        );
        (0..)
            .zip(counts)
            .map(|(e, &count)| Self::new(e as usize * stride..e as usize * stride + count, e))
            .collect()
    }
}

/// (Σ a·b, Σ|a·b|).
pub(super) fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    a.iter()
        .zip(b)
        .fold((0.0, 0.0), |(sum, magnitude), (x, y)| {
            let product = x * y;
            (sum + product, magnitude + product.abs())
        })
}

/// D[m, n] = Σ_k A[m, k] · B_e[n, k] for the rows m of each group.
///
/// D has as many rows as A; rows in no group, or in one without an expert, are NaN
/// and not compared. Groups may come in any order; where two share rows, the later
/// one's product stays.
///
/// # Panics
/// If shapes disagree or a group names rows or an expert that is not there.
pub fn grouped_gemm(a: &Operand, b: &[Operand], groups: &[Group]) -> Expected {
    let n = b.first().map_or(0, |b| b.rows);
    for b in b {
        assert_eq!((b.rows, b.k), (n, a.k), "every B is N x K");
    }
    let mut out = Expected::zeros(a.rows, n, a.k);
    out.value.fill(f64::NAN);
    out.groups.clear();
    for group in groups {
        let Some(expert) = group.expert else { continue };
        for m in group.rows.clone() {
            for col in 0..n {
                let (value, magnitude) = dot(a.row(m), b[expert].row(col));
                out.value[m * n + col] = value;
                out.magnitude[m * n + col] = magnitude;
            }
        }
        out.groups.push(group.rows.clone());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Pattern, int8_codes, matrix};
    use approx::assert_relative_eq;

    #[test]
    fn product_known_by_hand() {
        let a = Operand::plain(2, 3, &[1.0, 2.0, 3.0, -1.0, 0.5, 0.0]);
        let b = Operand::plain(2, 3, &[1.0, -1.0, 2.0, 4.0, 0.0, 0.5]);
        let d = grouped_gemm(&a, &[b], &[Group::new(0..2, 0)]);
        assert_eq!(d.value, [5.0, 5.5, -1.5, -4.0]);
        assert_eq!(d.magnitude, [9.0, 5.5, 1.5, 4.0]);
        assert_eq!((d.rows, d.cols, d.k), (2, 2, 3));
    }

    #[test]
    fn groups_take_their_own_expert_and_leave_the_rest() {
        let (rows, n, k) = (6, 3, 5);
        let a = Operand::plain(rows, k, &matrix(Pattern::Uniform, 1, rows, k));
        let b: Vec<Operand> = (0..3)
            .map(|e| Operand::plain(n, k, &matrix(Pattern::Uniform, 10 + e, n, k)))
            .collect();
        let groups = [
            Group::new(4..6, 0),
            Group::new(0..2, 2),
            Group::new(2..3, -1),
            Group::new(3..3, 1),
        ];
        let d = grouped_gemm(&a, &b, &groups);
        for (m, expert) in [
            (0, Some(2)),
            (1, Some(2)),
            (2, None),
            (3, None),
            (4, Some(0)),
        ] {
            for col in 0..n {
                let got = d.value[m * n + col];
                match expert {
                    Some(e) => {
                        let e: usize = e;
                        let want: f64 = (0..k).map(|i| a.row(m)[i] * b[e].row(col)[i]).sum();
                        assert_relative_eq!(got, want, max_relative = 1e-12);
                    }
                    None => assert!(got.is_nan()),
                }
            }
        }
        assert_eq!(d.groups, [4..6, 0..2, 3..3]);
    }

    #[test]
    fn scales_apply_to_their_rows_and_columns() {
        let (rows, k) = (130, 300);
        let codes = int8_codes(1, rows * k);
        let per_row: Vec<f32> = (0..rows).map(|r| 0.5 + r as f32).collect();
        let block: Vec<f32> = (0..rows * 3).map(|i| 0.25 + i as f32).collect();
        let tile: Vec<f32> = (0..2 * 3).map(|i| 3.0 + i as f32).collect();
        let at = |s: Scales<'_>, r: usize, c: usize| Operand::scaled(rows, k, &codes, s).row(r)[c];
        for (r, c) in [
            (0, 0),
            (0, 127),
            (1, 128),
            (127, 255),
            (128, 256),
            (129, 299),
        ] {
            let x = codes[r * k + c] as f64;
            assert_eq!(at(Scales::None, r, c), x);
            assert_eq!(at(Scales::PerRow(&per_row), r, c), x * per_row[r] as f64);
            assert_eq!(
                at(Scales::Block128(&block), r, c),
                x * block[r * 3 + c / 128] as f64
            );
            let t = tile[r / 128 * 3 + c / 128] as f64;
            assert_eq!(at(Scales::Tile128(&tile), r, c), x * t);
        }
    }

    #[test]
    fn packings() {
        assert_eq!(
            Group::contiguous(&[2, 0, 3]),
            [
                Group::new(0..2, 0),
                Group::new(2..2, 1),
                Group::new(2..5, 2)
            ]
        );
        assert_eq!(
            Group::masked(&[2, 0, 3], 4),
            [
                Group::new(0..2, 0),
                Group::new(4..4, 1),
                Group::new(8..11, 2)
            ]
        );
    }
}
