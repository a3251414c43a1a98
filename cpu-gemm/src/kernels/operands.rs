//! What a product multiplies: panels of weights and groups of tokens.

use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{PANEL_ROWS, UNIT_BYTES, UNIT_ROW_BYTES};

use crate::tile::{Lanes, TOKENS, Tile};

/// 16 rows of weights, read where they lie.
///
/// ```text
/// run 0:  unit 0 | unit 1 | ..     units `unit_stride` bytes apart
/// run 1:  ..                       runs `run_stride` bytes apart
/// unit:   16 rows x 128 bytes      rows `row_stride` bytes apart
/// ```
///
/// A bank's panel has rows 128 and units 2048 bytes apart; a row-major matrix has units 128
/// bytes and rows a whole row apart. Runs are the slices over which a down panel is spread.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'a> {
    bytes: &'a [u8],
    row_stride: usize,
    unit_stride: usize,
    units: usize,
    run_stride: usize,
    runs: usize,
    /// Bytes from a load to what is worth prefetching beside it.
    prefetch: usize,
}

impl<'a> Panel<'a> {
    /// Bytes ahead that a sequential stream is prefetched: 4 to 16 KiB do equally well on a
    /// Sapphire Rapids Xeon, and the panels of a bank follow each other.
    const STREAM_AHEAD: usize = 4 * UNIT_BYTES;
    /// The same in each row of a row-major matrix.
    const ROW_AHEAD: usize = 4 * UNIT_ROW_BYTES;

    /// A panel of a bank: consecutive units.
    #[inline(always)]
    pub(crate) fn packed(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            row_stride: UNIT_ROW_BYTES,
            unit_stride: UNIT_BYTES,
            units: bytes.len() / UNIT_BYTES,
            run_stride: 0,
            runs: 1,
            prefetch: Self::STREAM_AHEAD,
        }
    }

    /// A panel of a bank whose units have `unit_bytes` bytes, which need not be [`UNIT_BYTES`].
    #[inline(always)]
    pub(crate) fn of_units(bytes: &'a [u8], unit_bytes: usize) -> Self {
        Self {
            unit_stride: unit_bytes,
            units: bytes.len() / unit_bytes,
            ..Self::packed(bytes)
        }
    }

    /// The first unit of a panel of fp4.
    #[inline(always)]
    pub(super) fn fp4_unit(&self) -> &'a [u8] {
        &self.bytes[..self.unit_stride]
    }

    /// `units` consecutive units at the start of each `run_stride` bytes, `runs` times.
    ///
    /// # Panics
    /// If the last run ends outside `bytes`.
    #[inline(always)]
    pub(crate) fn runs(bytes: &'a [u8], units: usize, run_stride: usize, runs: usize) -> Self {
        assert!((runs - 1) * run_stride + units * UNIT_BYTES <= bytes.len());
        Self {
            units,
            run_stride,
            runs,
            // The panel that follows in every run.
            prefetch: units * UNIT_BYTES,
            ..Self::packed(bytes)
        }
    }

    /// 16 rows of a row-major matrix, `units` * 128 bytes of each.
    ///
    /// # Panics
    /// If the last row ends outside `bytes`.
    #[inline(always)]
    pub(crate) fn row_major(bytes: &'a [u8], row_stride: usize, units: usize) -> Self {
        assert!((PANEL_ROWS - 1) * row_stride + units * UNIT_ROW_BYTES <= bytes.len());
        Self {
            bytes,
            row_stride,
            unit_stride: UNIT_ROW_BYTES,
            units,
            run_stride: 0,
            runs: 1,
            prefetch: Self::ROW_AHEAD,
        }
    }

    /// Units `first..first + count` of a panel of one run.
    ///
    /// # Panics
    /// If the panel has fewer units.
    #[inline(always)]
    pub(crate) fn part(self, first: usize, count: usize) -> Self {
        assert!(self.runs == 1 && first + count <= self.units);
        Self {
            bytes: &self.bytes[first * self.unit_stride..],
            units: count,
            ..self
        }
    }

    /// The same weights; prefetches reach `bytes` ahead, 0 for none.
    #[inline(always)]
    pub(crate) fn prefetching(self, bytes: usize) -> Self {
        Self {
            prefetch: bytes,
            ..self
        }
    }

    /// Units of all runs.
    #[inline(always)]
    pub(crate) fn total_units(&self) -> usize {
        self.units * self.runs
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    pub(super) fn unit_stride(&self) -> usize {
        self.unit_stride
    }

    pub(super) fn units(&self) -> usize {
        self.units
    }

    pub(super) fn run_stride(&self) -> usize {
        self.run_stride
    }

    pub(super) fn run_count(&self) -> usize {
        self.runs
    }

    pub(super) fn prefetch(&self) -> usize {
        self.prefetch
    }

    /// The units of run `run` as a panel of their own.
    #[inline(always)]
    pub(super) fn run(self, run: usize) -> Self {
        debug_assert!(run < self.runs);
        Self {
            bytes: &self.bytes[run * self.run_stride..],
            runs: 1,
            ..self
        }
    }

    /// The 128 bytes of a row in a unit of a panel of one run.
    #[inline(always)]
    pub(super) fn row(&self, unit: usize, row: usize) -> &'a [u8; UNIT_ROW_BYTES] {
        let start = unit * self.unit_stride + row * self.row_stride;
        self.bytes[start..]
            .first_chunk()
            .expect("constructors checked the last row of the last unit")
    }
}

/// The bf16 values of one unit of e4m3 weights: the two units of 16 rows x 64 that they make.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Expanded(pub(super) [[[u8; UNIT_ROW_BYTES]; PANEL_ROWS]; 2]);

impl Expanded {
    /// Where 32 values go: quarter `quarter` of row `row`.
    #[inline(always)]
    pub(super) fn line(out: &mut MaybeUninit<Self>, row: usize, quarter: usize) -> *mut [u8; 64] {
        assert!(row < PANEL_ROWS && quarter < 4);
        let at = (quarter / 2 * PANEL_ROWS + row) * 2 + quarter % 2;
        // SAFETY: of 64 lines at most the last.
        unsafe { out.as_mut_ptr().cast::<[u8; 64]>().add(at) }
    }

    /// As a panel of bf16.
    #[inline(always)]
    pub(crate) fn panel(&self) -> Panel<'_> {
        Panel::packed(self.0.as_flattened().as_flattened()).prefetching(0)
    }
}

/// How a kernel wants the activations of a group of 16 tokens, as 4-byte words along K (four int8
/// or two bf16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenLayout {
    /// `[token][word]`.
    Rows,
    /// `[word][token]`: each 16 words are a 1 KiB tile, the B operand of a tile product.
    Tiles,
}

/// Up to 16 tokens as a kernel reads them.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    /// 16 tokens x K in the kernel's layout, K padded with zeros to whole units.
    pub(crate) bytes: &'a [u8],
    /// Tokens that exist, 1 to 16. In `Tiles` the others are zero, in `Rows` anything.
    pub(crate) tokens: usize,
    /// For each block of K the scale of each token.
    pub(crate) scales: &'a [Lanes<f32>],
    /// For each block of K the sum of each token's int8 codes.
    pub(crate) sums: &'a [Lanes<i32>],
}

impl<'a> Group<'a> {
    /// No tokens.
    pub(crate) const EMPTY: Self = Self {
        bytes: &[],
        tokens: 0,
        scales: &[],
        sums: &[],
    };

    /// Bytes of K of one token.
    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.bytes.len() / TOKENS
    }

    /// In `Rows`: the bytes of `units` units of `token` from unit `first` on.
    #[inline(always)]
    pub(super) fn row(&self, token: usize, first: usize, units: usize) -> &'a [u8] {
        let start = token * self.row_bytes() + first * UNIT_ROW_BYTES;
        &self.bytes[start..][..units * UNIT_ROW_BYTES]
    }
}

/// Which part of K a product covers.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    /// First unit of the activations.
    pub(crate) unit: usize,
    /// Block whose code sums belong to the part.
    pub(crate) block: usize,
}

/// Products of one panel with each group of a pass, to be written.
pub(crate) type Products<'a, T> = &'a mut [Tile<T>];

/// Prefetches all of `bytes`.
#[inline(always)]
pub(crate) fn prefetch_bytes(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        prefetch(line.as_ptr());
    }
}

/// Asks for a line in the second-level cache. Never faults, wherever `at` points.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch accesses no memory that a program could observe.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
