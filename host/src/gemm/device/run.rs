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
/// Calls wait until D is there, but for [`GpuGemm::enqueue`].
#[derive(Debug)]
pub struct GpuGemm {
    pub(super) gpu: Gpu,
    pub(super) launcher: Launcher,
    kernels: HashMap<Elements, Kernel>,
    /// The last list of problems, and where it is on the device.
    list: Option<(Vec<u64>, DeviceBuffer<u64>)>,
    staged: Staged,
}

/// Copies of pinned operands, kept until a call has waited.
type Staged = Vec<DeviceBuffer<u8>>;

impl GpuGemm {
    /// General GEMM on `gpu`; kernels are loaded when first used.
    pub fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            launcher: Launcher::new(gpu),
            kernels: HashMap::new(),
            list: None,
            staged: Staged::new(),
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
    #[expect(clippy::type_complexity, reason = "a problem says its layouts by type")]
    pub fn grouped<T, D, LA: Layout, LB: Layout, LD: Layout>(
        &mut self,
        groups: &mut [(Gemm<T::Scalar>, &mut [GpuProblem<'_, T, D, LA, LB, LD>])],
        stream: &Stream,
    ) -> Result<&'static str, GemmError>
    where
        T: Multiply<D> + GpuElement,
        D: Output<T::Scalar>,
    {
        // SAFETY: the borrows last until the wait below, which comes on every path.
        let enqueued = unsafe { self.enqueue(groups, stream) };
        let waited = stream.synchronize();
        self.staged.clear();
        let kernel = enqueued?;
        waited?;
        Ok(kernel)
    }

    /// As [`Self::grouped`], and returns at once. Calls on one value follow each other in stream
    /// order. A call with the problems of the one before it uploads nothing and can be captured
    /// into a graph, unless operands are pinned.
    ///
    /// # Errors
    /// As [`Self::single`].
    ///
    /// # Safety
    /// Operands stay alive and unchanged by others until the work on `stream` is done, and so does
    /// this value.
    #[expect(clippy::type_complexity, reason = "a problem says its layouts by type")]
    pub unsafe fn enqueue<T, D, LA: Layout, LB: Layout, LD: Layout>(
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
        for (problem, memory) in checked.iter_mut().zip(&memories) {
            let [mut a, mut b, c] = *memory;
            if swapped {
                (a, b) = (b, a);
            }
            let reads = problem.k > 0;
            let pinned = [
                (reads && a == Memory::Pinned).then_some(&mut problem.a),
                (reads && b == Memory::Pinned).then_some(&mut problem.b),
                problem.c.as_mut().filter(|_| c == Memory::Pinned),
            ];
            for operand in pinned.into_iter().flatten() {
                self.stage(operand, stream)?;
            }
        }
        checked.retain(|p| p.m > 0 && p.n > 0);
        if checked.is_empty() {
            return Ok("none");
        }
        self.launch::<T>(&checked, size_of::<D>() == 4, stream)
    }

    /// Copies a pinned operand's memory to the device and points the operand there.
    fn stage(&mut self, operand: &mut CheckedOperand, stream: &Stream) -> Result<(), GemmError> {
        let copy = DeviceBuffer::<u8>::alloc(&self.gpu, operand.bytes.max(1))?;
        let host = std::ptr::with_exposed_provenance::<u8>(operand.address);
        // SAFETY: the view's memory has these bytes (its elements and what is between them), is
        // borrowed until the work is done.
        unsafe {
            let bytes = std::slice::from_raw_parts(host, operand.bytes);
            copy.copy_from_host_async(0, bytes, stream)?;
        }
        operand.address = copy.as_raw() as usize;
        self.staged.push(copy);
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
        let problems = self.upload(words, stream)?;
        let mut args = DenseArgs {
            problems,
            count: u32::try_from(list.len()).map_err(|_| too_large("the number of problems"))?,
            tiles,
            uniform: first.filter(|_| uniform).unwrap_or(0),
            reserved: 0,
        };
        let blocks = tiles.min(self.gpu.sm_count() * BLOCKS_PER_SM);
        let mut params = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the kernel takes DenseArgs over a list that this value keeps; operands are
        // borrowed until the work is done.
        unsafe {
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

    /// Puts a list on the device, if it is not there; gives its address.
    pub(super) fn upload(&mut self, words: Vec<u64>, stream: &Stream) -> Result<u64, GemmError> {
        if let Some((list, buffer)) = &self.list
            && *list == words
        {
            return Ok(buffer.as_raw());
        }
        let buffer = match self.list.take() {
            Some((_, buffer)) if buffer.len() >= words.len() => buffer,
            // Freeing waits for the device, so earlier calls are done with the old buffer.
            _ => DeviceBuffer::alloc(&self.gpu, words.len().next_power_of_two())?,
        };
        // SAFETY: a copy from pageable memory has left it when the call returns; stream order
        // keeps it behind the kernels of earlier calls.
        unsafe { buffer.copy_from_host_async(0, &words, stream)? };
        let address = buffer.as_raw();
        self.list = Some((words, buffer));
        Ok(address)
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
