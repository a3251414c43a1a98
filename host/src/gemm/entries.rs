//! Entry points under the names that Python systems give to these products.
//!
//! G experts, D = A · B[expert]^T, "nt": both A and B have K as their last dimension.
//!
//! | operand | contiguous | masked |
//! | --- | --- | --- |
//! | A | [M, K] on the device | [G · max_m, K] on the device: `max_m` rows for each expert |
//! | scales of A | [`Activations::Fp8`], [`Activations::Int8`] with M rows | with G · max_m rows |
//! | B | [G, N, K] in pinned host memory or on the device ([`Weights`]) | the same |
//! | D | [M, N] on the device, bf16 or f32 | [G · max_m, N] |
//! | rows | [`Packing`]: ranges with expert ids, or an id for each row | `masked_m`: G counts |
//!
//! A call enqueues its work on the stream and returns the [`Plan`]; nothing waits. Experts
//! without rows move no byte. Rows outside the groups keep what they hold in D. There is no
//! alignment of row counts, N or K; where rows are not a multiple of 16 bytes, they are copied
//! to one first: A in a scratch buffer, B chunk by chunk through the ring.
//!
//! All are thin: to wait for the result, or to keep the list of groups, use
//! [`GroupedGemm::run`] with [`Packing::groups`] or [`masked_groups`]. Row counts that only
//! the device knows go to [`GroupedGemm::enqueue_listed`].

use super::{
    Activations, DeviceMatrix, GemmError, GroupedGemm, MatrixFormat, Output, Packing, Plan,
    Weights, masked_groups,
};
use crate::driver::Stream;
use crate::transfer::Transfer;
use half::bf16;

/// bf16 A and B, rows packed one expert after the other.
///
/// # Errors
/// [`GemmError`] if B is not bf16, operands do not fit each other, the packing names rows or
/// experts that do not exist or gives a row to two experts, the transfer is not possible for
/// where B is, or the driver fails.
///
/// # Safety
/// Operands must stay alive and unchanged by others until the work on `stream` is done.
pub unsafe fn m_grouped_bf16_asym_gemm_nt_contiguous(
    gemm: &mut GroupedGemm,
    a: DeviceMatrix<'_, bf16>,
    b: &Weights<'_>,
    d: &mut Output<'_>,
    packing: Packing<'_>,
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &[MatrixFormat::Bf16])?;
    // SAFETY: the caller's contract.
    unsafe { contiguous(gemm, &Activations::Bf16(a), b, d, packing, transfer, stream) }
}

/// bf16 A and B, the same number of rows set aside for each expert.
///
/// # Errors
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`]; also if A's rows are not a multiple of G,
/// `masked_m` has not G counts, or one is negative or larger than max_m.
///
/// # Safety
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`].
pub unsafe fn m_grouped_bf16_asym_gemm_nt_masked(
    gemm: &mut GroupedGemm,
    a: DeviceMatrix<'_, bf16>,
    b: &Weights<'_>,
    d: &mut Output<'_>,
    masked_m: &[i32],
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &[MatrixFormat::Bf16])?;
    // SAFETY: the caller's contract.
    unsafe {
        masked(
            gemm,
            &Activations::Bf16(a),
            b,
            d,
            masked_m,
            transfer,
            stream,
        )
    }
}

/// fp8 e4m3 codes and f32 scales of A, fp8 B: 1 x 128 with 128 x 128 scales
/// ([`MatrixFormat::Fp8Block128`]), or per token or tensor with per channel, expert or
/// tensor ([`MatrixFormat::Fp8PerRow`]).
///
/// # Errors
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`], for a B that is not fp8.
///
/// # Safety
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`].
pub unsafe fn m_grouped_fp8_asym_gemm_nt_contiguous(
    gemm: &mut GroupedGemm,
    (codes, scales): (DeviceMatrix<'_, u8>, DeviceMatrix<'_, f32>),
    b: &Weights<'_>,
    d: &mut Output<'_>,
    packing: Packing<'_>,
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &FP8)?;
    let a = Activations::Fp8 { codes, scales };
    // SAFETY: the caller's contract.
    unsafe { contiguous(gemm, &a, b, d, packing, transfer, stream) }
}

/// As [`m_grouped_fp8_asym_gemm_nt_contiguous`], the same number of rows set aside for each
/// expert.
///
/// # Errors
/// As [`m_grouped_bf16_asym_gemm_nt_masked`], for a B that is not fp8.
///
/// # Safety
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`].
pub unsafe fn m_grouped_fp8_asym_gemm_nt_masked(
    gemm: &mut GroupedGemm,
    (codes, scales): (DeviceMatrix<'_, u8>, DeviceMatrix<'_, f32>),
    b: &Weights<'_>,
    d: &mut Output<'_>,
    masked_m: &[i32],
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &FP8)?;
    let a = Activations::Fp8 { codes, scales };
    // SAFETY: the caller's contract.
    unsafe { masked(gemm, &a, b, d, masked_m, transfer, stream) }
}

/// int8 codes and f32 scales of A, int8 B: a scale for each row or for each row and 128 of K
/// of A, for each row ([`MatrixFormat::Int8PerRow`]) or for each row and 128 of K
/// ([`MatrixFormat::Int8Block128`]) of B.
///
/// # Errors
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`], for a B that is not int8.
///
/// # Safety
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`].
pub unsafe fn m_grouped_int8_asym_gemm_nt_contiguous(
    gemm: &mut GroupedGemm,
    (codes, scales): (DeviceMatrix<'_, i8>, DeviceMatrix<'_, f32>),
    b: &Weights<'_>,
    d: &mut Output<'_>,
    packing: Packing<'_>,
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &INT8)?;
    let a = Activations::Int8 { codes, scales };
    // SAFETY: the caller's contract.
    unsafe { contiguous(gemm, &a, b, d, packing, transfer, stream) }
}

/// As [`m_grouped_int8_asym_gemm_nt_contiguous`], the same number of rows set aside for each
/// expert.
///
/// # Errors
/// As [`m_grouped_bf16_asym_gemm_nt_masked`], for a B that is not int8.
///
/// # Safety
/// As [`m_grouped_bf16_asym_gemm_nt_contiguous`].
pub unsafe fn m_grouped_int8_asym_gemm_nt_masked(
    gemm: &mut GroupedGemm,
    (codes, scales): (DeviceMatrix<'_, i8>, DeviceMatrix<'_, f32>),
    b: &Weights<'_>,
    d: &mut Output<'_>,
    masked_m: &[i32],
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    check_format(b, &INT8)?;
    let a = Activations::Int8 { codes, scales };
    // SAFETY: the caller's contract.
    unsafe { masked(gemm, &a, b, d, masked_m, transfer, stream) }
}

const FP8: [MatrixFormat; 2] = [MatrixFormat::Fp8PerRow, MatrixFormat::Fp8Block128];
const INT8: [MatrixFormat; 2] = [MatrixFormat::Int8PerRow, MatrixFormat::Int8Block128];

fn check_format(b: &Weights<'_>, possible: &[MatrixFormat]) -> Result<(), GemmError> {
    if possible.contains(&b.format) {
        return Ok(());
    }
    let names: Vec<&str> = possible.iter().map(|format| format.name()).collect();
    Err(GemmError::Shape {
        what: "weights",
        reason: format!(
            "are {}; this product takes {}",
            b.format,
            names.join(" or ")
        ),
    })
}

/// # Safety
/// As [`GroupedGemm::enqueue`].
unsafe fn contiguous(
    gemm: &mut GroupedGemm,
    a: &Activations<'_>,
    b: &Weights<'_>,
    d: &mut Output<'_>,
    packing: Packing<'_>,
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    let groups = packing.groups(a.rows(), b.count)?;
    // SAFETY: the caller's contract.
    unsafe { gemm.enqueue(a, b, &groups, d, transfer, stream) }
}

/// # Safety
/// As [`GroupedGemm::enqueue`].
unsafe fn masked(
    gemm: &mut GroupedGemm,
    a: &Activations<'_>,
    b: &Weights<'_>,
    d: &mut Output<'_>,
    masked_m: &[i32],
    transfer: Transfer,
    stream: &Stream,
) -> Result<Plan, GemmError> {
    let groups = masked_groups(masked_m, max_m(a.rows(), b.count, masked_m.len())?)?;
    // SAFETY: the caller's contract.
    unsafe { gemm.enqueue(a, b, &groups, d, transfer, stream) }
}

/// Rows set aside for each of `experts` in A with `rows`, where `counts` were given.
fn max_m(rows: usize, experts: usize, counts: usize) -> Result<usize, GemmError> {
    if counts != experts {
        return Err(GemmError::Shape {
            what: "masked_m",
            reason: format!("{counts} counts for {experts} experts"),
        });
    }
    if !rows.is_multiple_of(experts) {
        return Err(GemmError::Shape {
            what: "A",
            reason: format!("{rows} rows are not the same number for each of {experts} experts"),
        });
    }
    Ok(rows / experts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_masked_packing_are_the_same_for_each_expert() {
        assert_eq!(max_m(24, 3, 3).unwrap(), 8);
        assert_eq!(max_m(0, 3, 3).unwrap(), 0);
        for (rows, counts, which) in [(25, 3, "A"), (24, 2, "masked_m"), (24, 4, "masked_m")] {
            match max_m(rows, 3, counts) {
                Err(GemmError::Shape { what, .. }) => assert_eq!(what, which),
                other => panic!("{rows} rows, {counts} counts: {other:?}"),
            }
        }
    }
}
