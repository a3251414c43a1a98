//! The `asym-gemm` program.
//!
//! Exit status: 0 when all went well, 1 when a check failed, 2 on bad input or a machine
//! that cannot do what was asked.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
