//! The same source gives the same PTX, wherever it lies.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use cuda_builder::{CudaBuilder, DeviceToolchain, Manifest};

/// A kernel that keeps what good kernels avoid: calls, vtables, panics and
/// constants, all of which have mangled names.
const AWKWARD_KERNEL: &str = r#"
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
use cuda_std::prelude::*;

trait Op {
    fn apply(&self, x: u32) -> u32;
}
struct Table([u32; 40]);
struct Divide(u32);
static STEPS: [u32; 7] = [1, 5, 9, 2, 4, 8, 3];
impl Op for Table {
    #[inline(never)]
    fn apply(&self, x: u32) -> u32 {
        self.0[x as usize] / STEPS[(x + 1) as usize]
    }
}
impl Op for Divide {
    #[inline(never)]
    fn apply(&self, x: u32) -> u32 {
        self.0 / x
    }
}
#[inline(never)]
fn double<T: core::ops::Add<Output = T> + Copy>(x: T) -> T {
    x + x
}

#[kernel(threads = 64, min_blocks = 2)]
pub unsafe fn awkward(out: *mut u32, n: u32, values: *const u32, #[grid_constant] map: &TensorMap) {
    let (table, divide) = (Table([n; 40]), Divide(n));
    let op: &dyn Op = if n > 3 { &table } else { &divide };
    let values = unsafe { core::slice::from_raw_parts(values, n as usize) };
    let sum = op.apply(thread::thread_idx_x()) + double(values[7]) + double(u64::from(n)) as u32;
    thread::sync_threads();
    unsafe { *out = sum + shared::dynamic_shared_base() + map.address() as u32 };
}
"#;

/// One target is enough: paths do not depend on it, and each needs its own `core`.
const TARGET: &str = "sm_90a";

#[test]
fn two_folders_and_two_cargo_homes_give_the_same_bytes() -> Result<(), Box<dyn std::error::Error>> {
    let toolchain = match DeviceToolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()?;
    // Not a temporary folder, and one target folder: `core` takes half a minute.
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("reproducible");
    let original_home = cargo_home().ok_or("neither CARGO_HOME nor HOME is set")?;

    let mut results = Vec::new();
    for place in ["one", "another/one/deeper"] {
        let copy = scratch.join(place).join("workspace");
        if copy.exists() {
            fs::remove_dir_all(&copy)?;
        }
        copy_sources(&workspace, &copy)?;
        let home = scratch.join(place).join("home");
        link_registry(&original_home, &home)?;
        write_awkward_crate(&copy)?;
        // From what is downloaded already: the test needs no network of its own.
        let locked = Command::new(toolchain.cargo())
            .args(["generate-lockfile", "--quiet", "--offline"])
            .current_dir(copy.join("awkward"))
            .env("CARGO_HOME", &home)
            .status()?;
        assert!(locked.success(), "no lock file for the awkward crate");

        let build = |folder: &str, feature: &str, target: &str| {
            CudaBuilder::new(copy.join(folder))
                .toolchain(toolchain.clone())
                .feature(feature)
                .arch(target)
                .target_dir(scratch.join("target"))
                .cargo_home(&home)
                .build()
        };
        let mut modules = vec![("awkward".to_owned(), build("awkward", "awkward", TARGET)?)];
        let manifest = Manifest::read(&workspace.join("host/ptx"))?;
        for module in manifest
            .modules
            .iter()
            .filter(|module| module.target == TARGET)
        {
            let built = build("kernels-gpu", &module.family, &module.target)?;
            modules.push((module.file_name(), built));
        }
        results.push(modules);
    }

    for ((name, first), (_, second)) in results[0].iter().zip(&results[1]) {
        assert_eq!(first.report, second.report, "{name}");
        let mut lines = first.ptx.lines().zip(second.ptx.lines());
        assert_eq!(lines.find(|(a, b)| a != b), None, "{name}");
        assert!(first.ptx == second.ptx, "{name}: one is longer");
    }
    let awkward = &results[0][0].1;
    assert!(
        awkward
            .ptx
            .contains(".maxntid 64, 1, 1\n.minnctapersm 2\n{"),
        "{}",
        awkward.ptx
    );
    assert!(awkward.ptx.contains(".align 64 .b8 awkward_param_3[128]"));
    assert_eq!(awkward.report.entries[0].collectives["bar.sync"], 1);
    assert!(
        awkward.report.entries[0].calls > 0,
        "the kernel is not awkward enough"
    );
    Ok(())
}

/// A second device crate in the copy, outside its workspace.
fn write_awkward_crate(copy: &Path) -> io::Result<()> {
    let folder = copy.join("awkward");
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), AWKWARD_KERNEL)?;
    fs::write(
        folder.join("Cargo.toml"),
        "[package]\nname = \"awkward\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\
         [features]\nawkward = []\n\
         [dependencies]\ncuda_std = { path = \"../rust-cuda/cuda_std\" }\n[workspace]\n",
    )
}

fn cargo_home() -> Option<PathBuf> {
    let default = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(default)
}

/// A CARGO_HOME of its own that shares the downloads of the original.
fn link_registry(original: &Path, home: &Path) -> io::Result<()> {
    fs::create_dir_all(home)?;
    let link = home.join("registry");
    if link.exists() {
        return Ok(());
    }
    std::os::unix::fs::symlink(original.join("registry"), link)
}

/// Copies manifests, lock file and Rust sources; no build outputs, no data.
fn copy_sources(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let path = entry.path();
        if path.is_dir() {
            let skip = name.starts_with('.') || name.starts_with("target") || name == "bundle";
            if !skip {
                copy_sources(&path, &to.join(&*name))?;
            }
        } else if [".rs", ".toml", ".lock"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            fs::copy(&path, to.join(&*name))?;
        }
    }
    Ok(())
}
