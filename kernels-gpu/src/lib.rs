//! GPU kernels in Rust, and what they share with the host.
//!
//! The crate compiles twice. For `nvptx64` each feature gives one PTX module, so that the
//! driver compiles only what a program uses:
//!
//! | feature       | target  | kernels                                                        |
//! | ------------- | ------- | -------------------------------------------------------------- |
//! | `gemm-*`      | sm_90a  | grouped GEMM of one [`gemm::Operands`]: TMA, mbarrier ring, wgmma ([`gemm`]) |
//! | `dense`       | sm_80   | general GEMM over a list of strided problems, row scatter ([`dense`]) |
//! | `elementwise` | sm_80   | gather + round or quantise, activation, combine ([`elementwise`]) |
//!
//! For the host it gives the argument structs, tile shapes and schedules that both
//! sides must agree on, as plain structs and `const fn`s with unit tests.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)
)]

pub mod args;
pub mod dense;
pub mod elementwise;
pub mod gemm;
pub mod relay;
pub mod schedule;
pub mod tile;

#[cfg(target_arch = "nvptx64")]
mod ptx;
