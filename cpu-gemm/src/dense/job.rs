//! A checked problem as addresses and strides.

use super::checked::{Checked, CheckedOperand};
use super::overlap::Place;
use super::params::Op;
use super::view::{C, Extent, Layout, Matrix, MatrixMut};
use super::{DenseError, Element, Gemm, Output, Scalar};

/// Elements of op(X) at `data + row * rows + col * cols`.
#[derive(Debug)]
pub(super) struct Strides<P> {
    pub(super) data: P,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<P: Copy> Clone for Strides<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Copy> Copy for Strides<P> {}

impl<P> Strides<P> {
    fn new<L: Layout>(data: P, extent: &Extent, op: Op) -> Self {
        let (rows, cols) = match L::ROW_MAJOR == (op == Op::None) {
            true => (extent.ld, 1),
            false => (1, extent.ld),
        };
        Self { data, rows, cols }
    }

    fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
        }
    }
}

/// One product D = α·A·B + β·C whose D has its rows' elements side by side.
pub(super) struct Job<T: Element, D> {
    pub(super) m: usize,
    pub(super) n: usize,
    /// 0 if A and B must not be read.
    pub(super) k: usize,
    pub(super) alpha: T::Scalar,
    pub(super) beta: T::Scalar,
    pub(super) a: Strides<*const T>,
    pub(super) b: Strides<*const T>,
    /// C, if it is read; with D's address for D itself.
    pub(super) c: Option<Strides<*const D>>,
    pub(super) d: Strides<*mut D>,
    places: Places,
}

// SAFETY: a job stands for borrows of Sync operands and an exclusive one of D, which live as long
// as the call; tasks write disjoint parts of D.
unsafe impl<T: Element, D: Send + Sync> Send for Job<T, D> {}
// SAFETY: as above.
unsafe impl<T: Element, D: Send + Sync> Sync for Job<T, D> {}

#[derive(Clone, Copy)]
struct Places {
    a: Place,
    b: Place,
    c: Option<Place>,
    d: Place,
}

impl<T: Element, D: Output<T::Scalar>> Job<T, D> {
    pub(super) fn new<LA: Layout, LB: Layout, LD: Layout>(
        gemm: &Gemm<T::Scalar>,
        a: &Matrix<'_, T, LA>,
        b: &Matrix<'_, T, LB>,
        c: &C<'_, D, LD>,
        d: &mut MatrixMut<'_, D, LD>,
    ) -> Result<Self, DenseError> {
        let shape = |what, needed, extent: &Extent| {
            let actual = (extent.rows, extent.cols);
            match needed == actual {
                true => Ok(()),
                false => Err(DenseError::Shape {
                    what,
                    needed,
                    actual,
                }),
            }
        };
        shape("A", gemm.a_shape(), &a.extent)?;
        shape("B", gemm.b_shape(), &b.extent)?;
        shape("D", (gemm.m, gemm.n), &d.extent)?;
        let place = |x: &Matrix<'_, D, LD>| Place::new::<D, LD>(x.data.addr(), &x.extent);
        let mut places = Places {
            a: Place::new::<T, LA>(a.data.addr(), &a.extent),
            b: Place::new::<T, LB>(b.data.addr(), &b.extent),
            c: None,
            d: Place::new::<D, LD>(d.data.addr(), &d.extent),
        };
        let read = match c {
            C::Matrix(c) => {
                shape("C", (gemm.m, gemm.n), &c.extent)?;
                places.c = Some(place(c));
                Some(Strides::new::<LD>(c.data, &c.extent, Op::None))
            }
            C::InPlace => Some(Strides::new::<LD>(d.data.cast_const(), &d.extent, Op::None)),
            C::None => None,
        };
        let uses_c = gemm.beta != T::Scalar::ZERO;
        if uses_c && read.is_none() {
            return Err(DenseError::MissingC);
        }
        let mut job = Self {
            m: gemm.m,
            n: gemm.n,
            k: if gemm.multiplies() { gemm.k } else { 0 },
            alpha: gemm.alpha,
            beta: gemm.beta,
            a: Strides::new::<LA>(a.data, &a.extent, gemm.op_a),
            b: Strides::new::<LB>(b.data, &b.extent, gemm.op_b),
            c: read.filter(|_| uses_c),
            d: Strides::new::<LD>(d.data, &d.extent, Op::None),
            places,
        };
        if !LD::ROW_MAJOR {
            // Dᵀ = Bᵀ·Aᵀ.
            (job.m, job.n) = (job.n, job.m);
            (job.a, job.b) = (job.b.transposed(), job.a.transposed());
            job.c = job.c.map(Strides::transposed);
            job.d = job.d.transposed();
        }
        Ok(job)
    }

    /// The same without types.
    pub(super) fn checked(&self) -> Checked<T::Scalar> {
        fn operand<P>(
            strides: &Strides<P>,
            address: impl Fn(&P) -> usize,
            (rows, cols): (usize, usize),
            size: usize,
        ) -> CheckedOperand {
            let elements = match rows.min(cols) {
                0 => 0,
                _ => (rows - 1) * strides.rows + (cols - 1) * strides.cols + 1,
            };
            CheckedOperand {
                address: address(&strides.data),
                bytes: elements * size,
                row_step: strides.rows,
                col_step: strides.cols,
            }
        }
        let (m, n, k) = (self.m, self.n, self.k);
        let input = |x, shape| operand(x, |p: &*const T| p.addr(), shape, size_of::<T>());
        let c = |x| operand(x, |p: &*const D| p.addr(), (m, n), size_of::<D>());
        Checked {
            m,
            n,
            k,
            alpha: self.alpha,
            beta: self.beta,
            a: input(&self.a, (m, k)),
            b: input(&self.b, (k, n)),
            c: self.c.as_ref().map(c),
            d: operand(&self.d, |p: &*mut D| p.addr(), (m, n), size_of::<D>()),
        }
    }

    /// Whether C is D.
    pub(super) fn in_place(&self) -> bool {
        self.c.is_some_and(|c| c.data.addr() == self.d.data.addr())
    }
}

/// Finds a D that shares memory with an operand of any problem. Slices cannot, addresses can.
pub(super) fn check_overlaps<T: Element, D>(jobs: &[Job<T, D>]) -> Result<(), DenseError> {
    // By start; a sweep meets each pair of spans that touch.
    let mut spans = Vec::with_capacity(jobs.len() * 4);
    for (problem, job) in jobs.iter().enumerate() {
        let p = &job.places;
        let inputs = [("A", Some(p.a)), ("B", Some(p.b)), ("C", p.c)];
        for (name, place) in inputs {
            if let Some(place) = place.filter(|p| p.start < p.end) {
                spans.push((place, problem, name));
            }
        }
        if p.d.start < p.d.end {
            spans.push((p.d, problem, "another D"));
        }
    }
    spans.sort_unstable_by_key(|(place, ..)| place.start);
    let outputs: Vec<usize> = (0..spans.len())
        .filter(|&i| spans[i].2 == "another D")
        .collect();
    let longest = spans.iter().map(|(p, ..)| p.end - p.start).max();
    for &i in &outputs {
        let (d, problem, _) = spans[i];
        let from = d.start.saturating_sub(longest.unwrap_or(0));
        let first = spans.partition_point(|(p, ..)| p.start < from);
        for (j, &(place, other, name)) in spans.iter().enumerate().skip(first) {
            if place.start >= d.end {
                break;
            }
            let itself = i == j || (name == "C" && other == problem && place.is(&d));
            if !itself && place.overlaps(&d) {
                return Err(DenseError::Overlap {
                    problem,
                    with: name,
                });
            }
        }
    }
    Ok(())
}
