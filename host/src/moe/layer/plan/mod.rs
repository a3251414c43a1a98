//! From a routing and a division to lists that each side works off.
//!
//! Rows are numbered anew on each side: only those that it computes take memory there.

#[cfg(feature = "cuda")]
mod device;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use super::super::division::{Division, ExpertShare};
use super::super::layout::Packed;
#[cfg(feature = "cuda")]
pub(super) use device::{DevicePart, Held, Piece, Place, RingShape, device_parts};
use std::ops::Range;

/// What the CPU computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CpuPart {
    /// Expert and its rows.
    pub(super) groups: Vec<(usize, Range<usize>)>,
    /// Slices of each group.
    pub(super) slices: Vec<Range<usize>>,
    /// Token of each row.
    pub(super) tokens: Vec<u32>,
    /// [T, top_k]: row of each slot, -1 for one of which the CPU computes nothing.
    pub(super) index: Vec<i32>,
}

/// The CPU's part.
pub(super) fn cpu_part(packed: &Packed, division: &Division) -> CpuPart {
    let mut part = CpuPart::default();
    let mut row_of = vec![-1; packed.rows];
    for_each_share(packed, division, |share, rows| {
        if share.cpu_slices.is_empty() {
            return;
        }
        let first = part.tokens.len();
        for row in rows.clone() {
            row_of[row] = part.tokens.len() as i32;
            part.tokens.push(packed.source_token[row] as u32);
        }
        part.groups
            .push((share.expert as usize, first..part.tokens.len()));
        part.slices
            .push(share.cpu_slices.start as usize..share.cpu_slices.end as usize);
    });
    part.index = renumbered(&packed.output_index, &row_of);
    part
}

/// Calls `each` with every share and its packed rows.
fn for_each_share(
    packed: &Packed,
    division: &Division,
    mut each: impl FnMut(&ExpertShare, Range<usize>),
) {
    let mut groups = packed.groups.iter();
    let mut group = groups.next();
    for share in &division.shares {
        while group.is_some_and(|g| g.expert < share.expert as usize) {
            group = groups.next();
        }
        if let Some(g) = group {
            let rows = g.start + share.rows.start as usize..g.start + share.rows.end as usize;
            each(share, rows);
        }
    }
}

/// The row numbers of one side in place of packed ones.
fn renumbered(output_index: &[i32], row_of: &[i32]) -> Vec<i32> {
    let side = |&row: &i32| usize::try_from(row).map_or(-1, |row| row_of[row]);
    output_index.iter().map(side).collect()
}
