//! Grouped GEMM with weights in panels.

use asym_gemm_cpu::pool::Workers;
use asym_gemm_cpu::{
    CpuError, Engine, GroupRange, Int8Rows, Int8Scaling, Int8Weights, MatrixMut, MatrixRef,
    PackedRef, WeightsRef,
};
use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};
use asym_gemm_formats::{WeightFormat, int8};
use half::bf16;

use super::case::GemmShape;
use super::data::{Pattern, fill};
use super::{BenchError, Workload};
use crate::bench::random::Random;

/// Elements of D that are checked.
const SAMPLES: usize = 64;

/// What the engine multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operands {
    Bf16,
    Int8(Int8Scaling),
}

impl Operands {
    /// `None` where the engine has no grouped GEMM for the format.
    fn of(format: WeightFormat) -> Option<Self> {
        match format {
            WeightFormat::Bf16 => Some(Self::Bf16),
            WeightFormat::Int8PerRow => Some(Self::Int8(Int8Scaling::PerRow)),
            WeightFormat::Int8Block128 => Some(Self::Int8(Int8Scaling::Block128)),
            WeightFormat::Fp8Block128 => None,
        }
    }

    fn element_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Int8(_) => 1,
        }
    }

    /// Scales of a row of K elements.
    fn blocks(self, k: usize) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Int8(scaling) => scaling.blocks(k),
        }
    }
}

/// Copies of the weight matrices, A for the most rows, and D.
pub(super) struct GemmData<'a> {
    shape: GemmShape,
    operands: Operands,
    /// Copies of the weights, one after the other.
    weights: &'a [u8],
    copies: usize,
    /// Scales of the weights of all copies [G, N, blocks]; none in bf16.
    weight_scales: Vec<f32>,
    /// A [experts * size, K] in the weights' element type, as bytes.
    a: Vec<u8>,
    a_scales: Vec<f32>,
    d: Vec<bf16>,
}

impl<'a> GemmData<'a> {
    pub(super) fn new(
        shape: GemmShape,
        format: WeightFormat,
        rows: usize,
        workers: &dyn Workers,
        weights: &'a mut [u8],
    ) -> Result<Self, BenchError> {
        let GemmShape { experts, n, k } = shape;
        let operands = Operands::of(format).ok_or(BenchError::NoGemm { format })?;
        let (pattern, copy_bytes) = match operands {
            Operands::Bf16 => (Pattern::Bf16, PackedRef::<bf16>::bytes([experts, n, k])?),
            Operands::Int8(_) => (Pattern::Int8, PackedRef::<i8>::bytes([experts, n, k])?),
        };
        let copies = weights.len() / copy_bytes;
        let weights = &mut weights[..copies * copy_bytes];
        fill(workers, weights, pattern, 1)?;
        let mut a = vec![0; experts * rows * k * operands.element_bytes()];
        fill(workers, &mut a, pattern, 2)?;
        let blocks = operands.blocks(k);
        let mut random = Random::new(3);
        let mut scales = |count| (0..count).map(|_| 0.01 + 0.001 * random.unit()).collect();
        Ok(Self {
            shape,
            operands,
            weights,
            copies,
            weight_scales: scales(copies * experts * n * blocks),
            a,
            a_scales: scales(experts * rows * blocks),
            d: vec![bf16::NAN; experts * rows * n],
        })
    }

    /// Groups of a call: the experts of one copy, `rows` rows each.
    fn groups(&self, rows: usize, call: usize) -> Vec<GroupRange> {
        let first = call % self.copies * self.shape.experts;
        (0..self.shape.experts)
            .map(|expert| GroupRange {
                weight: first + expert,
                start: expert * rows,
                end: (expert + 1) * rows,
            })
            .collect()
    }

    /// Element (row, k) of matrix `group` of all copies, as the kernels multiply it.
    fn weight(&self, group: usize, row: usize, k: usize) -> f64 {
        let element = self.operands.element_bytes();
        let units = (self.shape.k * element).div_ceil(UNIT_ROW_BYTES);
        let panel = group * self.shape.n.div_ceil(PANEL_ROWS) + row / PANEL_ROWS;
        let byte = k * element;
        let at = (panel * units + byte / UNIT_ROW_BYTES) * UNIT_BYTES
            + row % PANEL_ROWS * UNIT_ROW_BYTES
            + byte % UNIT_ROW_BYTES;
        self.code(&self.weights[at..])
    }

    /// The number at the start of `bytes`.
    fn code(&self, bytes: &[u8]) -> f64 {
        match self.operands {
            Operands::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            Operands::Int8(_) => f64::from(bytes[0].cast_signed()),
        }
    }

    /// Element (row of A, n) of D in f64, and the sum of the absolute products.
    fn expected(&self, row: usize, group: usize, n: usize) -> (f64, f64) {
        let GemmShape { n: rows, k, .. } = self.shape;
        let element = self.operands.element_bytes();
        let blocks = self.operands.blocks(k);
        let block_k = if blocks > 1 { int8::BLOCK } else { k };
        let scale = |block: usize| match blocks {
            0 => 1.0,
            _ => {
                f64::from(self.a_scales[row * blocks + block])
                    * f64::from(self.weight_scales[(group * rows + n) * blocks + block])
            }
        };
        let product = |i: usize| {
            let a = self.code(&self.a[(row * k + i) * element..]);
            a * self.weight(group, n, i) * scale(i / block_k)
        };
        (0..k).fold((0.0, 0.0), |(sum, magnitude), i| {
            (sum + product(i), magnitude + product(i).abs())
        })
    }
}

impl Workload for GemmData<'_> {
    fn call(&mut self, engine: &Engine, size: usize, call: usize) -> Result<(), CpuError> {
        let GemmShape { experts, n, k } = self.shape;
        let groups = self.groups(size, call);
        let rows = experts * size;
        let shape = [self.copies * experts, n, k];
        let d = &mut self.d[..rows * n];
        if call == 0 {
            d.fill(bf16::NAN);
        }
        let d = MatrixMut::new(d, rows, n, n)?;
        match self.operands {
            Operands::Bf16 => {
                let a = MatrixRef::new(bytemuck::cast_slice(&self.a), rows, k, k)?;
                let b = PackedRef::<bf16>::new(self.weights, shape)?;
                engine.grouped_gemm_bf16(a, b, &groups, d)
            }
            Operands::Int8(scaling) => {
                let blocks = scaling.blocks(k);
                let codes = MatrixRef::new(bytemuck::cast_slice(&self.a), rows, k, k)?;
                let scales = MatrixRef::new(&self.a_scales, rows, blocks, blocks)?;
                let a = Int8Rows::new(codes, scales)?;
                let codes = PackedRef::<i8>::new(self.weights, shape)?;
                let scale_shape = [shape[0], n, blocks];
                let scales =
                    WeightsRef::new(&self.weight_scales, scale_shape, [n * blocks, blocks])?;
                let b = Int8Weights::new(codes, scales, scaling)?;
                engine.grouped_gemm_int8(a, b, &groups, d)
            }
        }
    }

    fn verify(&self, size: usize, call: usize) -> Result<(), String> {
        let GemmShape { experts, n, .. } = self.shape;
        let d = &self.d[..experts * size * n];
        if let Some(at) = d.iter().position(|value| !value.is_finite()) {
            return Err(format!("D[{}, {}] is {}", at / n, at % n, d[at]));
        }
        let mut random = Random::new(size as u64);
        for sample in 0..SAMPLES {
            // The last of everything once, where errors of ragged edges are.
            let (expert, row, column) = match sample {
                0 => (experts - 1, size - 1, n - 1),
                _ => (random.below(experts), random.below(size), random.below(n)),
            };
            let group = call % self.copies * experts + expert;
            let row = expert * size + row;
            let (expected, magnitude) = self.expected(row, group, column);
            let found = d[row * n + column].to_f64();
            // D is rounded to 8 bits, the sums in f32 to 24 (int8 sums not at all).
            let bound = expected.abs() / 256.0 + magnitude * 1e-5;
            if (found - expected).abs() > bound {
                return Err(format!(
                    "D[{row}, {column}] is {found}, expected {expected} within {bound:.2e}"
                ));
            }
        }
        Ok(())
    }

    fn weight_bytes(&self, _: usize, _: usize) -> usize {
        (self.weights.len() + size_of_val(self.weight_scales.as_slice())) / self.copies
    }
}
