//! What one device computes, in the order in which its weights come.
//!
//! A device's rows lie in the order of its *pieces*. A piece is what one set of kernel
//! launches computes: some shares with the same slices, whose weights lie in one place,
//! the chunk that one copy through the ring brings, HBM, or the bank itself.

use super::{for_each_share, renumbered};
use crate::moe::division::Division;
use crate::moe::layer::residency::Cached;
use crate::moe::layout::Packed;
use crate::transfer::CHUNK_BYTES;
use asym_gemm_formats::bank::BankGeometry;
use asym_gemm_kernels_gpu::args::Group;
use std::ops::Range;

/// Shorter copies do not reach the link's rate, and each chunk has launches of its own.
const MIN_CHUNK_BYTES: usize = 4 << 20;
/// Chunks that a forward is cut into where it can: what the last one brings is computed when
/// the link is idle already.
const CHUNKS: usize = 4;

/// The slots of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::moe::layer) struct RingShape {
    /// Cells of one slot.
    pub(in crate::moe::layer) slot_cells: usize,
}

/// Where a piece's weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::moe::layer) enum Place {
    /// Cells of the device's cache.
    Resident,
    /// Cells of a slot of the ring that was filled ahead.
    Ahead {
        /// The slot.
        slot: usize,
    },
    /// The pinned bank itself: cell = expert.
    Direct,
    /// Cells of the next slot of the ring.
    Ring,
}

/// One copy into a slot of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::moe::layer) struct SlotCopy {
    /// First cell in the slot.
    pub(in crate::moe::layer) cell: usize,
    /// Bytes from the cell's start.
    pub(in crate::moe::layer) offset: usize,
    /// Bytes of the bank.
    pub(in crate::moe::layer) bytes: Range<usize>,
}

/// What one set of launches computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::moe::layer) struct Piece {
    pub(in crate::moe::layer) place: Place,
    /// Slices of the experts.
    pub(in crate::moe::layer) slices: Range<usize>,
    /// Entries of [`DevicePart::groups`].
    pub(in crate::moe::layer) groups: Range<usize>,
    /// The device's rows.
    pub(in crate::moe::layer) rows: Range<usize>,
    /// Most rows of a group.
    pub(in crate::moe::layer) max_rows: usize,
    /// Copies that bring the weights.
    pub(in crate::moe::layer) copies: Vec<SlotCopy>,
}

/// What one device computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::moe::layer) struct DevicePart {
    /// Token of each row.
    pub(in crate::moe::layer) source: Vec<i32>,
    /// [T, top_k]: row of each slot, -1 for one of which the device computes nothing.
    pub(in crate::moe::layer) index: Vec<i32>,
    /// Rows and cell of each share.
    pub(in crate::moe::layer) groups: Vec<Group>,
    pub(in crate::moe::layer) pieces: Vec<Piece>,
    /// Bytes that cross the link.
    pub(in crate::moe::layer) streamed_bytes: usize,
    /// Bytes that are read where they lie in HBM.
    pub(in crate::moe::layer) resident_bytes: usize,
}

impl DevicePart {
    /// The longest gate-up product of a piece, in elements of `columns` a slice.
    pub(in crate::moe::layer) fn largest_product(&self, columns: usize) -> usize {
        let of_piece = |p: &Piece| p.rows.len() * p.slices.len() * columns;
        self.pieces.iter().map(of_piece).max().unwrap_or(0)
    }
}

/// A share of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceShare {
    expert: usize,
    /// Packed rows.
    rows: Range<usize>,
    slices: Range<usize>,
    place: Place,
    /// Cell, where the place is filled already.
    cell: usize,
}

/// What a device holds of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub(in crate::moe::layer) struct Held<'a> {
    /// Whole experts in HBM.
    pub(in crate::moe::layer) cached: &'a Cached,
    /// Whole experts in slots of the ring, (expert, slot, cell).
    pub(in crate::moe::layer) ahead: &'a [(usize, usize, usize)],
    /// Whether kernels read the bank where nothing is held.
    pub(in crate::moe::layer) direct: bool,
}

/// The parts of `held.len()` devices.
///
/// An expert that one device holds is computed there; the slices of the others are dealt out,
/// the odd ones to each device in turn.
pub(in crate::moe::layer) fn device_parts(
    packed: &Packed,
    division: &Division,
    geometry: &BankGeometry,
    ring: RingShape,
    held: &[Held<'_>],
) -> Vec<DevicePart> {
    let mut shares: Vec<Vec<DeviceShare>> = vec![Vec::new(); held.len()];
    let mut turn = 0;
    for_each_share(packed, division, |share, rows| {
        let (expert, gpu) = (share.expert as usize, &share.gpu_slices);
        let slices = gpu.start as usize..gpu.end as usize;
        if slices.is_empty() {
            return;
        }
        let place_on = |held: &Held<'_>| {
            let ahead = held.ahead.iter().find(|&&(e, _, _)| e == expert);
            match (held.cached.cell(expert), ahead) {
                (Some(cell), _) => (Place::Resident, cell),
                (None, Some(&(_, slot, cell))) => (Place::Ahead { slot }, cell),
                (None, None) if held.direct => (Place::Direct, expert),
                (None, None) => (Place::Ring, 0),
            }
        };
        let add = |shares: &mut Vec<DeviceShare>, held, slices: Range<usize>| {
            let (place, cell) = place_on(held);
            if !slices.is_empty() {
                shares.push(DeviceShare {
                    expert,
                    rows: rows.clone(),
                    slices,
                    place,
                    cell,
                });
            }
        };
        let holds = |held: &Held<'_>| matches!(place_on(held).0, Place::Resident);
        if let Some(device) = held.iter().position(holds) {
            add(&mut shares[device], &held[device], slices);
            return;
        }
        let mut next = slices.start;
        let (each, odd) = (slices.len() / held.len(), slices.len() % held.len());
        for (device, held_here) in held.iter().enumerate() {
            let gets_odd = (device + held.len() - turn) % held.len() < odd;
            let end = next + each + usize::from(gets_odd);
            add(&mut shares[device], held_here, next..end);
            next = end;
        }
        turn = (turn + odd) % held.len();
    });
    shares
        .into_iter()
        .map(|shares| device_part(packed, shares, geometry, ring))
        .collect()
}

fn device_part(
    packed: &Packed,
    mut shares: Vec<DeviceShare>,
    geometry: &BankGeometry,
    ring: RingShape,
) -> DevicePart {
    shares.sort_by(|a, b| {
        let key = |s: &DeviceShare| {
            (
                s.place,
                s.slices.start,
                s.slices.end,
                s.expert,
                s.rows.start,
            )
        };
        key(a).cmp(&key(b))
    });
    let bytes_of = |s: &DeviceShare| s.slices.len() * geometry.slice_bytes();
    let streamed: usize = shares
        .iter()
        .filter(|s| s.place == Place::Ring)
        .map(bytes_of)
        .sum();
    let chunk_bytes = (streamed / CHUNKS).clamp(MIN_CHUNK_BYTES, CHUNK_BYTES);
    let mut part = DevicePart::default();
    let mut row_of = vec![-1; packed.rows];
    let mut chunk = Chunk::default();
    for share in &shares {
        let first = part.source.len();
        for row in share.rows.clone() {
            row_of[row] = part.source.len() as i32;
            part.source.push(packed.source_token[row]);
        }
        let fits = |piece: &Piece| {
            piece.place == share.place
                && piece.slices == share.slices
                && (share.place != Place::Ring
                    || chunk.expert == Some(share.expert)
                    || (chunk.bytes + bytes_of(share) <= chunk_bytes
                        && chunk.cells < ring.slot_cells))
        };
        if !part.pieces.last().is_some_and(fits) {
            chunk = Chunk::default();
            part.pieces.push(Piece {
                place: share.place,
                slices: share.slices.clone(),
                groups: part.groups.len()..part.groups.len(),
                rows: first..first,
                max_rows: 0,
                copies: Vec::new(),
            });
        }
        let group = part.groups.len();
        let Some(piece) = part.pieces.last_mut() else {
            continue;
        };
        let cell = match share.place {
            Place::Ring => {
                part.streamed_bytes += chunk.take(share, geometry, &mut piece.copies);
                chunk.cells - 1
            }
            Place::Direct => {
                part.streamed_bytes += bytes_of(share);
                share.cell
            }
            Place::Resident | Place::Ahead { .. } => {
                part.resident_bytes += bytes_of(share);
                share.cell
            }
        };
        part.groups.push(Group {
            start: first as u32,
            end: part.source.len() as u32,
            weight: cell as u32,
            reserved: 0,
        });
        piece.groups.end = group + 1;
        piece.rows.end = part.source.len();
        piece.max_rows = piece.max_rows.max(share.rows.len());
    }
    part.index = renumbered(&packed.output_index, &row_of);
    part
}

/// The chunk that is being put together.
#[derive(Default)]
struct Chunk {
    /// The expert copied last.
    expert: Option<usize>,
    cells: usize,
    bytes: usize,
}

impl Chunk {
    /// Copies a share's weights into the next cell, unless its expert's are there already; the
    /// bytes.
    fn take(
        &mut self,
        share: &DeviceShare,
        geometry: &BankGeometry,
        copies: &mut Vec<SlotCopy>,
    ) -> usize {
        if self.expert == Some(share.expert) {
            return 0;
        }
        let before = self.expert.replace(share.expert);
        let cell = self.cells;
        self.cells += 1;
        self.bytes += share.slices.len() * geometry.slice_bytes();
        let (expert_bytes, slice_bytes) = (geometry.expert_bytes(), geometry.slice_bytes());
        let base = share.expert * expert_bytes;
        let tail = geometry.slices() * slice_bytes;
        let slices = base + share.slices.start * slice_bytes..base + share.slices.end * slice_bytes;
        // The last slices and the tail, which follows them, are one run of bytes.
        let with_tail = share.slices.end == geometry.slices();
        let bytes = match with_tail {
            true => slices.start..base + expert_bytes,
            false => slices.clone(),
        };
        let whole = share.slices.start == 0 && with_tail;
        match copies.last_mut() {
            // Whole neighbours are one run, too.
            Some(last) if whole && before.is_some_and(|e| e + 1 == share.expert) => {
                last.bytes.end = bytes.end;
            }
            _ => copies.push(SlotCopy {
                cell,
                offset: 0,
                bytes: bytes.clone(),
            }),
        }
        if !with_tail && tail < expert_bytes {
            copies.push(SlotCopy {
                cell,
                offset: slices.len(),
                bytes: base + tail..base + expert_bytes,
            });
            return slices.len() + expert_bytes - tail;
        }
        bytes.len()
    }
}
