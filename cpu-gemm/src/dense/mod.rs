//! General GEMM over strided matrices: D = α·op(A)·op(B) + β·C, one problem, a batch, or groups.
//!
//! ```
//! use asym_gemm_cpu::Engine;
//! use asym_gemm_cpu::dense::{C, Gemm, Matrix, MatrixMut, RowMajor, single};
//!
//! let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 0.0, 0.0, 1.0]);
//! let mut d = [f32::NAN; 4];
//! single(
//!     &Engine::detect()?,
//!     &Gemm::new(2, 2, 2),
//!     Matrix::<_, RowMajor>::packed(&a, 2, 2)?,
//!     Matrix::<_, RowMajor>::packed(&b, 2, 2)?,
//!     C::None,
//!     MatrixMut::<_, RowMajor>::packed(&mut d, 2, 2)?,
//! )?;
//! assert_eq!(d, a);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A matrix's storage order is part of its type, its leading dimension is in elements. f32, f16 and
//! bf16 are summed in f32, i8 exactly in i32 (wrapping); D is rounded once. An element of D is
//! computed in the same order whatever the number of threads, the other problems of the call or the
//! rest of the matrix are.
//!
//! Operands of a type without product do not compile:
//!
//! ```compile_fail
//! # use asym_gemm_cpu::Engine;
//! # use asym_gemm_cpu::dense::{C, Gemm, Matrix, MatrixMut, RowMajor, single};
//! # let engine = Engine::detect().unwrap();
//! let (a, mut d) = ([1i8; 4], [0f32; 4]);
//! let a = Matrix::<_, RowMajor>::packed(&a, 2, 2).unwrap();
//! let d = MatrixMut::<_, RowMajor>::packed(&mut d, 2, 2).unwrap();
//! // i8 products are i32.
//! single(&engine, &Gemm::new(2, 2, 2), a, a, C::None, d).unwrap();
//! ```
//!
//! Nor does a D that is also read:
//!
//! ```compile_fail
//! # use asym_gemm_cpu::Engine;
//! # use asym_gemm_cpu::dense::{C, Gemm, Matrix, MatrixMut, RowMajor, single};
//! # let engine = Engine::detect().unwrap();
//! let mut x = [0f32; 4];
//! let a = Matrix::<_, RowMajor>::packed(&x, 2, 2).unwrap();
//! let d = MatrixMut::<_, RowMajor>::packed(&mut x, 2, 2).unwrap();
//! single(&engine, &Gemm::new(2, 2, 2), a, a, C::None, d).unwrap();
//! ```
//!
//! Nor one whose C is stored in the other order:
//!
//! ```compile_fail
//! # use asym_gemm_cpu::Engine;
//! # use asym_gemm_cpu::dense::{C, ColMajor, Gemm, Matrix, MatrixMut, RowMajor, single};
//! # let engine = Engine::detect().unwrap();
//! let (a, mut x) = ([0f32; 4], [0f32; 4]);
//! let c = Matrix::<_, ColMajor>::packed(&a, 2, 2).unwrap();
//! let a = Matrix::<_, RowMajor>::packed(&a, 2, 2).unwrap();
//! let d = MatrixMut::<_, RowMajor>::packed(&mut x, 2, 2).unwrap();
//! single(&engine, &Gemm::new(2, 2, 2), a, a, C::Matrix(c), d).unwrap();
//! ```

mod calls;
mod checked;
mod error;
mod job;
mod kernels;
mod overlap;
mod pack;
mod params;
mod partition;
mod run;
#[cfg(test)]
mod tests;
mod view;

pub use calls::{Batch, Group, Problem, batched, grouped, single, strided_batched};
pub use checked::{Checked, CheckedOperand, Checker};
pub use error::DenseError;
pub use params::{Element, Gemm, Multiply, Op, Output, Scalar};
pub use run::CpuElement;
pub use view::{
    C, ColMajor, Extent, Layout, Matrix, MatrixMut, RowMajor, Strided, StridedMut, batch_needed,
    check_apart, packed_ld,
};
