//! What the kernels do differently for each element type.

use super::ROW_BYTES;
use crate::ptx::{element, global, mma, shared};
use asym_gemm_formats::bf16;

/// Sums of one thread: 2 x 4 fragments of 16 x 8, of which a thread holds rows `g` and `g + 8`,
/// columns `2t` and `2t + 1`, for lane `4g + t`.
pub(super) type Sums = [[u32; 4]; 8];

/// Where a thread's operands lie in shared memory: its first row of A and column of B.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// Address of A at row `g` of the warp.
    pub(super) a: u32,
    /// Address of B at the warp's first column.
    pub(super) b: u32,
    /// Lane / 4.
    pub(super) g: u32,
    /// Lane % 4.
    pub(super) t: u32,
}

/// An element type.
pub(super) trait Kind {
    /// Bytes of an element of A and B.
    const BYTES: u32;

    /// Loads one element if `condition`; in the low bits.
    ///
    /// # Safety
    /// As [`element`].
    unsafe fn load_if(condition: bool, address: u64) -> u32;

    /// Adds the products of one step.
    ///
    /// # Safety
    /// The step is in shared memory and the warp converged.
    unsafe fn multiply(sums: &mut Sums, at: Operands);

    /// D's element from a sum: α·sum, + β·c if there is one.
    fn finish(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32;

    /// A narrow element as the sums' type.
    fn widen(bits: u32) -> u32;

    /// Rounds a result to a narrow element.
    fn narrow(bits: u32) -> u16;
}

/// Products of a step by `mma`, 32 bytes of K at a time.
///
/// # Safety
/// As [`Kind::multiply`].
#[inline(always)]
unsafe fn by_mma(
    sums: &mut Sums,
    at: Operands,
    product: impl Fn(&mut [u32; 4], [u32; 4], [u32; 2]),
) {
    for half in 0..2 {
        let offset = half * 32 + at.t * 4;
        let (mut a, mut b) = ([[0; 4]; 2], [[0; 2]; 4]);
        // SAFETY: rows and bytes are inside the step's buffer.
        unsafe {
            for (i, a) in a.iter_mut().enumerate() {
                let row = at.a + i as u32 * 16 * ROW_BYTES + offset;
                *a = [
                    shared::load(row),
                    shared::load(row + 8 * ROW_BYTES),
                    shared::load(row + 16),
                    shared::load(row + 8 * ROW_BYTES + 16),
                ];
            }
            for (j, b) in b.iter_mut().enumerate() {
                let column = at.b + (j as u32 * 8 + at.g) * ROW_BYTES + offset;
                *b = [shared::load(column), shared::load(column + 16)];
            }
        }
        for i in 0..2 {
            for j in 0..4 {
                product(&mut sums[4 * i + j], a[i], b[j]);
            }
        }
    }
}

/// α·sum + β·c in f32, each product rounded.
#[inline(always)]
fn finish_f32(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32 {
    let product = f32::from_bits(alpha) * f32::from_bits(sum);
    let value = match c {
        Some(c) => product + f32::from_bits(beta) * f32::from_bits(c),
        None => product,
    };
    value.to_bits()
}

/// f32.
pub(super) struct F32;

impl Kind for F32 {
    const BYTES: u32 = 4;

    #[inline(always)]
    unsafe fn load_if(condition: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { element::load_if(condition, address) }
    }

    #[inline(always)]
    unsafe fn multiply(sums: &mut Sums, at: Operands) {
        for quarter in 0..4 {
            let mut rows = [[0u32; 4]; 4];
            // SAFETY: rows and bytes are inside the step's buffer.
            unsafe {
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = shared::load_v4(at.a + i as u32 * 8 * ROW_BYTES + quarter * 16);
                }
            }
            for j in 0..4 {
                for side in 0..2 {
                    let column = (j as u32 * 8 + at.t * 2 + side) * ROW_BYTES;
                    // SAFETY: as above.
                    let column = unsafe { shared::load_v4(at.b + column + quarter * 16) };
                    for i in 0..4 {
                        let sum = &mut sums[4 * (i / 2) + j][2 * (i % 2) + side as usize];
                        for k in 0..4 {
                            let (x, y) = (rows[i][k], column[k]);
                            *sum = asym_gemm_formats::fma(
                                f32::from_bits(x),
                                f32::from_bits(y),
                                f32::from_bits(*sum),
                            )
                            .to_bits();
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn finish(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32 {
        finish_f32(alpha, sum, beta, c)
    }

    #[inline(always)]
    fn widen(bits: u32) -> u32 {
        bits
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        bits as u16
    }
}

/// f16.
pub(super) struct F16;

impl Kind for F16 {
    const BYTES: u32 = 2;

    #[inline(always)]
    unsafe fn load_if(condition: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { element::load_u16_if(condition, address) }
    }

    #[inline(always)]
    unsafe fn multiply(sums: &mut Sums, at: Operands) {
        // SAFETY: the caller's promise.
        unsafe { by_mma(sums, at, |d, a, b| mma::f16_16x8x16(d, a, b)) }
    }

    #[inline(always)]
    fn finish(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32 {
        finish_f32(alpha, sum, beta, c)
    }

    #[inline(always)]
    fn widen(bits: u32) -> u32 {
        element::f16_to_f32(bits).to_bits()
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        element::f32_to_f16(f32::from_bits(bits))
    }
}

/// bf16.
pub(super) struct Bf16;

impl Kind for Bf16 {
    const BYTES: u32 = 2;

    #[inline(always)]
    unsafe fn load_if(condition: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { element::load_u16_if(condition, address) }
    }

    #[inline(always)]
    unsafe fn multiply(sums: &mut Sums, at: Operands) {
        // SAFETY: the caller's promise.
        unsafe { by_mma(sums, at, |d, a, b| mma::bf16_16x8x16(d, a, b)) }
    }

    #[inline(always)]
    fn finish(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32 {
        finish_f32(alpha, sum, beta, c)
    }

    #[inline(always)]
    fn widen(bits: u32) -> u32 {
        bits << 16
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        bf16::encode(f32::from_bits(bits))
    }
}

/// s8, with i32 sums, α and β that wrap around.
pub(super) struct S8;

impl Kind for S8 {
    const BYTES: u32 = 1;

    #[inline(always)]
    unsafe fn load_if(condition: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { element::load_u8_if(condition, address) }
    }

    #[inline(always)]
    unsafe fn multiply(sums: &mut Sums, at: Operands) {
        // SAFETY: the caller's promise.
        unsafe { by_mma(sums, at, |d, a, b| mma::s8_16x8x32(d, a, b)) }
    }

    #[inline(always)]
    fn finish(alpha: u32, sum: u32, beta: u32, c: Option<u32>) -> u32 {
        let product = alpha.wrapping_mul(sum);
        match c {
            Some(c) => product.wrapping_add(beta.wrapping_mul(c)),
            None => product,
        }
    }

    #[inline(always)]
    fn widen(bits: u32) -> u32 {
        bits
    }

    #[inline(always)]
    fn narrow(bits: u32) -> u16 {
        bits as u16
    }
}

/// Loads C's element at `address` as the sums' type.
///
/// # Safety
/// As [`element`].
#[inline(always)]
pub(super) unsafe fn load_c<K: Kind>(wide: bool, condition: bool, address: u64) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        match wide {
            true => element::load_if(condition, address),
            false => K::widen(element::load_u16_if(condition, address)),
        }
    }
}

/// Stores D's element if `condition`.
///
/// # Safety
/// As [`element`].
#[inline(always)]
pub(super) unsafe fn store_d<K: Kind>(wide: bool, condition: bool, address: u64, value: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        match wide {
            true => global::store_if(condition, address, value),
            false => global::store_u16_if(condition, address, K::narrow(value)),
        }
    }
}
