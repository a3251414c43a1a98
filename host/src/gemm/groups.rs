//! Which rows use which weights: lists of the host, and lists that only the device knows.

use super::GemmError;
use crate::driver::{DeviceBuffer, Gpu};
use asym_gemm_kernels_gpu::args::Group;
use asym_gemm_kernels_gpu::schedule::group_tiles;
use asym_gemm_kernels_gpu::tile::Tile;

/// Rows `start..end` of A and D use weight matrix `weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRange {
    /// Index of the weight matrix.
    pub weight: usize,
    /// First row.
    pub start: usize,
    /// One past the last row.
    pub end: usize,
}

/// Groups that kernels read when they run, so that a recorded graph can replay with others.
///
/// Group i is words `4i..4i + 4` of the list: first row, one past the last row, weight, 0. A
/// group without rows, with rows past A's or with a weight that does not exist (such as
/// `u32::MAX`) is skipped. Groups must not share rows.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGroups<'a> {
    words: &'a DeviceBuffer<u32>,
    count: usize,
    max_rows: usize,
}

impl<'a> DeviceGroups<'a> {
    /// The first `count` groups of `words`, for none of which more than `max_rows` rows are
    /// expected: kernels are chosen for that many, and any number is computed.
    ///
    /// # Errors
    /// If the list is shorter.
    pub fn new(
        words: &'a DeviceBuffer<u32>,
        count: usize,
        max_rows: usize,
    ) -> Result<Self, GemmError> {
        if words.len() / 4 < count || u32::try_from(count).is_err() {
            return Err(GemmError::Shape {
                what: "groups",
                reason: format!("{count} groups of 4 words in a list of {}", words.len()),
            });
        }
        Ok(Self {
            words,
            count,
            max_rows,
        })
    }

    pub(super) fn check_on(&self, gpu: &Gpu) -> Result<(), GemmError> {
        match self.words.is_on(gpu) {
            true => Ok(()),
            false => Err(GemmError::OtherGpu { what: "groups" }),
        }
    }

    pub(super) fn listed(&self) -> Listed<'a> {
        Listed {
            address: self.words.as_raw(),
            count: self.count,
            rows: Rows::AtMost(self.max_rows),
        }
    }
}

/// Groups of one launch, in device memory.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a> {
    pub(super) address: u64,
    pub(super) count: usize,
    pub(super) rows: Rows<'a>,
}

/// What the host knows of a launch's groups.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    Known(&'a [Group]),
    AtMost(usize),
}

impl Rows<'_> {
    /// Most rows of a group.
    pub(super) fn max(&self) -> usize {
        match self {
            Self::Known(groups) => groups
                .iter()
                .map(|g| (g.end - g.start) as usize)
                .max()
                .unwrap_or(0),
            Self::AtMost(rows) => *rows,
        }
    }

    /// Most tiles for D with `n` columns.
    pub(super) fn tiles(&self, n: usize, tile: Tile) -> u64 {
        match self {
            Self::Known(groups) => tiles(groups, n, tile),
            Self::AtMost(_) => u64::MAX,
        }
    }
}

/// Number of tiles of `groups` for D with `n` columns.
pub(crate) fn tiles(groups: &[Group], n: usize, tile: Tile) -> u64 {
    groups
        .iter()
        .map(|g| u64::from(group_tiles(g.end - g.start, n as u32, tile.m, tile.n)))
        .sum()
}

/// The non-empty groups by ascending weight; an error if one is out of range or two share a row.
pub(super) fn check_groups(
    groups: &[GroupRange],
    rows: usize,
    weights: usize,
) -> Result<Vec<Group>, GemmError> {
    for (index, g) in groups.iter().enumerate() {
        let reason = if g.start > g.end || g.end > rows {
            format!("rows {}..{} of {rows}", g.start, g.end)
        } else if g.weight >= weights {
            format!("weight {} of {weights}", g.weight)
        } else {
            continue;
        };
        return Err(GemmError::Group { index, reason });
    }
    let mut by_row: Vec<usize> = (0..groups.len())
        .filter(|&i| groups[i].start < groups[i].end)
        .collect();
    by_row.sort_unstable_by_key(|&i| groups[i].start);
    for pair in by_row.windows(2) {
        let (before, after) = (groups[pair[0]], groups[pair[1]]);
        if after.start < before.end {
            return Err(GemmError::Group {
                index: pair[1],
                reason: format!(
                    "starts at row {} inside rows {}..{} of another group",
                    after.start, before.start, before.end
                ),
            });
        }
    }
    let mut out: Vec<Group> = by_row
        .iter()
        .map(|&i| groups[i])
        .map(|g| Group {
            start: g.start as u32,
            end: g.end as u32,
            weight: g.weight as u32,
            reserved: 0,
        })
        .collect();
    out.sort_by_key(|g| g.weight);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(weight: usize, start: usize, end: usize) -> GroupRange {
        GroupRange { weight, start, end }
    }

    #[test]
    fn groups_are_sorted_by_weight_and_empty_ones_dropped() {
        let got = check_groups(&[range(2, 0, 3), range(1, 5, 5), range(0, 3, 9)], 9, 3).unwrap();
        let got: Vec<_> = got.iter().map(|g| (g.weight, g.start, g.end)).collect();
        assert_eq!(got, [(0, 3, 9), (2, 0, 3)]);
    }

    #[test]
    fn bad_groups_are_named() {
        for (groups, bad) in [
            (vec![range(0, 0, 2), range(0, 3, 2)], 1),
            (vec![range(0, 0, 10)], 0),
            (vec![range(3, 0, 1)], 0),
            (vec![range(0, 0, 4), range(1, 3, 5)], 1),
        ] {
            match check_groups(&groups, 9, 3) {
                Err(GemmError::Group { index, .. }) => assert_eq!(index, bad),
                other => panic!("{groups:?}: {other:?}"),
            }
        }
    }
}
