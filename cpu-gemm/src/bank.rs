//! The weight bank as the CPU sees it: checked views.
//!
//! `asym_gemm_formats::bank` says where each byte lies. Scales and biases are read as little-endian
//! bytes, so a bank needs no alignment (64 bytes is faster).

use asym_gemm_formats::bank::{BankGeometry, PANEL_ROWS};
use asym_gemm_formats::{WeightFormat, fp8};

use crate::CpuError;
use crate::kernels::Panel;
use crate::recipe::MAX_EXACT_K;
use crate::tile::Lanes;
use crate::validate::same;

/// The most rows or columns of one expert matrix.
const MAX_DIMENSION: usize = 1 << 20;
/// The most experts of a bank.
const MAX_EXPERTS: usize = 1 << 16;

/// The weights of one layer's experts, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct BankRef<'a> {
    geometry: BankGeometry,
    bytes: &'a [u8],
}

impl<'a> BankRef<'a> {
    /// Views `bytes`, exactly `geometry.bank_bytes()` long, as a bank.
    ///
    /// # Errors
    /// A zero or too large dimension, or another length.
    pub fn new(geometry: BankGeometry, bytes: &'a [u8]) -> Result<Self, CpuError> {
        check_geometry(geometry)?;
        same("the bank, in bytes,", geometry.bank_bytes(), bytes.len())?;
        Ok(Self { geometry, bytes })
    }

    /// Shape and format.
    pub fn geometry(&self) -> BankGeometry {
        self.geometry
    }

    /// Expert `expert`, which the caller has checked.
    pub(crate) fn expert(&self, expert: usize) -> ExpertRef<'a> {
        let size = self.geometry.expert_bytes();
        ExpertRef {
            geometry: self.geometry,
            bytes: &self.bytes[expert * size..][..size],
        }
    }
}

/// One expert of a bank.
#[derive(Clone, Copy)]
pub(crate) struct ExpertRef<'a> {
    geometry: BankGeometry,
    bytes: &'a [u8],
}

impl<'a> ExpertRef<'a> {
    fn slice(&self, slice: usize) -> &'a [u8] {
        let size = self.geometry.slice_bytes();
        &self.bytes[slice * size..][..size]
    }

    /// Panel `panel` (gate 0, up 0, gate 1, ..) of a slice.
    pub(crate) fn gate_up_panel(&self, slice: usize, panel: usize) -> &'a [u8] {
        let size = self.geometry.hidden_panel_bytes();
        &self.slice(slice)[panel * size..][..size]
    }

    /// Bytes of a panel as the kernels take them.
    #[inline(always)]
    pub(crate) fn panel(&self, bytes: &'a [u8]) -> Panel<'a> {
        Panel::of_units(bytes, self.geometry.unit_bytes())
    }

    /// The scales of that panel's rows for block `block` of K; ones in bf16 and
    /// mxfp4.
    #[inline(always)]
    pub(crate) fn gate_up_scales(&self, slice: usize, panel: usize, block: usize) -> Lanes<f32> {
        let blocks = self.geometry.hidden_blocks();
        if blocks == 0 {
            return [1.0; PANEL_ROWS];
        }
        // Gate and up panels alternate; in fp8 and nvfp4 all of either have their scales in common.
        let common = match self.geometry.format {
            WeightFormat::Fp8Block128 => Some(block),
            WeightFormat::Nvfp4 => Some(0),
            _ => None,
        };
        if let Some(block) = common {
            let start = self.geometry.gate_up_scales_offset() + (panel % 2 * blocks + block) * 4;
            return [float(&self.slice(slice)[start..]); PANEL_ROWS];
        }
        let start = self.geometry.gate_up_scales_offset() + panel * PANEL_ROWS * blocks * 4;
        let bytes = &self.slice(slice)[start..][..PANEL_ROWS * blocks * 4];
        let (values, _) = bytes.as_chunks::<4>();
        std::array::from_fn(|row| f32::from_le_bytes(values[row * blocks + block]))
    }

    /// The biases of that panel, if the bank has biases.
    pub(crate) fn gate_up_bias(&self, slice: usize, panel: usize) -> Option<Lanes<f32>> {
        let start = self.geometry.gate_up_bias_offset() + panel * PANEL_ROWS * 4;
        self.geometry
            .bias
            .then(|| lanes(&self.slice(slice)[start..]))
    }

    /// The 128 columns of down panel `panel` (16 rows of H) that belong to a slice.
    pub(crate) fn down_panel(&self, slice: usize, panel: usize) -> &'a [u8] {
        let size = self.geometry.down_panel_bytes();
        &self.slice(slice)[self.geometry.down_offset() + panel * size..][..size]
    }

    /// The panels of a slice's down from `panel` on, with everything that follows in the expert:
    /// the same panel of the next slice lies `slice_bytes` further.
    pub(crate) fn down_panels_from(&self, slice: usize, panel: usize) -> &'a [u8] {
        let size = self.geometry.down_panel_bytes();
        let start = slice * self.geometry.slice_bytes();
        &self.bytes[start + self.geometry.down_offset() + panel * size..]
    }

    /// The scales of that panel in int8-block128, fp8 and nvfp4; ones in other formats.
    pub(crate) fn down_block_scales(&self, slice: usize, panel: usize) -> Lanes<f32> {
        match self.geometry.format {
            WeightFormat::Int8Block128 => {
                let start = self.geometry.down_block_scales_offset() + panel * PANEL_ROWS * 4;
                lanes(&self.slice(slice)[start..])
            }
            WeightFormat::Fp8Block128 => {
                let block = panel * PANEL_ROWS / fp8::BLOCK;
                let start = self.geometry.down_block_scales_offset() + block * 4;
                [float(&self.slice(slice)[start..]); PANEL_ROWS]
            }
            WeightFormat::Nvfp4 => {
                let start = self.geometry.down_block_scales_offset();
                [float(&self.slice(slice)[start..]); PANEL_ROWS]
            }
            WeightFormat::Bf16 | WeightFormat::Int8PerRow | WeightFormat::Mxfp4 => {
                [1.0; PANEL_ROWS]
            }
        }
    }

    /// The scales of down panel `panel` over all of I in PerRow.
    pub(crate) fn down_row_scales(&self, panel: usize) -> Option<Lanes<f32>> {
        match self.geometry.format {
            WeightFormat::Int8PerRow => {
                let start = self.geometry.down_row_scales_offset() + panel * PANEL_ROWS * 4;
                Some(lanes(&self.bytes[start..]))
            }
            _ => None,
        }
    }

    /// The biases of down panel `panel`, if the bank has biases.
    pub(crate) fn down_bias(&self, panel: usize) -> Option<Lanes<f32>> {
        let start = self.geometry.down_bias_offset() + panel * PANEL_ROWS * 4;
        self.geometry.bias.then(|| lanes(&self.bytes[start..]))
    }
}

/// The f32 at the start of `bytes`.
pub(crate) fn float(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The 16 f32 at the start of `bytes`.
#[inline(always)]
fn lanes(bytes: &[u8]) -> Lanes<f32> {
    let words: Lanes<u32> = bytemuck::pod_read_unaligned(&bytes[..PANEL_ROWS * 4]);
    let mut lanes = [0.0; PANEL_ROWS];
    for (lane, word) in lanes.iter_mut().zip(words) {
        *lane = f32::from_bits(u32::from_le(word));
    }
    lanes
}

pub(crate) fn check_geometry(geometry: BankGeometry) -> Result<(), CpuError> {
    let exact = match geometry.format {
        WeightFormat::Int8PerRow => MAX_EXACT_K,
        _ => MAX_DIMENSION,
    };
    for (what, value, limit) in [
        ("the number of experts", geometry.experts, MAX_EXPERTS),
        ("the hidden size H", geometry.hidden, exact),
        ("the expert width I", geometry.intermediate, MAX_DIMENSION),
    ] {
        if value == 0 {
            return Err(CpuError::Zero { what });
        }
        if value > limit {
            return Err(CpuError::TooLarge { what, value, limit });
        }
    }
    Ok(())
}
