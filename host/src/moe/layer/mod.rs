//! One layer's experts on CPU and GPUs at once.
//!
//! ```text
//! routing -> packed rows -> policy: a Division -> one part for each side
//!
//! GPU   copies of its slices | gate-up, act, down | weighted sums ---+
//! CPU   x from the device    | its slices in place | weighted sums --+-> out, rounded once
//! ```
//!
//! [`MoeLayer::forward`] enqueues the GPUs' work first, computes the CPU's part meanwhile and
//! adds both at the end. Each side sums its own products: over its slices in their order,
//! over a token's slots in theirs, in f32; then GPU 0's sums, the CPU's and those of
//! further GPUs are added in this order and rounded once. h is rounded by token and slice on
//! every side alike, so in int8 all products agree to the bit, and two divisions of a
//! layer differ by the f32 roundings of another grouping alone: for n slices of top_k
//! experts by at most (n + top_k + devices) · 2^-23 · Σ |w · y_s| over the slices' terms y_s.
//! In bf16 the sides add products in orders of their own: each division is within the format's
//! bound of the exact result.
//! Under one division the same call gives the same bytes.

#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cuda")]
mod cells;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod devices;
#[cfg(feature = "cuda")]
mod graph;
mod io;
mod plan;
#[cfg(feature = "cuda")]
mod residency;
mod runtime;

use super::division::{
    Divide, Division, ExpertLoad, FixedPolicy, ForwardTimes, LayerShape, PolicyKind, STATIC_M_CPU,
};
use super::layout::{Packed, pack};
use super::routing::Routing;
use super::{ExpertBank, MoeError};
#[cfg(feature = "cuda")]
use crate::driver::{Gpu, Stream};
use asym_gemm_cpu::{Engine, ExpertGroup, Slots};
use asym_gemm_formats::activation::Activation;
#[cfg(feature = "cuda")]
use device::LayerDevice;
#[cfg(feature = "cuda")]
pub use graph::{DecodeArgs, DecodeGraph};
#[cfg(feature = "cuda")]
pub use io::DeviceRows;
pub use io::{Element, Input, Output};
use plan::CpuPart;
use runtime::{Runtime, State};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Decides which experts of a layer lie in HBM.
pub trait Retain: Send {
    /// Counts a forward over `tokens` tokens.
    fn observe(&mut self, loads: &[ExpertLoad], tokens: u32);

    /// The experts most worth keeping, best first; only the first `cells` count.
    fn wanted(&mut self, cells: usize) -> Vec<u32>;
}

/// What a forward did.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct LayerReport {
    /// Tokens.
    pub tokens: usize,
    /// Who computed what.
    pub division: Division,
    /// GPU kernels of the products.
    pub kernels: Vec<String>,
    /// Sets of launches: pieces of all devices.
    pub pieces: usize,
    /// Weight bytes that the CPU read.
    pub cpu_bytes: u64,
    /// Weight bytes that crossed the links.
    pub streamed_bytes: u64,
    /// Weight bytes that GPUs read from HBM where they lay already.
    pub resident_bytes: u64,
    /// Until all of the GPUs' work but the last sum was enqueued.
    pub enqueue_seconds: f64,
    /// The CPU's part; 0 without one.
    pub cpu_seconds: f64,
    /// The whole call.
    pub seconds: f64,
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens, {}", self.tokens, self.division)?;
        writeln!(
            f,
            "  {} bytes read by the CPU, {} copied, {} in HBM; {} pieces ({})",
            self.cpu_bytes,
            self.streamed_bytes,
            self.resident_bytes,
            self.pieces,
            self.kernels.join(", ")
        )?;
        writeln!(
            f,
            "  {:.3} ms: enqueued after {:.3}, CPU {:.3}",
            self.seconds * 1e3,
            self.enqueue_seconds * 1e3,
            self.cpu_seconds * 1e3
        )
    }
}

/// Makes a [`MoeLayer`].
pub struct MoeLayerBuilder {
    bank: Arc<ExpertBank>,
    activation: Activation,
    engine: Option<Engine>,
    policy: Box<dyn Divide>,
    retain: Option<Box<dyn Retain>>,
    shared: Option<Arc<Runtime>>,
    #[cfg(feature = "cuda")]
    devices: Vec<Gpu>,
    #[cfg(feature = "cuda")]
    cache_bytes: usize,
    #[cfg(feature = "cuda")]
    ring_bytes: Option<usize>,
    #[cfg(feature = "cuda")]
    direct: bool,
    #[cfg(feature = "cuda")]
    swaps: usize,
}

impl fmt::Debug for MoeLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeLayerBuilder")
            .field("bank", &self.bank)
            .finish_non_exhaustive()
    }
}

/// Experts that a forward brings into the cache at most, unless told otherwise.
#[cfg(feature = "cuda")]
const DEFAULT_SWAPS: usize = 2;

impl MoeLayerBuilder {
    /// The activation between gate, up and down; SwiGLU unless set.
    #[must_use]
    pub fn activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// The CPU kernels and their threads; the best of this machine on all of its threads unless
    /// set.
    #[must_use]
    pub fn engine(self, engine: Engine) -> Self {
        Self {
            engine: Some(engine),
            ..self
        }
    }

    /// Who decides the division of each forward; [`PolicyKind::Static`] unless set.
    #[must_use]
    pub fn policy(self, policy: impl Divide + 'static) -> Self {
        Self {
            policy: Box::new(policy),
            ..self
        }
    }

    /// Who decides which experts lie in HBM under [`Self::hbm_budget`]; without it only
    /// [`MoeLayer::make_resident`] does.
    #[must_use]
    pub fn retain(self, retain: impl Retain + 'static) -> Self {
        Self {
            retain: Some(Box::new(retain)),
            ..self
        }
    }

    /// Uses the devices, ring, CPU threads and policy of `layer`; the builder's own are ignored.
    #[must_use]
    pub fn sharing(self, layer: &MoeLayer) -> Self {
        Self {
            shared: Some(layer.runtime.clone()),
            ..self
        }
    }

    /// The devices; the first one holds x and the output where they are in device memory. A
    /// device may be named several times.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn devices(self, devices: &[Gpu]) -> Self {
        Self {
            devices: devices.to_vec(),
            ..self
        }
    }

    /// Bytes of HBM for whole experts of this layer, on each device; 0 unless set.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn hbm_budget(self, bytes: usize) -> Self {
        Self {
            cache_bytes: bytes,
            ..self
        }
    }

    /// Bytes of HBM for the ring of each device;
    /// [`ring_bytes_for`](crate::transfer::ring_bytes_for) an expert unless set.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn ring_budget(self, bytes: usize) -> Self {
        Self {
            ring_bytes: Some(bytes),
            ..self
        }
    }

    /// Lets kernels read the pinned bank itself instead of copies through the ring.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn direct(self, direct: bool) -> Self {
        Self { direct, ..self }
    }

    /// Experts that a forward brings into the cache at most.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn swaps_a_forward(self, swaps: usize) -> Self {
        Self { swaps, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the format has no GPU kernels, the ring is too small for an expert, memory is short or
    /// a device lacks the kernels; if the CPU's threads cannot start.
    pub fn build(self) -> Result<MoeLayer, MoeError> {
        static LAYERS: AtomicU64 = AtomicU64::new(0);
        let runtime = match self.shared {
            Some(runtime) => runtime,
            None => {
                let engine = match self.engine {
                    Some(engine) => engine,
                    None => Engine::detect()?,
                };
                #[cfg(feature = "cuda")]
                let devices = {
                    let expert = self.bank.geometry().expert_bytes();
                    let bytes = self.ring_bytes;
                    devices::Devices::new(&self.devices, bytes, expert, self.direct)?
                };
                Arc::new(Runtime::new(State {
                    engine,
                    policy: self.policy,
                    unobserved: None,
                    #[cfg(feature = "cuda")]
                    devices,
                }))
            }
        };
        #[cfg(feature = "cuda")]
        let on_devices = {
            let state = runtime.lock();
            let make = |device| LayerDevice::new(device, &self.bank, self.direct, self.cache_bytes);
            let made: Result<Vec<_>, _> = state.devices.list.iter().map(make).collect();
            Mutex::new(made?)
        };
        Ok(MoeLayer {
            id: LAYERS.fetch_add(1, Ordering::Relaxed),
            bank: self.bank,
            activation: self.activation,
            runtime,
            retain: self.retain.map(Mutex::new),
            #[cfg(feature = "cuda")]
            on_devices,
            #[cfg(feature = "cuda")]
            swaps: self.swaps,
        })
    }
}

impl PolicyKind {
    /// The policy, if it is one of those that learn nothing.
    pub fn fixed(self) -> Option<FixedPolicy> {
        match self {
            Self::CpuOnly => Some(FixedPolicy::CpuOnly),
            Self::GpuOnly => Some(FixedPolicy::GpuOnly),
            Self::Static { m_cpu } => Some(FixedPolicy::Static(m_cpu)),
            Self::Adaptive => None,
        }
    }
}

/// One layer's experts, computed on the CPU and any number of GPUs.
///
/// Calls from several threads run one after the other.
pub struct MoeLayer {
    id: u64,
    bank: Arc<ExpertBank>,
    activation: Activation,
    runtime: Arc<Runtime>,
    retain: Option<Mutex<Box<dyn Retain>>>,
    #[cfg(feature = "cuda")]
    on_devices: Mutex<Vec<LayerDevice>>,
    #[cfg(feature = "cuda")]
    swaps: usize,
}

impl fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeLayer")
            .field("id", &self.id)
            .field("bank", &self.bank)
            .finish_non_exhaustive()
    }
}

/// One forward's arguments, checked.
pub(super) struct Job<'a> {
    #[cfg(feature = "cuda")]
    pub(super) layer: &'a MoeLayer,
    pub(super) x: Input<'a>,
    pub(super) routing: &'a Routing,
    pub(super) packed: &'a Packed,
    pub(super) division: &'a Division,
    pub(super) tokens: usize,
}

impl MoeLayer {
    /// Starts to make a layer of the experts in `bank`.
    pub fn builder(bank: Arc<ExpertBank>) -> MoeLayerBuilder {
        MoeLayerBuilder {
            bank,
            activation: Activation::SwiGlu,
            engine: None,
            policy: Box::new(FixedPolicy::Static(STATIC_M_CPU)),
            retain: None,
            shared: None,
            #[cfg(feature = "cuda")]
            devices: Vec::new(),
            #[cfg(feature = "cuda")]
            cache_bytes: 0,
            #[cfg(feature = "cuda")]
            ring_bytes: None,
            #[cfg(feature = "cuda")]
            direct: false,
            #[cfg(feature = "cuda")]
            swaps: DEFAULT_SWAPS,
        }
    }

    /// The experts.
    pub fn bank(&self) -> &Arc<ExpertBank> {
        &self.bank
    }

    /// The policy from now on, of all layers that share it.
    pub fn set_policy(&self, policy: impl Divide + 'static) {
        let mut state = self.runtime.lock();
        state.policy = Box::new(policy);
        state.unobserved = None;
    }

    /// out [T, H] = for each token the sum over its slots of weight times expert(x), for x
    /// [T, H]; a slot with id -1 counts nothing. f32 and bf16, on the host or on the layer's first
    /// device; what is on the device must be complete, and the output is when this returns.
    ///
    /// # Errors
    /// Sizes that do not fit each other, ids that are no experts, or a division by the policy
    /// that does not cover the work; nothing is written then. If memory is short, or the
    /// driver or the CPU kernels fail; the output is unspecified then.
    pub fn forward<'a>(
        &self,
        x: impl Into<Input<'a>>,
        routing: &Routing,
        out: impl Into<Output<'a>>,
    ) -> Result<LayerReport, MoeError> {
        let waits = Waits::default();
        // SAFETY: the output is complete on return, before the borrows end.
        unsafe { self.run(x.into(), routing, out.into(), waits) }
    }

    /// As [`Self::forward`] in the order of `stream`, a stream of the first device: x is read after
    /// the work submitted so far, and later work finds the output. Returns when all is enqueued and
    /// the CPU is done; for an output in host memory waits as [`Self::forward`] does.
    ///
    /// # Errors
    /// As [`Self::forward`]; failures of the enqueued work come with a later call.
    ///
    /// # Safety
    /// x and a device output stay allocated, and are not used but in the stream's order, until the
    /// stream has passed this point.
    #[cfg(feature = "cuda")]
    pub unsafe fn forward_on<'a>(
        &self,
        x: impl Into<Input<'a>>,
        routing: &Routing,
        out: impl Into<Output<'a>>,
        stream: &Stream,
    ) -> Result<LayerReport, MoeError> {
        let waits = Waits {
            stream: Some(stream),
        };
        // SAFETY: passed on.
        unsafe { self.run(x.into(), routing, out.into(), waits) }
    }

    /// # Safety
    /// With a stream as [`Self::forward_on`].
    unsafe fn run(
        &self,
        x: Input<'_>,
        routing: &Routing,
        out: Output<'_>,
        waits: Waits<'_>,
    ) -> Result<LayerReport, MoeError> {
        let start = Instant::now();
        let geometry = self.bank.geometry();
        let (slots, weights) = (routing.ids.len(), routing.weights.len());
        let tokens = io::check(&x, slots, weights, routing.top_k, &out, geometry.hidden)?;
        if tokens == 0 {
            return Ok(LayerReport::default());
        }
        let packed = pack(&routing.ids, tokens, routing.top_k, geometry.experts, 1)?;
        let mut state = self.runtime.lock();
        state.settle()?;
        let loads = self.loads(&packed);
        let shape = LayerShape {
            slices: geometry.slices() as u32,
            slice_bytes: geometry.slice_bytes() as u64,
            hidden: geometry.hidden as u32,
            tokens: tokens as u32,
            devices: state.device_count() as u32,
            x_on_device: x.is_on_device(),
        };
        let division = state.policy.divide(&loads, &shape);
        division.validate(&loads, &shape)?;
        let job = Job {
            #[cfg(feature = "cuda")]
            layer: self,
            x,
            routing,
            packed: &packed,
            division: &division,
            tokens,
        };
        // SAFETY: passed on.
        let mut report = unsafe { self.compute(&mut state, &job, out, waits)? };
        report.seconds = start.elapsed().as_secs_f64();
        state.unobserved = Some((
            division.clone(),
            shape,
            ForwardTimes {
                cpu_seconds: report.cpu_seconds,
                gpu_seconds: 0.0,
                total_seconds: report.seconds,
                cpu_bytes: report.cpu_bytes,
                streamed_bytes: report.streamed_bytes,
                resident_bytes: report.resident_bytes,
            },
        ));
        if !state.in_flight() {
            state.settle()?;
        }
        self.update_residency(&state, &loads, tokens as u32)?;
        report.division = division;
        Ok(report)
    }

    /// # Safety
    /// As [`Self::run`].
    #[cfg(feature = "cuda")]
    unsafe fn compute(
        &self,
        state: &mut State,
        job: &Job<'_>,
        out: Output<'_>,
        waits: Waits<'_>,
    ) -> Result<LayerReport, MoeError> {
        let on_gpu = job.division.shares.iter().any(|s| !s.gpu_slices.is_empty());
        let on_device = job.x.is_on_device() || matches!(out, Output::Device(_));
        if !on_gpu && !on_device {
            return self.compute_on_cpu(state, job, out);
        }
        let layers = self.layer_devices();
        // SAFETY: passed on.
        unsafe { devices::forward(state, job, &layers, out, waits.stream) }
    }

    /// # Safety
    /// None is needed without devices.
    #[cfg(not(feature = "cuda"))]
    unsafe fn compute(
        &self,
        state: &mut State,
        job: &Job<'_>,
        out: Output<'_>,
        _: Waits<'_>,
    ) -> Result<LayerReport, MoeError> {
        self.compute_on_cpu(state, job, out)
    }

    /// The whole layer on the CPU, from host memory to host memory.
    fn compute_on_cpu(
        &self,
        state: &State,
        job: &Job<'_>,
        out: Output<'_>,
    ) -> Result<LayerReport, MoeError> {
        let part = plan::cpu_part(job.packed, job.division);
        let start = Instant::now();
        match (job.x, out) {
            (Input::Host(x), Output::HostF32(out)) => {
                self.cpu_sums(&state.engine, &part, x, job.routing, out)?;
            }
            (Input::Host(x), Output::HostBf16(out)) => {
                self.cpu_sums(&state.engine, &part, x, job.routing, out)?;
            }
            #[cfg(feature = "cuda")]
            _ => {
                return Err(MoeError::Backend {
                    backend: "cpu",
                    reason: "the layer has no device; build it with MoeLayerBuilder::devices \
                             or pass host memory"
                        .into(),
                });
            }
        }
        Ok(LayerReport {
            tokens: job.tokens,
            cpu_bytes: self.cpu_bytes(&part),
            cpu_seconds: start.elapsed().as_secs_f64(),
            ..LayerReport::default()
        })
    }

    /// The weighted sums of the CPU's part.
    fn cpu_sums<O: asym_gemm_cpu::Output>(
        &self,
        engine: &Engine,
        part: &CpuPart,
        x: asym_gemm_cpu::Rows<'_>,
        routing: &Routing,
        out: &mut [O],
    ) -> Result<(), MoeError> {
        let groups: Vec<ExpertGroup<'_>> = part
            .groups
            .iter()
            .map(|(expert, rows)| ExpertGroup {
                expert: *expert,
                start: rows.start,
                tokens: &part.tokens[rows.clone()],
            })
            .collect();
        let slots = Slots {
            top_k: routing.top_k,
            output_index: &part.index,
            weights: &routing.weights,
        };
        let (bank, slices) = (self.bank.view()?, &part.slices);
        Ok(engine.expert_layer_slices(bank, self.activation, x, &groups, slices, slots, out)?)
    }

    /// Weight bytes of the CPU's part.
    fn cpu_bytes(&self, part: &CpuPart) -> u64 {
        let slices: usize = part.slices.iter().map(ExactSizeIterator::len).sum();
        (slices * self.bank.geometry().slice_bytes()) as u64
    }

    /// The routed experts as a policy sees them.
    fn loads(&self, packed: &Packed) -> Vec<ExpertLoad> {
        let slices = self.bank.geometry().slices() as u32;
        #[cfg(feature = "cuda")]
        let layers = self.layer_devices();
        packed
            .groups
            .iter()
            .map(|g| {
                #[cfg(feature = "cuda")]
                let resident = layers
                    .iter()
                    .any(|l| l.cache.cached.cell(g.expert).is_some());
                #[cfg(not(feature = "cuda"))]
                let resident = false;
                ExpertLoad {
                    expert: g.expert as u32,
                    rows: (g.end - g.start) as u32,
                    resident: match resident {
                        true => 0..slices,
                        false => slices..slices,
                    },
                }
            })
            .collect()
    }

    #[cfg(feature = "cuda")]
    fn layer_devices(&self) -> MutexGuard<'_, Vec<LayerDevice>> {
        self.on_devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the retention policy count the forward and bring in what it wants.
    fn update_residency(
        &self,
        state: &MutexGuard<'_, State>,
        loads: &[ExpertLoad],
        tokens: u32,
    ) -> Result<(), MoeError> {
        let Some(retain) = &self.retain else {
            return Ok(());
        };
        let mut retain = retain.lock().unwrap_or_else(PoisonError::into_inner);
        retain.observe(loads, tokens);
        #[cfg(feature = "cuda")]
        {
            let cells_of = |l: &LayerDevice| l.cache.cached.len();
            let cells = self.layer_devices().iter().map(cells_of).sum();
            let wanted = retain.wanted(cells);
            self.bring_in(state, &wanted, self.swaps)?;
        }
        #[cfg(not(feature = "cuda"))]
        let _ = state;
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl MoeLayer {
    /// Brings `experts` into the cache, the first ones where not all have room; others leave. Returns
    /// when the copies are enqueued; forwards from now on use them.
    ///
    /// # Errors
    /// An id that is no expert; if the driver fails.
    pub fn make_resident(&self, experts: &[u32]) -> Result<(), MoeError> {
        self.check_experts(experts)?;
        let state = self.runtime.lock();
        self.bring_in(&state, experts, usize::MAX)
    }

    /// The experts in HBM, ascending.
    pub fn resident(&self) -> Vec<u32> {
        let layers = self.layer_devices();
        let mut experts: Vec<u32> = layers
            .iter()
            .flat_map(|l| l.cache.cached.experts())
            .collect();
        experts.sort_unstable();
        experts
    }

    /// Bytes of HBM on each device: its ring, shared by layers, and this layer's cache.
    pub fn device_bytes(&self) -> Vec<(usize, usize)> {
        let state = self.runtime.lock();
        let layers = self.layer_devices();
        let bytes = state.devices.list.iter().zip(layers.iter());
        bytes
            .map(|(d, l)| (d.ring_bytes(), l.cache.bytes()))
            .collect()
    }

    /// Starts to copy experts that the next forward of this layer will need: whole ones, as far as
    /// the rings have room. Returns how many; the next forward of any layer may take the room back.
    ///
    /// # Errors
    /// An id that is no expert; if the driver fails.
    pub fn prefetch(&self, experts: &[u32]) -> Result<usize, MoeError> {
        self.check_experts(experts)?;
        let mut state = self.runtime.lock();
        let layers = self.layer_devices();
        let is_free = |&expert: &u32| {
            let held = |l: &LayerDevice| l.cache.cached.cell(expert as usize).is_some();
            !layers.iter().any(held)
        };
        let experts: Vec<usize> = experts
            .iter()
            .filter(|expert| is_free(expert))
            .map(|&expert| expert as usize)
            .collect();
        let count = state.devices.list.len();
        let mut copied = 0;
        for (i, device) in state.devices.list.iter_mut().enumerate() {
            let mine: Vec<usize> = experts.iter().copied().skip(i).step_by(count).collect();
            // SAFETY: `drop` waits for copies before the bank goes.
            copied += unsafe { device.prefetch(self.id, &self.bank, &mine)? };
        }
        Ok(copied)
    }

    /// Overwrites all device scratch with NaN bytes, so that a test can show that no result depends
    /// on what it held.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn poison_scratch(&self) -> Result<(), MoeError> {
        let mut state = self.runtime.lock();
        state.settle()?;
        Ok(state.devices.poison()?)
    }

    fn check_experts(&self, experts: &[u32]) -> Result<(), MoeError> {
        let count = self.bank.geometry().experts;
        match experts.iter().find(|&&expert| expert as usize >= count) {
            None => Ok(()),
            Some(&expert) => Err(MoeError::Expert {
                expert,
                experts: count,
            }),
        }
    }

    fn bring_in(
        &self,
        state: &MutexGuard<'_, State>,
        wanted: &[u32],
        most: usize,
    ) -> Result<(), MoeError> {
        let mut layers = self.layer_devices();
        let count = layers.len();
        for (i, (device, layer)) in state.devices.list.iter().zip(layers.iter_mut()).enumerate() {
            // Each device wants its own part, so that the caches add up.
            let of_device = |e: &u32| *e as usize % count == i;
            let wanted: Vec<u32> = wanted.iter().copied().filter(of_device).collect();
            for swap in layer.cache.cached.swaps_towards(&wanted, most) {
                // SAFETY: `drop` waits for copies before the bank goes.
                unsafe { device.fill(&mut layer.cache, &self.bank, swap.cell, swap.expert)? };
            }
        }
        Ok(())
    }
}

impl Drop for MoeLayer {
    fn drop(&mut self) {
        // Work in flight reads the bank.
        #[cfg(feature = "cuda")]
        {
            let mut state = self.runtime.lock();
            let mut drained = state.devices.drain();
            for layer in self.layer_devices().iter() {
                drained = drained.and(layer.cache.synchronize());
            }
            state.devices.forget(self.id);
            if let Err(error) = drained {
                tracing::warn!(%error, "waiting for an MoE layer's work before freeing it");
            }
        }
    }
}

/// In what order with others' work a forward runs.
#[derive(Clone, Copy, Default)]
struct Waits<'a> {
    #[cfg(feature = "cuda")]
    stream: Option<&'a Stream>,
    #[cfg(not(feature = "cuda"))]
    _none: std::marker::PhantomData<&'a ()>,
}
