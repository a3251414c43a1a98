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
use std::ops::Range;

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::{BankGeometry, PANEL_ROWS, SLICE};

use crate::CpuError;
use crate::bank::{BankRef, ExpertRef};
use crate::combine::{Combine, SlotTasks, Slots};
use crate::gemm::Output;
use crate::kernels::{Body, Group, Kernel, Multiply, Panel, Span, prefetch_bytes};
use crate::pool::Workers;
use crate::product::{self, Tiles, Weights};
use crate::recipe::{Recipe, add_block};
use crate::region::{Latch, Region};
use crate::rows::{self, RowWriter};
use crate::shared::Shared;
use crate::tile::{Lanes, TOKENS, Tile};
use crate::tokens::{Encoded, Groups, MAX_PASS, Rows, pass, row_bytes};
use crate::validate::{disjoint_rows, same};
use crate::vector::{LaneRows, Vector, VectorMath};
use crate::workspace::{Buffer, Workspace};

/// Most tokens of a block: their h and sums stay in the second-level cache.
const BLOCK_TOKENS: usize = 512;
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
    /// Its part of the slices.
    slices: Range<usize>,
    /// Slices of the blocks before it.
    first_slice: usize,
    kernel: Kernel,
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
    /// The part of the slices that each group takes; `None`: all of them.
    pub(crate) slices: Option<&'a [Range<usize>]>,
}

/// Checks the parts of the slices of a call.
pub(crate) fn validate_slices(
    bank: BankRef<'_>,
    groups: &[ExpertGroup<'_>],
    slices: &[Range<usize>],
) -> Result<(), CpuError> {
    same("the number of slice ranges", groups.len(), slices.len())?;
    let of_expert = bank.geometry().slices();
    let bad = |range: &Range<usize>| range.start >= range.end || range.end > of_expert;
    match slices.iter().position(bad) {
        None => Ok(()),
        Some(group) => Err(CpuError::SliceRange {
            group,
            range: slices[group].clone(),
            slices: of_expert,
        }),
    }
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
    let (mut groups, mut slice_count) = (0, 0);
    for (number, group) in call.groups.iter().enumerate() {
        let part = call.slices.map_or(0..slices, |parts| parts[number].clone());
        for (i, tokens) in group.tokens.chunks(BLOCK_TOKENS).enumerate() {
            let count = tokens.len().div_ceil(TOKENS);
            blocks.push(Block {
                expert: call.bank.expert(group.expert),
                start: group.start + i * BLOCK_TOKENS,
                tokens,
                first_group: groups,
                slices: part.clone(),
                first_slice: slice_count,
                kernel: match R::EXACT {
                    true => kernel.for_few_tokens(tokens.len()),
                    false => kernel,
                },
                packed: Latch::new(count),
                hidden: Latch::new(part.len()),
            });
            groups += count;
            slice_count += part.len();
        }
    }

    let division = Division::new(&geometry, blocks.len(), slice_count, workers.threads());
    let rows = call.x.len() / geometry.hidden;
    let encode_rows = (ENCODE_ELEMENTS / geometry.hidden).max(1);
    let steps = Steps::new([
        if blocks.is_empty() {
            0
        } else {
            rows.div_ceil(encode_rows)
        },
        groups,
        slice_count * division.parts(),
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
    let job = Job::<R, O> {
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
        slices: (0..slice_count)
            .map(|_| Latch::new(division.parts()))
            .collect(),
        stream: rows::streams::<f32>(y.len()),
        y: Shared::new(y),
        combine,
        encoded_all: Latch::new(steps.count(Step::Encode)),
        down_all: Latch::new(steps.count(Step::Down)),
        steps,
        recipe: PhantomData,
    };
    Region::run(workers, job.steps.total(), &|region| {
        job.work(kernel, region)
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
    fn new(geometry: &BankGeometry, blocks: usize, slices: usize, threads: usize) -> Self {
        let wanted = threads * TASKS_A_THREAD;
        let size = |items: usize, most: usize| {
            let size = (items / wanted).clamp(1, most);
            // Powers of two divide a slice evenly.
            1 << size.ilog2()
        };
        Self {
            pairs: size(slices * SLICE_PAIRS, SLICE_PAIRS),
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
    /// Whether y passes the caches by.
    stream: bool,
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
    /// Parts of rows of y.
    runs: Buffer,
    /// The rounded words of one slice.
    words: Vec<Lanes<u32>>,
    /// One row of x in f32.
    wide: Vec<f32>,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// What a task works with.
struct Task<'j, 'a, R: Recipe, O> {
    job: &'j Job<'a, R, O>,
    /// Number of the task in its step.
    number: usize,
    scratch: &'j mut Scratch,
}

impl<R: Recipe, O: Output> Job<'_, R, O> {
    /// One thread's share of the region.
    fn work(&self, kernel: Kernel, region: &Region) {
        let mut scratch = SCRATCH.take().unwrap_or_default();
        while let Some(task) = region.take() {
            let (step, number) = self.steps.locate(task);
            let ready = match step {
                Step::Encode => true,
                Step::Pack => region.wait(&self.encoded_all),
                Step::GateUp => region.wait(&self.block_of_gate_up(number).packed),
                Step::Down => region.wait(&self.block_of_down(number).hidden),
                Step::Combine => region.wait(&self.down_all),
            };
            if !ready {
                break;
            }
            let task = Task {
                job: self,
                number,
                scratch: &mut scratch,
            };
            match step {
                Step::Encode => kernel.run(Encode(task)),
                Step::Pack => self.block_of_group(number).kernel.run(Pack(task)),
                Step::GateUp => self.block_of_gate_up(number).kernel.run(GateUp(task)),
                Step::Down => self.block_of_down(number).kernel.run(Down(task)),
                Step::Combine => kernel.run(Sum(task)),
            }
        }
        SCRATCH.set(Some(scratch));
    }

    fn geometry(&self) -> BankGeometry {
        self.call.bank.geometry()
    }

    fn block_of_group(&self, group: usize) -> &Block<'_> {
        let of_group = |block: &Block<'_>| block.first_group <= group;
        &self.blocks[self.blocks.partition_point(of_group) - 1]
    }

    fn block_of_gate_up(&self, number: usize) -> &Block<'_> {
        let slice = number / self.division.parts();
        let of_slice = |block: &Block<'_>| block.first_slice <= slice;
        &self.blocks[self.blocks.partition_point(of_slice) - 1]
    }

    fn block_of_down(&self, number: usize) -> &Block<'_> {
        &self.blocks[number / self.down_ranges()]
    }

    /// Down tasks of a block.
    fn down_ranges(&self) -> usize {
        self.geometry()
            .down_panels()
            .div_ceil(self.division.down_panels)
    }

    /// Row of `staged` where a slice of a group begins.
    fn staged_row(&self, group: usize, slice: usize) -> usize {
        (group * self.geometry().slices() + slice) * SLICE
    }

    /// Rounds h of one group and slice.
    ///
    /// # Safety
    /// The caller completed the slice, and reports it only afterwards.
    #[inline(always)]
    unsafe fn round_hidden<M: Multiply>(
        &self,
        m: M,
        group: usize,
        slice: usize,
        h: &[Lanes<f32>],
        words: &mut Vec<Lanes<u32>>,
    ) {
        words.resize(SLICE * size_of::<R::Code>() / 4, [0; TOKENS]);
        let (mut scales, mut sums) = ([1.0; TOKENS], [0; TOKENS]);
        R::encode_hidden(m.vector(), h, words, &mut scales, &mut sums);
        // SAFETY: nobody else touches the slice, by this function's contract.
        unsafe { self.h.store_slice(m, group, slice, words, scales, sums) };
    }
}

/// Rounds some rows of x.
struct Encode<'j, 'a, R: Recipe, O>(Task<'j, 'a, R, O>);

impl<R: Recipe, O: Output> Body for Encode<'_, '_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Task {
            job,
            number,
            scratch,
        } = self.0;
        let rows = job.call.x.len() / job.geometry().hidden;
        let first = number * job.encode_rows;
        for row in first..rows.min(first + job.encode_rows) {
            // SAFETY: each row belongs to one task, and readers wait for `encoded_all`.
            unsafe {
                job.encoded
                    .encode::<R, _>(m.vector(), job.call.x, row, &mut scratch.wide);
            }
        }
        job.encoded_all.done();
    }
}

/// Gathers one group of x.
struct Pack<'j, 'a, R: Recipe, O>(Task<'j, 'a, R, O>);

impl<R: Recipe, O: Output> Body for Pack<'_, '_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Task { job, number, .. } = self.0;
        let block = job.block_of_group(number);
        let group = number - block.first_group;
        let tokens = &block.tokens[group * TOKENS..][..block.group_tokens(group)];
        // SAFETY: each group belongs to one task, and readers wait for `packed`; all rows are
        // encoded.
        unsafe {
            job.x.pack(m, number, tokens.len(), |t| {
                job.encoded.row(tokens[t] as usize)
            });
        }
        block.packed.done();
    }
}

/// Gate and up panels of a slice from panel `first` on.
struct GateUpPanels<'a> {
    expert: ExpertRef<'a>,
    slice: usize,
    first: usize,
}

impl Weights for GateUpPanels<'_> {
    #[inline(always)]
    fn panel(&self, p: usize) -> Panel<'_> {
        self.expert
            .panel(self.expert.gate_up_panel(self.slice, self.first + p))
    }

    #[inline(always)]
    fn scales(&self, p: usize, block: usize) -> Lanes<f32> {
        self.expert
            .gate_up_scales(self.slice, self.first + p, block)
    }
}

/// Gate, up and activation for some pairs of panels of a slice; whoever completes the slice rounds
/// its h.
struct GateUp<'j, 'a, R: Recipe, O>(Task<'j, 'a, R, O>);

impl<R: Recipe, O: Output> Body for GateUp<'_, '_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Task {
            job,
            number,
            scratch,
        } = self.0;
        let v = m.vector();
        let geometry = job.geometry();
        let parts = job.division.parts();
        let (block_slice, part) = (number / parts, number % parts);
        let block = job.block_of_gate_up(number);
        let slice = block.slices.start + block_slice - block.first_slice;
        let len = geometry.slice_len(slice);
        let first_pair = part * job.division.pairs;
        let end_pair = len
            .div_ceil(PANEL_ROWS)
            .min(first_pair + job.division.pairs);
        let rows = first_pair * PANEL_ROWS..len.min(end_pair * PANEL_ROWS);
        let Scratch {
            tiles, h, words, ..
        } = scratch;
        h.resize(MAX_PASS, [[0.0; TOKENS]; SLICE]);
        let mut first = 0;
        while first < block.groups() {
            let count = M::GROUPS.min(block.groups() - first);
            // SAFETY: the groups of the block are packed.
            let x = unsafe { pass(&job.x, block.first_group, block.tokens.len(), first, count) };
            let x = &x[..count];
            for pair in first_pair..end_pair {
                let weights = GateUpPanels {
                    expert: block.expert,
                    slice,
                    first: 2 * pair,
                };
                let shape = product::Shape {
                    panels: 2,
                    units: geometry.hidden_units(),
                    in_cache: first > 0,
                };
                let products = product::multiply::<R, M>(m, &weights, shape, x, tiles);
                let (gate_rows, up_rows) = (weights.scales(0, 0), weights.scales(1, 0));
                let gate_bias = block.expert.gate_up_bias(slice, 2 * pair);
                let up_bias = block.expert.gate_up_bias(slice, 2 * pair + 1);
                for (g, h) in h[..count].iter_mut().enumerate() {
                    let gate = Biased {
                        rows: products.scaled(v, 0, g, &x[g], &gate_rows),
                        bias: &gate_bias,
                    };
                    let up = Biased {
                        rows: products.scaled(v, 1, g, &x[g], &up_rows),
                        bias: &up_bias,
                    };
                    let rows = &mut h.as_chunks_mut::<PANEL_ROWS>().0[pair];
                    for (r, h) in rows.iter_mut().enumerate() {
                        let (gate, up) = (gate.row(v, r), up.row(v, r));
                        v.store(v.activate(job.call.activation, gate, up), h);
                    }
                }
            }
            for (g, h) in h[..count].iter().enumerate() {
                let group = block.first_group + first + g;
                if parts == 1 {
                    // SAFETY: this task has all of the slice.
                    unsafe { job.round_hidden(m, group, slice, &h[..len], words) };
                } else if !rows.is_empty() {
                    // SAFETY: these rows of the group belong to this task; the reader waits for
                    // the slice's latch.
                    let staged = unsafe {
                        let start = job.staged_row(group, slice) + rows.start;
                        job.staged.write(start, rows.len())
                    };
                    staged.copy_from_slice(&h[rows.clone()]);
                }
            }
            first += count;
        }
        if job.slices[block_slice].done() {
            if parts > 1 {
                for group in block.first_group..block.first_group + block.groups() {
                    // SAFETY: all tasks of the slice are done, and this one saw that.
                    unsafe {
                        let h = job.staged.read(job.staged_row(group, slice), len);
                        job.round_hidden(m, group, slice, h, words);
                    }
                }
            }
            block.hidden.done();
        }
    }
}

/// Some rows of down, over all of I.
struct Down<'j, 'a, R: Recipe, O>(Task<'j, 'a, R, O>);

impl<R: Recipe, O: Output> Body for Down<'_, '_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let Task {
            job,
            number,
            scratch,
        } = self.0;
        let geometry = job.geometry();
        let block = job.block_of_down(number);
        let first_panel = number % job.down_ranges() * job.division.down_panels;
        let end_panel = geometry
            .down_panels()
            .min(first_panel + job.division.down_panels);
        let panels = first_panel..end_panel;
        let Scratch { tiles, runs, .. } = scratch;
        let v = m.vector();
        // Later panels are fetched while their neighbours are multiplied; for the first all slices
        // are asked for at once.
        for slice in block.slices.clone() {
            prefetch_bytes(block.expert.down_panel(slice, first_panel));
        }
        let mut first = 0;
        while first < block.groups() {
            let count = M::GROUPS.min(block.groups() - first);
            // SAFETY: h of the block is complete.
            let h = unsafe { pass(&job.h, block.first_group, block.tokens.len(), first, count) };
            let column = first_panel * PANEL_ROWS;
            // SAFETY: blocks own their rows (validated disjoint) and tasks of one block their
            // columns; readers wait for `down_all`.
            let mut rows = unsafe {
                RowWriter::new(
                    &job.y,
                    (block.start + first * TOKENS) * geometry.hidden + column,
                    geometry.hidden,
                    (panels.len() * PANEL_ROWS).min(geometry.hidden - column),
                    runs,
                    job.stream,
                )
            };
            for (i, panel) in panels.clone().enumerate() {
                let down = DownPanel {
                    job,
                    expert: block.expert,
                    slices: block.slices.clone(),
                    panel,
                    h: &h[..count],
                    in_cache: first > 0,
                };
                let y = down.run(m, tiles);
                let (scales, bias) = (down.row_scales(), down.bias());
                for (g, y) in y.iter().enumerate() {
                    let y = Biased {
                        rows: RowScaled { y, scales: &scales },
                        bias: &bias,
                    };
                    rows.put(v, i, g, h[g].tokens, &y);
                }
            }
            first += count;
        }
        v.fence();
        job.down_all.done();
    }
}

/// 16 rows of down for the groups of one pass.
struct DownPanel<'j, 'a, R: Recipe, O> {
    job: &'j Job<'a, R, O>,
    expert: ExpertRef<'a>,
    slices: Range<usize>,
    panel: usize,
    h: &'j [Group<'j>],
    /// Whether an earlier pass has read the weights.
    in_cache: bool,
}

impl<R: Recipe, O: Output> DownPanel<'_, '_, R, O> {
    #[inline(always)]
    fn run<'t, M: Multiply>(&self, m: M, tiles: &'t mut Tiles) -> &'t [Tile<f32>] {
        let v = m.vector();
        let geometry = self.job.geometry();
        let groups = self.h.len();
        // Two sets of sums: a slice is scaled while the next one is multiplied.
        let (sums, y) = tiles.room::<R>(2 * groups, groups);
        if R::BLOCKED_H {
            let Range { start, end } = self.slices;
            for slice in start..=end {
                if slice < end {
                    self.multiply_slice(m, slice, &mut sums[slice % 2 * groups..][..groups]);
                }
                if slice > start {
                    let slice = slice - 1;
                    self.add_slice(v, slice, &sums[slice % 2 * groups..][..groups], y);
                }
            }
        } else {
            let weights = Panel::runs(
                self.expert.down_panels_from(self.slices.start, self.panel),
                geometry.down_units(),
                geometry.slice_bytes(),
                self.slices.len(),
            );
            let span = Span {
                unit: self.slices.start * geometry.down_units(),
                block: 0,
            };
            R::multiply(
                m,
                self.prefetching(weights),
                self.h,
                span,
                &mut sums[..groups],
            );
            for (sums, y) in sums.iter().zip(&mut *y) {
                add_block::<R, _>(v, true, sums, None, &[1.0; TOKENS], y);
            }
        }
        y
    }

    /// Scales of the rows over all of I.
    #[inline(always)]
    fn row_scales(&self) -> Option<Lanes<f32>> {
        self.expert.down_row_scales(self.panel)
    }

    /// The biases; of the parts of an expert, the one with the first slice adds them.
    #[inline(always)]
    fn bias(&self) -> Option<Lanes<f32>> {
        match self.slices.start {
            0 => self.expert.down_bias(self.panel),
            _ => None,
        }
    }

    /// The same panel; the one that follows in its slice is fetched meanwhile.
    #[inline(always)]
    fn prefetching<'w>(&self, weights: Panel<'w>) -> Panel<'w> {
        weights.prefetching(match self.in_cache {
            true => 0,
            false => self.job.geometry().down_panel_bytes(),
        })
    }

    #[inline(always)]
    fn multiply_slice<M: Multiply>(&self, m: M, slice: usize, sums: &mut [Tile<R::Sum>]) {
        let weights = self.expert.panel(self.expert.down_panel(slice, self.panel));
        let span = Span {
            unit: slice * self.job.geometry().down_units(),
            block: slice,
        };
        R::multiply(m, self.prefetching(weights), self.h, span, sums);
    }

    #[inline(always)]
    fn add_slice<V: Vector>(&self, v: V, slice: usize, sums: &[Tile<R::Sum>], y: &mut [Tile<f32>]) {
        let rows = R::DOWN_ROWS_SCALED.then(|| self.expert.down_block_scales(slice, self.panel));
        for (g, h) in self.h.iter().enumerate() {
            let tokens = &h.scales[slice];
            add_block::<R, _>(
                v,
                slice == self.slices.start,
                &sums[g],
                rows.as_ref(),
                tokens,
                &mut y[g],
            );
        }
    }
}

/// The weighted sums of some columns of some tokens.
struct Sum<'j, 'a, R: Recipe, O>(Task<'j, 'a, R, O>);

impl<R: Recipe, O: Output> Body for Sum<'_, '_, R, O> {
    #[inline(always)]
    fn run<M: Multiply>(self, _m: M) {
        let Task {
            job,
            number,
            scratch,
        } = self.0;
        let Some(Sums { slots, tasks, out }) = &job.combine else {
            return;
        };
        let parts = Combine {
            // SAFETY: all of y is written: the task waited for `down_all`.
            y: unsafe { job.y.read_all() },
            hidden: job.geometry().hidden,
            top_k: slots.top_k,
            output_index: slots.output_index,
            weights: slots.weights,
            shared: None,
        };
        tasks.run(number, &parts, &mut scratch.wide, |start, sums| {
            // SAFETY: each task has columns of its own.
            let out = unsafe { out.write(start, sums.len()) };
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out = O::from_f32(sum);
            }
        });
    }
}

/// Rows times their scales.
struct RowScaled<'a> {
    y: &'a Tile<f32>,
    scales: &'a Option<Lanes<f32>>,
}

impl<V: Vector> LaneRows<V> for RowScaled<'_> {
    #[inline(always)]
    fn row(&self, v: V, r: usize) -> V::F {
        let y = self.y.row(v, r);
        match self.scales {
            Some(scales) => v.mul(y, v.splat(scales[r])),
            None => y,
        }
    }
}

/// Rows plus their biases.
struct Biased<'a, S> {
    rows: S,
    bias: &'a Option<Lanes<f32>>,
}

impl<V: Vector, S: LaneRows<V>> LaneRows<V> for Biased<'_, S> {
    #[inline(always)]
    fn row(&self, v: V, r: usize) -> V::F {
        let row = self.rows.row(v, r);
        match self.bias {
            Some(bias) => v.add(row, v.splat(bias[r])),
            None => row,
        }
    }
}
