//! Reference GEMM and MoE in f64, seeded generators, comparisons with per-element bounds.
