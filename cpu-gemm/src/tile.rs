//! Values for 16 weight rows and 16 tokens: what every kernel produces.
//!
//! Lanes are tokens, so that scales of tokens, activation functions and maxima over rows are plain
//! vector operations, whatever the instruction set.

use asym_gemm_formats::bank::PANEL_ROWS;
use bytemuck::{Pod, Zeroable};

/// Tokens of a group: the lanes of a 512-bit register of f32.
pub(crate) const TOKENS: usize = 16;

/// One value for each token of a group (or each row of a panel).
pub(crate) type Lanes<T> = [T; TOKENS];

/// 16 rows of 16 tokens.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Tile<T>(pub(crate) [Lanes<T>; PANEL_ROWS]);

impl<T: Copy + Default> Default for Tile<T> {
    fn default() -> Self {
        Self([[T::default(); TOKENS]; PANEL_ROWS])
    }
}

// SAFETY: an array of `T`, which is.
unsafe impl<T: Zeroable> Zeroable for Tile<T> {}
// SAFETY: an array of 256 `T`, whose size is a multiple of the alignment: no padding.
unsafe impl<T: Pod> Pod for Tile<T> {}

impl Tile<f32> {
    /// The same bits as words.
    #[inline(always)]
    pub(crate) fn as_words(&self) -> &Tile<u32> {
        bytemuck::cast_ref(self)
    }

    /// The same bits as words.
    #[inline(always)]
    pub(crate) fn as_words_mut(&mut self) -> &mut Tile<u32> {
        bytemuck::cast_mut(self)
    }
}
