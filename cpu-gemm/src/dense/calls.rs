//! The calls: one problem, batches, groups.

use super::job::{self, Job};
use super::run::{CpuElement, run};
use super::view::{C, Layout, Matrix, MatrixMut, RowMajor, Strided, StridedMut};
use super::{DenseError, Gemm, Multiply, Output};
use crate::Engine;

/// One product of a group.
#[derive(Debug)]
pub struct Problem<'a, T, D, LA = RowMajor, LB = RowMajor, LD = RowMajor>
where
    LA: Layout,
    LB: Layout,
    LD: Layout,
{
    /// A.
    pub a: Matrix<'a, T, LA>,
    /// B.
    pub b: Matrix<'a, T, LB>,
    /// C.
    pub c: C<'a, D, LD>,
    /// D.
    pub d: MatrixMut<'a, D, LD>,
}

/// Problems that share their parameters, as one group of a grouped call.
#[derive(Debug)]
pub struct Group<'p, 'a, T, D, S = f32, LA = RowMajor, LB = RowMajor, LD = RowMajor>
where
    LA: Layout,
    LB: Layout,
    LD: Layout,
{
    /// Parameters of all of the group's problems.
    pub gemm: Gemm<S>,
    /// The problems; none is fine.
    pub problems: &'p mut [Problem<'a, T, D, LA, LB, LD>],
}

/// The operands of a batch: matrix i of each belongs to problem i.
#[derive(Debug)]
pub struct Batch<'p, 'a, T, D, LA = RowMajor, LB = RowMajor, LD = RowMajor>
where
    LA: Layout,
    LB: Layout,
    LD: Layout,
{
    /// The As.
    pub a: &'p [Matrix<'a, T, LA>],
    /// The Bs.
    pub b: &'p [Matrix<'a, T, LB>],
    /// The Cs; empty if there is none.
    pub c: &'p [C<'a, D, LD>],
    /// The Ds.
    pub d: &'p mut [MatrixMut<'a, D, LD>],
}

/// D = α·op(A)·op(B) + β·C.
///
/// # Errors
/// Operands that are not what `gemm` asks for, a D that overlaps A, B or (unless it is D exactly)
/// C, a missing C, or threads that failed.
pub fn single<T, D, LA: Layout, LB: Layout, LD: Layout>(
    engine: &Engine,
    gemm: &Gemm<T::Scalar>,
    a: Matrix<'_, T, LA>,
    b: Matrix<'_, T, LB>,
    c: C<'_, D, LD>,
    mut d: MatrixMut<'_, D, LD>,
) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    execute(engine, vec![Job::new(gemm, &a, &b, &c, &mut d)?])
}

/// The same product for each matrix of a pointer array.
///
/// # Errors
/// As [`single`], for any of the problems; operands that are not equally many.
pub fn batched<T, D, LA: Layout, LB: Layout, LD: Layout>(
    engine: &Engine,
    gemm: &Gemm<T::Scalar>,
    batch: Batch<'_, '_, T, D, LA, LB, LD>,
) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let count = batch.d.len();
    check_count("A", batch.a.len(), count)?;
    check_count("B", batch.b.len(), count)?;
    if !batch.c.is_empty() {
        check_count("C", batch.c.len(), count)?;
    }
    let jobs = batch.d.iter_mut().enumerate().map(|(i, d)| {
        let c = batch.c.get(i).copied().unwrap_or(C::None);
        Job::new(gemm, &batch.a[i], &batch.b[i], &c, d)
    });
    execute(engine, jobs.collect::<Result<_, _>>()?)
}

/// The same product for matrices at equal distances. `c` is `None` if β is 0; D's old contents are
/// [`C::InPlace`] of a [`batched`] call.
///
/// # Errors
/// As [`batched`].
pub fn strided_batched<T, D, LA: Layout, LB: Layout, LD: Layout>(
    engine: &Engine,
    gemm: &Gemm<T::Scalar>,
    a: Strided<'_, T, LA>,
    b: Strided<'_, T, LB>,
    c: Option<Strided<'_, D, LD>>,
    d: StridedMut<'_, D, LD>,
) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let count = d.count();
    check_count("A", a.count(), count)?;
    check_count("B", b.count(), count)?;
    if let Some(c) = &c {
        check_count("C", c.count(), count)?;
    }
    let mut cs = c.map(|c| c.iter());
    let mut jobs = Vec::with_capacity(count);
    for ((a, b), mut d) in a.iter().zip(b.iter()).zip(d.into_matrices()) {
        let c = cs.as_mut().and_then(Iterator::next);
        let c = c.map_or(C::None, C::Matrix);
        jobs.push(Job::new(gemm, &a, &b, &c, &mut d)?);
    }
    execute(engine, jobs)
}

/// Groups of problems, each group with its own parameters, as one parallel region.
///
/// # Errors
/// As [`single`], for any of the problems, counted over all groups.
#[expect(clippy::type_complexity, reason = "a group says its layouts by type")]
pub fn grouped<T, D, LA: Layout, LB: Layout, LD: Layout>(
    engine: &Engine,
    groups: &mut [Group<'_, '_, T, D, T::Scalar, LA, LB, LD>],
) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    let mut jobs = Vec::new();
    for group in groups {
        for p in group.problems.iter_mut() {
            jobs.push(Job::new(&group.gemm, &p.a, &p.b, &p.c, &mut p.d)?);
        }
    }
    execute(engine, jobs)
}

fn check_count(what: &'static str, actual: usize, d: usize) -> Result<(), DenseError> {
    match actual == d {
        true => Ok(()),
        false => Err(DenseError::BatchCount { what, actual, d }),
    }
}

fn execute<T, D>(engine: &Engine, jobs: Vec<Job<T, D>>) -> Result<(), DenseError>
where
    T: Multiply<D> + CpuElement,
    D: Output<T::Scalar>,
{
    job::check_overlaps(&jobs)?;
    run(engine, &jobs)
}
