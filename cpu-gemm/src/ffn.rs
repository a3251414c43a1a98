//! The feed-forward of experts: two phases, each one parallel region.
//!
//! ```text
//! phase 1, a task = (block of tokens, slice of 128 of I):
//!     x [m, H] --gate, up panels--> f32 [m, 128] --activation, rounding--> h of that slice
//! phase 2, a task = (block of tokens, 128 rows of H):
//!     h [slices][m, 128] --down panels, slice by slice--> y [m, 128 of H]
//! ```
//!
//! A block is at most [`BLOCK_TOKENS`] tokens of one expert. Inside a task the loop over panels is
//! the outer one: a panel is read from memory once and stays in the cache for all tokens of
//! the block. Slices add to y in their order, so a result depends neither on the division
//! of work nor on the other tokens.

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{PANEL_ROWS, SLICE};
use rayon::prelude::*;

use crate::CpuError;
use crate::activations::Activations;
use crate::bank::{BankRef, ExpertRef};
use crate::kernels::{Body, Dot, Kernel, Lanes, for_token_blocks};
use crate::recipe::{Recipe, Row};
use crate::scatter::Scatter;
use crate::validate::{disjoint_rows, same};

/// Tokens whose f32 results a task keeps at hand: 64 KiB.
const BLOCK_TOKENS: usize = 128;
/// Down panels of a task.
const TASK_PANELS: usize = SLICE / PANEL_ROWS;

/// The tokens that one expert processes.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroup<'a> {
    /// Index of the expert in the bank.
    pub expert: usize,
    /// First row of y; the group writes `tokens.len()` rows.
    pub start: usize,
    /// Row of x for each of those rows. A token may occur in several groups, and twice in one.
    pub tokens: &'a [u32],
}

/// At most [`BLOCK_TOKENS`] tokens of one group.
struct Block<'a> {
    expert: ExpertRef<'a>,
    start: usize,
    tokens: &'a [u32],
}

/// h of one block and slice: m rows of 128 codes.
struct HiddenSlice<R: Recipe> {
    codes: Vec<R::Code>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl<R: Recipe> HiddenSlice<R> {
    #[inline(always)]
    fn row(&self, row: usize) -> Row<'_, R::Code> {
        Row {
            codes: &self.codes[row * SLICE..][..SLICE],
            scales: &self.scales[row..=row],
            sums: &self.sums[row..=row],
        }
    }
}

/// Buffers that a worker keeps between tasks.
#[derive(Default)]
struct Scratch {
    /// f32 results: [token][128].
    rows: Vec<[Lanes<f32>; TASK_PANELS]>,
    gate_scales: Vec<Lanes<f32>>,
    up_scales: Vec<Lanes<f32>>,
}

/// Checks the arguments of an expert feed-forward.
pub(crate) fn validate(
    bank: BankRef<'_>,
    x: &[f32],
    groups: &[ExpertGroup<'_>],
    y: &[f32],
) -> Result<(), CpuError> {
    let hidden = bank.geometry().hidden;
    let tokens = x.len() / hidden;
    let rows = y.len() / hidden;
    same("the length of x", tokens * hidden, x.len())?;
    same("the length of y", rows * hidden, y.len())?;
    let mut ranges = Vec::with_capacity(groups.len());
    for (group, g) in groups.iter().enumerate() {
        if g.expert >= bank.geometry().experts {
            return Err(CpuError::ExpertOutOfRange {
                group,
                expert: g.expert,
                experts: bank.geometry().experts,
            });
        }
        let bad = |&token: &u32| token as usize >= tokens;
        if let Some(position) = g.tokens.iter().position(bad) {
            return Err(CpuError::TokenOutOfRange {
                group,
                position,
                token: g.tokens[position],
                tokens,
            });
        }
        ranges.push((g.start, g.start.saturating_add(g.tokens.len())));
    }
    disjoint_rows(&ranges, rows)
}

/// Runs the feed-forward of validated arguments.
pub(crate) fn run<R: Recipe>(
    kernel: Kernel,
    bank: BankRef<'_>,
    activation: Activation,
    x: &[f32],
    groups: &[ExpertGroup<'_>],
    y: &mut [f32],
) {
    let geometry = bank.geometry();
    let x = Activations::<R>::encode(kernel, x, geometry.hidden);
    let blocks: Vec<Block<'_>> = groups
        .iter()
        .flat_map(|group| {
            let chunks = group.tokens.chunks(BLOCK_TOKENS).enumerate();
            chunks.map(|(i, tokens)| Block {
                expert: bank.expert(group.expert),
                start: group.start + i * BLOCK_TOKENS,
                tokens,
            })
        })
        .collect();

    let slices = geometry.slices();
    let hidden: Vec<HiddenSlice<R>> = (0..blocks.len() * slices)
        .into_par_iter()
        .with_max_len(1)
        .map_init(Scratch::default, |scratch, task| {
            let block = &blocks[task / slices];
            let mut out = HiddenSlice {
                codes: vec![R::Code::default(); block.tokens.len() * SLICE],
                scales: vec![0.0; block.tokens.len()],
                sums: vec![0; block.tokens.len()],
            };
            kernel.run(GateUp {
                x: &x,
                block,
                slice: task % slices,
                activation,
                scratch,
                out: &mut out,
            });
            out
        })
        .collect();

    let y = Scatter::new(y, geometry.hidden);
    let ranges = geometry.down_panels().div_ceil(TASK_PANELS);
    (0..blocks.len() * ranges)
        .into_par_iter()
        .with_max_len(1)
        .for_each_init(Scratch::default, |scratch, task| {
            let block = task / ranges;
            kernel.run(Down::<R> {
                block: &blocks[block],
                hidden: &hidden[block * slices..][..slices],
                first_panel: task % ranges * TASK_PANELS,
                scratch,
                y: &y,
            });
        });
}

/// Phase 1 of one block and slice.
struct GateUp<'a, R: Recipe> {
    x: &'a Activations<R>,
    block: &'a Block<'a>,
    slice: usize,
    activation: Activation,
    scratch: &'a mut Scratch,
    out: &'a mut HiddenSlice<R>,
}

impl<R: Recipe> Body for GateUp<'_, R> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let Self {
            x, block, slice, ..
        } = self;
        let Scratch {
            rows,
            gate_scales,
            up_scales,
        } = self.scratch;
        let m = block.tokens.len();
        let len = block.expert.geometry().slice_len(slice);
        rows.resize(m, Default::default());
        for pair in 0..len.div_ceil(PANEL_ROWS) {
            let (gate, up) = (2 * pair, 2 * pair + 1);
            block.expert.gate_up_scales(slice, gate, gate_scales);
            block.expert.gate_up_scales(slice, up, up_scales);
            let gate_bias = block.expert.gate_up_bias(slice, gate);
            let up_bias = block.expert.gate_up_bias(slice, up);
            let gate = block.expert.gate_up_panel(slice, gate);
            let up = block.expert.gate_up_panel(slice, up);
            for_token_blocks!(m, |first, WIDTH| {
                let x: [_; WIDTH] =
                    std::array::from_fn(|t| x.row(block.tokens[first + t] as usize));
                let gate = R::panel(dot, gate, gate_scales, &x);
                let up = R::panel(dot, up, up_scales, &x);
                for t in 0..WIDTH {
                    let gate = with_bias(gate[t], &gate_bias);
                    let up = with_bias(up[t], &up_bias);
                    let row = &mut rows[first + t];
                    row[pair] = activate(self.activation, &gate, &up);
                }
            });
        }
        for (t, row) in rows.iter().enumerate() {
            R::encode_hidden(
                &row.as_flattened()[..len],
                &mut self.out.codes[t * SLICE..][..SLICE],
                &mut self.out.scales[t],
                &mut self.out.sums[t],
            );
        }
    }
}

#[inline(always)]
fn with_bias(mut values: Lanes<f32>, bias: &Option<Lanes<f32>>) -> Lanes<f32> {
    if let Some(bias) = bias {
        for (value, bias) in values.iter_mut().zip(bias) {
            *value += bias;
        }
    }
    values
}

/// The activation of 16 pairs. One loop for each kind, so that each can become vector code.
#[inline(always)]
fn activate(activation: Activation, gate: &Lanes<f32>, up: &Lanes<f32>) -> Lanes<f32> {
    let mut h = [0.0; PANEL_ROWS];
    match activation {
        Activation::SwiGlu => {
            for r in 0..PANEL_ROWS {
                h[r] = Activation::SwiGlu.apply(gate[r], up[r]);
            }
        }
        Activation::ClampedSwiGlu { limit, alpha } => {
            for r in 0..PANEL_ROWS {
                h[r] = Activation::ClampedSwiGlu { limit, alpha }.apply(gate[r], up[r]);
            }
        }
    }
    h
}

/// Phase 2 of one block and up to [`TASK_PANELS`] panels of down.
struct Down<'a, R: Recipe> {
    block: &'a Block<'a>,
    hidden: &'a [HiddenSlice<R>],
    first_panel: usize,
    scratch: &'a mut Scratch,
    y: &'a Scatter<'a, f32>,
}

impl<R: Recipe> Body for Down<'_, R> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let Self {
            block, first_panel, ..
        } = self;
        let geometry = block.expert.geometry();
        let m = block.tokens.len();
        let panels = TASK_PANELS.min(geometry.down_panels() - first_panel);
        let rows = &mut self.scratch.rows;
        rows.clear();
        rows.resize(m, Default::default());
        for (slice, h) in self.hidden.iter().enumerate() {
            for panel in 0..panels {
                let weights = block.expert.down_panel(slice, first_panel + panel);
                let scales = block.expert.down_block_scales(slice, first_panel + panel);
                for_token_blocks!(m, |first, WIDTH| {
                    let h: [_; WIDTH] = std::array::from_fn(|t| h.row(first + t));
                    let (out, _) = rows[first..]
                        .split_first_chunk_mut::<WIDTH>()
                        .expect("first + WIDTH <= m");
                    let y = out.each_mut().map(|row| &mut row[panel]);
                    R::add_down_slice(dot, weights, &scales, &h, y);
                });
            }
        }
        for panel in 0..panels {
            let scales = block.expert.down_row_scales(first_panel + panel);
            let bias = block.expert.down_bias(first_panel + panel);
            let column = (first_panel + panel) * PANEL_ROWS;
            let count = PANEL_ROWS.min(geometry.hidden - column);
            for (t, row) in rows.iter_mut().enumerate() {
                R::finish_down(&mut row[panel], &scales);
                let values = with_bias(row[panel], &bias);
                // SAFETY: blocks own their rows (validated disjoint) and tasks of one block
                // their columns.
                let out = unsafe { self.y.row(block.start + t, column, count) };
                out.copy_from_slice(&values[..count]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Features;

    struct Activate<'a> {
        activation: Activation,
        gate: &'a Lanes<f32>,
        up: &'a Lanes<f32>,
        out: &'a mut Lanes<f32>,
    }

    impl Body for Activate<'_> {
        #[inline(always)]
        fn run<D: Dot>(self, _dot: D) {
            *self.out = activate(self.activation, self.gate, self.up);
        }
    }

    /// Half a million gates spread over all bit patterns, NaN and subnormals among them: the
    /// vector code of the best kernel gives the bits of the scalar definition.
    #[test]
    fn vector_activation_has_the_scalar_bits() {
        let kernel = Kernel::best(Features::detect());
        let clamped = Activation::ClampedSwiGlu {
            limit: 7.0,
            alpha: 1.702,
        };
        for first in (0..u32::MAX - 16 * 8191).step_by(16 * 8191) {
            let gate = std::array::from_fn(|r| f32::from_bits(first + r as u32 * 8191));
            let up = std::array::from_fn(|r| (r as f32 - 7.5) * 1.3);
            for activation in [Activation::SwiGlu, clamped] {
                let mut out = [0.0; PANEL_ROWS];
                kernel.run(Activate {
                    activation,
                    gate: &gate,
                    up: &up,
                    out: &mut out,
                });
                for r in 0..PANEL_ROWS {
                    let want = activation.apply(gate[r], up[r]);
                    assert!(
                        out[r].to_bits() == want.to_bits() || out[r].is_nan() && want.is_nan(),
                        "{activation:?} of {:e}, {}: {:e} for {want:e}",
                        gate[r],
                        up[r],
                        out[r]
                    );
                }
            }
        }
    }
}
