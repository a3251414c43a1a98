//! Reference GEMM and MoE in f64, seeded generators, comparisons with per-element bounds.
//!
//! A test has four parts, each from one module:
//!
//! 1. inputs from [`generate`]: matrices of a [`Pattern`](generate::Pattern), routings
//!    of a [`RoutingKind`](generate::RoutingKind), tables of odd shapes;
//! 2. what must come out, from [`reference`](mod@reference): in f64 with, for each
//!    element, what its tolerance is made of, or in exact f32 where the project
//!    defines every bit (INT8);
//! 3. the code under test, writing into poisoned memory ([`poison`](compare::poison),
//!    [`Guarded`](compare::Guarded));
//! 4. the comparison, from [`compare`]: [`check_close`](compare::check_close) or
//!    [`bits_equal`](compare::bits_equal).
//!
//! A test that needs hardware that is not there says so with [`skip!`](skip!).
//!
//! ```
//! use asym_gemm_testkit::compare::{Bound, Output, check_close, poison};
//! use asym_gemm_testkit::generate::{Pattern, matrix};
//! use asym_gemm_testkit::reference::{Group, Operand, grouped_gemm};
//!
//! let (m, n, k) = (5, 7, 33);
//! let a = matrix(Pattern::Bf16, 1, m, k);
//! let b = matrix(Pattern::Bf16, 2, n, k);
//! let want = grouped_gemm(&Operand::plain(m, k, &a), &[Operand::plain(n, k, &b)], &[Group::new(0..m, 0)]);
//!
//! let mut d = vec![0f32; m * n];
//! poison(&mut d);
//! for row in 0..m {
//!     for col in 0..n {
//!         d[row * n + col] = (0..k).map(|i| a[row * k + i] * b[col * k + i]).sum();
//!     }
//! }
//! check_close("naive", &d, &want, Bound::f32_accumulated(Output::F32)).unwrap();
//! ```
//!
//! Functions here panic on arguments that do not fit together: in a test that is the
//! failure to report.

pub mod compare;
pub mod generate;
pub mod reference;
pub mod skip;
