//! `cargo xtask check`: everything that must pass.

use std::process::Command;
use std::time::{Duration, Instant};

use cuda_builder::{DeviceToolchain, Library};

use crate::TaskResult;
use crate::workspace::{cargo, is_on, root, run as execute, target_dir};
use crate::{downstream, ptx};

/// Options of `cargo xtask check`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only these steps.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(STEPS.map(|step| step.0)))]
    steps: Vec<String>,
}

/// A name and what to do.
type Step = (&'static str, fn() -> TaskResult);

/// In order of cost, cheap ones first.
///
/// All use the release profile: it shares dependencies with the tests, and leaves
/// procedural macros unoptimised, which is most of the time of a check.
const STEPS: [Step; 8] = [
    ("fmt", fmt),
    ("clippy", clippy),
    ("doc", doc),
    ("test", test),
    ("ptx", ptx::check),
    ("downstream-cpu", downstream::cpu),
    ("downstream-cuda", downstream::cuda),
    ("aarch64", aarch64),
];

/// Runs all steps, also after a failure, and lists the results.
pub(crate) fn run(options: &Options) -> TaskResult {
    let chosen = |name: &str| options.steps.is_empty() || options.steps.iter().any(|s| s == name);
    let mut results = Vec::new();
    for (name, step) in STEPS.into_iter().filter(|(name, _)| chosen(name)) {
        println!("== {name}");
        let start = Instant::now();
        let result = step();
        if let Err(error) = &result {
            println!("error: {error}");
        }
        println!("== {name}: {}", line(result.is_ok(), start.elapsed()));
        results.push((name, result.is_ok(), start.elapsed()));
    }
    println!("\n== summary");
    for (name, passed, time) in &results {
        println!("{name:16} {}", line(*passed, *time));
    }
    let failed: Vec<&str> = results.iter().filter(|r| !r.1).map(|r| r.0).collect();
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("failed: {}", failed.join(", ")).into())
    }
}

fn line(passed: bool, time: Duration) -> String {
    format!(
        "{} {:6.1} s",
        if passed { "ok    " } else { "FAILED" },
        time.as_secs_f64()
    )
}

/// cargo with these arguments.
fn words(arguments: &str) -> Command {
    let mut command = cargo();
    command.args(arguments.split(' '));
    command
}

fn fmt() -> TaskResult {
    execute(&mut words("fmt --all --check"))
}

fn clippy() -> TaskResult {
    execute(&mut words(
        "clippy --release --workspace --all-targets -- -D warnings",
    ))
}

fn doc() -> TaskResult {
    execute(words("doc --release --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings"))
}

/// The README's command.
fn test() -> TaskResult {
    execute(&mut words("test --workspace --release"))
}

/// What runs on an Arm server.
const AARCH64_PACKAGES: [&str; 4] = [
    "asym-gemm-formats",
    "asym-gemm-cpu",
    "asym-gemm-kernels-gpu",
    "asym-gemm",
];

/// Arm servers are where NVLink-C2C is. A stable rustup toolchain here need not
/// have the target, so the device toolchain compiles std from its source.
fn aarch64() -> TaskResult {
    let toolchain = match DeviceToolchain::find() {
        Ok(toolchain) if toolchain.library() == Library::Source => toolchain,
        _ if is_on("REQUIRE_PTX") => return Err("no toolchain with the library source".into()),
        _ => {
            println!("skipped: no toolchain with the library source");
            return Ok(());
        }
    };
    execute(
        toolchain
            .command()
            .current_dir(root())
            .args("check --release -Zbuild-std=std --target aarch64-unknown-linux-gnu".split(' '))
            .args(AARCH64_PACKAGES.iter().flat_map(|package| ["-p", package]))
            .arg("--target-dir")
            .arg(target_dir().join("aarch64")),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::TaskResult;
    use crate::workspace::{cargo, output, root};

    /// docs/dependencies.md gives a reason for every dependency.
    #[test]
    fn dependencies_are_explained() -> TaskResult {
        let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
        let metadata: serde_json::Value = serde_json::from_str(&text)?;
        let used: BTreeSet<String> = metadata["packages"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|package| package["dependencies"].as_array().into_iter().flatten())
            .filter(|dependency| dependency["path"].is_null())
            .filter_map(|dependency| dependency["name"].as_str().map(str::to_owned))
            .collect();
        let document = std::fs::read_to_string(root().join("docs/dependencies.md"))?;
        let explained: BTreeSet<String> = document
            .lines()
            .filter(|line| line.starts_with("| `"))
            .filter_map(|line| line.split('|').nth(1))
            .flat_map(|cell| cell.split(','))
            .map(|name| name.trim().trim_matches('`').to_owned())
            .collect();
        let missing: Vec<_> = used.difference(&explained).collect();
        assert!(
            missing.is_empty(),
            "docs/dependencies.md does not explain {missing:?}"
        );
        Ok(())
    }
}
