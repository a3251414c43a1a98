//! The grouped GEMM call: validation, transfer, launches.

use super::launch::{Launch, Launcher, map_a, map_rows};
use super::plan::choose_transfer;
use super::{Activations, GemmError, Output, Plan, WeightMemory, Weights, choose_tile};
use crate::driver::{DeviceBuffer, Gpu, PinnedBuffer, Stream, TensorMap};
use crate::transfer::{CHUNK_BYTES, DEFAULT_RING_BYTES, RING_SLOTS, Ring, Transfer, chunks};
use asym_gemm_formats::WeightFormat;
use asym_gemm_kernels_gpu::args::{ColumnTable, GemmArgs, Group, gemm_flags, weight_layout};
use asym_gemm_kernels_gpu::gemm::Operands;
use asym_gemm_kernels_gpu::schedule::group_tiles;
use asym_gemm_kernels_gpu::tile::Tile;
use std::ops::Range;

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

/// Grouped GEMMs on one GPU, with the ring and the scratch that calls share.
#[derive(Debug)]
pub struct GroupedGemm {
    gpu: Gpu,
    launcher: Launcher,
    ring_bytes: usize,
    ring: Option<Ring>,
    groups: Option<DeviceBuffer<u32>>,
}

impl GroupedGemm {
    /// Grouped GEMMs on `gpu` with a ring of [`DEFAULT_RING_BYTES`], allocated when needed.
    pub fn new(gpu: &Gpu) -> Self {
        Self::with_ring_bytes(gpu, DEFAULT_RING_BYTES)
    }

    /// As [`Self::new`] with a ring of at most `ring_bytes`.
    pub fn with_ring_bytes(gpu: &Gpu, ring_bytes: usize) -> Self {
        Self {
            gpu: gpu.clone(),
            launcher: Launcher::new(gpu),
            ring_bytes,
            ring: None,
            groups: None,
        }
    }

    /// Computes D and waits until it is there.
    ///
    /// Rows of D outside the groups keep what they hold.
    ///
    /// # Errors
    /// If the operands do not fit each other, a group is out of range, the transfer is not
    /// possible for where the weights are, or the driver fails.
    pub fn run(
        &mut self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        groups: &[GroupRange],
        d: &mut Output<'_>,
        transfer: Transfer,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        // SAFETY: the borrows last until both waits below, which come on every path.
        let enqueued = unsafe { self.enqueue(a, b, groups, d, transfer, stream) };
        let computed = stream.synchronize();
        let copied = self.ring.as_ref().map_or(Ok(()), Ring::synchronize);
        let plan = enqueued?;
        computed?;
        copied?;
        Ok(plan)
    }

    /// Enqueues the call on `stream` and returns at once.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// Operands must stay alive and unchanged by others until the work on `stream` is done.
    pub unsafe fn enqueue(
        &mut self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        groups: &[GroupRange],
        d: &mut Output<'_>,
        transfer: Transfer,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        if !stream.is_on(&self.gpu) {
            return Err(GemmError::OtherGpu { what: "stream" });
        }
        a.check_on(&self.gpu)?;
        b.check_on(&self.gpu)?;
        d.check_on(&self.gpu)?;
        let Some(problem) = Problem::new(&self.gpu, a, b, groups, d)? else {
            return Ok(Plan::nothing(transfer));
        };
        if let Some(pinned) = problem.pinned() {
            let (transfer, source) = choose_transfer(transfer);
            match transfer {
                // SAFETY: the caller's contract.
                Transfer::Staged => unsafe { self.staged(&problem, pinned, source, stream) },
                // SAFETY: the caller's contract.
                Transfer::Direct => unsafe {
                    self.in_place(&problem, pinned.device_ptr(), transfer, source, stream)
                },
                _ => Err(unavailable(transfer, "in pinned host memory")),
            }
        } else {
            match (transfer, b.memory) {
                (Transfer::Auto | Transfer::Resident, WeightMemory::Device(buffer)) => {
                    let source = if transfer == Transfer::Auto {
                        "weights are on the device"
                    } else {
                        "requested"
                    };
                    // SAFETY: the caller's contract.
                    unsafe {
                        self.in_place(
                            &problem,
                            buffer.as_raw(),
                            Transfer::Resident,
                            source,
                            stream,
                        )
                    }
                }
                _ => Err(unavailable(transfer, "on the device")),
            }
        }
    }

    /// Weights where they are, one launch.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with all weights at `address`.
    unsafe fn in_place(
        &mut self,
        problem: &Problem<'_>,
        address: u64,
        transfer: Transfer,
        source: &'static str,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        let b = problem.b;
        let groups = self.upload(&problem.groups, stream)?;
        let b_map = map_rows(&self.gpu, b.format, address, b.count, b.n, b.k)?;
        let piece = Piece {
            groups: 0..problem.groups.len(),
            first_weight: 0,
            rows: 0..b.n,
        };
        // SAFETY: the caller's contract.
        let kernel = unsafe { self.launch(problem, groups, &piece, &b_map, stream)? };
        let used = problem.used_weights().len();
        Ok(Plan {
            kernel,
            transfer,
            transfer_source: source,
            chunks: 0,
            weight_bytes: used * b.matrix_bytes(),
        })
    }

    /// Weights through the ring, a launch for each chunk.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn staged(
        &mut self,
        problem: &Problem<'_>,
        pinned: &PinnedBuffer,
        source: &'static str,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        let b = problem.b;
        // Cut at the width of the widest tile, so that no tile is computed in two parts.
        const GRANULE: usize = 256;
        let slot_bytes = Ring::slot_bytes_of(self.ring_bytes, RING_SLOTS);
        let list = chunks(
            &problem.used_weights(),
            b.n,
            b.row_bytes(),
            GRANULE.min(b.n),
            CHUNK_BYTES,
            slot_bytes,
        )
        .ok_or_else(|| GemmError::Unsupported {
            what: "ring",
            reason: format!(
                "a slot of {slot_bytes} bytes does not hold {} rows of {} bytes; give the ring more bytes",
                GRANULE.min(b.n),
                b.row_bytes()
            ),
        })?;
        let groups = self.upload(&problem.groups, stream)?;
        let mut kernel = "";
        let mut weight_bytes = 0;
        for chunk in &list {
            let bytes = chunk.weights.len() * chunk.rows.len() * b.row_bytes();
            let first = chunk.weights.start * b.matrix_bytes() + chunk.rows.start * b.row_bytes();
            let ring = match &mut self.ring {
                Some(ring) => ring,
                empty => empty.insert(Ring::new(&self.gpu, RING_SLOTS, slot_bytes)?),
            };
            let slot = ring.begin()?;
            // SAFETY: the range was checked when `b` was made; the caller keeps it alive.
            unsafe { ring.copy(slot, 0, &pinned.as_slice()[first..first + bytes])? };
            ring.finish(slot, stream)?;
            let address = ring.address() + (slot * slot_bytes) as u64;
            let b_map = map_rows(
                &self.gpu,
                b.format,
                address,
                chunk.weights.len(),
                chunk.rows.len(),
                b.k,
            )?;
            let piece = Piece {
                groups: problem.groups_of(&chunk.weights),
                first_weight: chunk.weights.start,
                rows: chunk.rows.clone(),
            };
            // SAFETY: the caller's contract; the slot is held until the release below.
            kernel = unsafe { self.launch(problem, groups, &piece, &b_map, stream)? };
            if let Some(ring) = &self.ring {
                ring.release(slot, stream)?;
            }
            weight_bytes += bytes;
        }
        Ok(Plan {
            kernel,
            transfer: Transfer::Staged,
            transfer_source: source,
            chunks: list.len(),
            weight_bytes,
        })
    }

    /// Writes the groups to the device, in stream order, and returns their address.
    fn upload(&mut self, groups: &[Group], stream: &Stream) -> Result<u64, GemmError> {
        let words: Vec<u32> = groups
            .iter()
            .flat_map(|g| [g.start, g.end, g.weight, g.reserved])
            .collect();
        if self
            .groups
            .as_ref()
            .is_none_or(|buffer| buffer.len() < words.len())
        {
            // Freeing waits for the device, so earlier calls are done with the old buffer.
            self.groups = Some(DeviceBuffer::alloc(
                &self.gpu,
                words.len().next_power_of_two(),
            )?);
        }
        let Some(buffer) = &self.groups else {
            return Ok(0);
        };
        // SAFETY: a copy from pageable memory has left it when the call returns; stream
        // order keeps it behind the kernels of earlier calls.
        unsafe { buffer.copy_from_host_async(0, &words, stream)? };
        Ok(buffer.as_raw())
    }

    /// One launch over a piece of the problem.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with `b_map` over the piece's weights and `groups` uploaded.
    unsafe fn launch(
        &mut self,
        problem: &Problem<'_>,
        groups: u64,
        piece: &Piece,
        b_map: &TensorMap,
        stream: &Stream,
    ) -> Result<&'static str, GemmError> {
        let n = piece.rows.len();
        let list = &problem.groups[piece.groups.clone()];
        let tile = choose_tile(
            list.iter()
                .map(|g| (g.end - g.start) as usize)
                .max()
                .unwrap_or(0),
        );
        let args = problem.args(groups, piece);
        let launch = Launch {
            operands: problem.operands,
            tile,
            tiles: tiles(list, n, tile),
            a_map: &problem.a_map,
            b_map,
            args: &args,
        };
        // SAFETY: `Problem` checked every range; the caller keeps the memory alive.
        Ok(unsafe { self.launcher.launch(&launch, stream)? })
    }
}

/// Number of tiles of `groups` for D with `n` columns.
pub(crate) fn tiles(groups: &[Group], n: usize, tile: Tile) -> u64 {
    groups
        .iter()
        .map(|g| u64::from(group_tiles(g.end - g.start, n as u32, tile.m, tile.n)))
        .sum()
}

fn unavailable(transfer: Transfer, place: &str) -> GemmError {
    GemmError::Unsupported {
        what: "transfer",
        reason: format!("{transfer} is not possible for weights {place}"),
    }
}

/// Part of a problem: some groups, some rows of each of their weights.
struct Piece {
    groups: Range<usize>,
    first_weight: usize,
    rows: Range<usize>,
}

/// A checked call with at least one row.
struct Problem<'a> {
    b: &'a Weights<'a>,
    operands: Operands,
    /// Non-empty groups by ascending weight.
    groups: Vec<Group>,
    a_map: TensorMap,
    args: GemmArgs,
    d_element_bytes: usize,
}

impl<'a> Problem<'a> {
    /// Checks everything; `None` if no group has a row.
    fn new(
        gpu: &Gpu,
        a: &Activations<'_>,
        b: &'a Weights<'a>,
        groups: &[GroupRange],
        d: &Output<'_>,
    ) -> Result<Option<Self>, GemmError> {
        let shape = |what, reason| GemmError::Shape { what, reason };
        if a.k() != b.k {
            return Err(shape("A and B", format!("K is {} and {}", a.k(), b.k)));
        }
        if d.columns() != b.n || d.rows() != a.rows() {
            return Err(shape(
                "D",
                format!(
                    "[{}, {}] for A [{}, K] and B [N = {}, K]",
                    d.rows(),
                    d.columns(),
                    a.rows(),
                    b.n
                ),
            ));
        }
        if a.rows() > i32::MAX as usize || b.n > i32::MAX as usize || b.k > i32::MAX as usize {
            return Err(shape("A and B", "a dimension exceeds 2^31 - 1".into()));
        }
        let operands = operands(a, b)?;
        let groups = check_groups(groups, a.rows(), b.count)?;
        if groups.is_empty() {
            return Ok(None);
        }
        let (a_map, a_scales, a_scale_stride) = map_activations(gpu, a, b.format)?;
        let d_bytes = d.element_bytes();
        let vector_bytes = if d_bytes == 2 { 16 } else { 8 };
        let vector = d.address().is_multiple_of(vector_bytes as u64)
            && (d.stride() * d_bytes).is_multiple_of(vector_bytes)
            && (b.n * d_bytes).is_multiple_of(vector_bytes);
        let mut flags = if vector { gemm_flags::D_VECTOR } else { 0 };
        flags |= if d_bytes == 2 { gemm_flags::D_BF16 } else { 0 };
        let b_scales = b.scales.map_or(ColumnTable::NONE, |scales| ColumnTable {
            base: scales.address(),
            weight_stride: (b.n * scales.stride() * 4) as u64,
            column_stride: (scales.stride() * 4) as u32,
            block_stride: if scales.columns() > 1 { 4 } else { 0 },
            ..ColumnTable::NONE
        });
        Ok(Some(Self {
            b,
            operands,
            groups,
            a_map,
            args: GemmArgs {
                groups: 0,
                b_maps: 0,
                d: d.address(),
                d_stride: d.stride() as u64,
                a_scales,
                b_scales,
                bias: ColumnTable::NONE,
                a_scale_stride,
                group_count: 0,
                n: 0,
                k_steps: (b.k as u32).div_ceil(operands.step_k()),
                b_layout: weight_layout::ROWS,
                panels_per_slice: 1,
                units_per_slice: 1,
                flags,
                first_weight: 0,
                reserved: 0,
            },
            d_element_bytes: d_bytes,
        }))
    }

    fn pinned(&self) -> Option<&'a PinnedBuffer> {
        match self.b.memory {
            WeightMemory::Pinned(buffer) => Some(buffer),
            WeightMemory::Device(_) => None,
        }
    }

    /// Weights that some row uses, ascending.
    fn used_weights(&self) -> Vec<usize> {
        let mut used: Vec<usize> = self.groups.iter().map(|g| g.weight as usize).collect();
        used.dedup();
        used
    }

    /// Positions of the groups that use `weights`.
    fn groups_of(&self, weights: &Range<usize>) -> Range<usize> {
        let at = |weight: usize| {
            self.groups
                .partition_point(|g| (g.weight as usize) < weight)
        };
        at(weights.start)..at(weights.end)
    }

    /// Arguments of one piece.
    ///
    /// The device holds groups with the weights' absolute indices, as the scale tables have
    /// them; a chunk's map starts at `first_weight`.
    fn args(&self, groups: u64, piece: &Piece) -> GemmArgs {
        let mut args = self.args;
        args.groups = groups + (piece.groups.start * size_of::<Group>()) as u64;
        args.group_count = piece.groups.len() as u32;
        args.first_weight = piece.first_weight as u32;
        args.n = piece.rows.len() as u32;
        args.d += (piece.rows.start * self.d_element_bytes) as u64;
        if args.b_scales.base != 0 {
            args.b_scales.base += piece.rows.start as u64 * u64::from(args.b_scales.column_stride);
        }
        // Granules of 256 columns keep a piece's start aligned for vector stores; its width
        // is only odd where N itself is.
        args
    }
}

/// Operand types of the call.
fn operands(a: &Activations<'_>, b: &Weights<'_>) -> Result<Operands, GemmError> {
    let Activations::Int8 { codes, scales } = a else {
        return match b.format {
            WeightFormat::Bf16 => Ok(Operands::Bf16),
            other => Err(GemmError::Shape {
                what: "A and B",
                reason: format!("bf16 activations with {other} weights"),
            }),
        };
    };
    let blocks = codes.columns().div_ceil(asym_gemm_formats::int8::BLOCK);
    if scales.rows() != codes.rows() {
        return Err(GemmError::Shape {
            what: "A scales",
            reason: format!("{} rows for {} rows of codes", scales.rows(), codes.rows()),
        });
    }
    match (b.format, scales.columns()) {
        (WeightFormat::Int8PerRow, 1) => {
            // The sum over K is one i32.
            const MAX_K: usize = i32::MAX as usize / (128 * 128);
            if b.k > MAX_K {
                return Err(GemmError::Unsupported {
                    what: "K",
                    reason: format!(
                        "{} exceeds {MAX_K}, where the i32 sum of per-row int8 could overflow; use block scales",
                        b.k
                    ),
                });
            }
            Ok(Operands::Int8PerRow)
        }
        (WeightFormat::Int8PerRow, n) if n == blocks => Ok(Operands::Int8Slices),
        (WeightFormat::Int8Block128, n) if n == blocks => Ok(Operands::Int8Blocks),
        (format, n) => Err(GemmError::Shape {
            what: "A scales",
            reason: format!(
                "{n} a row with {format} weights and K = {}; possible are 1 (per-row weights) or {blocks}",
                b.k
            ),
        }),
    }
}

/// Tensor map of A, address of its scales and their number a row.
fn map_activations(
    gpu: &Gpu,
    a: &Activations<'_>,
    format: WeightFormat,
) -> Result<(TensorMap, u64, u32), GemmError> {
    let aligned = |stride_bytes: usize| {
        if stride_bytes.is_multiple_of(16) {
            return Ok(());
        }
        Err(GemmError::Unsupported {
            what: "A",
            reason: format!("rows are {stride_bytes} bytes apart; TMA needs a multiple of 16"),
        })
    };
    match a {
        Activations::Bf16(m) => {
            aligned(m.stride() * 2)?;
            let map = map_a(
                gpu,
                format,
                m.address(),
                m.rows(),
                m.columns(),
                m.stride() * 2,
            )?;
            Ok((map, 0, 0))
        }
        Activations::Int8 { codes, scales } => {
            aligned(codes.stride())?;
            let map = map_a(
                gpu,
                format,
                codes.address(),
                codes.rows(),
                codes.columns(),
                codes.stride(),
            )?;
            let stride = u32::try_from(scales.stride()).map_err(|_| GemmError::Unsupported {
                what: "A scales",
                reason: format!("rows are {} elements apart", scales.stride()),
            })?;
            Ok((map, scales.address(), stride))
        }
    }
}

/// The non-empty groups by ascending weight; an error if one is out of range or two share a row.
fn check_groups(
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
