//! Finding a Rust toolchain that compiles for nvptx64.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::builder::TARGET;
use crate::error::BuildError;

/// Environment variable: path of the rustc to use, its cargo beside it.
pub const TOOLCHAIN_VARIABLE: &str = "ASYM_GEMM_DEVICE_RUSTC";

/// Where Debian's rustc-web and cargo-web put the compiler.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Where `core` for the GPU comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// Compiled from the toolchain's library source, once (about 25 s).
    Source,
    /// The toolchain has the target installed.
    Precompiled,
}

/// A rustc and a cargo that compile for nvptx64.
#[derive(Clone, Debug)]
pub struct DeviceToolchain {
    rustc: PathBuf,
    cargo: PathBuf,
    library: Library,
    version: String,
    llvm: String,
}

impl DeviceToolchain {
    /// The first that works of: the rustc named by [`TOOLCHAIN_VARIABLE`], Debian's
    /// `/usr/bin/rustc`, rustup's toolchains (the default one first).
    ///
    /// # Errors
    ///
    /// [`BuildError::UnusableToolchain`] if the variable names one that does not
    /// work (there is no falling back from an explicit choice), and
    /// [`BuildError::NoToolchain`] if none is found.
    pub fn find() -> Result<Self, BuildError> {
        if let Some(rustc) = std::env::var_os(TOOLCHAIN_VARIABLE).filter(|v| !v.is_empty()) {
            return Self::at(rustc);
        }
        let mut looked_at = Vec::new();
        for rustc in std::iter::once(PathBuf::from(DEBIAN_RUSTC)).chain(rustup_toolchains()) {
            match Self::at(&rustc) {
                Ok(found) => return Ok(found),
                Err(error) => looked_at.push(error.to_string()),
            }
        }
        Err(BuildError::NoToolchain {
            variable: TOOLCHAIN_VARIABLE,
            looked_at,
        })
    }

    /// The toolchain of one compiler.
    ///
    /// # Errors
    ///
    /// [`BuildError::UnusableToolchain`] says what it lacks.
    pub fn at(rustc: impl AsRef<Path>) -> Result<Self, BuildError> {
        let rustc = rustc.as_ref();
        let unusable = |reason: String| BuildError::UnusableToolchain {
            rustc: rustc.to_path_buf(),
            reason,
        };
        let ask = |args: &[&str]| -> Result<String, BuildError> {
            let output = Command::new(rustc)
                .args(args)
                .output()
                .map_err(|error| unusable(error.to_string()))?;
            if !output.status.success() {
                return Err(unusable(
                    String::from_utf8_lossy(&output.stderr).trim().to_owned(),
                ));
            }
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };

        let verbose = ask(&["-vV"])?;
        let version = verbose.lines().next().unwrap_or_default().to_owned();
        let llvm = verbose
            .lines()
            .find_map(|line| line.strip_prefix("LLVM version: "))
            .unwrap_or_default()
            .to_owned();
        let libraries = Path::new(&ask(&["--print", "sysroot"])?).join("lib/rustlib");
        let library = if libraries.join(TARGET).join("lib").is_dir() {
            Library::Precompiled
        } else if libraries.join("src/rust/library/core/src/lib.rs").is_file() {
            Library::Source
        } else {
            return Err(unusable(format!(
                "{} has neither the {TARGET} target nor the library source (rust-src)",
                libraries.display()
            )));
        };
        let cargo = rustc.with_file_name("cargo");
        if !cargo.is_file() {
            return Err(unusable(format!(
                "no cargo beside it at {}",
                cargo.display()
            )));
        }
        Ok(Self {
            rustc: rustc.to_path_buf(),
            cargo,
            library,
            version,
            llvm,
        })
    }

    /// This toolchain's cargo with unstable features unlocked, in an environment
    /// without the flags, profile and target of a cargo that may be running us.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.cargo);
        for (name, _) in std::env::vars_os().filter(|(name, _)| belongs_to_parent(name)) {
            command.env_remove(name);
        }
        command
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTC_WRAPPER", "")
            .env("RUSTC_WORKSPACE_WRAPPER", "");
        command
    }

    /// The compiler.
    pub fn rustc(&self) -> &Path {
        &self.rustc
    }

    /// The cargo beside it.
    pub fn cargo(&self) -> &Path {
        &self.cargo
    }

    /// Where `core` comes from.
    pub fn library(&self) -> Library {
        self.library
    }

    /// First line of `rustc -vV`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Version of the LLVM inside.
    pub fn llvm(&self) -> &str {
        &self.llvm
    }
}

/// Compilers below rustup's toolchain folder: stable first, then by name, so
/// that the choice does not depend on the folder's order.
fn rustup_toolchains() -> Vec<PathBuf> {
    let home = std::env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".rustup")));
    let Some(folder) = home.map(|home| home.join("toolchains")) else {
        return Vec::new();
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path().join("bin/rustc"))
        .filter(|rustc| rustc.is_file())
        .collect();
    found.sort();
    let is_stable = |rustc: &PathBuf| {
        rustc
            .components()
            .any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"stable"))
    };
    found.sort_by_key(|rustc| !is_stable(rustc));
    found
}

/// Whether a child cargo must not see a variable of the cargo that runs us.
///
/// A build script inherits the outer build's compiler, flags, profile and
/// target; any of them would change the PTX or break the build. What concerns
/// the machine (homes, network, registries) stays.
fn belongs_to_parent(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let keep = ["CARGO_HOME", "RUSTUP_HOME"];
    let keep_prefixes = [
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTRIES_",
        "CARGO_REGISTRY_",
        "CARGO_SOURCE_",
    ];
    if keep.contains(&name) || keep_prefixes.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    let single = [
        "TARGET",
        "HOST",
        "OUT_DIR",
        "PROFILE",
        "OPT_LEVEL",
        "NUM_JOBS",
        "DEBUG",
        "MAKEFLAGS",
        "CFLAGS",
        "SOURCE_DATE_EPOCH",
    ];
    single.contains(&name)
        || ["CARGO", "RUST", "DEP_", "CLIPPY_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parents_build_is_hidden_and_the_machine_is_not() {
        for name in [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC",
            "CARGO",
            "TARGET",
            "OUT_DIR",
            "CARGO_PROFILE_RELEASE_LTO",
            "RUSTUP_TOOLCHAIN",
            "CARGO_BUILD_TARGET",
            "CARGO_TARGET_DIR",
        ] {
            assert!(belongs_to_parent(OsStr::new(name)), "{name}");
        }
        for name in [
            "PATH",
            "HOME",
            "CARGO_HOME",
            "RUSTUP_HOME",
            "CARGO_HTTP_PROXY",
            "https_proxy",
            "CARGO_NET_OFFLINE",
        ] {
            assert!(!belongs_to_parent(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn a_missing_compiler_is_named() {
        let error = DeviceToolchain::at("/nonexistent/rustc").unwrap_err();
        assert!(
            error.to_string().starts_with("/nonexistent/rustc: "),
            "{error}"
        );
    }
}
