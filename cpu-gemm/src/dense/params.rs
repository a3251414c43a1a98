//! The parameters θ = (m, n, k, op(A), op(B), α, β) and the types that products exist for.

use bytemuck::Pod;
use half::{bf16, f16};

/// What happens to a stored matrix before it is multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Op {
    /// op(X) = X.
    #[default]
    None,
    /// op(X) = Xᵀ.
    Transpose,
}

/// Parameters of D = α·op(A)·op(B) + β·C.
///
/// op(A) is m x k, op(B) is k x n, C and D are m x n. `S` is the type of α and β: f32, or i32 for
/// int8 products.
///
/// As in BLAS, β = 0 means that C is not read and α = 0 that A and B are not (NaN there has no
/// effect); k = 0 leaves D = β·C, and with m or n = 0 nothing happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm<S = f32> {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Applied to A.
    pub op_a: Op,
    /// Applied to B.
    pub op_b: Op,
    /// Factor of the product.
    pub alpha: S,
    /// Factor of C.
    pub beta: S,
}

impl<S: Scalar> Gemm<S> {
    /// D = A·B with A m x k and B k x n: α = 1, β = 0.
    pub const fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            op_a: Op::None,
            op_b: Op::None,
            alpha: S::ONE,
            beta: S::ZERO,
        }
    }

    /// D = A·Bᵀ, the form of a linear layer: B is n x k.
    pub const fn nt(m: usize, n: usize, k: usize) -> Self {
        Self {
            op_b: Op::Transpose,
            ..Self::new(m, n, k)
        }
    }

    /// Rows and columns of A as stored.
    pub fn a_shape(&self) -> (usize, usize) {
        stored(self.op_a, self.m, self.k)
    }

    /// Rows and columns of B as stored.
    pub fn b_shape(&self) -> (usize, usize) {
        stored(self.op_b, self.k, self.n)
    }

    /// Whether A and B are read at all.
    pub fn multiplies(&self) -> bool {
        self.k > 0 && self.alpha != S::ZERO
    }
}

/// Shape of X for an op(X) of `rows` x `cols`.
fn stored(op: Op, rows: usize, cols: usize) -> (usize, usize) {
    match op {
        Op::None => (rows, cols),
        Op::Transpose => (cols, rows),
    }
}

/// The type of sums, α and β: f32, or i32 (whose sums wrap around).
pub trait Scalar: Pod + Send + Sync + PartialEq + std::fmt::Debug + private::Sealed {
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// `alpha * sum + beta * c`; without `c` the second product does not exist.
    fn finish(alpha: Self, sum: Self, beta: Self, c: Option<Self>) -> Self;
    /// `beta * c`.
    fn scaled(beta: Self, c: Self) -> Self;
}

impl Scalar for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn finish(alpha: Self, sum: Self, beta: Self, c: Option<Self>) -> Self {
        let product = if alpha == 1.0 { sum } else { alpha * sum };
        match c {
            Some(c) => product + beta * c,
            None => product,
        }
    }

    #[inline(always)]
    fn scaled(beta: Self, c: Self) -> Self {
        beta * c
    }
}

impl Scalar for i32 {
    const ZERO: Self = 0;
    const ONE: Self = 1;

    #[inline(always)]
    fn finish(alpha: Self, sum: Self, beta: Self, c: Option<Self>) -> Self {
        let product = alpha.wrapping_mul(sum);
        match c {
            Some(c) => product.wrapping_add(beta.wrapping_mul(c)),
            None => product,
        }
    }

    #[inline(always)]
    fn scaled(beta: Self, c: Self) -> Self {
        beta.wrapping_mul(c)
    }
}

/// Element types of A and B: f32, f16, bf16, i8.
pub trait Element: Pod + Send + Sync + private::Sealed {
    /// The type of their sums.
    type Scalar: Scalar;
}

impl Element for f32 {
    type Scalar = f32;
}
impl Element for f16 {
    type Scalar = f32;
}
impl Element for bf16 {
    type Scalar = f32;
}
impl Element for i8 {
    type Scalar = i32;
}

/// Element types of C and D, rounded once to nearest even from the sum's type.
pub trait Output<S: Scalar>: Pod + Send + Sync + private::Sealed {
    /// Exact.
    fn widen(self) -> S;
    /// Rounds to nearest even.
    fn round(value: S) -> Self;
}

impl Output<f32> for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        value
    }
}

impl Output<f32> for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Output<f32> for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        Self::from_bits(asym_gemm_formats::bf16::encode(value))
    }
}

impl Output<i32> for i32 {
    #[inline(always)]
    fn widen(self) -> i32 {
        self
    }
    #[inline(always)]
    fn round(value: i32) -> Self {
        value
    }
}

/// Products that exist: f32 to f32; f16 to f16 or f32; bf16 to bf16 or f32; i8 to i32.
pub trait Multiply<D: Output<Self::Scalar>>: Element {}

impl Multiply<f32> for f32 {}
impl Multiply<f16> for f16 {}
impl Multiply<f32> for f16 {}
impl Multiply<bf16> for bf16 {}
impl Multiply<f32> for bf16 {}
impl Multiply<i32> for i8 {}

mod private {
    /// Keeps the element types to those that kernels exist for.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for i8 {}
    impl Sealed for i32 {}
}
