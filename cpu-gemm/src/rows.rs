//! How results leave the kernels: as rows of tokens, a cache line at a time.
//!
//! A panel gives 16 columns of each token. Rows lie far apart, often by a power of two, on pages of
//! their own: written panel by panel they would fight for a few sets of the first-level cache and for
//! the few entries that the TLB has for stores. So some lines of each row are collected and
//! written together; past the caches if the output is large, which is not read again before it
//! has left them.

use crate::gemm::Output;
use crate::shared::Shared;
use crate::tile::{Lanes, TOKENS};
use crate::tokens::MAX_PASS;
use crate::vector::{LaneRows, Vector};
use crate::workspace::Buffer;

/// Outputs from this size on are written past the caches: more than a few cores' second level.
const STREAM_BYTES: usize = 8 << 20;

/// One cache line.
const LINE: usize = 64;
/// Lines of a row that are written together.
const RUN_LINES: usize = 8;
/// Bytes from a collected run to the next: an odd number of lines.
const RUN_STRIDE: usize = (RUN_LINES + 1) * LINE;

/// Whether an output of `len` elements of `O` should pass the caches by.
pub(crate) fn streams<O>(len: usize) -> bool {
    len * size_of::<O>() >= STREAM_BYTES
}

/// The rows of one pass of a task.
pub(crate) struct RowWriter<'w, 'o, O> {
    out: &'w Shared<'o, O>,
    /// Element of the pass's first row and the task's first column.
    start: usize,
    /// Elements from a row to the next.
    stride: usize,
    /// Columns of the task that exist.
    columns: usize,
    /// For each row the run that is being filled.
    runs: &'w mut [u8],
    stream: bool,
}

impl<'w, 'o, O: Output> RowWriter<'w, 'o, O> {
    /// Panels that fill a run.
    const PANELS: usize = RUN_LINES * LINE / (TOKENS * size_of::<O>());

    /// A writer to `columns` columns of rows `stride` elements apart, from element `start` on.
    ///
    /// # Safety
    /// While the writer is used nobody else uses those columns of the rows that are put.
    #[inline(always)]
    pub(crate) unsafe fn new(
        out: &'w Shared<'o, O>,
        start: usize,
        stride: usize,
        columns: usize,
        runs: &'w mut Buffer,
        stream: bool,
    ) -> Self {
        Self {
            out,
            start,
            stride,
            columns,
            runs: runs.take(MAX_PASS * TOKENS * RUN_STRIDE),
            stream,
        }
    }

    /// Panel `panel` of the task for the `tokens` tokens of group `group`. Panels come in order.
    #[inline(always)]
    pub(crate) fn put<V: Vector>(
        &mut self,
        v: V,
        panel: usize,
        group: usize,
        tokens: usize,
        rows: &impl LaneRows<V>,
    ) {
        let mut by_row = [v.splat_int(0); TOKENS];
        for (r, lanes) in by_row.iter_mut().enumerate() {
            *lanes = v.bits(rows.row(v, r));
        }
        let by_token = v.transpose(by_row);
        let part = panel % Self::PANELS;
        let first = (panel - part) * TOKENS;
        let filled = self.columns.min((panel + 1) * TOKENS) - first;
        let last = part + 1 == Self::PANELS || first + filled == self.columns;
        for (t, lanes) in by_token.into_iter().enumerate().take(tokens) {
            let row = group * TOKENS + t;
            let run = &mut self.runs[row * RUN_STRIDE..][..RUN_LINES * LINE];
            let (parts, _) = bytemuck::cast_slice_mut::<u8, O>(run).as_chunks_mut::<TOKENS>();
            O::from_lanes(v, v.as_float(lanes), &mut parts[part]);
            if !last {
                continue;
            }
            let start = self.start + row * self.stride + first;
            // SAFETY: nobody else uses the columns of this row, by the contract of `new`.
            let out: &mut [u8] = bytemuck::cast_slice_mut(unsafe { self.out.write(start, filled) });
            let (lines, rest) = out.as_chunks_mut::<LINE>();
            let (run_lines, _) = run.as_chunks::<LINE>();
            for (line, from) in lines.iter_mut().zip(run_lines) {
                let words: Lanes<i32> = bytemuck::pod_read_unaligned(from);
                v.write_line(v.load_int(&words), line, self.stream);
            }
            rest.copy_from_slice(&run[lines.len() * LINE..][..rest.len()]);
        }
    }
}
