//! Against sums in f64 of the operands' own values.

use std::sync::Arc;

use asym_gemm_cpu::dense::*;
use asym_gemm_cpu::pool::SpinPool;
use asym_gemm_cpu::{Engine, Isa};
use half::{bf16, f16};

/// Engines of every instruction set that the processor has.
fn engines() -> impl Iterator<Item = Engine> {
    Engine::available().into_iter().filter(|&isa| isa != Isa::Amx).map(|isa| {
        let pool = SpinPool::new(3).expect("threads can be started");
        Engine::with_isa(isa)
            .expect("available")
            .with_workers(Arc::new(pool))
    })
}

/// Values from a small generator, so that a failure can be repeated.
fn values<T>(len: usize, seed: u64, of: impl Fn(f32) -> T) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| of(next())).collect()
}

/// Element types of the tests, with their exact value.
trait Value: Copy + PartialEq + std::fmt::Debug {
    const NAN: Self;
    /// Relative error of one rounding.
    const ROUNDING: f64;
    fn of(x: f32) -> Self;
    fn exact(self) -> f64;
}

macro_rules! values {
    ($($t:ty, $nan:expr, $rounding:expr, $of:expr, $exact:expr;)*) => {$(
        impl Value for $t {
            const NAN: Self = $nan;
            const ROUNDING: f64 = $rounding;
            fn of(x: f32) -> Self { ($of)(x) }
            fn exact(self) -> f64 { ($exact)(self) }
        }
    )*};
}

values! {
    f32, f32::NAN, 0.0, |x| x, f64::from;
    bf16, bf16::NAN, 1.0 / 256.0, bf16::from_f32, bf16::to_f64;
    f16, f16::NAN, 1.0 / 2048.0, f16::from_f32, f16::to_f64;
    i8, 77, 0.0, |x| (x * 127.0) as i8, f64::from;
    i32, 0x7777_7777, 0.0, |x| (x * 1000.0) as i32, f64::from;
}

#[derive(Clone, Copy, Debug)]
struct Case<S> {
    gemm: Gemm<S>,
    gap: usize,
    own_c: bool,
}

/// Runs one case in orders LA, LB, LD on `engine` and checks every element, gaps included.
fn check<T, O, LA, LB, LD>(engine: &Engine, case: Case<T::Total>, seed: u64)
where
    T: Input + Value,
    O: Stored<T::Total> + Value,
    T::Total: Value,
    LA: Order,
    LB: Order,
    LD: Order,
{
    let Case { gemm, gap, own_c } = case;
    let stored = |op, rows, cols| match op {
        Op::None => (rows, cols),
        Op::Transpose => (cols, rows),
    };
    let a_shape = stored(gemm.op_a, gemm.m, gemm.k);
    let b_shape = stored(gemm.op_b, gemm.k, gemm.n);
    let d_shape = (gemm.m, gemm.n);
    let a = Matrix::<T, LA>::new(a_shape, gap, seed);
    let b = Matrix::<T, LB>::new(b_shape, gap, seed + 1);
    let mut c = Matrix::<O, LD>::new(d_shape, gap, seed + 2);
    let mut d = Matrix::<O, LD>::new(d_shape, gap, seed + 3);
    let unread = gemm.beta == T::Total::ZERO;
    if unread {
        c.data.fill(O::NAN);
    }
    if own_c || unread {
        d.data.fill(O::NAN);
    }
    let d_before = d.data.clone();
    let before = if own_c { &c.data } else { &d_before };
    let (rows, cols) = d_shape;
    let leading = d.leading;
    let view = ViewMut::<_, LD>::new(&mut d.data, rows, cols, leading).unwrap();
    let mut problem = Problem::new(a.view(), b.view(), view);
    if own_c {
        problem = problem.with_c(c.view());
    }
    single(engine, &gemm, problem).unwrap();

    let at = |order_rows: bool, op, leading: usize, i: usize, j: usize| {
        let (i, j) = match op {
            Op::None => (i, j),
            Op::Transpose => (j, i),
        };
        if order_rows { i * leading + j } else { i + j * leading }
    };
    let mut written = vec![false; d.data.len()];
    for i in 0..gemm.m {
        for j in 0..gemm.n {
            let (mut sum, mut magnitude) = (0.0f64, 0.0f64);
            for k in 0..gemm.k {
                let x = a.data[at(a.by_rows, gemm.op_a, a.leading, i, k)].exact();
                let y = b.data[at(b.by_rows, gemm.op_b, b.leading, k, j)].exact();
                sum += x * y;
                magnitude += (x * y).abs();
            }
            let place = at(d.by_rows, Op::None, d.leading, i, j);
            let (alpha, beta) = (gemm.alpha.exact(), gemm.beta.exact());
            let addend = if unread { 0.0 } else { beta * before[place].exact() };
            let want = alpha * sum + addend;
            let bound = f64::from(f32::EPSILON)
                * ((gemm.k + 2) as f64 * alpha.abs() * magnitude + addend.abs())
                + O::ROUNDING * want.abs()
                + 1e-7 * O::ROUNDING;
            let got = d.data[place].exact();
            assert!(
                (got - want).abs() <= bound,
                "({i}, {j}): {got} instead of {want} +- {bound}: {case:?} on {}",
                engine.isa()
            );
            written[place] = true;
        }
    }
    for (place, written) in written.into_iter().enumerate() {
        if !written {
            let same = d.data[place] == d_before[place];
            assert!(same || d.data[place] != d.data[place], "gap {place} of {case:?}");
        }
    }
}

/// A matrix with its data.
struct Matrix<T, L> {
    data: Vec<T>,
    shape: (usize, usize),
    leading: usize,
    by_rows: bool,
    order: std::marker::PhantomData<L>,
}

impl<T: Value, L: Order> Matrix<T, L> {
    fn new(shape: (usize, usize), gap: usize, seed: u64) -> Self {
        // A 1 x 2 matrix shows the order.
        let two = [0u8; 2];
        let by_rows = View::<_, L>::new(&two, 1, 2, 1).is_err();
        let (lines, len) = if by_rows { shape } else { (shape.1, shape.0) };
        let leading = len + gap;
        Self {
            data: values(lines * leading, seed, T::of),
            shape,
            leading,
            by_rows,
            order: std::marker::PhantomData,
        }
    }

    fn view(&self) -> View<'_, T, L> {
        View::new(&self.data, self.shape.0, self.shape.1, self.leading).unwrap()
    }
}

/// All orders of the three matrices.
fn all_orders<T, O>(engine: &Engine, case: Case<T::Total>, seed: u64)
where
    T: Input + Value,
    O: Stored<T::Total> + Value,
    T::Total: Value,
{
    type R = RowMajor;
    type C = ColMajor;
    check::<T, O, R, R, R>(engine, case, seed);
    check::<T, O, R, C, R>(engine, case, seed);
    check::<T, O, C, R, R>(engine, case, seed);
    check::<T, O, C, C, C>(engine, case, seed);
    check::<T, O, R, R, C>(engine, case, seed);
}

const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (5, 7, 3),
    (6, 16, 8),
    (14, 32, 2),
    (15, 33, 257),
    (1, 70, 40),
    (70, 1, 41),
    (200, 150, 30),
    (4, 5, 0),
];

#[test]
fn every_type_order_and_op() {
    for engine in engines() {
        for (index, (m, n, k)) in SIZES.into_iter().enumerate() {
            for (op_a, op_b) in [
                (Op::None, Op::None),
                (Op::Transpose, Op::None),
                (Op::None, Op::Transpose),
            ] {
                for (alpha, beta) in [(1.0, 0.0), (0.5, -2.0), (0.0, 3.0), (0.0, 0.0)] {
                    let gemm = Gemm {
                        op_a,
                        op_b,
                        ..Gemm::new(m, n, k).scaled(alpha, beta)
                    };
                    let case = Case {
                        gemm,
                        gap: index % 3,
                        own_c: index % 2 == 0,
                    };
                    let seed = index as u64;
                    all_orders::<f32, f32>(&engine, case, seed);
                    all_orders::<bf16, bf16>(&engine, case, seed);
                    check::<bf16, f32, RowMajor, RowMajor, RowMajor>(&engine, case, seed);
                    all_orders::<f16, f16>(&engine, case, seed);
                    let gemm = Gemm {
                        op_a,
                        op_b,
                        ..Gemm::new(m, n, k).scaled((alpha * 2.0) as i32, beta as i32)
                    };
                    all_orders::<i8, i32>(&engine, Case { gemm, gap: 1, own_c: true }, seed);
                }
            }
        }
    }
}

/// The bits of an element depend neither on the threads, nor on the instruction set, nor on
/// the rest of the batch.
#[test]
fn bits_depend_on_the_operands_alone() {
    let (m, n, k) = (77, 131, 700);
    let a = values(m * k, 1, |x| x);
    let b = values(k * n, 2, |x| x);
    let run = |engine: &Engine, m: usize, n: usize| {
        let mut d = vec![f32::NAN; m * n];
        let problem = Problem::new(
            View::<_, RowMajor>::packed(&a[..m * k], m, k).unwrap(),
            View::<_, ColMajor>::packed(&b[..n * k], k, n).unwrap(),
            ViewMut::<_, RowMajor>::packed(&mut d, m, n).unwrap(),
        );
        single(engine, &Gemm::new(m, n, k), problem).unwrap();
        d
    };
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let want = run(&Engine::with_isa(Isa::Portable).unwrap(), m, n);
    for engine in engines() {
        for threads in [1, 2, 5] {
            let pool = Arc::new(SpinPool::new(threads).unwrap());
            let engine = engine.clone().with_workers(pool);
            assert_eq!(bits(&run(&engine, m, n)), bits(&want), "{}", engine.isa());
        }
        let part = run(&engine, 3, 5);
        for (row, part) in part.chunks(5).enumerate() {
            assert_eq!(bits(part), bits(&want[row * n..][..5]), "{}", engine.isa());
        }
    }
}
