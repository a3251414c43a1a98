//! What a record needs to be of use later: where and from what it was made.

use std::process::Command;

use crate::system::CpuInfo;

/// Environment variable that names the commit where there is no repository to ask.
pub const COMMIT_VARIABLE: &str = "ASYM_GEMM_COMMIT";

/// The machine and the source of a record.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Machine {
    /// The processor's name for itself.
    pub cpu: String,
    /// Threads used.
    pub threads: usize,
    /// The commit, with `-dirty` after it if files differ; `unknown` where nobody says.
    pub commit: String,
}

impl Machine {
    /// This machine and the commit from `ASYM_GEMM_COMMIT`, else from the repository of the
    /// current folder.
    pub fn read(threads: usize) -> Self {
        let named = std::env::var(COMMIT_VARIABLE).ok();
        Self {
            cpu: CpuInfo::read().model,
            threads,
            commit: named
                .filter(|commit| !commit.is_empty())
                .or_else(commit_of_repository)
                .unwrap_or_else(|| "unknown".to_owned()),
        }
    }
}

fn commit_of_repository() -> Option<String> {
    let output = Command::new("git")
        .args([
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
            "--exclude=*",
        ])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let commit = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!commit.is_empty()).then_some(commit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_its_machine() {
        let machine = Machine::read(3);
        assert_eq!(machine.threads, 3);
        assert!(!machine.cpu.is_empty() && !machine.commit.is_empty());
    }
}
