//! Element types: what is multiplied, what it is summed in, and what D can be.

use std::fmt::Debug;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::micro::Micro;

/// The type of a sum of products, and of α and β: `f32`, or `i32` for int8 operands.
///
/// f32: every element of D is one chain of fused multiply-adds in ascending k, so that its bits depend
/// on nothing but its operands. i32: exact modulo 2^32.
pub trait Sum: Pod + PartialEq + Debug + Send + Sync + sealed::Sum {
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
}

/// An element type of A and B.
///
/// f16 and bf16 are widened to f32, int8 to 16 bits, all exactly.
pub trait Input: Pod + Send + Sync + sealed::Input<Sum = <Self as Input>::Total> {
    /// What products are summed in.
    type Total: Sum;
}

/// An element type that C and D can have where products are summed in `S`.
pub trait Stored<S>: Pod + Send + Sync + sealed::Stored<S> {}

pub(crate) mod sealed {
    use super::{Micro, Pod, Zeroable};

    /// Arithmetic of a [`Sum`](super::Sum).
    pub trait Sum: Sized {
        /// 32 bits of a packed operand: one f32, or two int8 as 16 bits each.
        type Cell: Pod + Zeroable + Send + Sync;
        /// Values of k in a cell.
        const K: usize;

        /// α·sum + β·c; β = 0 never looks at c, and k = 0 is told by `None`.
        fn blend(alpha: Self, sum: Option<Self>, beta: Self, c: Option<Self>) -> Self;

        /// The micro-kernel for this sum.
        #[expect(private_bounds, reason = "sealed")]
        fn tile<M: Micro>(m: M, a: &[Self::Cell], b: &[Self::Cell], sums: &mut [Self]);
    }

    /// Packing of an [`Input`](super::Input).
    pub trait Input: Pod {
        /// What its products are summed in.
        type Sum: Sum;
        /// The value at k and, where a cell holds two, at k + 1.
        fn cell(first: Self, second: Self) -> <Self::Sum as Sum>::Cell;
    }

    /// Conversion of a [`Stored`](super::Stored).
    pub trait Stored<S>: Sized {
        /// Exact.
        fn load(self) -> S;
        /// Rounded to nearest even.
        fn store(sum: S) -> Self;
    }
}

impl Sum for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

impl sealed::Sum for f32 {
    type Cell = f32;
    const K: usize = 1;

    #[inline(always)]
    fn blend(alpha: f32, sum: Option<f32>, beta: f32, c: Option<f32>) -> f32 {
        match (sum, c) {
            (Some(sum), Some(c)) => beta.mul_add(c, alpha * sum),
            (Some(sum), None) => alpha * sum,
            (None, Some(c)) if beta == 1.0 => c,
            (None, Some(c)) => beta * c,
            (None, None) => 0.0,
        }
    }

    #[inline(always)]
    #[expect(private_bounds, reason = "sealed")]
    fn tile<M: Micro>(m: M, a: &[f32], b: &[f32], sums: &mut [f32]) {
        m.f32(a, b, sums);
    }
}

impl Sum for i32 {
    const ZERO: Self = 0;
    const ONE: Self = 1;
}

impl sealed::Sum for i32 {
    type Cell = [i16; 2];
    const K: usize = 2;

    #[inline(always)]
    fn blend(alpha: i32, sum: Option<i32>, beta: i32, c: Option<i32>) -> i32 {
        let product = alpha.wrapping_mul(sum.unwrap_or(0));
        product.wrapping_add(beta.wrapping_mul(c.unwrap_or(0)))
    }

    #[inline(always)]
    #[expect(private_bounds, reason = "sealed")]
    fn tile<M: Micro>(m: M, a: &[[i16; 2]], b: &[[i16; 2]], sums: &mut [i32]) {
        m.i32(a, b, sums);
    }
}

impl Input for f32 {
    type Total = f32;
}

impl sealed::Input for f32 {
    type Sum = f32;

    #[inline(always)]
    fn cell(first: f32, _: f32) -> f32 {
        first
    }
}

impl Input for bf16 {
    type Total = f32;
}

impl sealed::Input for bf16 {
    type Sum = f32;

    #[inline(always)]
    fn cell(first: bf16, _: bf16) -> f32 {
        widen_bf16(first)
    }
}

impl Input for f16 {
    type Total = f32;
}

impl sealed::Input for f16 {
    type Sum = f32;

    #[inline(always)]
    fn cell(first: f16, _: f16) -> f32 {
        widen_f16(first)
    }
}

impl Input for i8 {
    type Total = i32;
}

impl sealed::Input for i8 {
    type Sum = i32;

    #[inline(always)]
    fn cell(first: i8, second: i8) -> [i16; 2] {
        [first.into(), second.into()]
    }
}

impl Stored<f32> for f32 {}

impl sealed::Stored<f32> for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(sum: f32) -> f32 {
        sum
    }
}

impl Stored<f32> for bf16 {}

impl sealed::Stored<f32> for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        widen_bf16(self)
    }

    #[inline(always)]
    fn store(sum: f32) -> bf16 {
        bf16::from_bits(asym_gemm_formats::bf16::encode(sum))
    }
}

impl Stored<f32> for f16 {}

impl sealed::Stored<f32> for f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        widen_f16(self)
    }

    #[inline(always)]
    fn store(sum: f32) -> f16 {
        f16::from_f32(sum)
    }
}

impl Stored<i32> for i32 {}

impl sealed::Stored<i32> for i32 {
    #[inline(always)]
    fn load(self) -> i32 {
        self
    }

    #[inline(always)]
    fn store(sum: i32) -> i32 {
        sum
    }
}

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Without branches or calls, so that packing loops become vector code: half's conversion asks for
/// the CPU's features each time.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    /// 2^112, the ratio of the two formats' smallest normal numbers.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(x.to_bits());
    let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    // Subnormal halves are subnormal floats here, and the product makes them normal.
    let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
    let special = magnitude | 0x7f80_0000;
    let is_special = magnitude >= 0x7c00 << 13;
    f32::from_bits(sign | if is_special { special } else { finite })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_to_its_value() {
        for bits in 0..=u16::MAX {
            let (x, wide) = (f16::from_bits(bits), widen_f16(f16::from_bits(bits)));
            if x.is_nan() {
                assert!(wide.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(wide.to_bits(), x.to_f32().to_bits(), "{bits:#06x}");
            }
            let (x, wide) = (bf16::from_bits(bits), widen_bf16(bf16::from_bits(bits)));
            assert!(wide.is_nan() && x.is_nan() || wide == x.to_f32(), "{bits:#06x}");
        }
    }
}
