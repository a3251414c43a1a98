//! Comparisons per element and per group of rows, and memory that shows stray writes.

mod bits;
mod bound;
mod check;
mod guard;
mod report;

pub use bits::bits_equal;
pub use bound::{Accumulation, Bound, Output};
pub use check::{Real, check_close};
pub use guard::{GUARD, Guarded, assert_guard_intact, assert_poisoned, poison, poison_f32};
pub use report::{Coordinate, GroupReport, Mismatch, Report};
