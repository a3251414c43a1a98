//! Five tokens, four experts, two for each token, from routing to the combined output: unaligned
//! and in segments of 128 rows.

use asym_gemm::cpu::Engine;
use asym_gemm::gemm::{
    Combine, Extent, Matrix, MatrixMut, RowMajor, Strided, combine, gather_rows, grouped_nt, pack,
    route_top_k,
};
use half::bf16;

const TOKENS: usize = 5;
const TOP_K: usize = 2;
const EXPERTS: usize = 4;
const K: usize = 8;
const N: usize = 7;
const IDS: [i32; 10] = [0, 2, 1, 3, 0, 2, 1, 3, 0, 2];
const WEIGHTS: [f32; 10] = [0.70, 0.30, 0.60, 0.40, 0.80, 0.20, 0.55, 0.45, 0.65, 0.35];

fn x() -> Vec<bf16> {
    let value = |i: usize| bf16::from_f32((10 * (i / K) + i % K + 1) as f32);
    (0..TOKENS * K).map(value).collect()
}

fn weights() -> Vec<bf16> {
    let value = |i: usize| bf16::from_f32(((i * 7919 % 251) as f32 - 125.0) / 64.0);
    (0..EXPERTS * N * K).map(value).collect()
}

#[test]
fn routing_finds_the_experts() {
    // Logits whose softmax over the two chosen experts is the given weights.
    let mut logits = vec![-100.0f32; TOKENS * EXPERTS];
    for (slot, (&id, &weight)) in IDS.iter().zip(&WEIGHTS).enumerate() {
        logits[slot / TOP_K * EXPERTS + id as usize] = weight.ln();
    }
    let routing = route_top_k(&logits, EXPERTS, TOP_K, true).unwrap();
    assert_eq!(routing.ids, IDS);
    for (got, want) in routing.weights.iter().zip(WEIGHTS) {
        assert!((got - want).abs() < 1e-6, "{got}, expected {want}");
    }
    assert!(route_top_k(&logits, EXPERTS, 5, true).is_err());
    assert!(route_top_k(&logits[1..], EXPERTS, 2, true).is_err());
    assert!(route_top_k(&[], EXPERTS, 2, true).unwrap().ids.is_empty());
}

#[test]
fn packing_is_as_given() {
    let packed = pack(&IDS, TOKENS, TOP_K, EXPERTS, 1).unwrap();
    assert_eq!(packed.m_indices, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]);
    assert_eq!(packed.output_index, [0, 5, 3, 8, 1, 6, 4, 9, 2, 7]);
    let rows = gather_rows(&x(), K, &packed, bf16::NAN).unwrap();
    let first: Vec<f32> = rows.chunks(K).map(|row| row[0].to_f32()).collect();
    assert_eq!(
        first,
        [1.0, 21.0, 41.0, 11.0, 31.0, 1.0, 21.0, 41.0, 11.0, 31.0]
    );

    let aligned = pack(&IDS, TOKENS, TOP_K, EXPERTS, 128).unwrap();
    let expert = |row: i32| vec![row; 128];
    assert_eq!(aligned.rows, 512);
    assert_eq!(aligned.m_indices, [0, 1, 2, 3].map(expert).concat());
    assert_eq!(
        aligned.output_index,
        [0, 256, 128, 384, 1, 257, 129, 385, 2, 258]
    );
}

#[test]
fn both_packings_give_the_weighted_sum() {
    let (x, w) = (x(), weights());
    let engine = Engine::detect().unwrap();
    let mut results = Vec::new();
    for alignment in [1, 128] {
        let packed = pack(&IDS, TOKENS, TOP_K, EXPERTS, alignment).unwrap();
        let rows = gather_rows(&x, K, &packed, bf16::NAN).unwrap();
        let mut y = vec![f32::NAN; packed.rows * N];
        let extent = Extent {
            rows: N,
            cols: K,
            ld: K,
        };
        grouped_nt(
            &engine,
            Matrix::<_, RowMajor>::packed(&rows, packed.rows, K).unwrap(),
            Strided::new(&w, extent, N * K, EXPERTS).unwrap(),
            &packed.groups,
            MatrixMut::packed(&mut y, packed.rows, N).unwrap(),
        )
        .unwrap();
        let written = y.chunks(N).filter(|row| !row[0].is_nan()).count();
        assert_eq!(written, TOKENS * TOP_K, "rows of padding stay untouched");
        let mut z = vec![f32::NAN; TOKENS * N];
        let parts = Combine {
            y: &y,
            hidden: N,
            top_k: TOP_K,
            output_index: &packed.output_index,
            weights: &WEIGHTS,
            shared: None,
        };
        combine(parts, &mut z).unwrap();
        results.push(z);
    }
    assert_eq!(results[0], results[1]);
    for (i, &got) in results[0].iter().enumerate() {
        let (token, column) = (i / N, i % N);
        let mut want = 0.0;
        for slot in 0..TOP_K {
            let expert = IDS[token * TOP_K + slot] as usize;
            let dot: f64 = (0..K)
                .map(|j| x[token * K + j].to_f64() * w[(expert * N + column) * K + j].to_f64())
                .sum();
            want += f64::from(WEIGHTS[token * TOP_K + slot]) * dot;
        }
        assert!(
            (f64::from(got) - want).abs() < 1e-3,
            "{got}, expected {want}"
        );
    }
}
