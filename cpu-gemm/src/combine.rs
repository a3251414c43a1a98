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
    let bad = |&index: &i32| index < -1 || index >= 0 && index as usize >= rows;
    if let Some(at) = parts.output_index.iter().position(bad) {
        return Err(CpuError::OutputIndex {
            token: at / top_k,
            slot: at % top_k,
            index: parts.output_index[at],
            rows,
        });
    }
    out.par_chunks_mut(hidden)
        .enumerate()
        .with_min_len(4)
        .for_each(|(token, out)| wide::run(Token { parts, token, out }));
    Ok(())
}

struct Token<'a> {
    parts: Combine<'a>,
    token: usize,
    out: &'a mut [f32],
}

impl WideBody for Token<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { parts, token, out } = self;
        out.fill(0.0);
        let slots = token * parts.top_k..(token + 1) * parts.top_k;
        for slot in slots {
            if let Ok(row) = usize::try_from(parts.output_index[slot]) {
                let y = &parts.y[row * parts.hidden..][..parts.hidden];
                add_weighted(out, parts.weights[slot], y);
            }
        }
        if let Some((shared, weights)) = parts.shared {
            let row = &shared[token * parts.hidden..][..parts.hidden];
            add_weighted(out, weights[token], row);
        }
    }
}

#[inline(always)]
fn add_weighted(out: &mut [f32], weight: f32, y: &[f32]) {
    for (out, &y) in out.iter_mut().zip(y) {
        *out = fma(weight, y, *out);
    }
}
