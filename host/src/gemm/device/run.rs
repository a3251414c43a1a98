//! The calls.

use super::fast;
use super::operands::{GpuElement, GpuProblem, Memory};
use crate::driver::{DeviceBuffer, Gpu, Kernel, Stream};
use crate::gemm::{GemmError, Launcher};
use asym_gemm_cpu::dense::{Checked, CheckedOperand, Checker, Gemm, Layout, Multiply, Output};
use asym_gemm_kernels_gpu::dense::{
    BLOCKS_PER_SM, DenseArgs, Elements, FAMILY, Problem, SHARED_BYTES, THREADS, flags,
};
use std::collections::HashMap;
use std::ffi::c_void;

/// General GEMM on one GPU, with the kernels and the scratch that calls share.
///
/// Calls wait until D is there.
#[derive(Debug)]
pub struct GpuGemm {
    pub(super) gpu: Gpu,
    pub(super) launcher: Launcher,
    kernels: HashMap<Elements, Kernel>,
    list: Option<DeviceBuffer<u64>>,
    pub(super) groups: Option<DeviceBuffer<u32>>,
}

/// Copies of pinned operands, kept until the call is done.
type Staged = Vec<DeviceBuffer<u8>>;

impl GpuGemm {
    /// General GEMM on `gpu`; kernels are loaded when first used.
    pub fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            launcher: Launcher::new(gpu),
            kernels: HashMap::new(),
            list: None,
            groups: None,
        }
    }

    /// D = α·op(A)·op(B) + β·C; gives the kernel's symbol.
    ///
    /// # Errors
    /// Operands that are not what `gemm` asks for, that overlap D or are another GPU's; a
    /// dimension past 2^32 - 1; a driver that fails.
    pub fn single<T, D, LA: Layout, LB: Layout, LD: Layout>(
        &mut self,
        gemm: &Gemm<T::Scalar>,
        problem: GpuProblem<'_, T, D, LA, LB, LD>,
        stream: &Stream,
    ) -> Result<&'static str, GemmError>
    where
        T: Multiply<D> + GpuElement,
        D: Output<T::Scalar>,
    {
        self.batched(gemm, &mut [problem], stream)
    }

    /// The same product for each of `problems`, in one launch.
    ///
    /// # Errors
    /// As [`Self::single`].
    pub fn batched<T, D, LA: Layout, LB: Layout, LD: Layout>(
        &mut self,
        gemm: &Gemm<T::Scalar>,
        problems: &mut [GpuProblem<'_, T, D, LA, LB, LD>],
        stream: &Stream,
    ) -> Result<&'static str, GemmError>
    where
        T: Multiply<D> + GpuElement,
        D: Output<T::Scalar>,
    {
        self.grouped(&mut [(*gemm, problems)], stream)
    }

    /// Groups of problems, each group with its own parameters, in one launch.
    ///
    /// # Errors
    /// As [`Self::single`].
    pub fn grouped<T, D, LA: Layout, LB: Layout, LD: Layout>(
        &mut self,
        groups: &mut [(Gemm<T::Scalar>, &mut [GpuProblem<'_, T, D, LA, LB, LD>])],
        stream: &Stream,
    ) -> Result<&'static str, GemmError>
    where
        T: Multiply<D> + GpuElement,
        D: Output<T::Scalar>,
    {
        if !stream.is_on(&self.gpu) {
            return Err(GemmError::OtherGpu { what: "the stream" });
        }
        let mut checker = Checker::<T, D>::default();
        let mut memories = Vec::new();
        for (gemm, problems) in groups.iter_mut() {
            for p in problems.iter_mut() {
                let c = p.c_view();
                checker.add(gemm, &p.a.view, &p.b.view, &c, &mut p.d.view)?;
                let c = p.c.as_ref().filter(|_| !p.in_place);
                let all = [p.a.memory, p.b.memory, c.map_or(p.d.memory, |c| c.memory)];
                let elsewhere = |m: &Memory| matches!(m, Memory::Device(ordinal) if *ordinal != self.gpu.ordinal());
                if all.iter().any(elsewhere) || elsewhere(&p.d.memory) {
                    return Err(GemmError::OtherGpu { what: "a matrix" });
                }
                memories.push(all);
            }
        }
        let mut checked = checker.finish()?;
        let swapped = !LD::ROW_MAJOR;
        let mut staged = Staged::new();
        let mut result = Ok("");
        for (problem, memory) in checked.iter_mut().zip(&memories) {
            let [mut a, mut b, c] = *memory;
            if swapped {
                (a, b) = (b, a);
            }
            let reads = problem.k > 0;
            let result_of = [
                (reads && a == Memory::Pinned).then_some(&mut problem.a),
                (reads && b == Memory::Pinned).then_some(&mut problem.b),
                problem.c.as_mut().filter(|_| c == Memory::Pinned),
            ];
            for operand in result_of.into_iter().flatten() {
                if result.is_ok() {
                    result = self.stage(operand, &mut staged, stream).map(|()| "");
                }
            }
        }
        checked.retain(|p| p.m > 0 && p.n > 0);
        if result.is_ok() && !checked.is_empty() {
            let wide = size_of::<D>() == 4;
            result = self.launch::<T>(&checked, wide, stream);
        }
        // Copies and kernels use borrows and `staged` until here, on every path.
        let waited = stream.synchronize();
        let kernel = result?;
        waited?;
        Ok(kernel)
    }

    /// Copies a pinned operand's memory to the device and points the operand there.
    fn stage(
        &self,
        operand: &mut CheckedOperand,
        staged: &mut Staged,
        stream: &Stream,
    ) -> Result<(), GemmError> {
        let copy = DeviceBuffer::<u8>::alloc(&self.gpu, operand.bytes.max(1))?;
        let host = std::ptr::with_exposed_provenance::<u8>(operand.address);
        // SAFETY: the view's memory has these bytes (its elements and what is between them), is
        // borrowed by the caller, and the call waits before it returns.
        unsafe {
            let bytes = std::slice::from_raw_parts(host, operand.bytes);
            copy.copy_from_host_async(0, bytes, stream)?;
        }
        operand.address = copy.as_raw() as usize;
        staged.push(copy);
        Ok(())
    }

    /// Launches the kernel that suits.
    fn launch<T: GpuElement>(
        &mut self,
        checked: &[Checked<T::Scalar>],
        wide: bool,
        stream: &Stream,
    ) -> Result<&'static str, GemmError> {
        if T::ELEMENTS == Elements::Bf16
            && let Some(fast) = fast::Fast::find(&self.gpu, checked, wide)
        {
            return fast.launch(self, stream);
        }
        let mut list = Vec::with_capacity(checked.len());
        let mut tiles = 0u32;
        for problem in checked {
            let entry = entry::<T>(problem, wide, tiles)?;
            tiles = entry
                .tiles()
                .and_then(|t| tiles.checked_add(t))
                .ok_or_else(|| too_large("tiles of D"))?;
            list.push(entry);
        }
        let first = list[0].tiles();
        let uniform = list.iter().all(|p| p.tiles() == first);
        let name = T::ELEMENTS.kernel();
        if !self.kernels.contains_key(&T::ELEMENTS) {
            let kernel = self.gpu.module(FAMILY)?.function(name)?;
            self.kernels.insert(T::ELEMENTS, kernel);
        }
        let words: Vec<u64> = list.iter().flat_map(words).collect();
        if self.list.as_ref().is_none_or(|l| l.len() < words.len()) {
            self.list = None;
            let capacity = words.len().next_power_of_two();
            self.list = Some(DeviceBuffer::alloc(&self.gpu, capacity)?);
        }
        let Some(buffer) = &self.list else {
            return Err(too_large("the list of problems"));
        };
        let mut args = DenseArgs {
            problems: buffer.as_raw(),
            count: u32::try_from(list.len()).map_err(|_| too_large("the number of problems"))?,
            tiles,
            uniform: first.filter(|_| uniform).unwrap_or(0),
            reserved: 0,
        };
        let blocks = tiles.min(self.gpu.sm_count() * BLOCKS_PER_SM);
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the kernel takes DenseArgs over a list that this value keeps; operands are
        // borrowed until the caller of this function has waited. The list is pageable and has
        // left when the copy returns.
        unsafe {
            buffer.copy_from_host_async(0, &words, stream)?;
            self.kernels[&T::ELEMENTS].launch(
                (blocks, 1, 1),
                (THREADS, 1, 1),
                SHARED_BYTES,
                stream.as_raw(),
                &mut params,
            )?;
        }
        Ok(name)
    }
}

fn too_large(what: &'static str) -> GemmError {
    GemmError::Unsupported {
        what,
        reason: "more than a launch can count; divide the call".into(),
    }
}

/// A problem as the kernel reads it.
fn entry<T: GpuElement>(
    p: &Checked<T::Scalar>,
    wide: bool,
    first_tile: u32,
) -> Result<Problem, GemmError> {
    let size = size_of::<T>();
    let vector = |x: &CheckedOperand, step: usize, k_step: usize| {
        k_step == 1 && x.address.is_multiple_of(16) && (step * size).is_multiple_of(16)
    };
    let mut bits = if wide { flags::D_WIDE } else { 0 };
    if vector(&p.a, p.a.row_step, p.a.col_step) {
        bits |= flags::A_VECTOR;
    }
    if vector(&p.b, p.b.col_step, p.b.row_step) {
        bits |= flags::B_VECTOR;
    }
    let dimension = |x: usize, what| {
        u32::try_from(x)
            .ok()
            .filter(|&x| x <= u32::MAX - 256)
            .ok_or_else(|| too_large(what))
    };
    let c = p.c.unwrap_or(CheckedOperand {
        address: 0,
        bytes: 0,
        row_step: 0,
        col_step: 0,
    });
    Ok(Problem {
        a: p.a.address as u64,
        b: p.b.address as u64,
        c: c.address as u64,
        d: p.d.address as u64,
        a_row: p.a.row_step as u64,
        a_k: p.a.col_step as u64,
        b_col: p.b.col_step as u64,
        b_k: p.b.row_step as u64,
        c_row: c.row_step as u64,
        c_col: c.col_step as u64,
        d_row: p.d.row_step as u64,
        d_col: p.d.col_step as u64,
        m: dimension(p.m, "m")?,
        n: dimension(p.n, "n")?,
        k: dimension(p.k, "k")?,
        first_tile,
        alpha: bytemuck::cast(p.alpha),
        beta: bytemuck::cast(p.beta),
        flags: bits,
        reserved: 0,
    })
}

/// The 16 words of an entry.
fn words(p: &Problem) -> [u64; 16] {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    [
        p.a,
        p.b,
        p.c,
        p.d,
        p.a_row,
        p.a_k,
        p.b_col,
        p.b_k,
        p.c_row,
        p.c_col,
        p.d_row,
        p.d_col,
        pair(p.m, p.n),
        pair(p.k, p.first_tile),
        pair(p.alpha, p.beta),
        pair(p.flags, p.reserved),
    ]
}
