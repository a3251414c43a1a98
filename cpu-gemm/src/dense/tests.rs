//! Against sums in f64 of the same elements, on every instruction set of the machine.

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;

use super::run::CpuElement;
use super::*;
use crate::Engine;
use crate::pool::{RayonWorkers, SpinPool};

/// An element type of the tests.
trait Value: Copy + PartialEq + std::fmt::Debug + Send + Sync + bytemuck::Pod {
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    /// Distance from a value to the next, relative to it.
    const ULP: f64;
    /// The smallest number with all bits; smaller ones are as far apart as this one and the next.
    const NORMAL: f64;
}

macro_rules! value {
    ($type:ty, $ulp:expr, $normal:expr, $of:expr, $f64:expr) => {
        impl Value for $type {
            fn of(x: f64) -> Self {
                $of(x)
            }
            fn f64(self) -> f64 {
                $f64(self)
            }
            const ULP: f64 = $ulp;
            const NORMAL: f64 = $normal;
        }
    };
}
value!(
    f32,
    1.2e-7,
    f32::MIN_POSITIVE as f64,
    |x| x as f32,
    f64::from
);
value!(
    bf16,
    7.9e-3,
    f32::MIN_POSITIVE as f64,
    bf16::from_f64,
    |x: bf16| x.to_f64()
);
value!(f16, 9.8e-4, 6.2e-5, f16::from_f64, |x: f16| x.to_f64());
value!(i8, 0.0, 0.0, |x: f64| (x * 40.0) as i8, f64::from);
value!(i32, 0.0, 0.0, |x: f64| (x * 1000.0) as i32, f64::from);

/// Numbers in -1..1 from a seed.
fn random(seed: &mut u64) -> f64 {
    *seed = seed
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    ((*seed >> 33) as f64) / f64::from(1u32 << 30) - 1.0
}

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    ops: [bool; 2],
    pads: [usize; 4],
    alpha: f64,
    beta: f64,
    /// 0 none, 1 in place, 2 another matrix.
    c: u8,
    specials: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let scale = prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(2.5), Just(-0.0)];
    let dim = || prop_oneof![4 => 0usize..40, 1 => 60usize..70, 1 => 150usize..180];
    let k = prop_oneof![3 => 0usize..40, 1 => 250usize..270, 1 => 500usize..600];
    (
        (dim(), dim(), k),
        any::<[bool; 2]>(),
        [0usize..4, 0usize..4, 0usize..4, 0usize..4],
        scale.clone(),
        scale,
        0u8..3,
        prop::bool::weighted(0.2),
        any::<u64>(),
    )
        .prop_map(
            |((m, n, k), ops, pads, alpha, beta, c, specials, seed)| Case {
                m,
                n,
                k,
                ops,
                pads,
                alpha,
                beta,
                c,
                specials,
                seed,
            },
        )
}

fn op(transpose: bool) -> Op {
    match transpose {
        true => Op::Transpose,
        false => Op::None,
    }
}

/// A matrix with its memory.
struct Stored<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
    ld: usize,
    row_major: bool,
}

impl<T: Value> Stored<T> {
    fn new<L: Layout>(
        (rows, cols): (usize, usize),
        pad: usize,
        mut fill: impl FnMut() -> f64,
    ) -> Self {
        let (major, minor) = if L::ROW_MAJOR {
            (rows, cols)
        } else {
            (cols, rows)
        };
        let ld = minor.max(1) + pad;
        Self {
            data: (0..major * ld).map(|_| T::of(fill())).collect(),
            rows,
            cols,
            ld,
            row_major: L::ROW_MAJOR,
        }
    }

    fn index(&self, r: usize, c: usize) -> usize {
        if self.row_major {
            r * self.ld + c
        } else {
            c * self.ld + r
        }
    }

    fn at(&self, r: usize, c: usize) -> f64 {
        self.data[self.index(r, c)].f64()
    }

    fn op(&self, transpose: bool, r: usize, c: usize) -> f64 {
        if transpose {
            self.at(c, r)
        } else {
            self.at(r, c)
        }
    }

    fn view<L: Layout>(&self) -> Matrix<'_, T, L> {
        Matrix::new(&self.data, self.rows, self.cols, self.ld).unwrap()
    }
}

fn check<T, D, LA: Layout, LB: Layout, LD: Layout>(engine: &Engine, case: &Case)
where
    T: Value + Multiply<D> + CpuElement,
    D: Value + Output<T::Scalar>,
    T::Scalar: Value,
{
    let exact = D::ULP == 0.0;
    let mut seed = case.seed;
    let special = case.specials && !exact;
    let mut draw = move || {
        let x = random(&mut seed);
        match (x * 1000.0).abs() as u32 {
            0 if special => f64::NAN,
            1 if special => f64::INFINITY,
            2 if special => f64::NEG_INFINITY,
            3..20 if special => -0.0,
            _ => x,
        }
    };
    let scalar = |x: f64| match exact {
        true => T::Scalar::of(x / 1000.0),
        false => T::Scalar::of(x),
    };
    let gemm = Gemm {
        m: case.m,
        n: case.n,
        k: case.k,
        op_a: op(case.ops[0]),
        op_b: op(case.ops[1]),
        alpha: scalar(case.alpha),
        beta: scalar(case.beta),
    };
    let a = Stored::<T>::new::<LA>(gemm.a_shape(), case.pads[0], &mut draw);
    let b = Stored::<T>::new::<LB>(gemm.b_shape(), case.pads[1], &mut draw);
    let other = Stored::<D>::new::<LD>((case.m, case.n), case.pads[2], &mut draw);
    let mut poison = || if case.c == 1 { draw() } else { f64::NAN };
    let d = Stored::<D>::new::<LD>((case.m, case.n), case.pads[3], &mut poison);
    let (alpha, beta) = (gemm.alpha.f64(), gemm.beta.f64());

    let mut out = Stored {
        data: d.data.clone(),
        ..d
    };
    let c = match case.c {
        0 => C::None,
        1 => C::InPlace,
        _ => C::Matrix(other.view()),
    };
    let result = single(
        engine,
        &gemm,
        a.view::<LA>(),
        b.view::<LB>(),
        c,
        MatrixMut::<_, LD>::new(&mut out.data, d.rows, d.cols, d.ld).unwrap(),
    );
    if case.c == 0 && beta != 0.0 {
        assert_eq!(result, Err(DenseError::MissingC));
        assert_eq!(
            bytemuck::cast_slice::<_, u8>(&out.data),
            bytemuck::cast_slice::<_, u8>(&d.data)
        );
        return;
    }
    result.unwrap();
    let mut written = vec![false; out.data.len()];
    for r in 0..case.m {
        for col in 0..case.n {
            let (mut sum, mut size) = (0.0, 0.0);
            if alpha != 0.0 {
                for k in 0..case.k {
                    let p = a.op(case.ops[0], r, k) * b.op(case.ops[1], k, col);
                    sum += p;
                    size += p.abs();
                }
                (sum, size) = (alpha * sum, alpha.abs() * size);
            }
            if beta != 0.0 {
                let c = if case.c == 1 {
                    d.at(r, col)
                } else {
                    other.at(r, col)
                };
                sum += beta * c;
                size += (beta * c).abs();
            }
            let got = out.at(r, col);
            written[out.index(r, col)] = true;
            let factor = (case.k as f64 / 16.0 + 2.0) * 2f64.powi(-22);
            let bound = match exact {
                true => 0.0,
                false => 0.5 * D::ULP * sum.abs().max(D::NORMAL) + factor * size,
            };
            let equal = (got.is_nan() && sum.is_nan()) || got == sum;
            assert!(
                equal || (got - sum).abs() <= bound,
                "{case:?} [{r}, {col}]: {got}, expected {sum} within {bound}"
            );
        }
    }
    for (i, written) in written.into_iter().enumerate() {
        let (old, new) = (d.data[i], out.data[i]);
        assert!(
            written || bytemuck::bytes_of(&old) == bytemuck::bytes_of(&new),
            "{case:?}: element {i} between the rows was written"
        );
    }
}

fn engines() -> Vec<Engine> {
    let isas = Engine::available();
    isas.into_iter()
        .map(|isa| Engine::with_isa(isa).unwrap())
        .collect()
}

fn check_layouts<T, D>(engine: &Engine, case: &Case)
where
    T: Value + Multiply<D> + CpuElement,
    D: Value + Output<T::Scalar>,
    T::Scalar: Value,
{
    match case.seed % 4 {
        0 => check::<T, D, RowMajor, RowMajor, RowMajor>(engine, case),
        1 => check::<T, D, ColMajor, RowMajor, ColMajor>(engine, case),
        2 => check::<T, D, RowMajor, ColMajor, RowMajor>(engine, case),
        _ => check::<T, D, ColMajor, ColMajor, ColMajor>(engine, case),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn products_match_f64_sums(case in case()) {
        for engine in engines() {
            check_layouts::<f32, f32>(&engine, &case);
            check_layouts::<bf16, bf16>(&engine, &case);
            check_layouts::<bf16, f32>(&engine, &case);
            check_layouts::<f16, f16>(&engine, &case);
            check_layouts::<f16, f32>(&engine, &case);
            check_layouts::<i8, i32>(&engine, &case);
        }
    }
}

/// bf16 elements, some subnormal.
fn values(count: usize, mut seed: u64) -> Vec<bf16> {
    (0..count)
        .map(|_| bf16::from_f64(random(&mut seed)))
        .collect()
}

/// Threads, the other problems of a batch and the form of the call leave the bytes alone.
#[test]
fn results_do_not_depend_on_company() {
    let (m, n, k, count) = (37, 150, 530, 5);
    let gemm = Gemm::<f32> {
        alpha: 1.5,
        ..Gemm::nt(m, n, k)
    };
    let (a, b) = (values(count * m * k, 1), values(count * n * k, 2));
    let detect = || Engine::detect().unwrap();
    let mut want = vec![bf16::NAN; count * m * n];
    let one = detect().with_workers(Arc::new(SpinPool::new(1).unwrap()));
    for i in 0..count {
        single(
            &one,
            &gemm,
            Matrix::<_, RowMajor>::packed(&a[i * m * k..], m, k).unwrap(),
            Matrix::<_, RowMajor>::packed(&b[i * n * k..], n, k).unwrap(),
            C::None,
            MatrixMut::<_, RowMajor>::packed(&mut want[i * m * n..], m, n).unwrap(),
        )
        .unwrap();
    }
    let extent = |rows, cols| Extent {
        rows,
        cols,
        ld: cols,
    };
    for engine in [
        one,
        detect().with_workers(Arc::new(SpinPool::new(3).unwrap())),
        detect().with_workers(Arc::new(RayonWorkers::new())),
    ] {
        let mut got = vec![bf16::NAN; count * m * n];
        // The second call finds dirty buffers.
        for _ in 0..2 {
            strided_batched(
                &engine,
                &gemm,
                Strided::<_, RowMajor>::new(&a, extent(m, k), m * k, count).unwrap(),
                Strided::<_, RowMajor>::new(&b, extent(n, k), n * k, count).unwrap(),
                None,
                StridedMut::<_, RowMajor>::new(&mut got, extent(m, n), m * n, count).unwrap(),
            )
            .unwrap();
            assert!(got == want);
        }
        // Groups of other heights: rows are computed alike.
        let mut got = vec![bf16::NAN; m * n];
        let (top, bottom) = got.split_at_mut(7 * n);
        let mut problems = Vec::new();
        for (first, rows, d) in [(0, 7, top), (7, m - 7, bottom)] {
            problems.push((
                Gemm { m: rows, ..gemm },
                [Problem {
                    a: Matrix::<_, RowMajor>::packed(&a[first * k..], rows, k).unwrap(),
                    b: Matrix::<_, RowMajor>::packed(&b, n, k).unwrap(),
                    c: C::None,
                    d: MatrixMut::<_, RowMajor>::packed(d, rows, n).unwrap(),
                }],
            ));
        }
        let mut groups: Vec<_> = problems
            .iter_mut()
            .map(|(gemm, problems)| Group {
                gemm: *gemm,
                problems,
            })
            .collect();
        grouped(&engine, &mut groups).unwrap();
        assert!(got == want[..m * n]);
    }
}

/// Attention's layout: heads side by side in the rows of one matrix.
#[test]
fn batches_may_lie_side_by_side() {
    let (tokens, heads, dim) = (5, 3, 4);
    let q: Vec<f32> = (0..tokens * heads * dim)
        .map(|i| (i % 11) as f32 - 5.0)
        .collect();
    let extent = Extent {
        rows: tokens,
        cols: dim,
        ld: heads * dim,
    };
    let mut scores = vec![f32::NAN; heads * tokens * tokens];
    let square = Extent {
        rows: tokens,
        cols: tokens,
        ld: tokens,
    };
    let engine = Engine::detect().unwrap();
    let all = Strided::<_, RowMajor>::new(&q, extent, dim, heads).unwrap();
    let d = StridedMut::<_, RowMajor>::new(&mut scores, square, tokens * tokens, heads).unwrap();
    strided_batched(&engine, &Gemm::nt(tokens, tokens, dim), all, all, None, d).unwrap();
    for (i, &got) in scores.iter().enumerate() {
        let (h, r, c) = (i / tokens / tokens, i / tokens % tokens, i % tokens);
        let at = |t: usize, x: usize| q[(t * heads + h) * dim + x];
        let want: f32 = (0..dim).map(|x| at(r, x) * at(c, x)).sum();
        assert_eq!(got, want);
    }
    let mut out = vec![f32::NAN; tokens * heads * dim];
    let p = Strided::<_, RowMajor>::new(&scores, square, tokens * tokens, heads).unwrap();
    let d = StridedMut::<_, RowMajor>::new(&mut out, extent, dim, heads).unwrap();
    strided_batched(&engine, &Gemm::new(tokens, dim, tokens), p, all, None, d).unwrap();
    assert!(out.iter().all(|x| x.is_finite()));
}

#[test]
fn misuse_has_a_name() {
    let engine = Engine::detect().unwrap();
    let mut memory = vec![1.0f32; 64];
    let short = Matrix::<_, RowMajor>::new(&memory, 8, 8, 9).unwrap_err();
    assert!(matches!(
        short,
        DenseError::TooShort {
            needed: 71,
            actual: 64,
            ..
        }
    ));
    let narrow = Matrix::<_, ColMajor>::new(&memory, 8, 2, 7).unwrap_err();
    assert_eq!(
        narrow,
        DenseError::LeadingDimension {
            needed: 8,
            actual: 7
        }
    );
    let huge = Matrix::<_, RowMajor>::new(&memory, usize::MAX, 2, usize::MAX).unwrap_err();
    assert!(matches!(huge, DenseError::TooLarge { .. }));
    let extent = Extent {
        rows: 2,
        cols: 4,
        ld: 8,
    };
    let close = StridedMut::<_, RowMajor>::new(&mut memory, extent, 6, 2).unwrap_err();
    assert_eq!(
        close,
        DenseError::BatchStride {
            stride: 6,
            needed: 12
        }
    );
    assert!(StridedMut::<_, RowMajor>::new(&mut memory, extent, 4, 2).is_ok());

    let gemm = Gemm::<f32>::new(4, 4, 4);
    let address = memory.as_mut_ptr();
    let extent = Extent {
        rows: 4,
        cols: 4,
        ld: 8,
    };
    let read = |offset: usize| {
        // SAFETY: 29 elements from an offset up to 35 are in the allocation.
        unsafe { Matrix::<_, RowMajor>::from_raw(address.wrapping_add(offset), extent) }.unwrap()
    };
    // SAFETY: as above.
    let write = |offset: usize| unsafe {
        MatrixMut::<_, RowMajor>::from_raw(address.wrapping_add(offset), extent).unwrap()
    };
    for (a, c, d, with) in [
        (0, None, 0, Some("A")),
        (0, None, 3, Some("A")),
        (0, None, 5, Some("A")),
        (0, None, 4, None),
        (0, Some(4), 4, None),
        (0, Some(12), 4, Some("C")),
        (0, Some(32), 4, None),
    ] {
        let beta = if c.is_some() { 1.0 } else { 0.0 };
        let c = c.map_or(C::None, |c| C::Matrix(read(c)));
        let gemm = Gemm { beta, ..gemm };
        let got = single(&engine, &gemm, read(a), read(32), c, write(d));
        let want = with.map_or(Ok(()), |with| Err(DenseError::Overlap { problem: 0, with }));
        assert_eq!(got, want, "A at {a}, D at {d}");
    }
    let (mut ds, a) = ([write(0), write(3)], [read(32), read(36)]);
    let batch = Batch {
        a: &a,
        b: &a,
        c: &[],
        d: &mut ds,
    };
    let clash = batched(&engine, &gemm, batch).unwrap_err();
    assert!(matches!(
        clash,
        DenseError::Overlap {
            with: "another D",
            ..
        }
    ));
    let batch = Batch {
        a: &a[..1],
        b: &a,
        c: &[],
        d: &mut ds,
    };
    let count = batched(&engine, &gemm, batch).unwrap_err();
    assert_eq!(
        count,
        DenseError::BatchCount {
            what: "A",
            actual: 1,
            d: 2
        }
    );
    let shape = single(
        &engine,
        &Gemm::new(4, 4, 3),
        read(0),
        read(0),
        C::None,
        write(36),
    );
    assert!(matches!(shape, Err(DenseError::Shape { what: "A", .. })));
}

/// Offsets past 2^31 elements, in memory that is only mapped where it is used.
#[test]
fn strides_past_32_bits() {
    let ld = (1usize << 31) + 5;
    let layout = std::alloc::Layout::array::<i8>(2 * ld + 64).unwrap();
    // SAFETY: the layout is not empty.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<i8>();
    if memory.is_null() {
        eprintln!("skipped: 4 GiB of address space are not to be had");
        return;
    }
    let extent = Extent {
        rows: 3,
        cols: 3,
        ld,
    };
    for r in 0..3 {
        for c in 0..3 {
            // SAFETY: inside the allocation.
            unsafe { *memory.add(r * ld + c) = (3 * r + c) as i8 };
        }
    }
    // SAFETY: the allocation holds three rows, and lives until the end.
    let a = unsafe { Matrix::<_, RowMajor>::from_raw(memory.cast_const(), extent) }.unwrap();
    let mut d = [i32::MIN; 9];
    let out = MatrixMut::<_, RowMajor>::packed(&mut d, 3, 3).unwrap();
    let engine = Engine::detect().unwrap();
    single(&engine, &Gemm::<i32>::new(3, 3, 3), a, a, C::None, out).unwrap();
    assert_eq!(d, [15, 18, 21, 42, 54, 66, 69, 90, 111]);
    // SAFETY: allocated above with this layout; no view is used any more.
    unsafe { std::alloc::dealloc(memory.cast(), layout) };
}
