//! One operand's elements from global to shared memory.

use super::elements::Kind;
use super::{ROW_BYTES, THREADS, TILE};
use crate::ptx::{element, shared};

/// 16-byte chunks of a step's row.
const CHUNKS: u32 = super::STEP_BYTES / 16;
/// Chunks that a thread brings.
const SHARE: usize = (TILE * CHUNKS / THREADS) as usize;

/// Rows of A, or columns of B, of one tile.
#[derive(Clone, Copy)]
pub(super) struct Side {
    /// Address of the operand.
    pub(super) base: u64,
    /// First row of the tile.
    pub(super) first: u32,
    /// Rows there are.
    pub(super) rows: u32,
    /// Elements of a row.
    pub(super) k: u32,
    /// Elements from one row to the next.
    pub(super) row_step: u64,
    /// Elements from one k to the next.
    pub(super) k_step: u64,
    /// Whether whole chunks can be loaded.
    pub(super) vector: bool,
}

/// A thread's chunks of one step.
pub(super) type Chunks = [[u32; 4]; SHARE];

impl Side {
    /// Row and chunk of this thread's share `i`: neighbouring threads take neighbouring addresses.
    #[inline(always)]
    fn place(&self, thread: u32, i: usize) -> (u32, u32) {
        let index = thread + i as u32 * THREADS;
        if self.k_step == 1 {
            (index / CHUNKS, index % CHUNKS)
        } else {
            (index % TILE, index / TILE)
        }
    }

    /// Loads this thread's chunks from element `k` of the sums on; what does not exist is 0.
    ///
    /// # Safety
    /// The operand is where the problem says.
    #[inline(always)]
    pub(super) unsafe fn load<K: Kind>(&self, thread: u32, k: u32) -> Chunks {
        let per_chunk = 16 / K::BYTES;
        let mut chunks = [[0; 4]; SHARE];
        for (i, chunk) in chunks.iter_mut().enumerate() {
            let (row, column) = self.place(thread, i);
            let row = self.first + row;
            let k = k + column * per_chunk;
            let exists = row < self.rows;
            let element = row as u64 * self.row_step + k as u64 * self.k_step;
            let address = self.base + element * K::BYTES as u64;
            // SAFETY: loads are bounded by rows and K.
            unsafe {
                if self.vector && k + per_chunk <= self.k {
                    *chunk = element::load_v4_if(exists, address);
                } else {
                    let per_word = 4 / K::BYTES;
                    for (w, word) in chunk.iter_mut().enumerate() {
                        for part in 0..per_word {
                            let e = w as u32 * per_word + part;
                            let address = address + e as u64 * self.k_step * K::BYTES as u64;
                            let bits = K::load_if(exists && k + e < self.k, address);
                            *word |= bits << (part * K::BYTES * 8);
                        }
                    }
                }
            }
        }
        chunks
    }

    /// Puts them where the warps read them.
    ///
    /// # Safety
    /// Nobody reads the buffer at `at` meanwhile.
    #[inline(always)]
    pub(super) unsafe fn store(&self, thread: u32, chunks: &Chunks, at: u32) {
        for (i, chunk) in chunks.iter().enumerate() {
            let (row, column) = self.place(thread, i);
            // SAFETY: inside the buffer, each chunk by one thread.
            unsafe { shared::store_v4(at + row * ROW_BYTES + column * 16, *chunk) };
        }
    }
}
