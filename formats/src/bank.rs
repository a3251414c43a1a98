//! Where each byte of an expert lies in the weight bank.
//!
//! One layer's experts are one allocation, read in place by CPU and GPU. An expert
//! is cut along the intermediate dimension I into *slices* of 128; a slice holds
//! everything that its 128 hidden units need, contiguously, and is the unit of
//! copying, of residency and of CPU work:
//!
//! ```text
//! bank   = expert 0 | expert 1 | ...                      stride expert_bytes
//! expert = slice 0 | slice 1 | ... | tail                 stride slice_bytes
//! slice  = gate/up panels | down panels | gate/up scales | down scales | gate/up bias
//! tail   = down scales (PerRow) | down bias
//!
//! gate/up panels: gate 0, up 0, gate 1, up 1, .. gate 7, up 7   (16 rows of I each, K = H)
//! down panels:    H/16 panels                                   (16 rows of H each, K = 128 of I)
//! panel = consecutive units along K;  unit = 16 rows x 128 bytes, row-major (2 KiB)
//! ```
//!
//! The scales of a slice, f32, by format:
//!
//! ```text
//! bf16            none
//! int8            gate/up [16 panels][16 rows]                (down: in the tail)
//! int8-block128   gate/up [16 panels][16 rows][H/128]         down [rows of H]
//! fp8             gate/up [gate, up][H/128]                   down [H/128]
//! nvfp4           gate/up [gate, up]                          down [1]
//! mxfp4           none
//! ```
//!
//! In nvfp4 and mxfp4 the scales of 16 or 32 elements lie in the unit of their codes, so that a
//! panel is still one sequential stream; those above are the scales of the whole matrices, which
//! every slice repeats:
//!
//! ```text
//! unit = codes [16 rows][64 bytes] | scales [16 rows][128/16 or 128/32]   (1152 or 1088 bytes)
//! ```
//!
//! A slice's 128 rows of I and its 128 columns of I are one row, or one column, of the 128 x 128
//! blocks of fp8, so that each block scale lies in one slice.
//!
//! A unit is what one AMX tile pair loads with a stride of 128 bytes and what one row
//! group of a TMA box with 128-byte swizzle takes. Reading a panel is one sequential
//! stream. Gate and up alternate every 16 rows, so that 32 consecutive output columns
//! hold both halves of the gated activation.
//!
//! H is padded to whole units along K and to 16 along the rows of down, I to whole
//! slices; all padding is zero and therefore adds nothing.
//!
//! Sizes are in bytes, offsets from the start of what the name says.

use crate::WeightFormat;

/// Rows of a panel.
pub const PANEL_ROWS: usize = 16;
/// Bytes of K in a unit's row.
pub const UNIT_ROW_BYTES: usize = 128;
/// Bytes of a unit.
pub const UNIT_BYTES: usize = PANEL_ROWS * UNIT_ROW_BYTES;
/// Elements of K in a unit of fp4.
pub const FP4_UNIT_K: usize = 128;
/// Bytes of codes in a row of a unit of fp4.
pub const FP4_ROW_BYTES: usize = FP4_UNIT_K / 2;
/// Intermediate units of a slice.
pub const SLICE: usize = 128;
/// Gate and up panels of a slice together.
pub const GATE_UP_PANELS: usize = 2 * SLICE / PANEL_ROWS;
/// Slices and experts start at multiples of this.
pub const ALIGN: usize = 256;

/// One of the three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// [I, H], through the nonlinearity.
    Gate,
    /// [I, H].
    Up,
    /// [H, I].
    Down,
}

/// Shape and format of a bank, from which every offset follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BankGeometry {
    /// Number of experts E.
    pub experts: usize,
    /// Model width H (K of gate and up, rows of down).
    pub hidden: usize,
    /// Expert width I (rows of gate and up, K of down).
    pub intermediate: usize,
    /// Storage of the weights.
    pub format: WeightFormat,
    /// Whether gate, up and down carry biases.
    pub bias: bool,
}

/// Scales and biases start at multiples of this in their slice.
const SECTION_ALIGN: usize = 64;

/// Bytes of a unit of fp4 whose scales cover `group` columns: 16 rows of codes, then 16 rows of
/// scales.
pub const fn fp4_unit_bytes(group: usize) -> usize {
    PANEL_ROWS * (FP4_ROW_BYTES + FP4_UNIT_K / group)
}

const fn round_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// Bytes that `count` scales take.
const fn scale_bytes(count: usize) -> usize {
    round_up(count * 4, SECTION_ALIGN)
}

impl BankGeometry {
    /// Elements of K in one unit: 64 for bf16, 128 for all others.
    pub const fn unit_k(&self) -> usize {
        match self.format {
            WeightFormat::Bf16 => 64,
            _ => 128,
        }
    }

    /// Bytes of one unit: [`UNIT_BYTES`], in fp4 less ([`fp4_unit_bytes`]).
    pub const fn unit_bytes(&self) -> usize {
        match self.format.scale_group() {
            Some(group) => fp4_unit_bytes(group),
            None => UNIT_BYTES,
        }
    }

    /// Units along H, the K of gate and up.
    pub const fn hidden_units(&self) -> usize {
        self.hidden.div_ceil(self.unit_k())
    }

    /// H padded to whole units: the row length of the activations x as the kernels read them.
    pub const fn hidden_padded(&self) -> usize {
        self.hidden_units() * self.unit_k()
    }

    /// Panels of down, over the rows H.
    pub const fn down_panels(&self) -> usize {
        self.hidden.div_ceil(PANEL_ROWS)
    }

    /// Rows of down padded to whole panels.
    pub const fn down_rows_padded(&self) -> usize {
        self.down_panels() * PANEL_ROWS
    }

    /// Units along the 128 of I that a slice's down panel covers: 2 for bf16, 1 for all others.
    pub const fn down_units(&self) -> usize {
        SLICE / self.unit_k()
    }

    /// Slices of an expert; the last may be ragged (zero-padded).
    pub const fn slices(&self) -> usize {
        self.intermediate.div_ceil(SLICE)
    }

    /// I padded to whole slices: the row length of h as the kernels read it.
    pub const fn intermediate_padded(&self) -> usize {
        self.slices() * SLICE
    }

    /// Intermediate units that slice `slice` really holds (128 but for a ragged last one).
    pub const fn slice_len(&self, slice: usize) -> usize {
        let left = self.intermediate - slice * SLICE;
        if left < SLICE { left } else { SLICE }
    }

    /// Scales that cover one gate or up row: 0, 1, or one for each 128 of H. In fp8 the 128 rows of
    /// a slice have them in common, in nvfp4 all rows.
    pub const fn hidden_blocks(&self) -> usize {
        match self.format {
            WeightFormat::Bf16 => 0,
            WeightFormat::Int8PerRow => 1,
            WeightFormat::Int8Block128 => self.hidden.div_ceil(crate::int8::BLOCK),
            WeightFormat::Fp8Block128 => self.hidden.div_ceil(crate::fp8::BLOCK),
            WeightFormat::Nvfp4 => 1,
            WeightFormat::Mxfp4 => 0,
        }
    }

    /// Bytes of one gate or up panel.
    pub const fn hidden_panel_bytes(&self) -> usize {
        self.hidden_units() * self.unit_bytes()
    }

    /// Bytes of one down panel inside a slice.
    pub const fn down_panel_bytes(&self) -> usize {
        self.down_units() * self.unit_bytes()
    }

    /// Offset of the down panels in a slice.
    pub const fn down_offset(&self) -> usize {
        GATE_UP_PANELS * self.hidden_panel_bytes()
    }

    /// Offset in a slice of the gate and up scales: f32 `[16 panels][16 rows][hidden_blocks]`,
    /// panels in gate/up order; in fp8 and nvfp4 f32 `[gate, up][hidden_blocks]`.
    pub const fn gate_up_scales_offset(&self) -> usize {
        self.down_offset() + self.down_panels() * self.down_panel_bytes()
    }

    /// Gate and up scales of a slice: a set of `hidden_blocks` for each row, in fp8 and nvfp4 for
    /// gate and for up.
    pub const fn gate_up_scale_count(&self) -> usize {
        let sets = match self.format {
            WeightFormat::Fp8Block128 | WeightFormat::Nvfp4 => 2,
            _ => GATE_UP_PANELS * PANEL_ROWS,
        };
        sets * self.hidden_blocks()
    }

    /// Offset in a slice of the down scales: f32 `[down_block_scale_count]`.
    pub const fn down_block_scales_offset(&self) -> usize {
        self.gate_up_scales_offset() + scale_bytes(self.gate_up_scale_count())
    }

    /// Down scales of a slice: in int8-block128 one for each (padded) row of H, in fp8 for each 128
    /// of H, in nvfp4 one, else none.
    pub const fn down_block_scale_count(&self) -> usize {
        match self.format {
            WeightFormat::Bf16 | WeightFormat::Int8PerRow | WeightFormat::Mxfp4 => 0,
            WeightFormat::Nvfp4 => 1,
            WeightFormat::Int8Block128 => self.down_rows_padded(),
            WeightFormat::Fp8Block128 => self.hidden.div_ceil(crate::fp8::BLOCK),
        }
    }

    /// Offset in a slice of the gate and up biases: f32 [16 panels][16 rows], as the scales.
    pub const fn gate_up_bias_offset(&self) -> usize {
        self.down_block_scales_offset() + scale_bytes(self.down_block_scale_count())
    }

    /// Distance of consecutive slices of an expert.
    pub const fn slice_bytes(&self) -> usize {
        let bias = if self.bias {
            GATE_UP_PANELS * PANEL_ROWS * 4
        } else {
            0
        };
        round_up(self.gate_up_bias_offset() + bias, ALIGN)
    }

    /// Offset in an expert of the down scales of PerRow: f32 `[down_rows_padded]`.
    pub const fn down_row_scales_offset(&self) -> usize {
        self.slices() * self.slice_bytes()
    }

    /// Offset in an expert of the down bias: f32 `[down_rows_padded]`.
    pub const fn down_bias_offset(&self) -> usize {
        let scales = match self.format {
            WeightFormat::Int8PerRow => self.down_rows_padded() * 4,
            _ => 0,
        };
        self.down_row_scales_offset() + scales
    }

    /// Distance of consecutive experts.
    pub const fn expert_bytes(&self) -> usize {
        let bias = if self.bias {
            self.down_rows_padded() * 4
        } else {
            0
        };
        round_up(self.down_bias_offset() + bias, ALIGN)
    }

    /// Bytes of the whole bank.
    pub const fn bank_bytes(&self) -> usize {
        self.experts * self.expert_bytes()
    }

    /// Panel of row `row` (0..128) of gate or up inside its slice.
    pub const fn gate_up_panel(projection: Projection, row: usize) -> usize {
        let up = matches!(projection, Projection::Up) as usize;
        row / PANEL_ROWS * 2 + up
    }

    /// Offset in an expert of the element at `row`, `k` of a projection; in fp4 that of the byte
    /// whose low (even k) or high nibble it is.
    ///
    /// Gate and up: row in 0..I, k in 0..H. Down: row in 0..H, k in 0..I.
    pub const fn element_offset(&self, projection: Projection, row: usize, k: usize) -> usize {
        let (unit, k) = self.unit_of(projection, row, k);
        let row_bytes = match self.format.scale_group() {
            Some(_) => FP4_ROW_BYTES,
            None => UNIT_ROW_BYTES,
        };
        unit + row % PANEL_ROWS * row_bytes + k * self.format.element_bits() / 8
    }

    /// In fp4 the offset in an expert of the scale byte of the element at `row`, `k`.
    pub const fn fp4_scale_offset(&self, projection: Projection, row: usize, k: usize) -> usize {
        let (unit, k) = self.unit_of(projection, row, k);
        match self.format.scale_group() {
            Some(group) => {
                let scales = FP4_UNIT_K / group;
                unit + PANEL_ROWS * FP4_ROW_BYTES + row % PANEL_ROWS * scales + k / group
            }
            None => panic!("only fp4 has scales in its units"),
        }
    }

    /// Offset in an expert of the unit that holds the element, and its column there.
    const fn unit_of(&self, projection: Projection, row: usize, k: usize) -> (usize, usize) {
        let (slice, panel_offset, k) = match projection {
            Projection::Gate | Projection::Up => {
                let panel = Self::gate_up_panel(projection, row % SLICE);
                (row / SLICE, panel * self.hidden_panel_bytes(), k)
            }
            Projection::Down => {
                let panel = row / PANEL_ROWS;
                let offset = self.down_offset() + panel * self.down_panel_bytes();
                (k / SLICE, offset, k % SLICE)
            }
        };
        let unit = k / self.unit_k() * self.unit_bytes();
        (
            slice * self.slice_bytes() + panel_offset + unit,
            k % self.unit_k(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn geometries() -> Vec<BankGeometry> {
        let mut all = Vec::new();
        for format in WeightFormat::ALL {
            for (hidden, intermediate) in [
                (64, 128),
                (128, 96),
                (192, 160),
                (100, 33),
                (1, 1),
                (257, 300),
            ] {
                for bias in [false, true] {
                    all.push(BankGeometry {
                        experts: 3,
                        hidden,
                        intermediate,
                        format,
                        bias,
                    });
                }
            }
        }
        all
    }

    /// Every element has bytes of its own, inside the parts meant for it.
    #[test]
    fn elements_do_not_overlap() {
        for g in geometries() {
            let mut used = vec![false; g.expert_bytes()];
            let group = g.format.scale_group();
            let es = g.format.element_bits().div_ceil(8);
            let mut claim = |offset: usize, len: usize| {
                for used in &mut used[offset..offset + len] {
                    assert!(!*used, "{g:?} at {offset}");
                    *used = true;
                }
            };
            for i in 0..g.intermediate {
                for k in 0..g.hidden {
                    for (projection, row, k) in [
                        (Projection::Gate, i, k),
                        (Projection::Up, i, k),
                        (Projection::Down, k, i),
                    ] {
                        let nibbles = group.is_some();
                        if !nibbles || k % 2 == 0 {
                            claim(g.element_offset(projection, row, k), es);
                        }
                        if group.is_some_and(|group| k % group == 0) {
                            claim(g.fp4_scale_offset(projection, row, k), 1);
                        }
                    }
                }
            }
            for slice in 0..g.slices() {
                let base = slice * g.slice_bytes();
                claim(
                    base + g.gate_up_scales_offset(),
                    g.gate_up_scale_count() * 4,
                );
                claim(
                    base + g.down_block_scales_offset(),
                    g.down_block_scale_count() * 4,
                );
                if g.bias {
                    claim(base + g.gate_up_bias_offset(), 256 * 4);
                }
            }
            if g.format == WeightFormat::Int8PerRow {
                claim(g.down_row_scales_offset(), g.down_rows_padded() * 4);
            }
            if g.bias {
                claim(g.down_bias_offset(), g.down_rows_padded() * 4);
            }
        }
    }

    #[test]
    fn everything_is_aligned() {
        for g in geometries() {
            assert_eq!(g.slice_bytes() % ALIGN, 0);
            assert_eq!(g.expert_bytes() % ALIGN, 0);
            assert_eq!(g.down_offset() % g.unit_bytes(), 0);
            assert_eq!(g.unit_bytes() % SECTION_ALIGN, 0);
            assert_eq!(g.gate_up_scales_offset() % SECTION_ALIGN, 0);
            assert_eq!(g.down_block_scales_offset() % SECTION_ALIGN, 0);
            assert_eq!(g.gate_up_bias_offset() % SECTION_ALIGN, 0);
        }
    }

    /// int8 at H = 2048: a slice's weights are 768 KiB, as the layout's derivation says.
    #[test]
    fn slice_of_a_known_shape() {
        let g = BankGeometry {
            experts: 1,
            hidden: 2048,
            intermediate: 768,
            format: WeightFormat::Int8PerRow,
            bias: false,
        };
        assert_eq!(g.gate_up_scales_offset(), 768 * 1024);
        assert_eq!(g.slices(), 6);
    }

    /// fp8 at the same shape: as many bytes of weights, 16 scales each of gate, up and down.
    #[test]
    fn fp8_slice_of_a_known_shape() {
        let g = BankGeometry {
            experts: 1,
            hidden: 2048,
            intermediate: 768,
            format: WeightFormat::Fp8Block128,
            bias: false,
        };
        assert_eq!(g.gate_up_scales_offset(), 768 * 1024);
        assert_eq!(g.down_block_scales_offset(), 768 * 1024 + 2 * 64);
        assert_eq!(g.slice_bytes(), 768 * 1024 + 256);
        assert_eq!(g.expert_bytes(), 6 * g.slice_bytes());
    }

    /// fp4 moves 0.28 of the bytes of bf16.
    #[test]
    fn fp4_slices_of_a_known_shape() {
        let slice = |format| {
            BankGeometry {
                experts: 1,
                hidden: 2048,
                intermediate: 768,
                format,
                bias: false,
            }
            .slice_bytes()
        };
        let units = 3 * 2048 / 16 * 128 / 128;
        assert_eq!(slice(WeightFormat::Nvfp4), units * 1152 + 256);
        assert_eq!(slice(WeightFormat::Mxfp4), units * 1088);
        let bf16 = slice(WeightFormat::Bf16) as f64;
        assert!((slice(WeightFormat::Nvfp4) as f64 / bf16 - 0.2813).abs() < 1e-3);
    }
}
