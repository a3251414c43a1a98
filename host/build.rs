//! Embeds the PTX modules.
//!
//! By default the committed texts of `ptx/`, so that a build needs nothing but stable Rust.
//! With `ASYM_GEMM_PTX=build` they are compiled from `kernels-gpu` through cuda_builder.

use cuda_builder::{CudaBuilder, Manifest};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Set to `build` to compile the kernels, to `committed` or nothing to take `ptx/`.
const SWITCH: &str = "ASYM_GEMM_PTX";

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed={SWITCH}");
    println!("cargo::rerun-if-changed=ptx");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={error}");
            ExitCode::FAILURE
        }
    }
}

fn embed() -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).map_err(|_| format!("cargo did not set {name}"));
    let package = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(variable("OUT_DIR")?);
    let committed = package.join("ptx");
    let manifest = Manifest::read(&committed).map_err(|error| error.to_string())?;
    let folder = match std::env::var(SWITCH).as_deref() {
        Err(_) | Ok("" | "committed") => committed,
        Ok("build") => {
            println!("cargo::rerun-if-changed=../kernels-gpu");
            println!("cargo::rerun-if-changed=../formats");
            let folder = out.join("ptx");
            build(&manifest, &package.join("../kernels-gpu"), &folder)?;
            folder
        }
        Ok(other) => return Err(format!("{SWITCH}={other}: expected build or committed")),
    };
    let text = table(&manifest, &folder)?;
    let path = out.join("ptx.rs");
    std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Compiles the modules that `manifest` names into `folder`.
fn build(manifest: &Manifest, kernels: &Path, folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let modules = manifest.modules.iter().map(|m| (m.family.clone(), m.target.clone()));
    Manifest::build(&CudaBuilder::new(kernels), modules, folder)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

/// Source of `EMBEDDED`: for each family its (target, PTX) pairs.
fn table(manifest: &Manifest, folder: &Path) -> Result<String, String> {
    let mut families: BTreeMap<&str, Vec<(&str, PathBuf)>> = BTreeMap::new();
    for module in &manifest.modules {
        let path = folder.join(module.file_name());
        if !path.is_file() {
            return Err(format!("{} is missing; run `cargo xtask ptx`", path.display()));
        }
        families.entry(&module.family).or_default().push((&module.target, path));
    }
    let mut text = String::from("static EMBEDDED: &[(&str, &[(&str, &str)])] = &[\n");
    for (family, modules) in families {
        let _ = writeln!(text, "    ({family:?}, &[");
        for (target, path) in modules {
            let _ = writeln!(text, "        ({target:?}, include_str!({path:?})),");
        }
        text.push_str("    ]),\n");
    }
    text.push_str("];\n");
    Ok(text)
}
