//! Grouped GEMM with weights in panels.

use asym_gemm_cpu::pool::Workers;
use asym_gemm_cpu::{
    CpuError, Engine, Fp8Weights, GroupRange, Int8Rows, Int8Scaling, Int8Weights, MatrixMut,
    MatrixRef, PackedRef, WeightsRef,
};
use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};
use asym_gemm_formats::{WeightFormat, e4m3, fp8, int8};
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
    /// bf16 A, fp8 B.
    Fp8,
}

impl Operands {
    fn of(format: WeightFormat) -> Result<Self, BenchError> {
        Ok(match format {
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::Int8PerRow => Self::Int8(Int8Scaling::PerRow),
            WeightFormat::Int8Block128 => Self::Int8(Int8Scaling::Block128),
            WeightFormat::Fp8Block128 => Self::Fp8,
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => return Err(BenchError::NoGemm(format)),
        })
    }

    /// Bytes of an element of A.
    fn a_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp8 => 2,
            Self::Int8(_) => 1,
        }
    }

    /// Bytes of an element of B.
    fn b_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Int8(_) | Self::Fp8 => 1,
        }
    }

    /// Bytes of packed B.
    fn packed_bytes(self, shape: [usize; 3]) -> Result<usize, CpuError> {
        match self {
            Self::Bf16 => PackedRef::<bf16>::bytes(shape),
            Self::Int8(_) => PackedRef::<i8>::bytes(shape),
            Self::Fp8 => PackedRef::<u8>::bytes(shape),
        }
    }

    /// What A and B are filled with.
    fn patterns(self) -> [Pattern; 2] {
        match self {
            Self::Bf16 => [Pattern::Bf16; 2],
            Self::Int8(_) => [Pattern::Int8; 2],
            Self::Fp8 => [Pattern::Bf16, Pattern::Fp8],
        }
    }

    /// Whether A has scales.
    fn scales_a(self) -> bool {
        matches!(self, Self::Int8(_))
    }

    /// Rows and columns [rows, columns] of the scales of a matrix [N, K].
    fn scales(self, n: usize, k: usize) -> [usize; 2] {
        match self {
            Self::Bf16 => [0, 0],
            Self::Int8(scaling) => [n, scaling.blocks(k)],
            Self::Fp8 => [n.div_ceil(fp8::BLOCK), k.div_ceil(fp8::BLOCK)],
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
    /// Scales of the weights of all copies [G, rows, blocks]; none in bf16.
    weight_scales: Vec<f32>,
    /// A [experts * size, K], as bytes.
    a: Vec<u8>,
    /// Scales of A [experts * size, blocks]; int8 alone has them.
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
        let operands = Operands::of(format)?;
        let [a_pattern, b_pattern] = operands.patterns();
        let copy_bytes = operands.packed_bytes([experts, n, k])?;
        let copies = weights.len() / copy_bytes;
        let weights = &mut weights[..copies * copy_bytes];
        fill(workers, weights, b_pattern, 1)?;
        let mut a = vec![0; experts * rows * k * operands.a_bytes()];
        fill(workers, &mut a, a_pattern, 2)?;
        let [scale_rows, blocks] = operands.scales(n, k);
        let a_scales = if operands.scales_a() {
            rows * blocks
        } else {
            0
        };
        let mut random = Random::new(3);
        let mut scales = |count| (0..count).map(|_| 0.01 + 0.001 * random.unit()).collect();
        Ok(Self {
            shape,
            operands,
            weights,
            copies,
            weight_scales: scales(copies * experts * scale_rows * blocks),
            a,
            a_scales: scales(experts * a_scales),
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
        let element = self.operands.b_bytes();
        let units = (self.shape.k * element).div_ceil(UNIT_ROW_BYTES);
        let panel = group * self.shape.n.div_ceil(PANEL_ROWS) + row / PANEL_ROWS;
        let byte = k * element;
        let at = (panel * units + byte / UNIT_ROW_BYTES) * UNIT_BYTES
            + row % PANEL_ROWS * UNIT_ROW_BYTES
            + byte % UNIT_ROW_BYTES;
        let bytes = &self.weights[at..];
        match self.operands {
            Operands::Bf16 | Operands::Int8(_) => self.activation(bytes),
            Operands::Fp8 => f64::from(e4m3::decode(bytes[0])),
        }
    }

    /// The element of A at the start of `bytes`.
    fn activation(&self, bytes: &[u8]) -> f64 {
        match self.operands {
            Operands::Bf16 | Operands::Fp8 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            Operands::Int8(_) => f64::from(bytes[0].cast_signed()),
        }
    }

    /// Element (row of A, n) of D in f64, and the sum of the absolute products.
    fn expected(&self, row: usize, group: usize, n: usize) -> (f64, f64) {
        let GemmShape { n: rows, k, .. } = self.shape;
        let element = self.operands.a_bytes();
        let [scale_rows, blocks] = self.operands.scales(rows, k);
        let block_k = if blocks > 1 { int8::BLOCK } else { k };
        let scale = |block: usize| {
            let a = match self.operands.scales_a() {
                true => self.a_scales[row * blocks + block],
                false => 1.0,
            };
            let b = match self.operands {
                Operands::Bf16 => return f64::from(a),
                Operands::Int8(_) => n,
                Operands::Fp8 => n / fp8::BLOCK,
            };
            let b = self.weight_scales[(group * scale_rows + b) * blocks + block];
            f64::from(a) * f64::from(b)
        };
        let product = |i: usize| {
            let a = self.activation(&self.a[(row * k + i) * element..]);
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
        let [scale_rows, blocks] = self.operands.scales(n, k);
        let scale_shape = [shape[0], scale_rows, blocks];
        let scales = || {
            let strides = [scale_rows * blocks, blocks];
            WeightsRef::new(&self.weight_scales, scale_shape, strides)
        };
        match self.operands {
            Operands::Bf16 => {
                let a = MatrixRef::new(bytemuck::cast_slice(&self.a), rows, k, k)?;
                let b = PackedRef::<bf16>::new(self.weights, shape)?;
                engine.grouped_gemm_bf16(a, b, &groups, d)
            }
            Operands::Int8(scaling) => {
                let codes = MatrixRef::new(bytemuck::cast_slice(&self.a), rows, k, k)?;
                let a_scales = MatrixRef::new(&self.a_scales, rows, blocks, blocks)?;
                let a = Int8Rows::new(codes, a_scales)?;
                let codes = PackedRef::<i8>::new(self.weights, shape)?;
                let b = Int8Weights::new(codes, scales()?, scaling)?;
                engine.grouped_gemm_int8(a, b, &groups, d)
            }
            Operands::Fp8 => {
                let a = MatrixRef::new(bytemuck::cast_slice(&self.a), rows, k, k)?;
                let codes = PackedRef::<u8>::new(self.weights, shape)?;
                let b = Fp8Weights::new(codes, scales()?)?;
                engine.grouped_gemm_fp8(a, b, &groups, d)
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
