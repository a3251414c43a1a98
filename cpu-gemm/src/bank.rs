//! The weight bank as the CPU sees it: checked views, packing and unpacking.
//!
//! `asym_gemm_formats::bank` says where each byte lies. Scales and biases are read as little-endian
//! bytes, so a bank needs no alignment (64 bytes is faster).

use asym_gemm_formats::bank::{BankGeometry, GATE_UP_PANELS, PANEL_ROWS, Projection, SLICE};
use asym_gemm_formats::{WeightFormat, bf16, e4m3, fp8, int8};

use crate::CpuError;
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

    /// The scales of that panel's rows for block `block` of K; ones in bf16.
    #[inline(always)]
    pub(crate) fn gate_up_scales(&self, slice: usize, panel: usize, block: usize) -> Lanes<f32> {
        let blocks = self.geometry.hidden_blocks();
        if blocks == 0 {
            return [1.0; PANEL_ROWS];
        }
        if self.geometry.format == WeightFormat::Fp8Block128 {
            // Gate and up panels alternate; all of either have their scales in common.
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

    /// The scales of that panel in int8-block128 and fp8; ones in other formats.
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
            WeightFormat::Bf16 | WeightFormat::Int8PerRow => [1.0; PANEL_ROWS],
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
fn float(bytes: &[u8]) -> f32 {
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

/// Where the weights of one expert come from, in f32.
pub trait ExpertSource {
    /// Writes row `row` of a projection: H values of gate and up (row < I), I values of
    /// down (row < H).
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]);

    /// The bias of a projection: I values of gate and up, H values of down. Read only if the
    /// geometry has biases; `None` then stands for zeros.
    fn bias(&self, projection: Projection) -> Option<&[f32]>;
}

const PROJECTIONS: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

/// Rows and columns of a projection.
fn shape(geometry: &BankGeometry, projection: Projection) -> (usize, usize) {
    match projection {
        Projection::Gate | Projection::Up => (geometry.intermediate, geometry.hidden),
        Projection::Down => (geometry.hidden, geometry.intermediate),
    }
}

/// Rounds or quantises one expert into `out`, exactly `geometry.expert_bytes()` long.
///
/// bf16 rounds to nearest even. int8 takes the scale of `Int8PerRow` over a whole row (of
/// down, over all of I) and that of `Int8Block128` over 128 columns; `Fp8Block128` over 128 rows and
/// 128 columns.
///
/// # Errors
/// A zero or too large dimension, another length of `out`, or a bias of another length.
pub fn pack_expert(
    geometry: BankGeometry,
    out: &mut [u8],
    source: &dyn ExpertSource,
) -> Result<(), CpuError> {
    check_geometry(geometry)?;
    same("the expert, in bytes,", geometry.expert_bytes(), out.len())?;
    for projection in PROJECTIONS {
        if let (true, Some(bias)) = (geometry.bias, source.bias(projection)) {
            let (rows, _) = shape(&geometry, projection);
            same("a projection's bias, in elements,", rows, bias.len())?;
        }
    }
    out.fill(0);
    for projection in PROJECTIONS {
        let (rows, k) = shape(&geometry, projection);
        // Rows that are quantised together.
        let band = match geometry.format {
            WeightFormat::Fp8Block128 => fp8::BLOCK.min(rows),
            _ => 1,
        };
        let mut values = vec![0f32; band * k];
        let mut codes = vec![0u8; band * k];
        let mut scales = vec![0f32; k.div_ceil(int8::BLOCK)];
        for first in (0..rows).step_by(band) {
            let count = band.min(rows - first);
            let values = &mut values[..count * k];
            for (row, values) in values.chunks_mut(k).enumerate() {
                source.row(projection, first + row, values);
            }
            let codes = &mut codes[..count * k];
            match geometry.format {
                WeightFormat::Bf16 => {
                    for (k, &x) in values.iter().enumerate() {
                        let at = geometry.element_offset(projection, first, k);
                        out[at..at + 2].copy_from_slice(&bf16::encode(x).to_le_bytes());
                    }
                    continue;
                }
                WeightFormat::Int8PerRow => {
                    let codes = bytemuck::cast_slice_mut(codes);
                    scales.fill(int8::quantise_per_row(values, codes));
                }
                WeightFormat::Int8Block128 => {
                    let codes = bytemuck::cast_slice_mut(codes);
                    int8::quantise_blocks(values, codes, &mut scales);
                }
                WeightFormat::Fp8Block128 => fp8::quantise_band(values, k, codes, &mut scales),
            }
            for (i, &code) in codes.iter().enumerate() {
                out[geometry.element_offset(projection, first + i / k, i % k)] = code;
            }
            for (block, scale) in scales.iter().enumerate() {
                let at = scale_offset(&geometry, projection, first, block);
                out[at..at + 4].copy_from_slice(&scale.to_le_bytes());
            }
        }
        if let (true, Some(bias)) = (geometry.bias, source.bias(projection)) {
            for (row, value) in bias.iter().enumerate() {
                let at = bias_offset(&geometry, projection, row);
                out[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
        }
    }
    Ok(())
}

/// Offset in an int8 or fp8 expert of the scale of `row` for columns `block * 128..`.
fn scale_offset(
    geometry: &BankGeometry,
    projection: Projection,
    row: usize,
    block: usize,
) -> usize {
    match (projection, geometry.format) {
        (Projection::Gate | Projection::Up, WeightFormat::Fp8Block128) => {
            let up = usize::from(projection == Projection::Up);
            row / SLICE * geometry.slice_bytes()
                + geometry.gate_up_scales_offset()
                + (up * geometry.hidden_blocks() + block) * 4
        }
        (Projection::Down, WeightFormat::Fp8Block128) => {
            block * geometry.slice_bytes()
                + geometry.down_block_scales_offset()
                + row / fp8::BLOCK * 4
        }
        (Projection::Gate | Projection::Up, format) => {
            let block = match format {
                WeightFormat::Int8Block128 => block,
                _ => 0,
            };
            let row_in_slice = gate_up_row(projection, row);
            row / SLICE * geometry.slice_bytes()
                + geometry.gate_up_scales_offset()
                + (row_in_slice * geometry.hidden_blocks() + block) * 4
        }
        (Projection::Down, WeightFormat::Int8Block128) => {
            block * geometry.slice_bytes() + geometry.down_block_scales_offset() + row * 4
        }
        (Projection::Down, _) => geometry.down_row_scales_offset() + row * 4,
    }
}

/// Offset in an expert of the bias of `row`.
fn bias_offset(geometry: &BankGeometry, projection: Projection, row: usize) -> usize {
    match projection {
        Projection::Gate | Projection::Up => {
            row / SLICE * geometry.slice_bytes()
                + geometry.gate_up_bias_offset()
                + gate_up_row(projection, row) * 4
        }
        Projection::Down => geometry.down_bias_offset() + row * 4,
    }
}

/// Row of gate or up among the `GATE_UP_PANELS * 16` rows of its slice.
fn gate_up_row(projection: Projection, row: usize) -> usize {
    let panel = BankGeometry::gate_up_panel(projection, row % SLICE);
    debug_assert!(panel < GATE_UP_PANELS);
    panel * PANEL_ROWS + row % PANEL_ROWS
}

/// One expert's weights in f32, as its bank holds them.
#[derive(Clone, Debug, PartialEq)]
pub struct UnpackedExpert {
    geometry: BankGeometry,
    weights: [Vec<f32>; 3],
    bias: [Option<Vec<f32>>; 3],
}

impl ExpertSource for UnpackedExpert {
    /// # Panics
    /// If `row` is out of range or `out` is not one row long.
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        let (_, k) = shape(&self.geometry, projection);
        out.copy_from_slice(&self.weights[projection as usize][row * k..][..k]);
    }

    fn bias(&self, projection: Projection) -> Option<&[f32]> {
        self.bias[projection as usize].as_deref()
    }
}

/// Dequantises the expert in `bytes`, exactly `geometry.expert_bytes()` long: the bf16 value,
/// or code * scale.
///
/// # Errors
/// A zero or too large dimension, or another length.
pub fn unpack(geometry: BankGeometry, bytes: &[u8]) -> Result<UnpackedExpert, CpuError> {
    check_geometry(geometry)?;
    same(
        "the expert, in bytes,",
        geometry.expert_bytes(),
        bytes.len(),
    )?;
    let float = |at: usize| float(&bytes[at..]);
    let weights = PROJECTIONS.map(|projection| {
        let (rows, k) = shape(&geometry, projection);
        let mut values = Vec::with_capacity(rows * k);
        for row in 0..rows {
            for k in 0..k {
                let at = geometry.element_offset(projection, row, k);
                let scale = || float(scale_offset(&geometry, projection, row, k / int8::BLOCK));
                values.push(match geometry.format {
                    WeightFormat::Bf16 => {
                        bf16::decode(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
                    }
                    WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => {
                        f32::from(bytes[at] as i8) * scale()
                    }
                    WeightFormat::Fp8Block128 => e4m3::decode(bytes[at]) * scale(),
                });
            }
        }
        values
    });
    let bias = PROJECTIONS.map(|projection| {
        let (rows, _) = shape(&geometry, projection);
        geometry.bias.then(|| {
            (0..rows)
                .map(|row| float(bias_offset(&geometry, projection, row)))
                .collect()
        })
    });
    Ok(UnpackedExpert {
        geometry,
        weights,
        bias,
    })
}

fn check_geometry(geometry: BankGeometry) -> Result<(), CpuError> {
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
