//! Operands of one shape and format, and what their product must be.

use crate::bench::random::Random;
use crate::driver::{DeviceBuffer, DriverError, Gpu};
use crate::gemm::{Activations, DeviceMatrix, GemmError, MatrixFormat};
use asym_gemm_formats::e4m3;
use bytemuck::Pod;
use half::bf16;

/// Different rows of A, repeated: prime, so that every expert gets others.
const A_ROWS: usize = 1021;
/// Different rows of values, which are enough: everything is checked, and moves.
const VALUE_ROWS: usize = 131;
/// Columns of K that share a scale.
const BLOCK: usize = 128;

/// One expert's weights, which all experts have (the bytes still all move), and the different
/// rows of A.
pub(super) struct Data {
    n: usize,
    k: usize,
    a: Stored,
    a_scales: Vec<f32>,
    pub(super) b_bytes: Vec<u8>,
    b_scales: Vec<f32>,
    /// Scales of a row of A.
    a_blocks: usize,
    /// Rows and columns of one expert's scales.
    b_scale_shape: (usize, usize),
}

/// Elements as stored.
enum Stored {
    Bf16(Vec<bf16>),
    Int8(Vec<i8>),
    Fp8(Vec<u8>),
}

/// The sum of four draws: close to a normal distribution of variance 4/3.
fn value(random: &mut Random) -> f32 {
    (0..4).map(|_| random.unit()).sum()
}

fn stored(format: MatrixFormat, seed: u64, rows: usize, k: usize) -> Stored {
    let mut random = Random::new(seed);
    let (some, len) = (rows.min(VALUE_ROWS) * k, rows * k);
    fn cycle<T: Copy>(some: impl Iterator<Item = T>, len: usize) -> Vec<T> {
        let some: Vec<T> = some.collect();
        some.iter().copied().cycle().take(len).collect()
    }
    match format {
        MatrixFormat::Bf16 => {
            let one = |_| bf16::from_f32(value(&mut random));
            Stored::Bf16(cycle((0..some).map(one), len))
        }
        MatrixFormat::Int8PerRow | MatrixFormat::Int8Block128 => {
            let one = |_| random.bits() as i8;
            Stored::Int8(cycle((0..some).map(one), len))
        }
        MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => {
            let one = |_| e4m3::encode(value(&mut random));
            Stored::Fp8(cycle((0..some).map(one), len))
        }
    }
}

fn scales(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    let one = |_| random.unit().abs() * 0.01 + 1e-3;
    (0..count).map(one).collect()
}

impl Data {
    pub(super) fn new(format: MatrixFormat, n: usize, k: usize) -> Self {
        let blocks = k.div_ceil(BLOCK);
        let (a_blocks, b_scale_shape) = match format {
            MatrixFormat::Bf16 => (0, (0, 0)),
            MatrixFormat::Int8PerRow | MatrixFormat::Fp8PerRow => (1, (n, 1)),
            MatrixFormat::Int8Block128 => (blocks, (n, blocks)),
            MatrixFormat::Fp8Block128 => (blocks, (n.div_ceil(BLOCK), blocks)),
        };
        let b_bytes = match stored(format, 2, n, k) {
            Stored::Bf16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Stored::Int8(codes) => codes.iter().map(|&x| x as u8).collect(),
            Stored::Fp8(codes) => codes,
        };
        Self {
            n,
            k,
            a: stored(format, 1, A_ROWS, k),
            a_scales: scales(3, A_ROWS * a_blocks),
            b_bytes,
            b_scales: scales(4, b_scale_shape.0 * b_scale_shape.1),
            a_blocks,
            b_scale_shape,
        }
    }

    /// Element (row, column) of D, and the sum of its terms' magnitudes, in f64.
    fn element(&self, row: usize, column: usize) -> (f64, f64) {
        let row = row % A_ROWS;
        let (scale_rows, scale_columns) = self.b_scale_shape;
        let b_row = if scale_rows == self.n {
            column
        } else {
            column / BLOCK
        };
        let terms = (0..self.k).map(|k| {
            let (a, b) = (row * self.k + k, column * self.k + k);
            let product = match &self.a {
                Stored::Bf16(values) => {
                    let b = [self.b_bytes[b * 2], self.b_bytes[b * 2 + 1]];
                    return values[a].to_f64() * bf16::from_le_bytes(b).to_f64();
                }
                Stored::Int8(codes) => f64::from(codes[a]) * f64::from(self.b_bytes[b] as i8),
                Stored::Fp8(codes) => {
                    f64::from(e4m3::decode(codes[a])) * f64::from(e4m3::decode(self.b_bytes[b]))
                }
            };
            let a_block = if self.a_blocks == 1 { 0 } else { k / BLOCK };
            let b_block = if scale_columns == 1 { 0 } else { k / BLOCK };
            product
                * f64::from(self.a_scales[row * self.a_blocks + a_block])
                * f64::from(self.b_scales[b_row * scale_columns + b_block])
        });
        terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()))
    }

    /// Compares a sample of D [rows, n], spread over all experts and tiles, with f64.
    pub(super) fn verify(
        &self,
        rows: usize,
        out: &DeviceBuffer<bf16>,
    ) -> Result<Option<String>, DriverError> {
        for i in 0..100 {
            let row = (i * 7919 + i * i * 31) % rows;
            let column = (i * 104_729 + i * 17) % self.n;
            let mut got = [bf16::NAN];
            out.copy_to_host_at(row * self.n + column, &mut got)?;
            if let Some(reason) = self.mismatch(row, column, got[0].to_f64()) {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    /// What is wrong with an element of D.
    fn mismatch(&self, row: usize, column: usize, got: f64) -> Option<String> {
        let (want, size) = self.element(row, column);
        // Rounding to bf16, and the sum's own error: fp8 products add up with 13 bits.
        let within = (got - want).abs() <= want.abs() * 0.004 + size * 2f64.powi(-11); // false for NaN
        (!within).then(|| format!("[{row}, {column}] is {got}, expected {want}"))
    }
}

/// A and the scales, on the device.
pub(super) struct Resident {
    a: OnDevice,
    a_scales: DeviceBuffer<f32>,
    b_scales: DeviceBuffer<f32>,
    a_blocks: usize,
    b_scale_shape: (usize, usize),
    k: usize,
}

enum OnDevice {
    Bf16(DeviceBuffer<bf16>),
    Int8(DeviceBuffer<i8>),
    Fp8(DeviceBuffer<u8>),
}

impl Resident {
    /// `rows` rows of A, and the scales of `experts` experts.
    pub(super) fn new(
        gpu: &Gpu,
        data: &Data,
        rows: usize,
        experts: usize,
    ) -> Result<Self, DriverError> {
        let len = rows * data.k;
        Ok(Self {
            a: match &data.a {
                Stored::Bf16(values) => OnDevice::Bf16(repeated(gpu, values, len)?),
                Stored::Int8(codes) => OnDevice::Int8(repeated(gpu, codes, len)?),
                Stored::Fp8(codes) => OnDevice::Fp8(repeated(gpu, codes, len)?),
            },
            a_scales: repeated(gpu, &data.a_scales, rows * data.a_blocks)?,
            b_scales: repeated(gpu, &data.b_scales, experts * data.b_scales.len())?,
            a_blocks: data.a_blocks,
            b_scale_shape: data.b_scale_shape,
            k: data.k,
        })
    }

    /// The first `rows` rows of A.
    pub(super) fn activations(&self, rows: usize) -> Result<Activations<'_>, GemmError> {
        let scales = || DeviceMatrix::new(&self.a_scales, rows, self.a_blocks, self.a_blocks);
        let k = self.k;
        Ok(match &self.a {
            OnDevice::Bf16(a) => Activations::Bf16(DeviceMatrix::new(a, rows, k, k)?),
            OnDevice::Int8(a) => Activations::Int8 {
                codes: DeviceMatrix::new(a, rows, k, k)?,
                scales: scales()?,
            },
            OnDevice::Fp8(a) => Activations::Fp8 {
                codes: DeviceMatrix::new(a, rows, k, k)?,
                scales: scales()?,
            },
        })
    }

    /// The scales of `experts` experts.
    pub(super) fn weight_scales(
        &self,
        experts: usize,
    ) -> Result<Option<DeviceMatrix<'_, f32>>, GemmError> {
        let (rows, columns) = self.b_scale_shape;
        match columns {
            0 => Ok(None),
            _ => DeviceMatrix::new(&self.b_scales, experts * rows, columns, columns).map(Some),
        }
    }
}

/// `values`, repeated to `len` elements, on the device.
pub(super) fn repeated<T: Pod>(
    gpu: &Gpu,
    values: &[T],
    len: usize,
) -> Result<DeviceBuffer<T>, DriverError> {
    let mut buffer = DeviceBuffer::alloc(gpu, len.max(1))?;
    let mut at = 0;
    while at < len {
        let part = &values[..values.len().min(len - at)];
        buffer.copy_from_host_at(at, part)?;
        at += part.len();
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::gpu::FORMATS;

    #[test]
    fn an_element_is_the_sum_of_its_terms_and_others_are_found_out() {
        for format in FORMATS {
            let data = Data::new(format, 264, 272);
            for (row, column) in [(0, 0), (1020, 263), (130, 128)] {
                let (want, size) = data.element(row, column);
                assert!(size > 0.0 && want.abs() <= size, "{format}");
                assert_eq!(data.element(row + A_ROWS, column), (want, size), "{format}");
                assert_eq!(data.mismatch(row, column, want), None, "{format}");
                for wrong in [want + 0.01 * size, want - 0.01 * size, f64::NAN] {
                    assert!(data.mismatch(row, column, wrong).is_some(), "{format}");
                }
            }
        }
    }
}
