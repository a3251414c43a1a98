//! The experts of a bank on one GPU.
//!
//! ```text
//! x [T, H] --pack--> A [M, H] --gate, up--> f32 [M, 2I] --activate--> h [M, I] --down--> y f32 [M, H]
//! ```
//!
//! M packed rows, grouped by expert. The three kernels from A to y run chunk by chunk, a
//! chunk being the experts that one copy through the ring brings; with resident or direct
//! weights there is one chunk. A *cell* is a place for one expert: in the ring, in HBM or
//! in the pinned bank itself, and all cells are addressed alike.

use super::layout::{GroupRange, Packed};
use super::{ExpertBank, MoeError};
use crate::driver::{DeviceBuffer, DriverError, Gpu, Kernel, Stream, TensorMap};
use crate::gemm::{Launch, Launcher, MatrixFormat, map_a, map_expert, tiles};
use crate::transfer::{CHUNK_BYTES, RING_SLOTS, Ring, Transfer, chunks, ring_bytes_for};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, GATE_UP_PANELS, PANEL_ROWS, SLICE};
use asym_gemm_kernels_gpu::args::{
    ActivateArgs, ColumnTable, GemmArgs, Group, PackRowsArgs, RelayArgs, gemm_flags, weight_layout,
};
use asym_gemm_kernels_gpu::elementwise::{FAMILY, ROW_THREADS};
use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile};
use bytemuck::Pod;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// Gate and up columns of one slice.
const SLICE_COLUMNS: usize = GATE_UP_PANELS * PANEL_ROWS;
/// Shared memory of a block reduction.
const REDUCE_BYTES: u32 = 16;

/// Where experts lie for the kernels, and the tensor maps over them.
#[derive(Debug)]
struct Cells {
    base: u64,
    count: usize,
    gate_up_maps: DeviceBuffer<u8>,
    down_maps: DeviceBuffer<u8>,
}

impl Cells {
    fn new(gpu: &Gpu, geometry: &BankGeometry, base: u64, count: usize) -> Result<Self, MoeError> {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for cell in 0..count {
            let address = base + (cell * geometry.expert_bytes()) as u64;
            let (g, d) = map_expert(gpu, geometry, address)?;
            gate_up.extend_from_slice(g.as_bytes());
            down.extend_from_slice(d.as_bytes());
        }
        Ok(Self {
            base,
            count,
            gate_up_maps: DeviceBuffer::from_slice(gpu, &gate_up)?,
            down_maps: DeviceBuffer::from_slice(gpu, &down)?,
        })
    }
}

/// How the bank's experts come to their cells.
#[derive(Debug)]
enum Source {
    /// Cell e is expert e: in HBM, or the pinned bank itself.
    InPlace {
        /// HBM copy of the bank, when resident.
        _resident: Option<DeviceBuffer<u8>>,
    },
    /// Cells of the ring's slots, `slot_cells` each.
    Ring { ring: Ring, slot_cells: usize },
}

/// Buffers that grow with the largest call so far.
#[derive(Debug, Default)]
struct Scratch {
    source: Option<DeviceBuffer<i32>>,
    groups: Option<DeviceBuffer<u32>>,
    a: Option<DeviceBuffer<u8>>,
    a_scales: Option<DeviceBuffer<f32>>,
    gate_up: Option<DeviceBuffer<f32>>,
    h: Option<DeviceBuffer<u8>>,
    h_scales: Option<DeviceBuffer<f32>>,
}

/// The buffer in `slot`, replaced by a larger one if it is shorter than `len`.
pub(super) fn grown<'a, T: Pod>(
    slot: &'a mut Option<DeviceBuffer<T>>,
    gpu: &Gpu,
    len: usize,
) -> Result<&'a mut DeviceBuffer<T>, DriverError> {
    if slot.as_ref().is_none_or(|buffer| buffer.len() < len) {
        *slot = None;
        *slot = Some(DeviceBuffer::alloc(gpu, len.max(1))?);
    }
    slot.as_mut().ok_or(DriverError::InvalidArgument {
        call: "scratch",
        reason: "the buffer just made is missing".into(),
    })
}

/// The experts of one bank on one GPU.
#[derive(Debug)]
pub struct GpuExperts {
    gpu: Gpu,
    bank: Arc<ExpertBank>,
    transfer: Transfer,
    cells: Cells,
    source: Source,
    launcher: Launcher,
    pack: Kernel,
    activate: Kernel,
    scratch: Scratch,
}

/// What a forward over packed rows did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ExpertsPlan {
    /// Symbols of the gate-up kernel and of the down kernel (of the last chunk).
    pub kernels: Vec<&'static str>,
    /// Copies through the ring.
    pub chunks: usize,
    /// Weight bytes of the experts used.
    pub weight_bytes: usize,
}

impl GpuExperts {
    /// Prepares the bank's experts for `gpu`; `Auto` means staged.
    ///
    /// `ring_bytes` bounds the HBM that staged transfer takes; by default it is
    /// [`ring_bytes_for`] an expert.
    ///
    /// # Errors
    /// If the bank's format has no GPU kernels, the bank is not pinned, the ring is too small for
    /// an expert, memory is short, or the GPU lacks the kernels.
    pub fn new(
        gpu: &Gpu,
        bank: Arc<ExpertBank>,
        transfer: Transfer,
        ring_bytes: Option<usize>,
    ) -> Result<Self, MoeError> {
        let geometry = bank.geometry();
        let (pack, activate) = row_kernels(geometry.format)?;
        let ring_bytes = ring_bytes.unwrap_or_else(|| ring_bytes_for(geometry.expert_bytes()));
        let Some(host) = bank.device_address() else {
            return Err(MoeError::Backend {
                backend: "gpu",
                reason: "the expert bank is in ordinary memory; build it with ExpertBank::pinned"
                    .into(),
            });
        };
        let experts = geometry.experts;
        let (source, base, count, transfer) = match transfer {
            Transfer::Direct => (Source::InPlace { _resident: None }, host, experts, transfer),
            Transfer::Resident => {
                let copy = DeviceBuffer::from_slice(gpu, bank.bytes())?;
                let base = copy.as_raw();
                (
                    Source::InPlace {
                        _resident: Some(copy),
                    },
                    base,
                    experts,
                    transfer,
                )
            }
            Transfer::Auto | Transfer::Staged => {
                let slot_cells = (ring_bytes / RING_SLOTS / geometry.expert_bytes()).min(experts);
                if slot_cells == 0 {
                    return Err(MoeError::Ring {
                        ring_bytes,
                        slots: RING_SLOTS,
                        expert_bytes: geometry.expert_bytes(),
                    });
                }
                let ring = Ring::new(gpu, RING_SLOTS, slot_cells * geometry.expert_bytes())?;
                let base = ring.address();
                let count = RING_SLOTS * slot_cells;
                (
                    Source::Ring { ring, slot_cells },
                    base,
                    count,
                    Transfer::Staged,
                )
            }
        };
        let module = gpu.module(FAMILY)?;
        let launcher = Launcher::new(gpu);
        launcher.load(&operands(geometry.format)?)?;
        Ok(Self {
            gpu: gpu.clone(),
            transfer,
            cells: Cells::new(gpu, &geometry, base, count)?,
            bank,
            source,
            launcher,
            pack: module.function(pack)?,
            activate: module.function(activate)?,
            scratch: Scratch::default(),
        })
    }

    /// The transfer in use; never `Auto`.
    pub fn transfer(&self) -> Transfer {
        self.transfer
    }

    /// Overwrites all scratch with 0xff bytes (NaN in every float type), so that a test can
    /// show that no result depends on what it held.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn poison_scratch(&mut self) -> Result<(), DriverError> {
        fn poison<T: Pod>(slot: &mut Option<DeviceBuffer<T>>) -> Result<(), DriverError> {
            slot.as_mut()
                .map_or(Ok(()), |buffer| buffer.fill_bytes(0xff))
        }
        let s = &mut self.scratch;
        poison(&mut s.source)?;
        poison(&mut s.groups)?;
        poison(&mut s.a)?;
        poison(&mut s.a_scales)?;
        poison(&mut s.gate_up)?;
        poison(&mut s.h)?;
        poison(&mut s.h_scales)
    }

    /// Enqueues y[rows of `groups`] = the experts' outputs for the packed rows, unweighted;
    /// other rows of y keep what they hold.
    ///
    /// `x` is [T, H]; `packed` says which token each row takes. y is [packed.rows, H].
    ///
    /// # Errors
    /// If x or y are too short, memory is short or the driver fails.
    ///
    /// # Safety
    /// x, y and the bank must stay alive and unchanged by others until the work on `stream`,
    /// which must belong to this GPU, is done. Tokens in `packed` must be rows of x.
    pub unsafe fn enqueue(
        &mut self,
        x: &DeviceBuffer<f32>,
        packed: &Packed,
        groups: &[GroupRange],
        activation: Activation,
        y: &DeviceBuffer<f32>,
        stream: &Stream,
    ) -> Result<ExpertsPlan, MoeError> {
        let geometry = self.bank.geometry();
        let rows = packed.rows;
        if y.len() < rows * geometry.hidden {
            return Err(MoeError::Input {
                len: y.len(),
                hidden: geometry.hidden,
            });
        }
        if groups.is_empty() {
            return Ok(ExpertsPlan::default());
        }
        let used: Vec<usize> = groups.iter().map(|g| g.expert).collect();
        let expert_bytes = geometry.expert_bytes();
        // Which groups go together, and in which cell each expert lies.
        let slot_bytes = match &self.source {
            Source::Ring { slot_cells, .. } => slot_cells * expert_bytes,
            Source::InPlace { .. } => usize::MAX,
        };
        let copies = match &self.source {
            Source::InPlace { .. } => Vec::new(),
            Source::Ring { .. } => chunks(&used, 1, expert_bytes, 1, CHUNK_BYTES, slot_bytes)
                .ok_or(MoeError::Ring {
                    ring_bytes: slot_bytes * RING_SLOTS,
                    slots: RING_SLOTS,
                    expert_bytes,
                })?,
        };
        let pieces: Vec<Range<usize>> = if copies.is_empty() {
            std::iter::once(0..groups.len()).collect()
        } else {
            let at = |expert: usize| groups.partition_point(|g| g.expert < expert);
            copies
                .iter()
                .map(|c| at(c.weights.start)..at(c.weights.end))
                .collect()
        };
        let mut device_groups: Vec<Group> = groups
            .iter()
            .map(|g| Group {
                start: g.start as u32,
                end: g.end as u32,
                weight: g.expert as u32,
                reserved: 0,
            })
            .collect();
        if let Source::Ring { ring, slot_cells } = &self.source {
            for (i, (copy, piece)) in copies.iter().zip(&pieces).enumerate() {
                let slot = (ring.next_slot() + i) % ring.slots();
                for g in &mut device_groups[piece.clone()] {
                    g.weight = (slot * slot_cells) as u32 + g.weight - copy.weights.start as u32;
                }
            }
        }
        // SAFETY: the caller's contract; buffers are grown to the sizes that the kernels use.
        unsafe {
            let call = self.prepare(x, packed, &device_groups, activation, y, stream)?;
            let mut kernels = Vec::new();
            for (i, piece) in pieces.iter().enumerate() {
                let slot = match (&mut self.source, copies.get(i)) {
                    (Source::Ring { ring, .. }, Some(copy)) => {
                        let slot = ring.begin()?;
                        let bytes =
                            copy.weights.start * expert_bytes..copy.weights.end * expert_bytes;
                        ring.copy(slot, 0, &self.bank.bytes()[bytes])?;
                        ring.finish(slot, stream)?;
                        Some(slot)
                    }
                    _ => None,
                };
                kernels = self.run_piece(&call, &device_groups, piece.clone(), stream)?;
                if let (Source::Ring { ring, .. }, Some(slot)) = (&self.source, slot) {
                    ring.release(slot, stream)?;
                }
            }
            Ok(ExpertsPlan {
                kernels,
                chunks: copies.len(),
                weight_bytes: used.len() * expert_bytes,
            })
        }
    }

    /// Waits until no copy reads the bank any more.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn synchronize_copies(&self) -> Result<(), DriverError> {
        match &self.source {
            Source::Ring { ring, .. } => ring.synchronize(),
            Source::InPlace { .. } => Ok(()),
        }
    }

    /// Packs the activations and uploads the lists.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn prepare(
        &mut self,
        x: &DeviceBuffer<f32>,
        packed: &Packed,
        groups: &[Group],
        activation: Activation,
        y: &DeviceBuffer<f32>,
        stream: &Stream,
    ) -> Result<Call, MoeError> {
        let geometry = self.bank.geometry();
        let (rows, gpu) = (packed.rows, &self.gpu);
        let es = geometry.format.activation_bytes();
        let (h_pad, i_pad) = (geometry.hidden_padded(), geometry.intermediate_padded());
        let s = &mut self.scratch;
        let source = grown(&mut s.source, gpu, rows)?;
        let words: Vec<u32> = groups
            .iter()
            .flat_map(|g| [g.start, g.end, g.weight, 0])
            .collect();
        let group_list = grown(&mut s.groups, gpu, words.len())?;
        // SAFETY: copies from pageable memory have left it when the calls return; stream
        // order keeps them behind the kernels of earlier calls.
        unsafe {
            source.copy_from_host_async(0, &packed.source_token, stream)?;
            group_list.copy_from_host_async(0, &words, stream)?;
        }
        let blocks = geometry.hidden_blocks().max(1);
        let a = grown(&mut s.a, gpu, rows * h_pad * es)?;
        let a_scales = grown(&mut s.a_scales, gpu, rows * blocks)?;
        let gate_up = grown(
            &mut s.gate_up,
            gpu,
            rows * geometry.slices() * SLICE_COLUMNS,
        )?;
        let h = grown(&mut s.h, gpu, rows * i_pad * es)?;
        let h_scales = grown(&mut s.h_scales, gpu, rows * geometry.slices())?;
        let mut pack = PackRowsArgs {
            x: x.as_raw(),
            source: source.as_raw(),
            out: a.as_raw(),
            scales: a_scales.as_raw(),
            x_stride: geometry.hidden as u64,
            hidden: geometry.hidden as u32,
            padded: h_pad as u32,
        };
        let format = MatrixFormat::try_from(geometry.format)?;
        let call = Call {
            groups: group_list.as_raw(),
            a_map: map_a(gpu, format, a.as_raw(), rows, h_pad, h_pad * es)?,
            a_scales: a_scales.as_raw(),
            gate_up: gate_up.as_raw(),
            h_map: map_a(gpu, format, h.as_raw(), rows, i_pad, i_pad * es)?,
            h: h.as_raw(),
            h_scales: h_scales.as_raw(),
            y: y.as_raw(),
            activation,
        };
        // SAFETY: one block a packed row, over the buffers grown above.
        unsafe { launch_rows(&self.pack, (rows as u32, 1, 1), &mut pack, stream)? };
        Ok(call)
    }

    /// Gate-up, activation and down for the groups of one piece.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with the piece's experts in their cells.
    unsafe fn run_piece(
        &mut self,
        call: &Call,
        groups: &[Group],
        piece: Range<usize>,
        stream: &Stream,
    ) -> Result<Vec<&'static str>, MoeError> {
        let geometry = self.bank.geometry();
        let list = &groups[piece.clone()];
        let rows_of = |g: &Group| (g.end - g.start) as usize;
        let max_rows = list.iter().map(rows_of).max().unwrap_or(0);
        let group_address = call.groups + (piece.start * size_of::<Group>()) as u64;
        let rows = list[0].start..list[list.len() - 1].end;
        let mut gate_up = gate_up_args(&geometry, &self.cells, call);
        let mut down = down_args(&geometry, &self.cells, call);
        for args in [&mut gate_up, &mut down] {
            args.groups = group_address;
            args.group_count = list.len() as u32;
            args.rows = rows.end;
        }
        let [gate_up_operands, down_operands] = operands(geometry.format)?;
        let (clamped, limit, alpha) = match call.activation {
            Activation::SwiGlu => (0, 0.0, 0.0),
            Activation::ClampedSwiGlu { limit, alpha } => (1, limit, alpha),
        };
        let slices = geometry.slices();
        let first = u64::from(rows.start);
        let mut activate = ActivateArgs {
            gate_up: call.gate_up + first * (slices * SLICE_COLUMNS * 4) as u64,
            h: call.h + first * (slices * SLICE * geometry.format.activation_bytes()) as u64,
            scales: call.h_scales + first * (slices * 4) as u64,
            slices: slices as u32,
            intermediate: geometry.intermediate as u32,
            clamped,
            limit,
            alpha,
            reserved: 0,
        };
        let tile = choose_tile(gate_up_operands, max_rows);
        let in_host_memory = self.transfer == Transfer::Direct;
        let first = Launch {
            operands: gate_up_operands,
            tile,
            tiles: tiles(list, gate_up.n as usize, tile),
            relayed: in_host_memory && max_rows > tile.m as usize,
            a_map: &call.a_map,
            b_map: &call.a_map,
            args: &gate_up,
        };
        let tile = choose_tile(down_operands, max_rows);
        let second = Launch {
            operands: down_operands,
            tile,
            tiles: tiles(list, down.n as usize, tile),
            relayed: in_host_memory && max_rows > tile.m as usize,
            a_map: &call.h_map,
            b_map: &call.h_map,
            args: &down,
        };
        let grid = (rows.end - rows.start, slices as u32, 1);
        // SAFETY: the caller's contract; every address is inside scratch, cells or y.
        unsafe {
            let gate_up = self.launcher.launch(&first, stream)?;
            launch_rows(&self.activate, grid, &mut activate, stream)?;
            let down = self.launcher.launch(&second, stream)?;
            Ok(vec![gate_up.kernel, down.kernel])
        }
    }
}

/// Device addresses of one call.
struct Call {
    groups: u64,
    a_map: TensorMap,
    a_scales: u64,
    gate_up: u64,
    h_map: TensorMap,
    h: u64,
    h_scales: u64,
    y: u64,
    activation: Activation,
}

/// Symbols of the kernels that pack rows of x and that activate.
fn row_kernels(format: WeightFormat) -> Result<(&'static str, &'static str), MoeError> {
    match format {
        WeightFormat::Bf16 => Ok(("pack_rows_bf16", "activate_bf16")),
        WeightFormat::Int8PerRow => Ok(("pack_rows_s8_per_row", "activate_s8")),
        WeightFormat::Int8Block128 => Ok(("pack_rows_s8_blocks", "activate_s8")),
        WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
            Err(no_kernels(format))
        }
    }
}

/// Operands of the gate-up product and of the down product.
fn operands(format: WeightFormat) -> Result<[Operands; 2], MoeError> {
    match format {
        WeightFormat::Bf16 => Ok([Operands::Bf16; 2]),
        WeightFormat::Int8PerRow => Ok([Operands::Int8PerRow, Operands::Int8Slices]),
        WeightFormat::Int8Block128 => Ok([Operands::Int8Blocks; 2]),
        WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
            Err(no_kernels(format))
        }
    }
}

/// The error for a format of which [`Backend::supports`](super::Backend::supports) says no.
fn no_kernels(format: WeightFormat) -> MoeError {
    MoeError::Backend {
        backend: "gpu",
        reason: format!(
            "no GPU kernels for {format} experts; use the cpu back end, or experts in {}, {} or {}",
            WeightFormat::Bf16,
            WeightFormat::Int8PerRow,
            WeightFormat::Int8Block128
        ),
    }
}

/// Arguments of the gate-up product: N runs over slices of 256 interleaved columns.
fn gate_up_args(geometry: &BankGeometry, cells: &Cells, call: &Call) -> GemmArgs {
    let n = geometry.slices() * SLICE_COLUMNS;
    let blocks = geometry.hidden_blocks();
    let in_slice = |offset: usize, values: usize| ColumnTable {
        base: cells.base + offset as u64,
        weight_stride: geometry.expert_bytes() as u64,
        segment_stride: geometry.slice_bytes() as u64,
        segment_columns: SLICE_COLUMNS as u32,
        column_stride: (values * 4) as u32,
        block_stride: 4,
    };
    GemmArgs {
        groups: 0,
        b_maps: cells.gate_up_maps.as_raw(),
        d: call.gate_up,
        d_stride: n as u64,
        a_scales: call.a_scales,
        b_scales: match blocks {
            0 => ColumnTable::NONE,
            _ => in_slice(geometry.gate_up_scales_offset(), blocks),
        },
        bias: match geometry.bias {
            true => in_slice(geometry.gate_up_bias_offset(), 1),
            false => ColumnTable::NONE,
        },
        a_scale_stride: blocks as u32,
        group_count: 0,
        n: n as u32,
        k_steps: geometry.hidden_units() as u32,
        b_layout: weight_layout::PANELS,
        panels_per_slice: GATE_UP_PANELS as u32,
        units_per_slice: geometry.hidden_units() as u32,
        flags: gemm_flags::D_VECTOR,
        relay: RelayArgs::default(),
        first_weight: 0,
        weight_end: cells.count as u32,
        rows: 0,
        reserved: 0,
    }
}

/// Arguments of the down product: K runs over the slices.
fn down_args(geometry: &BankGeometry, cells: &Cells, call: &Call) -> GemmArgs {
    let table = |offset: usize, block_stride: usize| ColumnTable {
        base: cells.base + offset as u64,
        weight_stride: geometry.expert_bytes() as u64,
        column_stride: 4,
        block_stride: block_stride as u64,
        ..ColumnTable::NONE
    };
    let vector = geometry.hidden.is_multiple_of(2);
    GemmArgs {
        groups: 0,
        b_maps: cells.down_maps.as_raw(),
        d: call.y,
        d_stride: geometry.hidden as u64,
        a_scales: call.h_scales,
        b_scales: match geometry.format {
            // Of fp8 and fp4 there is no product: `operands` refuses them.
            WeightFormat::Bf16
            | WeightFormat::Fp8Block128
            | WeightFormat::Nvfp4
            | WeightFormat::Mxfp4 => ColumnTable::NONE,
            WeightFormat::Int8PerRow => table(geometry.down_row_scales_offset(), 0),
            WeightFormat::Int8Block128 => {
                table(geometry.down_block_scales_offset(), geometry.slice_bytes())
            }
        },
        bias: match geometry.bias {
            true => table(geometry.down_bias_offset(), 0),
            false => ColumnTable::NONE,
        },
        a_scale_stride: geometry.slices() as u32,
        group_count: 0,
        n: geometry.hidden as u32,
        k_steps: (geometry.slices() * geometry.down_units()) as u32,
        b_layout: weight_layout::PANELS,
        panels_per_slice: geometry.down_panels() as u32,
        units_per_slice: geometry.down_units() as u32,
        flags: if vector { gemm_flags::D_VECTOR } else { 0 },
        relay: RelayArgs::default(),
        first_weight: 0,
        weight_end: cells.count as u32,
        rows: 0,
        reserved: 0,
    }
}

/// Launches an elementwise kernel with blocks of [`ROW_THREADS`].
///
/// # Safety
/// `args` must be the kernel's argument struct over live memory that covers the grid.
unsafe fn launch_rows<A>(
    kernel: &Kernel,
    grid: (u32, u32, u32),
    args: &mut A,
    stream: &Stream,
) -> Result<(), DriverError> {
    let mut params = [std::ptr::from_mut(args).cast::<c_void>()];
    // SAFETY: the caller's contract.
    unsafe {
        kernel.launch(
            grid,
            (ROW_THREADS, 1, 1),
            REDUCE_BYTES,
            stream.as_raw(),
            &mut params,
        )
    }
}
