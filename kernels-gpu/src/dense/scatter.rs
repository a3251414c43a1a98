//! Token rows packed by expert, in whatever order atomic additions give.
//!
//! | kernel          | grid          | block | does                                                  |
//! | --------------- | ------------- | ----- | ----------------------------------------------------- |
//! | `scatter_plan`  | 1             | 256   | counts, aligned starts, `m_indices`, number of rows   |
//! | `scatter_rows`  | T * top_k     | 128   | copies a token's row to the expert's next free one    |

/// Threads of `scatter_plan`.
pub const PLAN_THREADS: u32 = 256;
/// Threads of `scatter_rows`.
pub const ROW_THREADS: u32 = 128;

/// Arguments of both kernels. Ids outside the experts, such as -1, are skipped slots.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScatterArgs {
    /// i32 [T, top_k].
    pub ids: u64,
    /// u32 `[experts]`: counts, then each expert's next free row.
    pub next: u64,
    /// i32 `[capacity]`: expert of each packed row; -1 past the last.
    pub m_indices: u64,
    /// i32 [T, top_k]: packed row, or -1.
    pub output_index: u64,
    /// u32: number of packed rows, padding included.
    pub rows: u64,
    /// Rows of 4-byte words, one a token.
    pub x: u64,
    /// Packed rows of 4-byte words.
    pub packed: u64,
    /// T * top_k.
    pub slots: u32,
    /// Slots of a token.
    pub top_k: u32,
    /// Number of experts.
    pub experts: u32,
    /// Experts start at multiples of this power of two.
    pub alignment: u32,
    /// Rows that `m_indices` and `packed` have.
    pub capacity: u32,
    /// 4-byte words of a row.
    pub words: u32,
}

#[cfg(all(target_arch = "nvptx64", feature = "dense"))]
mod device {
    use super::{PLAN_THREADS, ROW_THREADS, ScatterArgs};
    use crate::ptx::global::{add_release, load_read_only, store};
    use crate::ptx::{element, shared as shared_memory};
    use cuda_std::prelude::*;

    /// # Safety
    /// One block of [`PLAN_THREADS`], buffers as [`ScatterArgs`] says.
    #[kernel(threads = 256)]
    pub(crate) unsafe fn scatter_plan(args: ScatterArgs) {
        let thread = thread::thread_idx_x();
        // SAFETY: indices are below the lengths; barriers separate the phases.
        unsafe {
            let mut i = thread;
            while i < args.experts {
                store(args.next + i as u64 * 4, 0);
                i += PLAN_THREADS;
            }
            thread::sync_threads();
            let mut i = thread;
            while i < args.slots {
                let expert = load_read_only(args.ids + i as u64 * 4);
                if expert < args.experts {
                    add_release(args.next + expert as u64 * 4, 1);
                }
                i += PLAN_THREADS;
            }
            thread::sync_threads();
            if thread == 0 {
                let mut start = 0u32;
                let mut i = 0;
                while i < args.experts {
                    let at = args.next + i as u64 * 4;
                    let count = element::load_if(true, at);
                    store(at, start);
                    start += (count + args.alignment - 1) & !(args.alignment - 1);
                    i += 1;
                }
                store(args.rows, start);
            }
            thread::sync_threads();
            // Row by row: the last expert that starts at or before it and has rows.
            let rows = element::load_if(true, args.rows);
            let mut row = thread;
            while row < args.capacity {
                let (mut low, mut high) = (0, args.experts);
                while high - low > 1 {
                    let middle = low + (high - low) / 2;
                    if element::load_if(true, args.next + middle as u64 * 4) <= row {
                        low = middle;
                    } else {
                        high = middle;
                    }
                }
                let expert = if row < rows { low } else { u32::MAX };
                store(args.m_indices + row as u64 * 4, expert);
                row += PLAN_THREADS;
            }
        }
    }

    /// # Safety
    /// After [`scatter_plan`] in stream order; a block of [`ROW_THREADS`] for each slot, 16 bytes
    /// of dynamic shared memory.
    #[kernel(threads = 128)]
    pub(crate) unsafe fn scatter_rows(args: ScatterArgs) {
        let slot = thread::block_idx_x();
        let thread = thread::thread_idx_x();
        let place = shared::dynamic_shared_base();
        // SAFETY: the slot exists; a row that is written is below the capacity, and one block's.
        unsafe {
            let expert = load_read_only(args.ids + slot as u64 * 4);
            if thread == 0 {
                let mut row = u32::MAX;
                if expert < args.experts {
                    row = add_release(args.next + expert as u64 * 4, 1);
                }
                store(args.output_index + slot as u64 * 4, row);
                shared_memory::store(place, row);
            }
            thread::sync_threads();
            let row = shared_memory::load(place);
            let top_k = args.top_k;
            core::hint::assert_unchecked(top_k != 0);
            let token = slot / top_k;
            let from = args.x + token as u64 * args.words as u64 * 4;
            let to = args.packed + row as u64 * args.words as u64 * 4;
            let mut word = thread;
            while row < args.capacity && word < args.words {
                store(to + word as u64 * 4, load_read_only(from + word as u64 * 4));
                word += ROW_THREADS;
            }
        }
    }
}
