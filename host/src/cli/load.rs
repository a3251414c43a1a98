//! From arguments to an MoE block that is ready to run.

use super::{Failure, TransferArgument};
use asym_gemm::checkpoint::{Checkpoint, MoeLayer};
use asym_gemm::cpu::Engine;
use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::{Backend, MoeBlock};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;
use std::time::Duration;

/// Why no GPU can be used, or `None` if one can.
pub(super) fn gpu_reason() -> Option<String> {
    #[cfg(feature = "cuda")]
    {
        let usable = || {
            use asym_gemm_kernels_gpu::{elementwise, gemm::Operands};
            let gpu = asym_gemm::driver::Gpu::open(0)?;
            for operands in Operands::ALL {
                gpu.check_module(operands.family())?;
            }
            // The smallest one shows that the driver compiles; the others take a second.
            gpu.module(elementwise::FAMILY)
        };
        usable().err().map(|error| error.to_string())
    }
    #[cfg(not(feature = "cuda"))]
    Some("built without the cuda feature".into())
}

/// A progress bar on standard error that hides where nobody watches.
fn progress(length: usize, message: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(length as u64).with_message(message);
    match ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Reads one layer of a checkpoint, with a sign of life on standard error.
pub(super) fn layer(
    folder: &Path,
    number: usize,
    zero_nan_blocks: bool,
) -> Result<MoeLayer, Failure> {
    let spinner = ProgressBar::new_spinner().with_message("reading the layer");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let mut checkpoint = Checkpoint::open(folder)?;
    if zero_nan_blocks {
        checkpoint = checkpoint.with_zero_nan_blocks();
    }
    let layer = checkpoint.moe_layer(number)?;
    spinner.finish_and_clear();
    Ok(layer)
}

/// Packs the layer's weights for the back ends in `backends`.
pub(super) fn block(
    layer: &MoeLayer,
    format: WeightFormat,
    backends: &[Backend],
    transfer: TransferArgument,
    ring_bytes: Option<usize>,
) -> Result<MoeBlock, Failure> {
    let cpu = Engine::detect()?;
    let experts = layer.spec.experts + usize::from(layer.spec.shared.is_some());
    let bar = progress(experts, "packing experts");
    let packed = || bar.inc(1);
    let block = if backends.iter().all(|&backend| backend == Backend::Cpu) {
        MoeBlock::for_cpu(layer, format, cpu, packed)?
    } else {
        with_gpu(layer, format, cpu, transfer, ring_bytes, packed)?
    };
    bar.finish_and_clear();
    Ok(block)
}

#[cfg(feature = "cuda")]
fn with_gpu(
    layer: &MoeLayer,
    format: WeightFormat,
    cpu: Engine,
    transfer: TransferArgument,
    ring_bytes: Option<usize>,
    packed: impl Fn() + Sync,
) -> Result<MoeBlock, Failure> {
    let gpu = asym_gemm::driver::Gpu::open(0)?;
    let transfer = transfer.into();
    Ok(MoeBlock::for_cpu_and_gpu(
        layer, format, cpu, &gpu, transfer, ring_bytes, packed,
    )?)
}

#[cfg(not(feature = "cuda"))]
fn with_gpu(
    _: &MoeLayer,
    _: WeightFormat,
    _: Engine,
    _: TransferArgument,
    _: Option<usize>,
    _: impl Fn() + Sync,
) -> Result<MoeBlock, Failure> {
    Err("a GPU back end was asked for, but this program was built without the cuda feature".into())
}
