//! Finding the tensors of a weight matrix, whichever format they are in.
//!
//! A matrix called `m` (or one for each expert, called `m` together) is one of
//!
//! ```text
//! m.weight                                    floats
//! m.weight        + m.weight_scale_inv        fp8, a scale for each block (DeepSeek)
//! m.weight        + m.weight_scale            fp8, a scale for each row or matrix
//! m.weight (U8)   + m.weight_scale, _scale_2  NVFP4 (ModelOpt)
//! m.weight_packed + m.weight_scale, m.weight_global_scale   NVFP4 (compressed-tensors), reciprocal
//! m.weight_packed + m.weight_scale (U8)       MXFP4
//! m.weight_packed (I32) + m.weight_scale, m.weight_shape    int4 in groups
//! m_blocks        + m_scales                  MXFP4 (gpt-oss)
//! ```
//!
//! Banks of all experts may lack the `.weight`: then `_scale` and so on follow the bank's name.
//! Each tensor tells its format itself, so that layers, and matrices of a layer, may differ.

use super::error::{CheckpointError, FileError};
use super::file::TensorFile;
use super::float::Float;
use super::names::{Claims, RawTensor};
use super::stored::{Global, Kind, Shape, Source};
use asym_gemm_formats::{int8, mxfp4, nvfp4};
use safetensors::Dtype;

/// What weights can be read from, for messages.
const SUPPORTED: &str = "BF16, F16 or F32, and with the scales of their format F8_E4M3, F8_E5M2, U8 or F4 (NVFP4, MXFP4) and I32 (int4)";

/// A matrix, or a bank of them, as config.json describes it.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'n> {
    /// The module's name: what precedes `.weight`.
    pub(super) module: &'n str,
    /// `.weight`, `_blocks`, or nothing.
    pub(super) suffix: &'n str,
    /// How many matrices, if they are one tensor of three dimensions.
    pub(super) experts: Option<usize>,
    pub(super) shape: Shape,
    /// Names of the dimensions.
    pub(super) meaning: &'static str,
}

impl Wanted<'_> {
    /// The dimensions of a tensor with `last` in the place of rows and columns.
    fn dims(&self, last: &[usize]) -> Vec<usize> {
        self.experts.iter().chain(last).copied().collect()
    }

    fn groups_of(&self, name: &str, group: usize) -> Result<usize, CheckpointError> {
        let columns = self.shape.columns;
        match columns.is_multiple_of(group) {
            true => Ok(columns / group),
            false => Err(CheckpointError::Groups {
                tensor: name.to_owned(),
                columns,
                group,
            }),
        }
    }
}

/// Uses up the tensors of a matrix; nothing if one is missing, which [`Claims::finish`] reports.
///
/// `block` is the size of fp8 blocks by config.json.
pub(super) fn claim<'a>(
    claims: &mut Claims<'a>,
    wanted: Wanted<'_>,
    block: [usize; 2],
) -> Result<Option<Source<'a>>, CheckpointError> {
    let Wanted {
        module,
        suffix,
        shape: Shape { rows, columns },
        meaning,
        ..
    } = wanted;
    let beside = |end: &str| match suffix {
        "" => format!("{module}{end}"),
        _ => format!("{module}.weight{end}"),
    };
    if suffix == "_blocks" {
        return mxfp4_blocks(claims, wanted);
    }
    let packed = beside("_packed");
    let name = match claims.has(&packed) {
        true => packed,
        false => format!("{module}{suffix}"),
    };
    let dtype = claims.info(&name).map(|info| info.dtype);
    match dtype {
        Some(Dtype::F8_E4M3 | Dtype::F8_E5M2) => {
            let e5m2 = dtype == Some(Dtype::F8_E5M2);
            let tensor = claims.take_raw(&name, &[&wanted.dims(&[rows, columns])], meaning)?;
            let inverse = beside("_scale_inv");
            let (scales, block) = match claims.has(&inverse) {
                true => {
                    let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
                    let shape = wanted.dims(&grid);
                    (claims.take_raw(&inverse, &[&shape], "(blocks)")?, block)
                }
                false => fp8_scales(claims, wanted, &beside("_scale"), block)?,
            };
            if let Some(scales) = &scales {
                scale_dtype(scales)?;
            }
            Ok(tensor.zip(scales).map(|(tensor, scales)| Source {
                tensor,
                kind: Kind::Fp8 {
                    e5m2,
                    shape: wanted.shape,
                    block,
                    scales,
                },
            }))
        }
        Some(Dtype::U8 | Dtype::F4) => fp4(claims, wanted, &name, &beside),
        Some(Dtype::I32) => int4(claims, wanted, &name, &beside),
        _ => {
            let shape = wanted.dims(&[rows, columns]);
            let Some(tensor) = claims.take_raw(&name, &[&shape], meaning)? else {
                return Ok(None);
            };
            let kind = Kind::Float(float(&tensor)?);
            Ok(Some(Source { tensor, kind }))
        }
    }
}

/// The element type of a tensor of floats.
pub(super) fn float(tensor: &RawTensor<'_>) -> Result<Float, FileError> {
    let dtype = tensor.file.info(tensor.name)?.dtype;
    Float::of(dtype).ok_or_else(|| tensor.file.dtype_error(tensor.name, dtype, SUPPORTED))
}

/// # Errors
/// Scales that are neither floats nor UE8M0.
fn scale_dtype(tensor: &RawTensor<'_>) -> Result<(), FileError> {
    let dtype = tensor.file.info(tensor.name)?.dtype;
    match Float::of(dtype).is_some() || matches!(dtype, Dtype::F8_E8M0 | Dtype::U8) {
        true => Ok(()),
        false => {
            Err(tensor
                .file
                .dtype_error(tensor.name, dtype, "BF16, F16, F32 or F8_E8M0 as scales"))
        }
    }
}

/// Scales of fp8 that are called `weight_scale`: of rows, of matrices or of blocks.
fn fp8_scales<'a>(
    claims: &mut Claims<'a>,
    wanted: Wanted<'_>,
    name: &str,
    block: [usize; 2],
) -> Result<(Option<RawTensor<'a>>, [usize; 2]), CheckpointError> {
    let Shape { rows, columns } = wanted.shape;
    let grid = wanted.dims(&[rows.div_ceil(block[0]), columns.div_ceil(block[1])]);
    let by_row = [wanted.dims(&[rows, 1]), wanted.dims(&[rows])];
    let by_matrix = [wanted.dims(&[1, 1]), wanted.dims(&[1]), wanted.dims(&[])];
    let found = claims.info(name).map_or(&[][..], |info| &info.shape);
    let block = if by_row.iter().any(|shape| shape == found) {
        [1, columns]
    } else if by_matrix.iter().any(|shape| shape == found) {
        [rows, columns]
    } else {
        block
    };
    let shapes = [
        &by_row[0],
        &by_row[1],
        &by_matrix[0],
        &by_matrix[1],
        &by_matrix[2],
        &grid,
    ];
    let shapes = shapes.map(Vec::as_slice);
    let meaning = "(rows, 1), or one scale for each matrix or block";
    Ok((claims.take_raw(name, &shapes, meaning)?, block))
}

/// NVFP4 in either spelling, or MXFP4 under its names.
fn fp4<'a>(
    claims: &mut Claims<'a>,
    wanted: Wanted<'_>,
    name: &str,
    beside: &impl Fn(&str) -> String,
) -> Result<Option<Source<'a>>, CheckpointError> {
    let Shape { rows, columns } = wanted.shape;
    let scale = beside("_scale");
    let group = match claims.info(&scale).map(|info| info.dtype) {
        Some(Dtype::U8 | Dtype::F8_E8M0) => mxfp4::BLOCK,
        _ => nvfp4::BLOCK,
    };
    let groups = wanted.groups_of(name, group)?;
    // F4 may count elements; bytes of packed pairs are the same.
    let packed = wanted.dims(&[rows, columns / 2]);
    let logical = wanted.dims(&[rows, columns]);
    let shapes: &[&[usize]] = match claims.info(name).map(|info| info.dtype) {
        Some(Dtype::F4) => &[&logical],
        _ => &[&packed],
    };
    let tensor = claims.take_raw(name, shapes, "(outputs, inputs / 2), two codes a byte")?;
    let shape = wanted.dims(&[rows, groups]);
    let scales = claims.take_raw(&scale, &[&shape], "(outputs, groups)")?;
    let global = match group {
        nvfp4::BLOCK => {
            let reciprocal = claims.has(&beside("_global_scale"));
            let end = match reciprocal {
                true => "_global_scale",
                false => "_scale_2",
            };
            let shapes = [wanted.dims(&[]), wanted.dims(&[1]), wanted.dims(&[1, 1])];
            let shapes = shapes.each_ref().map(Vec::as_slice);
            let tensor = claims.take_raw(&beside(end), &shapes, "one scale a matrix")?;
            if let Some(tensor) = &tensor {
                float(tensor)?;
            }
            tensor.map(|tensor| Global { tensor, reciprocal })
        }
        _ => None,
    };
    if let Some(scales) = &scales {
        let dtype = scales.file.info(scales.name)?.dtype;
        if group == nvfp4::BLOCK && dtype != Dtype::F8_E4M3 {
            let supported = "F8_E4M3 (NVFP4), U8 or F8_E8M0 (MXFP4) as scales of fp4";
            return Err(scales
                .file
                .dtype_error(scales.name, dtype, supported)
                .into());
        }
    }
    Ok(tensor.zip(scales).map(|(tensor, scales)| Source {
        tensor,
        kind: Kind::Fp4 {
            shape: wanted.shape,
            group,
            scales,
            global,
        },
    }))
}

/// int4 in groups, eight to a word.
fn int4<'a>(
    claims: &mut Claims<'a>,
    wanted: Wanted<'_>,
    name: &str,
    beside: &impl Fn(&str) -> String,
) -> Result<Option<Source<'a>>, CheckpointError> {
    let Shape { rows, columns } = wanted.shape;
    let words = wanted.groups_of(name, 8)?;
    let tensor = claims.take_raw(
        name,
        &[&wanted.dims(&[rows, words])],
        "(outputs, inputs / 8), eight codes a word",
    )?;
    let scale = beside("_scale");
    let groups = claims.info(&scale).and_then(|info| info.shape.last());
    // A number of groups that does not divide the columns is refused as a shape.
    let groups = groups.map_or(1, |&groups| groups.max(1));
    let group = columns / groups;
    if group == 0 || !columns.is_multiple_of(groups) {
        return Err(CheckpointError::Groups {
            tensor: scale,
            columns,
            group: groups,
        });
    }
    let shape = wanted.dims(&[rows, groups]);
    let scales = claims.take_raw(&scale, &[&shape], "(outputs, groups)")?;
    if let Some(scales) = &scales {
        float(scales)?;
    }
    let declared = beside("_shape");
    if claims.has(&declared)
        && let Some(tensor) = claims.take_raw(&declared, &[&wanted.dims(&[2])], "(2)")?
    {
        let found = tensor.file.read_i32(tensor.name)?;
        let same = |pair: &[i32]| pair == [rows as i32, columns as i32];
        if !found.chunks(2).all(same) {
            return Err(CheckpointError::PackedShape {
                tensor: tensor.name.to_owned(),
                found,
                expected: [rows, columns],
            });
        }
    }
    Ok(tensor.zip(scales).map(|(tensor, scales)| Source {
        tensor,
        kind: Kind::Int4 {
            shape: wanted.shape,
            group,
            scales,
        },
    }))
}

/// The bank of gpt-oss: [experts, outputs, groups, 16 bytes].
fn mxfp4_blocks<'a>(
    claims: &mut Claims<'a>,
    wanted: Wanted<'_>,
) -> Result<Option<Source<'a>>, CheckpointError> {
    let rows = wanted.shape.rows;
    let blocks = format!("{}_blocks", wanted.module);
    let groups = wanted.groups_of(&blocks, mxfp4::BLOCK)?;
    let shape = wanted.dims(&[rows, groups, mxfp4::BLOCK / 2]);
    let tensor = claims.take_raw(&blocks, &[&shape], "(experts, outputs, groups, 16)")?;
    let scales = claims.take_raw(
        &format!("{}_scales", wanted.module),
        &[&wanted.dims(&[rows, groups])],
        "(experts, outputs, groups)",
    )?;
    for tensor in tensor.iter().chain(&scales) {
        let dtype = tensor.file.info(tensor.name)?.dtype;
        if !matches!(dtype, Dtype::U8 | Dtype::F8_E8M0) {
            let supported = "U8, as blocks and scales of MXFP4";
            return Err(tensor
                .file
                .dtype_error(tensor.name, dtype, supported)
                .into());
        }
    }
    Ok(tensor.zip(scales).map(|(tensor, scales)| Source {
        tensor,
        kind: Kind::Fp4 {
            shape: wanted.shape,
            group: mxfp4::BLOCK,
            scales,
            global: None,
        },
    }))
}

/// A matrix of every expert in a file of converted int8 experts: `{name}_int8` [E, N, K] and
/// `{name}_scales`, [E, N] or, for blocks of 128 columns, [E, N, K/128].
pub(super) fn int8_source<'a>(
    file: &'a TensorFile,
    name: &str,
    experts: usize,
    shape: Shape,
) -> Result<Source<'a>, CheckpointError> {
    let Shape { rows, columns } = shape;
    let find = |name: String, shapes: &[&[usize]], dtype, meaning| {
        let info = file.info(&name)?;
        if info.dtype != dtype {
            let supported = "I8 codes with F32 scales";
            return Err(file.dtype_error(&name, info.dtype, supported).into());
        }
        if !shapes.contains(&info.shape.as_slice()) {
            return Err(CheckpointError::Shape {
                tensor: name,
                found: info.shape.clone(),
                expected: shapes[0].to_vec(),
                meaning,
            });
        }
        // The name as the file holds it, which lives as long.
        let name = file
            .tensors()
            .get_key_value(&name)
            .map_or("", |(name, _)| name);
        Ok(RawTensor { file, name })
    };
    let codes = [experts, rows, columns];
    let meaning = "(experts, outputs, inputs)";
    let tensor = find(format!("{name}_int8"), &[&codes], Dtype::I8, meaning)?;
    let by_row = [experts, rows];
    let by_block = [experts, rows, columns.div_ceil(int8::BLOCK)];
    let meaning = "(experts, outputs) or (experts, outputs, blocks)";
    let scales = format!("{name}_scales");
    let scales = find(scales, &[&by_row, &by_block], Dtype::F32, meaning)?;
    let per_row = file.info(scales.name)?.shape.len() == 2;
    Ok(Source {
        tensor,
        kind: Kind::Int8 {
            shape,
            per_row,
            scales,
        },
    })
}
