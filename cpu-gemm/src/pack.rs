//! Filling a bank with experts, and reading them back.
//!
//! Weights come row by row in f32 and are rounded or quantised here; weights that are stored in
//! the bank's own format already are copied code by code instead ([`ExpertSource::stored_row`]).

use asym_gemm_formats::bank::{BankGeometry, GATE_UP_PANELS, PANEL_ROWS, Projection, SLICE};
use asym_gemm_formats::{WeightFormat, bf16, e2m1, e4m3, e8m0, fp8, int8, mxfp4, nvfp4};

use crate::CpuError;
use crate::bank::{check_geometry, float};
use crate::validate::same;

/// A row of weights in a bank's format.
#[derive(Debug)]
pub struct StoredRow<'a> {
    /// The codes as they lie in files: K bytes of int8 or fp8; in fp4 two to a byte, low nibble
    /// first, K / 2 bytes rounded up.
    pub codes: &'a mut [u8],
    /// The scales. int8 and fp8: little-endian f32, one for the row (int8) or for each 128 of K
    /// (int8-block128, fp8). fp4: one byte for each 16 (nvfp4) or 32 (mxfp4) of K.
    pub scales: &'a mut [u8],
}

/// Where the weights of one expert come from.
pub trait ExpertSource {
    /// Writes row `row` of a projection in f32: H values of gate and up (row < I), I values of
    /// down (row < H).
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]);

    /// The bias of a projection: I values of gate and up, H values of down. Read only if the
    /// geometry has biases; `None` then stands for zeros.
    fn bias(&self, projection: Projection) -> Option<&[f32]>;

    /// If the projection is stored in `format` itself, writes the row as it is and returns the
    /// scale of the whole matrix (1 but for nvfp4). The answer is the same for all rows.
    fn stored_row(
        &self,
        format: WeightFormat,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        let _ = (format, projection, row, out);
        None
    }
}

const PROJECTIONS: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

/// Rows and columns of a projection.
fn shape(geometry: &BankGeometry, projection: Projection) -> (usize, usize) {
    match projection {
        Projection::Gate | Projection::Up => (geometry.intermediate, geometry.hidden),
        Projection::Down => (geometry.hidden, geometry.intermediate),
    }
}

/// Bytes of a row's codes and of its scales as [`StoredRow`] has them.
fn stored_bytes(format: WeightFormat, k: usize) -> (usize, usize) {
    let scales = match (format, format.scale_group()) {
        (_, Some(group)) => k.div_ceil(group),
        (WeightFormat::Bf16, _) => 0,
        (WeightFormat::Int8PerRow, _) => 4,
        _ => k.div_ceil(int8::BLOCK) * 4,
    };
    ((k * format.element_bits()).div_ceil(8), scales)
}

/// Copies, rounds or quantises one expert into `out`, exactly `geometry.expert_bytes()` long.
///
/// bf16 rounds to nearest even. int8 takes the scale of `Int8PerRow` over a whole row (of
/// down, over all of I) and that of `Int8Block128` over 128 columns; `Fp8Block128` over 128 rows and
/// 128 columns; `Nvfp4` and `Mxfp4` over 16 and 32 columns, `Nvfp4` with a scale of each matrix
/// besides. What is stored in that format already is copied.
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
        let mut packer = Packer {
            geometry,
            projection,
            k,
            out: &mut *out,
        };
        if !packer.copy(source, rows) {
            packer.quantise(source, rows);
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

/// One projection on its way into the bank.
struct Packer<'a> {
    geometry: BankGeometry,
    projection: Projection,
    k: usize,
    out: &'a mut [u8],
}

impl Packer<'_> {
    /// Copies what is stored in the bank's format; says if it was.
    fn copy(&mut self, source: &dyn ExpertSource, rows: usize) -> bool {
        let format = self.geometry.format;
        let (codes, scales) = stored_bytes(format, self.k);
        let (mut codes, mut scales) = (vec![0; codes], vec![0; scales]);
        for row in 0..rows {
            let stored = StoredRow {
                codes: &mut codes,
                scales: &mut scales,
            };
            let Some(global) = source.stored_row(format, self.projection, row, stored) else {
                return false;
            };
            self.put(row, &codes);
            match format.scale_group() {
                Some(group) => self.put_fp4_scales(row, group, &scales, global),
                None => self.put_scales(row, scales.as_chunks().0),
            }
        }
        true
    }

    fn quantise(&mut self, source: &dyn ExpertSource, rows: usize) {
        let (format, k) = (self.geometry.format, self.k);
        // Rows that are quantised together.
        let band = match format {
            WeightFormat::Fp8Block128 => fp8::BLOCK.min(rows),
            _ => 1,
        };
        let mut values = vec![0f32; band * k];
        let mut codes = vec![0u8; band * k];
        let mut scales = vec![0f32; k.div_ceil(int8::BLOCK)];
        let mut group_scales = vec![0u8; format.scale_group().map_or(0, |group| k.div_ceil(group))];
        let mut bytes = vec![0u8; (k * format.element_bits()).div_ceil(8)];
        let global = match format {
            WeightFormat::Nvfp4 => nvfp4::global_scale(self.amax(source, rows, &mut values)),
            _ => 1.0,
        };
        for first in (0..rows).step_by(band) {
            let count = band.min(rows - first);
            let values = &mut values[..count * k];
            for (row, values) in values.chunks_mut(k).enumerate() {
                source.row(self.projection, first + row, values);
            }
            let codes = &mut codes[..count * k];
            match format {
                WeightFormat::Bf16 => {
                    for (bytes, &x) in bytes.as_chunks_mut().0.iter_mut().zip(&*values) {
                        *bytes = bf16::encode(x).to_le_bytes();
                    }
                    self.put(first, &bytes);
                    continue;
                }
                WeightFormat::Nvfp4 => {
                    nvfp4::quantise_row(values, global, codes, &mut group_scales);
                }
                WeightFormat::Mxfp4 => mxfp4::quantise_row(values, codes, &mut group_scales),
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
            if let Some(group) = format.scale_group() {
                e2m1::pack(codes, &mut bytes);
                self.put(first, &bytes);
                self.put_fp4_scales(first, group, &group_scales, global);
                continue;
            }
            for (row, codes) in codes.chunks(k).enumerate() {
                self.put(first + row, codes);
            }
            let scales: &[[u8; 4]] = &scales.iter().map(|s| s.to_le_bytes()).collect::<Vec<_>>();
            self.put_scales(first, scales);
        }
    }

    /// The largest finite magnitude of all rows.
    fn amax(&self, source: &dyn ExpertSource, rows: usize, values: &mut [f32]) -> f32 {
        (0..rows).fold(0.0, |amax, row| {
            source.row(self.projection, row, values);
            let finite = values.iter().filter(|x| x.is_finite());
            finite.fold(amax, |amax, x| amax.max(x.abs()))
        })
    }

    /// Writes a row's bytes of codes.
    fn put(&mut self, row: usize, bytes: &[u8]) {
        let k = self.geometry.unit_k();
        let piece = k * self.geometry.format.element_bits() / 8;
        for (unit, bytes) in bytes.chunks(piece).enumerate() {
            let at = self.geometry.element_offset(self.projection, row, unit * k);
            self.out[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Writes the f32 scales of a row of int8, or of a band of rows of fp8.
    fn put_scales(&mut self, row: usize, scales: &[[u8; 4]]) {
        for (block, scale) in scales.iter().enumerate() {
            let at = scale_offset(&self.geometry, self.projection, row, block);
            self.out[at..at + 4].copy_from_slice(scale);
        }
    }

    /// Writes the byte scales of a row of fp4, and the matrix's beside them.
    fn put_fp4_scales(&mut self, row: usize, group: usize, scales: &[u8], global: f32) {
        for (i, &scale) in scales.iter().enumerate() {
            let at = self
                .geometry
                .fp4_scale_offset(self.projection, row, i * group);
            self.out[at] = scale;
        }
        if self.geometry.format == WeightFormat::Nvfp4 {
            // Every slice that the row touches has the scale.
            for slice in 0..self.k.div_ceil(SLICE) {
                let at = scale_offset(&self.geometry, self.projection, row, slice);
                self.out[at..at + 4].copy_from_slice(&global.to_le_bytes());
            }
        }
    }
}

/// Offset in an expert of the f32 scale of `row` for columns `block * 128..`.
fn scale_offset(
    geometry: &BankGeometry,
    projection: Projection,
    row: usize,
    block: usize,
) -> usize {
    let up = usize::from(projection == Projection::Up);
    match (projection, geometry.format) {
        (Projection::Gate | Projection::Up, WeightFormat::Fp8Block128) => {
            row / SLICE * geometry.slice_bytes()
                + geometry.gate_up_scales_offset()
                + (up * geometry.hidden_blocks() + block) * 4
        }
        (Projection::Gate | Projection::Up, WeightFormat::Nvfp4) => {
            row / SLICE * geometry.slice_bytes() + geometry.gate_up_scales_offset() + up * 4
        }
        (Projection::Down, WeightFormat::Nvfp4) => {
            block * geometry.slice_bytes() + geometry.down_block_scales_offset()
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
/// or code * scale; in nvfp4 (code * scale) * scale of the matrix.
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
                let fp4 = || e2m1::decode(bytes[at] >> (k % 2 * 4));
                let group_scale = || bytes[geometry.fp4_scale_offset(projection, row, k)];
                values.push(match geometry.format {
                    WeightFormat::Bf16 => {
                        bf16::decode(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
                    }
                    WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => {
                        f32::from(bytes[at] as i8) * scale()
                    }
                    WeightFormat::Fp8Block128 => e4m3::decode(bytes[at]) * scale(),
                    WeightFormat::Nvfp4 => fp4() * e4m3::decode(group_scale()) * scale(),
                    WeightFormat::Mxfp4 => fp4() * e8m0::decode(group_scale()),
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
