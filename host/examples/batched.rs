//! Attention scores and outputs of several heads: strided batches over one [tokens, heads, dim]
//! matrix, without copies.
//!
//! `cargo run --example batched`

use asym_gemm::cpu::Engine;
use asym_gemm::gemm::{Extent, Gemm, RowMajor, Strided, StridedMut, strided_batched};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (tokens, heads, dim) = (5, 4, 16);
    let x: Vec<f32> = (0..tokens * heads * dim)
        .map(|i| (i % 7) as f32 - 3.0)
        .collect();
    // Head h of a token begins `dim` elements after head h - 1, inside the token's row.
    let head = Extent {
        rows: tokens,
        cols: dim,
        ld: heads * dim,
    };
    let square = Extent {
        rows: tokens,
        cols: tokens,
        ld: tokens,
    };
    let engine = Engine::detect()?;
    let q = Strided::<_, RowMajor>::new(&x, head, dim, heads)?;

    let mut scores = vec![f32::NAN; heads * tokens * tokens];
    let d = StridedMut::<_, RowMajor>::new(&mut scores, square, tokens * tokens, heads)?;
    let gemm = Gemm {
        alpha: 1.0 / (dim as f32).sqrt(),
        ..Gemm::nt(tokens, tokens, dim)
    };
    strided_batched(&engine, &gemm, q, q, None, d)?;

    let mut out = vec![f32::NAN; x.len()];
    let p = Strided::<_, RowMajor>::new(&scores, square, tokens * tokens, heads)?;
    let d = StridedMut::<_, RowMajor>::new(&mut out, head, dim, heads)?;
    strided_batched(&engine, &Gemm::new(tokens, dim, tokens), p, q, None, d)?;

    println!("scores of head 0: {:?}", &scores[..tokens]);
    println!("output of token 0, head 0: {:?}", &out[..dim]);
    let want: f32 = x[..dim].iter().map(|v| v * v).sum();
    assert_eq!(scores[0], want / 4.0);
    Ok(())
}
