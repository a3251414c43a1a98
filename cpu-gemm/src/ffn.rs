//! The feed-forward of experts and the sum over a token's experts: one parallel region.
//!
//! ```text
//! encode    rows of x                    rounded once                         [T, H] codes
//! pack      16 tokens of one expert      gathered from the codes              groups of x
//! gate_up   a slice of one expert        x . gate, x . up, activation,
//!           (or some of its rows)        rounding by token and slice          groups of h
//! down      some rows of one expert      h . down, slice by slice             y [M, H]
//! combine   some columns of some tokens  weighted sum in slot order           out [T, H]
//! ```
//!
//! The tasks of all steps are numbered in this order and taken from one counter ([`Region`]); a
//! task waits for just what it reads: gate_up for its expert's groups, down for its expert's h. So
//! there is no barrier, and the steps of different experts overlap.
//!
//! Few tokens: weights pass once, as sequential streams, and tasks are small enough to balance. Many
//! tokens: a block is up to [`BLOCK_TOKENS`] tokens of one expert, its weights pass once a pass of
//! [`Multiply::GROUPS`] groups and come from the cache after the first.
//!
//! Slices add to y in their order, so a result depends neither on the division of work nor on
//! the other tokens.

use std::cell::Cell;
use std::marker::PhantomData;

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, PANEL_ROWS, SLICE};

use crate::CpuError;
use crate::bank::{BankRef, ExpertRef};
use crate::combine::{Combine, SlotTasks, Slots};
use crate::gemm::Output;
use crate::kernels::{Body, Group, Kernel, Multiply, Panel, Span};
use crate::pool::Workers;
use crate::product::{self, Panels, Tiles};
use crate::recipe::Recipe;
use crate::region::{Latch, Region};
use crate::shared::Shared;
use crate::tile::{Lanes, TOKENS, Tile};
use crate::tokens::{Encoded, Groups, Rows, row_bytes};
use crate::validate::{disjoint_rows, same};
use crate::workspace::Workspace;

/// Most tokens of a block: their h and sums stay in the second-level cache.
const BLOCK_TOKENS: usize = 512;
/// Most groups of a pass on any instruction set.
const MAX_PASS: usize = 8;
/// Pairs of a gate and an up panel in a slice.
const SLICE_PAIRS: usize = SLICE / PANEL_ROWS;
/// Tasks a thread should find in a step, so that threads of unequal speed end together.
const TASKS_A_THREAD: usize = 16;
/// Elements of x that a task rounds.
const ENCODE_ELEMENTS: usize = 32 * 1024;
/// Elements that a task of combine reads.
const COMBINE_ELEMENTS: usize = 8 * 1024;

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
    /// First row of y.
    start: usize,
    tokens: &'a [u32],
    /// First of its groups of 16.
    first_group: usize,
    /// Opens when all groups are packed.
    packed: Latch,
    /// Opens when h is complete.
    hidden: Latch,
}

impl Block<'_> {
    fn groups(&self) -> usize {
        self.tokens.len().div_ceil(TOKENS)
    }

    /// Tokens of group `group` of the block.
    fn group_tokens(&self, group: usize) -> usize {
        TOKENS.min(self.tokens.len() - group * TOKENS)
    }
}

/// Checks the arguments of an expert feed-forward with `rows` rows of y.
pub(crate) fn validate(
    bank: BankRef<'_>,
    x: Rows<'_>,
    groups: &[ExpertGroup<'_>],
    rows: usize,
) -> Result<(), CpuError> {
    let hidden = bank.geometry().hidden;
    let tokens = x.len() / hidden;
    same("the length of x", tokens * hidden, x.len())?;
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

/// What a call computes, validated.
pub(crate) struct Call<'a> {
    pub(crate) bank: BankRef<'a>,
    pub(crate) activation: Activation,
    pub(crate) x: Rows<'a>,
    pub(crate) groups: &'a [ExpertGroup<'a>],
}

/// Where the results go.
pub(crate) enum Destination<'a, O> {
    /// The experts' outputs [M, H].
    Experts(&'a mut [f32]),
    /// Their weighted sums [T, H]; the experts' outputs have `rows` rows.
    Tokens {
        slots: Slots<'a>,
        rows: usize,
        out: &'a mut [O],
    },
}

/// The last step.
struct Sums<'a, O> {
    slots: Slots<'a>,
    tasks: SlotTasks,
    out: Shared<'a, O>,
}

/// Runs the feed-forward.
pub(crate) fn run<R: Recipe, O: Output>(
    kernel: Kernel,
    workers: &dyn Workers,
    workspace: &mut Workspace,
    call: &Call<'_>,
    destination: Destination<'_, O>,
) -> Result<(), CpuError> {
    let geometry = call.bank.geometry();
    let Workspace {
        codes,
        scales,
        sums,
        x,
        h,
        staged,
        y,
    } = workspace;
    let (y, combine) = match destination {
        Destination::Experts(y) => (y, None),
        Destination::Tokens { slots, rows, out } => (
            y.take::<f32>(rows * geometry.hidden),
            Some(Sums {
                slots,
                tasks: slots.divide(
                    out.len() / geometry.hidden,
                    geometry.hidden,
                    COMBINE_ELEMENTS,
                ),
                out: Shared::new(out),
            }),
        ),
    };

    let slices = geometry.slices();
    let mut blocks = Vec::new();
    let mut groups = 0;
    for group in call.groups {
        for (i, tokens) in group.tokens.chunks(BLOCK_TOKENS).enumerate() {
            let count = tokens.len().div_ceil(TOKENS);
            blocks.push(Block {
                expert: call.bank.expert(group.expert),
                start: group.start + i * BLOCK_TOKENS,
                tokens,
                first_group: groups,
                packed: Latch::new(count),
                hidden: Latch::new(slices),
            });
            groups += count;
        }
    }

    let division = Division::new(&geometry, blocks.len(), workers.threads());
    let rows = call.x.len() / geometry.hidden;
    let encode_rows = (ENCODE_ELEMENTS / geometry.hidden).max(1);
    let steps = Steps::new([
        if blocks.is_empty() {
            0
        } else {
            rows.div_ceil(encode_rows)
        },
        groups,
        blocks.len() * slices * division.parts(),
        blocks.len() * geometry.down_panels().div_ceil(division.down_panels),
        match &combine {
            Some(sums) => sums.tasks.count(geometry.hidden),
            None => 0,
        },
    ]);
    let staged_rows = match division.parts() {
        1 => 0,
        _ => groups * slices * SLICE,
    };
    let h_row_bytes = row_bytes::<R>(geometry.intermediate_padded());
    let shared = Job::<R, O> {
        call,
        blocks: &blocks,
        division,
        encode_rows,
        encoded: Encoded::new::<R>(rows, geometry.hidden, codes, scales, sums),
        x: Groups::new(
            groups,
            row_bytes::<R>(geometry.hidden),
            R::blocks(geometry.hidden),
            x,
        ),
        h: Groups::new(groups, h_row_bytes, slices, h),
        staged: Shared::new(staged.take(staged_rows)),
        slices: (0..blocks.len() * slices)
            .map(|_| Latch::new(division.parts()))
            .collect(),
        y: Shared::new(y),
        combine,
        encoded_all: Latch::new(steps.count(Step::Encode)),
        down_all: Latch::new(steps.count(Step::Down)),
        steps,
        recipe: PhantomData,
    };
    Region::run(workers, shared.steps.total(), &|region| {
        kernel.run(Worker {
            job: &shared,
            region,
        });
    })
}

/// How the steps are divided into tasks.
#[derive(Clone, Copy)]
struct Division {
    /// Pairs of panels of a gate_up task.
    pairs: usize,
    /// Panels of a down task.
    down_panels: usize,
}

impl Division {
    fn new(geometry: &BankGeometry, blocks: usize, threads: usize) -> Self {
        let wanted = threads * TASKS_A_THREAD;
        let size = |items: usize, most: usize| {
            let size = (items / wanted).clamp(1, most);
            // Powers of two divide a slice evenly.
            1 << size.ilog2()
        };
        Self {
            pairs: size(blocks * geometry.slices() * SLICE_PAIRS, SLICE_PAIRS),
            down_panels: size(blocks * geometry.down_panels(), 16),
        }
    }

    /// Tasks that share a slice.
    fn parts(self) -> usize {
        SLICE_PAIRS / self.pairs
    }
}

/// The steps in the order of their tasks.
#[derive(Clone, Copy)]
enum Step {
    Encode,
    Pack,
    GateUp,
    Down,
    Combine,
}

impl Step {
    const ALL: [Self; 5] = [
        Self::Encode,
        Self::Pack,
        Self::GateUp,
        Self::Down,
        Self::Combine,
    ];
}

/// Task numbers of each step.
struct Steps {
    counts: [usize; Step::ALL.len()],
}

impl Steps {
    fn new(counts: [usize; Step::ALL.len()]) -> Self {
        Self { counts }
    }

    fn count(&self, step: Step) -> usize {
        self.counts[step as usize]
    }

    fn total(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The step of a task and its number there.
    fn locate(&self, mut task: usize) -> (Step, usize) {
        for step in Step::ALL {
            if task < self.count(step) {
                return (step, task);
            }
            task -= self.count(step);
        }
        unreachable!("a region hands out no task beyond its total");
    }
}

/// Everything that the tasks share.
struct Job<'a, R: Recipe, O> {
    call: &'a Call<'a>,
    blocks: &'a [Block<'a>],
    division: Division,
    encode_rows: usize,
    encoded: Encoded<'a>,
    x: Groups<'a>,
    h: Groups<'a>,
    /// h before rounding, `[group][row of I]`; empty unless slices are divided.
    staged: Shared<'a, Lanes<f32>>,
    /// One latch for each block and slice.
    slices: Vec<Latch>,
    y: Shared<'a, f32>,
    combine: Option<Sums<'a, O>>,
    encoded_all: Latch,
    down_all: Latch,
    steps: Steps,
    recipe: PhantomData<fn() -> R>,
}

/// Buffers that a thread keeps between calls.
#[derive(Default)]
struct Scratch {
    tiles: Tiles,
    /// `[group of a pass][row of the slice]`.
    h: Vec<[Lanes<f32>; SLICE]>,
    /// The rounded words of one slice.
    words: Vec<Lanes<u32>>,
    /// One row of x in f32.
    wide: Vec<f32>,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// One thread's share of the region.
struct Worker<'a, R: Recipe, O> {
    job: &'a Job<'a, R, O>,
    region: &'a Region,
}

impl<R: Recipe, O: Output> Body for Worker<'_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Self { job, region } = self;
        let mut scratch = SCRATCH.take().unwrap_or_default();
        while let Some(task) = region.take() {
            let (step, task) = job.steps.locate(task);
            let ready = match step {
                Step::Encode => job.encode(task, &mut scratch),
                Step::Pack => job.pack(m, region, task),
                Step::GateUp => job.gate_up(m, region, task, &mut scratch),
                Step::Down => job.down(m, region, task, &mut scratch),
                Step::Combine => job.combine(region, task, &mut scratch),
            };
            if !ready {
                break;
            }
        }
        SCRATCH.set(Some(scratch));
    }
}

/// The tasks. Each returns false if what it waits for will never be.
impl<R: Recipe, O: Output> Job<'_, R, O> {
    fn geometry(&self) -> BankGeometry {
        self.call.bank.geometry()
    }

    /// Rounds some rows of x.
    #[inline(always)]
    fn encode(&self, task: usize, scratch: &mut Scratch) -> bool {
        let rows = self.call.x.len() / self.geometry().hidden;
        let first = task * self.encode_rows;
        for row in first..rows.min(first + self.encode_rows) {
            // SAFETY: each row belongs to one task, and readers wait for `encoded_all`.
            unsafe {
                self.encoded
                    .encode::<R>(self.call.x, row, &mut scratch.wide)
            };
        }
        self.encoded_all.done();
        true
    }

    /// Gathers one group of x.
    #[inline(always)]
    fn pack<M: Multiply>(&self, m: M, region: &Region, task: usize) -> bool {
        let of_task = |block: &Block<'_>| block.first_group <= task;
        let block = &self.blocks[self.blocks.partition_point(of_task) - 1];
        let group = task - block.first_group;
        let tokens = &block.tokens[group * TOKENS..][..block.group_tokens(group)];
        if !region.wait(&self.encoded_all) {
            return false;
        }
        // SAFETY: each group belongs to one task, and readers wait for `packed`; all rows are
        // encoded.
        unsafe {
            self.x.pack(m, task, tokens.len(), |t| {
                self.encoded.row(tokens[t] as usize)
            });
        }
        block.packed.done();
        true
    }

    /// Groups `first..` of `block` that one pass serves.
    ///
    /// # Safety
    /// As [`Groups::group`].
    #[inline(always)]
    unsafe fn pass<'g>(
        groups: &'g Groups<'_>,
        block: &Block<'_>,
        first: usize,
        count: usize,
    ) -> [Group<'g>; MAX_PASS] {
        std::array::from_fn(|g| {
            let group = first + g.min(count - 1);
            // SAFETY: passed on from the caller.
            unsafe { groups.group(block.first_group + group, block.group_tokens(group)) }
        })
    }

    /// Gate, up and activation for some pairs of panels of a slice; whoever completes the slice
    /// rounds its h.
    #[inline(always)]
    fn gate_up<M: Multiply>(
        &self,
        m: M,
        region: &Region,
        task: usize,
        scratch: &mut Scratch,
    ) -> bool {
        let geometry = self.geometry();
        let parts = self.division.parts();
        let (block_slice, part) = (task / parts, task % parts);
        let slice = block_slice % geometry.slices();
        let block = &self.blocks[block_slice / geometry.slices()];
        if !region.wait(&block.packed) {
            return false;
        }
        let len = geometry.slice_len(slice);
        let first_pair = part * self.division.pairs;
        let end_pair = len
            .div_ceil(PANEL_ROWS)
            .min(first_pair + self.division.pairs);
        let passes = block.groups().div_ceil(M::GROUPS);
        let mut first = 0;
        while first < block.groups() {
            let count = M::GROUPS.min(block.groups() - first);
            // SAFETY: the groups of the block are packed.
            let x = unsafe { Self::pass(&self.x, block, first, count) };
            let x = &x[..count];
            scratch.h.resize(MAX_PASS, [[0.0; TOKENS]; SLICE]);
            // One pass: a stream of pairs. Several: all panels share each chunk of K.
            let set = match passes {
                1 => 1,
                _ => self.division.pairs,
            };
            let mut pair = first_pair;
            while pair < end_pair {
                let pairs = set.min(end_pair - pair);
                product::multiply::<R, M>(
                    m,
                    &Panels {
                        count: 2 * pairs,
                        units: geometry.hidden_units(),
                        panel: |p| Panel::packed(block.expert.gate_up_panel(slice, 2 * pair + p)),
                        scales: |p, k_block| {
                            block.expert.gate_up_scales(slice, 2 * pair + p, k_block)
                        },
                        stride: geometry.hidden_panel_bytes(),
                        chunk_units: match passes {
                            1 => usize::MAX,
                            _ => M::CHUNK_UNITS,
                        },
                    },
                    x,
                    &mut scratch.tiles,
                );
                for p in 0..pairs {
                    let gate_bias = block.expert.gate_up_bias(slice, 2 * (pair + p));
                    let up_bias = block.expert.gate_up_bias(slice, 2 * (pair + p) + 1);
                    for g in 0..count {
                        let y = &mut scratch.tiles.y;
                        let (gate, up) = (2 * p * count + g, (2 * p + 1) * count + g);
                        add_bias(&mut y[gate], &gate_bias);
                        add_bias(&mut y[up], &up_bias);
                        let row = (pair + p) * PANEL_ROWS;
                        let h = &mut scratch.h[g][row..][..PANEL_ROWS];
                        activate(self.call.activation, &y[gate], &y[up], h);
                    }
                }
                pair += pairs;
            }
            for g in 0..count {
                let group = block.first_group + first + g;
                if parts == 1 {
                    self.round_hidden(m, group, slice, &scratch.h[g][..len], &mut scratch.words);
                } else {
                    let rows = first_pair * PANEL_ROWS..len.min(end_pair * PANEL_ROWS);
                    if !rows.is_empty() {
                        // SAFETY: these rows of the group belong to this task; the reader waits
                        // for the slice's latch.
                        let staged = unsafe {
                            self.staged
                                .write(self.staged_row(group, slice) + rows.start, rows.len())
                        };
                        staged.copy_from_slice(&scratch.h[g][rows]);
                    }
                }
            }
            first += count;
        }
        if self.slices[block_slice].done() {
            if parts > 1 {
                for group in block.first_group..block.first_group + block.groups() {
                    // SAFETY: all tasks of the slice are done, and this one saw that.
                    let h = unsafe { self.staged.read(self.staged_row(group, slice), len) };
                    self.round_hidden(m, group, slice, h, &mut scratch.words);
                }
            }
            block.hidden.done();
        }
        true
    }

    fn staged_row(&self, group: usize, slice: usize) -> usize {
        (group * self.geometry().slices() + slice) * SLICE
    }

    /// Rounds h of one group and slice.
    #[inline(always)]
    fn round_hidden<M: Multiply>(
        &self,
        m: M,
        group: usize,
        slice: usize,
        h: &[Lanes<f32>],
        words: &mut Vec<Lanes<u32>>,
    ) {
        words.resize(SLICE * size_of::<R::Code>() / 4, [0; TOKENS]);
        let (mut scales, mut sums) = ([1.0; TOKENS], [0; TOKENS]);
        R::encode_hidden(h, words, &mut scales, &mut sums);
        // SAFETY: only the task that completes the slice calls this; readers wait for `hidden`.
        unsafe { self.h.store_slice(m, group, slice, words, scales, sums) };
    }

    /// Some rows of down, over all of I.
    #[inline(always)]
    fn down<M: Multiply>(&self, m: M, region: &Region, task: usize, scratch: &mut Scratch) -> bool {
        let geometry = self.geometry();
        let ranges = geometry.down_panels().div_ceil(self.division.down_panels);
        let block = &self.blocks[task / ranges];
        let first_panel = task % ranges * self.division.down_panels;
        let panels = first_panel
            ..geometry
                .down_panels()
                .min(first_panel + self.division.down_panels);
        if !region.wait(&block.hidden) {
            return false;
        }
        let mut first = 0;
        while first < block.groups() {
            let count = M::GROUPS.min(block.groups() - first);
            // SAFETY: h of the block is complete.
            let h = unsafe { Self::pass(&self.h, block, first, count) };
            for panel in panels.clone() {
                self.down_panel(m, block, panel, first, &h[..count], &mut scratch.tiles);
            }
            first += count;
        }
        self.down_all.done();
        true
    }

    /// One panel of down for the groups of one pass, `first` the first of them in the block.
    #[inline(always)]
    fn down_panel<M: Multiply>(
        &self,
        m: M,
        block: &Block<'_>,
        panel: usize,
        first: usize,
        h: &[Group<'_>],
        tiles: &mut Tiles,
    ) {
        let geometry = self.geometry();
        let expert = block.expert;
        tiles.clear(h.len());
        if R::BLOCKED_H {
            for slice in 0..geometry.slices() {
                let weights = Panel::packed(expert.down_panel(slice, panel))
                    .prefetching(geometry.down_panel_bytes());
                let span = Span {
                    unit: slice * geometry.down_units(),
                    block: slice,
                    accumulate: false,
                };
                let rows = expert.down_block_scales(slice, panel);
                let (sums, y) = tiles.of::<R>();
                R::multiply(m, weights, h, span, &mut sums[..h.len()]);
                for (g, h) in h.iter().enumerate() {
                    R::add_block(&sums[g], &rows, &h.scales[slice], &mut y[g]);
                }
            }
        } else {
            let weights = Panel::runs(
                expert.down_panels_from(panel),
                geometry.down_units(),
                geometry.slice_bytes(),
                geometry.slices(),
            );
            let span = Span {
                unit: 0,
                block: 0,
                accumulate: false,
            };
            let (sums, y) = tiles.of::<R>();
            R::multiply(m, weights, h, span, &mut sums[..h.len()]);
            for (sums, y) in sums.iter().zip(y).take(h.len()) {
                R::add_block(sums, &[1.0; PANEL_ROWS], &[1.0; TOKENS], y);
            }
        }
        let scales = expert.down_row_scales(panel);
        let bias = expert.down_bias(panel);
        let column = panel * PANEL_ROWS;
        let columns = PANEL_ROWS.min(geometry.hidden - column);
        for (g, y) in tiles.y.iter_mut().enumerate() {
            if let Some(scales) = &scales {
                for (row, scale) in y.0.iter_mut().zip(scales) {
                    for value in row {
                        *value *= scale;
                    }
                }
            }
            add_bias(y, &bias);
            let by_token = m.transpose(&y.to_words()).to_floats();
            let tokens = block.group_tokens(first + g);
            for (t, values) in by_token.0[..tokens].iter().enumerate() {
                let row = block.start + (first + g) * TOKENS + t;
                // SAFETY: blocks own their rows (validated disjoint) and tasks of one block their
                // columns; readers wait for `down_all`.
                let out = unsafe { self.y.write(row * geometry.hidden + column, columns) };
                out.copy_from_slice(&values[..columns]);
            }
        }
    }

    /// The weighted sums of some columns of some tokens.
    #[inline(always)]
    fn combine(&self, region: &Region, task: usize, scratch: &mut Scratch) -> bool {
        if !region.wait(&self.down_all) {
            return false;
        }
        let Some(Sums { slots, tasks, out }) = &self.combine else {
            return true;
        };
        let parts = Combine {
            // SAFETY: all of y is written.
            y: unsafe { self.y.read_all() },
            hidden: self.geometry().hidden,
            top_k: slots.top_k,
            output_index: slots.output_index,
            weights: slots.weights,
            shared: None,
        };
        tasks.run(task, &parts, &mut scratch.wide, |start, sums| {
            // SAFETY: each task has columns of its own.
            let out = unsafe { out.write(start, sums.len()) };
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out = O::from_f32(sum);
            }
        });
        true
    }
}

#[inline(always)]
fn add_bias(y: &mut Tile<f32>, bias: &Option<Lanes<f32>>) {
    if let Some(bias) = bias {
        for (row, bias) in y.0.iter_mut().zip(bias) {
            for value in row {
                *value += bias;
            }
        }
    }
}

/// The activation of 16 rows of 16 tokens. One loop for each kind, so that each can become vector
/// code.
#[inline(always)]
fn activate(activation: Activation, gate: &Tile<f32>, up: &Tile<f32>, h: &mut [Lanes<f32>]) {
    #[inline(always)]
    fn each(
        gate: &Tile<f32>,
        up: &Tile<f32>,
        h: &mut [Lanes<f32>],
        apply: impl Fn(f32, f32) -> f32,
    ) {
        for ((h, gate), up) in h.iter_mut().zip(&gate.0).zip(&up.0) {
            for t in 0..TOKENS {
                h[t] = apply(gate[t], up[t]);
            }
        }
    }
    match activation {
        Activation::SwiGlu => each(gate, up, h, |g, u| Activation::SwiGlu.apply(g, u)),
        Activation::ClampedSwiGlu { limit, alpha } => each(gate, up, h, |g, u| {
            Activation::ClampedSwiGlu { limit, alpha }.apply(g, u)
        }),
    }
}
