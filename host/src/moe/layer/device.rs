//! One device's part of a forward.
//!
//! ```text
//! copies   | chunk 0 | chunk 1 | chunk 2 | ...             the ring's own stream
//! compute  | lists, pack |   gate-up, act, down of piece 0 | piece 1 | ... | combine
//! fills    |                                        experts into the cache
//! ```
//!
//! Everything is enqueued ahead and ordered by events; the host waits for none of it.

use super::super::{ExpertBank, MoeError};
use super::cache::Cache;
use super::cells::{Cells, Product, SLICE_COLUMNS, operands, row_kernels};
use super::io::Element;
use super::plan::{DevicePart, Piece, Place, RingShape};
use crate::driver::{
    DeviceBuffer, DriverError, Event, Gpu, Kernel, PinnedBuffer, Stream, TensorMap,
};
use crate::gemm::{Launch, Launcher, MatrixFormat, map_a, tiles};
use crate::transfer::{RING_SLOTS, Ring};
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, SLICE};
use asym_gemm_kernels_gpu::args::{ActivateArgs, CombineArgs, GemmArgs, Group, PackRowsArgs};
use asym_gemm_kernels_gpu::elementwise::{COMBINE_THREADS, FAMILY, ROW_THREADS};
use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile};
use bytemuck::Pod;
use std::ffi::c_void;

/// Shared memory of a block reduction.
const REDUCE_BYTES: u32 = 16;

/// Buffers that grow with the largest call so far.
#[derive(Debug, Default)]
struct Scratch {
    /// Lists of the call: groups, tokens of rows, rows of slots, weights of slots.
    lists: Option<DeviceBuffer<u32>>,
    /// x, where it comes from the host.
    x: Option<DeviceBuffer<u8>>,
    a: Option<DeviceBuffer<u8>>,
    a_scales: Option<DeviceBuffer<f32>>,
    gate_up: Option<DeviceBuffer<f32>>,
    h: Option<DeviceBuffer<u8>>,
    h_scales: Option<DeviceBuffer<f32>>,
    y: Option<DeviceBuffer<f32>>,
}

/// The buffer in `slot`, replaced by a larger one if it is shorter than `len`.
fn grown<'a, T: Pod>(
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

/// The pinned memory in `slot`, replaced by a larger one if it is shorter than `bytes`.
pub(super) fn grown_pinned<'a>(
    slot: &'a mut Option<PinnedBuffer>,
    gpu: &Gpu,
    bytes: usize,
) -> Result<&'a mut PinnedBuffer, DriverError> {
    if slot.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
        *slot = None;
        *slot = Some(PinnedBuffer::alloc(gpu, bytes.max(1))?);
    }
    slot.as_mut().ok_or(DriverError::InvalidArgument {
        call: "staging",
        reason: "the buffer just made is missing".into(),
    })
}

/// What one layer has on one device.
#[derive(Debug)]
pub(super) struct LayerDevice {
    /// Cells of the ring's slots; absent where kernels read the bank itself.
    ring_cells: Option<Cells>,
    /// The bank itself.
    direct: Option<Cells>,
    pub(super) cache: Cache,
    pack: Kernel,
    activate: Kernel,
}

/// One device, shared by layers.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) gpu: Gpu,
    pub(super) compute: Stream,
    /// Copies of x to the host.
    pub(super) side: Stream,
    ring: Ring,
    launcher: Launcher,
    combine: Kernel,
    scratch: Scratch,
    lists: Option<PinnedBuffer>,
    /// Those of the current forward.
    listed: Lists,
    begun: Event,
    computed: Event,
    pub(super) done: Event,
    /// Experts that were copied into the ring ahead of their forward.
    pub(super) ahead: Ahead,
}

/// Slots of the ring filled on a hint.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The layer they are for.
    pub(super) layer: u64,
    /// (expert, slot, cell).
    pub(super) experts: Vec<(usize, usize, usize)>,
}

/// x as a device reads it.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceX {
    pub(super) address: u64,
    pub(super) element: Element,
}

/// The forward that a device works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) bank: &'a ExpertBank,
    pub(super) layer: &'a LayerDevice,
    pub(super) part: &'a DevicePart,
    pub(super) activation: Activation,
    pub(super) weights: &'a [f32],
    pub(super) top_k: usize,
    pub(super) tokens: usize,
}

/// Where a device's weighted sums go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) out: u64,
    pub(super) element: Element,
    /// Sums of others, [count, T, H].
    pub(super) partials: u64,
    pub(super) partial_count: usize,
    /// Elements from one of them to the next.
    pub(super) partial_stride: usize,
}

/// Device addresses of one call's lists.
#[derive(Clone, Copy, Debug, Default)]
struct Lists {
    groups: u64,
    source: u64,
    index: u64,
    weights: u64,
}

/// Device addresses of one call's activations.
struct Activations {
    a_map: TensorMap,
    a_scales: u64,
    gate_up: u64,
    h: u64,
    h_scales: u64,
    y: u64,
}

impl LayerDevice {
    pub(super) fn new(
        device: &Device,
        bank: &ExpertBank,
        direct: bool,
        cache_bytes: usize,
    ) -> Result<Self, MoeError> {
        let (gpu, geometry) = (&device.gpu, bank.geometry());
        let (pack, activate) = row_kernels(geometry.format)?;
        let slot_cells = device.ring_shape(&geometry).slot_cells;
        if slot_cells == 0 && !direct {
            return Err(MoeError::Ring {
                ring_bytes: device.ring.slot_bytes() * RING_SLOTS,
                slots: RING_SLOTS,
                expert_bytes: geometry.expert_bytes(),
            });
        }
        device.launcher.load(&operands(geometry.format)?)?;
        let ring_cells = match slot_cells {
            0 => None,
            _ => Some(Cells::new(
                gpu,
                &geometry,
                device.ring.address(),
                (RING_SLOTS, device.ring.slot_bytes()),
                slot_cells,
            )?),
        };
        let direct = match (direct, bank.device_address()) {
            (false, _) => None,
            (true, Some(base)) => Some(Cells::new(
                gpu,
                &geometry,
                base,
                (1, geometry.bank_bytes()),
                geometry.experts,
            )?),
            (true, None) => {
                return Err(MoeError::Backend {
                    backend: "gpu",
                    reason: "kernels can read only a pinned bank; build it with ExpertBank::pinned"
                        .into(),
                });
            }
        };
        let module = gpu.module(FAMILY)?;
        Ok(Self {
            ring_cells,
            direct,
            cache: Cache::new(gpu, &geometry, cache_bytes)?,
            pack: module.function(pack)?,
            activate: module.function(activate)?,
        })
    }

    /// The bank itself as cells, if kernels read it.
    pub(super) fn direct(&self) -> Option<&Cells> {
        self.direct.as_ref()
    }

    /// The kernels that pack rows of x and that activate.
    pub(super) fn row_kernels(&self) -> (&Kernel, &Kernel) {
        (&self.pack, &self.activate)
    }

    fn cells(&self, place: Place) -> Result<&Cells, DriverError> {
        let cells = match place {
            Place::Resident => self.cache.cells(),
            Place::Ring | Place::Ahead { .. } => self.ring_cells.as_ref(),
            Place::Direct => self.direct.as_ref(),
        };
        cells.ok_or_else(|| DriverError::InvalidArgument {
            call: "MoE layer",
            reason: format!("no cells for {place:?}"),
        })
    }
}

impl Device {
    /// A device with a ring of `ring_bytes`, or the largest that memory has room for down to
    /// three slots of `least_slot` bytes.
    pub(super) fn new(gpu: &Gpu, ring_bytes: usize, least_slot: usize) -> Result<Self, MoeError> {
        Ok(Self {
            gpu: gpu.clone(),
            compute: Stream::new(gpu)?,
            side: Stream::new(gpu)?,
            ring: ring_within(gpu, ring_bytes, least_slot)?,
            launcher: Launcher::new(gpu),
            combine: gpu.module(FAMILY)?.function("combine")?,
            scratch: Scratch::default(),
            lists: None,
            listed: Lists::default(),
            begun: Event::new(gpu)?,
            computed: Event::new(gpu)?,
            done: Event::untimed(gpu)?,
            ahead: Ahead::default(),
        })
    }

    /// The ring as experts of `geometry` see it.
    pub(super) fn ring_shape(&self, geometry: &BankGeometry) -> RingShape {
        RingShape {
            slot_cells: (self.ring.slot_bytes() / geometry.expert_bytes()).min(geometry.experts),
        }
    }

    /// Bytes of the ring.
    pub(super) fn ring_bytes(&self) -> usize {
        self.ring.slot_bytes() * RING_SLOTS
    }

    /// Starts a forward, after `ready` where x depends on others' work.
    pub(super) fn begin(&mut self, ready: Option<&Event>) -> Result<(), DriverError> {
        if let Some(ready) = ready {
            self.compute.wait(ready)?;
            self.side.wait(ready)?;
        }
        self.begun.record(&self.compute)
    }

    /// Brings x from pinned host memory, after `ready` where a copy puts it there first.
    ///
    /// # Safety
    /// `x` stays alive and unchanged until the forward's work is done.
    pub(super) unsafe fn upload_x(
        &mut self,
        x: &[u8],
        element: Element,
        ready: Option<&Event>,
    ) -> Result<DeviceX, DriverError> {
        let buffer = grown(&mut self.scratch.x, &self.gpu, x.len())?;
        if let Some(ready) = ready {
            self.compute.wait(ready)?;
        }
        // SAFETY: the caller's contract; stream order keeps earlier readers before the copy.
        unsafe { buffer.copy_from_host_async(0, x, &self.compute)? };
        Ok(DeviceX {
            address: buffer.as_raw(),
            element,
        })
    }

    /// Enqueues the unweighted outputs of the device's rows. The names of the kernels.
    ///
    /// # Safety
    /// x and the bank stay alive and unchanged until the work is done; the part is of this layer,
    /// device and x.
    pub(super) unsafe fn enqueue(
        &mut self,
        call: &Call<'_>,
        x: DeviceX,
    ) -> Result<Vec<&'static str>, MoeError> {
        let mut kernels = Vec::new();
        // SAFETY: the caller's contract.
        unsafe {
            let lists = self.upload_lists(call)?;
            self.listed = lists;
            if !call.part.source.is_empty() {
                call.layer.cache.join(&self.compute)?;
                let activations = self.pack(call, &lists, x)?;
                for piece in &call.part.pieces {
                    let run = self.fetch(call.bank, piece)?;
                    let names = self.run_piece(call, &lists, &activations, piece, run)?;
                    if matches!(piece.place, Place::Ring | Place::Ahead { .. }) {
                        self.ring.release(run, &self.compute)?;
                    }
                    for name in names {
                        if !kernels.contains(&name) {
                            kernels.push(name);
                        }
                    }
                }
            }
        }
        self.computed.record(&self.compute)?;
        Ok(kernels)
    }

    /// Uploads the lists of a call in one copy.
    ///
    /// # Safety
    /// As [`Self::enqueue`]; the last forward's work is done.
    unsafe fn upload_lists(&mut self, call: &Call<'_>) -> Result<Lists, MoeError> {
        let part = call.part;
        let slots = part.index.len();
        let group_words = part.groups.len() * (size_of::<Group>() / 4);
        let words = group_words + part.source.len() + 2 * slots;
        let host = grown_pinned(&mut self.lists, &self.gpu, words * 4)?;
        let list: &mut [u32] = bytemuck::cast_slice_mut(&mut host.as_mut_slice()[..words * 4]);
        let (groups, rest) = list.split_at_mut(group_words);
        let (source, rest) = rest.split_at_mut(part.source.len());
        let (index, weights) = rest.split_at_mut(slots);
        for (words, g) in groups.chunks_exact_mut(4).zip(&part.groups) {
            words.copy_from_slice(&[g.start, g.end, g.weight, 0]);
        }
        source.copy_from_slice(bytemuck::cast_slice(&part.source));
        index.copy_from_slice(bytemuck::cast_slice(&part.index));
        weights.copy_from_slice(bytemuck::cast_slice(call.weights));
        let device = grown(&mut self.scratch.lists, &self.gpu, words)?;
        let base = device.as_raw();
        // SAFETY: the staging memory is reused only once this forward's work is done.
        unsafe { device.copy_from_host_async(0, list, &self.compute)? };
        let at = |words: usize| base + (words * 4) as u64;
        Ok(Lists {
            groups: base,
            source: at(group_words),
            index: at(group_words + part.source.len()),
            weights: at(group_words + part.source.len() + slots),
        })
    }

    /// Grows the scratch and packs the rows of x.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn pack(
        &mut self,
        call: &Call<'_>,
        lists: &Lists,
        x: DeviceX,
    ) -> Result<Activations, MoeError> {
        let geometry = call.bank.geometry();
        let (rows, gpu, s) = (call.part.source.len(), &self.gpu, &mut self.scratch);
        let es = geometry.format.activation_bytes();
        let h_pad = geometry.hidden_padded();
        let a = grown(&mut s.a, gpu, rows * h_pad * es)?.as_raw();
        let a_scales = grown(&mut s.a_scales, gpu, rows * geometry.hidden_blocks().max(1))?;
        let product = call.part.largest_product(SLICE_COLUMNS);
        let mut pack = PackRowsArgs {
            x: x.address,
            source: lists.source,
            out: a,
            scales: a_scales.as_raw(),
            x_stride: geometry.hidden as u64,
            hidden: geometry.hidden as u32,
            padded: h_pad as u32,
            x_bf16: (x.element == Element::Bf16).into(),
            reserved: 0,
        };
        let activations = Activations {
            a_map: map_a(
                gpu,
                MatrixFormat::try_from(geometry.format)?,
                a,
                rows,
                h_pad,
                h_pad * es,
            )?,
            a_scales: a_scales.as_raw(),
            gate_up: grown(&mut s.gate_up, gpu, product)?.as_raw(),
            h: grown(&mut s.h, gpu, rows * geometry.intermediate_padded() * es)?.as_raw(),
            h_scales: grown(&mut s.h_scales, gpu, rows * geometry.slices())?.as_raw(),
            y: grown(&mut s.y, gpu, rows * geometry.hidden)?.as_raw(),
        };
        // SAFETY: one block a packed row, over the buffers grown above.
        unsafe {
            launch_rows(
                &call.layer.pack,
                (rows as u32, 1, 1),
                &mut pack,
                &self.compute,
            )?
        };
        Ok(activations)
    }

    /// Makes the piece's weights come; the run of cells that they lie in.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn fetch(&mut self, bank: &ExpertBank, piece: &Piece) -> Result<usize, MoeError> {
        match piece.place {
            Place::Resident | Place::Direct => Ok(0),
            Place::Ahead { slot } => {
                self.ring.join(slot, &self.compute)?;
                Ok(slot)
            }
            Place::Ring => {
                let slot = self.ring.begin()?;
                self.ahead.experts.retain(|&(_, taken, _)| taken != slot);
                let cell_bytes = bank.geometry().expert_bytes();
                for copy in &piece.copies {
                    let offset = copy.cell * cell_bytes + copy.offset;
                    let source = &bank.bytes()[copy.bytes.clone()];
                    // SAFETY: the bank outlives the work; the slot was begun above.
                    unsafe { self.ring.copy(slot, offset, source)? };
                }
                self.ring.finish(slot, &self.compute)?;
                Ok(slot)
            }
        }
    }

    /// Gate-up, activation and down of one piece.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with the piece's weights in its cells.
    unsafe fn run_piece(
        &mut self,
        call: &Call<'_>,
        lists: &Lists,
        at: &Activations,
        piece: &Piece,
        run: usize,
    ) -> Result<[&'static str; 2], MoeError> {
        let geometry = call.bank.geometry();
        let weights = call
            .layer
            .cells(piece.place)?
            .of_piece(&geometry, piece, run);
        let es = geometry.format.activation_bytes();
        let (slices, first) = (piece.slices.len(), piece.rows.start);
        let columns = slices * SLICE_COLUMNS;
        let product = Product {
            scales: at.a_scales,
            // The products of all pieces share one buffer, each from its start.
            d: at.gate_up.wrapping_sub((first * columns * 4) as u64),
            groups: lists.groups + (piece.groups.start * size_of::<Group>()) as u64,
            group_count: piece.groups.len() as u32,
            rows: piece.rows.end as u32,
        };
        let gate_up = weights.gate_up(&product);
        let down = weights.down(&Product {
            scales: at.h_scales,
            d: at.y,
            ..product
        });
        let (clamped, limit, alpha) = match call.activation {
            Activation::SwiGlu => (0, 0.0, 0.0),
            Activation::ClampedSwiGlu { limit, alpha } => (1, limit, alpha),
        };
        let h_row = slices * SLICE * es;
        let mut activate = ActivateArgs {
            gate_up: at.gate_up,
            h: at.h + (first * h_row) as u64,
            scales: at.h_scales + (first * slices * 4) as u64,
            slices: slices as u32,
            intermediate: weights.real_columns() as u32,
            clamped,
            limit,
            alpha,
            reserved: 0,
        };
        let format = MatrixFormat::try_from(geometry.format)?;
        let h_map = map_a(
            &self.gpu,
            format,
            at.h,
            piece.rows.end,
            slices * SLICE,
            h_row,
        )?;
        let groups = &call.part.groups[piece.groups.clone()];
        let [gate_up_operands, down_operands] = operands(geometry.format)?;
        let first = launch(gate_up_operands, piece, groups, &at.a_map, &gate_up);
        let second = launch(down_operands, piece, groups, &h_map, &down);
        let grid = (piece.rows.len() as u32, slices as u32, 1);
        // SAFETY: the caller's contract; every address is inside scratch or cells.
        unsafe {
            let gate_up = self.launcher.launch(&first, &self.compute)?;
            launch_rows(&call.layer.activate, grid, &mut activate, &self.compute)?;
            let down = self.launcher.launch(&second, &self.compute)?;
            Ok([gate_up.kernel, down.kernel])
        }
    }

    /// Enqueues the weighted sums of the device's rows and others' sums.
    ///
    /// # Safety
    /// The output and the others' sums are live memory of T x H elements until the work is done,
    /// and the forward was enqueued here.
    pub(super) unsafe fn combine(&mut self, call: &Call<'_>, sums: &Sums) -> Result<(), MoeError> {
        let part = call.part;
        let geometry = call.bank.geometry();
        // Without rows of its own the device reads no lists.
        let top_k = match part.source.is_empty() {
            true => 0,
            false => call.top_k as u32,
        };
        let mut args = CombineArgs {
            y: self.scratch.y.as_ref().map_or(0, DeviceBuffer::as_raw),
            output_index: self.listed.index,
            weights: self.listed.weights,
            partials: sums.partials,
            partial_stride: sums.partial_stride as u64,
            shared: 0,
            shared_weights: 0,
            out: sums.out,
            hidden: geometry.hidden as u32,
            top_k,
            partial_count: sums.partial_count as u32,
            out_bf16: (sums.element == Element::Bf16).into(),
        };
        let columns = (geometry.hidden as u32).div_ceil(COMBINE_THREADS);
        let grid = (call.tokens as u32, columns, 1);
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the caller's contract; the lists were uploaded for this call.
        unsafe {
            let stream = self.compute.as_raw();
            self.combine
                .launch(grid, (COMBINE_THREADS, 1, 1), 0, stream, &mut params)?;
        }
        Ok(())
    }

    /// Marks the end of the forward's work.
    pub(super) fn end(&mut self) -> Result<(), DriverError> {
        self.done.record(&self.compute)
    }

    /// Seconds from the first copy or kernel of the last forward to the end of its products; it
    /// must be done.
    pub(super) fn gpu_seconds(&self) -> Result<f64, DriverError> {
        Ok(f64::from(self.computed.elapsed_ms(&self.begun)?) * 1e-3)
    }

    /// Lets `cache` take `expert` into `cell` once the products enqueued so far are done.
    ///
    /// # Safety
    /// The bank stays alive and unchanged until the copy is done.
    pub(super) unsafe fn fill(
        &self,
        cache: &mut Cache,
        bank: &ExpertBank,
        cell: usize,
        expert: usize,
    ) -> Result<(), MoeError> {
        // SAFETY: passed on.
        unsafe { cache.fill(bank, cell, expert, &self.computed) }
    }

    /// Copies whole experts into free slots of the ring ahead of `layer`'s next forward; those
    /// that there is no room for are left out.
    ///
    /// # Safety
    /// The bank stays alive and unchanged until the copies are done.
    pub(super) unsafe fn prefetch(
        &mut self,
        layer: u64,
        bank: &ExpertBank,
        experts: &[usize],
    ) -> Result<usize, MoeError> {
        let geometry = bank.geometry();
        let cells = self.ring_shape(&geometry).slot_cells;
        if cells == 0 {
            return Ok(0);
        }
        self.ahead.experts.clear();
        self.ahead.layer = layer;
        // One slot stays for what nobody foresaw.
        for experts in experts.chunks(cells).take(RING_SLOTS - 1) {
            let slot = self.ring.begin()?;
            let bytes = geometry.expert_bytes();
            for (cell, &expert) in experts.iter().enumerate() {
                let source = &bank.bytes()[expert * bytes..][..bytes];
                // SAFETY: the caller keeps the bank; the slot was begun above.
                unsafe { self.ring.copy(slot, cell * bytes, source)? };
            }
            self.ring.end(slot)?;
            let cells = experts.iter().enumerate();
            let places = cells.map(|(cell, &expert)| (expert, slot, cell));
            self.ahead.experts.extend(places);
        }
        Ok(self.ahead.experts.len())
    }

    /// Waits for all work, copies included.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        let computed = self.compute.synchronize();
        let copied = self.ring.synchronize();
        computed.and(copied).and(self.side.synchronize())
    }

    /// Overwrites all scratch with 0xff bytes (NaN in every float type).
    pub(super) fn poison_scratch(&mut self) -> Result<(), DriverError> {
        fn poison<T: Pod>(slot: &mut Option<DeviceBuffer<T>>) -> Result<(), DriverError> {
            slot.as_mut()
                .map_or(Ok(()), |buffer| buffer.fill_bytes(0xff))
        }
        self.drain()?;
        let s = &mut self.scratch;
        poison(&mut s.lists)?;
        poison(&mut s.x)?;
        poison(&mut s.a)?;
        poison(&mut s.a_scales)?;
        poison(&mut s.gate_up)?;
        poison(&mut s.h)?;
        poison(&mut s.h_scales)?;
        poison(&mut s.y)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            tracing::warn!(%error, "waiting for a device's MoE work before freeing its memory");
        }
    }
}

/// The largest ring of at most `ring_bytes` that the device has room for, in halves down to slots
/// of `least_slot`.
fn ring_within(gpu: &Gpu, ring_bytes: usize, least_slot: usize) -> Result<Ring, DriverError> {
    let mut bytes = ring_bytes;
    loop {
        let slot = Ring::slot_bytes_of(bytes, RING_SLOTS);
        match Ring::new(gpu, RING_SLOTS, slot) {
            Err(DriverError::OutOfMemory { .. })
                if Ring::slot_bytes_of(bytes / 2, RING_SLOTS) >= least_slot =>
            {
                bytes /= 2;
                tracing::warn!(bytes, "device memory is short: the ring shrinks");
            }
            made => return made,
        }
    }
}

/// The launch of one product of a piece.
fn launch<'a>(
    operands: Operands,
    piece: &Piece,
    groups: &[Group],
    a_map: &'a TensorMap,
    args: &'a GemmArgs,
) -> Launch<'a> {
    let tile = choose_tile(operands, piece.max_rows);
    Launch {
        operands,
        tile,
        tiles: tiles(groups, args.n as usize, tile),
        relayed: piece.place == Place::Direct && piece.max_rows > tile.m as usize,
        a_map,
        // Not read where B is panels.
        b_map: a_map,
        args,
    }
}

/// Launches an elementwise kernel with blocks of [`ROW_THREADS`].
///
/// # Safety
/// `args` must be the kernel's argument struct over live memory that covers the grid.
pub(super) unsafe fn launch_rows<A>(
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
