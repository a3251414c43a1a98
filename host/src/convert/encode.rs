//! One expert matrix in its new format, and the proof that it is that matrix.

use super::Target;
use crate::checkpoint::StreamedMatrix;
use asym_gemm_formats::{e2m1, e4m3, e8m0, fp8, int8, mxfp4, nvfp4};

/// Rows decoded and quantised together.
const BAND: usize = fp8::BLOCK;

/// A matrix's codes, row by row as a file holds them, and its scales.
#[derive(Debug, PartialEq)]
pub(super) struct Encoded {
    pub(super) codes: Vec<u8>,
    /// Little-endian f32, in fp4 one byte each; row by row, in fp8 by rows of blocks.
    pub(super) scales: Vec<u8>,
    /// The scale of the whole matrix; 1 but for NVFP4.
    pub(super) global: f32,
}

/// What a comparison with the source found.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Check {
    /// Largest |written - source|, as a share of the source matrix's largest magnitude.
    pub max_error: f32,
    /// Elements that are off by more than their format allows.
    pub out_of_bound: usize,
    /// NaN or infinity in the source.
    pub source_nan: usize,
    /// NaN or infinity as written.
    pub nan: usize,
}

impl Check {
    /// Both together.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            max_error: self.max_error.max(other.max_error),
            out_of_bound: self.out_of_bound + other.out_of_bound,
            source_nan: self.source_nan + other.source_nan,
            nan: self.nan + other.nan,
        }
    }

    /// Whether the conversion can be trusted.
    pub fn passed(&self) -> bool {
        self.out_of_bound == 0 && self.nan == 0 && self.source_nan == 0
    }
}

impl Target {
    /// Bytes of a row of codes.
    pub(super) fn row_bytes(self, columns: usize) -> usize {
        match self.group() {
            Some(_) => columns.div_ceil(2),
            None => columns,
        }
    }

    /// Scales of a row; in fp8 of a row of blocks.
    pub(super) fn row_scales(self, columns: usize) -> usize {
        match (self, self.group()) {
            (_, Some(group)) => columns.div_ceil(group),
            (Self::Int8, _) => 1,
            _ => columns.div_ceil(int8::BLOCK),
        }
    }

    /// Rows that a scale covers.
    pub(super) fn scale_rows(self) -> usize {
        match self {
            Self::Fp8 => fp8::BLOCK,
            _ => 1,
        }
    }

    /// Bytes of a scale.
    pub(super) fn scale_bytes(self) -> usize {
        if self.group().is_some() { 1 } else { 4 }
    }

    /// Columns that share a scale of one byte.
    pub(super) fn group(self) -> Option<usize> {
        match self {
            Self::Nvfp4 => Some(nvfp4::BLOCK),
            Self::Mxfp4 => Some(mxfp4::BLOCK),
            _ => None,
        }
    }
}

/// Quantises a matrix.
pub(super) fn encode(target: Target, matrix: &StreamedMatrix<'_>) -> Encoded {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { encode_avx2(target, matrix) };
    }
    encode_rows(target, matrix)
}

/// The same operations in wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_avx2(target: Target, matrix: &StreamedMatrix<'_>) -> Encoded {
    encode_rows(target, matrix)
}

#[inline(always)]
fn encode_rows(target: Target, matrix: &StreamedMatrix<'_>) -> Encoded {
    let (rows, columns) = matrix.shape();
    let global = match target {
        Target::Nvfp4 => nvfp4::global_scale(amax(matrix)),
        _ => 1.0,
    };
    let row_bytes = target.row_bytes(columns);
    let row_scales = target.row_scales(columns);
    let mut codes = vec![0u8; rows * row_bytes];
    let scale_bytes = row_scales * target.scale_bytes();
    let mut scales = vec![0u8; rows.div_ceil(target.scale_rows()) * scale_bytes];
    let mut band = vec![0f32; BAND.min(rows) * columns];
    let mut unpacked = vec![0u8; columns];
    let mut floats = vec![0f32; row_scales];
    for first in (0..rows).step_by(BAND) {
        let count = BAND.min(rows - first);
        let band = &mut band[..count * columns];
        for (r, row) in band.chunks_exact_mut(columns).enumerate() {
            matrix.row(first + r, row);
        }
        let codes = &mut codes[first * row_bytes..][..count * row_bytes];
        if target == Target::Fp8 {
            fp8::quantise_band(band, columns, codes, &mut floats);
            store(&mut scales[first / BAND * scale_bytes..], &floats);
            continue;
        }
        let rows = band
            .chunks_exact(columns)
            .zip(codes.chunks_exact_mut(row_bytes));
        for (r, (row, codes)) in rows.enumerate() {
            let scales = &mut scales[(first + r) * scale_bytes..][..scale_bytes];
            match target {
                Target::Int8 => {
                    floats[0] = int8::quantise_per_row(row, bytemuck::cast_slice_mut(codes));
                    store(scales, &floats);
                }
                Target::Int8Block => {
                    int8::quantise_blocks(row, bytemuck::cast_slice_mut(codes), &mut floats);
                    store(scales, &floats);
                }
                Target::Nvfp4 => {
                    nvfp4::quantise_row(row, global, &mut unpacked, scales);
                    e2m1::pack(&unpacked, codes);
                }
                Target::Mxfp4 => {
                    mxfp4::quantise_row(row, &mut unpacked, scales);
                    e2m1::pack(&unpacked, codes);
                }
                Target::Fp8 => {}
            }
        }
    }
    Encoded {
        codes,
        scales,
        global,
    }
}

fn store(out: &mut [u8], scales: &[f32]) {
    for (out, scale) in out.as_chunks_mut::<4>().0.iter_mut().zip(scales) {
        *out = scale.to_le_bytes();
    }
}

/// The largest finite magnitude of a matrix.
#[inline(always)]
fn amax(matrix: &StreamedMatrix<'_>) -> f32 {
    let (rows, columns) = matrix.shape();
    let mut values = vec![0f32; columns];
    let mut amax = 0;
    for row in 0..rows {
        matrix.row(row, &mut values);
        for x in &values {
            let magnitude = x.to_bits() & 0x7fff_ffff;
            amax = amax.max(if magnitude < 0x7f80_0000 {
                magnitude
            } else {
                0
            });
        }
    }
    f32::from_bits(amax)
}

/// Compares what was written with its source, element by element.
pub(super) fn check(target: Target, matrix: &StreamedMatrix<'_>, written: &Encoded) -> Check {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { check_avx2(target, matrix, written) };
    }
    check_rows(target, matrix, written)
}

/// The same operations in wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn check_avx2(target: Target, matrix: &StreamedMatrix<'_>, written: &Encoded) -> Check {
    check_rows(target, matrix, written)
}

#[inline(always)]
fn check_rows(target: Target, matrix: &StreamedMatrix<'_>, written: &Encoded) -> Check {
    let (rows, columns) = matrix.shape();
    let row_bytes = target.row_bytes(columns);
    let scale_bytes = target.row_scales(columns) * target.scale_bytes();
    let group = match (target, target.group()) {
        (_, Some(group)) => group,
        (Target::Int8, _) => columns,
        _ => int8::BLOCK,
    };
    let (mut source, mut back) = (vec![0f32; columns], vec![0f32; columns]);
    let (mut largest, mut error) = (0f32, 0f32);
    let mut check = Check::default();
    for row in 0..rows {
        matrix.row(row, &mut source);
        let codes = &written.codes[row * row_bytes..][..row_bytes];
        let scales = &written.scales[row / target.scale_rows() * scale_bytes..][..scale_bytes];
        let groups = source.chunks(group).zip(back.chunks_mut(group));
        for (g, (source, back)) in groups.enumerate() {
            let scale = match target {
                Target::Nvfp4 => e4m3::decode(scales[g]) * written.global,
                Target::Mxfp4 => e8m0::decode(scales[g]),
                _ => f32::from_le_bytes(scales.as_chunks().0[g]),
            };
            let start = g * group;
            match target {
                Target::Int8 | Target::Int8Block => {
                    for (back, &code) in back.iter_mut().zip(&codes[start..]) {
                        *back = f32::from(code as i8) * scale;
                    }
                }
                Target::Fp8 => {
                    for (back, &code) in back.iter_mut().zip(&codes[start..]) {
                        *back = E4M3[usize::from(code)] * scale;
                    }
                }
                Target::Nvfp4 | Target::Mxfp4 => {
                    let (pairs, last) = back.as_chunks_mut::<2>();
                    for (pair, &codes) in pairs.iter_mut().zip(&codes[start / 2..]) {
                        *pair = [codes & 15, codes >> 4].map(|c| E2M1[usize::from(c)] * scale);
                    }
                    for (i, back) in last.iter_mut().enumerate() {
                        let code = e2m1::nibble(codes, start + pairs.len() * 2 + i);
                        *back = e2m1::decode(code) * scale;
                    }
                }
            }
            // Steps of the format that rounding may be off by, in scales and in shares of x.
            let (steps, share) = match target {
                Target::Int8 | Target::Int8Block => (0.5005, 0.0),
                Target::Fp8 => (1.0 / 1023.0, 1.0 / 15.9),
                // 1 between 4 and 6; a scale of few bits may be two thirds of what is needed.
                Target::Nvfp4 => (3.01, 0.0),
                Target::Mxfp4 => (1.001, 0.0),
            };
            let bound = steps * scale;
            let mut bad = 0;
            for (&x, &y) in source.iter().zip(&*back) {
                let off = (y - x).abs();
                error = error.max(off);
                largest = largest.max(x.abs());
                // What is flushed to zero is off by itself.
                let allowed = bound.max(share * x.abs());
                bad += usize::from(!(off <= allowed || off <= x.abs()));
            }
            if bad > 0 {
                let not_finite = |x: &&f32| !x.is_finite();
                check.source_nan += source.iter().filter(not_finite).count();
                check.nan += back.iter().filter(not_finite).count();
                check.out_of_bound += bad;
            }
        }
    }
    check.max_error = if largest > 0.0 {
        error / largest
    } else {
        error
    };
    check
}

/// The value of each e4m3 code.
static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3::decode(code as u8);
        code += 1;
    }
    table
};

/// The value of each e2m1 code.
static E2M1: [f32; 16] = {
    let mut table = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = e2m1::decode(code as u8);
        code += 1;
    }
    table
};
