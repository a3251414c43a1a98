//! One Mixture-of-Experts layer: which experts a token goes to, where its rows lie, and the
//! experts themselves.
//!
//! - [`routing`]: router logits to expert ids and weights, for each scoring in use.
//! - [`layout`]: expert ids to rows grouped by expert, and back.
//! - [`ExpertBank`]: all experts' weights in one allocation that CPU and GPU read.
//! - [`division`]: what each side computes of a forward, and the policies that decide it.
//! - [`layer`]: the experts of one layer on CPU and GPUs at once.
//! - [`MoeBlock`]: the block of a decoder layer, on the CPU, the GPU or both.

mod bank;
mod block;
pub mod division;
mod error;
pub mod layer;
pub mod layout;
pub mod routing;

pub use bank::ExpertBank;
pub use block::{Backend, BlockParts, ForwardReport, MoeBlock};
pub use error::MoeError;
pub use layer::{LayerReport, MoeLayer, MoeLayerBuilder};
