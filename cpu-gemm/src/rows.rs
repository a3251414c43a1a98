//! How results leave the kernels: as rows of tokens, a cache line at a time.
//!
//! A panel gives 16 columns of each token. Rows lie far apart, often by a power of two, so that they
//! would fight for a few sets of the first-level cache; and a large output is not read again before
//! it has left the caches. So whole lines are written, past the caches if the output is large.

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
    /// For each row the line that is being filled.
    lines: &'w mut [[u8; LINE]],
    stream: bool,
}

impl<'w, 'o, O: Output> RowWriter<'w, 'o, O> {
    /// Panels that fill a line.
    const PANELS: usize = LINE / (TOKENS * size_of::<O>());

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
        lines: &'w mut Buffer,
        stream: bool,
    ) -> Self {
        Self {
            out,
            start,
            stride,
            columns,
            lines: lines.take(MAX_PASS * TOKENS),
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
            let line = &mut self.lines[row];
            let (parts, _) = bytemuck::cast_slice_mut::<u8, O>(line).as_chunks_mut::<TOKENS>();
            O::from_lanes(v, v.as_float(lanes), &mut parts[part]);
            if !last {
                continue;
            }
            let start = self.start + row * self.stride + first;
            // SAFETY: nobody else uses the columns of this row, by the contract of `new`.
            let out: &mut [u8] = bytemuck::cast_slice_mut(unsafe { self.out.write(start, filled) });
            match out.first_chunk_mut::<LINE>() {
                Some(out) => {
                    let words: Lanes<i32> = bytemuck::pod_read_unaligned(line);
                    v.write_line(v.load_int(&words), out, self.stream);
                }
                None => out.copy_from_slice(&line[..out.len()]),
            }
        }
    }
}
