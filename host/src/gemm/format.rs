//! Formats of a GEMM's operands.

use super::GemmError;
use super::matrix::DeviceMatrix;
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::int8::BLOCK;
use asym_gemm_kernels_gpu::args::ColumnTable;

/// How the B operand of a GEMM is stored: a bank's formats, and fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixFormat {
    /// bfloat16, no scales.
    Bf16,
    /// int8, one f32 scale for each row.
    Int8PerRow,
    /// int8, one f32 scale for each row and 128 columns of K.
    Int8Block128,
    /// fp8 e4m3, one f32 scale for each row, for each matrix or for all.
    Fp8PerRow,
    /// fp8 e4m3, one f32 scale for each 128 rows and 128 columns of K.
    Fp8Block128,
}

impl TryFrom<WeightFormat> for MatrixFormat {
    type Error = GemmError;

    fn try_from(format: WeightFormat) -> Result<Self, GemmError> {
        Ok(match format {
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::Int8PerRow => Self::Int8PerRow,
            WeightFormat::Int8Block128 => Self::Int8Block128,
            WeightFormat::Fp8Block128 => Self::Fp8Block128,
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => {
                return Err(GemmError::Unsupported {
                    what: "weights",
                    reason: format!("{format} is a format of expert banks, not of matrices"),
                });
            }
        })
    }
}

impl MatrixFormat {
    /// Bytes of one stored element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            _ => 1,
        }
    }

    /// The name used on the command line, in logs and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8PerRow => "int8",
            Self::Int8Block128 => "int8-block128",
            Self::Fp8PerRow => "fp8",
            Self::Fp8Block128 => "fp8-block128",
        }
    }

    /// The shapes [rows, columns] that the scales of `count` matrices [n, k] may have; none
    /// for a format without scales.
    pub fn scale_shapes(self, count: usize, n: usize, k: usize) -> Vec<(usize, usize)> {
        let blocks = k.div_ceil(BLOCK);
        match self {
            Self::Bf16 => vec![],
            Self::Int8PerRow => vec![(count * n, 1)],
            Self::Int8Block128 => vec![(count * n, blocks)],
            Self::Fp8PerRow => vec![(count * n, 1), (count, 1), (1, 1)],
            Self::Fp8Block128 => vec![(count * n.div_ceil(BLOCK), blocks)],
        }
    }

    /// How kernels find the scale of a column in `scales`, which have one of
    /// [`Self::scale_shapes`].
    pub(super) fn scale_table(
        self,
        scales: &DeviceMatrix<'_, f32>,
        count: usize,
        n: usize,
    ) -> ColumnTable {
        let row = (scales.stride() * 4) as u64;
        let table = ColumnTable {
            base: scales.address(),
            block_stride: if scales.columns() > 1 { 4 } else { 0 },
            ..ColumnTable::NONE
        };
        if self == Self::Fp8Block128 {
            return ColumnTable {
                weight_stride: n.div_ceil(BLOCK) as u64 * row,
                segment_stride: row,
                segment_columns: BLOCK as u32,
                ..table
            };
        }
        let rows = scales.rows();
        if rows == count * n {
            ColumnTable {
                weight_stride: n as u64 * row,
                column_stride: row as u32,
                ..table
            }
        } else if rows == count {
            ColumnTable {
                weight_stride: row,
                ..table
            }
        } else {
            table
        }
    }
}

impl std::fmt::Display for MatrixFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Checks `scales` of `count` matrices [n, k] of `format`.
pub(super) fn check_scales(
    format: MatrixFormat,
    scales: Option<&DeviceMatrix<'_, f32>>,
    count: usize,
    n: usize,
    k: usize,
) -> Result<(), GemmError> {
    /// Elements from one row of scales to the next: the kernels address the 128 rows of a
    /// box by 32-bit byte offsets.
    const MAX_STRIDE: usize = (u32::MAX as usize + 1) / (128 * size_of::<f32>()) / 2;
    let what = "weight scales";
    let possible = format.scale_shapes(count, n, k);
    let found = scales.map(|s| (s.rows(), s.columns()));
    let fits = match found {
        Some(shape) => possible.contains(&shape),
        None => possible.is_empty(),
    };
    if !fits {
        return Err(GemmError::Shape {
            what,
            reason: format!(
                "{format} over {count} x [{n}, {k}] needs one of {possible:?}, found {found:?}"
            ),
        });
    }
    match scales.map(|s| s.stride()) {
        Some(stride) if stride > MAX_STRIDE => Err(GemmError::Unsupported {
            what,
            reason: format!("rows are {stride} elements apart; at most {MAX_STRIDE} are possible"),
        }),
        _ => Ok(()),
    }
}
