//! The MoE block of one decoder layer, as its model computes it.
//!
//! ```text
//! x -> router -> top-k -> packed rows -> experts (CPU, GPU or both) -> weighted sum -> out
//!  \-> shared expert (weight 1, or a sigmoid gate) ---------------------/
//! ```
//!
//! The router and the sum are f32 and the same on every back end; in int8 so are all bits
//! of the result.

use super::layout::{GroupRange, Packed, pack};
use super::routing::{Router, Routing};
use super::{ExpertBank, MoeError};
use crate::checkpoint::MoeLayer;
#[cfg(feature = "cuda")]
use crate::driver::Gpu;
#[cfg(feature = "cuda")]
use crate::moe::gpu_block::GpuBlock;
#[cfg(feature = "cuda")]
use crate::transfer::Transfer;
use asym_gemm_cpu::{Combine, Engine, ExpertGroup, ExpertSource, Slots, StoredRow, combine};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::{Activation, swish};
use asym_gemm_formats::bank::{BankGeometry, Projection};
use std::sync::Arc;

/// Rows from which an expert goes to the GPU when both back ends work: below, its weights
/// cost more on the link than the CPU needs to use them in place.
pub const BOTH_THRESHOLD_ROWS: usize = 16;

/// Who computes the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU.
    Cpu,
    /// The GPU.
    Gpu,
    /// Experts with at least [`BOTH_THRESHOLD_ROWS`] rows on the GPU, the others on the CPU.
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
    bank: Arc<ExpertBank>,
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
    activation: Activation,
    experts: Arc<ExpertBank>,
    shared: Option<Shared>,
    cpu: Engine,
    #[cfg(feature = "cuda")]
    gpu: Option<GpuBlock>,
}

/// One routed expert of a checkpoint's layer.
struct RoutedExpert<'a> {
    layer: &'a MoeLayer,
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
struct SharedExpert<'a>(&'a MoeLayer);

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
fn geometries(layer: &MoeLayer, format: WeightFormat) -> (BankGeometry, Option<BankGeometry>) {
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
        bias: false,
        ..routed
    });
    (routed, shared)
}

/// The parts of a checkpoint's layer around its banks.
fn parts(layer: &MoeLayer, experts: ExpertBank, shared: Option<ExpertBank>) -> BlockParts {
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
        Ok(Self {
            router: parts.router,
            activation: parts.activation,
            experts: Arc::new(parts.experts),
            shared: parts.shared.map(|(bank, gate)| Shared {
                bank: Arc::new(bank),
                gate,
            }),
            cpu,
            #[cfg(feature = "cuda")]
            gpu: None,
        })
    }

    /// Adds a GPU; all banks must be pinned. `ring_bytes` bounds the HBM of staged transfer
    /// for each bank ([`ring_bytes_for`](crate::transfer::ring_bytes_for) its experts if `None`).
    ///
    /// # Errors
    /// If a bank is not pinned, the ring is too small, memory is short or the GPU lacks the
    /// kernels.
    #[cfg(feature = "cuda")]
    pub fn attach_gpu(
        &mut self,
        gpu: &Gpu,
        transfer: Transfer,
        ring_bytes: Option<usize>,
    ) -> Result<(), MoeError> {
        let shared = self.shared.as_ref().map(|shared| shared.bank.clone());
        self.gpu = Some(GpuBlock::new(
            gpu,
            self.experts.clone(),
            shared,
            transfer,
            ring_bytes,
        )?);
        Ok(())
    }

    /// A checkpoint's layer for the CPU; `packed` is called after each expert, for progress.
    ///
    /// # Errors
    /// If the weights do not make a bank.
    pub fn for_cpu(
        layer: &MoeLayer,
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
    /// both read; see [`Self::attach_gpu`].
    ///
    /// # Errors
    /// As [`Self::for_cpu`]; also if memory cannot be pinned or the GPU lacks the kernels.
    #[cfg(feature = "cuda")]
    pub fn for_cpu_and_gpu(
        layer: &MoeLayer,
        format: WeightFormat,
        cpu: Engine,
        gpu: &Gpu,
        transfer: Transfer,
        ring_bytes: Option<usize>,
        packed: impl Fn() + Sync,
    ) -> Result<Self, MoeError> {
        let (routed, shared) = geometries(layer, format);
        let experts = ExpertBank::pinned(
            gpu,
            routed,
            |expert| RoutedExpert { layer, expert },
            &packed,
        )?;
        let shared = shared
            .map(|geometry| ExpertBank::pinned(gpu, geometry, |_| SharedExpert(layer), &packed))
            .transpose()?;
        let mut block = Self::from_parts(parts(layer, experts, shared), cpu)?;
        block.attach_gpu(gpu, transfer, ring_bytes)?;
        Ok(block)
    }

    /// Width of a token.
    pub fn hidden(&self) -> usize {
        self.experts.geometry().hidden
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The bank of the routed experts.
    pub fn experts(&self) -> &Arc<ExpertBank> {
        &self.experts
    }

    /// The GPU side, if the block has one.
    #[cfg(feature = "cuda")]
    pub fn gpu_mut(&mut self) -> Option<&mut GpuBlock> {
        self.gpu.as_mut()
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
        let hidden = self.hidden();
        if !x.len().is_multiple_of(hidden) {
            return Err(MoeError::Input {
                len: x.len(),
                hidden,
            });
        }
        let tokens = x.len() / hidden;
        if routing.weights.len() != routing.ids.len() {
            return Err(MoeError::Parts {
                what: "the routing's weights",
                found: routing.weights.len(),
                needed: routing.ids.len(),
            });
        }
        let packed = pack(
            &routing.ids,
            tokens,
            routing.top_k,
            self.experts.geometry().experts,
            1,
        )?;
        let shared_weights = self.shared_weights(x);
        let forward = Forward {
            x,
            tokens,
            routing,
            packed: &packed,
            shared_weights,
        };
        let (out, mut report) = match backend {
            Backend::Cpu => self.forward_cpu(&forward)?,
            Backend::Gpu | Backend::Both => self.forward_gpu(&forward, backend)?,
        };
        report.seconds = start.elapsed().as_secs_f64();
        Ok((out, report))
    }

    /// Weight of the shared expert for each token.
    fn shared_weights(&self, x: &[f32]) -> Vec<f32> {
        let Some(shared) = &self.shared else {
            return Vec::new();
        };
        let weight = |row: &[f32]| match &shared.gate {
            None => 1.0,
            // swish(1, z) = 1 / (1 + e^-z), the project's one exp.
            Some(gate) => swish(1.0, row.iter().zip(gate).map(|(x, g)| x * g).sum()),
        };
        x.chunks_exact(self.hidden()).map(weight).collect()
    }

    fn forward_cpu(&self, f: &Forward<'_>) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        let out = match self.cpu_shared(f)? {
            // Experts and their weighted sums in one parallel region.
            None => self.cpu_layer(f)?,
            shared => {
                let mut y = vec![0.0; f.packed.rows * self.hidden()];
                self.cpu_experts(f, &f.packed.groups, &mut y)?;
                self.combine(f, &y, shared.as_deref())?
            }
        };
        let used = f.packed.groups.len();
        Ok((out, self.report(Backend::Cpu, self.cpu_kernel(), used, 0)))
    }

    fn cpu_kernel(&self) -> Vec<String> {
        vec![
            self.cpu
                .kernel_name(self.experts.geometry().format)
                .to_owned(),
        ]
    }

    /// y[rows of `groups`] on the CPU.
    fn cpu_experts(
        &self,
        f: &Forward<'_>,
        groups: &[GroupRange],
        y: &mut [f32],
    ) -> Result<(), MoeError> {
        let tokens = packed_tokens(f);
        let groups = expert_groups(groups, &tokens);
        Ok(self
            .cpu
            .expert_ffn(self.experts.view()?, self.activation, f.x, &groups, y)?)
    }

    /// The output [T, H] of all experts on the CPU.
    fn cpu_layer(&self, f: &Forward<'_>) -> Result<Vec<f32>, MoeError> {
        let tokens = packed_tokens(f);
        let slots = Slots {
            top_k: f.routing.top_k,
            output_index: &f.packed.output_index,
            weights: &f.routing.weights,
        };
        let mut out = vec![0.0; f.x.len()];
        self.cpu.expert_layer(
            self.experts.view()?,
            self.activation,
            f.x,
            &expert_groups(&f.packed.groups, &tokens),
            slots,
            &mut out,
        )?;
        Ok(out)
    }

    /// The shared expert's rows [T, H] on the CPU.
    fn cpu_shared(&self, f: &Forward<'_>) -> Result<Option<Vec<f32>>, MoeError> {
        let Some(shared) = &self.shared else {
            return Ok(None);
        };
        let tokens: Vec<u32> = (0..f.tokens as u32).collect();
        let group = ExpertGroup {
            expert: 0,
            start: 0,
            tokens: &tokens,
        };
        let mut rows = vec![0.0; f.x.len()];
        self.cpu.expert_ffn(
            shared.bank.view()?,
            self.activation,
            f.x,
            &[group],
            &mut rows,
        )?;
        Ok(Some(rows))
    }

    fn combine(
        &self,
        f: &Forward<'_>,
        y: &[f32],
        shared: Option<&[f32]>,
    ) -> Result<Vec<f32>, MoeError> {
        let mut out = vec![0.0; f.x.len()];
        let parts = Combine {
            y,
            hidden: self.hidden(),
            top_k: f.routing.top_k,
            output_index: &f.packed.output_index,
            weights: &f.routing.weights,
            shared: shared.map(|rows| (rows, &f.shared_weights[..])),
        };
        combine(parts, &mut out)?;
        Ok(out)
    }

    fn report(
        &self,
        backend: Backend,
        kernels: Vec<String>,
        cpu_experts: usize,
        gpu_experts: usize,
    ) -> ForwardReport {
        let routed = (cpu_experts + gpu_experts) * self.experts.geometry().expert_bytes();
        let shared = self
            .shared
            .as_ref()
            .map_or(0, |s| s.bank.geometry().expert_bytes());
        ForwardReport {
            backend,
            kernels,
            cpu_experts,
            gpu_experts,
            weight_bytes: routed + shared,
            seconds: 0.0,
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn forward_gpu(
        &mut self,
        _: &Forward<'_>,
        _: Backend,
    ) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        Err(MoeError::Backend {
            backend: "gpu",
            reason: "built without the cuda feature".into(),
        })
    }

    #[cfg(feature = "cuda")]
    fn forward_gpu(
        &mut self,
        f: &Forward<'_>,
        backend: Backend,
    ) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        let Some(mut gpu) = self.gpu.take() else {
            return Err(MoeError::Backend {
                backend: "gpu",
                reason: "this block was built for the CPU only".into(),
            });
        };
        let result = match backend {
            Backend::Both => self.forward_both(f, &mut gpu),
            Backend::Cpu | Backend::Gpu => gpu.forward(f, self.activation).map(|(out, kernels)| {
                (
                    out,
                    self.report(Backend::Gpu, kernels, 0, f.packed.groups.len()),
                )
            }),
        };
        self.gpu = Some(gpu);
        result
    }

    /// Large groups on the GPU while the CPU computes the small ones; the sum on the CPU, in
    /// slot order whoever computed a row.
    #[cfg(feature = "cuda")]
    fn forward_both(
        &self,
        f: &Forward<'_>,
        gpu: &mut GpuBlock,
    ) -> Result<(Vec<f32>, ForwardReport), MoeError> {
        let (large, small): (Vec<GroupRange>, Vec<GroupRange>) = f
            .packed
            .groups
            .iter()
            .partition(|g| g.end - g.start >= BOTH_THRESHOLD_ROWS);
        let shared_on_gpu = f.tokens >= BOTH_THRESHOLD_ROWS;
        let mut y = vec![0.0; f.packed.rows * self.hidden()];
        let mut kernels = self.cpu_kernel();
        let pending = gpu.start(f, &large, shared_on_gpu, self.activation)?;
        let on_cpu = self
            .cpu_experts(f, &small, &mut y)
            .and_then(|()| match shared_on_gpu {
                true => Ok(None),
                false => self.cpu_shared(f),
            });
        // The GPU's work is waited for whether or not the CPU's succeeded.
        let on_gpu = gpu.finish(f, &large, shared_on_gpu, &mut y);
        let shared = match (on_cpu?, on_gpu?) {
            (Some(rows), _) | (None, Some(rows)) => Some(rows),
            (None, None) => None,
        };
        kernels.extend(pending);
        let out = self.combine(f, &y, shared.as_deref())?;
        Ok((
            out,
            self.report(Backend::Both, kernels, small.len(), large.len()),
        ))
    }
}

/// One forward's inputs.
pub(super) struct Forward<'a> {
    /// [T, H].
    pub(super) x: &'a [f32],
    pub(super) tokens: usize,
    pub(super) routing: &'a Routing,
    pub(super) packed: &'a Packed,
    /// `[T]`, empty without a shared expert.
    pub(super) shared_weights: Vec<f32>,
}
/// The token of each packed row.
fn packed_tokens(f: &Forward<'_>) -> Vec<u32> {
    f.packed.source_token.iter().map(|&t| t as u32).collect()
}

/// Ranges of packed rows as the CPU engine takes them.
fn expert_groups<'a>(groups: &[GroupRange], tokens: &'a [u32]) -> Vec<ExpertGroup<'a>> {
    groups
        .iter()
        .map(|g| ExpertGroup {
            expert: g.expert,
            start: g.start,
            tokens: &tokens[g.start..g.end],
        })
        .collect()
}
