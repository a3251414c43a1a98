//! Embeds the GPU kernels: writes `ptx.rs`, a table of the PTX modules.
//!
//! The committed PTX (`ptx/`, made by `cargo xtask ptx`) is what is embedded, so
//! that a stable compiler builds this crate with nothing else. With
//! `ASYM_GEMM_PTX=build` the kernels are compiled from their source instead.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use cuda_builder::{CudaBuilder, Manifest, TOOLCHAIN_VARIABLE};

/// Where the PTX comes from: unset or `committed`, or `build`.
const SOURCE_VARIABLE: &str = "ASYM_GEMM_PTX";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={SOURCE_VARIABLE}");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(error) = embed() {
        // One directive is one line; cargo shows it as the crate's own error.
        for line in error.to_string().lines() {
            println!("cargo::error={line}");
        }
    }
}

fn embed() -> Result<(), Box<dyn Error>> {
    let crate_dir = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    let committed = crate_dir.join("ptx");
    println!("cargo::rerun-if-changed={}", committed.display());
    let manifest = Manifest::read(&committed)?;

    let folder = match std::env::var(SOURCE_VARIABLE).as_deref() {
        Err(_) | Ok("" | "committed") => committed,
        Ok("build") => {
            compile(&manifest, &crate_dir, &out_dir)?;
            out_dir.clone()
        }
        Ok(other) => {
            return Err(
                format!("{SOURCE_VARIABLE}={other}: expected `committed` or `build`").into(),
            );
        }
    };
    std::fs::write(out_dir.join("ptx.rs"), table(&manifest, &folder)?)?;
    Ok(())
}

/// Compiles the modules that the manifest lists into `out_dir`.
fn compile(manifest: &Manifest, crate_dir: &Path, out_dir: &Path) -> Result<(), Box<dyn Error>> {
    let root = crate_dir.join("..");
    println!("cargo::rerun-if-env-changed={TOOLCHAIN_VARIABLE}");
    for source in [
        "kernels-gpu",
        "formats",
        "rust-cuda/cuda_std",
        "rust-cuda/cuda_std_macros",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let modules = manifest
        .modules
        .iter()
        .map(|m| (m.family.clone(), m.target.clone()));
    Manifest::build(
        &CudaBuilder::new(root.join("kernels-gpu")),
        modules,
        out_dir,
    )?;
    Ok(())
}

/// Rust source of `EMBEDDED`: for each kernel family its (target, text) pairs.
fn table(manifest: &Manifest, folder: &Path) -> Result<String, Box<dyn Error>> {
    let mut families: BTreeMap<&str, Vec<(&str, PathBuf)>> = BTreeMap::new();
    for module in &manifest.modules {
        let path = folder.join(module.file_name());
        if !path.is_file() {
            return Err(format!("{} is missing; run `cargo xtask ptx`", path.display()).into());
        }
        let targets = families.entry(&module.family).or_default();
        targets.push((&module.target, path));
    }
    let mut text = String::from("static EMBEDDED: &[(&str, &[(&str, &str)])] = &[\n");
    for (family, targets) in families {
        writeln!(text, "    ({family:?}, &[")?;
        for (target, path) in targets {
            writeln!(text, "        ({target:?}, include_str!({path:?})),")?;
        }
        text.push_str("    ]),\n");
    }
    text.push_str("];\n");
    Ok(text)
}
