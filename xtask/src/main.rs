//! The project's tasks: `cargo xtask check | ptx | bundle`.

fn main() {}
