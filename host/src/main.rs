//! The `asym-gemm` program.
//!
//! Exit status: 0 when all went well, 1 when a check failed, 2 on bad input or a machine
//! that cannot do what was asked.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    die_quietly_on_closed_pipes();
    cli::run()
}

/// `asym-gemm doctor | head` must end, not panic: Rust ignores SIGPIPE, and the print macros
/// panic on the error that comes instead.
fn die_quietly_on_closed_pipes() {
    #[cfg(unix)]
    // SAFETY: called before any thread starts; the default action needs no handler.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
