//! Cells for whole experts in one place, and the kernels' arguments over them.

use super::super::MoeError;
use super::plan::{Piece, Place};
use crate::driver::{DeviceBuffer, Gpu};
use crate::gemm::map_expert;
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::{BankGeometry, GATE_UP_PANELS, PANEL_ROWS, SLICE};
use asym_gemm_kernels_gpu::args::{ColumnTable, GemmArgs, RelayArgs, gemm_flags, weight_layout};
use asym_gemm_kernels_gpu::gemm::Operands;
use std::ops::Range;

/// Gate and up columns of one slice.
pub(super) const SLICE_COLUMNS: usize = GATE_UP_PANELS * PANEL_ROWS;
/// Bytes of a tensor map.
const MAP_BYTES: usize = 128;

/// Runs of cells at equal distances, and the tensor maps over each cell from each of its slices
/// on.
#[derive(Debug)]
pub(super) struct Cells {
    base: u64,
    /// Bytes from one run to the next.
    run_bytes: usize,
    /// Cells of a run.
    run_cells: usize,
    gate_up_maps: DeviceBuffer<u8>,
    down_maps: DeviceBuffer<u8>,
}

impl Cells {
    /// Maps over `runs` runs of `run_cells` cells each at `base`.
    pub(super) fn new(
        gpu: &Gpu,
        geometry: &BankGeometry,
        base: u64,
        (runs, run_bytes): (usize, usize),
        run_cells: usize,
    ) -> Result<Self, MoeError> {
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for run in 0..runs {
            for first in 0..geometry.slices() {
                // An expert without its first slices is an expert of smaller width.
                let rest = BankGeometry {
                    intermediate: geometry.intermediate - first * SLICE,
                    ..*geometry
                };
                for cell in 0..run_cells {
                    let offset = run * run_bytes
                        + cell * geometry.expert_bytes()
                        + first * geometry.slice_bytes();
                    let (g, d) = map_expert(gpu, &rest, base + offset as u64)?;
                    gate_up.extend_from_slice(g.as_bytes());
                    down.extend_from_slice(d.as_bytes());
                }
            }
        }
        Ok(Self {
            base,
            run_bytes,
            run_cells,
            gate_up_maps: DeviceBuffer::from_slice(gpu, &gate_up)?,
            down_maps: DeviceBuffer::from_slice(gpu, &down)?,
        })
    }

    /// The weights of a piece whose cells lie in `run`.
    pub(super) fn of_piece<'a>(
        &'a self,
        geometry: &'a BankGeometry,
        piece: &Piece,
        run: usize,
    ) -> PieceWeights<'a> {
        // What came through the ring begins with the piece's first slice; its tail follows the
        // last. Elsewhere experts are whole.
        let (first, to_tail) = match piece.place {
            Place::Ring => (0, piece.slices.len()),
            _ => (piece.slices.start, geometry.slices() - piece.slices.start),
        };
        let offset = run * self.run_bytes + first * geometry.slice_bytes();
        let maps = (run * geometry.slices() + first) * self.run_cells * MAP_BYTES;
        PieceWeights {
            geometry,
            slices: piece.slices.clone(),
            base: self.base + offset as u64,
            tail: self.base + (offset + to_tail * geometry.slice_bytes()) as u64,
            cells: self.run_cells,
            gate_up_maps: self.gate_up_maps.as_raw() + maps as u64,
            down_maps: self.down_maps.as_raw() + maps as u64,
        }
    }
}

/// Weights of one piece: for cell 0 the addresses, for the others by their distance.
#[derive(Debug)]
pub(super) struct PieceWeights<'a> {
    geometry: &'a BankGeometry,
    slices: Range<usize>,
    /// First slice of the piece in cell 0.
    base: u64,
    /// Tail of cell 0.
    tail: u64,
    cells: usize,
    gate_up_maps: u64,
    down_maps: u64,
}

/// Where activations of a product lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// Scales of its rows.
    pub(super) scales: u64,
    /// Output of row 0.
    pub(super) d: u64,
    /// Address of the piece's groups.
    pub(super) groups: u64,
    pub(super) group_count: u32,
    /// One past the last row.
    pub(super) rows: u32,
}

impl PieceWeights<'_> {
    /// Arguments of the gate-up product: N runs over slices of 256 interleaved columns.
    pub(super) fn gate_up(&self, product: &Product) -> GemmArgs {
        let g = self.geometry;
        let n = self.slices.len() * SLICE_COLUMNS;
        let blocks = g.hidden_blocks();
        let in_slice = |offset: usize, values: usize| ColumnTable {
            base: self.base + offset as u64,
            weight_stride: g.expert_bytes() as u64,
            segment_stride: g.slice_bytes() as u64,
            segment_columns: SLICE_COLUMNS as u32,
            column_stride: (values * 4) as u32,
            block_stride: 4,
        };
        GemmArgs {
            b_maps: self.gate_up_maps,
            d_stride: n as u64,
            b_scales: match blocks {
                0 => ColumnTable::NONE,
                _ => in_slice(g.gate_up_scales_offset(), blocks),
            },
            bias: match g.bias {
                true => in_slice(g.gate_up_bias_offset(), 1),
                false => ColumnTable::NONE,
            },
            a_scale_stride: blocks as u32,
            n: n as u32,
            k_steps: g.hidden_units() as u32,
            panels_per_slice: GATE_UP_PANELS as u32,
            units_per_slice: g.hidden_units() as u32,
            flags: gemm_flags::D_VECTOR,
            ..self.common(product)
        }
    }

    /// Arguments of the down product: K runs over the slices. The bias goes with slice 0.
    pub(super) fn down(&self, product: &Product) -> GemmArgs {
        let g = self.geometry;
        let table = |base: u64, block_stride: usize| ColumnTable {
            base,
            weight_stride: g.expert_bytes() as u64,
            column_stride: 4,
            block_stride: block_stride as u64,
            ..ColumnTable::NONE
        };
        let in_tail = |offset: usize| self.tail + (offset - g.down_row_scales_offset()) as u64;
        let blocks = self.base + g.down_block_scales_offset() as u64;
        GemmArgs {
            b_maps: self.down_maps,
            d_stride: g.hidden as u64,
            b_scales: match g.format {
                // Of fp8 and fp4 there is no product: `operands` refuses them.
                WeightFormat::Bf16
                | WeightFormat::Fp8Block128
                | WeightFormat::Nvfp4
                | WeightFormat::Mxfp4 => ColumnTable::NONE,
                WeightFormat::Int8PerRow => table(in_tail(g.down_row_scales_offset()), 0),
                WeightFormat::Int8Block128 => table(blocks, g.slice_bytes()),
            },
            bias: match g.bias && self.slices.start == 0 {
                true => table(in_tail(g.down_bias_offset()), 0),
                false => ColumnTable::NONE,
            },
            a_scale_stride: self.slices.len() as u32,
            n: g.hidden as u32,
            k_steps: (self.slices.len() * g.down_units()) as u32,
            panels_per_slice: g.down_panels() as u32,
            units_per_slice: g.down_units() as u32,
            flags: match g.hidden.is_multiple_of(2) {
                true => gemm_flags::D_VECTOR,
                false => 0,
            },
            ..self.common(product)
        }
    }

    /// What both products have in common; the rest is for the caller to fill.
    fn common(&self, product: &Product) -> GemmArgs {
        GemmArgs {
            groups: product.groups,
            b_maps: 0,
            d: product.d,
            d_stride: 0,
            a_scales: product.scales,
            b_scales: ColumnTable::NONE,
            bias: ColumnTable::NONE,
            relay: RelayArgs::default(),
            a_scale_stride: 0,
            group_count: product.group_count,
            n: 0,
            k_steps: 0,
            b_layout: weight_layout::PANELS,
            panels_per_slice: 0,
            units_per_slice: 0,
            flags: 0,
            first_weight: 0,
            weight_end: self.cells as u32,
            rows: product.rows,
            reserved: 0,
        }
    }

    /// Columns of h that the model has in the piece's slices.
    pub(super) fn real_columns(&self) -> usize {
        let end = (self.slices.end * SLICE).min(self.geometry.intermediate);
        end - self.slices.start * SLICE
    }
}

/// Symbols of the kernels that pack rows of x and that activate.
pub(super) fn row_kernels(format: WeightFormat) -> Result<(&'static str, &'static str), MoeError> {
    match format {
        WeightFormat::Bf16 => Ok(("pack_rows_bf16", "activate_bf16")),
        WeightFormat::Int8PerRow => Ok(("pack_rows_s8_per_row", "activate_s8")),
        WeightFormat::Int8Block128 => Ok(("pack_rows_s8_blocks", "activate_s8")),
        WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
            Err(no_kernels(format))
        }
    }
}

/// Operands of the gate-up product and of the down product.
pub(super) fn operands(format: WeightFormat) -> Result<[Operands; 2], MoeError> {
    match format {
        WeightFormat::Bf16 => Ok([Operands::Bf16; 2]),
        WeightFormat::Int8PerRow => Ok([Operands::Int8PerRow, Operands::Int8Slices]),
        WeightFormat::Int8Block128 => Ok([Operands::Int8Blocks; 2]),
        WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
            Err(no_kernels(format))
        }
    }
}

/// The error for a format that experts have no GPU kernels for.
fn no_kernels(format: WeightFormat) -> MoeError {
    MoeError::Backend {
        backend: "gpu",
        reason: format!(
            "no GPU kernels for {format} experts; use the cpu back end, or experts in {}, {} or {}",
            WeightFormat::Bf16,
            WeightFormat::Int8PerRow,
            WeightFormat::Int8Block128
        ),
    }
}
