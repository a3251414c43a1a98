//! Tests that cannot run here say so, and fail where they must run.
//!
//! [`skip!`](crate::skip!) writes two lines to standard error, past the capture that hides what
//! passing tests print:
//!
//! ```text
//! SKIP suite::some_test: needs a GPU of compute capability 9.0
//! SKIPPED 3
//! ```
//!
//! where 3 is the number of skips in this process so far. On a machine that is meant to
//! run everything, `REQUIRE_GPU=1` and `REQUIRE_AMX=1` turn the skips of that kind into
//! failures.

use std::io::Write;
use std::sync::Mutex;

/// What a test needs and does not find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hardware {
    /// A GPU (and driver) that the test's kernels run on.
    Gpu,
    /// A CPU with AMX that the process may use.
    Amx,
}

impl Hardware {
    /// The environment variable that forbids skips of this kind.
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Gpu => "REQUIRE_GPU",
            Self::Amx => "REQUIRE_AMX",
        }
    }

    /// Whether tests that need this must run: the variable is set to anything but
    /// nothing or `0`.
    pub fn required(self) -> bool {
        std::env::var_os(self.variable()).is_some_and(|value| !value.is_empty() && value != "0")
    }
}

/// Whether GPU tests must run (`REQUIRE_GPU=1`).
pub fn require_gpu() -> bool {
    Hardware::Gpu.required()
}

/// Whether AMX tests must run (`REQUIRE_AMX=1`).
pub fn require_amx() -> bool {
    Hardware::Amx.required()
}

/// Held while the lines are written, so that the counts appear in order.
static SKIPPED: Mutex<usize> = Mutex::new(0);

/// Skips in this process so far.
pub fn skipped() -> usize {
    *SKIPPED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Reports that `test` does not run for want of `hardware`; the caller then returns.
///
/// # Panics
/// If the environment demands the hardware.
#[track_caller]
pub fn skip(hardware: Hardware, test: &str, reason: &str) {
    assert!(
        !hardware.required(),
        "{test} must not be skipped with {} set: {reason}",
        hardware.variable()
    );
    let mut skipped = SKIPPED
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    *skipped += 1;
    let lines = format!("SKIP {test}: {reason}\nSKIPPED {skipped}\n");
    // The handle and not `eprint!`, which the test harness captures. A closed stderr is
    // no reason to fail: the count stands.
    let _ = std::io::stderr().write_all(lines.as_bytes());
}

/// [`skip`] for want of a GPU.
///
/// # Panics
/// If `REQUIRE_GPU` is set.
#[track_caller]
pub fn skip_gpu(test: &str, reason: &str) {
    skip(Hardware::Gpu, test, reason);
}

/// [`skip`] for want of AMX.
///
/// # Panics
/// If `REQUIRE_AMX` is set.
#[track_caller]
pub fn skip_amx(test: &str, reason: &str) {
    skip(Hardware::Amx, test, reason);
}

/// Skips the test it stands in: reports its path and the reason, and returns `()`.
///
/// ```
/// use asym_gemm_testkit::skip;
///
/// fn needs_a_gpu() {
///     let found: Option<u32> = None;
///     let Some(_device) = found else {
///         skip!(gpu, "no device among {}", 0);
///     };
/// }
/// # if !skip::require_gpu() { needs_a_gpu() }
/// ```
///
/// # Panics
/// If `REQUIRE_GPU` (`gpu`) or `REQUIRE_AMX` (`amx`) is set.
#[macro_export]
macro_rules! skip {
    (gpu, $($reason:tt)+) => {
        $crate::skip!(@ $crate::skip::Hardware::Gpu, $($reason)+)
    };
    (amx, $($reason:tt)+) => {
        $crate::skip!(@ $crate::skip::Hardware::Amx, $($reason)+)
    };
    (@ $hardware:expr, $($reason:tt)+) => {{
        fn here() {}
        let test = ::std::any::type_name_of_val(&here).trim_end_matches("::here");
        $crate::skip::skip($hardware, test, &::std::format!($($reason)+));
        return;
    }};
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Output};

    /// A skip as tests write it, run by the tests below in a process of its own.
    #[test]
    #[ignore = "run by the other tests of this module"]
    fn probe() {
        println!("captured");
        eprintln!("captured");
        skip!(amx, "no tiles on {} cores", 2);
    }

    /// Runs `probe` as `cargo test` would, with its output captured.
    fn run_probe(variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "skip::tests::probe", "--ignored"]);
        for hardware in [Hardware::Gpu, Hardware::Amx] {
            command.env_remove(hardware.variable());
        }
        command.env_remove("RUST_TEST_NOCAPTURE");
        command.envs(variables.iter().copied());
        command.output().unwrap()
    }

    #[test]
    fn a_skip_is_seen_although_output_is_captured() {
        for variables in [&[][..], &[("REQUIRE_GPU", "1")], &[("REQUIRE_AMX", "0")]] {
            let output = run_probe(variables);
            let stdout = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{stdout}");
            assert!(stdout.contains("1 passed"), "{stdout}");
            assert!(!stdout.contains("captured"), "{stdout}");
            assert_eq!(
                String::from_utf8(output.stderr).unwrap(),
                "SKIP asym_gemm_testkit::skip::tests::probe: no tiles on 2 cores\nSKIPPED 1\n"
            );
        }
    }

    #[test]
    fn a_demanded_test_fails() {
        for value in ["1", "true"] {
            let output = run_probe(&[("REQUIRE_AMX", value)]);
            let stdout = String::from_utf8(output.stdout).unwrap();
            assert!(!output.status.success(), "{stdout}");
            assert!(
                stdout.contains("must not be skipped with REQUIRE_AMX set"),
                "{stdout}"
            );
        }
    }
}
