//! A process of its own with the driver library without a device (`fake_libcuda/lib.rs`), which the
//! test program chooses as `FAKE_DRIVER`: `before_12` or `from_12`.
#![allow(dead_code, reason = "each test program uses a part")]

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use asym_gemm::driver::LIBRARY_VARIABLE;

const CHILD: &str = "ASYM_GEMM_TEST_CHILD";

/// Runs `body` in a fresh process of this test program with the given environment.
pub(crate) fn isolated(test: &str, environment: &[(&str, &str)], body: fn()) {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        return body();
    }
    let program = env::current_exe().expect("a test program");
    let output = Command::new(program)
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, test)
        .envs(environment.iter().copied())
        .output()
        .expect("the test program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `body` with the fake driver; where no rustc can build it (a bundle on a machine
/// without Rust), says so.
pub(crate) fn with_fake_driver(test: &str, body: fn()) {
    with_fake_driver_and(test, &[], body);
}

/// As [`with_fake_driver`] with more environment.
pub(crate) fn with_fake_driver_and(test: &str, environment: &[(&str, &str)], body: fn()) {
    if env::var(CHILD).is_err() && Command::new(rustc()).arg("--version").output().is_err() {
        // Straight to the stream: libtest captures the print macros.
        let line = format!("SKIP {test}: no rustc to build the fake driver with\n");
        std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).expect("stderr");
        return;
    }
    let library = [(LIBRARY_VARIABLE, fake_library())];
    isolated(test, &[&library, environment].concat(), body);
}

fn rustc() -> std::ffi::OsString {
    env::var_os("RUSTC").unwrap_or("rustc".into())
}

/// Builds the fake driver once.
pub(crate) fn fake_library() -> &'static str {
    if env::var(CHILD).is_ok() {
        return "";
    }
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let output = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("libfakecuda-{}.so", std::process::id()));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_libcuda/lib.rs");
        let status = Command::new(rustc())
            .args(["--edition", "2024", "--crate-type", "cdylib"])
            .args(["--cfg", super::FAKE_DRIVER, "-o"])
            .arg(&output)
            .arg(source)
            .status()
            .expect("rustc runs");
        assert!(status.success(), "the fake driver does not build");
        output.to_str().expect("a plain path").to_owned()
    })
}

#[derive(Clone, Copy)]
pub(crate) enum Knob {
    LiveObjects,
    RefuseAllocation,
    RefuseRegister,
    RefuseHostAlloc,
    Retained,
    LaunchSum,
    FloatBits,
    Capturing,
    ModulesLoaded,
    SharedLimit,
    CallsAfterFork,
    EveryKernel,
    FailIn,
}

/// The fake driver's side door.
pub(crate) struct Fake {
    library: libloading::Library,
}

impl Fake {
    pub(crate) fn open() -> Self {
        let path = env::var_os(LIBRARY_VARIABLE).expect("set by the parent");
        // SAFETY: our own library; its initialisers do nothing.
        let library = unsafe { libloading::Library::new(path) }.expect("just built");
        Self { library }
    }

    pub(crate) fn get(&self, knob: Knob) -> i64 {
        // SAFETY: the fake defines fake_get with this type.
        unsafe {
            let call: libloading::Symbol<'_, extern "C" fn(usize) -> i64> =
                self.library.get(b"fake_get").expect("defined");
            call(knob as usize)
        }
    }

    pub(crate) fn set(&self, knob: Knob, value: i64) {
        // SAFETY: the fake defines fake_set with this type.
        unsafe {
            let call: libloading::Symbol<'_, extern "C" fn(usize, i64)> =
                self.library.get(b"fake_set").expect("defined");
            call(knob as usize, value);
        }
    }
}
