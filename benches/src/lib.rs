//! Benchmarks through the public API.
