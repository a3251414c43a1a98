//! Launching the grouped GEMM kernels: tensor maps, kernel lookup, grid.

use super::relay::Relay;
use super::{GemmError, MatrixFormat};
use crate::driver::{
    DriverError, Gpu, Kernel, L2Promotion, LaunchConfig, Stream, TensorElement, TensorMap,
    TensorMapDesc,
};
use asym_gemm_formats::bank::{
    BankGeometry, GATE_UP_PANELS, PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES,
};
use asym_gemm_kernels_gpu::args::GemmArgs;
use asym_gemm_kernels_gpu::gemm::{Operands, kernel_name};
use asym_gemm_kernels_gpu::tile::{A_BOX_ROWS, B_BOX_ROWS, THREADS, Tile};
use std::collections::HashMap;
use std::ffi::c_void;

/// One launch of a grouped GEMM kernel.
pub(crate) struct Launch<'a> {
    pub(crate) operands: Operands,
    pub(crate) tile: Tile,
    /// Number of tiles; no more blocks than that compute.
    pub(crate) tiles: u64,
    /// Weights are in host memory and shared by several row tiles: relay them.
    pub(crate) relayed: bool,
    pub(crate) a_map: &'a TensorMap,
    /// Map of a row-major B; any map where B is a bank's panels.
    pub(crate) b_map: &'a TensorMap,
    pub(crate) args: &'a GemmArgs,
}

/// Kernels looked up so far on one GPU, and the relay that launches share.
#[derive(Debug)]
pub(crate) struct Launcher {
    gpu: Gpu,
    kernels: HashMap<(Operands, Tile), Kernel>,
    relay: Relay,
}

/// What was launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launched {
    /// The kernel's symbol.
    pub(crate) kernel: &'static str,
    /// Blocks that relayed weights.
    pub(crate) couriers: u32,
}

impl Launcher {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            kernels: HashMap::new(),
            relay: Relay::default(),
        }
    }

    /// Compiles the kernels for `operands` now, so that no launch has to.
    pub(crate) fn load(&self, operands: &[Operands]) -> Result<(), DriverError> {
        for operands in operands {
            self.gpu.module(operands.family())?;
        }
        Ok(())
    }

    /// Launches one grouped GEMM.
    ///
    /// # Safety
    /// The launch must describe live device memory as [`GemmArgs`] says, until the work on
    /// `stream` is done. Launches of one launcher must follow each other in stream order.
    pub(crate) unsafe fn launch(
        &mut self,
        launch: &Launch<'_>,
        stream: &Stream,
    ) -> Result<Launched, DriverError> {
        let &Launch {
            operands,
            tile,
            tiles,
            ..
        } = launch;
        let Some(name) = kernel_name(operands, tile) else {
            return Err(DriverError::InvalidArgument {
                call: "grouped GEMM",
                reason: format!("no kernel for {operands:?} with tile {tile:?}"),
            });
        };
        if !self.kernels.contains_key(&(operands, tile)) {
            let kernel = self.gpu.module(operands.family())?.function(name)?;
            kernel.set_dynamic_shared(tile.shared_bytes())?;
            self.kernels.insert((operands, tile), kernel);
        }
        let kernel = &self.kernels[&(operands, tile)];
        let mut launched = Launched {
            kernel: name,
            couriers: 0,
        };
        if tiles == 0 {
            return Ok(launched);
        }
        let (mut a_map, mut b_map, mut args) = (*launch.a_map, *launch.b_map, *launch.args);
        if launch.relayed {
            // SAFETY: the caller's contract.
            args.relay = unsafe { self.relay.prepare(&self.gpu, tile, &args, stream)? };
            launched.couriers = args.relay.couriers;
        }
        let most = self.gpu.sm_count() - launched.couriers;
        let blocks = launched.couriers + tiles.min(u64::from(most)) as u32;
        let mut params = [
            (&raw mut a_map).cast::<c_void>(),
            (&raw mut b_map).cast::<c_void>(),
            (&raw mut args).cast::<c_void>(),
        ];
        // Couriers and the others wait for each other.
        let config = LaunchConfig {
            cooperative: launch.relayed,
            ..LaunchConfig::new((blocks, 1, 1), (THREADS, 1, 1), tile.shared_bytes())
        };
        // SAFETY: the parameters have the kernel's types and order; the caller answers for
        // the memory they name.
        unsafe { kernel.launch_with(&config, stream.as_raw(), &mut params)? };
        Ok(launched)
    }
}

/// Encodes a map with the GPU's context current, which the driver wants.
fn encode(gpu: &Gpu, desc: &TensorMapDesc<'_>) -> Result<TensorMap, GemmError> {
    let _current = gpu.enter()?;
    Ok(TensorMap::encode(desc)?)
}

/// Element type of a tensor map over `format`.
fn element(format: MatrixFormat) -> TensorElement {
    match format {
        MatrixFormat::Bf16 => TensorElement::Bf16,
        _ => TensorElement::U8,
    }
}

/// Elements of 128 bytes of `format`.
fn row_elements(format: MatrixFormat) -> u32 {
    (UNIT_ROW_BYTES / format.element_bytes()) as u32
}

/// Map of A: [rows, k] at `address`, rows `stride_bytes` apart, boxes of 64 rows x 128 bytes.
pub(crate) fn map_a(
    gpu: &Gpu,
    format: MatrixFormat,
    address: u64,
    rows: usize,
    k: usize,
    stride_bytes: usize,
) -> Result<TensorMap, GemmError> {
    encode(
        gpu,
        &TensorMapDesc {
            element: element(format),
            global_address: address,
            sizes: &[k as u64, rows as u64],
            strides_bytes: &[stride_bytes as u64],
            box_sizes: &[row_elements(format), A_BOX_ROWS],
            swizzle128: true,
            l2_promotion: L2Promotion::Bytes256,
        },
    )
}

/// Map of a row-major B: [count, n, k] at `address`, rows `pitch` bytes apart, boxes of 64 rows x
/// 128 bytes.
pub(crate) fn map_rows(
    gpu: &Gpu,
    format: MatrixFormat,
    address: u64,
    count: usize,
    n: usize,
    k: usize,
    pitch: usize,
) -> Result<TensorMap, GemmError> {
    encode(
        gpu,
        &TensorMapDesc {
            element: element(format),
            global_address: address,
            sizes: &[k as u64, n as u64, count as u64],
            strides_bytes: &[pitch as u64, (n * pitch) as u64],
            box_sizes: &[row_elements(format), B_BOX_ROWS, 1],
            swizzle128: true,
            l2_promotion: L2Promotion::Bytes256,
        },
    )
}

/// Maps of one expert of a bank at `address`: (gate and up, down), boxes of 8 panels.
pub(crate) fn map_expert(
    gpu: &Gpu,
    geometry: &BankGeometry,
    address: u64,
) -> Result<(TensorMap, TensorMap), GemmError> {
    let format = MatrixFormat::try_from(geometry.format)?;
    let map = |address: u64, units: usize, panels: usize, panel_bytes: usize| {
        encode(
            gpu,
            &TensorMapDesc {
                element: element(format),
                global_address: address,
                sizes: &[
                    u64::from(row_elements(format)),
                    PANEL_ROWS as u64,
                    units as u64,
                    panels as u64,
                    geometry.slices() as u64,
                ],
                strides_bytes: &[
                    UNIT_ROW_BYTES as u64,
                    UNIT_BYTES as u64,
                    panel_bytes as u64,
                    geometry.slice_bytes() as u64,
                ],
                box_sizes: &[
                    row_elements(format),
                    PANEL_ROWS as u32,
                    1,
                    B_BOX_ROWS / PANEL_ROWS as u32,
                    1,
                ],
                swizzle128: true,
                l2_promotion: L2Promotion::Bytes256,
            },
        )
    };
    Ok((
        map(
            address,
            geometry.hidden_units(),
            GATE_UP_PANELS,
            geometry.hidden_panel_bytes(),
        )?,
        map(
            address + geometry.down_offset() as u64,
            geometry.down_units(),
            geometry.down_panels(),
            geometry.down_panel_bytes(),
        )?,
    ))
}
