//! One device crate, one set of features, one GPU target: one PTX module.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::BuildError;
use crate::ptx::{self, Report};
use crate::toolchain::{DeviceToolchain, Library};

/// rustc's name of the GPU target.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// Flags of every crate in the build, beside `-Ctarget-cpu`.
///
/// Panic locations are the only paths that reach PTX: without them the folder
/// of the build does not show. The linker has nothing to do, since the module's
/// assembly after fat LTO is the result.
const ALL_CRATES: [&str; 1] = ["-Zlocation-detail=none"];

/// Flags of the device crate, where all code is generated.
///
/// `asm!` is not convergent in LLVM. The first two keep a barrier that follows a
/// divergent branch from being copied into both sides of it (an undefined
/// barrier); they are not optional. The third unrolls loops over accumulators
/// before they can fall into local memory.
const DEVICE_CRATE: [&str; 3] = [
    "-Zmir-enable-passes=-JumpThreading",
    "-Cllvm-args=-simplifycfg-max-small-block-size=0",
    "-Cllvm-args=-unroll-threshold=100000",
];

/// The flags that decide the generated code, for the record.
pub fn compiler_flags() -> Vec<String> {
    [
        "-Copt-level=3",
        "-Clto=fat",
        "-Ccodegen-units=1",
        "-Cpanic=abort",
    ]
    .iter()
    .chain(&ALL_CRATES)
    .chain(&DEVICE_CRATE)
    .map(ToString::to_string)
    .collect()
}

/// Compiles a device crate to one PTX module.
#[derive(Clone, Debug)]
#[must_use = "call build()"]
pub struct CudaBuilder {
    crate_dir: PathBuf,
    arch: String,
    ptx_isa: Option<u32>,
    features: Vec<String>,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    cargo_home: Option<PathBuf>,
    toolchain: Option<DeviceToolchain>,
}

/// A finished module.
#[derive(Clone, Debug)]
pub struct Built {
    /// The module's text.
    pub ptx: String,
    /// Its entries and what is in them.
    pub report: Report,
    /// The toolchain that made it.
    pub toolchain: DeviceToolchain,
}

impl CudaBuilder {
    /// Starts with the device crate's folder. The target is sm_80 and no feature
    /// is enabled, not even the default ones.
    pub fn new(crate_dir: impl Into<PathBuf>) -> Self {
        Self {
            crate_dir: crate_dir.into(),
            arch: "sm_80".to_owned(),
            ptx_isa: None,
            features: Vec::new(),
            copy_to: None,
            target_dir: None,
            cargo_home: None,
            toolchain: None,
        }
    }

    /// GPU target, for example `sm_90a`.
    pub fn arch(mut self, arch: impl Into<String>) -> Self {
        self.arch = arch.into();
        self
    }

    /// PTX version times ten, where the target's default (8.0 for sm_90a) is too old
    /// for an instruction. The driver must know it.
    pub fn ptx_isa(mut self, version: u32) -> Self {
        self.ptx_isa = Some(version);
        self
    }

    /// Enables a feature of the device crate.
    pub fn feature(mut self, feature: impl Into<String>) -> Self {
        self.features.push(feature.into());
        self
    }

    /// Also writes the module to this file (only when its content changes).
    pub fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Where cargo builds. By default `cuda-builder` in the device crate's
    /// workspace target folder. Keep it: it holds the compiled `core`.
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(path.into());
        self
    }

    /// Uses this folder as CARGO_HOME instead of the environment's.
    pub fn cargo_home(mut self, path: impl Into<PathBuf>) -> Self {
        self.cargo_home = Some(path.into());
        self
    }

    /// Uses this toolchain instead of looking for one.
    pub fn toolchain(mut self, toolchain: DeviceToolchain) -> Self {
        self.toolchain = Some(toolchain);
        self
    }

    /// Compiles.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: no toolchain, a compile error (with the compiler's text), or
    /// PTX that does not pass [`ptx::finish`]'s checks.
    pub fn build(&self) -> Result<Built, BuildError> {
        let toolchain = match &self.toolchain {
            Some(toolchain) => toolchain.clone(),
            None => DeviceToolchain::find()?,
        };
        let crate_dir = self
            .crate_dir
            .canonicalize()
            .map_err(|error| BuildError::io(self.crate_dir.display(), error))?;
        let workspace = workspace_root(&crate_dir);
        let target_dir = self
            .target_dir
            .clone()
            .unwrap_or_else(|| default_target_dir(&workspace));
        // A path of its own for each module: without it the modules would
        // overwrite each other's file, and a fresh build could return another's.
        let folder = target_dir.join("assembly");
        std::fs::create_dir_all(&folder).map_err(|e| BuildError::io(folder.display(), e))?;
        let folder = folder
            .canonicalize()
            .map_err(|e| BuildError::io(folder.display(), e))?;
        let assembly = folder.join(format!("{}.s", self.module_name()));

        let mut command = self.command(&toolchain, &crate_dir, &workspace, &target_dir, &assembly);
        let output = command
            .output()
            .map_err(|e| BuildError::io(toolchain.cargo().display(), e))?;
        if !output.status.success() {
            return Err(BuildError::Compile {
                command: command_line(&command),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        let text = match std::fs::read_to_string(&assembly) {
            Ok(text) => text,
            Err(_) => {
                return Err(BuildError::NoAssembly {
                    assembly,
                    target_dir,
                });
            }
        };

        let cargo_home = self
            .cargo_home
            .clone()
            .or_else(|| home("CARGO_HOME", ".cargo"));
        let private_paths = [Some(workspace), cargo_home];
        let finished = ptx::finish(&text)
            .and_then(|done| {
                ptx::check_no_paths(&done.0, private_paths.iter().flatten()).map(|()| done)
            })
            .map_err(|reason| BuildError::Ptx {
                module: self.module_name(),
                reason,
            })?;
        let (ptx, report) = finished;
        if let Some(path) = &self.copy_to {
            write_if_changed(path, &ptx).map_err(|e| BuildError::io(path.display(), e))?;
        }
        Ok(Built {
            ptx,
            report,
            toolchain,
        })
    }

    /// `gemm.sm_90a`, or `gemm.sm_90a.ptx83` with a raised PTX version.
    fn module_name(&self) -> String {
        let isa = self.ptx_isa.map(|v| format!(".ptx{v}")).unwrap_or_default();
        format!("{}.{}{isa}", self.features.join("+"), self.arch)
    }

    fn command(
        &self,
        toolchain: &DeviceToolchain,
        crate_dir: &Path,
        workspace: &Path,
        target_dir: &Path,
        assembly: &Path,
    ) -> Command {
        let mut rustflags = vec![
            format!("-Ctarget-cpu={}", self.arch),
            format!("-Clinker={}", no_op()),
        ];
        if let Some(version) = self.ptx_isa {
            rustflags.push(format!("-Ctarget-feature=+ptx{version}"));
        }
        rustflags.extend(ALL_CRATES.map(str::to_owned));

        let mut command = toolchain.command();
        command
            .current_dir(crate_dir)
            .env("CARGO_ENCODED_RUSTFLAGS", rustflags.join("\u{1f}"))
            .env("CARGO_INCREMENTAL", "0");
        if let Some(home) = &self.cargo_home {
            command.env("CARGO_HOME", home);
        }
        for (key, value) in [
            ("OPT_LEVEL", "3"),
            ("LTO", "fat"),
            ("CODEGEN_UNITS", "1"),
            ("PANIC", "abort"),
            ("DEBUG", "false"),
            ("STRIP", "none"),
            ("DEBUG_ASSERTIONS", "false"),
            ("OVERFLOW_CHECKS", "false"),
        ] {
            command.env(format!("CARGO_PROFILE_RELEASE_{key}"), value);
        }
        command
            .args([
                "rustc",
                "--quiet",
                "--release",
                "--lib",
                "--crate-type",
                "cdylib",
            ])
            .args(["--target", TARGET, "--no-default-features"])
            .arg("--manifest-path")
            .arg(crate_dir.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(target_dir);
        if !self.features.is_empty() {
            command.arg("--features").arg(self.features.join(","));
        }
        if workspace.join("Cargo.lock").is_file() {
            command.arg("--locked");
        }
        if toolchain.library() == Library::Source {
            command.arg("-Zbuild-std=core");
        }
        command
            .arg("--")
            .arg(format!("--emit=asm={}", assembly.display()))
            .args(DEVICE_CRATE);
        command
    }
}

/// The nearest folder upwards whose manifest has a `[workspace]`, or else the crate itself.
fn workspace_root(crate_dir: &Path) -> PathBuf {
    let is_root = |folder: &&Path| {
        std::fs::read_to_string(folder.join("Cargo.toml"))
            .is_ok_and(|manifest| manifest.lines().any(|line| line.starts_with("[workspace")))
    };
    crate_dir
        .ancestors()
        .find(is_root)
        .unwrap_or(crate_dir)
        .to_path_buf()
}

/// Program and arguments, without the many variables that are removed.
fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

fn default_target_dir(workspace: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace.join("target"), PathBuf::from)
        .join("cuda-builder")
}

fn home(variable: &str, default: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(default)))
}

/// A program that ignores its arguments and succeeds.
fn no_op() -> &'static str {
    ["/bin/true", "/usr/bin/true"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .unwrap_or("true")
}

fn write_if_changed(path: &Path, text: &str) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_crate_is_named() {
        let Ok(toolchain) = DeviceToolchain::find() else {
            println!("skipped: no device toolchain");
            return;
        };
        let error = CudaBuilder::new("/nonexistent/kernels")
            .toolchain(toolchain)
            .build();
        assert!(
            error
                .unwrap_err()
                .to_string()
                .starts_with("/nonexistent/kernels: ")
        );
    }

    #[test]
    fn each_module_has_a_name_of_its_own() {
        let builder = CudaBuilder::new(".").feature("gemm").arch("sm_90a");
        assert_eq!(builder.module_name(), "gemm.sm_90a");
        assert_eq!(builder.ptx_isa(83).module_name(), "gemm.sm_90a.ptx83");
    }
}
