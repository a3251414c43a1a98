//! A fixed number of tokens as a CUDA graph, for decoding.
//!
//! ```text
//! group_rows | pack | gate-up | act | down | combine        all on the device, recorded once
//! ```
//!
//! The routing lies in device memory and may change between replays: the device groups the slots
//! itself, and kernels find each expert's weights where they lie, in the pinned bank (direct) or in
//! HBM (all experts resident). The host takes no part.

use super::super::MoeError;
use super::MoeLayer;
use super::cells::{Cells, Product, SLICE_COLUMNS, operands};
use super::device::{LayerDevice, launch_rows};
use super::io::{Element, Input, Output};
use super::plan::{Piece, Place};
use crate::driver::{DeviceBuffer, DriverError, Gpu, Graph, Kernel, Stream, TensorMap};
use crate::gemm::{Launch, Launcher, MatrixFormat, map_a};
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, SLICE};
use asym_gemm_kernels_gpu::args::{
    ActivateArgs, CombineArgs, GemmArgs, Group, GroupRowsArgs, PackRowsArgs,
};
use asym_gemm_kernels_gpu::elementwise::{COMBINE_THREADS, FAMILY, GROUP_SLOTS};
use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile};
use std::ffi::c_void;
use std::sync::Arc;

/// What a graph reads and writes, all on the layer's first device.
#[derive(Debug)]
pub struct DecodeArgs<'a> {
    /// x [T, H].
    pub x: Input<'a>,
    /// Experts [T, top_k]; -1, or a number that is no expert, skips the slot.
    pub ids: &'a DeviceBuffer<i32>,
    /// Weights [T, top_k].
    pub weights: &'a DeviceBuffer<f32>,
    /// Output [T, H].
    pub out: Output<'a>,
    /// Slots of a token.
    pub top_k: usize,
}

/// A layer's forward over a fixed number of tokens, to be replayed.
#[derive(Debug)]
pub struct DecodeGraph {
    graph: Graph,
    gpu: Gpu,
    scratch: Scratch,
    /// Keeps the weights.
    _layer: Arc<MoeLayer>,
}

#[derive(Debug)]
struct Scratch {
    source: DeviceBuffer<i32>,
    index: DeviceBuffer<i32>,
    groups: DeviceBuffer<u32>,
    status: DeviceBuffer<u32>,
    a: DeviceBuffer<u8>,
    a_scales: DeviceBuffer<f32>,
    gate_up: DeviceBuffer<f32>,
    h: DeviceBuffer<u8>,
    h_scales: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
}

impl Scratch {
    fn new(gpu: &Gpu, geometry: &BankGeometry, rows: usize) -> Result<Self, DriverError> {
        let (es, slices) = (geometry.format.activation_bytes(), geometry.slices());
        Ok(Self {
            source: DeviceBuffer::alloc(gpu, rows)?,
            index: DeviceBuffer::alloc(gpu, rows)?,
            groups: DeviceBuffer::alloc(gpu, rows * (size_of::<Group>() / 4))?,
            status: DeviceBuffer::zeroed(gpu, 1)?,
            a: DeviceBuffer::alloc(gpu, rows * geometry.hidden_padded() * es)?,
            a_scales: DeviceBuffer::alloc(gpu, rows * geometry.hidden_blocks().max(1))?,
            gate_up: DeviceBuffer::alloc(gpu, rows * slices * SLICE_COLUMNS)?,
            h: DeviceBuffer::alloc(gpu, rows * geometry.intermediate_padded() * es)?,
            h_scales: DeviceBuffer::alloc(gpu, rows * slices)?,
            y: DeviceBuffer::alloc(gpu, rows * geometry.hidden)?,
        })
    }
}

impl DecodeGraph {
    /// Records the forward of `args` over `layer`'s bank, read in place where the layer was built
    /// [`direct`](super::MoeLayerBuilder::direct), else from HBM, where all of its experts must be
    /// ([`MoeLayer::make_resident`]) and stay: do not bring in others while the graph lives.
    ///
    /// # Errors
    /// If arguments do not fit each other or are not on the first device; more than 1024 slots, or
    /// more tokens than one row tile; an expert that is not where kernels find it; if memory is
    /// short or the driver fails.
    ///
    /// # Safety
    /// What the arguments name stays allocated as long as the graph lives.
    pub unsafe fn record(layer: &Arc<MoeLayer>, args: &DecodeArgs<'_>) -> Result<Self, MoeError> {
        let geometry = layer.bank.geometry();
        let unfit = |what, found, needed| MoeError::Parts {
            what,
            found,
            needed,
        };
        let tokens = super::io::check(
            &args.x,
            args.ids.len(),
            args.weights.len(),
            args.top_k,
            &args.out,
            geometry.hidden,
        )?;
        let slots = args.ids.len();
        if slots == 0 || slots > GROUP_SLOTS as usize {
            return Err(unfit("the graph's slots", slots, GROUP_SLOTS as usize));
        }
        let (Input::Device(x), Output::Device(out)) = (&args.x, &args.out) else {
            return Err(MoeError::Backend {
                backend: "graph",
                reason: "x and the output must be in device memory".into(),
            });
        };
        let state = layer.runtime.lock();
        let layers = layer.layer_devices();
        let (Some(device), Some(on_device)) = (state.devices.list.first(), layers.first()) else {
            return Err(MoeError::Backend {
                backend: "graph",
                reason: "the layer has no device; build it with MoeLayerBuilder::devices".into(),
            });
        };
        let gpu = device.gpu.clone();
        x.check_on(&gpu, "x")?;
        out.check_on(&gpu, "the output")?;
        let (place, cells) = weights_of(on_device, geometry.experts)?;
        for operands in operands(geometry.format)? {
            let tile = choose_tile(operands, tokens);
            if tokens > tile.m as usize {
                return Err(unfit("the graph's tokens", tokens, tile.m as usize));
            }
        }
        let scratch = Scratch::new(&gpu, &geometry, slots)?;
        let piece = Piece {
            place,
            slices: 0..geometry.slices(),
            groups: 0..slots,
            rows: 0..slots,
            max_rows: tokens,
            copies: Vec::new(),
        };
        let module = gpu.module(FAMILY)?;
        let mut recorder = Recorder {
            geometry,
            activation: layer.activation,
            group: module.function("group_rows")?,
            combine: module.function("combine")?,
            on_device,
            launcher: Launcher::new(&gpu),
            piece,
            cells,
            scratch: &scratch,
            tokens,
            top_k: args.top_k,
            x: (x.address, x.element),
            out: (out.address, out.element),
            ids: args.ids.as_raw(),
            weights: args.weights.as_raw(),
            gpu: &gpu,
        };
        let stream = Stream::new(&gpu)?;
        // Once outside of a capture: kernels are loaded and set up then.
        // SAFETY: the caller keeps the arguments; the work is done before this returns.
        unsafe { recorder.enqueue(&stream)? };
        stream.synchronize()?;
        // SAFETY: the graph keeps the scratch, the caller the arguments.
        let graph = stream.capture(|stream| unsafe { recorder.enqueue(stream) })?;
        drop(layers);
        drop(state);
        Ok(Self {
            graph,
            gpu,
            scratch,
            _layer: layer.clone(),
        })
    }

    /// Replays the forward on `stream`, a stream of the layer's first device; returns before it has
    /// run.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// One replay at a time, in the order of streams and events; what [`Self::record`] was given is
    /// not in other use meanwhile.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: passed on.
        unsafe { self.graph.launch(stream) }
    }

    /// Whether a replay so far found an id that was neither -1 nor an expert; replays must be done.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn saw_foreign_ids(&self) -> Result<bool, DriverError> {
        Ok(self.scratch.status.to_vec()? != [0])
    }
}

impl Drop for DecodeGraph {
    fn drop(&mut self) {
        // A replay in flight uses the scratch and the bank.
        if let Err(error) = self.gpu.synchronize() {
            tracing::warn!(%error, "waiting for a decode graph's replays before freeing it");
        }
    }
}

/// The cells in which expert e is cell e.
fn weights_of(layer: &LayerDevice, experts: usize) -> Result<(Place, &Cells), MoeError> {
    if let Some(cells) = layer.direct() {
        return Ok((Place::Direct, cells));
    }
    let in_order = (0..experts).all(|e| layer.cache.cached.cell(e) == Some(e));
    match layer.cache.cells() {
        Some(cells) if in_order => Ok((Place::Resident, cells)),
        _ => Err(MoeError::Backend {
            backend: "graph",
            reason: "the layer is neither direct nor are all of its experts in HBM, brought in \
                     once in ascending order by MoeLayer::make_resident"
                .into(),
        }),
    }
}

/// Everything that the recorded launches name.
struct Recorder<'a> {
    geometry: BankGeometry,
    activation: Activation,
    group: Kernel,
    combine: Kernel,
    on_device: &'a LayerDevice,
    launcher: Launcher,
    piece: Piece,
    cells: &'a Cells,
    scratch: &'a Scratch,
    tokens: usize,
    top_k: usize,
    x: (u64, Element),
    out: (u64, Element),
    ids: u64,
    weights: u64,
    gpu: &'a Gpu,
}

impl Recorder<'_> {
    /// # Safety
    /// Everything named lives until the work, or the graph, is done.
    unsafe fn enqueue(&mut self, stream: &Stream) -> Result<(), MoeError> {
        let (g, s) = (self.geometry, self.scratch);
        let slots = self.tokens * self.top_k;
        let es = g.format.activation_bytes();
        let mut group = GroupRowsArgs {
            ids: self.ids,
            source: s.source.as_raw(),
            output_index: s.index.as_raw(),
            groups: s.groups.as_raw(),
            status: s.status.as_raw(),
            slots: slots as u32,
            top_k: self.top_k as u32,
            experts: g.experts as u32,
            reserved: 0,
        };
        let mut pack = PackRowsArgs {
            x: self.x.0,
            source: s.source.as_raw(),
            out: s.a.as_raw(),
            scales: s.a_scales.as_raw(),
            x_stride: g.hidden as u64,
            hidden: g.hidden as u32,
            padded: g.hidden_padded() as u32,
            x_bf16: (self.x.1 == Element::Bf16).into(),
            reserved: 0,
        };
        let weights = self.cells.of_piece(&g, &self.piece, 0);
        let product = Product {
            scales: s.a_scales.as_raw(),
            d: s.gate_up.as_raw(),
            groups: s.groups.as_raw(),
            group_count: slots as u32,
            rows: slots as u32,
        };
        let gate_up = weights.gate_up(&product);
        let down = weights.down(&Product {
            scales: s.h_scales.as_raw(),
            d: s.y.as_raw(),
            ..product
        });
        let (clamped, limit, alpha) = match self.activation {
            Activation::SwiGlu => (0, 0.0, 0.0),
            Activation::ClampedSwiGlu { limit, alpha } => (1, limit, alpha),
        };
        let mut activate = ActivateArgs {
            gate_up: s.gate_up.as_raw(),
            h: s.h.as_raw(),
            scales: s.h_scales.as_raw(),
            slices: g.slices() as u32,
            intermediate: g.intermediate as u32,
            clamped,
            limit,
            alpha,
            reserved: 0,
        };
        let mut combine = CombineArgs {
            y: s.y.as_raw(),
            output_index: s.index.as_raw(),
            weights: self.weights,
            partials: 0,
            partial_stride: 0,
            shared: 0,
            shared_weights: 0,
            out: self.out.0,
            hidden: g.hidden as u32,
            top_k: self.top_k as u32,
            partial_count: 0,
            out_bf16: (self.out.1 == Element::Bf16).into(),
        };
        let (format, a_row) = (MatrixFormat::try_from(g.format)?, g.hidden_padded());
        let a_map = map_a(self.gpu, format, s.a.as_raw(), slots, a_row, a_row * es)?;
        let h_row = g.slices() * SLICE;
        let h_map = map_a(self.gpu, format, s.h.as_raw(), slots, h_row, h_row * es)?;
        let [first, second] = operands(g.format)?;
        let (pack_kernel, activate_kernel) = self.on_device.row_kernels();
        let rows = slots as u32;
        let mut group_params = [(&raw mut group).cast::<c_void>()];
        let mut combine_params = [(&raw mut combine).cast::<c_void>()];
        let columns = (g.hidden as u32).div_ceil(COMBINE_THREADS);
        // SAFETY: the caller's contract; every list and buffer is of the size that `Scratch::new`
        // derives from the slots.
        unsafe {
            let (one, threads) = ((1, 1, 1), (GROUP_SLOTS, 1, 1));
            let raw = stream.as_raw();
            self.group.launch(one, threads, 0, raw, &mut group_params)?;
            launch_rows(pack_kernel, (rows, 1, 1), &mut pack, stream)?;
            self.product(first, &a_map, &gate_up, stream)?;
            let grid = (rows, g.slices() as u32, 1);
            launch_rows(activate_kernel, grid, &mut activate, stream)?;
            self.product(second, &h_map, &down, stream)?;
            let grid = (self.tokens as u32, columns, 1);
            let threads = (COMBINE_THREADS, 1, 1);
            self.combine
                .launch(grid, threads, 0, raw, &mut combine_params)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn product(
        &mut self,
        operands: Operands,
        a_map: &TensorMap,
        args: &GemmArgs,
        stream: &Stream,
    ) -> Result<(), MoeError> {
        let tile = choose_tile(operands, self.tokens);
        // No expert has more rows than a tile: at most as many tiles as slots in each column.
        let tiles = u64::from(args.group_count) * u64::from(args.n.div_ceil(tile.n));
        let launch = Launch {
            operands,
            tile,
            tiles,
            relayed: false,
            a_map,
            b_map: a_map,
            args,
        };
        // SAFETY: passed on.
        unsafe { self.launcher.launch(&launch, stream)? };
        Ok(())
    }
}
