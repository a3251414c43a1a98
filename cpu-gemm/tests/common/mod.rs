//! Seeded inputs, an independent reference of the expert feed-forward, and comparison.
#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::OnceLock;

use asym_gemm_cpu::{BankRef, CpuError, Engine, ExpertSource, Features, pack_expert};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, Projection};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub(crate) const FORMATS: [WeightFormat; 6] = WeightFormat::ALL;
pub(crate) const CLAMPED: Activation = Activation::ClampedSwiGlu {
    limit: 7.0,
    alpha: 1.702,
};

/// Every kernel that this processor can run, each once.
pub(crate) fn engines() -> Vec<Engine> {
    let avx2 = Features::AVX2;
    let avx512 = Features::AVX512F
        .and(Features::AVX512BW)
        .and(Features::AVX512VNNI);
    let masks = [
        Features::NONE,
        avx2,
        avx2.and(Features::AVXVNNI),
        avx512,
        avx512.and(Features::AVX512BF16),
        Features::ALL,
    ];
    let mut engines = vec![Engine::emulating_amx().unwrap()];
    for mask in masks {
        let engine = Engine::with_features(mask).unwrap();
        let names = |e: &Engine| FORMATS.map(|format| e.kernel_name(format));
        if engines.iter().all(|e| names(e) != names(&engine)) {
            engines.push(engine);
        }
    }
    if engines.len() <= masks.len() {
        println!(
            "skipped: this processor runs {} of {} kernels",
            engines.len() - 1,
            masks.len()
        );
    }
    engines
}

/// Whether a kernel adds bf16 products in the order of the portable one.
pub(crate) fn has_portable_order(kernel: &str) -> bool {
    !kernel.starts_with("amx") && !kernel.contains("_dot_")
}

pub(crate) fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

pub(crate) fn uniform(rng: &mut ChaCha8Rng, len: usize, scale: f32) -> Vec<f32> {
    (0..len)
        .map(|_| rng.random_range(-1.0f32..1.0) * scale)
        .collect()
}

/// f32 weights of one expert.
pub(crate) struct Expert {
    pub(crate) geometry: BankGeometry,
    pub(crate) weights: [Vec<f32>; 3],
    pub(crate) bias: [Vec<f32>; 3],
    /// What the float formats store, computed at the first use.
    stored: OnceLock<[Vec<f64>; 3]>,
}

impl Expert {
    pub(crate) fn random(geometry: BankGeometry, rng: &mut ChaCha8Rng) -> Self {
        let (h, i) = (geometry.hidden, geometry.intermediate);
        let scale = 2.0 / (h as f32).sqrt();
        Self {
            geometry,
            weights: [
                uniform(rng, h * i, scale),
                uniform(rng, h * i, scale),
                uniform(rng, h * i, 2.0 / (i as f32).sqrt()),
            ],
            bias: [
                uniform(rng, i, 0.5),
                uniform(rng, i, 0.5),
                uniform(rng, h, 0.5),
            ],
            stored: OnceLock::new(),
        }
    }

    pub(crate) fn k(&self, p: usize) -> usize {
        if p == 2 {
            self.geometry.intermediate
        } else {
            self.geometry.hidden
        }
    }

    fn row(&self, p: usize, row: usize) -> &[f32] {
        &self.weights[p][row * self.k(p)..][..self.k(p)]
    }

    fn bias(&self, p: usize, row: usize) -> Option<f32> {
        self.geometry.bias.then(|| self.bias[p][row])
    }
}

impl ExpertSource for Expert {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        out.copy_from_slice(self.row(projection as usize, row));
    }

    fn bias(&self, projection: Projection) -> Option<&[f32]> {
        Some(&self.bias[projection as usize])
    }
}

/// A bank with the weights it was made of.
pub(crate) struct Bank {
    pub(crate) geometry: BankGeometry,
    pub(crate) bytes: Vec<u8>,
    pub(crate) experts: Vec<Expert>,
}

impl Bank {
    pub(crate) fn random(geometry: BankGeometry, seed: u64) -> Self {
        let mut rng = rng(seed);
        let experts: Vec<_> = (0..geometry.experts)
            .map(|_| Expert::random(geometry, &mut rng))
            .collect();
        let mut bytes = vec![0xa5; geometry.bank_bytes()];
        for (bytes, expert) in bytes.chunks_mut(geometry.expert_bytes()).zip(&experts) {
            pack_expert(geometry, bytes, expert).unwrap();
        }
        Self {
            geometry,
            bytes,
            experts,
        }
    }

    pub(crate) fn view(&self) -> BankRef<'_> {
        BankRef::new(self.geometry, &self.bytes).unwrap()
    }
}

pub(crate) fn geometry(
    experts: usize,
    hidden: usize,
    intermediate: usize,
    format: WeightFormat,
    bias: bool,
) -> BankGeometry {
    BankGeometry {
        experts,
        hidden,
        intermediate,
        format,
        bias,
    }
}

/// One scale and the codes of it, by the formulas.
fn quantise(x: &[f32], block_recipe: bool) -> (f32, Vec<i64>) {
    let mut amax = 0f32;
    for x in x {
        if x.abs() > amax || x.is_nan() {
            amax = x.abs();
        }
        if amax.is_nan() {
            break;
        }
    }
    let scale = if amax.is_nan() {
        amax
    } else if block_recipe {
        amax.max(1e-4) / 127.0
    } else {
        (amax / 127.0).max(1e-12)
    };
    let inv = 1.0 / scale;
    let code = |&x: &f32| (x * inv).clamp(-127.0, 127.0).round_ties_even() as i64;
    (scale, x.iter().map(code).collect())
}

fn dot(a: &[i64], b: &[i64]) -> f32 {
    let sum: i64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
    sum as f32
}

/// The int8 feed-forward of one token, exactly as the numerics are defined.
fn ffn_int8(e: &Expert, activation: Activation, x: &[f32], block: bool) -> Vec<f32> {
    let span = if block { 128 } else { x.len() };
    let x: Vec<_> = x.chunks(span).map(|x| quantise(x, block)).collect();
    let project = |p: usize, row: usize| {
        let mut sum = 0f32;
        for ((sx, x), w) in x.iter().zip(e.row(p, row).chunks(span)) {
            let (sw, w) = quantise(w, block);
            if block {
                sum = dot(x, &w).mul_add(sx * sw, sum);
            } else {
                sum = dot(x, &w) * (sx * sw);
            }
        }
        match e.bias(p, row) {
            Some(bias) => sum + bias,
            None => sum,
        }
    };
    let h: Vec<f32> = (0..e.geometry.intermediate)
        .map(|i| activation.apply(project(0, i), project(1, i)))
        .collect();
    let h: Vec<_> = h.chunks(128).map(|h| quantise(h, false)).collect();
    (0..e.geometry.hidden)
        .map(|row| {
            let w = e.row(2, row);
            let (whole, codes) = quantise(w, false);
            let mut y = 0f32;
            for (s, (sh, h)) in h.iter().enumerate() {
                let part = s * 128..w.len().min(s * 128 + 128);
                if block {
                    let (sw, w) = quantise(&w[part], true);
                    y = dot(h, &w).mul_add(sh * sw, y);
                } else {
                    y = dot(h, &codes[part]).mul_add(*sh, y);
                }
            }
            if !block {
                y *= whole;
            }
            match e.bias(2, row) {
                Some(bias) => y + bias,
                None => y,
            }
        })
        .collect()
}

fn round_bf16(x: f32) -> f64 {
    f64::from(bf16::from_f32(x).to_f32())
}

/// `x` rounded to e4m3, by the definition of the format.
fn round_e4m3(x: f32) -> f64 {
    let x = f64::from(x);
    // Spacing 2^-3 relative, 2^-9 below the smallest normal value 2^-6.
    let exponent = x.abs().log2().floor().max(-6.0);
    let step = 2f64.powf(exponent - 3.0);
    (x / step)
        .round_ties_even()
        .clamp(-448.0 / step, 448.0 / step)
        * step
}

/// `x` rounded to e2m1, by the definition of the format.
fn round_e2m1(x: f32) -> f64 {
    let x = f64::from(x);
    // Spacing 2^-1 relative, 0.5 below the smallest normal value 1.
    let exponent = x.abs().log2().floor().max(0.0);
    let step = 2f64.powf(exponent - 1.0);
    ((x / step).round_ties_even() * step).clamp(-6.0, 6.0)
}

/// fp4 of `groups` of `group` columns; `scale_of` is the scale of a largest magnitude.
fn stored_fp4(weights: &[f32], k: usize, group: usize, scale_of: impl Fn(f32) -> f64) -> Vec<f64> {
    let rows = weights.chunks(k).flat_map(|row| row.chunks(group));
    rows.flat_map(|w| {
        let scale = scale_of(w.iter().fold(0f32, |m, w| m.max(w.abs())));
        let code = move |&w: &f32| round_e2m1((f64::from(w) / scale) as f32) * scale;
        w.iter().map(code).collect::<Vec<_>>()
    })
    .collect()
}

/// A projection's weights as the float formats store them.
fn stored(e: &Expert, p: usize) -> Vec<f64> {
    let (weights, k) = (&e.weights[p], e.k(p));
    match e.geometry.format {
        WeightFormat::Bf16 => return weights.iter().map(|&w| round_bf16(w)).collect(),
        WeightFormat::Nvfp4 => {
            let amax = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
            let global = f64::from(amax / (448.0 * 6.0));
            let scale = |amax: f32| round_e4m3((f64::from(amax) / 6.0 / global) as f32) * global;
            return stored_fp4(weights, k, 16, scale);
        }
        WeightFormat::Mxfp4 => {
            let scale = |amax: f32| 2f64.powf((f64::from(amax) / 6.0).log2().ceil());
            return stored_fp4(weights, k, 32, scale);
        }
        _ => {}
    }
    let blocks = k.div_ceil(128);
    let block = |i: usize| i / k / 128 * blocks + i % k / 128;
    let mut amax = vec![0f32; (weights.len() / k).div_ceil(128) * blocks];
    for (i, w) in weights.iter().enumerate() {
        amax[block(i)] = amax[block(i)].max(w.abs());
    }
    let value = |(i, w): (usize, &f32)| {
        let scale = (amax[block(i)] / 448.0).max(1e-12);
        round_e4m3(w * (1.0 / scale)) * f64::from(scale)
    };
    weights.iter().enumerate().map(value).collect()
}

/// (K/16 + 2) 2^-22: what f32 sums of K bf16 products may be off, by the sum of magnitudes.
pub(crate) fn sum_bound(k: usize, magnitudes: f64) -> f64 {
    (k as f64 / 16.0 + 2.0) * 2f64.powi(-22) * magnitudes
}

/// The bf16 or fp8 feed-forward of one token in f64 over rounded operands; the second value bounds
/// the error of each element: that of down's sum, and |w| times what h may be off.
///
/// fp8 has the bound of the bf16 sums: the scales are applied to sums of 128 by fused multiply-adds,
/// each one rounding, which is less than the bound allows for 128 products.
fn ffn_float(e: &Expert, activation: Activation, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let weights = e.stored.get_or_init(|| [0, 1, 2].map(|p| stored(e, p)));
    let row = |p: usize, n: usize| &weights[p][n * e.k(p)..][..e.k(p)];
    let x: Vec<f64> = x.iter().map(|&x| round_bf16(x)).collect();
    let project = |p: usize, n: usize| {
        let (mut sum, mut magnitude) = (0f64, 0f64);
        for (x, w) in x.iter().zip(row(p, n)) {
            sum += x * w;
            magnitude += (x * w).abs();
        }
        let bias = f64::from(e.bias(p, n).unwrap_or(0.0));
        (sum + bias, sum_bound(x.len(), magnitude + bias.abs()))
    };
    // The slope of either activation in gate and in up is at most 1.1 times the other plus 1.
    let h: Vec<(f64, f64)> = (0..e.geometry.intermediate)
        .map(|i| {
            let ((g, g_off), (u, u_off)) = (project(0, i), project(1, i));
            let h = activate_f64(activation, g, u);
            let off = 1.1 * ((u.abs() + 1.0) * g_off + (g.abs() + 1.0) * u_off);
            // h is rounded to bf16: half an ulp, 2^-8 relative; f32 activation 2^-20.
            (h, off + h.abs() * (2f64.powi(-8) + 2f64.powi(-20)) + 1e-30)
        })
        .collect();
    let mut y = Vec::new();
    let mut bound = Vec::new();
    for n in 0..e.geometry.hidden {
        let (mut sum, mut magnitude, mut off) = (0f64, 0f64, 0f64);
        for ((h, h_off), w) in h.iter().zip(row(2, n)) {
            sum += h * w;
            magnitude += (h * w).abs();
            off += w.abs() * h_off;
        }
        let bias = f64::from(e.bias(2, n).unwrap_or(0.0));
        y.push(sum + bias);
        bound.push(off + sum_bound(h.len(), magnitude + bias.abs()));
    }
    (y, bound)
}

fn activate_f64(activation: Activation, g: f64, u: f64) -> f64 {
    match activation {
        Activation::SwiGlu => g / (1.0 + (-g).exp()) * u,
        Activation::ClampedSwiGlu { limit, alpha } => {
            let (limit, alpha) = (f64::from(limit), f64::from(alpha));
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            (u + 1.0) * g / (1.0 + (-alpha * g).exp())
        }
    }
}

/// Compares one row of y with the reference: bit for bit for int8, within the bound for the
/// float formats.
pub(crate) fn check_row(what: &str, e: &Expert, activation: Activation, x: &[f32], y: &[f32]) {
    match e.geometry.format {
        WeightFormat::Bf16
        | WeightFormat::Fp8Block128
        | WeightFormat::Nvfp4
        | WeightFormat::Mxfp4 => {
            let (want, bound) = ffn_float(e, activation, x);
            for (i, &got) in y.iter().enumerate() {
                let error = (f64::from(got) - want[i]).abs();
                assert!(
                    error <= bound[i],
                    "{what}, column {i}: {got} for {} (off {error:e}, bound {:e})",
                    want[i],
                    bound[i]
                );
            }
        }
        format => {
            let block = format == WeightFormat::Int8Block128;
            let want = ffn_int8(e, activation, x, block);
            assert_same(what, y, &want);
        }
    }
}

/// Equal bits, but any NaN equals any other.
pub(crate) fn assert_same(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
            "{what}, element {i}: {got:e} ({:#010x}) for {want:e} ({:#010x})",
            got.to_bits(),
            want.to_bits()
        );
    }
}

pub(crate) fn expect_error<T: std::fmt::Debug>(result: Result<T, CpuError>, want: CpuError) {
    assert_eq!(result.unwrap_err(), want);
}
