//! From a routing and a division to lists that each side works off.
//!
//! Rows are numbered anew on each side: only those that it computes take memory there. On
//! a device they lie in the order of its *pieces*. A piece is what one set of kernel
//! launches computes: some shares with the same slices, whose weights lie in one place,
//! the chunk that one copy through the ring brings, HBM, or the bank itself.

use super::super::division::Division;
use super::super::layout::Packed;
use super::residency::Cached;
use asym_gemm_formats::bank::BankGeometry;
use asym_gemm_kernels_gpu::args::Group;
use std::ops::Range;

/// Chunks are no longer than this: longer ones only delay the first kernel.
const MAX_CHUNK_BYTES: usize = 16 << 20;
/// Shorter copies do not reach the link's rate, and each chunk has launches of its own.
const MIN_CHUNK_BYTES: usize = 4 << 20;
/// Chunks that a forward is cut into where it can: what the last one brings is computed when
/// the link is idle already.
const CHUNKS: usize = 4;

/// The slots of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingShape {
    /// Cells of one slot.
    pub(super) slot_cells: usize,
}

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

/// Where a piece's weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
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
pub(super) struct SlotCopy {
    /// First cell in the slot.
    pub(super) cell: usize,
    /// Bytes from the cell's start.
    pub(super) offset: usize,
    /// Bytes of the bank.
    pub(super) bytes: Range<usize>,
}

/// What one set of launches computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) place: Place,
    /// Slices of the experts.
    pub(super) slices: Range<usize>,
    /// Entries of [`DevicePart::groups`].
    pub(super) groups: Range<usize>,
    /// The device's rows.
    pub(super) rows: Range<usize>,
    /// Most rows of a group.
    pub(super) max_rows: usize,
    /// Copies that bring the weights.
    pub(super) copies: Vec<SlotCopy>,
}

/// What one device computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DevicePart {
    /// Token of each row.
    pub(super) source: Vec<i32>,
    /// [T, top_k]: row of each slot, -1 for one of which the device computes nothing.
    pub(super) index: Vec<i32>,
    /// Rows and cell of each share.
    pub(super) groups: Vec<Group>,
    pub(super) pieces: Vec<Piece>,
    /// Bytes that cross the link.
    pub(super) streamed_bytes: usize,
    /// Bytes that are read where they lie in HBM.
    pub(super) resident_bytes: usize,
}

impl DevicePart {
    /// The longest gate-up product of a piece, in elements of `columns` a slice.
    pub(super) fn largest_product(&self, columns: usize) -> usize {
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
pub(super) struct Held<'a> {
    /// Whole experts in HBM.
    pub(super) cached: &'a Cached,
    /// Whole experts in slots of the ring, (expert, slot, cell).
    pub(super) ahead: &'a [(usize, usize, usize)],
    /// Whether kernels read the bank where nothing is held.
    pub(super) direct: bool,
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

/// The parts of `held.len()` devices.
///
/// An expert that one device holds is computed there; the slices of the others are dealt out,
/// the odd ones to each device in turn.
pub(super) fn device_parts(
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
    let chunk_bytes = (streamed / CHUNKS).clamp(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES);
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

/// Calls `each` with every share and its packed rows.
fn for_each_share(
    packed: &Packed,
    division: &Division,
    mut each: impl FnMut(&super::super::division::ExpertShare, Range<usize>),
) {
    let mut groups = packed.groups.iter();
    let mut group = groups.next();
    for share in &division.shares {
        while let Some(g) = group.filter(|g| g.expert < share.expert as usize) {
            debug_assert!(g.expert < share.expert as usize);
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

#[cfg(test)]
mod tests {
    use super::super::super::division::{Divide, ExpertLoad, ExpertShare, FixedPolicy, LayerShape};
    use super::super::super::layout::pack;
    use super::*;
    use asym_gemm_formats::WeightFormat;
    use proptest::prelude::*;

    const GEOMETRY: BankGeometry = BankGeometry {
        experts: 12,
        hidden: 64,
        intermediate: 5 * 128 + 3,
        format: WeightFormat::Int8PerRow,
        bias: true,
    };

    fn loads(packed: &Packed) -> Vec<ExpertLoad> {
        packed
            .groups
            .iter()
            .map(|g| ExpertLoad {
                expert: g.expert as u32,
                rows: (g.end - g.start) as u32,
                resident: 6..6,
            })
            .collect()
    }

    fn shape(tokens: usize, devices: usize) -> LayerShape {
        LayerShape {
            slices: 6,
            slice_bytes: GEOMETRY.slice_bytes() as u64,
            hidden: 64,
            tokens: tokens as u32,
            devices: devices as u32,
            x_on_device: false,
        }
    }

    /// Counts, for each slot and slice, on how many sides it is computed; checks that rows name
    /// the slot's token and weights the slot's expert.
    fn count(
        ids: &[i32],
        top_k: usize,
        cpu: &CpuPart,
        devices: &[DevicePart],
        held: &[Held<'_>],
    ) -> Vec<[u32; 6]> {
        let mut seen = vec![[0; 6]; ids.len()];
        for (slot, &row) in cpu.index.iter().enumerate() {
            let Ok(row) = usize::try_from(row) else {
                continue;
            };
            assert_eq!(cpu.tokens[row] as usize, slot / top_k);
            let group = cpu.groups.iter().position(|(_, rows)| rows.contains(&row));
            let group = group.expect("each row is in a group");
            assert_eq!(cpu.groups[group].0 as i32, ids[slot]);
            for slice in cpu.slices[group].clone() {
                seen[slot][slice] += 1;
            }
        }
        for (part, held) in devices.iter().zip(held) {
            for (slot, &row) in part.index.iter().enumerate() {
                let Ok(row) = usize::try_from(row) else {
                    continue;
                };
                assert_eq!(part.source[row] as usize, slot / top_k);
                let piece = part.pieces.iter().find(|p| p.rows.contains(&row));
                let piece = piece.expect("each row is in a piece");
                let holds = |g: &&Group| (g.start..g.end).contains(&(row as u32));
                let group = part.groups[piece.groups.clone()].iter().find(holds);
                let cell = group.expect("each row is in a group").weight as usize;
                let expert = ids[slot] as usize;
                match piece.place {
                    Place::Resident => assert_eq!(held.cached.cell(expert), Some(cell)),
                    Place::Ahead { slot } => assert!(held.ahead.contains(&(expert, slot, cell))),
                    Place::Direct => assert_eq!(cell, expert),
                    Place::Ring => check_copies(piece, cell, expert),
                }
                for slice in piece.slices.clone() {
                    seen[slot][slice] += 1;
                }
            }
        }
        seen
    }

    /// The piece's copies put the expert's slices and tail into the cell.
    fn check_copies(piece: &Piece, cell: usize, expert: usize) {
        let (eb, sb) = (GEOMETRY.expert_bytes(), GEOMETRY.slice_bytes());
        let in_cell = |at: usize| {
            let byte = cell * eb + at;
            piece.copies.iter().find_map(|c| {
                let start = c.cell * eb + c.offset;
                (start..start + c.bytes.len())
                    .contains(&byte)
                    .then(|| c.bytes.start + byte - start)
            })
        };
        let first = expert * eb + piece.slices.start * sb;
        let len = piece.slices.len() * sb;
        let tail = eb - 6 * sb;
        assert_eq!(in_cell(0), Some(first));
        assert_eq!(in_cell(len - 1), Some(first + len - 1));
        assert_eq!(in_cell(len), Some(expert * eb + 6 * sb));
        assert_eq!(in_cell(len + tail - 1), Some((expert + 1) * eb - 1));
    }

    proptest! {
        /// Whatever the division and whatever a device holds, each slot's slices are computed
        /// once, with the right weights, and pieces stay inside the ring.
        #[test]
        fn each_slice_of_each_slot_once(
            raw in proptest::collection::vec(-1i32..12, 0..120),
            top_k in 1usize..5,
            cuts in proptest::collection::vec((0u32..=6, 0u32..=6), 12),
            resident in proptest::collection::vec(any::<bool>(), 12),
            devices in 1usize..4,
            slot_cells in 1usize..5,
            direct in any::<bool>(),
        ) {
            let tokens = raw.len() / top_k;
            let ids = &raw[..tokens * top_k];
            let packed = pack(ids, tokens, top_k, 12, 1).unwrap();
            // Each expert's rows in two shares where there are two rows.
            let mut shares = Vec::new();
            for g in &packed.groups {
                let (rows, (a, b)) = ((g.end - g.start) as u32, cuts[g.expert]);
                let half = rows / 2;
                if half > 0 {
                    shares.push(ExpertShare::split(g.expert as u32, 0..half, a, 6));
                }
                shares.push(ExpertShare::split(g.expert as u32, half..rows, b, 6));
            }
            let division = Division { shares };
            division.validate(&loads(&packed), &shape(tokens, devices)).unwrap();
            let mut cached: Vec<Cached> = (0..devices).map(|_| Cached::new(12, 4)).collect();
            for (expert, _) in resident.iter().enumerate().filter(|&(_, &r)| r) {
                let cached = &mut cached[expert % devices];
                cached.place(expert / devices % 4, expert);
            }
            let ahead = [(3, 1, 0), (7, 0, 2)];
            let held: Vec<Held<'_>> = cached
                .iter()
                .map(|cached| Held { cached, ahead: &ahead, direct })
                .collect();
            let ring = RingShape { slot_cells };
            let cpu = cpu_part(&packed, &division);
            let parts = device_parts(&packed, &division, &GEOMETRY, ring, &held);
            prop_assert_eq!(parts.len(), devices);
            let seen = count(ids, top_k, &cpu, &parts, &held);
            for (slot, counts) in seen.iter().enumerate() {
                let wanted = u32::from(ids[slot] >= 0);
                prop_assert_eq!(counts, &[wanted; 6], "slot {}", slot);
            }
            for piece in parts.iter().flat_map(|p| &p.pieces) {
                prop_assert!(!piece.rows.is_empty() && !piece.groups.is_empty());
                for copy in &piece.copies {
                    let end = copy.cell * GEOMETRY.expert_bytes() + copy.offset + copy.bytes.len();
                    prop_assert!(end <= slot_cells * GEOMETRY.expert_bytes());
                }
            }
        }
    }

    #[test]
    fn bytes_are_counted_once_an_expert() {
        let ids: Vec<i32> = (0..8).chain(0..8).collect();
        let packed = pack(&ids, 2, 8, 12, 1).unwrap();
        let division = FixedPolicy::Fraction(0.5).divide(&loads(&packed), &shape(2, 1));
        let cached = Cached::new(12, 0);
        let held = [Held {
            cached: &cached,
            ahead: &[],
            direct: false,
        }];
        let ring = RingShape { slot_cells: 4 };
        let parts = device_parts(&packed, &division, &GEOMETRY, ring, &held);
        let tail = GEOMETRY.expert_bytes() - 6 * GEOMETRY.slice_bytes();
        let an_expert = 3 * GEOMETRY.slice_bytes() + tail;
        assert_eq!(parts[0].streamed_bytes, 8 * an_expert);
        assert_eq!(parts[0].source.len(), 16);
        assert_eq!(parts[0].pieces.len(), 2, "four cells a slot");
        let whole = FixedPolicy::GpuOnly.divide(&loads(&packed), &shape(2, 1));
        let parts = device_parts(&packed, &whole, &GEOMETRY, ring, &held);
        let copies: Vec<usize> = parts[0].pieces.iter().map(|p| p.copies.len()).collect();
        assert_eq!(copies, [1, 1], "neighbours are copied together");
    }
}
