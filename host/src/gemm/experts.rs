//! The steps of an MoE layer around a grouped GEMM, on the CPU.
//!
//! ```text
//! logits [T, E] --route_top_k--> ids, weights [T, k] --pack--> m_indices, output_index
//! x [T, K] --gather_rows--> x_packed [M, K] --grouped_nt--> y_packed [M, N] --combine--> z [T, N]
//! ```

use asym_gemm_cpu::Engine;
use asym_gemm_cpu::dense::{
    C, CpuElement, DenseError, Gemm, Group, Matrix, MatrixMut, Multiply, Output, Problem, RowMajor,
    Strided, grouped,
};

use crate::moe::layout::{GroupRange, Packed};
use crate::moe::routing::{Router, Routing, RoutingError, Scoring};

/// The `top_k` experts of each token and their weights, from `logits` `[T, experts]`: softmax over
/// all experts, the largest first, the lower id where two are equal. With `renormalise` a token's
/// weights sum to 1. [`Router`] has the other ways of scoring.
///
/// # Errors
/// `top_k` zero or above `experts`, or logits that are no whole rows.
pub fn route_top_k(
    logits: &[f32],
    experts: usize,
    top_k: usize,
    renormalise: bool,
) -> Result<Routing, RoutingError> {
    if top_k == 0 || top_k > experts {
        return Err(RoutingError::TopK { top_k, experts });
    }
    if !logits.len().is_multiple_of(experts) {
        return Err(RoutingError::Rows {
            name: "logits",
            row: experts,
            found: logits.len(),
        });
    }
    if logits.is_empty() {
        return Ok(Routing {
            top_k,
            ids: Vec::new(),
            weights: Vec::new(),
        });
    }
    // The scoring alone is wanted; the linear layer before it stays unused.
    let scoring = Scoring::Softmax { renormalise };
    Router::new(experts, 1, top_k, vec![0.0; experts], None, scoring)?.select(logits)
}

/// x_packed [M, K] from `x` [T, K]: row r is token `packed.source_token[r]`, rows of padding are
/// `padding`.
///
/// # Errors
/// A token that is no row of x.
pub fn gather_rows<T: Copy>(
    x: &[T],
    k: usize,
    packed: &Packed,
    padding: T,
) -> Result<Vec<T>, DenseError> {
    let mut out = vec![padding; packed.rows * k];
    for (row, &token) in packed.source_token.iter().enumerate() {
        let Ok(token) = usize::try_from(token) else {
            continue;
        };
        let source = x
            .get(token * k..(token + 1) * k)
            .ok_or(DenseError::TooShort {
                what: "x",
                needed: (token + 1) * k,
                actual: x.len(),
            })?;
        out[row * k..(row + 1) * k].copy_from_slice(source);
    }
    Ok(out)
}

/// Y\[rows of a group\] = X\[rows of a group\] · W\[expert\]ᵀ, for packed rows X [M, K], weights W
/// [E, N, K] and Y [M, N], as one grouped GEMM. Rows outside the groups keep what they hold.
///
/// # Errors
/// A group that is no range of rows, that begins before the one before it ends, or whose expert
/// does not exist; shapes that do not fit each other.
pub fn grouped_nt<T, D>(
    engine: &Engine,
    x: Matrix<'_, T, RowMajor>,
    weights: Strided<'_, T, RowMajor>,
    groups: &[GroupRange],
    y: MatrixMut<'_, D, RowMajor>,
) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let (n, k) = (y.cols(), x.cols());
    let mut rest = y;
    let mut row = 0;
    let mut problems = Vec::with_capacity(groups.len());
    for group in groups {
        let b = weights.get(group.expert).ok_or(DenseError::TooShort {
            what: "the list of experts",
            needed: group.expert.saturating_add(1),
            actual: weights.count(),
        })?;
        if group.start < row || group.end < group.start {
            return Err(DenseError::TooShort {
                what: "the rows before a group",
                needed: row,
                actual: group.start,
            });
        }
        let rows = group.end - group.start;
        let a = x.row_range(group.start, rows)?;
        let (_, after) = rest.split_rows(group.start - row);
        let (d, after) = after.split_rows(rows);
        (rest, row) = (after, group.end);
        let problem = Problem {
            a,
            b,
            c: C::None,
            d,
        };
        problems.push((Gemm::nt(rows, n, k), [problem]));
    }
    let mut groups: Vec<_> = problems
        .iter_mut()
        .map(|(gemm, problems)| Group {
            gemm: *gemm,
            problems,
        })
        .collect();
    grouped(engine, &mut groups)
}
