//! A program outside the workspace that depends on `asym-gemm`.
//!
//! The workspace's `.cargo/config.toml` does not reach it, so it sees what a user
//! sees: nothing to set without the feature `cuda`, one variable with it.

use std::fs;

use crate::TaskResult;
use crate::workspace::{cargo, root, run, scratch_folder, target_dir};

/// Tells cust's build script that no CUDA installation is needed to link.
const CUDA_LIBRARY_PATH: &str = "CUDA_LIBRARY_PATH";

/// CPU only: builds anywhere, without any variable.
pub(crate) fn cpu() -> TaskResult {
    build("", false)
}

/// With the GPU back end.
pub(crate) fn cuda() -> TaskResult {
    build("\"cuda\"", true)
}

fn build(features: &str, set_library_path: bool) -> TaskResult {
    let folder = scratch_folder("downstream")?;
    fs::create_dir_all(folder.join("src"))?;
    fs::write(
        folder.join("src/main.rs"),
        "use asym_gemm as _;\n\nfn main() {}\n",
    )?;
    fs::write(
        folder.join("Cargo.toml"),
        format!(
            "[package]\nname = \"downstream\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n\
             [dependencies]\nasym-gemm = {{ path = {:?}, default-features = false, \
             features = [{features}] }}\n\n[workspace]\n",
            root().join("host")
        ),
    )?;
    // The versions that are tested, and downloaded already.
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;

    let mut command = cargo();
    command.current_dir(&folder).env_remove(CUDA_LIBRARY_PATH);
    if set_library_path {
        command.env(CUDA_LIBRARY_PATH, root().join("rust-cuda/stub"));
    }
    let built = run(command
        .arg("build")
        .arg("--target-dir")
        .arg(target_dir().join("downstream")));
    fs::remove_dir_all(&folder)?;
    built
}
