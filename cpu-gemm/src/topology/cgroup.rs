//! Limits that a control group puts on this process, in both versions of the interface.
//!
//! A limit counts wherever it stands between the process's group and the root, so each
//! ancestor is asked and the smallest answer wins. Inside a container the path of the
//! group may not exist under the mounted tree; its existing ancestors then stand for it.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

/// The contents of `/proc/self/cgroup`, empty where there are none.
pub fn membership() -> String {
    fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// CPU time allowed, in CPUs (1.5 is three milliseconds every two), or `None` for no
/// limit.
pub fn cpu_quota(root: &Path, membership: &str) -> Option<f64> {
    let unified = ancestors(root, membership, None)
        .into_iter()
        .filter_map(|group| parse_cpu_max(&read(&group, "cpu.max")?));
    let legacy = ancestors(root, membership, Some("cpu"))
        .into_iter()
        .filter_map(|group| {
            quota_of(
                read(&group, "cpu.cfs_quota_us")?.trim().parse().ok()?,
                read(&group, "cpu.cfs_period_us")?.trim().parse().ok()?,
            )
        });
    unified.chain(legacy).min_by(f64::total_cmp)
}

/// Memory that the process may still take, in bytes, or `None` for no limit. Cached file
/// pages that the system would give up count as free.
pub fn memory_left(root: &Path, membership: &str) -> Option<u64> {
    let unified = ancestors(root, membership, None)
        .into_iter()
        .filter_map(|group| left_in(&group, "memory.max", "memory.current", "inactive_file"));
    let legacy = ancestors(root, membership, Some("memory"))
        .into_iter()
        .filter_map(|group| {
            left_in(
                &group,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        });
    unified.chain(legacy).min()
}

fn left_in(group: &Path, limit: &str, usage: &str, cache: &str) -> Option<u64> {
    // "max" is no number; version 1 writes no limit as a number near 2^63.
    let limit: u64 = read(group, limit)?.trim().parse().ok()?;
    if limit >= 1 << 62 {
        return None;
    }
    let usage: u64 = read(group, usage)?.trim().parse().ok()?;
    let cached: u64 = read(group, "memory.stat")
        .and_then(|text| {
            text.lines().find_map(|line| {
                let (name, value) = line.split_once(' ')?;
                (name == cache).then(|| value.trim().parse().ok())?
            })
        })
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cached)))
}

fn read(group: &Path, file: &str) -> Option<String> {
    fs::read_to_string(group.join(file)).ok()
}

fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota_of(quota.parse().ok()?, period.parse().ok()?)
}

/// `None` for "no limit", which version 1 writes as -1.
fn quota_of(quota: i64, period: i64) -> Option<f64> {
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// The process's group of a version 1 controller (or of version 2) and its ancestors.
fn ancestors(root: &Path, membership: &str, controller: Option<&str>) -> Vec<PathBuf> {
    let found = membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let matches = match controller {
            None => number == "0" && controllers.is_empty(),
            Some(name) => controllers.split(',').any(|c| c == name),
        };
        matches.then_some((controllers, path))
    });
    let Some((controllers, path)) = found else {
        return Vec::new();
    };
    let mounts = match controller {
        None => vec![root.to_owned()],
        // Controllers mounted together have one folder; each name links to it.
        Some(name) => vec![root.join(controllers), root.join(name)],
    };
    let Some(mount) = mounts.into_iter().find(|mount| mount.is_dir()) else {
        return Vec::new();
    };
    let mut groups = vec![mount.clone()];
    let mut group = mount;
    for part in path
        .split('/')
        .filter(|part| !matches!(*part, "" | "." | ".."))
    {
        group.push(part);
        groups.push(group.clone());
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("creatable");
            fs::write(path, text).expect("writable");
        }
        root
    }

    #[test]
    fn version_2_takes_the_smallest_quota_up_to_the_root() {
        let root = tree(&[
            ("a/cpu.max", "150000 100000\n"),
            ("a/b/cpu.max", "max 100000\n"),
            ("a/b/c/cpu.max", "400000 100000\n"),
            ("other/cpu.max", "10000 100000\n"),
        ]);
        let quota = |path| cpu_quota(root.path(), &format!("0::{path}\n"));
        assert_eq!(quota("/a/b/c"), Some(1.5));
        assert_eq!(quota("/a/b"), Some(1.5));
        assert_eq!(quota("/other"), Some(0.1));
        assert_eq!(quota("/"), None);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let root = tree(&[("cpu.max", "765000 100000\n")]);
        for path in ["/", "/../..", "/system.slice/container-0123"] {
            let quota = cpu_quota(root.path(), &format!("0::{path}\n"));
            assert_eq!(quota, Some(7.65), "{path}");
        }
    }

    #[test]
    fn version_1_reads_quota_and_period() {
        let root = tree(&[
            ("cpu,cpuacct/job/cpu.cfs_quota_us", "200000\n"),
            ("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n"),
            ("cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ]);
        let membership = "9:memory:/x\n4:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n";
        assert_eq!(cpu_quota(root.path(), membership), Some(2.0));
        let unlimited = membership.replace("/job", "/");
        assert_eq!(cpu_quota(root.path(), &unlimited), None);
    }

    #[test]
    fn version_1_is_found_under_the_controller_alone() {
        let root = tree(&[
            ("cpu/cpu.cfs_quota_us", "50000\n"),
            ("cpu/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(cpu_quota(root.path(), "4:cpu,cpuacct:/\n"), Some(0.5));
    }

    #[test]
    fn nonsense_and_absence_mean_no_limit() {
        let root = tree(&[("cpu.max", "fast\n"), ("zero/cpu.max", "0 0\n")]);
        assert_eq!(cpu_quota(root.path(), "0::/zero\n"), None);
        assert_eq!(cpu_quota(root.path(), ""), None);
        assert_eq!(cpu_quota(root.path(), "garbage"), None);
        assert_eq!(cpu_quota(Path::new("/no/such/tree"), "0::/a\n"), None);
    }

    #[test]
    fn memory_left_counts_the_file_cache_as_free() {
        let root = tree(&[
            ("a/memory.max", "1000000\n"),
            ("a/memory.current", "600000\n"),
            ("a/memory.stat", "anon 100\ninactive_file 250000\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "600000\n"),
        ]);
        assert_eq!(memory_left(root.path(), "0::/a/b\n"), Some(650_000));
        assert_eq!(memory_left(root.path(), "0::/\n"), None);

        let root = tree(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.usage_in_bytes", "5\n"),
            ("memory/j/memory.limit_in_bytes", "4096\n"),
            ("memory/j/memory.usage_in_bytes", "5000\n"),
        ]);
        assert_eq!(memory_left(root.path(), "3:memory:/\n"), None);
        assert_eq!(memory_left(root.path(), "3:memory:/j\n"), Some(0));
    }
}
