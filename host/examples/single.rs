//! One product on the CPU: D = 2·A·Bᵀ + C with bf16 operands and an f32 result.
//!
//! `cargo run --example single`

use asym_gemm::cpu::Engine;
use asym_gemm::gemm::{C, Gemm, Matrix, MatrixMut, RowMajor, single};
use half::bf16;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (m, n, k) = (3, 4, 8);
    let a: Vec<bf16> = (0..m * k).map(|i| bf16::from_f32(i as f32)).collect();
    // A linear layer's weights: one row for each column of D.
    let b: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32((i % 3) as f32)).collect();
    let c = vec![0.5f32; m * n];
    let mut d = vec![f32::NAN; m * n];

    let engine = Engine::detect()?;
    let gemm = Gemm {
        alpha: 2.0,
        beta: 1.0,
        ..Gemm::nt(m, n, k)
    };
    single(
        &engine,
        &gemm,
        Matrix::<_, RowMajor>::packed(&a, m, k)?,
        Matrix::<_, RowMajor>::packed(&b, n, k)?,
        C::Matrix(Matrix::packed(&c, m, n)?),
        MatrixMut::<_, RowMajor>::packed(&mut d, m, n)?,
    )?;

    for (r, row) in d.chunks(n).enumerate() {
        println!("{row:?}");
        for (j, &got) in row.iter().enumerate() {
            let products = (0..k).map(|i| a[r * k + i].to_f32() * b[j * k + i].to_f32());
            assert_eq!(got, 2.0 * products.sum::<f32>() + 0.5);
        }
    }
    Ok(())
}
