//! How fast the workers together multiply operands that are in registers.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::median;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::CpuError;
use crate::pool::Workers;

/// What a loop multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
pub enum Precision {
    /// int8 operands, i32 sums.
    Int8,
    /// bf16 operands, or f32 that were bf16, and f32 sums.
    Bf16,
}

/// Operands and result of a loop: a tile each, of which vectors take the first bytes.
#[repr(C, align(64))]
pub(super) struct Operands {
    pub(super) a: [u8; 1024],
    pub(super) b: [u8; 1024],
    /// The first accumulator after the loop.
    pub(super) sums: [u8; 1024],
}

impl Operands {
    /// Numbers that are no special case of the multipliers: zeros draw less power and
    /// run at a higher clock than weights do.
    fn new(precision: Precision, seed: u64) -> Box<Self> {
        let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bytes = |values: &mut [u8; 1024]| {
            for pair in values.as_chunks_mut::<2>().0 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let random = (state >> 32) as u16;
                *pair = match precision {
                    Precision::Int8 => random,
                    // Sign and mantissa are random, the exponent gives 0.5 to 2.
                    Precision::Bf16 => random & 0x80ff | 0x3f00,
                }
                .to_le_bytes();
            }
        };
        let mut operands = Box::new(Self {
            a: [0; 1024],
            b: [0; 1024],
            sums: [0; 1024],
        });
        bytes(&mut operands.a);
        bytes(&mut operands.b);
        operands
    }
}

/// A loop of products of one instruction set, which this processor can run.
#[derive(Clone, Copy)]
pub struct Products {
    name: &'static str,
    precision: Precision,
    /// Operations of one step: two for each multiplication and addition.
    ops: u64,
    /// Steps between two looks at the clock, some ten microseconds.
    steps: u64,
    /// Safe to call: a value is made only after its features were detected.
    run: unsafe fn(u64, &mut Operands),
}

impl std::fmt::Debug for Products {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:?})", self.name, self.precision)
    }
}

impl Products {
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn new(
        name: &'static str,
        precision: Precision,
        ops: u64,
        steps: u64,
        run: unsafe fn(u64, &mut Operands),
    ) -> Self {
        Self {
            name,
            precision,
            ops,
            steps,
            run,
        }
    }

    /// Every loop that this process can run, the fastest last.
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let native = x86::available();
        #[cfg(not(target_arch = "x86_64"))]
        let native = Vec::new();
        [vec![PORTABLE_INT8, PORTABLE_F32], native].concat()
    }

    /// The fastest for `precision`: the ceiling of this machine.
    pub fn best(precision: Precision) -> Self {
        let all = Self::available().into_iter();
        all.rev()
            .find(|products| products.precision == precision)
            .unwrap_or(PORTABLE_INT8)
    }

    /// The one of that name, if this process can run it.
    pub fn named(name: &str) -> Option<Self> {
        Self::available()
            .into_iter()
            .find(|products| products.name == name)
    }

    /// The instruction, as `tdpbssd`.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// What it multiplies.
    pub fn precision(self) -> Precision {
        self.precision
    }

    /// Operations a second of all workers together, two for each multiply-add: the median of
    /// `rounds`, each as long as `time`.
    ///
    /// # Errors
    /// [`CpuError::Zero`] for no rounds.
    pub fn rate(
        self,
        workers: &dyn Workers,
        time: Duration,
        rounds: usize,
    ) -> Result<f64, CpuError> {
        let rates: Result<Vec<f64>, CpuError> =
            (0..rounds).map(|_| self.rate_once(workers, time)).collect();
        median(rates?).ok_or(CpuError::Zero { what: "rounds" })
    }

    fn rate_once(self, workers: &dyn Workers, time: Duration) -> Result<f64, CpuError> {
        let steps = AtomicU64::new(0);
        let start = Instant::now();
        workers.run(&|participant| {
            let mut operands = Operands::new(self.precision, participant as u64);
            let mut own = 0;
            while own == 0 || start.elapsed() < time {
                self.run(self.steps, &mut operands);
                own += self.steps;
            }
            black_box(&operands.sums);
            steps.fetch_add(own, Relaxed);
        })?;
        let seconds = start.elapsed().as_secs_f64().max(1e-9);
        Ok(self.ops as f64 * steps.into_inner() as f64 / seconds)
    }

    fn run(self, steps: u64, operands: &mut Operands) {
        // SAFETY: the features of `run` were detected when this was made.
        unsafe { (self.run)(steps, operands) }
    }
}

const PORTABLE_INT8: Products = Products {
    name: "portable int8",
    precision: Precision::Int8,
    ops: 2 * 1024,
    steps: 128,
    run: portable_int8,
};

const PORTABLE_F32: Products = Products {
    name: "portable f32",
    precision: Precision::Bf16,
    ops: 2 * 512,
    steps: 128,
    run: portable_f32,
};

/// A dot product of 1024 bytes as the compiler vectorises it for the target.
fn portable_int8(steps: u64, operands: &mut Operands) {
    let mut total = 0i32;
    for _ in 0..steps {
        let (a, b) = black_box((&operands.a, &operands.b));
        let product =
            |(&a, &b): (&u8, &u8)| i32::from(a.cast_signed()) * i32::from(b.cast_signed());
        let sum = a.iter().zip(b).map(product).fold(0, i32::wrapping_add);
        total = total.wrapping_add(sum);
    }
    operands.sums[..4].copy_from_slice(&total.to_ne_bytes());
}

/// A dot product of 512 bf16, in 16 sums as no compiler may reorder f32 additions.
fn portable_f32(steps: u64, operands: &mut Operands) {
    let f32_of = |pair: [u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(pair)) << 16);
    let mut sums = [0f32; 16];
    for _ in 0..steps {
        let (a, b) = black_box((&operands.a, &operands.b));
        let (a, b) = (a.as_chunks::<32>().0, b.as_chunks::<32>().0);
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a.as_chunks::<2>().0, b.as_chunks::<2>().0);
            for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
                *sum += f32_of(a) * f32_of(b);
            }
        }
    }
    for (bytes, sum) in operands.sums.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
        *bytes = sum.to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::SpinPool;

    fn words(bytes: &[u8; 1024]) -> Vec<i32> {
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|&word| i32::from_ne_bytes(word)).collect()
    }

    fn floats(bytes: &[u8; 1024]) -> Vec<f32> {
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|&word| f32::from_ne_bytes(word)).collect()
    }

    fn bf16(bytes: &[u8; 1024], index: usize) -> f32 {
        let pair = u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
        f32::from_bits(u32::from(pair) << 16)
    }

    /// What the first accumulator holds after one step, from the definition of the instruction.
    fn expected(name: &str, o: &Operands) -> Vec<f64> {
        let s8 = |byte: u8| f64::from(byte as i8);
        let u8s8 = |word: usize| {
            let products = (4 * word..4 * word + 4).map(|i| f64::from(o.a[i]) * s8(o.b[i]));
            products.sum::<f64>()
        };
        let pairs = |word: usize| {
            let products = (2 * word..2 * word + 2)
                .map(|i| f64::from(bf16(&o.a, i)) * f64::from(bf16(&o.b, i)));
            products.sum::<f64>()
        };
        let f32s = |word: usize| f64::from(floats(&o.a)[word]) * f64::from(floats(&o.b)[word]);
        let s16 = |bytes: &[u8; 1024], i: usize| {
            f64::from(i16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))
        };
        // Tiles: row r of a is 64 bytes of K, row k of b is a word of 16 columns.
        let tile = |product: &dyn Fn(usize, usize) -> f64, per_word: usize| {
            (0..256)
                .map(|i| {
                    let (row, column) = (i / 16, i % 16);
                    (0..16)
                        .flat_map(|word| (0..per_word).map(move |part| (word, part)))
                        .map(|(word, part)| {
                            product(
                                (row * 16 + word) * per_word + part,
                                (word * 16 + column) * per_word + part,
                            )
                        })
                        .sum::<f64>()
                })
                .collect()
        };
        match name {
            "portable int8" => vec![(0..1024).map(|i| s8(o.a[i]) * s8(o.b[i])).sum()],
            "portable f32" => (0..16)
                .map(|lane| {
                    (lane..512)
                        .step_by(16)
                        .map(|i| f64::from(bf16(&o.a, i)) * f64::from(bf16(&o.b, i)))
                        .sum()
                })
                .collect(),
            "vpmaddwd ymm" => (0..8)
                .map(|word| {
                    (0..2)
                        .map(|p| s16(&o.a, 2 * word + p) * s16(&o.b, 2 * word + p))
                        .sum()
                })
                .collect(),
            "vpdpbusd ymm" => (0..8).map(u8s8).collect(),
            "vpdpbusd zmm" => (0..16).map(u8s8).collect(),
            "vfmadd231ps ymm" => (0..8).map(f32s).collect(),
            "vfmadd231ps zmm" => (0..16).map(f32s).collect(),
            "vdpbf16ps zmm" => (0..16).map(pairs).collect(),
            "tdpbssd" => tile(&|a, b| s8(o.a[a]) * s8(o.b[b]), 4),
            "tdpbf16ps" => tile(
                &|a, b| f64::from(bf16(&o.a, a)) * f64::from(bf16(&o.b, b)),
                2,
            ),
            other => panic!("no reference for {other}"),
        }
    }

    /// The loops do what they are counted for: `n` steps add the products `n` times.
    #[test]
    fn every_loop_computes_its_products_as_often_as_it_says() {
        const STEPS: u64 = 3;
        for products in Products::available() {
            let mut operands = Operands::new(products.precision, 5);
            operands.sums.fill(0xff);
            products.run(STEPS, &mut operands);
            let expected = expected(products.name, &operands);
            for (i, expected) in expected.iter().map(|&once| once * STEPS as f64).enumerate() {
                let (found, bound) = match products.precision {
                    Precision::Int8 => (f64::from(words(&operands.sums)[i]), 0.0),
                    Precision::Bf16 => (f64::from(floats(&operands.sums)[i]), 1e-3),
                };
                // i32 sums wrap.
                let difference = (found - expected) % 2f64.powi(32);
                assert!(
                    difference.abs() <= bound,
                    "{products:?} {i}: {found}, {expected}"
                );
            }
        }
    }

    #[test]
    fn rates_are_positive_and_of_the_precision_asked_for() {
        let pool = SpinPool::new(2).expect("threads can be started");
        for precision in [Precision::Int8, Precision::Bf16] {
            let best = Products::best(precision);
            assert_eq!(best.precision(), precision);
            assert_eq!(
                Products::named(best.name()).map(Products::name),
                Some(best.name())
            );
            let rate = best
                .rate(&pool, Duration::from_millis(2), 2)
                .expect("two rounds");
            assert!(rate > 1e6 && rate.is_finite(), "{best:?}: {rate}");
        }
        assert!(Products::named("abacus").is_none());
        let none = Products::best(Precision::Int8).rate(&pool, Duration::ZERO, 0);
        assert_eq!(none, Err(CpuError::Zero { what: "rounds" }));
    }
}
