//! A product on a context and a stream that another library made: here the `cust` crate, whose
//! handles are the driver's own, as those of any other binding are.
//!
//! `cargo run --example embed_in_your_engine`

use asym_gemm::driver::{DeviceBuffer, Gpu, Stream, probe};
use asym_gemm::gemm::{Extent, Gemm, GpuGemm, GpuProblem, OnGpu, RowMajor};
use half::bf16;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let found = probe();
    if found.missing.is_some() || found.device_files == 0 {
        println!("no GPU here: {found:?}");
        return Ok(());
    }
    // The engine's own context and stream.
    cust::init(cust::CudaFlags::empty())?;
    let context = cust::context::Context::new(cust::device::Device::get_device(0)?)?;
    let engine_stream = cust::stream::Stream::new(cust::stream::StreamFlags::NON_BLOCKING, None)?;

    // SAFETY: both live until the end of main.
    let (gpu, stream) = unsafe {
        let gpu = Gpu::from_raw_context(context.as_raw().cast())?;
        let stream = Stream::from_raw(&gpu, engine_stream.as_inner().cast());
        (gpu, stream)
    };
    let (m, n, k) = (33, 65, 128);
    let a = DeviceBuffer::from_slice(&gpu, &vec![bf16::from_f32(0.5); m * k])?;
    let b = DeviceBuffer::from_slice(&gpu, &vec![bf16::from_f32(2.0); n * k])?;
    let mut d = DeviceBuffer::from_slice(&gpu, &vec![f32::NAN; m * n])?;
    let packed = |rows, cols| Extent {
        rows,
        cols,
        ld: cols,
    };
    let problem = GpuProblem::<_, _, RowMajor, RowMajor, RowMajor>::new(
        OnGpu::device(&gpu, &a, 0, packed(m, k))?,
        OnGpu::device(&gpu, &b, 0, packed(n, k))?,
        OnGpu::device_mut(&gpu, &mut d, 0, packed(m, n))?,
    );
    let kernel = GpuGemm::new(&gpu).single(&Gemm::nt(m, n, k), problem, &stream)?;
    let d = d.to_vec()?;
    println!("{kernel}: d[0] = {}", d[0]);
    assert!(d.iter().all(|&d| d == k as f32));
    Ok(())
}
