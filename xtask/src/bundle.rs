//! `cargo xtask bundle`: tests, benches and the program, to run without Rust.
//!
//! ```text
//! bundle/
//!   run.sh        runs them: see its head
//!   asym-gemm     the program
//!   deps/         test programs (assert_cmd looks for the program one folder up)
//!   bench/        benchmarks
//!   fixtures/     tests/fixtures; run.sh passes it as ASYM_GEMM_FIXTURES
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::TaskResult;
use crate::workspace::{cargo, output, root, run as execute};

/// Small enough to be sent to a test machine in seconds.
const LIMIT_BYTES: u64 = 60 << 20;

/// Build tools: their tests need a compiler.
const LEFT_OUT: [&str; 4] = ["xtask", "cuda_builder", "cuda_std", "cuda_std_macros"];

/// Lines of `--message-format=json` that tell of an executable.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

pub(crate) fn run() -> TaskResult {
    let bundle = root().join("bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    fs::create_dir_all(&bundle)?;

    let mut programs = BTreeMap::new();
    for (arguments, wants_tests) in [
        (&["build", "--release", "--workspace", "--bins"][..], false),
        (&["test", "--release", "--workspace", "--no-run"], true),
        (&["bench", "--workspace", "--no-run"], true),
    ] {
        for artifact in executables(arguments)? {
            if let Some(place) = place(&artifact, wants_tests)
                && let Some(executable) = artifact.executable
            {
                programs.insert(place, executable);
            }
        }
    }
    for (place, executable) in &programs {
        copy_stripped(executable, &bundle.join(place))?;
    }
    copy_folder(&root().join("tests/fixtures"), &bundle.join("fixtures"))?;
    let script = bundle.join("run.sh");
    fs::write(&script, include_str!("run.sh"))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;

    let bytes = size(&bundle)?;
    println!(
        "{}: {} programs, {:.1} MiB",
        bundle.display(),
        programs.len(),
        mib(bytes)
    );
    if bytes > LIMIT_BYTES {
        return Err(format!("more than {} MiB", mib(LIMIT_BYTES)).into());
    }
    Ok(())
}

fn executables(arguments: &[&str]) -> TaskResult<Vec<Artifact>> {
    let text = output(
        cargo()
            .args(arguments)
            .arg("--message-format=json-render-diagnostics"),
    )?;
    let artifacts = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    Ok(artifacts
        .filter(|artifact| artifact.executable.is_some())
        .collect())
}

/// Where a program goes in the bundle; `None` for what is not wanted.
fn place(artifact: &Artifact, wants_tests: bool) -> Option<PathBuf> {
    let package = artifact.manifest_path.parent()?.file_name()?.to_str()?;
    let is = |kind: &str| artifact.target.kind.iter().any(|k| k == kind);
    if LEFT_OUT.contains(&package) || wants_tests != (artifact.profile.test || is("bench")) {
        return None;
    }
    let name = &artifact.target.name;
    if is("bench") {
        return Some(Path::new("bench").join(name));
    }
    if artifact.profile.test {
        // Two packages may both have a test called `cli`, and all have a unit test.
        let kind = if is("test") || is("bin") {
            format!("{package}-{name}")
        } else {
            name.clone()
        };
        return Some(Path::new("deps").join(kind));
    }
    Some(PathBuf::from(name))
}

/// Symbols are most of a Rust executable, and a backtrace of a test names no more
/// than its message does.
fn copy_stripped(from: &Path, to: &Path) -> TaskResult {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    execute(Command::new("strip").arg("-o").arg(to).arg(from))
}

fn copy_folder(from: &Path, to: &Path) -> TaskResult {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> TaskResult<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_folder = entry.file_type()?.is_dir();
        bytes += if is_folder {
            size(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(bytes)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(package: &str, name: &str, kind: &str, test: bool) -> Artifact {
        let line = serde_json::json!({
            "reason": "compiler-artifact",
            "executable": "/t/x",
            "manifest_path": format!("/w/{package}/Cargo.toml"),
            "target": { "name": name, "kind": [kind] },
            "profile": { "test": test },
        });
        serde_json::from_value(line).unwrap()
    }

    #[test]
    fn each_kind_of_program_has_its_place() {
        let place = |a: Artifact, tests| place(&a, tests).map(|p| p.display().to_string());
        let some = |s: &str| Some(s.to_owned());
        assert_eq!(
            place(artifact("host", "asym-gemm", "bin", false), false),
            some("asym-gemm")
        );
        // The program is built again for the tests; once is enough.
        assert_eq!(
            place(artifact("host", "asym-gemm", "bin", false), true),
            None
        );
        assert_eq!(
            place(artifact("host", "asym_gemm", "lib", true), true),
            some("deps/asym_gemm")
        );
        assert_eq!(
            place(artifact("host", "asym-gemm", "bin", true), true),
            some("deps/host-asym-gemm")
        );
        assert_eq!(
            place(artifact("tests", "cli", "test", true), true),
            some("deps/tests-cli")
        );
        assert_eq!(
            place(artifact("benches", "ffn", "bench", true), true),
            some("bench/ffn")
        );
        assert_eq!(
            place(artifact("benches", "ffn", "bench", false), true),
            some("bench/ffn")
        );
        assert_eq!(place(artifact("xtask", "xtask", "bin", true), true), None);
    }
}
