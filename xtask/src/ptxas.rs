//! Assembling PTX with NVIDIA's `ptxas`, which knows what the driver will do with it.
//!
//! Nothing needs ptxas to build or run. Where it is found, kernels that spill
//! registers, use a stack or have their wgmmas serialised are refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::TaskResult;

/// Path of ptxas, where it is not on PATH.
pub(crate) const VARIABLE: &str = "ASYM_GEMM_PTXAS";

/// ptxas says with C7519 that it inserted a `wgmma.fence`, which costs nothing;
/// its neighbours say that it serialised wgmmas or ignored `setmaxnreg`.
const HARMLESS: &str = "C7519";

/// What ptxas says of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Named barriers.
    pub(crate) barriers: u32,
    /// Bytes of static shared memory.
    pub(crate) shared_bytes: u32,
}

/// An assembler.
pub(crate) struct Ptxas {
    path: PathBuf,
    /// `V13.0.88`.
    pub(crate) version: String,
}

impl Ptxas {
    /// The one named by `ASYM_GEMM_PTXAS`, on PATH, in the active Python environment
    /// (package `nvidia-cuda-nvcc`), or of an installed toolkit.
    pub(crate) fn find() -> TaskResult<Option<Self>> {
        if let Some(path) = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
            return Self::at(PathBuf::from(path)).map(Some);
        }
        let on_path = std::env::var_os("PATH").into_iter().flat_map(|paths| {
            std::env::split_paths(&paths)
                .map(|folder| folder.join("ptxas"))
                .collect::<Vec<_>>()
        });
        let in_venv = std::env::var_os("VIRTUAL_ENV")
            .into_iter()
            .flat_map(|venv| in_venv(Path::new(&venv)));
        let toolkit = std::iter::once(PathBuf::from("/usr/local/cuda/bin/ptxas"));
        on_path
            .chain(in_venv)
            .chain(toolkit)
            .find(|path| path.is_file())
            .map(Self::at)
            .transpose()
    }

    fn at(path: PathBuf) -> TaskResult<Self> {
        let output = Command::new(&path)
            .arg("--version")
            .output()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .split([',', ' ', '\n'])
            .find(|word| word.starts_with('V') && word.contains('.'))
            .ok_or_else(|| format!("{} is not ptxas", path.display()))?
            .to_owned();
        Ok(Self { path, version })
    }

    /// Assembles a PTX file, and returns each kernel's usage by name.
    pub(crate) fn assemble(&self, ptx: &Path, target: &str) -> TaskResult<BTreeMap<String, Usage>> {
        let output = Command::new(&self.path)
            .args(["-v", "-arch", target, "-o", "/dev/null"])
            .arg(ptx)
            .output()
            .map_err(|error| format!("{}: {error}", self.path.display()))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(format!("ptxas refuses {}:\n{log}", ptx.display()).into());
        }
        let (usage, complaints) = read_log(&log);
        if complaints.is_empty() {
            Ok(usage)
        } else {
            Err(format!("{}:\n  {}", ptx.display(), complaints.join("\n  ")).into())
        }
    }
}

/// `lib/python3.*/site-packages/nvidia/cu*/bin/ptxas` of a Python environment.
fn in_venv(venv: &Path) -> Vec<PathBuf> {
    let children = |folder: PathBuf| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    children(venv.join("lib"))
        .into_iter()
        .flat_map(|python| children(python.join("site-packages/nvidia")))
        .map(|package| package.join("bin/ptxas"))
        .collect()
}

/// Usage by kernel, and the lines that must not be there.
fn read_log(log: &str) -> (BTreeMap<String, Usage>, Vec<String>) {
    let mut usage = BTreeMap::new();
    let mut complaints = Vec::new();
    let mut kernel = None;
    let mut function = "";
    for line in log.lines() {
        let text = line.split_once(" : ").map_or(line, |(_, text)| text).trim();
        if let Some(name) = text.strip_prefix("Compiling entry function '") {
            kernel = name.split('\'').next();
        } else if let Some(name) = text.strip_prefix("Function properties for ") {
            function = name;
        } else if text.contains("bytes stack frame") {
            if text.split(", ").any(|part| !part.starts_with("0 bytes")) {
                complaints.push(format!("{function}: {text}"));
            }
        } else if text.contains("(C75") && !text.contains(HARMLESS) {
            complaints.push(text.to_owned());
        } else if text.starts_with("Used ")
            && let Some(kernel) = kernel.take()
        {
            usage.insert(kernel.to_owned(), used(text));
        }
    }
    (usage, complaints)
}

/// `Used 168 registers, used 2 barriers, 1024 bytes smem, 400 bytes cmem[0]`.
fn used(text: &str) -> Usage {
    let mut usage = Usage::default();
    for part in text.split(", ") {
        let mut words = part
            .trim_start_matches("Used ")
            .trim_start_matches("used ")
            .split(' ');
        let number = words.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        match words.next_back() {
            Some("registers") => usage.registers = number,
            Some("barriers") => usage.barriers = number,
            Some("smem") => usage.shared_bytes = number,
            _ => {}
        }
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 25.035 ms
";

    #[test]
    fn usage_is_read() {
        let (usage, complaints) = read_log(LOG);
        assert_eq!(complaints, [""; 0]);
        let want = Usage {
            registers: 168,
            barriers: 2,
            shared_bytes: 1024,
        };
        assert_eq!(usage["gemm"], want);
    }

    #[test]
    fn spills_stacks_and_serialisation_are_complaints() {
        for (from, to) in [
            ("0 bytes spill stores", "16 bytes spill stores"),
            ("0 bytes stack frame", "64 bytes stack frame"),
            (
                "Compile time",
                "(C7510) Potential Performance Loss: wgmma.mma_async",
            ),
            ("Compile time", "(C7508) setmaxnreg ignored"),
        ] {
            let (_, complaints) = read_log(&LOG.replace(from, to));
            assert_eq!(complaints.len(), 1, "{to}");
        }
        let (_, complaints) = read_log(&LOG.replace("Compile time", "(C7519) fence inserted"));
        assert_eq!(complaints, [""; 0]);
    }
}
