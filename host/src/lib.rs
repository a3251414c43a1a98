//! Mixture-of-Experts layers whose weights stay in host memory, on CPU and GPU.

#[cfg(feature = "cuda")]
pub mod driver;
pub mod system;
