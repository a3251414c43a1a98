//! One Mixture-of-Experts layer: which experts a token goes to and where its rows lie.
//!
//! - [`routing`]: router logits to expert ids and weights, for each scoring in use.
//! - [`layout`]: expert ids to rows grouped by expert, and back.

pub mod layout;
pub mod routing;
