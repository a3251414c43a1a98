//! Compiles a device crate to PTX with whichever Rust toolchain can.
