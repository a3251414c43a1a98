//! The entry points that depend on the instruction set.

use std::ops::Range;
use std::sync::Arc;

use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use half::bf16;

use crate::bank::BankRef;
use crate::combine::Slots;
use crate::ffn::{self, Call, Destination, ExpertGroup};
use crate::gemm::{self, GroupRange, Output};
use crate::isa::{Features, ISA_VARIABLE, Isa};
use crate::kernels::Kernel;
use crate::kernels::fp4::{Mxfp4, Nvfp4};
use crate::matrix::{Bf16Weights, Fp8Weights, Int8Rows, Int8Weights, MatrixMut, MatrixRef};
use crate::pool::{Workers, default_workers};
use crate::tokens::Rows;
use crate::validate::same;
use crate::workspace::{Workspace, Workspaces};
use crate::{CpuError, recipe};

/// Expert GEMM and feed-forward with one chosen instruction set.
///
/// Work runs on the threads of [`default_workers`] unless [`Engine::with_workers`] names others.
/// An engine keeps the memory of its calls for the next ones; clones share it, and calls at the
/// same time have their own.
///
/// int8 results are identical on every instruction set. bf16 results of one instruction set do not
/// depend on the other tokens of the call; between instruction sets the order of f32 additions may
/// differ, and the AVX-512 BF16 instruction treats subnormal operands and results as zero.
#[derive(Clone)]
pub struct Engine {
    kernel: Kernel,
    workers: Arc<dyn Workers>,
    workspaces: Workspaces,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("kernel", &self.kernel)
            .field("threads", &self.workers.threads())
            .finish_non_exhaustive()
    }
}

impl Engine {
    fn new(kernel: Kernel) -> Result<Self, CpuError> {
        Ok(Self {
            kernel,
            workers: default_workers()?,
            workspaces: Workspaces::default(),
        })
    }

    /// The best instruction set of this processor, or the one that the environment variable
    /// `ASYM_GEMM_ISA` forces by its [`Isa::name`]; empty counts as unset.
    ///
    /// # Errors
    /// The variable names no instruction set, or one that this processor lacks; the default threads
    /// cannot start.
    pub fn detect() -> Result<Self, CpuError> {
        match std::env::var_os(ISA_VARIABLE) {
            Some(name) if !name.is_empty() => Self::with_isa(Isa::parse(&name.to_string_lossy())?),
            _ => Self::with_features(Features::detect()),
        }
    }

    /// That instruction set.
    ///
    /// # Errors
    /// [`CpuError::IsaUnavailable`] if this processor lacks it; the default threads cannot start.
    pub fn with_isa(isa: Isa) -> Result<Self, CpuError> {
        let detected = Features::detect();
        let missing = isa.required().names_without(detected);
        if !missing.is_empty() {
            return Err(CpuError::IsaUnavailable { isa, missing });
        }
        Self::with_features(isa.most().common(detected))
    }

    /// The best instruction set that needs no more than `allowed`, for tests of what other
    /// processors run. Features that this processor lacks stay unused.
    ///
    /// # Errors
    /// The default threads cannot start.
    pub fn with_features(allowed: Features) -> Result<Self, CpuError> {
        Self::new(Kernel::best(allowed))
    }

    /// The AMX kernels with their tile products in plain Rust: slow, on every processor. For tests
    /// of what they compute (int8: the same bytes) on machines without AMX.
    ///
    /// # Errors
    /// The default threads cannot start.
    pub fn emulating_amx() -> Result<Self, CpuError> {
        Self::new(Kernel::EmulatedAmx)
    }

    /// The same kernels and memory on other threads.
    #[must_use]
    pub fn with_workers(self, workers: Arc<dyn Workers>) -> Self {
        Self { workers, ..self }
    }

    /// The threads in use.
    pub fn workers(&self) -> &Arc<dyn Workers> {
        &self.workers
    }

    /// The instruction sets of this processor, slowest first.
    pub fn available() -> Vec<Isa> {
        let detected = Features::detect();
        Isa::ALL
            .into_iter()
            .filter(|isa| detected.contains(isa.required()))
            .collect()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.kernel.isa()
    }

    /// The kernel that weights of `format` run on.
    pub fn kernel_name(&self, format: WeightFormat) -> &'static str {
        self.kernel.name(format)
    }

    /// Feed-forward of each group's tokens through its expert, unweighted: rows
    /// `start..start + tokens.len()` of `y` [M, H] from the named rows of `x` [T, H]. Other rows of
    /// `y` are untouched. H is the bank's.
    ///
    /// # Errors
    /// Lengths that are no multiple of H, an expert or token out of range, rows outside `y`, or two
    /// groups that write the same row. Nothing is written then.
    pub fn expert_ffn<'a>(
        &self,
        bank: BankRef<'a>,
        activation: Activation,
        x: impl Into<Rows<'a>>,
        groups: &'a [ExpertGroup<'a>],
        y: &mut [f32],
    ) -> Result<(), CpuError> {
        let call = Call {
            bank,
            activation,
            x: x.into(),
            groups,
            slices: None,
        };
        let hidden = bank.geometry().hidden;
        let rows = y.len() / hidden;
        same("the length of y", rows * hidden, y.len())?;
        ffn::validate(bank, call.x, groups, rows)?;
        f32::ffn(self, &call, Destination::Experts(y))
    }

    /// A whole expert layer in one parallel region: the feed-forward of [`Engine::expert_ffn`],
    /// then for each token, in slot order from 0, out = fma(weight, y, out), rounded once to the
    /// element type of `out` [T, H]. The groups' rows number the y that `slots` refers to.
    ///
    /// # Errors
    /// As [`Engine::expert_ffn`]; also slots that do not fit `x`, `out` or the groups' rows.
    pub fn expert_layer<'a, O: Output>(
        &self,
        bank: BankRef<'a>,
        activation: Activation,
        x: impl Into<Rows<'a>>,
        groups: &'a [ExpertGroup<'a>],
        slots: Slots<'a>,
        out: &mut [O],
    ) -> Result<(), CpuError> {
        let call = Call {
            bank,
            activation,
            x: x.into(),
            groups,
            slices: None,
        };
        self.layer(&call, slots, out)
    }

    /// The part of [`Engine::expert_layer`] that lies in some slices of 128 of the intermediate
    /// dimension: `slices[g]` is the part that group `g` takes. Somebody else computes the other
    /// parts, and the sum of all parts' `out` is the layer's.
    ///
    /// y is the sum over the group's slices in their order, then scaled as that of whole experts;
    /// the down bias is in the part that has slice 0. So the sum of two parts differs from the
    /// whole by the roundings of f32 additions in another grouping.
    ///
    /// # Errors
    /// As [`Engine::expert_layer`]; also if there is not one range for each group, or one is empty
    /// or goes past the expert.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of `expert_layer` and the slices"
    )]
    pub fn expert_layer_slices<'a, O: Output>(
        &self,
        bank: BankRef<'a>,
        activation: Activation,
        x: impl Into<Rows<'a>>,
        groups: &'a [ExpertGroup<'a>],
        slices: &'a [Range<usize>],
        slots: Slots<'a>,
        out: &mut [O],
    ) -> Result<(), CpuError> {
        ffn::validate_slices(bank, groups, slices)?;
        let call = Call {
            bank,
            activation,
            x: x.into(),
            groups,
            slices: Some(slices),
        };
        self.layer(&call, slots, out)
    }

    fn with_workspace<R>(&self, call: impl FnOnce(Kernel, &dyn Workers, &mut Workspace) -> R) -> R {
        let workers = self.workers.as_ref();
        self.workspaces
            .with(|workspace| call(self.kernel, workers, workspace))
    }

    fn layer<O: Output>(
        &self,
        call: &Call<'_>,
        slots: Slots<'_>,
        out: &mut [O],
    ) -> Result<(), CpuError> {
        let groups = call.groups;
        let hidden = call.bank.geometry().hidden;
        same("the length of out", call.x.len(), out.len())?;
        let rows = groups
            .iter()
            .map(|group| group.start.saturating_add(group.tokens.len()))
            .max()
            .unwrap_or(0);
        // Every row belongs to one group, so there are as many as routed tokens.
        let routed = groups.iter().map(|group| group.tokens.len()).sum();
        same("the number of rows that the groups reach", routed, rows)?;
        ffn::validate(call.bank, call.x, groups, rows)?;
        slots.validate(out.len() / hidden, rows)?;
        O::ffn(self, call, Destination::Tokens { slots, rows, out })
    }

    /// `d[start..end, :] = a[start..end, :] . b[weight]^T` for each group, summed in f32 and
    /// rounded once. `a` is [M, K], `b` [G, N, K], `d` [M, N] in f32 or bf16; rows of `d` outside
    /// every group are untouched.
    ///
    /// # Errors
    /// Shapes that do not fit each other, K = 0, a weight or row out of range, or overlapping
    /// groups. Nothing is written then.
    pub fn grouped_gemm_bf16<'a, O: Output>(
        &self,
        a: MatrixRef<'_, bf16>,
        b: impl Into<Bf16Weights<'a>>,
        groups: &[GroupRange],
        d: MatrixMut<'_, O>,
    ) -> Result<(), CpuError> {
        O::bf16_gemm(self, a, b.into(), groups, d)
    }

    /// The same for int8 operands, with the scaling of `b`: `PerRow` gives
    /// `acc as f32 * (sa * sb)`, `Block128` adds `acc * (sa * sb)` block after block with fused
    /// multiply-adds. Exact to the last bit on every instruction set.
    ///
    /// # Errors
    /// As [`Engine::grouped_gemm_bf16`]; also K beyond 131 071 with `PerRow`, where an i32 sum
    /// could overflow.
    pub fn grouped_gemm_int8<O: Output>(
        &self,
        a: Int8Rows<'_>,
        b: Int8Weights<'_>,
        groups: &[GroupRange],
        d: MatrixMut<'_, O>,
    ) -> Result<(), CpuError> {
        O::int8_gemm(self, a, b, groups, d)
    }

    /// The same for fp8 weights: the bf16 products of each 128 of K are summed in f32, and
    /// `sum * scale` is added block after block with fused multiply-adds. The codes become bf16
    /// exactly.
    ///
    /// # Errors
    /// As [`Engine::grouped_gemm_bf16`].
    pub fn grouped_gemm_fp8<O: Output>(
        &self,
        a: MatrixRef<'_, bf16>,
        b: Fp8Weights<'_>,
        groups: &[GroupRange],
        d: MatrixMut<'_, O>,
    ) -> Result<(), CpuError> {
        O::fp8_gemm(self, a, b, groups, d)
    }
}

/// The work behind the entry points for one element type of the output. Its functions are not
/// generic, so that the kernels are compiled here, once, and not in every crate that calls them.
pub(crate) trait Compiled: Sized {
    fn ffn(
        engine: &Engine,
        call: &Call<'_>,
        destination: Destination<'_, Self>,
    ) -> Result<(), CpuError>;

    fn bf16_gemm(
        engine: &Engine,
        a: MatrixRef<'_, bf16>,
        b: Bf16Weights<'_>,
        groups: &[GroupRange],
        d: MatrixMut<'_, Self>,
    ) -> Result<(), CpuError>;

    fn int8_gemm(
        engine: &Engine,
        a: Int8Rows<'_>,
        b: Int8Weights<'_>,
        groups: &[GroupRange],
        d: MatrixMut<'_, Self>,
    ) -> Result<(), CpuError>;

    fn fp8_gemm(
        engine: &Engine,
        a: MatrixRef<'_, bf16>,
        b: Fp8Weights<'_>,
        groups: &[GroupRange],
        d: MatrixMut<'_, Self>,
    ) -> Result<(), CpuError>;
}

macro_rules! compiled {
    ($($output:ty),*) => {$(
        impl Compiled for $output {
            fn ffn(
                engine: &Engine,
                call: &Call<'_>,
                destination: Destination<'_, Self>,
            ) -> Result<(), CpuError> {
                let run = match call.bank.geometry().format {
                    WeightFormat::Bf16 => ffn::run::<recipe::Bf16, Self>,
                    WeightFormat::Int8PerRow => ffn::run::<recipe::PerRow, Self>,
                    WeightFormat::Int8Block128 => ffn::run::<recipe::Block128, Self>,
                    WeightFormat::Fp8Block128 => ffn::run::<recipe::Fp8, Self>,
                    WeightFormat::Nvfp4 => ffn::run::<recipe::Expanding<Nvfp4>, Self>,
                    WeightFormat::Mxfp4 => ffn::run::<recipe::Expanding<Mxfp4>, Self>,
                };
                engine.with_workspace(|kernel, workers, workspace| {
                    run(kernel, workers, workspace, call, destination)
                })
            }

            fn bf16_gemm(
                engine: &Engine,
                a: MatrixRef<'_, bf16>,
                b: Bf16Weights<'_>,
                groups: &[GroupRange],
                d: MatrixMut<'_, Self>,
            ) -> Result<(), CpuError> {
                engine.with_workspace(|kernel, workers, workspace| {
                    gemm::bf16_gemm(kernel, workers, workspace, a, b, groups, d)
                })
            }

            fn int8_gemm(
                engine: &Engine,
                a: Int8Rows<'_>,
                b: Int8Weights<'_>,
                groups: &[GroupRange],
                d: MatrixMut<'_, Self>,
            ) -> Result<(), CpuError> {
                engine.with_workspace(|kernel, workers, workspace| {
                    gemm::int8_gemm(kernel, workers, workspace, a, b, groups, d)
                })
            }

            fn fp8_gemm(
                engine: &Engine,
                a: MatrixRef<'_, bf16>,
                b: Fp8Weights<'_>,
                groups: &[GroupRange],
                d: MatrixMut<'_, Self>,
            ) -> Result<(), CpuError> {
                engine.with_workspace(|kernel, workers, workspace| {
                    gemm::fp8_gemm(kernel, workers, workspace, a, b, groups, d)
                })
            }
        }
    )*};
}

compiled!(f32, bf16);
