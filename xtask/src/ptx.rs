//! `cargo xtask ptx`: the committed PTX, and the proof that it is what the
//! source builds.

use std::path::{Path, PathBuf};

use cuda_builder::manifest::{self, Manifest, Module};
use cuda_builder::ptx::Entry;
use cuda_builder::{BuildError, Built, CudaBuilder, DeviceToolchain};

use crate::TaskResult;
use crate::ptxas::{self, Ptxas, Usage};
use crate::workspace::{cargo, is_on, output, root, scratch_folder};

/// What ptxas made of the kernels, for people.
const REPORT: &str = "docs/ptx-report.md";

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
    remove_strays(&folder, &manifest)?;
    if let Some(report) = assemble(&manifest, &folder)? {
        std::fs::write(root().join(REPORT), report)?;
    }
    Ok(())
}

/// Compares when the same compiler is here; a different one may well generate
/// different code, so then the source is only built and assembled.
pub(crate) fn check() -> TaskResult {
    let committed = Manifest::read(&folder())?;
    let toolchain = match DeviceToolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error @ BuildError::NoToolchain { .. }) if !is_on(REQUIRE) => {
            println!("PTX not compared with its source: {error}");
            return assemble(&committed, &folder()).map(drop);
        }
        Err(error) => return Err(error.into()),
    };
    let scratch = scratch_folder("ptx")?;
    let result = Manifest::build(&builder().toolchain(toolchain), modules()?, &scratch)
        .map_err(Into::into)
        .and_then(|(fresh, built)| {
            print(&fresh, &built);
            let report = assemble(&fresh, &scratch)?;
            compare(&committed, &fresh, &built, report)
        });
    std::fs::remove_dir_all(&scratch)?;
    result
}

fn compare(
    committed: &Manifest,
    fresh: &Manifest,
    built: &[Built],
    report: Option<String>,
) -> TaskResult {
    if (&committed.rustc, &committed.llvm) != (&fresh.rustc, &fresh.llvm) {
        println!(
            "the committed PTX was made by {} (LLVM {}), here is {} (LLVM {}): \
             built, bytes not compared",
            committed.rustc, committed.llvm, fresh.rustc, fresh.llvm
        );
        return Ok(());
    }
    let differs =
        |path: &Path, want: &str| std::fs::read(path).ok().as_deref() != Some(want.as_bytes());
    let mut stale = Vec::new();
    for (module, built) in fresh.modules.iter().zip(built) {
        if differs(&folder().join(module.file_name()), &built.ptx) {
            stale.push(module.file_name());
        }
    }
    if committed != fresh {
        stale.push(manifest::FILE_NAME.to_owned());
    }
    if let Some(report) = report {
        // Register counts belong to one ptxas; its version is in the report.
        let same_ptxas = std::fs::read_to_string(root().join(REPORT))
            .is_ok_and(|old| version_line(&old) == version_line(&report));
        if same_ptxas && differs(&root().join(REPORT), &report) {
            stale.push(REPORT.to_owned());
        }
    }
    if stale.is_empty() {
        println!("the committed PTX is what the source builds, byte for byte");
        return Ok(());
    }
    Err(format!(
        "not what the source builds: {}; run `cargo xtask ptx`",
        stale.join(", ")
    )
    .into())
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

/// Assembles all modules and writes the report, or says why not.
fn assemble(manifest: &Manifest, folder: &Path) -> TaskResult<Option<String>> {
    let Some(ptxas) = Ptxas::find()? else {
        let message = format!(
            "ptxas not found (PATH, {}, Python environment)",
            ptxas::VARIABLE
        );
        if is_on(REQUIRE) {
            return Err(message.into());
        }
        println!("PTX not assembled: {message}");
        return Ok(None);
    };
    let mut rows = String::new();
    for module in &manifest.modules {
        let usage = ptxas.assemble(&folder.join(module.file_name()), &module.target)?;
        for entry in &module.entries {
            let used = usage
                .get(&entry.name)
                .ok_or_else(|| format!("ptxas says nothing about {}", entry.name))?;
            rows.push_str(&row(module, entry, used));
        }
    }
    println!(
        "assembled by ptxas {}: no spills, no stack, no serialised wgmma",
        ptxas.version
    );
    Ok(Some(format!(
        "# GPU kernels\n\nWritten by `cargo xtask ptx`. {} (LLVM {}), ptxas {}. \
         No kernel spills registers or uses a stack.\n\n\
         | kernel | module | registers | static smem | barriers | bar.sync | shfl.sync | mma.sync | wgmma |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|\n{rows}",
        manifest.rustc, manifest.llvm, ptxas.version
    )))
}

fn row(module: &Module, entry: &Entry, used: &Usage) -> String {
    let count = |name: &str| entry.collectives.get(name).copied().unwrap_or(0);
    format!(
        "| `{}` | {}.{} | {} | {} | {} | {} | {} | {} | {} |\n",
        entry.name,
        module.family,
        module.target,
        used.registers,
        used.shared_bytes,
        used.barriers,
        count("bar.sync"),
        count("shfl.sync"),
        count("mma.sync"),
        count("wgmma.mma_async"),
    )
}

/// The line of a report that names compiler and assembler.
fn version_line(report: &str) -> Option<&str> {
    report.lines().find(|line| line.starts_with("Written by"))
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
