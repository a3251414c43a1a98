//! Mixture-of-Experts layers whose weights stay in host memory, on CPU and GPU.

pub mod checkpoint;
pub mod moe;
