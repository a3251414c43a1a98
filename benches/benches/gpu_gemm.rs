//! Grouped GEMM on the GPU: staged, direct and resident weights against this machine's limits.
//!
//! Each case is verified first (sampled elements against f64), then timed: warm-up, then the
//! median of several measurements between events. Resident calls are enqueued ten at a
//! time, so that what is measured is the GPU and not the host. Limits come from the same
//! run. Data are random.
//!
//! ```text
//! gpu_gemm [--shape G,N,K].. [--m M,..] [--format NAME,..] [--transfer NAME,..] [--csv FILE]
//! ```

use asym_gemm::driver::{DeviceBuffer, DriverError, Event, Gpu, PinnedBuffer, Stream};
use asym_gemm::gemm::{
    Activations, DeviceMatrix, DeviceMatrixMut, GroupRange, GroupedGemm, MatrixFormat, Output,
    WeightMemory, Weights,
};
use asym_gemm::transfer::{LinkRates, Transfer, measure_link};
use asym_gemm_formats::e4m3;
use asym_gemm_testkit::generate::{Pattern, int8_codes, matrix};
use bytemuck::Pod;
use half::bf16;
use std::fmt::Write as _;

const FORMATS: [MatrixFormat; 5] = [
    MatrixFormat::Bf16,
    MatrixFormat::Int8PerRow,
    MatrixFormat::Int8Block128,
    MatrixFormat::Fp8PerRow,
    MatrixFormat::Fp8Block128,
];
const TRANSFERS: [Transfer; 3] = [Transfer::Staged, Transfer::Direct, Transfer::Resident];
/// Different rows of A, repeated: prime, so that every expert gets others.
const A_ROWS: usize = 1021;
/// K that shares a scale.
const BLOCK: usize = 128;

type Failure = Box<dyn std::error::Error>;

/// What to measure.
struct Options {
    shapes: Vec<[usize; 3]>,
    rows: Vec<usize>,
    formats: Vec<MatrixFormat>,
    transfers: Vec<Transfer>,
    csv: Option<String>,
}

impl Options {
    fn parse() -> Result<Self, Failure> {
        let mut options = Self {
            shapes: Vec::new(),
            rows: vec![1, 16, 64, 256, 1024, 4096],
            formats: FORMATS.to_vec(),
            transfers: TRANSFERS.to_vec(),
            csv: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            // cargo bench passes this one.
            if name == "--bench" {
                continue;
            }
            let value = arguments.next().ok_or(format!("{name} needs a value"))?;
            let words: Vec<&str> = value.split(',').collect();
            match name.as_str() {
                "--shape" => {
                    let numbers = numbers(&words)?;
                    options.shapes.push(
                        numbers
                            .try_into()
                            .map_err(|_| format!("{value} is not G,N,K"))?,
                    );
                }
                "--m" => options.rows = numbers(&words)?,
                "--format" => options.formats = named(&FORMATS, &words)?,
                "--transfer" => options.transfers = named(&TRANSFERS, &words)?,
                "--csv" => options.csv = Some(value),
                _ => return Err(format!("unknown argument {name}").into()),
            }
        }
        if options.shapes.is_empty() {
            options.shapes = vec![[32, 4096, 2048], [16, 4096, 7168]];
        }
        Ok(options)
    }
}

fn numbers(words: &[&str]) -> Result<Vec<usize>, Failure> {
    words.iter().map(|w| Ok(w.parse::<usize>()?)).collect()
}

/// Those of `all` whose names are in `words`.
fn named<T: Copy + ToString>(all: &[T], words: &[&str]) -> Result<Vec<T>, Failure> {
    let find = |word: &&str| {
        let one = all.iter().find(|x| x.to_string() == **word);
        one.copied().ok_or_else(|| format!("unknown {word}").into())
    };
    words.iter().map(find).collect()
}

fn main() -> Result<(), Failure> {
    let options = Options::parse()?;
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let link = measure_link(&gpu, 512 << 20)?;
    println!(
        "{}: copy engine {:.1} GB/s, SM reads {:.1}, HBM {:.0}; D in bf16, ms are medians",
        gpu.name(),
        link.copy_engine,
        link.sm_read,
        link.hbm_read
    );
    let mut record = String::from(
        "experts,n,k,format,m,transfer,ms,weight_gb_s,limit_gb_s,share,tflops,kernel\n",
    );
    for &shape in &options.shapes {
        let [experts, n, k] = shape;
        println!("\n{experts} experts, N = {n}, K = {k}");
        println!("| format | m | transfer | ms | weights GB/s | of limit | TFLOP/s | kernel |");
        println!("|---|---|---|---|---|---|---|---|");
        for &format in &options.formats {
            bench(&gpu, &link, &options, shape, format, &mut record)?;
        }
    }
    if let Some(path) = options.csv {
        std::fs::write(path, record)?;
    }
    Ok(())
}

/// Operands of one shape and format: one expert's weights, which all experts have (the bytes
/// still all move), and the different rows of A.
struct Data {
    format: MatrixFormat,
    n: usize,
    k: usize,
    a_bf16: Vec<bf16>,
    a_int8: Vec<i8>,
    a_fp8: Vec<u8>,
    a_scales: Vec<f32>,
    b_bytes: Vec<u8>,
    b_scales: Vec<f32>,
    /// Scales of a row of A.
    a_blocks: usize,
    /// Rows and columns of one expert's scales.
    b_scale_shape: (usize, usize),
}

impl Data {
    fn new(format: MatrixFormat, n: usize, k: usize) -> Self {
        let blocks = k.div_ceil(BLOCK);
        let (a_blocks, b_scale_shape) = match format {
            MatrixFormat::Bf16 => (0, (0, 0)),
            MatrixFormat::Int8PerRow | MatrixFormat::Fp8PerRow => (1, (n, 1)),
            MatrixFormat::Int8Block128 => (blocks, (n, blocks)),
            MatrixFormat::Fp8Block128 => (blocks, (n.div_ceil(BLOCK), blocks)),
        };
        // A few different rows of values are enough: everything is checked, and moves.
        let values = |seed, rows: usize| matrix(Pattern::Gaussian, seed, rows.min(131), k);
        let bytes = |seed, rows: usize| -> Vec<u8> {
            let some: Vec<u8> = match format {
                MatrixFormat::Bf16 => values(seed, rows)
                    .iter()
                    .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                    .collect(),
                MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => values(seed, rows)
                    .iter()
                    .map(|&x| e4m3::encode(x))
                    .collect(),
                _ => int8_codes(seed, rows.min(131) * k)
                    .iter()
                    .map(|&x| x as u8)
                    .collect(),
            };
            let len = rows * k * format.element_bytes();
            some.iter().copied().cycle().take(len).collect()
        };
        let scales = |seed, count: usize| -> Vec<f32> {
            let values = matrix(Pattern::Uniform, seed, 1, count);
            values.iter().map(|x| x.abs() * 0.01 + 1e-3).collect()
        };
        let a = bytes(1, A_ROWS);
        let (mut a_bf16, mut a_int8, mut a_fp8) = (vec![], vec![], vec![]);
        match format {
            MatrixFormat::Bf16 => {
                let pairs = a.chunks_exact(2);
                a_bf16 = pairs.map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
            }
            MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => a_fp8 = a,
            _ => a_int8 = a.iter().map(|&x| x as i8).collect(),
        }
        Self {
            format,
            n,
            k,
            a_bf16,
            a_int8,
            a_fp8,
            a_scales: scales(3, A_ROWS * a_blocks),
            b_bytes: bytes(2, n),
            b_scales: scales(4, b_scale_shape.0 * b_scale_shape.1),
            a_blocks,
            b_scale_shape,
        }
    }

    /// Element (row, column) of D, and the sum of its terms' magnitudes, in f64.
    fn element(&self, row: usize, column: usize) -> (f64, f64) {
        let row = row % A_ROWS;
        let (scale_rows, scale_columns) = self.b_scale_shape;
        let terms = (0..self.k).map(|k| {
            let at = column * self.k + k;
            if self.format == MatrixFormat::Bf16 {
                let b = bf16::from_le_bytes([self.b_bytes[at * 2], self.b_bytes[at * 2 + 1]]);
                return self.a_bf16[row * self.k + k].to_f64() * b.to_f64();
            }
            let a_block = if self.a_blocks == 1 { 0 } else { k / BLOCK };
            let b_block = if scale_columns == 1 { 0 } else { k / BLOCK };
            let b_row = if scale_rows == self.n {
                column
            } else {
                column / BLOCK
            };
            let product = match self.format {
                MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => {
                    f64::from(e4m3::decode(self.a_fp8[row * self.k + k]))
                        * f64::from(e4m3::decode(self.b_bytes[at]))
                }
                _ => f64::from(self.a_int8[row * self.k + k]) * f64::from(self.b_bytes[at] as i8),
            };
            product
                * f64::from(self.a_scales[row * self.a_blocks + a_block])
                * f64::from(self.b_scales[b_row * scale_columns + b_block])
        });
        terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()))
    }
}

/// `values`, repeated to `len` elements, on the device.
fn repeated<T: Pod>(gpu: &Gpu, values: &[T], len: usize) -> Result<DeviceBuffer<T>, DriverError> {
    let mut buffer = DeviceBuffer::alloc(gpu, len.max(1))?;
    let mut at = 0;
    while at < len {
        let part = &values[..values.len().min(len - at)];
        buffer.copy_from_host_at(at, part)?;
        at += part.len();
    }
    Ok(buffer)
}

fn bench(
    gpu: &Gpu,
    link: &LinkRates,
    options: &Options,
    [experts, n, k]: [usize; 3],
    format: MatrixFormat,
    record: &mut String,
) -> Result<(), Failure> {
    let data = Data::new(format, n, k);
    let most = experts * options.rows.iter().max().copied().unwrap_or(0);
    let weight_bytes = experts * data.b_bytes.len();
    let mut pinned = PinnedBuffer::alloc(gpu, weight_bytes)?;
    for copy in pinned.as_mut_slice()[..weight_bytes].chunks_exact_mut(data.b_bytes.len()) {
        copy.copy_from_slice(&data.b_bytes);
    }
    let device = repeated(gpu, &data.b_bytes, weight_bytes)?;
    let on_device = |there: bool| if there { most * k } else { 0 };
    let a_bf16 = repeated(gpu, &data.a_bf16, on_device(!data.a_bf16.is_empty()))?;
    let a_int8 = repeated(gpu, &data.a_int8, on_device(!data.a_int8.is_empty()))?;
    let a_fp8 = repeated(gpu, &data.a_fp8, on_device(!data.a_fp8.is_empty()))?;
    let a_scales = repeated(gpu, &data.a_scales, most * data.a_blocks)?;
    let (scale_rows, scale_columns) = data.b_scale_shape;
    let b_scales = repeated(gpu, &data.b_scales, experts * data.b_scales.len())?;
    let scales = match scale_columns {
        0 => None,
        _ => Some(DeviceMatrix::new(
            &b_scales,
            experts * scale_rows,
            scale_columns,
            scale_columns,
        )?),
    };
    let mut out = DeviceBuffer::<bf16>::alloc(gpu, most * n)?;
    let stream = Stream::new(gpu)?;
    let mut gemm = GroupedGemm::new(gpu);
    for &m in &options.rows {
        let rows = experts * m;
        let groups: Vec<GroupRange> = (0..experts)
            .map(|weight| GroupRange {
                weight,
                start: weight * m,
                end: (weight + 1) * m,
            })
            .collect();
        let a_scales = || DeviceMatrix::new(&a_scales, rows, data.a_blocks, data.a_blocks);
        let a = match format {
            MatrixFormat::Bf16 => Activations::Bf16(DeviceMatrix::new(&a_bf16, rows, k, k)?),
            MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => Activations::Fp8 {
                codes: DeviceMatrix::new(&a_fp8, rows, k, k)?,
                scales: a_scales()?,
            },
            _ => Activations::Int8 {
                codes: DeviceMatrix::new(&a_int8, rows, k, k)?,
                scales: a_scales()?,
            },
        };
        for &transfer in &options.transfers {
            let memory = match transfer {
                Transfer::Resident => WeightMemory::Device(&device),
                _ => WeightMemory::Pinned(&pinned),
            };
            let b = Weights::new(memory, format, experts, n, k, scales)?;
            out.fill_bytes(0xff)?;
            let (calls, rounds) = match transfer {
                Transfer::Resident => (10, 7),
                _ => (1, 5),
            };
            let mut ms = Vec::new();
            let mut kernel = "";
            for round in 0..rounds + 1 {
                let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
                start.record(&stream)?;
                for _ in 0..calls {
                    let mut d = Output::Bf16(DeviceMatrixMut::new(&mut out, rows, n, n)?);
                    // SAFETY: operands outlive the synchronisation below.
                    let plan = unsafe { gemm.enqueue(&a, &b, &groups, &mut d, transfer, &stream)? };
                    kernel = plan.kernel;
                }
                end.record(&stream)?;
                stream.synchronize()?;
                if round > 0 {
                    ms.push(f64::from(end.elapsed_ms(&start)?) / f64::from(calls));
                }
            }
            verify(&data, rows, &out)?;
            ms.sort_by(f64::total_cmp);
            let median = ms[ms.len() / 2];
            let rate = weight_bytes as f64 / median / 1e6;
            let limit = match transfer {
                Transfer::Staged => link.copy_engine,
                Transfer::Direct => link.sm_read,
                _ => link.hbm_read,
            };
            let tflops = 2.0 * (rows * n * k) as f64 / median / 1e9;
            println!(
                "| {format} | {m} | {transfer} | {median:.4} | {rate:.1} | {:.1} % | {tflops:.0} | {kernel} |",
                100.0 * rate / limit
            );
            writeln!(
                record,
                "{experts},{n},{k},{format},{m},{transfer},{median:.4},{rate:.2},{limit:.2},{:.4},{tflops:.1},{kernel}",
                rate / limit
            )?;
        }
    }
    Ok(())
}

/// Compares a sample of D, spread over all experts and tiles, with f64.
fn verify(data: &Data, rows: usize, out: &DeviceBuffer<bf16>) -> Result<(), Failure> {
    let n = data.n;
    for i in 0..100 {
        let (row, column) = ((i * 7919 + i * i * 31) % rows, (i * 104_729 + i * 17) % n);
        let (want, size) = data.element(row, column);
        let mut got = [bf16::NAN];
        out.copy_to_host_at(row * n + column, &mut got)?;
        let got = got[0].to_f64();
        // Rounding to bf16, and the sum's own error: fp8 products add up with 13 bits.
        let within = (got - want).abs() <= want.abs() * 0.004 + size * 2f64.powi(-11); // false for NaN
        if !within {
            let format = data.format;
            return Err(format!("{format} [{row}, {column}]: {got}, expected {want}").into());
        }
    }
    Ok(())
}
