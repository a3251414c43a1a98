//! Invented machines for tests: trees like `/sys/devices/system`.

use std::fs;
use std::path::Path;

pub(super) struct Tree(tempfile::TempDir);

impl Tree {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(super) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn file(self, path: &str, text: &str) -> Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("has a folder")).expect("creatable");
        fs::write(path, text).expect("writable");
        self
    }

    /// CPUs 0, 1, ... with these siblings.
    pub(super) fn siblings(mut self, file: &str, lists: &[&str]) -> Self {
        for (cpu, list) in lists.iter().enumerate() {
            self = self.file(
                &format!("cpu/cpu{cpu}/topology/{file}"),
                &format!("{list}\n"),
            );
        }
        self
    }

    pub(super) fn node(self, id: u32, cpus: &str, kib: u64) -> Self {
        self.file(&format!("node/node{id}/cpulist"), &format!("{cpus}\n"))
            .file(
                &format!("node/node{id}/meminfo"),
                &format!("Node {id} MemTotal: {kib} kB\n"),
            )
    }
}
