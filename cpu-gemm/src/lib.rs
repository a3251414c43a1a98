//! Expert GEMM and MoE feed-forward on the CPU: AVX-512, AVX2 and portable kernels.
//!
//! - [`Engine`] chooses an instruction set and runs expert feed-forwards over a weight bank
//!   ([`Engine::expert_ffn`]) and grouped GEMMs over plain matrices.
//! - [`BankRef`], [`pack_expert`] and [`unpack`] make and read the bank, whose layout is
//!   `asym_gemm_formats::bank`.
//! - [`router_logits`] and [`combine`] are the steps before and after the experts.
//!
//! Everything takes borrowed slices, checks all arguments before it touches memory, and runs on the
//! rayon pool of the caller.

mod amx_permission;
mod bank;
mod combine;
pub mod dense;
mod engine;
mod errors;
mod ffn;
mod gemm;
mod isa;
mod kernels;
mod matrix;
mod memory;
mod pack;
pub mod pool;
pub mod probe;
mod product;
mod recipe;
mod region;
mod router;
mod rows;
mod shared;
mod tile;
mod tokens;
pub mod topology;
mod validate;
mod vector;
mod wide;
mod workspace;

pub use bank::BankRef;
pub use combine::{Combine, Slots, combine};
pub use engine::Engine;
pub use errors::CpuError;
pub use ffn::ExpertGroup;
pub use gemm::{GroupRange, Output};
pub use isa::{Features, ISA_VARIABLE, Isa};
pub use matrix::{
    Bf16Weights, Fp8Codes, Fp8Weights, Int8Codes, Int8Rows, Int8Scaling, Int8Weights, MatrixMut,
    MatrixRef, PackedRef, WeightElement, WeightsRef,
};
pub use memory::HugeBuffer;
pub use pack::{ExpertSource, StoredRow, UnpackedExpert, pack_expert, unpack};
pub use router::{Router, router_logits};
pub use tokens::Rows;
