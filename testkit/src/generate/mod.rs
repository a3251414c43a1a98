//! Seeded inputs: the same seed and shape give the same numbers on every machine.

mod matrix;
mod routing;
mod shapes;

pub use matrix::{Pattern, int8_codes, int8_extremes, matrix, rounded_to_bf16};
pub use routing::{RoutingCase, RoutingKind};
pub use shapes::{around, expert_shapes, gemm_shapes, row_counts};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The generator for `seed`; `stream` keeps different uses of one seed independent.
pub(crate) fn rng(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}
