//! The embedded PTX: which text a device gets, and which driver can read it.

use super::error::DriverError;

/// The texts of one kernel family, as (target, PTX) pairs; empty for an unknown name.
pub(super) fn embedded(family: &str) -> &'static [(&'static str, &'static str)] {
    EMBEDDED
        .iter()
        .find(|(name, _)| *name == family)
        .map_or(&[], |(_, texts)| texts)
}

// `EMBEDDED`, written by build.rs.
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Compute capability as PTX names it.
pub(super) fn architecture(capability: (u32, u32)) -> String {
    format!("sm_{}{}", capability.0, capability.1)
}

/// The target that runs best on a device, as an index into `targets`.
///
/// A plain target (`sm_80`) runs on its own and every later architecture; a family
/// target (`sm_100f`) on later minor versions of its major version; an
/// architecture-specific one (`sm_90a`) on that architecture alone. The most specific
/// fit wins, then the newest.
pub(super) fn choose(capability: (u32, u32), targets: &[&str]) -> Option<usize> {
    targets
        .iter()
        .enumerate()
        .filter_map(|(index, target)| {
            let (kind, built_for) = parse_target(target)?;
            let runs = match kind {
                Kind::Specific => built_for == capability,
                Kind::Family => built_for.0 == capability.0 && built_for.1 <= capability.1,
                Kind::Plain => built_for <= capability,
            };
            runs.then_some((kind, built_for, index))
        })
        .max_by_key(|&(kind, built_for, _)| (kind, built_for))
        .map(|(_, _, index)| index)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plain,
    Family,
    Specific,
}

fn parse_target(target: &str) -> Option<(Kind, (u32, u32))> {
    let number = target.strip_prefix("sm_")?;
    let (kind, digits) = match number.as_bytes().last()? {
        b'a' => (Kind::Specific, &number[..number.len() - 1]),
        b'f' => (Kind::Family, &number[..number.len() - 1]),
        _ => (Kind::Plain, number),
    };
    let value: u32 = digits.parse().ok()?;
    Some((kind, (value / 10, value % 10)))
}

/// The error for a device that no embedded target fits.
pub(super) fn unsupported(
    device: &str,
    capability: (u32, u32),
    family: &str,
    targets: &[&str],
) -> DriverError {
    DriverError::UnsupportedArchitecture {
        device: device.to_owned(),
        have: architecture(capability),
        needs: targets.join(" or "),
        kernel: family.to_owned(),
    }
}

/// The PTX ISA version that a text declares in its `.version` line.
pub(super) fn isa_version(text: &str) -> Option<(u32, u32)> {
    let line = text
        .lines()
        .map(str::trim_start)
        .find_map(|line| line.strip_prefix(".version"))?;
    let (major, minor) = line.split_whitespace().next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The lowest CUDA version whose driver reads this PTX ISA version (the release
/// history table of the PTX ISA manual).
pub(super) fn driver_for_isa(isa: (u32, u32)) -> (u32, u32) {
    match isa {
        (..=6, _) => (10, 2),
        (7, minor) => (11, minor.min(8)),
        (8, minor @ 0..=5) => (12, minor),
        (8, 6) => (12, 7),
        (8, 7) => (12, 8),
        (8, _) => (12, 9),
        (major, minor) => (major + 4, minor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: [(u32, u32); 10] = [
        (7, 5),
        (8, 0),
        (8, 6),
        (8, 9),
        (9, 0),
        (10, 0),
        (10, 3),
        (11, 0),
        (12, 0),
        (12, 1),
    ];

    fn chosen<'a>(capability: (u32, u32), targets: &[&'a str]) -> Option<&'a str> {
        choose(capability, targets).map(|index| targets[index])
    }

    #[test]
    fn each_family_has_the_kernels_of_its_operands_and_no_others() {
        use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile, kernel_name};
        for operands in Operands::ALL {
            let texts = embedded(operands.family());
            assert!(!texts.is_empty(), "{operands:?}");
            for (target, text) in texts {
                let mut names = [64, 65].map(|rows| {
                    kernel_name(operands, choose_tile(operands, rows)).expect("a kernel")
                });
                names.sort_unstable();
                let mut found: Vec<&str> = text
                    .split(".entry ")
                    .skip(1)
                    .filter_map(|rest| rest.split('(').next())
                    .collect();
                found.sort_unstable();
                assert_eq!(found, names, "{operands:?} for {target}");
            }
        }
    }

    #[test]
    fn each_device_gets_the_best_target_that_runs_on_it() {
        let both = ["sm_80", "sm_90a"];
        let expected = [
            None,
            Some("sm_80"),
            Some("sm_80"),
            Some("sm_80"),
            Some("sm_90a"),
            Some("sm_80"),
            Some("sm_80"),
            Some("sm_80"),
            Some("sm_80"),
            Some("sm_80"),
        ];
        for (device, want) in DEVICES.into_iter().zip(expected) {
            assert_eq!(chosen(device, &both), want, "{device:?}");
            assert_eq!(
                chosen(device, &["sm_90a", "sm_80"]),
                want,
                "order, {device:?}"
            );
            let hopper_only = (device == (9, 0)).then_some("sm_90a");
            assert_eq!(chosen(device, &["sm_90a"]), hopper_only, "{device:?}");
        }
    }

    #[test]
    fn newer_plain_targets_and_family_targets_win_where_they_run() {
        let all = ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100f", "sm_100a"];
        let want = [
            "sm_75", "sm_80", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_100f", "sm_89", "sm_89",
            "sm_89",
        ];
        for (device, want) in DEVICES.into_iter().zip(want) {
            assert_eq!(chosen(device, &all), Some(want), "{device:?}");
        }
        assert_eq!(chosen((9, 0), &[]), None);
        assert_eq!(chosen((9, 0), &["compute_90", "sm_", "sm_x"]), None);
    }

    #[test]
    fn the_refusal_says_what_the_device_is_and_what_is_needed() {
        let error = unsupported("NVIDIA L4", (8, 9), "wgmma_bf16", &["sm_90a"]);
        assert_eq!(
            error.to_string(),
            "NVIDIA L4 is sm_89: wgmma_bf16 needs sm_90a"
        );
    }

    #[test]
    fn the_declared_isa_version_is_read_past_comments() {
        let text = "// made by 9.9\n//\n\n.version 8.0\n.target sm_90a\n.address_size 64\n";
        assert_eq!(isa_version(text), Some((8, 0)));
        assert_eq!(isa_version(".version\t7.8 // x"), Some((7, 8)));
        assert_eq!(isa_version("no version"), None);
        assert_eq!(isa_version(".version eight"), None);
    }

    #[test]
    fn isa_versions_map_to_the_driver_that_introduced_them() {
        for (isa, driver) in [
            ((6, 5), (10, 2)),
            ((7, 0), (11, 0)),
            ((7, 8), (11, 8)),
            ((8, 0), (12, 0)),
            ((8, 5), (12, 5)),
            ((8, 6), (12, 7)),
            ((8, 7), (12, 8)),
            ((8, 8), (12, 9)),
            ((9, 0), (13, 0)),
            ((9, 1), (13, 1)),
        ] {
            assert_eq!(driver_for_isa(isa), driver, "{isa:?}");
        }
    }
}
