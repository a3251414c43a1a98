//! What differs between operand types: the instruction, and where scales enter.

use crate::ptx::wgmma::{self, Accumulator};

/// Operand type and scaling of a kernel.
pub(super) trait Scaling {
    /// int8 operands; otherwise bf16.
    const INT8: bool;
    /// Each 128-byte step is summed apart and scaled into f32 sums.
    const PER_STEP: bool;
    /// B has a scale for each step and column too.
    const COLUMN_STEPS: bool;
    /// Column scales are applied once, at the end.
    const COLUMNS_AT_END: bool;

    /// Four wgmmas: the 64 x 128 x 128-byte product of one stage.
    ///
    /// # Safety
    /// As [`wgmma::mma_bf16`].
    #[inline(always)]
    unsafe fn step(d: &mut Accumulator, a: u64, b: u64, accumulate: u32) {
        const S: u64 = wgmma::K_STEP;
        // SAFETY: the caller keeps wgmma's contract; the four steps stay inside the stage.
        unsafe {
            if Self::INT8 {
                wgmma::mma_s8(d, a, b, accumulate);
                wgmma::mma_s8(d, a + S, b + S, 1);
                wgmma::mma_s8(d, a + 2 * S, b + 2 * S, 1);
                wgmma::mma_s8(d, a + 3 * S, b + 3 * S, 1);
            } else {
                wgmma::mma_bf16(d, a, b, accumulate);
                wgmma::mma_bf16(d, a + S, b + S, 1);
                wgmma::mma_bf16(d, a + 2 * S, b + 2 * S, 1);
                wgmma::mma_bf16(d, a + 3 * S, b + 3 * S, 1);
            }
        }
    }
}

/// [`super::Operands::Bf16`].
pub(super) struct Bf16;
/// [`super::Operands::Int8PerRow`].
pub(super) struct Int8PerRow;
/// [`super::Operands::Int8Slices`].
pub(super) struct Int8Slices;
/// [`super::Operands::Int8Blocks`].
pub(super) struct Int8Blocks;

impl Scaling for Bf16 {
    const INT8: bool = false;
    const PER_STEP: bool = false;
    const COLUMN_STEPS: bool = false;
    const COLUMNS_AT_END: bool = false;
}

impl Scaling for Int8PerRow {
    const INT8: bool = true;
    const PER_STEP: bool = false;
    const COLUMN_STEPS: bool = false;
    const COLUMNS_AT_END: bool = true;
}

impl Scaling for Int8Slices {
    const INT8: bool = true;
    const PER_STEP: bool = true;
    const COLUMN_STEPS: bool = false;
    const COLUMNS_AT_END: bool = true;
}

impl Scaling for Int8Blocks {
    const INT8: bool = true;
    const PER_STEP: bool = true;
    const COLUMN_STEPS: bool = true;
    const COLUMNS_AT_END: bool = false;
}
