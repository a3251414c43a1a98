//! The project's tasks: `cargo xtask check | ptx | bundle`.

mod ptx;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Same commands for people and for CI.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile the GPU kernels into host/ptx.
    Ptx(ptx::Options),
}

/// What a task returns: its errors are for people to read.
type TaskResult<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Ptx(options) => ptx::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
