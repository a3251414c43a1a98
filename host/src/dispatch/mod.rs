//! Who computes what of an MoE layer, by predicted time, and which experts stay in HBM.
//!
//! - [`Rates`]: what a machine can do; with a layer's shape they make [`Costs`].
//! - [`Model`]: rates corrected by what forwards took, shared by all layers of a machine.
//! - [`best`], [`candidates`]: the division of one forward that ends first.
//! - [`Adaptive`]: the policy, which joins the two and learns.
//! - [`Residency`]: the experts that earn a place in HBM, with bounded changes.
//! - [`Question`]: all of it without running anything.
//! - [`by_slices`], [`by_experts`]: the GPUs' part over several GPUs.
//!
//! Everything here is arithmetic on the host and independent of the `cuda` feature. The formulas
//! are in `docs/dispatch.md`.

mod adaptive;
mod cost;
mod devices;
mod error;
mod estimate;
mod fit;
mod measure;
mod model;
mod partition;
mod rates;
mod residency;
mod retain;
#[cfg(test)]
mod simulation;
mod traffic;

pub use adaptive::{Adaptive, AdaptiveSettings};
pub use cost::{Costs, Prediction, SideCost, SideWork, Work, padded_rows};
pub use devices::{DeviceShare, by_experts, by_slices};
pub use error::DispatchError;
pub use estimate::{Estimate, PolicyEstimate, Question};
pub use model::{Model, RegimeSnapshot, SharedModel, Snapshot};
pub use partition::{Method, Plan, best, candidates};
pub use rates::{Rates, RatesError};
pub use residency::{
    LayerProfile, Move, Phase, Profiles, Residency, ResidencyError, ResidencySettings,
};
