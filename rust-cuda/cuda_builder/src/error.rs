//! What can go wrong between a device crate and its PTX.

use std::path::PathBuf;

/// Why there is no PTX.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No toolchain on this machine can compile for the GPU.
    #[error(
        "no Rust toolchain for nvptx64 found. Install Debian's rustc-web, cargo-web and rust-web-src, \
         or `rustup component add rust-src`, or set {variable} to a rustc that has the library source. \
         Looked at: {}", .looked_at.join("; ")
    )]
    NoToolchain {
        /// The variable that names one explicitly.
        variable: &'static str,
        /// Each candidate and why it was passed over.
        looked_at: Vec<String>,
    },
    /// The toolchain that was asked for cannot compile for the GPU.
    #[error("{}: {reason}", .rustc.display())]
    UnusableToolchain {
        /// The compiler that was tried.
        rustc: PathBuf,
        /// What it lacks.
        reason: String,
    },
    /// cargo failed; its messages are included.
    #[error("{command} failed:\n{stderr}")]
    Compile {
        /// The command line.
        command: String,
        /// What it printed.
        stderr: String,
    },
    /// cargo succeeded and left no assembly.
    #[error("{} is missing after a successful build; remove {} and try again",
        .assembly.display(), .target_dir.display())]
    NoAssembly {
        /// Where the assembly should be.
        assembly: PathBuf,
        /// The builder's target folder.
        target_dir: PathBuf,
    },
    /// A file or a program could not be used.
    #[error("{what}: {source}")]
    Io {
        /// The path or command.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The compiler's PTX does not have the form this crate expects.
    #[error("PTX of {module}: {reason}")]
    Ptx {
        /// Crate, features and target.
        module: String,
        /// What is wrong.
        reason: String,
    },
    /// The manifest beside the PTX could not be read.
    #[error("{}: {reason}", .path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong, and what to run.
        reason: String,
    },
}

impl BuildError {
    pub(crate) fn io(what: impl std::fmt::Display, source: std::io::Error) -> Self {
        Self::Io {
            what: what.to_string(),
            source,
        }
    }
}
