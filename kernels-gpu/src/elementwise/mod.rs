//! Kernels around the GEMMs of an MoE layer, for sm_80 and later.
//!
//! All are bound by memory: one pass, 16-byte accesses where rows allow it. Arithmetic is
//! that of `asym_gemm_formats`, so results equal the CPU's bit for bit.
//!
//! | kernel                  | grid (x, y)           | block | does                                      |
//! | ----------------------- | --------------------- | ----- | ----------------------------------------- |
//! | `pack_rows_bf16`        | rows                  | 128   | gather a token's row, round to bf16       |
//! | `pack_rows_s8_per_row`  | rows                  | 128   | gather, quantise with one scale           |
//! | `pack_rows_s8_blocks`   | rows                  | 128   | gather, quantise each 128 columns         |
//! | `activate_bf16`         | rows, slices          | 128   | h = act(gate, up), rounded to bf16        |
//! | `activate_s8`           | rows, slices          | 128   | h = act(gate, up), quantised by slice     |
//! | `combine`               | T, ceil(hidden / 256) | 256   | weighted sum of a token's expert outputs  |
//! | `group_rows`            | 1                     | 1024  | slots of a few tokens grouped by expert   |
//! | `read_probe`            | any                   | 256   | reads a buffer, for the link's rate       |
//!
//! Rows run along the grid's x, which has no 65,535 limit.

/// Name of the PTX module.
pub const FAMILY: &str = "elementwise";

/// Threads of a block of the pack and activate kernels: one for each column of a slice.
pub const ROW_THREADS: u32 = 128;
/// Most slots that `group_rows` takes, and its threads.
pub const GROUP_SLOTS: u32 = 1024;
/// Threads of a block of the combine kernel.
pub const COMBINE_THREADS: u32 = 256;

#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod activate;
#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod combine;
#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod group;
#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod pack;
#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod probe;
#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod reduce;
