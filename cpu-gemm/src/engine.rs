//! The entry points that depend on the instruction set.

use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use half::bf16;

use crate::bank::BankRef;
use crate::ffn::{self, ExpertGroup};
use crate::gemm::{self, GroupRange, Output};
use crate::isa::{Features, ISA_VARIABLE, Isa};
use crate::kernels::Kernel;
use crate::matrix::{Int8Rows, Int8Weights, MatrixMut, MatrixRef, WeightsRef};
use crate::{CpuError, recipe};

/// Expert GEMM and feed-forward with one chosen instruction set.
///
/// Work runs on the rayon pool of the calling thread (`ThreadPool::install`, else the global one).
///
/// int8 results are identical on every instruction set. bf16 results of one instruction set do not
/// depend on the other tokens of the call; between instruction sets the order of f32 additions may
/// differ, and the AVX-512 BF16 instruction treats subnormal operands and results as zero.
#[derive(Clone, Debug)]
pub struct Engine {
    kernel: Kernel,
}

impl Engine {
    /// The best instruction set of this processor, or the one that the environment variable
    /// `ASYM_GEMM_ISA` (`avx512`, `avx2` or `portable`) forces; empty counts as unset.
    ///
    /// # Errors
    /// The variable names no instruction set, or one that this processor lacks.
    pub fn detect() -> Result<Self, CpuError> {
        match std::env::var_os(ISA_VARIABLE) {
            Some(name) if !name.is_empty() => Self::with_isa(Isa::parse(&name.to_string_lossy())?),
            _ => Ok(Self::with_features(Features::detect())),
        }
    }

    /// That instruction set.
    ///
    /// # Errors
    /// [`CpuError::IsaUnavailable`] if this processor lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self, CpuError> {
        let detected = Features::detect();
        let missing = isa.required().names_without(detected);
        if !missing.is_empty() {
            return Err(CpuError::IsaUnavailable { isa, missing });
        }
        Ok(match isa {
            Isa::Portable => Self::with_features(Features::NONE),
            Isa::Avx2 => {
                Self::with_features(detected.common(Features::AVX2.and(Features::AVXVNNI)))
            }
            Isa::Avx512 => Self::with_features(detected),
        })
    }

    /// The best instruction set that needs no more than `allowed`, for tests of what other
    /// processors run. Features that this processor lacks stay unused.
    pub fn with_features(allowed: Features) -> Self {
        Self {
            kernel: Kernel::best(allowed),
        }
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
    pub fn expert_ffn(
        &self,
        bank: BankRef<'_>,
        activation: Activation,
        x: &[f32],
        groups: &[ExpertGroup<'_>],
        y: &mut [f32],
    ) -> Result<(), CpuError> {
        ffn::validate(bank, x, groups, y)?;
        let run = match bank.geometry().format {
            WeightFormat::Bf16 => ffn::run::<recipe::Bf16>,
            WeightFormat::Int8PerRow => ffn::run::<recipe::PerRow>,
            WeightFormat::Int8Block128 => ffn::run::<recipe::Block128>,
            WeightFormat::Fp8Block128 => ffn::run::<recipe::Fp8>,
        };
        run(self.kernel, bank, activation, x, groups, y);
        Ok(())
    }

    /// `d[start..end, :] = a[start..end, :] . b[weight]^T` for each group, summed in f32 and
    /// rounded once. `a` is [M, K], `b` [G, N, K], `d` [M, N] in f32 or bf16; rows of `d` outside
    /// every group are untouched.
    ///
    /// # Errors
    /// Shapes that do not fit each other, K = 0, a weight or row out of range, or overlapping
    /// groups. Nothing is written then.
    pub fn grouped_gemm_bf16<O: Output>(
        &self,
        a: MatrixRef<'_, bf16>,
        b: WeightsRef<'_, bf16>,
        groups: &[GroupRange],
        d: MatrixMut<'_, O>,
    ) -> Result<(), CpuError> {
        gemm::bf16_gemm(self.kernel, a, b, groups, d)
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
        gemm::int8_gemm(self.kernel, a, b, groups, d)
    }
}
