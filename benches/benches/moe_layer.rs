//! One expert layer on CPU and GPU: ms by tokens and by division, next to what the bytes allow.
//!
//! Input and output are bf16 in device memory, weights int8 with a scale a row; every call has
//! another routing. `floor` is the bytes of the experts used over the rates at which the CPU reads
//! them and the copy engine fetches them at the same time, measured here.
//!
//! `--shape E,H,I,k`, `--tokens 1,8,64`, `--seconds S` (a case), `--devices N` (logical ones).

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use asym_gemm::dispatch::{Adaptive, Model, Rates};
use asym_gemm::driver::{DeviceBuffer, Gpu, Stream};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::bank::{BankGeometry, Projection};
use asym_gemm::moe::division::{
    Divide, Division, ExpertLoad, ExpertShare, FixedPolicy, LayerShape,
};
use asym_gemm::moe::routing::Routing;
use asym_gemm::moe::{ExpertBank, LayerReport, MoeLayer};
use asym_gemm_cpu::{Engine, ExpertSource};
use half::bf16;

type Failure = Box<dyn std::error::Error>;

/// Routings that calls take in turn.
const ROUTINGS: usize = 16;

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Rows from one table of random values, each from a place of its own.
struct Table<'a> {
    values: &'a [f32],
    expert: usize,
}

impl ExpertSource for Table<'_> {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        let seed = (self.expert * 3 + projection as usize) * 1_000_003 + row * 7919;
        let start = seed % (self.values.len() - out.len());
        out.copy_from_slice(&self.values[start..][..out.len()]);
    }

    fn bias(&self, _: Projection) -> Option<&[f32]> {
        None
    }
}

/// Whole experts: the last `0.0` of all rows on the GPU.
struct WholeExperts(f64);

impl Divide for WholeExperts {
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
        let count = (loads.len() as f64 * self.0).round() as usize;
        let mut by_rows: Vec<usize> = (0..loads.len()).collect();
        by_rows.sort_by_key(|&i| std::cmp::Reverse(loads[i].rows));
        let mut cpu = vec![shape.slices; loads.len()];
        for &i in &by_rows[..count] {
            cpu[i] = 0;
        }
        let share = |(load, cpu): (&ExpertLoad, u32)| {
            ExpertShare::split(load.expert, 0..load.rows, cpu, shape.slices)
        };
        Division {
            shares: loads.iter().zip(cpu).map(share).collect(),
        }
    }
}

struct Options {
    shape: [usize; 4],
    tokens: Vec<usize>,
    seconds: f64,
    devices: usize,
}

impl Options {
    fn read() -> Result<Self, Failure> {
        let arguments: Vec<String> = std::env::args().collect();
        let value = |name: &str, default: &str| {
            let at = arguments.iter().position(|argument| argument == name);
            let given = at.and_then(|at| arguments.get(at + 1));
            given.cloned().unwrap_or_else(|| default.to_owned())
        };
        let list = |text: String| {
            let numbers = text.split(',').map(str::parse::<usize>);
            numbers.collect::<Result<Vec<_>, _>>()
        };
        let shape = list(value("--shape", "128,2048,768,8"))?;
        Ok(Self {
            shape: shape.try_into().map_err(|_| "--shape takes E,H,I,k")?,
            tokens: list(value("--tokens", "1,8,64,512,4096"))?,
            seconds: value("--seconds", "0.4").parse()?,
            devices: value("--devices", "1").parse()?,
        })
    }
}

/// Gives a layer its policy.
type SetPolicy = Box<dyn FnOnce(&MoeLayer)>;

fn routings(tokens: usize, experts: usize, top_k: usize) -> Vec<Routing> {
    let mut random = Random(7);
    let mut one = || {
        let mut ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            let start = ids.len();
            while ids.len() < start + top_k {
                let id = (random.next() % experts as u64) as i32;
                if !ids[start..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        Routing {
            top_k,
            weights: vec![1.0 / top_k as f32; ids.len()],
            ids,
        }
    };
    (0..ROUTINGS).map(|_| one()).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// GB/s of CPU reads and of copies to the device, alone and at the same time.
fn rates(gpu: &Gpu, bank: &ExpertBank, engine: &Engine) -> Result<[f64; 4], Failure> {
    let bytes = bank.bytes();
    let device = DeviceBuffer::<u8>::alloc(gpu, 256 << 20)?;
    let stream = Stream::new(gpu)?;
    let chunk = 32 << 20;
    let copy_all = |rounds: usize| -> Result<(), Failure> {
        for _ in 0..rounds {
            for (i, part) in bytes.chunks(chunk).enumerate() {
                // SAFETY: bank and buffer outlive the synchronise of this function.
                unsafe { device.copy_from_host_async(i % 8 * chunk, part, &stream)? };
            }
        }
        Ok(())
    };
    let read_all = || {
        let next = AtomicUsize::new(0);
        engine.workers().run(&|_| {
            let blocks: Vec<&[u8]> = bytes.chunks(1 << 20).collect();
            while let Some(block) = blocks.get(next.fetch_add(1, Relaxed)) {
                let sums = block.chunks_exact(64).fold([0u64; 8], |mut sums, line| {
                    for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                        *sum = sum.wrapping_add(u64::from_le_bytes(*word));
                    }
                    sums
                });
                black_box(sums);
            }
        })
    };
    let gigabytes = bytes.len() as f64 / 1e9;
    let seconds = |start: Instant| start.elapsed().as_secs_f64();
    read_all()?;
    let start = Instant::now();
    for _ in 0..4 {
        read_all()?;
    }
    let read_alone = 4.0 * gigabytes / seconds(start);
    let start = Instant::now();
    copy_all(4)?;
    stream.synchronize()?;
    let copy_alone = 4.0 * gigabytes / seconds(start);
    // Reads go on until the copies end.
    let start = Instant::now();
    copy_all(6)?;
    let mut rounds = 0.0;
    while !stream.is_idle()? {
        read_all()?;
        rounds += 1.0;
    }
    let together = seconds(start);
    Ok([
        read_alone,
        copy_alone,
        rounds * gigabytes / together,
        6.0 * gigabytes / together,
    ])
}

fn main() -> Result<(), Failure> {
    let options = Options::read()?;
    let [experts, hidden, intermediate, top_k] = options.shape;
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("skipped: {reason}");
            return Ok(());
        }
    };
    let geometry = BankGeometry {
        experts,
        hidden,
        intermediate,
        format: WeightFormat::Int8PerRow,
        bias: false,
    };
    let mut random = Random(1);
    let values: Vec<f32> = (0..1 << 20).map(|_| random.unit() * 0.05).collect();
    let table = |expert| Table {
        values: &values,
        expert,
    };
    let start = Instant::now();
    let bank = Arc::new(ExpertBank::pinned(&gpu, geometry, table, || {})?);
    let engine = Engine::detect()?;
    println!(
        "E={experts} H={hidden} I={intermediate} top {top_k}, int8: {} MB, packed in {:.1} s; {} threads, {}",
        geometry.bank_bytes() / 1_000_000,
        start.elapsed().as_secs_f64(),
        engine.workers().threads(),
        engine.kernel_name(geometry.format),
    );
    let [read, copy, read_both, copy_both] = rates(&gpu, &bank, &engine)?;
    println!(
        "GB/s: CPU reads {read:.1}, copies {copy:.1}; together {read_both:.1} + {copy_both:.1}"
    );
    let gpus = vec![gpu.clone(); options.devices];
    let layer = MoeLayer::builder(bank.clone())
        .devices(&gpus)
        .engine(engine)
        .build()?;
    // One model for all token counts, as layers in use share one.
    let model = Model::new(Rates {
        dram_gb_s: read,
        link_gb_s: copy,
        ..Rates::default()
    })?
    .shared();
    println!(
        "| T | division | ms | of floor | enqueued ms | CPU ms | CPU MB | copied MB | pieces |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for &tokens in &options.tokens {
        let routings = routings(tokens, experts, top_k);
        let x: Vec<bf16> = (0..tokens * hidden)
            .map(|_| bf16::from_f32(random.unit()))
            .collect();
        let x = DeviceBuffer::from_slice(&gpu, &x)?;
        let mut out = DeviceBuffer::<bf16>::zeroed(&gpu, tokens * hidden)?;
        let mut policies: Vec<(String, SetPolicy)> = vec![
            (
                "cpu-only".into(),
                Box::new(|l| l.set_policy(FixedPolicy::CpuOnly)),
            ),
            (
                "gpu-only".into(),
                Box::new(|l| l.set_policy(FixedPolicy::GpuOnly)),
            ),
        ];
        let fractions: &[f64] = match tokens {
            0..=2 => &[0.125, 0.2, 0.25, 0.34],
            3..=100 => &[0.2, 0.25, 0.3, 0.36],
            101..=1000 => &[0.35, 0.4, 0.45, 0.5],
            _ => &[0.8, 0.85, 0.9, 0.95],
        };
        for &f in fractions {
            let name = format!("slices {f}");
            policies.push((
                name,
                Box::new(move |l| l.set_policy(FixedPolicy::Fraction(f))),
            ));
        }
        if tokens > 4 {
            for &f in &fractions[1..] {
                let name = format!("experts {f}");
                policies.push((name, Box::new(move |l| l.set_policy(WholeExperts(f)))));
            }
        }
        let model = model.clone();
        policies.push((
            "adaptive".into(),
            Box::new(move |l| l.set_policy(Adaptive::new(model))),
        ));
        for (name, set) in policies {
            set(&layer);
            let mut reports: Vec<LayerReport> = Vec::new();
            let warm_up = if name == "adaptive" { 12 } else { 3 };
            for call in 0..warm_up {
                layer.forward(&x, &routings[call % ROUTINGS], &mut out)?;
            }
            let start = Instant::now();
            while reports.len() < 5 || start.elapsed().as_secs_f64() < options.seconds {
                let routing = &routings[reports.len() % ROUTINGS];
                reports.push(layer.forward(&x, routing, &mut out)?);
            }
            let of = |value: fn(&LayerReport) -> f64| median(reports.iter().map(value).collect());
            let bytes = of(|r| (r.cpu_bytes + r.streamed_bytes) as f64);
            let ms = of(|r| r.seconds * 1e3);
            let floor = bytes / ((read_both + copy_both) * 1e6);
            println!(
                "| {tokens} | {name} | {ms:.3} | {:.2} | {:.3} | {:.3} | {:.1} | {:.1} | {} |",
                ms / floor,
                of(|r| r.enqueue_seconds * 1e3),
                of(|r| r.cpu_seconds * 1e3),
                of(|r| r.cpu_bytes as f64 / 1e6),
                of(|r| r.streamed_bytes as f64 / 1e6),
                of(|r| r.pieces as f64),
            );
        }
    }
    Ok(())
}
