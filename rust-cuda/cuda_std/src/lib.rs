//! Subset of Rust-CUDA's `cuda_std` over rustc's own NVPTX back end.
//!
//! The names and meanings are Rust-CUDA's, the implementation is not: see
//! `rust-cuda/README.md`. The crate builds for every target, so that a device
//! crate can be checked, linted and tested on the host; what only a GPU can do
//! panics there.
//!
//! A device crate starts with
//!
//! ```ignore
//! #![no_std]
//! #![cfg_attr(
//!     target_arch = "nvptx64",
//!     feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)
//! )]
//! use cuda_std::prelude::*;
//! ```
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, stdarch_nvptx))]

#[cfg(test)]
extern crate std;

pub mod shared;
pub mod tensor_map;
pub mod thread;

pub use cuda_std_macros::kernel;

/// What a kernel file imports.
pub mod prelude {
    pub use crate::kernel;
    pub use crate::tensor_map::TensorMap;
    pub use crate::{shared, thread};
}

/// A panic ends the kernel: the launch fails with an error the host can see.
/// Looping for ever, the other common choice, would hang the GPU.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` aborts the grid and does not return.
    unsafe { core::arch::nvptx::trap() }
}

/// The host's answer to a device-only call.
#[cfg(not(target_arch = "nvptx64"))]
#[cold]
#[track_caller]
fn device_only(name: &str) -> ! {
    panic!("{name} runs on the GPU only")
}
