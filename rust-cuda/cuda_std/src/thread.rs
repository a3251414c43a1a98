//! Thread and block indices, and the block barrier.
//!
//! # Panics
//!
//! Every function panics on the host, where there is no grid.

/// Reads one special register; a host build has none to read.
macro_rules! special_register {
    ($(#[$doc:meta])* $name:ident, $intrinsic:ident) => {
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u32 {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: reads a special register that every thread has.
            return unsafe { core::arch::nvptx::$intrinsic() } as u32;
            #[cfg(not(target_arch = "nvptx64"))]
            crate::device_only(concat!("thread::", stringify!($name)))
        }
    };
}

special_register!(
    /// Index of the thread in its block, x.
    thread_idx_x, _thread_idx_x);
special_register!(
    /// Index of the thread in its block, y.
    thread_idx_y, _thread_idx_y);
special_register!(
    /// Index of the thread in its block, z.
    thread_idx_z, _thread_idx_z);
special_register!(
    /// Index of the block in the grid, x.
    block_idx_x, _block_idx_x);
special_register!(
    /// Index of the block in the grid, y.
    block_idx_y, _block_idx_y);
special_register!(
    /// Index of the block in the grid, z.
    block_idx_z, _block_idx_z);
special_register!(
    /// Threads in a block, x.
    block_dim_x, _block_dim_x);
special_register!(
    /// Threads in a block, y.
    block_dim_y, _block_dim_y);
special_register!(
    /// Threads in a block, z.
    block_dim_z, _block_dim_z);
special_register!(
    /// Blocks in the grid, x.
    grid_dim_x, _grid_dim_x);
special_register!(
    /// Blocks in the grid, y.
    grid_dim_y, _grid_dim_y);
special_register!(
    /// Blocks in the grid, z.
    grid_dim_z, _grid_dim_z);

/// Index of the thread in a one-dimensional grid of one-dimensional blocks.
///
/// Exact while the grid has fewer than 2^32 threads.
#[inline(always)]
#[must_use]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Waits for all threads of the block (`bar.sync 0`), and orders their accesses
/// to shared and global memory before and after it.
///
/// All threads of the block must reach the same call. (Safe here, as in
/// Rust-CUDA: a call that some threads miss hangs or traps, it does not corrupt.)
#[inline(always)]
pub fn sync_threads() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a barrier touches no memory of its own.
    unsafe {
        core::arch::nvptx::_syncthreads();
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::device_only("thread::sync_threads")
}

#[cfg(test)]
mod tests {
    #[test]
    #[should_panic(expected = "thread::thread_idx_x runs on the GPU only")]
    fn the_host_has_no_grid() {
        let _ = super::thread_idx_x();
    }
}
