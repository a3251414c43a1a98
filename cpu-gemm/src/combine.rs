//! The sum of a token's expert outputs, in slot order.

use asym_gemm_formats::fma;
use rayon::prelude::*;

use crate::CpuError;
use crate::validate::same;
use crate::wide::{self, WideBody};

/// What [`combine`] adds up: for each token `top_k` slots, then the shared expert.
#[derive(Clone, Copy, Debug)]
pub struct Combine<'a> {
    /// Unweighted expert outputs [M, H].
    pub y: &'a [f32],
    /// H.
    pub hidden: usize,
    /// Slots of a token.
    pub top_k: usize,
    /// Row of y for each token and slot, [T, top_k]; -1 skips the slot, whose weight is not read.
    pub output_index: &'a [i32],
    /// Routing weights [T, top_k].
    pub weights: &'a [f32],
    /// Shared expert: rows [T, H] and one weight a token `[T]`.
    pub shared: Option<(&'a [f32], &'a [f32])>,
}

/// out [T, H] = for each token, starting from 0 and in slot order, out = fma(weight, y, out);
/// the shared expert last.
///
/// # Errors
/// H = 0, lengths that do not fit each other, or an output index that is neither -1 nor a row of y.
pub fn combine(parts: Combine<'_>, out: &mut [f32]) -> Result<(), CpuError> {
    let Combine { hidden, top_k, .. } = parts;
    if hidden == 0 {
        return Err(CpuError::Zero {
            what: "the hidden size H",
        });
    }
    let tokens = out.len() / hidden;
    let rows = parts.y.len() / hidden;
    same("the length of out", tokens * hidden, out.len())?;
    same("the length of y", rows * hidden, parts.y.len())?;
    let slots = tokens.saturating_mul(top_k);
    same(
        "the length of output_index",
        slots,
        parts.output_index.len(),
    )?;
    same("the length of weights", slots, parts.weights.len())?;
    if let Some((shared, weights)) = parts.shared {
        same("the length of the shared rows", out.len(), shared.len())?;
        same("the length of the shared weights", tokens, weights.len())?;
    }
    check_indices(parts.output_index, top_k, rows)?;
    out.par_chunks_mut(hidden)
        .enumerate()
        .with_min_len(4)
        .for_each(|(token, out)| wide::run(Token { parts, token, out }));
    Ok(())
}

fn check_indices(output_index: &[i32], top_k: usize, rows: usize) -> Result<(), CpuError> {
    let bad = |&index: &i32| index < -1 || index >= 0 && index as usize >= rows;
    match output_index.iter().position(bad) {
        None => Ok(()),
        Some(at) => Err(CpuError::OutputIndex {
            token: at / top_k,
            slot: at % top_k,
            index: output_index[at],
            rows,
        }),
    }
}

struct Token<'a> {
    parts: Combine<'a>,
    token: usize,
    out: &'a mut [f32],
}

impl WideBody for Token<'_> {
    #[inline(always)]
    fn run(self) {
        add_columns(&self.parts, self.token, 0, self.out);
    }
}

/// out = the sums of columns `first..first + out.len()` of a token.
#[inline(always)]
fn add_columns(parts: &Combine<'_>, token: usize, first: usize, out: &mut [f32]) {
    out.fill(0.0);
    let slots = token * parts.top_k..(token + 1) * parts.top_k;
    for slot in slots {
        if let Ok(row) = usize::try_from(parts.output_index[slot]) {
            let y = &parts.y[row * parts.hidden + first..][..out.len()];
            add_weighted(out, parts.weights[slot], y);
        }
    }
    if let Some((shared, weights)) = parts.shared {
        let row = &shared[token * parts.hidden + first..][..out.len()];
        add_weighted(out, weights[token], row);
    }
}

/// Which rows of y a token adds up, and with what weights.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    /// Slots of a token.
    pub top_k: usize,
    /// Row of y for each token and slot, [T, top_k]; -1 skips the slot, whose weight is not read.
    pub output_index: &'a [i32],
    /// Routing weights [T, top_k].
    pub weights: &'a [f32],
}

impl Slots<'_> {
    /// Checks them for `tokens` tokens and `rows` rows of y.
    pub(crate) fn validate(&self, tokens: usize, rows: usize) -> Result<(), CpuError> {
        let slots = tokens.saturating_mul(self.top_k);
        same("the length of output_index", slots, self.output_index.len())?;
        same("the length of weights", slots, self.weights.len())?;
        check_indices(self.output_index, self.top_k, rows)
    }

    /// The division of the sums of T tokens, `hidden` columns each, into tasks that read about
    /// `elements` elements of y.
    pub(crate) fn divide(&self, tokens: usize, hidden: usize, elements: usize) -> SlotTasks {
        let a_token = (self.top_k.max(1) * hidden).max(1);
        SlotTasks {
            tokens,
            columns: match a_token.div_ceil(elements) {
                1 => hidden,
                parts => hidden.div_ceil(parts),
            },
            tokens_a_task: (elements / a_token).max(1),
        }
    }
}

/// Tasks of a sum over slots: each has some columns of some tokens.
#[derive(Clone, Copy)]
pub(crate) struct SlotTasks {
    tokens: usize,
    columns: usize,
    tokens_a_task: usize,
}

impl SlotTasks {
    pub(crate) fn count(&self, hidden: usize) -> usize {
        self.tokens.div_ceil(self.tokens_a_task) * hidden.div_ceil(self.columns)
    }

    /// Runs a task: `store(start, sums)` receives sums that begin at element `start` of out [T, H].
    #[inline(always)]
    pub(crate) fn run(
        &self,
        task: usize,
        parts: &Combine<'_>,
        sums: &mut Vec<f32>,
        mut store: impl FnMut(usize, &[f32]),
    ) {
        let ranges = parts.hidden.div_ceil(self.columns);
        let first_token = task / ranges * self.tokens_a_task;
        let column = task % ranges * self.columns;
        let columns = self.columns.min(parts.hidden - column);
        sums.resize(columns.max(sums.len()), 0.0);
        for token in first_token..self.tokens.min(first_token + self.tokens_a_task) {
            let sums = &mut sums[..columns];
            add_columns(parts, token, column, sums);
            store(token * parts.hidden + column, sums);
        }
    }
}

#[inline(always)]
fn add_weighted(out: &mut [f32], weight: f32, y: &[f32]) {
    for (out, &y) in out.iter_mut().zip(y) {
        *out = fma(weight, y, *out);
    }
}
