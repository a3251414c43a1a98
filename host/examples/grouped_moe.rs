//! One expert layer by hand: five tokens, four experts, two for each token.
//!
//! `cargo run --example grouped_moe`

use asym_gemm::cpu::Engine;
use asym_gemm::gemm::{
    Combine, Extent, Matrix, MatrixMut, RowMajor, Strided, combine, gather_rows, grouped_nt, pack,
};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (tokens, top_k, experts, n, k) = (5, 2, 4, 6, 8);
    let x: Vec<f32> = (0..tokens * k)
        .map(|i| (10 * (i / k) + i % k + 1) as f32)
        .collect();
    let ids = [0, 2, 1, 3, 0, 2, 1, 3, 0, 2];
    let weights = [0.70, 0.30, 0.60, 0.40, 0.80, 0.20, 0.55, 0.45, 0.65, 0.35];
    let w: Vec<f32> = (0..experts * n * k)
        .map(|i| ((i * 29 % 17) as f32 - 8.0) / 16.0)
        .collect();
    let engine = Engine::detect()?;
    let mut results = Vec::new();
    for alignment in [1, 128] {
        let packed = pack(&ids, tokens, top_k, experts, alignment)?;
        println!("alignment {alignment}: {} rows", packed.rows);
        println!("  output_index {:?}", packed.output_index);
        // What padding holds has no effect.
        let x_packed = gather_rows(&x, k, &packed, f32::NAN)?;
        let mut y = vec![f32::NAN; packed.rows * n];
        let expert = Extent {
            rows: n,
            cols: k,
            ld: k,
        };
        grouped_nt(
            &engine,
            Matrix::<_, RowMajor>::packed(&x_packed, packed.rows, k)?,
            Strided::new(&w, expert, n * k, experts)?,
            &packed.groups,
            MatrixMut::packed(&mut y, packed.rows, n)?,
        )?;
        let mut z = vec![f32::NAN; tokens * n];
        let parts = Combine {
            y: &y,
            hidden: n,
            top_k,
            output_index: &packed.output_index,
            weights: &weights,
            shared: None,
        };
        combine(parts, &mut z)?;
        results.push(z);
    }
    println!("z0 = {:?}", &results[0][..n]);
    assert_eq!(results[0], results[1]);
    assert!(results[0].iter().all(|z| z.is_finite()));
    Ok(())
}
