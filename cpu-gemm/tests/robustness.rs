//! What must hold however, wherever and how often an engine is called: the same bytes.

mod common;

use std::sync::Arc;
use std::thread;

use asym_gemm_cpu::pool::{RayonWorkers, SpinPool, TaskPanic, Workers};
use asym_gemm_cpu::{
    Combine, CpuError, Engine, ExpertGroup, Fp8Weights, GroupRange, Int8Rows, Int8Scaling,
    Int8Weights, MatrixMut, MatrixRef, Output, PackedRef, Rows, Slots, WeightElement, WeightsRef,
    combine,
};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use common::*;
use half::bf16;
use rand::RngExt;

/// Operands of a GEMM in one format, two weight matrices.
struct Gemm {
    format: WeightFormat,
    n: usize,
    k: usize,
    floats: Vec<bf16>,
    codes: Vec<i8>,
    code_scales: Vec<f32>,
    packed: Vec<u8>,
    scales: Vec<f32>,
}

const MATRICES: usize = 2;

/// The formats of plain matrices; fp4 is one of banks alone.
const GEMM_FORMATS: [WeightFormat; 4] = [
    WeightFormat::Bf16,
    WeightFormat::Int8PerRow,
    WeightFormat::Int8Block128,
    WeightFormat::Fp8Block128,
];

fn pack<T: WeightElement>(weights: &[T], shape: [usize; 3]) -> Vec<u8> {
    let [_, n, k] = shape;
    let mut packed = vec![0xa5; PackedRef::<T>::bytes(shape).unwrap()];
    let rows = WeightsRef::new(weights, shape, [n * k, k]).unwrap();
    rows.pack(&mut packed).unwrap();
    packed
}

impl Gemm {
    fn random(format: WeightFormat, m: usize, n: usize, k: usize) -> Self {
        let mut rng = rng((m * 31 + n * 7 + k) as u64);
        let floats = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let shape = [MATRICES, n, k];
        let len = shape.iter().product();
        let packed = match format {
            WeightFormat::Bf16 => pack(&floats(uniform(&mut rng, len, 2.0)), shape),
            WeightFormat::Int8PerRow | WeightFormat::Int8Block128 => {
                let codes: Vec<i8> = (0..len).map(|_| rng.random()).collect();
                pack(&codes, shape)
            }
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => unreachable!("no GEMM of fp4"),
            WeightFormat::Fp8Block128 => {
                // No NaN: below 0x78 are all magnitudes under 256.
                let codes: Vec<u8> = (0..len).map(|_| rng.random::<u8>() & 0xf7).collect();
                pack(&codes, shape)
            }
        };
        Self {
            format,
            n,
            k,
            floats: floats(uniform(&mut rng, m * k, 2.0)),
            codes: (0..m * k).map(|_| rng.random()).collect(),
            code_scales: uniform(&mut rng, m * k.div_ceil(128), 0.1),
            packed,
            scales: uniform(&mut rng, MATRICES * n * k.div_ceil(128), 0.1),
        }
    }

    fn m(&self) -> usize {
        self.codes.len() / self.k
    }

    /// Makes every row of A not a number, as far as the format knows it.
    fn spoilt(mut self) -> Self {
        self.floats.fill(bf16::NAN);
        self.codes.fill(-128);
        self.code_scales.fill(f32::NAN);
        self
    }

    /// Rows `first..first + m` of A times one matrix, as bits.
    fn run(&self, engine: &Engine, first: usize, m: usize) -> Result<Vec<u32>, CpuError> {
        let (n, k) = (self.n, self.k);
        let group = [GroupRange {
            weight: 1,
            start: 0,
            end: m,
        }];
        let mut d = vec![f32::from_bits(0x7fc0_1234); m * n];
        let out = MatrixMut::new(&mut d, m, n, n)?;
        let shape = [MATRICES, n, k];
        let scales = |rows: usize, blocks: usize| {
            WeightsRef::new(
                &self.scales,
                [MATRICES, rows, blocks],
                [rows * blocks, blocks],
            )
        };
        let floats = MatrixRef::new(&self.floats[first * k..], m, k, k)?;
        let int8 = |scaling: Int8Scaling, out| {
            let blocks = scaling.blocks(k);
            let a = Int8Rows::new(
                MatrixRef::new(&self.codes[first * k..], m, k, k)?,
                MatrixRef::new(&self.code_scales[first * blocks..], m, blocks, blocks)?,
            )?;
            let codes = PackedRef::<i8>::new(&self.packed, shape)?;
            let b = Int8Weights::new(codes, scales(n, blocks)?, scaling)?;
            engine.grouped_gemm_int8(a, b, &group, out)
        };
        match self.format {
            WeightFormat::Bf16 => {
                let b = PackedRef::<bf16>::new(&self.packed, shape)?;
                engine.grouped_gemm_bf16(floats, b, &group, out)?;
            }
            WeightFormat::Int8PerRow => int8(Int8Scaling::PerRow, out)?,
            WeightFormat::Int8Block128 => int8(Int8Scaling::Block128, out)?,
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => unreachable!("no GEMM of fp4"),
            WeightFormat::Fp8Block128 => {
                let codes = PackedRef::<u8>::new(&self.packed, shape)?;
                let b = Fp8Weights::new(codes, scales(n.div_ceil(128), k.div_ceil(128))?)?;
                engine.grouped_gemm_fp8(floats, b, &group, out)?;
            }
        }
        Ok(d.iter().map(|d| d.to_bits()).collect())
    }
}

/// An expert layer with its routing: `TOP_K` slots a token, some of them skipped.
struct Layer {
    bank: Bank,
    x: Vec<f32>,
    /// Tokens of each expert.
    tokens: Vec<Vec<u32>>,
    output_index: Vec<i32>,
    weights: Vec<f32>,
}

const TOP_K: usize = 3;

impl Layer {
    fn random(format: WeightFormat, tokens: usize) -> Self {
        let (experts, hidden) = (5, 100);
        let mut rng = rng(tokens as u64);
        let bank = Bank::random(geometry(experts, hidden, 170, format, true), 9);
        let mut of_expert = vec![vec![]; experts];
        let mut slots = vec![];
        for token in 0..tokens as u32 {
            for _ in 0..TOP_K {
                let expert = rng.random_range(0..experts + 1);
                slots.push(of_expert.get_mut(expert).map(|tokens| {
                    tokens.push(token);
                    (expert, tokens.len() - 1)
                }));
            }
        }
        let start = |expert: usize| of_expert[..expert].iter().map(Vec::len).sum::<usize>();
        let index = |slot: &Option<(usize, usize)>| match *slot {
            Some((expert, row)) => (start(expert) + row) as i32,
            None => -1,
        };
        Self {
            x: uniform(&mut rng, tokens * hidden, 2.0),
            output_index: slots.iter().map(index).collect(),
            weights: uniform(&mut rng, tokens * TOP_K, 1.0),
            tokens: of_expert,
            bank,
        }
    }

    fn groups(&self) -> Vec<ExpertGroup<'_>> {
        let mut start = 0;
        let mut groups = vec![];
        for (expert, tokens) in self.tokens.iter().enumerate() {
            groups.push(ExpertGroup {
                expert,
                start,
                tokens,
            });
            start += tokens.len();
        }
        groups
    }

    fn run<O: Output>(&self, engine: &Engine, x: &[f32], poison: O) -> Result<Vec<O>, CpuError> {
        let mut out = vec![poison; x.len()];
        let slots = Slots {
            top_k: TOP_K,
            output_index: &self.output_index,
            weights: &self.weights,
        };
        let (bank, groups) = (self.bank.view(), self.groups());
        engine.expert_layer(
            bank,
            Activation::SwiGlu,
            Rows::F32(x),
            &groups,
            slots,
            &mut out,
        )?;
        Ok(out)
    }

    fn bits(&self, engine: &Engine) -> Result<Vec<u32>, CpuError> {
        let out = self.run(engine, &self.x, f32::NAN)?;
        Ok(out.iter().map(|x| x.to_bits()).collect())
    }
}

/// One call that gives the same bits whenever it is made.
enum Call {
    Gemm(Gemm),
    Layer(Layer),
}

impl Call {
    /// A GEMM and a layer in every format.
    fn all() -> Vec<Self> {
        let gemms = GEMM_FORMATS.map(|format| Self::Gemm(Gemm::random(format, 21, 70, 200)));
        let layers = FORMATS.map(|format| Self::Layer(Layer::random(format, 6)));
        gemms.into_iter().chain(layers).collect()
    }

    fn run(&self, engine: &Engine) -> Result<Vec<u32>, CpuError> {
        match self {
            Self::Gemm(gemm) => gemm.run(engine, 0, gemm.m()),
            Self::Layer(layer) => layer.bits(engine),
        }
    }

    fn results(calls: &[Self], engine: &Engine) -> Vec<Vec<u32>> {
        calls.iter().map(|call| call.run(engine).unwrap()).collect()
    }
}

/// An engine on threads that have not computed anything.
fn on_new_threads(engine: &Engine, threads: usize) -> Engine {
    let pool = SpinPool::new(threads).unwrap();
    engine.clone().with_workers(Arc::new(pool))
}

#[test]
fn forty_repeats_give_one_result() {
    let calls = Call::all();
    for engine in engines() {
        let first = Call::results(&calls, &engine);
        for repeat in 1..40 {
            assert_eq!(
                Call::results(&calls, &engine),
                first,
                "{engine:?}: {repeat}"
            );
        }
    }
}

/// Also with more participants than this machine may have CPUs, and with none but the caller.
#[test]
fn the_number_of_threads_changes_nothing() {
    let calls = Call::all();
    let rayon = rayon::ThreadPoolBuilder::new()
        .num_threads(5)
        .build()
        .unwrap();
    for engine in engines() {
        let first = Call::results(&calls, &engine);
        assert_eq!(Call::results(&calls, &on_new_threads(&engine, 1)), first);
        let borrowed = engine.clone().with_workers(Arc::new(RayonWorkers::new()));
        assert_eq!(rayon.install(|| Call::results(&calls, &borrowed)), first);
    }
}

#[test]
fn eight_threads_at_once_get_their_own_results() {
    let calls = Call::all();
    for engine in engines() {
        let want = Call::results(&calls, &engine);
        thread::scope(|scope| {
            for caller in 0..8 {
                let (calls, want, engine) = (&calls, &want, &engine);
                scope.spawn(move || {
                    for i in 0..3 * calls.len() {
                        let i = (i + caller) % calls.len();
                        assert_eq!(calls[i].run(engine).unwrap(), want[i], "{engine:?}");
                    }
                });
            }
        });
    }
}

#[test]
fn tasks_of_a_rayon_pool_may_call() {
    let calls = Call::all();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(3)
        .build()
        .unwrap();
    for engine in engines() {
        let want = Call::results(&calls, &engine);
        let workers: [Arc<dyn Workers>; 2] =
            [engine.workers().clone(), Arc::new(RayonWorkers::new())];
        for workers in workers {
            let engine = engine.clone().with_workers(workers);
            pool.scope(|scope| {
                for (call, want) in calls.iter().zip(&want).cycle().take(3 * calls.len()) {
                    let engine = &engine;
                    scope.spawn(move |_| assert_eq!(&call.run(engine).unwrap(), want));
                }
            });
        }
    }
}

/// Workers of which one panics.
struct Failing {
    pool: SpinPool,
    participant: usize,
}

impl Workers for Failing {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn run(&self, body: &(dyn Fn(usize) + Sync)) -> Result<(), TaskPanic> {
        self.pool.run(&|participant| {
            assert_ne!(participant, self.participant, "meant to fail");
            body(participant);
        })
    }
}

/// A panic is an error, and what it leaves behind does not disturb the next call.
#[test]
fn a_panic_is_an_error_and_passes() {
    let calls = Call::all();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.to_string().contains("meant to fail") {
            hook(info);
        }
    }));
    for engine in engines() {
        let want = Call::results(&calls, &engine);
        for participant in [0, 1] {
            let pool = SpinPool::new(2.min(engine.workers().threads())).unwrap();
            let failing = Failing { pool, participant };
            let failing = engine.clone().with_workers(Arc::new(failing));
            for (call, want) in calls.iter().zip(&want) {
                match call.run(&failing) {
                    Ok(bits) => assert!(participant > 0 && bits == *want),
                    Err(error) => assert!(matches!(error, CpuError::TaskPanic(_)), "{error}"),
                }
                assert_eq!(call.run(&engine).unwrap(), *want, "after a panic");
            }
        }
    }
}

/// A row of A gives the bytes that it gives alone in a batch of any size, at any place: across the
/// borders of the groups of 16 rows, of the passes of 3, 8 or so groups, and of the blocks of 512.
#[test]
fn a_row_alone_gives_the_bytes_of_its_batch() {
    const M: usize = 515;
    for format in GEMM_FORMATS {
        let gemm = Gemm::random(format, M, 17, 130);
        for engine in engines() {
            let name = engine.kernel_name(format);
            let alone: Vec<_> = (0..M)
                .map(|row| gemm.run(&engine, row, 1).unwrap())
                .collect();
            for m in (1..=130).chain([511, 512, 513, M]) {
                let first = (M - m).min(m * 7 % 97);
                let batch = gemm.run(&engine, first, m).unwrap();
                for (row, got) in batch.chunks(gemm.n).enumerate() {
                    assert_eq!(got, alone[first + row], "{name}: row {row} of {m}");
                }
            }
        }
    }
}

/// The same of a token of an expert.
#[test]
fn a_token_alone_gives_the_bytes_of_its_batch() {
    const T: usize = 530;
    for format in FORMATS {
        let bank = Bank::random(geometry(2, 70, 140, format, true), 7);
        let x = uniform(&mut rng(8), T * 70, 2.0);
        let all: Vec<u32> = (0..T as u32).rev().collect();
        for engine in engines() {
            let ffn = |tokens: &[u32]| {
                let mut y = vec![f32::NAN; tokens.len() * 70];
                let group = [ExpertGroup {
                    expert: 1,
                    start: 0,
                    tokens,
                }];
                engine
                    .expert_ffn(bank.view(), Activation::SwiGlu, &x, &group, &mut y)
                    .unwrap();
                y
            };
            for m in [129, 512, 513, T] {
                let whole = ffn(&all[..m]);
                for at in [0, 15, 16, 47, 48, 63, 64, 127, 128, 511, 512, m - 1] {
                    if at < m {
                        let what = format!("{} token {at} of {m}", engine.kernel_name(format));
                        assert_same(&what, &ffn(&all[at..at + 1]), &whole[at * 70..][..70]);
                    }
                }
            }
        }
    }
}

/// Every code -128: 16384 a product, in blocks and rows, in panels that are full and not.
#[test]
fn the_lowest_codes_are_exact() {
    for format in [WeightFormat::Int8PerRow, WeightFormat::Int8Block128] {
        for (n, k) in [(1, 1), (16, 128), (17, 300), (33, 4096)] {
            let mut gemm = Gemm::random(format, 50, n, k);
            gemm.codes.fill(-128);
            gemm.code_scales.fill(1.0);
            gemm.scales.fill(1.0);
            gemm.packed.fill(0x80);
            let want = (k as f32 * 16384.0).to_bits();
            for engine in engines() {
                for m in [1, 2, 3, 4, 5, 15, 16, 17, 49, 50] {
                    let got = gemm.run(&engine, 0, m).unwrap();
                    let right = got.iter().all(|&d| d == want);
                    assert!(right, "{} m {m} n {n} k {k}", engine.kernel_name(format));
                }
            }
        }
    }
}

/// One region gives the bits of two steps.
#[test]
fn a_layer_is_its_experts_combined() {
    for format in FORMATS {
        for tokens in [1, 7, 150] {
            let layer = Layer::random(format, tokens);
            let hidden = layer.bank.geometry.hidden;
            let rows: usize = layer.tokens.iter().map(Vec::len).sum();
            for engine in engines() {
                let name = engine.kernel_name(format);
                let mut y = vec![f32::NAN; rows * hidden];
                let groups = layer.groups();
                engine
                    .expert_ffn(
                        layer.bank.view(),
                        Activation::SwiGlu,
                        &layer.x,
                        &groups,
                        &mut y,
                    )
                    .unwrap();
                let mut want = vec![f32::NAN; tokens * hidden];
                let parts = Combine {
                    y: &y,
                    hidden,
                    top_k: TOP_K,
                    output_index: &layer.output_index,
                    weights: &layer.weights,
                    shared: None,
                };
                combine(parts, &mut want).unwrap();
                let got = layer.run(&engine, &layer.x, f32::NAN).unwrap();
                assert_same(name, &got, &want);
                let got = layer.run(&engine, &layer.x, bf16::NAN).unwrap();
                let want: Vec<bf16> = want.iter().map(|&x| bf16::from_f32(x)).collect();
                assert!(got == want, "{name}: rounded once");
            }
        }
    }
}

/// What a call leaves in the memory that the next one uses, NaN if possible, is never read.
#[test]
fn memory_of_earlier_calls_is_not_read() {
    let calls = Call::all();
    let spoilers: Vec<_> = GEMM_FORMATS
        .map(|format| {
            let gemm = Gemm::random(format, 600, 300, 520).spoilt();
            let layer = Layer::random(format, 90);
            (gemm, vec![f32::NAN; layer.x.len()], layer)
        })
        .into();
    let (new, used) = (engines(), engines());
    for (new, used) in new.iter().zip(&used) {
        // Threads keep buffers too, so the reference has its own.
        let want = thread::scope(|scope| {
            let reference = || Call::results(&calls, &on_new_threads(new, 1));
            scope.spawn(reference).join().unwrap()
        });
        for (gemm, x, layer) in &spoilers {
            gemm.run(used, 0, gemm.m()).unwrap();
            assert_eq!(Call::results(&calls, used), want, "after {}", gemm.format);
            layer.run(used, x, f32::NAN).unwrap();
            assert_eq!(Call::results(&calls, used), want, "after {}", gemm.format);
        }
    }
}

#[cfg(unix)]
mod fork {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    /// Status of a forked process that runs `child`: 0 if that gives true, a signal's after 20 s.
    fn status_of_child(child: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child calls allocation, thread starts and this crate only, which all work
        // after a fork with this platform's C library, and ends by `_exit`.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: takes a number; SIGALRM ends the process by default.
                unsafe { libc::alarm(20) };
                let passed = catch_unwind(AssertUnwindSafe(child)).unwrap_or(false);
                // SAFETY: takes a number and does not return.
                unsafe { libc::_exit(i32::from(!passed)) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the pointer is to a live i32.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                status
            }
        }
    }

    #[test]
    fn a_child_process_gets_the_same_results() {
        let calls = Call::all();
        for engine in engines() {
            let want = Call::results(&calls, &engine);
            let status = status_of_child(|| {
                let same = |engine: &Engine| {
                    let results = calls.iter().map(|call| call.run(engine));
                    results
                        .zip(&want)
                        .all(|(got, want)| got.as_ref() == Ok(want))
                };
                same(&engine) && same(&on_new_threads(&engine, 1))
            });
            assert_eq!(status, 0, "{engine:?}");
            assert_eq!(Call::results(&calls, &engine), want, "the parent");
        }
        let status = status_of_child(|| Engine::detect().is_ok_and(|e| calls[0].run(&e).is_ok()));
        assert_eq!(status, 0, "an engine of the child");
    }

    /// Whatever another thread holds at that moment.
    #[test]
    fn a_fork_during_calls_of_other_threads_does_not_hang() {
        let gemm = Gemm::random(WeightFormat::Int8PerRow, 1, 16, 64);
        let engine = Engine::detect().unwrap();
        let want = gemm.run(&engine, 0, 1).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        assert_eq!(gemm.run(&engine, 0, 1).unwrap(), want);
                    }
                });
            }
            let statuses: Vec<_> = (0..40)
                .map(|_| status_of_child(|| gemm.run(&engine, 0, 1).as_ref() == Ok(&want)))
                .collect();
            stop.store(true, Relaxed);
            assert_eq!(statuses, vec![0; 40]);
        });
    }
}
