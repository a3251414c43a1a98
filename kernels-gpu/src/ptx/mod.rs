//! One thin function for each PTX instruction, by hardware unit. No other module holds asm.
//!
//! rustc does not mark `asm!` as convergent, so warp-collective instructions are never
//! declared `pure` here (LLVM would sink them into branches), and the crate must be
//! built with the flags that cuda_builder passes, which keep LLVM from duplicating
//! barriers. Addresses are `u32` in shared memory and `u64` in global memory.

pub(crate) mod convert;
pub(crate) mod element;
pub(crate) mod global;
pub(crate) mod mbarrier;
pub(crate) mod mma;
pub(crate) mod shared;
pub(crate) mod sync;
pub(crate) mod tma;
pub(crate) mod wgmma;
