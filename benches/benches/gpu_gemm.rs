//! Grouped GEMM on the GPU: staged, direct and resident weights against this machine's limits.
//!
//! Each case is verified first (sampled elements against f64), then timed: warm-up, then
//! single synchronised calls between events, median. Limits come from the same run. Data
//! are random. `--csv FILE` writes the table as a record.

use asym_gemm::driver::{DeviceBuffer, Event, Gpu, PinnedBuffer, Stream};
use asym_gemm::formats::{WeightFormat, int8};
use asym_gemm::gemm::{
    Activations, DeviceMatrix, DeviceMatrixMut, GroupRange, GroupedGemm, Output, WeightMemory,
    Weights,
};
use asym_gemm::transfer::{LinkRates, Transfer, measure_link};
use asym_gemm_testkit::generate::{Pattern, int8_codes, matrix};
use half::bf16;
use std::fmt::Write as _;

const EXPERTS: usize = 32;
const N: usize = 4096;
const K: usize = 2048;
const ROWS: [usize; 2] = [64, 1024];
const CALLS: usize = 15;
/// Direct reads fetch a weight once for each row tile: fewer calls where that is slow.
const SLOW_CALLS: usize = 5;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let csv = arguments
        .iter()
        .position(|a| a == "--csv")
        .and_then(|i| arguments.get(i + 1));
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let link = measure_link(&gpu, 512 << 20)?;
    println!(
        "{}: copy engine {:.1} GB/s, SM reads {:.1}, HBM {:.0}",
        gpu.name(),
        link.copy_engine,
        link.sm_read,
        link.hbm_read
    );
    println!("{EXPERTS} experts, N = {N}, K = {K}, D in bf16; ms are medians of single calls");
    println!("| format | m | transfer | ms | weights GB/s | of limit | TFLOP/s | kernel |");
    println!("|---|---|---|---|---|---|---|---|");
    let mut record =
        String::from("format,m,transfer,ms,weight_gb_s,limit_gb_s,share,tflops,kernel\n");
    for format in [
        WeightFormat::Bf16,
        WeightFormat::Int8PerRow,
        WeightFormat::Int8Block128,
    ] {
        for m in ROWS {
            bench(&gpu, &link, format, m, &mut record)?;
        }
    }
    if let Some(path) = csv {
        std::fs::write(path, record)?;
    }
    Ok(())
}

/// Operands of one case.
struct Data {
    a_bf16: Vec<bf16>,
    a_codes: Vec<i8>,
    a_scales: Vec<f32>,
    weights: Vec<u8>,
    b_scales: Vec<f32>,
    blocks: usize,
}

impl Data {
    fn new(format: WeightFormat, m: usize) -> Self {
        let rows = EXPERTS * m;
        let blocks = match format {
            WeightFormat::Bf16 => 0,
            WeightFormat::Int8PerRow => 1,
            WeightFormat::Int8Block128 | WeightFormat::Fp8Block128 => K.div_ceil(int8::BLOCK),
        };
        // One expert's values repeat for the others: the bytes still all cross the link.
        let codes = int8_codes(3, N * K);
        let one: Vec<u8> = match format {
            WeightFormat::Bf16 => {
                let values = matrix(Pattern::Gaussian, 2, N, K);
                values
                    .iter()
                    .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                    .collect()
            }
            _ => codes.iter().map(|&c| c as u8).collect(),
        };
        let scales = |count: usize| {
            matrix(Pattern::Uniform, 4, 1, count)
                .iter()
                .map(|x| x.abs() * 0.01 + 1e-3)
                .collect()
        };
        Self {
            a_bf16: matrix(Pattern::Gaussian, 1, rows, K)
                .iter()
                .map(|&x| bf16::from_f32(x))
                .collect(),
            a_codes: int8_codes(5, rows * K),
            a_scales: scales(rows * blocks.max(1)),
            weights: one.repeat(EXPERTS),
            b_scales: scales(EXPERTS * N * blocks.max(1)),
            blocks,
        }
    }

    /// Element (row, column) of D in f64.
    fn element(&self, format: WeightFormat, m: usize, row: usize, column: usize) -> f64 {
        let weight = row / m * N + column;
        (0..K)
            .map(|k| match format {
                WeightFormat::Bf16 => {
                    let at = (weight * K + k) * 2;
                    let b = bf16::from_le_bytes([self.weights[at], self.weights[at + 1]]);
                    self.a_bf16[row * K + k].to_f64() * b.to_f64()
                }
                _ => {
                    let block = if self.blocks == 1 { 0 } else { k / int8::BLOCK };
                    let scale = f64::from(self.a_scales[row * self.blocks + block])
                        * f64::from(self.b_scales[weight * self.blocks + block]);
                    let b = self.weights[weight * K + k] as i8;
                    f64::from(self.a_codes[row * K + k]) * f64::from(b) * scale
                }
            })
            .sum()
    }
}

fn bench(
    gpu: &Gpu,
    link: &LinkRates,
    format: WeightFormat,
    m: usize,
    record: &mut String,
) -> Result<(), Failure> {
    let data = Data::new(format, m);
    let rows = EXPERTS * m;
    let groups: Vec<GroupRange> = (0..EXPERTS)
        .map(|weight| GroupRange {
            weight,
            start: weight * m,
            end: (weight + 1) * m,
        })
        .collect();
    let mut pinned = PinnedBuffer::alloc(gpu, data.weights.len())?;
    pinned.as_mut_slice()[..data.weights.len()].copy_from_slice(&data.weights);
    let device = DeviceBuffer::from_slice(gpu, &data.weights)?;
    let a_bf16 = DeviceBuffer::from_slice(gpu, &data.a_bf16)?;
    let a_codes = DeviceBuffer::from_slice(gpu, &data.a_codes)?;
    let a_scales = DeviceBuffer::from_slice(gpu, &data.a_scales)?;
    let b_scales = DeviceBuffer::from_slice(gpu, &data.b_scales)?;
    let mut out = DeviceBuffer::<bf16>::alloc(gpu, rows * N)?;
    let blocks = data.blocks;
    let a = match format {
        WeightFormat::Bf16 => Activations::Bf16(DeviceMatrix::new(&a_bf16, rows, K, K)?),
        _ => Activations::Int8 {
            codes: DeviceMatrix::new(&a_codes, rows, K, K)?,
            scales: DeviceMatrix::new(&a_scales, rows, blocks, blocks)?,
        },
    };
    let scales = match blocks {
        0 => None,
        _ => Some(DeviceMatrix::new(&b_scales, EXPERTS * N, blocks, blocks)?),
    };
    let stream = Stream::new(gpu)?;
    for transfer in [Transfer::Staged, Transfer::Direct, Transfer::Resident] {
        let memory = match transfer {
            Transfer::Resident => WeightMemory::Device(&device),
            _ => WeightMemory::Pinned(&pinned),
        };
        let b = Weights::new(memory, format, EXPERTS, N, K, scales)?;
        let mut gemm = GroupedGemm::new(gpu);
        out.fill_bytes(0xff)?;
        let mut ms = Vec::new();
        let mut kernel = "";
        let calls = if transfer == Transfer::Direct && m > 128 {
            SLOW_CALLS
        } else {
            CALLS
        };
        for call in 0..calls + 2 {
            let mut d = Output::Bf16(DeviceMatrixMut::new(&mut out, rows, N, N)?);
            let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
            start.record(&stream)?;
            // SAFETY: operands outlive the synchronisation below; the stream is of this GPU.
            let plan = unsafe { gemm.enqueue(&a, &b, &groups, &mut d, transfer, &stream)? };
            end.record(&stream)?;
            stream.synchronize()?;
            kernel = plan.kernel;
            if call >= 2 {
                ms.push(f64::from(end.elapsed_ms(&start)?));
            }
        }
        verify(&data, format, m, &out.to_vec()?)?;
        ms.sort_by(f64::total_cmp);
        let median = ms[ms.len() / 2];
        let rate = data.weights.len() as f64 / median / 1e6;
        let limit = match transfer {
            Transfer::Staged => link.copy_engine,
            Transfer::Direct => link.sm_read,
            _ => link.hbm_read,
        };
        let tflops = 2.0 * (rows * N * K) as f64 / median / 1e9;
        println!(
            "| {format} | {m} | {transfer} | {median:.3} | {rate:.1} | {:.1} % | {tflops:.0} | {kernel} |",
            100.0 * rate / limit
        );
        writeln!(
            record,
            "{format},{m},{transfer},{median:.4},{rate:.2},{limit:.2},{:.4},{tflops:.1},{kernel}",
            rate / limit
        )?;
    }
    Ok(())
}

/// Compares a sample of D, spread over all experts and tiles, with f64.
fn verify(data: &Data, format: WeightFormat, m: usize, out: &[bf16]) -> Result<(), Failure> {
    let rows = EXPERTS * m;
    for i in 0..400 {
        let (row, column) = ((i * 7919 + i * i * 31) % rows, (i * 104_729 + i * 17) % N);
        let want = data.element(format, m, row, column);
        let got = out[row * N + column].to_f64();
        // Products of 2048 terms of either sign: rounding to bf16 dominates.
        let bound = want.abs() * 0.004 + 2e-3 * (K as f64).sqrt();
        let within = (got - want).abs() <= bound; // false for NaN
        if !within {
            return Err(format!("{format} m={m} [{row}, {column}]: {got}, expected {want}").into());
        }
    }
    Ok(())
}
