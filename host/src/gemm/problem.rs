//! A call's operands, checked against each other, as arguments of the kernels.

use super::groups::Listed;
use super::launch::map_a;
use super::{Activations, GemmError, MatrixFormat, Output, Weights};
use crate::driver::{Gpu, Rows, TensorMap};
use asym_gemm_formats::int8::BLOCK;
use asym_gemm_kernels_gpu::args::{ColumnTable, GemmArgs, RelayArgs, gemm_flags, weight_layout};
use asym_gemm_kernels_gpu::gemm::Operands;
use std::ops::Range;

/// The checked operands of a call.
pub(super) struct Problem<'a> {
    pub(super) b: &'a Weights<'a>,
    pub(super) operands: Operands,
    pub(super) a_map: TensorMap,
    args: GemmArgs,
    d_element_bytes: usize,
}

/// Part of a problem: some groups, some of the weights, some rows of each weight.
pub(super) struct Piece<'a> {
    pub(super) groups: Listed<'a>,
    pub(super) weights: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl<'a> Problem<'a> {
    /// Operands that passed [`check_shapes`], of which A has rows: at `a_rows`, which TMA can
    /// read.
    pub(super) fn new(
        gpu: &Gpu,
        a: &Activations<'_>,
        a_rows: Rows,
        b: &'a Weights<'a>,
        d: &Output<'_>,
    ) -> Result<Self, GemmError> {
        let operands = operands(a, b)?;
        let (a_map, a_scales, a_scale_stride) = map_activations(gpu, a, a_rows, b.format)?;
        let d_bytes = d.element_bytes();
        let vector_bytes = if d_bytes == 2 { 16 } else { 8 };
        let vector = d.address().is_multiple_of(vector_bytes as u64)
            && (d.stride() * d_bytes).is_multiple_of(vector_bytes)
            && (b.n * d_bytes).is_multiple_of(vector_bytes);
        let mut flags = if vector { gemm_flags::D_VECTOR } else { 0 };
        flags |= if d_bytes == 2 { gemm_flags::D_BF16 } else { 0 };
        let b_scales = b.scales.map_or(ColumnTable::NONE, |scales| {
            b.format.scale_table(&scales, b.count, b.n)
        });
        Ok(Self {
            b,
            operands,
            a_map,
            args: GemmArgs {
                groups: 0,
                b_maps: 0,
                d: d.address(),
                d_stride: d.stride() as u64,
                a_scales,
                b_scales,
                bias: ColumnTable::NONE,
                relay: RelayArgs::default(),
                a_scale_stride,
                group_count: 0,
                n: 0,
                k_steps: (b.k as u32).div_ceil(operands.step_k()),
                b_layout: weight_layout::ROWS,
                panels_per_slice: 1,
                units_per_slice: 1,
                flags,
                first_weight: 0,
                weight_end: 0,
                rows: a.rows() as u32,
                reserved: 0,
            },
            d_element_bytes: d_bytes,
        })
    }

    /// Arguments of one piece.
    ///
    /// The device holds groups with the weights' absolute indices, as the scale tables have
    /// them; a chunk's map starts at its first weight.
    pub(super) fn args(&self, piece: &Piece<'_>) -> GemmArgs {
        let mut args = self.args;
        args.groups = piece.groups.address;
        args.group_count = piece.groups.count as u32;
        args.first_weight = piece.weights.start as u32;
        args.weight_end = piece.weights.end as u32;
        args.n = piece.rows.len() as u32;
        args.d += (piece.rows.start * self.d_element_bytes) as u64;
        if args.b_scales.base != 0 {
            // A piece starts at a multiple of 256 columns, so at the start of a segment.
            args.b_scales.base = args.b_scales.address(0, piece.rows.start as u32);
        }
        args
    }
}

/// Checks how A, B and D fit each other and the kernels.
pub(super) fn check_shapes(
    a: &Activations<'_>,
    b: &Weights<'_>,
    d: &Output<'_>,
) -> Result<(), GemmError> {
    let shape = |what, reason| GemmError::Shape { what, reason };
    if a.k() != b.k {
        return Err(shape("A and B", format!("K is {} and {}", a.k(), b.k)));
    }
    if d.columns() != b.n || d.rows() != a.rows() {
        return Err(shape(
            "D",
            format!(
                "[{}, {}] for A [{}, K] and B [N = {}, K]",
                d.rows(),
                d.columns(),
                a.rows(),
                b.n
            ),
        ));
    }
    if a.rows() > i32::MAX as usize || b.n > i32::MAX as usize || b.k > i32::MAX as usize {
        return Err(shape("A and B", "a dimension exceeds 2^31 - 1".into()));
    }
    operands(a, b).map(drop)
}

/// Operand types of the call.
fn operands(a: &Activations<'_>, b: &Weights<'_>) -> Result<Operands, GemmError> {
    let blocks = b.k.div_ceil(BLOCK);
    let scales = a.scales().map(|s| (s.rows(), s.columns()));
    let per_row = scales == Some((a.rows(), 1));
    let per_block = scales == Some((a.rows(), blocks));
    let found = match (a, b.format) {
        (Activations::Bf16(_), MatrixFormat::Bf16) => Some(Operands::Bf16),
        (Activations::Int8 { .. }, MatrixFormat::Int8PerRow) if per_row => {
            Some(Operands::Int8PerRow)
        }
        (Activations::Int8 { .. }, MatrixFormat::Int8PerRow) if per_block => {
            Some(Operands::Int8Slices)
        }
        (Activations::Int8 { .. }, MatrixFormat::Int8Block128) if per_block => {
            Some(Operands::Int8Blocks)
        }
        (Activations::Fp8 { .. }, MatrixFormat::Fp8PerRow) if per_row || scales == Some((1, 1)) => {
            Some(Operands::Fp8PerRow)
        }
        (Activations::Fp8 { .. }, MatrixFormat::Fp8Block128) if per_block => {
            Some(Operands::Fp8Blocks)
        }
        _ => None,
    };
    // The per-row sum over K is one i32.
    const MAX_K: usize = i32::MAX as usize / (128 * 128);
    match found {
        Some(Operands::Int8PerRow) if b.k > MAX_K => Err(GemmError::Unsupported {
            what: "K",
            reason: format!(
                "{} exceeds {MAX_K}, where the i32 sum of per-row int8 could overflow; use block scales",
                b.k
            ),
        }),
        Some(operands) => Ok(operands),
        None => Err(GemmError::Shape {
            what: "A scales",
            reason: format!(
                "A is {}[{}, {}] with scales {scales:?}, B is {}",
                match a {
                    Activations::Bf16(_) => "bf16",
                    Activations::Int8 { .. } => "int8",
                    Activations::Fp8 { .. } => "fp8",
                },
                a.rows(),
                a.k(),
                b.format
            ),
        }),
    }
}

/// Tensor map of A, address of its scales and elements from one row of them to the next.
fn map_activations(
    gpu: &Gpu,
    a: &Activations<'_>,
    rows: Rows,
    format: MatrixFormat,
) -> Result<(TensorMap, u64, u32), GemmError> {
    let map = map_a(gpu, format, rows.address, a.rows(), a.k(), rows.pitch)?;
    let Some(scales) = a.scales() else {
        return Ok((map, 0, 0));
    };
    let stride = u32::try_from(scales.stride()).map_err(|_| GemmError::Unsupported {
        what: "A scales",
        reason: format!("rows are {} elements apart", scales.stride()),
    })?;
    // One scale for the whole tensor is the same one for every row.
    let stride = if scales.rows() < a.rows() { 0 } else { stride };
    Ok((map, scales.address(), stride))
}
