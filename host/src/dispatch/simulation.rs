//! Synthetic machines.
