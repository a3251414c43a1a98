//! Benchmarks of this machine, for the program and for `cargo bench`.
//!
//! Every case is verified before it is timed, and compared with ceilings measured in the same run
//! on the same threads.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod layer;
mod random;
mod record;
mod reference;

pub use record::{COMMIT_VARIABLE, Machine};
