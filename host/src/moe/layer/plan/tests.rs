//! Parts cover the work once.

use super::*;
use crate::moe::division::{Divide, ExpertLoad, ExpertShare, FixedPolicy, LayerShape};
use crate::moe::layer::residency::Cached;
use crate::moe::layout::{Packed, pack};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::BankGeometry;
use asym_gemm_kernels_gpu::args::Group;
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
