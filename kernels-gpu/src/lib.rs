//! GPU kernels in Rust, and the schedules and layouts they share with the host.
