//! The `asym-gemm` program.

fn main() {}
