//! What the host pays: loading the kernels of an operand kind, and enqueuing a grouped GEMM.
//!
//! ```text
//! gpu_host [--csv FILE]
//! ```
//!
//! The first process after an update of the driver or of the kernels loads cold; with
//! `CUDA_CACHE_DISABLE=1` every one does.

use asym_gemm::driver::{DeviceBuffer, Gpu, PinnedBuffer, Stream};
use asym_gemm::formats::WeightFormat;
use asym_gemm::gemm::{
    Activations, DeviceMatrix, DeviceMatrixMut, GroupRange, GroupedGemm, Output, WeightMemory,
    Weights,
};
use asym_gemm::transfer::Transfer;
use half::bf16;
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

const FAMILIES: [&str; 7] = [
    "elementwise",
    "gemm-bf16",
    "gemm-s8-per-row",
    "gemm-s8-slices",
    "gemm-s8-blocks",
    "gemm-e4m3-per-row",
    "gemm-e4m3-blocks",
];
/// Timed calls; the median counts.
const CALLS: usize = 101;
const N: usize = 512;
const K: usize = 512;
const ROWS: usize = 8;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|w| w != "--bench")
        .collect();
    let csv = match &words[..] {
        [] => None,
        [name, file] if name == "--csv" => Some(file),
        _ => return Err("usage: gpu_host [--csv FILE]".into()),
    };
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let mut lines = vec!["what,experts,chunks,microseconds".to_owned()];
    for family in FAMILIES {
        let begin = Instant::now();
        gpu.module(family)?;
        let us = begin.elapsed().as_secs_f64() * 1e6;
        lines.push(format!("load {family},,,{us:.0}"));
    }
    for experts in [8, 64, 256] {
        for transfer in [Transfer::Resident, Transfer::Direct, Transfer::Staged] {
            let (chunks, us) = enqueue(&gpu, experts, transfer)?;
            lines.push(format!("enqueue {transfer},{experts},{chunks},{us:.1}"));
        }
    }
    let text = lines.join("\n") + "\n";
    print!("{text}");
    if let Some(file) = csv {
        std::fs::write(file, text)?;
    }
    Ok(())
}

/// Chunks and median microseconds of a call in bf16 that returns at once. Groups differ from
/// call to call, as a router's do.
fn enqueue(gpu: &Gpu, experts: usize, transfer: Transfer) -> Result<(usize, f64), Failure> {
    let stream = Stream::new(gpu)?;
    // Chunks of one expert, so that there are as many as experts.
    let ring = 3 * N * K * 2;
    let mut gemm = GroupedGemm::with_ring_bytes(gpu, ring);
    let bytes = experts * N * K * 2;
    let pinned = PinnedBuffer::alloc(gpu, bytes)?;
    let device = DeviceBuffer::<u8>::zeroed(gpu, bytes)?;
    let memory = match transfer {
        Transfer::Resident => WeightMemory::Device(&device),
        _ => WeightMemory::Pinned(&pinned),
    };
    let rows = experts * ROWS;
    let a = DeviceBuffer::<bf16>::zeroed(gpu, rows * K)?;
    let mut out = DeviceBuffer::<bf16>::zeroed(gpu, rows * N)?;
    let a = Activations::Bf16(DeviceMatrix::new(&a, rows, K, K)?);
    let b = Weights::new(memory, WeightFormat::Bf16, experts, N, K, None)?;
    let mut times = Vec::with_capacity(CALLS);
    let mut chunks = 0;
    // The first call compiles and allocates.
    for call in 0..=CALLS {
        let groups: Vec<GroupRange> = (0..experts)
            .map(|weight| GroupRange {
                weight,
                start: weight * ROWS,
                end: weight * ROWS + 1 + (weight + call) % ROWS,
            })
            .collect();
        let mut d = Output::Bf16(DeviceMatrixMut::new(&mut out, rows, N, N)?);
        let begin = Instant::now();
        // SAFETY: the operands outlive the wait below.
        let plan = unsafe { gemm.enqueue(&a, &b, &groups, &mut d, transfer, &stream)? };
        let us = begin.elapsed().as_secs_f64() * 1e6;
        stream.synchronize()?;
        chunks = plan.chunks;
        if call > 0 {
            times.push(us);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((chunks, times[CALLS / 2]))
}
