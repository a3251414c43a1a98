//! Weights as a file holds them: codes, and the scales that make values of them.
//!
//! Matrices are [outputs, inputs]; a tensor holds one, or one for each expert. Elements are
//! numbered through the whole tensor, row by row, whatever their size:
//!
//! ```text
//! BF16 F16 F32        the value
//! F8_E4M3 F8_E5M2     code * scale of a block of rows x columns (of a row, of the matrix)
//! fp4                 e2m1 code * scale of 16 or 32 columns * scale of the matrix
//! int4                (nibble - 8) * scale of a group of columns
//! int8                code * scale of a row, or of 128 columns of it
//! ```

use super::error::CheckpointError;
use super::float::Float;
use super::names::RawTensor;
use asym_gemm_cpu::StoredRow;
use asym_gemm_formats::{WeightFormat, e4m3, e5m2, e8m0, fp8, int4, int8, mxfp4, nvfp4};
use safetensors::Dtype;

/// Shape of the matrices in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// A weight tensor and the tensors that belong to it, found and checked but not read.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) tensor: RawTensor<'a>,
    pub(super) kind: Kind<'a>,
}

/// What is needed to read the codes.
#[derive(Debug)]
pub(super) enum Kind<'a> {
    Float(Float),
    Fp8 {
        e5m2: bool,
        shape: Shape,
        /// Rows and columns of a scale.
        block: [usize; 2],
        scales: RawTensor<'a>,
    },
    Fp4 {
        shape: Shape,
        group: usize,
        scales: RawTensor<'a>,
        global: Option<Global<'a>>,
    },
    Int4 {
        shape: Shape,
        group: usize,
        scales: RawTensor<'a>,
    },
    Int8 {
        shape: Shape,
        /// A scale for each row, else for each 128 columns of it.
        per_row: bool,
        scales: RawTensor<'a>,
    },
}

/// The scale of each matrix of NVFP4.
#[derive(Debug)]
pub(super) struct Global<'a> {
    pub(super) tensor: RawTensor<'a>,
    /// Whether the tensor holds what the values are divided by.
    pub(super) reciprocal: bool,
}

/// How values are made of a tensor's bytes; the scales are in memory.
#[derive(Debug)]
pub(super) enum Codes {
    Float(Float),
    Fp8 {
        e5m2: bool,
        scales: Blocks,
    },
    Fp4 {
        shape: Shape,
        group: usize,
        scales: Vec<u8>,
        /// One for each matrix; empty stands for ones.
        globals: Vec<f32>,
    },
    Int4 {
        scales: Blocks,
    },
    Int8 {
        per_row: bool,
        scales: Blocks,
    },
}

/// Scales of blocks of rows and columns.
#[derive(Debug)]
pub(super) struct Blocks {
    shape: Shape,
    block: [usize; 2],
    scales: Vec<f32>,
}

impl Blocks {
    /// The scales of the blocks that row `row` of all matrices crosses.
    fn row(&self, row: usize) -> &[f32] {
        let [rows, columns] = self.block;
        let across = self.shape.columns.div_ceil(columns);
        let down = self.shape.rows.div_ceil(rows);
        let (matrix, row) = (row / self.shape.rows, row % self.shape.rows);
        &self.scales[(matrix * down + row / rows) * across..][..across]
    }
}

/// Multiplies values from column `first` of a row on with their scales.
fn scale(out: &mut [f32], first: usize, group: usize, scales: &[f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out *= scales[(first + i) / group];
    }
}

impl<'a> Source<'a> {
    /// Reads and checks the scales. With `zero_nan_blocks` a NVFP4 block whose scale is NaN and whose
    /// codes are all zero is taken for zeros.
    pub(super) fn codes(&self, zero_nan_blocks: bool) -> Result<Codes, CheckpointError> {
        Ok(match &self.kind {
            &Kind::Float(float) => Codes::Float(float),
            Kind::Fp8 {
                e5m2,
                shape,
                block,
                scales,
            } => Codes::Fp8 {
                e5m2: *e5m2,
                scales: blocks(*shape, *block, scales)?,
            },
            Kind::Int4 {
                shape,
                group,
                scales,
            } => Codes::Int4 {
                scales: blocks(*shape, [1, *group], scales)?,
            },
            Kind::Int8 {
                shape,
                per_row,
                scales,
            } => {
                let group = match per_row {
                    true => shape.columns,
                    false => int8::BLOCK,
                };
                Codes::Int8 {
                    per_row: *per_row,
                    scales: blocks(*shape, [1, group], scales)?,
                }
            }
            Kind::Fp4 {
                shape,
                group,
                scales,
                global,
            } => {
                let mut bytes = scales.file.read_bytes(scales.name)?;
                self.check_fp4(&mut bytes, scales, *group, zero_nan_blocks)?;
                let globals = match global {
                    Some(global) => global.read()?,
                    None => Vec::new(),
                };
                Codes::Fp4 {
                    shape: *shape,
                    group: *group,
                    scales: bytes,
                    globals,
                }
            }
        })
    }

    /// Looks for NaN among fp4 scales.
    fn check_fp4(
        &self,
        scales: &mut [u8],
        tensor: &RawTensor<'_>,
        group: usize,
        zero_nan_blocks: bool,
    ) -> Result<(), CheckpointError> {
        let nan = |scale: u8| match group {
            mxfp4::BLOCK => scale == e8m0::NAN,
            _ => scale & 0x7f == 0x7f,
        };
        for (block, scale) in scales.iter_mut().enumerate().filter(|(_, s)| nan(**s)) {
            let mut codes = vec![0; group / 2];
            let at = block * group / 2;
            self.tensor
                .file
                .read_range(self.tensor.name, at, &mut codes)?;
            let zero = codes.iter().all(|pair| pair & 0x77 == 0);
            if zero && zero_nan_blocks {
                *scale = 0;
                continue;
            }
            return Err(CheckpointError::Scale {
                tensor: tensor.name.to_owned(),
                index: block,
                found: format!("NaN ({scale:#04x})"),
                hint: match zero {
                    true => {
                        "; its codes are all zero: blocks like it can be taken for zeros \
                             on request (--zero-nan-blocks)"
                    }
                    false => "; the weights are damaged",
                },
            });
        }
        Ok(())
    }
}

impl Global<'_> {
    fn read(&self) -> Result<Vec<f32>, CheckpointError> {
        let mut values = self.tensor.file.read_f32(self.tensor.name)?;
        for (index, value) in values.iter_mut().enumerate() {
            let stored = *value;
            if self.reciprocal {
                *value = nvfp4::global_of_reciprocal(stored);
            }
            if !value.is_finite() || stored == 0.0 && self.reciprocal {
                return Err(CheckpointError::scale(self.tensor.name, index, stored));
            }
        }
        Ok(values)
    }
}

/// Reads f32 scales, or UE8M0 ones, each of which must be finite.
fn blocks(
    shape: Shape,
    block: [usize; 2],
    tensor: &RawTensor<'_>,
) -> Result<Blocks, CheckpointError> {
    let scales = match tensor.file.info(tensor.name)?.dtype {
        Dtype::F8_E8M0 | Dtype::U8 => {
            let bytes = tensor.file.read_bytes(tensor.name)?;
            bytes.into_iter().map(e8m0::decode).collect()
        }
        _ => tensor.file.read_f32(tensor.name)?,
    };
    if let Some(index) = scales.iter().position(|s| !s.is_finite()) {
        return Err(CheckpointError::scale(tensor.name, index, scales[index]));
    }
    Ok(Blocks {
        shape,
        block,
        scales,
    })
}

impl Codes {
    /// Bytes that elements `first..first + count` take: offset and length. Both ends lie between
    /// bytes.
    pub(super) fn byte_range(&self, first: usize, count: usize) -> (usize, usize) {
        let bits = self.element_bits();
        (first * bits / 8, (count * bits).div_ceil(8))
    }

    fn element_bits(&self) -> usize {
        match self {
            Self::Float(float) => float.size() * 8,
            Self::Fp8 { .. } | Self::Int8 { .. } => 8,
            Self::Fp4 { .. } | Self::Int4 { .. } => 4,
        }
    }

    /// Decodes the elements `first`, `first + step`, ... into `out`; `bytes` starts with element
    /// `base`. All but floats are decoded along a row: with a step of 1.
    ///
    /// # Panics
    /// If an element lies outside of `bytes`.
    pub(super) fn decode(
        &self,
        bytes: &[u8],
        base: usize,
        first: usize,
        step: usize,
        out: &mut [f32],
    ) {
        let at = first - base;
        if let Self::Float(float) = self {
            return float.decode(bytes, at, step, out);
        }
        assert_eq!(step, 1, "codes lie along rows");
        match self {
            Self::Float(_) => {}
            Self::Fp8 { e5m2, scales } => {
                let decode = if *e5m2 { e5m2::decode } else { e4m3::decode };
                let codes = &bytes[at..][..out.len()];
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = decode(code);
                }
                let columns = scales.shape.columns;
                let row = scales.row(first / columns);
                scale(out, first % columns, scales.block[1], row);
            }
            Self::Int8 { scales, .. } => {
                let codes = &bytes[at..][..out.len()];
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = f32::from(code as i8);
                }
                let columns = scales.shape.columns;
                let row = scales.row(first / columns);
                scale(out, first % columns, scales.block[1], row);
            }
            Self::Int4 { scales } => {
                let columns = scales.shape.columns;
                let row = scales.row(first / columns);
                let packed = &bytes[(at - first % columns) / 2..];
                int4::dequantise(packed, row, scales.block[1], first % columns, out);
            }
            Self::Fp4 {
                shape,
                group,
                scales,
                globals,
            } => {
                let groups = shape.columns / group;
                let row = first / shape.columns;
                let scales = &scales[row * groups..][..groups];
                let packed = &bytes[at / 2..];
                match *group {
                    mxfp4::BLOCK => mxfp4::dequantise_row(packed, scales, out),
                    _ => nvfp4::dequantise_row(packed, scales, global(globals, row, shape), out),
                }
            }
        }
    }

    /// If the codes are those of `format`, copies the row that starts with element `first` and
    /// returns the scale of its matrix. `bytes` starts with element 0.
    ///
    /// `aligned` says that rows that share a scale here share one in the bank too.
    pub(super) fn stored_row(
        &self,
        format: WeightFormat,
        bytes: &[u8],
        first: usize,
        aligned: bool,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        let float_scales = |out: &mut [u8], scales: &[f32]| {
            for (out, scale) in out.as_chunks_mut::<4>().0.iter_mut().zip(scales) {
                *out = scale.to_le_bytes();
            }
        };
        match (self, format) {
            (
                Self::Fp8 {
                    e5m2: false,
                    scales,
                },
                WeightFormat::Fp8Block128,
            ) if aligned && scales.block == [fp8::BLOCK; 2] => {
                out.codes
                    .copy_from_slice(&bytes[first..][..out.codes.len()]);
                float_scales(out.scales, scales.row(first / scales.shape.columns));
                Some(1.0)
            }
            (
                Self::Int8 { per_row, scales },
                WeightFormat::Int8PerRow | WeightFormat::Int8Block128,
            ) if *per_row == (format == WeightFormat::Int8PerRow) => {
                out.codes
                    .copy_from_slice(&bytes[first..][..out.codes.len()]);
                float_scales(out.scales, scales.row(first / scales.shape.columns));
                Some(1.0)
            }
            (
                Self::Fp4 {
                    shape,
                    group,
                    scales,
                    globals,
                },
                format,
            ) if format.scale_group() == Some(*group) => {
                let (row, groups) = (first / shape.columns, shape.columns / group);
                out.codes
                    .copy_from_slice(&bytes[first / 2..][..out.codes.len()]);
                out.scales
                    .copy_from_slice(&scales[row * groups..][..groups]);
                Some(global(globals, row, shape))
            }
            _ => None,
        }
    }

    /// The format of a bank that holds these codes as they are, if there is one.
    pub(super) fn bank_format(&self) -> Option<WeightFormat> {
        Some(match self {
            Self::Float(_) => WeightFormat::Bf16,
            Self::Fp8 {
                e5m2: false,
                scales,
            } if scales.block == [fp8::BLOCK; 2] => WeightFormat::Fp8Block128,
            Self::Fp4 { group, .. } => match *group {
                mxfp4::BLOCK => WeightFormat::Mxfp4,
                _ => WeightFormat::Nvfp4,
            },
            Self::Int8 { per_row: true, .. } => WeightFormat::Int8PerRow,
            Self::Int8 { per_row: false, .. } => WeightFormat::Int8Block128,
            Self::Fp8 { .. } | Self::Int4 { .. } => return None,
        })
    }

    /// What the codes are called.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Float(Float::Bf16) => "bf16".into(),
            Self::Float(Float::F16) => "f16".into(),
            Self::Float(Float::F32) => "f32".into(),
            Self::Fp8 { e5m2, scales } => {
                let [rows, columns] = scales.block;
                let kind = if *e5m2 { "e5m2" } else { "e4m3" };
                format!("fp8 {kind}, a scale for {rows} x {columns}")
            }
            Self::Fp4 { group, .. } => match *group {
                mxfp4::BLOCK => "mxfp4".into(),
                _ => "nvfp4".into(),
            },
            Self::Int4 { scales } => format!("int4, groups of {}", scales.block[1]),
            Self::Int8 { per_row: true, .. } => "int8, a scale for each row".into(),
            Self::Int8 { per_row: false, .. } => "int8, a scale for 128 columns".into(),
        }
    }
}

fn global(globals: &[f32], row: usize, shape: &Shape) -> f32 {
    globals.get(row / shape.rows).copied().unwrap_or(1.0)
}

/// A tensor's codes, read.
pub(super) struct Buffer {
    pub(super) codes: Codes,
    pub(super) bytes: Vec<u8>,
}

impl Buffer {
    pub(super) fn read(
        source: &Source<'_>,
        zero_nan_blocks: bool,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            codes: source.codes(zero_nan_blocks)?,
            bytes: source.tensor.file.read_bytes(source.tensor.name)?,
        })
    }
}
