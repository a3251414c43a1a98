//! D = α·op(A)·op(B) + β·C, for one problem or many in one call.
//!
//! ```text
//!            op(A)            op(B)              D, C
//!           ┌── k ──┐       ┌──── n ────┐     ┌──── n ────┐
//!           m       │       k           │     m           │
//!           └───────┘       └───────────┘     └───────────┘
//! ```
//!
//! | call                | problems                 | parameters    |
//! |---------------------|--------------------------|---------------|
//! | [`single`]          | one                      | one           |
//! | [`batched`]         | any views                | one for all   |
//! | [`strided_batched`] | at fixed distances       | one for all   |
//! | [`grouped`]         | any views                | one for each group |
//! | [`grouped_nt`]      | rows of a packed matrix  | a weight matrix for each row |
//!
//! [`View`] and [`ViewMut`] borrow slices as row- or column-major matrices ([`RowMajor`],
//! [`ColMajor`]: part of the type) with a leading dimension in elements. Operands are f32, f16, bf16
//! (summed in f32; D is f32 or the operands' own type) or i8 (summed and stored in i32).
//!
//! As in BLAS: β = 0 never reads C, so that D may hold anything before; α = 0 or k = 0 never reads A or
//! B; m = 0 or n = 0 does nothing. Without a C of its own a problem is in place: D holds C before.
//!
//! Every element of D is one chain of fused multiply-adds in ascending k, then one of α and β, then
//! one rounding: its bits depend on its row of op(A), its column of op(B) and its element of C alone,
//! and are the same for any number of threads, any batch and any instruction set.
//!
//! ```
//! use asym_gemm_cpu::Engine;
//! use asym_gemm_cpu::dense::{Gemm, Problem, RowMajor, View, ViewMut, single};
//!
//! let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
//! let mut d = [0.0f32; 4];
//! let problem = Problem::new(
//!     View::<_, RowMajor>::packed(&a, 2, 2)?,
//!     View::<_, RowMajor>::packed(&b, 2, 2)?,
//!     ViewMut::<_, RowMajor>::packed(&mut d, 2, 2)?,
//! );
//! single(&Engine::detect()?, &Gemm::new(2, 2, 2), problem)?;
//! assert_eq!(d, [19.0, 22.0, 43.0, 50.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Operands of different types do not compile, nor does a D that the sum cannot be stored in:
//!
//! ```compile_fail,E0271
//! # use asym_gemm_cpu::{Engine, dense::*};
//! # fn call(e: &Engine, a: View<'_, i8>, b: View<'_, i8>, d: ViewMut<'_, f32>) {
//! let _ = single(e, &Gemm::new(1, 1, 1), Problem::new(a, b, d));
//! # }
//! ```
//!
//! ```compile_fail,E0308
//! # use asym_gemm_cpu::{Engine, dense::*};
//! # fn call(a: View<'_, f32>, b: View<'_, half::bf16>, d: ViewMut<'_, f32>) {
//! let _ = Problem::new(a, b, d);
//! # }
//! ```
//!
//! Nor does a D that is borrowed as an operand, or C and D of different order:
//!
//! ```compile_fail,E0502
//! # use asym_gemm_cpu::dense::*;
//! let mut data = [0.0f32; 8];
//! let a = View::<_, RowMajor>::packed(&data[..4], 2, 2);
//! let d = ViewMut::<_, RowMajor>::packed(&mut data[2..6], 2, 2);
//! drop((a, d));
//! ```
//!
//! ```compile_fail,E0308
//! # use asym_gemm_cpu::dense::*;
//! # fn call<'a>(p: Problem<'a, f32, f32>, c: View<'a, f32, ColMajor>) {
//! let _ = p.with_c(c);
//! # }
//! ```

mod element;
mod error;
mod experts;
mod micro;
mod pack;
mod run;
mod view;

pub use element::{Input, Stored, Sum};
pub use error::DenseError;
pub use experts::grouped_nt;
pub use view::{Batch, BatchMut, ColMajor, Order, RowMajor, View, ViewMut};

use crate::Engine;
use run::Item;
use view::Strided;

/// Whether an operand is used as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Op {
    /// As it is.
    #[default]
    None,
    /// Transposed.
    Transpose,
}

/// The parameters θ of a product: op(A) is m x k, op(B) k x n, C and D m x n.
///
/// `S` is the type of α and β, that of the sums: f32, or i32 for int8 operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm<S = f32> {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Products that are summed.
    pub k: usize,
    /// What is done to A before.
    pub op_a: Op,
    /// What is done to B before.
    pub op_b: Op,
    /// Factor of the product.
    pub alpha: S,
    /// Factor of C.
    pub beta: S,
}

impl<S: Sum> Gemm<S> {
    /// D = A·B.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
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

    /// D = A·B^T, a linear layer with weights [n, k].
    pub fn nt(m: usize, n: usize, k: usize) -> Self {
        Self {
            op_b: Op::Transpose,
            ..Self::new(m, n, k)
        }
    }

    /// The same with other factors.
    #[must_use]
    pub fn scaled(self, alpha: S, beta: S) -> Self {
        Self {
            alpha,
            beta,
            ..self
        }
    }
}

/// The matrices of one problem. `LA`, `LB` and `LD` are the orders of A, of B, and of C and D.
#[derive(Debug)]
pub struct Problem<'a, T, O, LA = RowMajor, LB = RowMajor, LD = RowMajor> {
    a: View<'a, T, LA>,
    b: View<'a, T, LB>,
    c: Option<View<'a, O, LD>>,
    d: ViewMut<'a, O, LD>,
}

impl<'a, T, O, LA: Order, LB: Order, LD: Order> Problem<'a, T, O, LA, LB, LD> {
    /// In place: where β is not 0, D holds C.
    pub fn new(a: View<'a, T, LA>, b: View<'a, T, LB>, d: ViewMut<'a, O, LD>) -> Self {
        Self { a, b, c: None, d }
    }

    /// With a C that is only read.
    #[must_use]
    pub fn with_c(self, c: View<'a, O, LD>) -> Self {
        Self { c: Some(c), ..self }
    }

    /// Compares all shapes with the parameters.
    fn item<S: Sum>(&mut self, gemm: &Gemm<S>, problem: usize) -> Result<Item<T, O, S>, DenseError> {
        let check = |operand, op, rows, cols, expected: (usize, usize)| {
            let (expected_rows, expected_cols) = match op {
                Op::None => expected,
                Op::Transpose => (expected.1, expected.0),
            };
            if (rows, cols) == (expected_rows, expected_cols) {
                return Ok(());
            }
            Err(DenseError::Shape {
                problem,
                operand,
                rows,
                cols,
                expected_rows,
                expected_cols,
            })
        };
        let Gemm { m, n, k, .. } = *gemm;
        check("A", gemm.op_a, self.a.rows(), self.a.cols(), (m, k))?;
        check("B", gemm.op_b, self.b.rows(), self.b.cols(), (k, n))?;
        check("D", Op::None, self.d.rows(), self.d.cols(), (m, n))?;
        if let Some(c) = &self.c {
            check("C", Op::None, c.rows(), c.cols(), (m, n))?;
        }
        let applied = |op, matrix: Strided<T>| match op {
            Op::None => matrix,
            Op::Transpose => matrix.transposed(),
        };
        let item = Item {
            a: applied(gemm.op_a, self.a.strided()),
            b: applied(gemm.op_b, self.b.strided()).transposed(),
            c: self.c.as_ref().map(View::strided),
            d: self.d.strided(),
            alpha: gemm.alpha,
            beta: gemm.beta,
        };
        Ok(match item.d.col_step {
            1 => item,
            // D^T = op(B)^T op(A)^T has contiguous rows.
            _ => Item {
                a: item.b,
                b: item.a,
                c: item.c.map(Strided::transposed),
                d: item.d.transposed(),
                ..item
            },
        })
    }
}

/// Problems of one call that have the same parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group<S = f32> {
    /// Their parameters.
    pub gemm: Gemm<S>,
    /// How many consecutive problems they are.
    pub size: usize,
}

/// One problem.
///
/// # Errors
/// [`DenseError::Shape`]; [`DenseError::TaskPanic`].
pub fn single<T, O, LA, LB, LD>(
    engine: &Engine,
    gemm: &Gemm<T::Total>,
    mut problem: Problem<'_, T, O, LA, LB, LD>,
) -> Result<(), DenseError>
where
    T: Input,
    O: Stored<T::Total>,
    LA: Order,
    LB: Order,
    LD: Order,
{
    run::run(engine, &[problem.item(gemm, 0)?])
}

/// Problems with the same parameters, each with views of its own.
///
/// # Errors
/// [`DenseError::Shape`], and nothing is written; [`DenseError::TaskPanic`].
pub fn batched<T, O, LA, LB, LD>(
    engine: &Engine,
    gemm: &Gemm<T::Total>,
    problems: &mut [Problem<'_, T, O, LA, LB, LD>],
) -> Result<(), DenseError>
where
    T: Input,
    O: Stored<T::Total>,
    LA: Order,
    LB: Order,
    LD: Order,
{
    let group = Group {
        gemm: *gemm,
        size: problems.len(),
    };
    grouped(engine, &[group], problems)
}

/// Problems with the same parameters at fixed distances. `c` is `None` where D holds C.
///
/// # Errors
/// [`DenseError::Count`], [`DenseError::Shape`], and nothing is written; [`DenseError::TaskPanic`].
pub fn strided_batched<T, O, LA, LB, LD>(
    engine: &Engine,
    gemm: &Gemm<T::Total>,
    a: &Batch<'_, T, LA>,
    b: &Batch<'_, T, LB>,
    c: Option<&Batch<'_, O, LD>>,
    d: BatchMut<'_, O, LD>,
) -> Result<(), DenseError>
where
    T: Input,
    O: Stored<T::Total>,
    LA: Order,
    LB: Order,
    LD: Order,
{
    let same_count = |operand, found| match found == d.count() {
        true => Ok(()),
        false => Err(DenseError::Count {
            operand,
            expected: d.count(),
            found,
        }),
    };
    same_count("A", a.count())?;
    same_count("B", b.count())?;
    if let Some(c) = c {
        same_count("C", c.count())?;
    }
    let problem = |(index, d)| Problem {
        a: a.get(index),
        b: b.get(index),
        c: c.map(|c| c.get(index)),
        d,
    };
    let mut problems: Vec<_> = d.into_views().enumerate().map(problem).collect();
    batched(engine, gemm, &mut problems)
}

/// Problems in groups: the parameters of each group, and the views of each problem, group after
/// group.
///
/// # Errors
/// [`DenseError::GroupSizes`], [`DenseError::Shape`], and nothing is written;
/// [`DenseError::TaskPanic`].
pub fn grouped<T, O, LA, LB, LD>(
    engine: &Engine,
    groups: &[Group<T::Total>],
    problems: &mut [Problem<'_, T, O, LA, LB, LD>],
) -> Result<(), DenseError>
where
    T: Input,
    O: Stored<T::Total>,
    LA: Order,
    LB: Order,
    LD: Order,
{
    let sizes = groups.iter().map(|group| group.size);
    let expected = sizes.fold(0usize, usize::saturating_add);
    if expected != problems.len() {
        return Err(DenseError::GroupSizes {
            expected,
            found: problems.len(),
        });
    }
    let gemms = groups
        .iter()
        .flat_map(|group| std::iter::repeat_n(&group.gemm, group.size));
    let items: Result<Vec<_>, _> = problems
        .iter_mut()
        .zip(gemms)
        .enumerate()
        .map(|(index, (problem, gemm))| problem.item(gemm, index))
        .collect();
    run::run(engine, &items?)
}
