//! The project's tasks: `cargo xtask check | ptx | bundle`.

mod bundle;
mod check;
mod downstream;
mod ptx;
mod ptxas;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The same commands for people and for CI.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run everything that must pass: format, lints, docs, tests, PTX, dependents, aarch64.
    Check(check::Options),
    /// Compile the GPU kernels into host/ptx, assemble them, and write docs/ptx-report.md.
    Ptx(ptx::Options),
    /// Collect tests, benches and the program in bundle/, to run on a machine without Rust.
    Bundle,
}

/// What a task returns: its errors are for people to read.
type TaskResult<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Check(options) => check::run(&options),
        Task::Ptx(options) => ptx::run(&options),
        Task::Bundle => bundle::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
