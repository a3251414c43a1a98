//! Values with what their tolerances are made of.

use std::ops::Range;

/// A row-major matrix of expected values.
///
/// `magnitude` and `slack` are the two parts of an element's tolerance that depend on
/// the operands; [`Bound`](crate::compare::Bound) adds the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Length of the sums: K of the (last) product.
    pub k: usize,
    /// The values, [rows, cols].
    pub value: Vec<f64>,
    /// Σ|a·b| of each element, [rows, cols]: what accumulation error grows with.
    pub magnitude: Vec<f64>,
    /// Absolute tolerance of each element beyond accumulation, [rows, cols]: how far it
    /// moves when an intermediate value lands on the other side of a rounding boundary.
    pub slack: Vec<f64>,
    /// Rows to compare, and to report on one by one; rows in no group hold nothing.
    pub groups: Vec<Range<usize>>,
}

impl Expected {
    /// Zeros, with all rows in one group.
    pub fn zeros(rows: usize, cols: usize, k: usize) -> Self {
        Self {
            rows,
            cols,
            k,
            value: vec![0.0; rows * cols],
            magnitude: vec![0.0; rows * cols],
            slack: vec![0.0; rows * cols],
            groups: std::iter::once(0..rows).collect(),
        }
    }

    /// Values known from elsewhere, `cols` to a row, in one group, with no part of a
    /// tolerance of their own: for [`Bound::Relative`](crate::compare::Bound::Relative).
    ///
    /// # Panics
    /// If the values do not fill whole rows.
    pub fn from_values<T: Copy + Into<f64>>(cols: usize, values: &[T]) -> Self {
        assert!(
            cols > 0 && values.len().is_multiple_of(cols),
            "whole rows of {cols}"
        );
        let mut expected = Self::zeros(values.len() / cols, cols, 0);
        expected.value = values.iter().map(|&x| x.into()).collect();
        expected
    }

    /// The same values with other groups.
    ///
    /// # Panics
    /// If a group ends past the last row.
    pub fn with_groups(mut self, groups: Vec<Range<usize>>) -> Self {
        assert!(
            groups.iter().all(|g| g.end <= self.rows),
            "group past the end"
        );
        self.groups = groups;
        self
    }

    /// The largest error that f32 accumulation may leave in element `i`.
    pub(crate) fn f32_error(&self, i: usize) -> f64 {
        super::f32_coefficient(self.k) * self.magnitude[i] + self.slack[i]
    }
}
