//! The MoE block of one decoder layer, as its model computes it.
//!
//! ```text
//! x -> router -> top-k -> packed rows -> experts (CPU, GPU or both) -> weighted sum -> out
//!  \-> shared expert (weight 1, or a sigmoid gate) ---------------------/
//! ```
//!
//! The router and the sum are f32 and the same on every back end; in int8 so are all bits
//! of the result.

use super::division::{FixedPolicy, STATIC_M_CPU};
use super::routing::{Router, Routing};
use super::{ExpertBank, LayerReport, MoeError, MoeLayer};
use crate::checkpoint::MoeLayer as CheckpointLayer;
#[cfg(feature = "cuda")]
use crate::driver::{DriverError, Gpu};
#[cfg(feature = "cuda")]
use crate::transfer::{Transfer, ring_bytes_for};
use asym_gemm_cpu::{Engine, ExpertSource, StoredRow};
use asym_gemm_formats::activation::{Activation, swish};
use asym_gemm_formats::bank::{BankGeometry, Projection};
use asym_gemm_formats::{WeightFormat, fma};
use std::sync::Arc;

/// Who computes the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU.
    Cpu,
    /// The GPU.
    Gpu,
    /// Experts with more than [`STATIC_M_CPU`] rows on the GPU, the others on the CPU.
    Both,
}

impl Backend {
    /// Whether it has kernels for experts in `format`: fp8 and fp4 run on the CPU alone.
    pub const fn supports(self, format: WeightFormat) -> bool {
        match self {
            Self::Cpu => true,
            Self::Gpu | Self::Both => matches!(
                format,
                WeightFormat::Bf16 | WeightFormat::Int8PerRow | WeightFormat::Int8Block128
            ),
        }
    }

    const fn policy(self) -> FixedPolicy {
        match self {
            Self::Cpu => FixedPolicy::CpuOnly,
            Self::Gpu => FixedPolicy::GpuOnly,
            Self::Both => FixedPolicy::Static(STATIC_M_CPU),
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Both => "both",
        })
    }
}

/// The expert that every token passes through.
#[derive(Debug)]
struct Shared {
    layer: MoeLayer,
    /// `[H]`: weight sigmoid(x · gate); without it the weight is 1.
    gate: Option<Vec<f32>>,
}

/// What a forward did.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ForwardReport {
    /// Back end asked for.
    pub backend: Backend,
    /// Kernels that ran, CPU first.
    pub kernels: Vec<String>,
    /// Routed experts that the CPU computed.
    pub cpu_experts: usize,
    /// Routed experts that the GPU computed.
    pub gpu_experts: usize,
    /// Bytes of the experts used, the shared one included.
    pub weight_bytes: usize,
    /// Wall time from x on the host to the output on the host, routing included.
    pub seconds: f64,
}

/// One layer's MoE block, ready to run.
#[derive(Debug)]
pub struct MoeBlock {
    router: Router,
    #[cfg(feature = "cuda")]
    activation: Activation,
    experts: MoeLayer,
    shared: Option<Shared>,
    cpu: Engine,
    #[cfg(feature = "cuda")]
    transfer: Option<Transfer>,
}

/// One routed expert of a checkpoint's layer.
struct RoutedExpert<'a> {
    layer: &'a CheckpointLayer,
    expert: usize,
}

impl ExpertSource for RoutedExpert<'_> {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        self.layer.expert_row(self.expert, projection, row, out);
    }

    fn bias(&self, projection: Projection) -> Option<&[f32]> {
        self.layer.expert_bias(self.expert, projection)
    }

    fn stored_row(
        &self,
        format: WeightFormat,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        self.layer
            .stored_expert_row(format, self.expert, projection, row, out)
    }
}

/// The shared expert of a checkpoint's layer.
struct SharedExpert<'a>(&'a CheckpointLayer);

impl ExpertSource for SharedExpert<'_> {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        self.0.shared_row(projection, row, out);
    }

    fn bias(&self, _: Projection) -> Option<&[f32]> {
        None
    }

    fn stored_row(
        &self,
        format: WeightFormat,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        self.0.stored_shared_row(format, projection, row, out)
    }
}

/// Geometries of the routed experts and of the shared one.
///
/// Where the routed experts stay as they are stored, so does the shared one, which checkpoints often
/// leave in bf16; a format that none of them has is one that was asked for, and is for both.
fn geometries(
    layer: &CheckpointLayer,
    format: WeightFormat,
) -> (BankGeometry, Option<BankGeometry>) {
    let spec = &layer.spec;
    let routed = BankGeometry {
        experts: spec.experts,
        hidden: spec.hidden,
        intermediate: spec.intermediate,
        format,
        bias: spec.bias,
    };
    let shared = spec.shared.as_ref().map(|shared| BankGeometry {
        experts: 1,
        intermediate: shared.intermediate,
        format: match layer.stored_format() {
            Some(stored) if stored == format => {
                layer.stored_shared_format().unwrap_or(WeightFormat::Bf16)
            }
            _ => format,
        },
        bias: false,
        ..routed
    });
    (routed, shared)
}

/// The parts of a checkpoint's layer around its banks.
fn parts(layer: &CheckpointLayer, experts: ExpertBank, shared: Option<ExpertBank>) -> BlockParts {
    BlockParts {
        router: layer.router.clone(),
        activation: layer.spec.activation,
        experts,
        shared: shared.map(|bank| (bank, layer.shared_gate.clone())),
    }
}

/// What an [`MoeBlock`] is made of.
#[derive(Debug)]
pub struct BlockParts {
    /// Chooses the experts.
    pub router: Router,
    /// Between gate, up and down.
    pub activation: Activation,
    /// The routed experts.
    pub experts: ExpertBank,
    /// The expert that every token visits: its bank (of one expert), and `[H]` whose product
    /// with the token gates it through a sigmoid, or `None` for a weight of 1.
    pub shared: Option<(ExpertBank, Option<Vec<f32>>)>,
}

impl BlockParts {
    fn check(&self) -> Result<(), MoeError> {
        let experts = self.experts.geometry();
        let mismatch = |what, found, needed| MoeError::Parts {
            what,
            found,
            needed,
        };
        if self.router.hidden() != experts.hidden {
            return Err(mismatch(
                "the router's width",
                self.router.hidden(),
                experts.hidden,
            ));
        }
        if self.router.experts() != experts.experts {
            return Err(mismatch(
                "the router's experts",
                self.router.experts(),
                experts.experts,
            ));
        }
        let Some((bank, gate)) = &self.shared else {
            return Ok(());
        };
        let shared = bank.geometry();
        if shared.hidden != experts.hidden {
            return Err(mismatch(
                "the shared expert's width",
                shared.hidden,
                experts.hidden,
            ));
        }
        if shared.experts != 1 {
            return Err(mismatch("the shared bank's experts", shared.experts, 1));
        }
        match gate {
            Some(gate) if gate.len() != experts.hidden => Err(mismatch(
                "the shared gate's width",
                gate.len(),
                experts.hidden,
            )),
            _ => Ok(()),
        }
    }
}

impl MoeBlock {
    /// A block for the CPU from its parts.
    ///
    /// # Errors
    /// If the parts do not fit each other.
    pub fn from_parts(parts: BlockParts, cpu: Engine) -> Result<Self, MoeError> {
        parts.check()?;
        let activation = parts.activation;
        let experts = MoeLayer::builder(Arc::new(parts.experts))
            .activation(activation)
            .engine(cpu.clone())
            .build()?;
        let shared = match parts.shared {
            Some((bank, gate)) => Some(Shared {
                layer: beside(&experts, Arc::new(bank), activation)?,
                gate,
            }),
            None => None,
        };
        Ok(Self {
            router: parts.router,
            #[cfg(feature = "cuda")]
            activation,
            experts,
            shared,
            cpu,
            #[cfg(feature = "cuda")]
            transfer: None,
        })
    }

    /// Adds a GPU. `ring_bytes` bounds the HBM of staged transfer
    /// ([`ring_bytes_for`] the largest expert if `None`). Banks in ordinary memory are copied
    /// more slowly, and kernels cannot read them themselves.
    ///
    /// # Errors
    /// If the ring is too small, memory is short, the GPU lacks the kernels, or direct transfer is
    /// asked for and a bank is not pinned.
    #[cfg(feature = "cuda")]
    pub fn attach_gpu(
        &mut self,
        gpu: &Gpu,
        transfer: Transfer,
        ring_bytes: Option<usize>,
    ) -> Result<(), MoeError> {
        let bank = self.experts.bank().clone();
        let shared_bank = self.shared.as_ref().map(|shared| shared.layer.bank());
        let largest = std::iter::once(&bank)
            .chain(shared_bank)
            .map(|bank| bank.geometry().expert_bytes())
            .max()
            .unwrap_or(0);
        let cached = |bank: &ExpertBank| match transfer {
            Transfer::Resident => bank.geometry().bank_bytes(),
            _ => 0,
        };
        let direct = transfer == Transfer::Direct;
        let experts = MoeLayer::builder(bank.clone())
            .activation(self.activation)
            .engine(self.cpu.clone())
            .devices(std::slice::from_ref(gpu))
            .ring_budget(ring_bytes.unwrap_or_else(|| ring_bytes_for(largest)))
            .hbm_budget(cached(&bank))
            .direct(direct)
            .build()?;
        let shared = match shared_bank {
            Some(bank) => Some(
                MoeLayer::builder(bank.clone())
                    .activation(self.activation)
                    .sharing(&experts)
                    .hbm_budget(cached(bank))
                    .direct(direct)
                    .build()?,
            ),
            None => None,
        };
        if transfer == Transfer::Resident {
            std::iter::once(&experts)
                .chain(&shared)
                .try_for_each(|layer| all_resident(layer, gpu))?;
        }
        self.experts = experts;
        if let (Some(shared), Some(layer)) = (&mut self.shared, shared) {
            shared.layer = layer;
        }
        self.transfer = Some(match transfer {
            Transfer::Auto => Transfer::Staged,
            other => other,
        });
        Ok(())
    }

    /// A checkpoint's layer for the CPU; `packed` is called after each expert, for progress.
    ///
    /// # Errors
    /// If the weights do not make a bank.
    pub fn for_cpu(
        layer: &CheckpointLayer,
        format: WeightFormat,
        cpu: Engine,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        let (routed, shared) = geometries(layer, format);
        let experts = ExpertBank::plain(routed, |expert| RoutedExpert { layer, expert }, &packed)?;
        let shared = shared
            .map(|geometry| ExpertBank::plain(geometry, |_| SharedExpert(layer), &packed))
            .transpose()?;
        Self::from_parts(parts(layer, experts, shared), cpu)
    }

    /// A checkpoint's layer for CPU and GPU, whose weights lie in pinned host memory that
    /// both read (in ordinary memory where it cannot be pinned); see [`Self::attach_gpu`].
    ///
    /// # Errors
    /// As [`Self::for_cpu`] and [`Self::attach_gpu`].
    #[cfg(feature = "cuda")]
    pub fn for_cpu_and_gpu(
        layer: &CheckpointLayer,
        format: WeightFormat,
        cpu: Engine,
        gpu: &Gpu,
        transfer: Transfer,
        ring_bytes: Option<usize>,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        let (routed, shared) = geometries(layer, format);
        let experts = ExpertBank::pinned_or_plain(
            gpu,
            routed,
            |expert| RoutedExpert { layer, expert },
            &packed,
        )?;
        let shared = shared
            .map(|geometry| {
                ExpertBank::pinned_or_plain(gpu, geometry, |_| SharedExpert(layer), &packed)
            })
            .transpose()?;
        let mut block = Self::from_parts(parts(layer, experts, shared), cpu)?;
        block.attach_gpu(gpu, transfer, ring_bytes)?;
        Ok(block)
    }

    /// Width of a token.
    pub fn hidden(&self) -> usize {
        self.experts.bank().geometry().hidden
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The bank of the routed experts.
    pub fn experts(&self) -> &Arc<ExpertBank> {
        self.experts.bank()
    }

    /// How weights reach the GPU, if the block has one; never `Auto`.
    #[cfg(feature = "cuda")]
    pub fn transfer(&self) -> Option<Transfer> {
        self.transfer
    }

    /// Overwrites all device scratch with NaN bytes; see [`MoeLayer::poison_scratch`].
    ///
    /// # Errors
    /// If the driver fails.
    #[cfg(feature = "cuda")]
    pub fn poison_scratch(&mut self) -> Result<(), MoeError> {
        self.experts.poison_scratch()
    }

    /// The block's output [T, H] for x [T, H].
    ///
    /// # Errors
    /// If x is not whole tokens, the back end is not there, or it fails.
    pub fn forward(
        &mut self,
        x: &[f32],
        backend: Backend,
    ) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        let start = std::time::Instant::now();
        let routing = self.router.route(x)?;
        let (out, mut report) = self.forward_routed(x, &routing, backend)?;
        report.seconds = start.elapsed().as_secs_f64();
        Ok((out, report))
    }

    /// As [`Self::forward`] with a routing made elsewhere.
    ///
    /// # Errors
    /// As [`Self::forward`]; also if the routing is not of these tokens and experts.
    pub fn forward_routed(
        &mut self,
        x: &[f32],
        routing: &Routing,
        backend: Backend,
    ) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        let start = std::time::Instant::now();
        if backend != Backend::Cpu {
            self.check_gpu()?;
        }
        self.experts.set_policy(backend.policy());
        let mut out = vec![0.0; x.len()];
        let mut reports = vec![self.experts.forward(x, routing, &mut out)?];
        if let Some(shared) = &self.shared {
            let tokens = x.len() / self.hidden();
            let all = Routing {
                top_k: 1,
                ids: vec![0; tokens],
                weights: vec![1.0; tokens],
            };
            let mut rows = vec![0.0; x.len()];
            reports.push(shared.layer.forward(x, &all, &mut rows)?);
            self.add_shared(shared, x, &rows, &mut out);
        }
        let mut report = self.report(backend, &reports);
        report.seconds = start.elapsed().as_secs_f64();
        Ok((out, report))
    }

    /// out = fma(weight, row, out) for the shared expert's rows.
    fn add_shared(&self, shared: &Shared, x: &[f32], rows: &[f32], out: &mut [f32]) {
        let hidden = self.hidden();
        let tokens = x.chunks_exact(hidden).zip(rows.chunks_exact(hidden));
        for ((x, rows), out) in tokens.zip(out.chunks_exact_mut(hidden)) {
            let weight = match &shared.gate {
                None => 1.0,
                // swish(1, z) = 1 / (1 + e^-z), the project's one exp.
                Some(gate) => swish(1.0, x.iter().zip(gate).map(|(x, g)| x * g).sum()),
            };
            for (out, &row) in out.iter_mut().zip(rows) {
                *out = fma(weight, row, *out);
            }
        }
    }

    fn check_gpu(&self) -> Result<(), MoeError> {
        #[cfg(feature = "cuda")]
        let reason = match self.transfer {
            Some(_) => return Ok(()),
            None => "this block was built for the CPU only",
        };
        #[cfg(not(feature = "cuda"))]
        let reason = "built without the cuda feature";
        Err(MoeError::Backend {
            backend: "gpu",
            reason: reason.into(),
        })
    }

    /// What the routed experts' forward and the shared one's did.
    fn report(&self, backend: Backend, reports: &[LayerReport]) -> ForwardReport {
        let layers = std::iter::once(&self.experts).chain(self.shared.iter().map(|s| &s.layer));
        let weight_bytes = layers.zip(reports).map(|(layer, report)| {
            report.division.summary().experts * layer.bank().geometry().expert_bytes()
        });
        let routed = reports.first().map(|r| r.division.summary());
        let routed = routed.unwrap_or_default();
        let mut kernels = Vec::new();
        let on_cpu = |r: &LayerReport| r.division.summary().cpu.shares > 0;
        if backend == Backend::Cpu || reports.iter().any(on_cpu) {
            let format = self.experts().geometry().format;
            kernels.push(self.cpu.kernel_name(format).to_owned());
        }
        for name in reports.iter().flat_map(|r| &r.kernels) {
            if !kernels.contains(name) {
                kernels.push(name.clone());
            }
        }
        ForwardReport {
            backend,
            kernels,
            cpu_experts: routed.cpu.shares,
            gpu_experts: routed.gpu.shares,
            weight_bytes: weight_bytes.sum(),
            seconds: 0.0,
        }
    }
}

/// A layer that shares threads and devices with `experts`.
fn beside(
    experts: &MoeLayer,
    bank: Arc<ExpertBank>,
    activation: Activation,
) -> Result<MoeLayer, MoeError> {
    MoeLayer::builder(bank)
        .activation(activation)
        .sharing(experts)
        .build()
}

/// Brings all experts of a layer into HBM.
#[cfg(feature = "cuda")]
fn all_resident(layer: &MoeLayer, gpu: &Gpu) -> Result<(), MoeError> {
    let geometry = layer.bank().geometry();
    let all: Vec<u32> = (0..geometry.experts as u32).collect();
    layer.make_resident(&all)?;
    let held = layer.resident().len();
    if held < all.len() {
        return Err(DriverError::OutOfMemory {
            what: "device",
            bytes: geometry.bank_bytes() as u64,
            detail: format!(
                "GPU {} holds {held} of {} experts; use staged transfer",
                gpu.ordinal(),
                all.len()
            ),
        }
        .into());
    }
    Ok(())
}
