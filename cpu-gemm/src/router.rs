//! Router logits in f32, the same bits on every processor.

use rayon::prelude::*;

use crate::CpuError;
use crate::validate::same;
use crate::wide::{self, WideBody};

/// Partial sums of one logit: lane i adds the products of elements i, i + 16, i + 32, ..
const LANES: usize = 16;
/// Experts whose logits are computed together, so that x is loaded once for all.
const EXPERTS: usize = 4;

/// Operands of [`router_logits`].
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Tokens [T, H].
    pub x: &'a [f32],
    /// Router weights [E, H].
    pub w: &'a [f32],
    /// Router bias `[E]`.
    pub bias: Option<&'a [f32]>,
    /// H.
    pub hidden: usize,
}

/// out [T, E] = x . w^T (+ bias).
///
/// A product and its addition are rounded separately, in 16 lanes that are added in a fixed tree
/// (halves, quarters, ..): the choice of experts never depends on the processor.
///
/// # Errors
/// H = 0, no expert, or lengths that do not fit each other.
pub fn router_logits(router: Router<'_>, out: &mut [f32]) -> Result<(), CpuError> {
    let Router { hidden, .. } = router;
    if hidden == 0 {
        return Err(CpuError::Zero {
            what: "the hidden size H",
        });
    }
    let experts = router.w.len() / hidden;
    if experts == 0 {
        return Err(CpuError::Zero {
            what: "the number of experts",
        });
    }
    let tokens = router.x.len() / hidden;
    same(
        "the length of the router weights",
        experts * hidden,
        router.w.len(),
    )?;
    same("the length of x", tokens * hidden, router.x.len())?;
    same("the length of out", tokens * experts, out.len())?;
    if let Some(bias) = router.bias {
        same("the length of the router bias", experts, bias.len())?;
    }
    out.par_chunks_mut(experts)
        .zip(router.x.par_chunks(hidden))
        .for_each(|(out, x)| wide::run(Token { router, x, out }));
    Ok(())
}

struct Token<'a> {
    router: Router<'a>,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl WideBody for Token<'_> {
    #[inline(always)]
    fn run(self) {
        let Router { w, hidden, .. } = self.router;
        let mut rows = w.chunks_exact(hidden);
        for out in self.out.chunks_mut(EXPERTS) {
            if let Some(out) = out.as_mut_array::<EXPERTS>() {
                let w = std::array::from_fn(|_| rows.next().unwrap_or(&[]));
                *out = dots(self.x, w);
            } else {
                for (out, w) in out.iter_mut().zip(&mut rows) {
                    [*out] = dots(self.x, [w]);
                }
            }
        }
        if let Some(bias) = self.router.bias {
            for (out, bias) in self.out.iter_mut().zip(bias) {
                *out += bias;
            }
        }
    }
}

/// x . w for `N` rows of w.
#[inline(always)]
fn dots<const N: usize>(x: &[f32], w: [&[f32]; N]) -> [f32; N] {
    let mut acc = [[0f32; LANES]; N];
    let (chunks, tail) = x.as_chunks::<LANES>();
    let start = chunks.len() * LANES;
    let w = w.map(|w| w.split_at(start));
    for (i, x) in chunks.iter().enumerate() {
        for (acc, w) in acc.iter_mut().zip(&w) {
            let w = &w.0[i * LANES..][..LANES];
            for lane in 0..LANES {
                acc[lane] += x[lane] * w[lane];
            }
        }
    }
    for (acc, w) in acc.iter_mut().zip(&w) {
        for ((acc, x), w) in acc.iter_mut().zip(tail).zip(w.1) {
            *acc += x * w;
        }
    }
    acc.map(|mut acc| {
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                acc[lane] += acc[lane + half];
            }
            half /= 2;
        }
        acc[0]
    })
}
