//! Where things are, and running programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::TaskResult;

/// The workspace's root folder: where cargo runs this task, or else where it was compiled
/// (a target folder may serve several checkouts).
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.parent()
        .map_or_else(|| here.clone(), Path::to_path_buf)
}

/// The target folder of the cargo that runs this task.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |folder| root().join(folder))
}

/// An empty folder outside the workspace; the caller removes it.
pub(crate) fn scratch_folder(name: &str) -> TaskResult<PathBuf> {
    let folder = std::env::temp_dir().join(format!("asym-gemm-{name}-{}", std::process::id()));
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The cargo that runs this task.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a command with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> TaskResult {
    let status = command
        .status()
        .map_err(|error| format!("{}: {error}", name(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} failed ({status})", name(command)).into())
    }
}

/// Runs a command and returns what it wrote to stdout; stderr goes to the terminal.
pub(crate) fn output(command: &mut Command) -> TaskResult<String> {
    let output = command
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|error| format!("{}: {error}", name(command)))?;
    if !output.status.success() {
        return Err(format!("{} failed ({})", name(command), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn name(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether a switch such as `REQUIRE_PTX` is on: set, and neither empty nor `0`.
pub(crate) fn is_on(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| !value.is_empty() && value != "0")
}
