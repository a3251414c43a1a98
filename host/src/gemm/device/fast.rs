//! Large bf16 products on the expert GEMM's kernels: a batch of equal problems at equal distances is
//! a grouped GEMM whose group i is rows `i * pitch..i * pitch + m` and weight i.

use super::run::GpuGemm;
use crate::driver::{Gpu, Stream};
use crate::gemm::launch::map_rows;
use crate::gemm::{GemmError, Launch, MatrixFormat, map_a, tiles};
use asym_gemm_cpu::dense::{Checked, Scalar};
use asym_gemm_kernels_gpu::args::{
    ColumnTable, GemmArgs, Group, RelayArgs, gemm_flags, weight_layout,
};
use asym_gemm_kernels_gpu::gemm::{Operands, choose_tile};

/// Multiply-adds from which the larger tiles are worth it.
const MIN_WORK: usize = 1 << 26;

/// A call that these kernels can take.
pub(super) struct Fast {
    m: usize,
    n: usize,
    k: usize,
    count: usize,
    /// Rows from one problem's A (and D) to the next.
    pitch: usize,
    a: usize,
    a_row: usize,
    b: usize,
    d: usize,
    d_row: usize,
    wide: bool,
}

impl Fast {
    /// The call as a grouped GEMM, if it is one.
    pub(super) fn find<S: Scalar>(gpu: &Gpu, problems: &[Checked<S>], wide: bool) -> Option<Self> {
        let p = problems.first()?;
        let (m, n, k) = (p.m, p.n, p.k);
        let count = problems.len();
        let d_bytes = if wide { 4 } else { 2 };
        let plain = p.alpha == S::ONE && p.c.is_none() && k > 0;
        let contiguous = p.a.col_step == 1 && p.b.row_step == 1;
        let aligned = [p.a.address, p.b.address, p.a.row_step * 2, k * 2]
            .iter()
            .all(|x| x.is_multiple_of(16))
            && p.d.address.is_multiple_of(d_bytes);
        // Rows of B without gaps, as the map of a list of weights wants them.
        let dense = p.b.col_step == k || n == 1;
        let work = m.saturating_mul(n).saturating_mul(k).saturating_mul(count);
        let fits = [m * count, n, k]
            .iter()
            .all(|&x| x <= i32::MAX as usize / 2);
        let hopper = gpu.compute_capability() == (9, 0);
        if !(plain && contiguous && aligned && dense && work >= MIN_WORK && fits && hopper) {
            return None;
        }
        let mut pitch = m;
        if let Some(second) = problems.get(1) {
            let bytes = second.a.address.checked_sub(p.a.address)?;
            let row = p.a.row_step * 2;
            pitch = bytes / row;
            if bytes % row != 0 || pitch < m || pitch > i32::MAX as usize / count {
                return None;
            }
        }
        for (i, q) in problems.iter().enumerate() {
            let same = (q.m, q.n, q.k) == (m, n, k)
                && (q.a.row_step, q.a.col_step) == (p.a.row_step, 1)
                && (q.b.col_step, q.b.row_step) == (p.b.col_step, 1)
                && q.d.row_step == p.d.row_step
                && q.alpha == S::ONE
                && q.c.is_none();
            let placed = q.a.address == p.a.address + i * pitch * p.a.row_step * 2
                && q.b.address == p.b.address + i * n * k * 2
                && q.d.address == p.d.address + i * pitch * p.d.row_step * d_bytes;
            if !(same && placed) {
                return None;
            }
        }
        Some(Self {
            m,
            n,
            k,
            count,
            pitch,
            a: p.a.address,
            a_row: p.a.row_step,
            b: p.b.address,
            d: p.d.address,
            d_row: p.d.row_step,
            wide,
        })
    }

    /// Launches it.
    pub(super) fn launch(
        &self,
        gemm: &mut GpuGemm,
        stream: &Stream,
    ) -> Result<&'static str, GemmError> {
        let operands = Operands::Bf16;
        let tile = choose_tile(operands, self.m);
        let rows = self.pitch * (self.count - 1) + self.m;
        let format = MatrixFormat::Bf16;
        let gpu = gemm.gpu.clone();
        let a_map = map_a(&gpu, format, self.a as u64, rows, self.k, self.a_row * 2)?;
        let b_map = map_rows(
            &gpu,
            format,
            self.b as u64,
            self.count,
            self.n,
            self.k,
            self.k * 2,
        )?;
        let groups: Vec<Group> = (0..self.count)
            .map(|i| Group {
                start: (i * self.pitch) as u32,
                end: (i * self.pitch + self.m) as u32,
                weight: i as u32,
                reserved: 0,
            })
            .collect();
        let words = groups.iter().flat_map(|g| {
            let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            [pair(g.start, g.end), pair(g.weight, g.reserved)]
        });
        let list = gemm.upload(words.collect(), stream)?;
        let d_bytes = if self.wide { 4 } else { 2 };
        let vector_bytes = if self.wide { 8 } else { 16 };
        let vector = [self.d, self.d_row * d_bytes, self.n * d_bytes]
            .iter()
            .all(|x| x.is_multiple_of(vector_bytes));
        let mut bits = if vector { gemm_flags::D_VECTOR } else { 0 };
        bits |= if self.wide { 0 } else { gemm_flags::D_BF16 };
        let args = GemmArgs {
            groups: list,
            b_maps: 0,
            d: self.d as u64,
            d_stride: self.d_row as u64,
            a_scales: 0,
            b_scales: ColumnTable::NONE,
            bias: ColumnTable::NONE,
            relay: RelayArgs::default(),
            a_scale_stride: 0,
            group_count: self.count as u32,
            n: self.n as u32,
            k_steps: (self.k as u32).div_ceil(operands.step_k()),
            b_layout: weight_layout::ROWS,
            panels_per_slice: 1,
            units_per_slice: 1,
            flags: bits,
            first_weight: 0,
            weight_end: self.count as u32,
            rows: rows as u32,
            reserved: 0,
        };
        let launch = Launch {
            operands,
            tile,
            tiles: tiles(&groups, self.n, tile),
            relayed: false,
            a_map: &a_map,
            b_map: &b_map,
            args: &args,
        };
        // SAFETY: the list stays with the GEMM; operands were checked and are borrowed until the
        // work is done.
        unsafe { Ok(gemm.launcher.launch(&launch, stream)?.kernel) }
    }
}
