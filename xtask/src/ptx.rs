//! `cargo xtask ptx`: the committed PTX, and the proof that it is what the
//! source builds.

use std::path::{Path, PathBuf};

use cuda_builder::manifest::{self, Manifest};
use cuda_builder::{BuildError, Built, CudaBuilder, DeviceToolchain};

use crate::TaskResult;
use crate::workspace::{cargo, is_on, output, root};

/// CI sets it: a machine that cannot check the PTX then fails instead of saying so.
const REQUIRE: &str = "REQUIRE_PTX";

/// Options of `cargo xtask ptx`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Compare with the committed PTX instead of writing it.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(options: &Options) -> TaskResult {
    if options.check { check() } else { write() }
}

fn folder() -> PathBuf {
    root().join("host/ptx")
}

fn builder() -> CudaBuilder {
    CudaBuilder::new(root().join("kernels-gpu"))
}

fn write() -> TaskResult {
    let folder = folder();
    std::fs::create_dir_all(&folder)?;
    let (manifest, built) = Manifest::build(&builder(), modules()?, &folder)?;
    manifest.write(&folder)?;
    println!("{}", manifest.rustc);
    print(&manifest, &built);
    remove_strays(&folder, &manifest)
}

/// Compares when the same compiler is here; a different one may well generate
/// different code, so then the source is only built and checked.
pub(crate) fn check() -> TaskResult {
    let committed = Manifest::read(&folder())?;
    let toolchain = match DeviceToolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error @ BuildError::NoToolchain { .. }) if !is_on(REQUIRE) => {
            println!("PTX not checked: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let scratch = std::env::temp_dir().join(format!("asym-gemm-ptx-{}", std::process::id()));
    let result = Manifest::build(&builder().toolchain(toolchain), modules()?, &scratch)
        .map_err(Into::into)
        .and_then(|(fresh, built)| {
            print(&fresh, &built);
            compare(&committed, &fresh, &built)
        });
    // The folder may not exist if the build failed.
    let _ = std::fs::remove_dir_all(&scratch);
    result
}

fn compare(committed: &Manifest, fresh: &Manifest, built: &[Built]) -> TaskResult {
    if (&committed.rustc, &committed.llvm) != (&fresh.rustc, &fresh.llvm) {
        let message = format!(
            "the PTX was made by {} (LLVM {}), here is {} (LLVM {}): built, bytes not compared",
            committed.rustc, committed.llvm, fresh.rustc, fresh.llvm
        );
        println!("{message}");
        return Ok(());
    }
    let mut stale = Vec::new();
    for (module, built) in fresh.modules.iter().zip(built) {
        let path = folder().join(module.file_name());
        if std::fs::read(&path).ok().as_deref() != Some(built.ptx.as_bytes()) {
            stale.push(module.file_name());
        }
    }
    if stale.is_empty() && committed != fresh {
        stale.push(manifest::FILE_NAME.to_owned());
    }
    if stale.is_empty() {
        println!("the committed PTX is what the source builds, byte for byte");
        Ok(())
    } else {
        Err(format!(
            "not what the source builds: {}; run `cargo xtask ptx`",
            stale.join(", ")
        )
        .into())
    }
}

fn print(manifest: &Manifest, built: &[Built]) {
    for (module, built) in manifest.modules.iter().zip(built) {
        println!("{}: {} bytes", module.file_name(), built.ptx.len());
        for entry in &module.entries {
            let counts: Vec<String> = entry
                .collectives
                .iter()
                .map(|(name, count)| format!("{name} {count}"))
                .collect();
            println!("  {} [{}]", entry.name, counts.join(", "));
        }
    }
}

/// `(family, target)` pairs from `[package.metadata.ptx]` of the device crate.
fn modules() -> TaskResult<Vec<(String, String)>> {
    let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)?;
    let targets = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "asym-gemm-kernels-gpu")
        .and_then(|package| package["metadata"]["ptx"].as_object())
        .ok_or("kernels-gpu/Cargo.toml has no [package.metadata.ptx]")?;
    let mut modules = Vec::new();
    for (family, targets) in targets {
        let targets: Vec<String> = serde_json::from_value(targets.clone())?;
        modules.extend(targets.into_iter().map(|target| (family.clone(), target)));
    }
    Ok(modules)
}

/// Removes PTX of families that no longer exist.
fn remove_strays(folder: &Path, manifest: &Manifest) -> TaskResult {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_ptx = path.extension().is_some_and(|e| e == "ptx");
        let known = manifest
            .modules
            .iter()
            .any(|m| path.ends_with(m.file_name()));
        if is_ptx && !known {
            println!("removed {}", path.display());
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}
