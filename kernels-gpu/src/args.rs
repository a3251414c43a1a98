//! Kernel arguments, laid out the same on host and device.
//!
//! Device addresses travel as `u64`: a pointer inside a by-value struct would make
//! every access a generic one. All counts are in elements unless named otherwise.

/// One expert's rows of a grouped GEMM: rows `start..end` of A and D use weight `weight`.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// First row.
    pub start: u32,
    /// One past the last row; equal to `start` for an empty group.
    pub end: u32,
    /// Index of the weight matrix.
    pub weight: u32,
    /// Fills the struct to one 16-byte load.
    pub reserved: u32,
}

/// Where the value for weight `w`, output column `n` and K block `b` lies in a table of f32:
///
/// `base + w * weight_stride + (n / segment_columns) * segment_stride
///  + (n % segment_columns) * column_stride + b * block_stride` (bytes).
///
/// One form for plain scale matrices and for the tables inside a bank's slices.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColumnTable {
    /// Device address; 0 when there is no table.
    pub base: u64,
    /// Bytes from one weight's table to the next.
    pub weight_stride: u64,
    /// Bytes from one segment of columns to the next.
    pub segment_stride: u64,
    /// Bytes from one K block to the next.
    pub block_stride: u64,
    /// Columns in one segment (0 counts as 1); a multiple of 128, or at least N.
    pub segment_columns: u32,
    /// Bytes from one column to the next.
    pub column_stride: u32,
}

impl ColumnTable {
    /// No table: nothing is read from it.
    pub const NONE: Self = Self {
        base: 0,
        weight_stride: 0,
        segment_stride: 0,
        block_stride: 0,
        segment_columns: u32::MAX,
        column_stride: 0,
    };

    /// Address of the value for `weight` and `column` in block 0.
    #[inline(always)]
    pub fn address(&self, weight: u32, column: u32) -> u64 {
        let segment = column / self.segment_columns.max(1);
        self.base
            + weight as u64 * self.weight_stride
            + segment as u64 * self.segment_stride
            + (column - segment * self.segment_columns) as u64 * self.column_stride as u64
    }
}

/// How the tensor maps of B are to be read.
pub mod weight_layout {
    /// One 3-D map [G, N, K] over row-major matrices, a parameter of the kernel.
    pub const ROWS: u32 = 0;
    /// One 5-D map for each weight over a bank's panels
    /// (slice, panel, unit, row, 128 bytes).
    pub const PANELS: u32 = 1;
}

/// Bits of [`GemmArgs::flags`].
pub mod gemm_flags {
    /// D is bf16; otherwise f32.
    pub const D_BF16: u32 = 1;
    /// Rows of D can be stored in vectors (16 bytes of bf16, 8 of f32).
    pub const D_VECTOR: u32 = 2;
}

/// Where blocks that only copy put the weights that they read from host memory, for all row
/// tiles to share: see [`crate::relay`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayArgs {
    /// Device address of the ring, [`crate::relay::UNIT_BYTES`] a slot.
    pub ring: u64,
    /// Device address of u32 words, 0 at the start of the kernel: one for each slot, then one
    /// for each column tile of the launch.
    pub state: u64,
    /// Slots of the ring; at least the units of one column tile.
    pub slots: u32,
    /// Blocks that copy, the first of the grid; 0 for weights that are loaded in place.
    pub couriers: u32,
}

/// D = A · B^T for each group. Passed by value after the tensor maps of A and of a row-major B.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GemmArgs {
    /// Device address of `[Group; group_count]`.
    pub groups: u64,
    /// Panels: device address of B's tensor maps, one a weight (128 bytes each, 64-byte aligned).
    pub b_maps: u64,
    /// Device address of D's first row and column.
    pub d: u64,
    /// Elements from one row of D to the next.
    pub d_stride: u64,
    /// Device address of A's scales: f32 `[M, a_scale_stride]` (one for all rows if the stride
    /// is 0), or 0.
    pub a_scales: u64,
    /// B's scales.
    pub b_scales: ColumnTable,
    /// Added to each column at the end.
    pub bias: ColumnTable,
    /// How weights come from host memory.
    pub relay: RelayArgs,
    /// Scales of one row of A.
    pub a_scale_stride: u32,
    /// Number of groups.
    pub group_count: u32,
    /// Columns of D, rows of one weight.
    pub n: u32,
    /// Steps of 128 bytes along K.
    pub k_steps: u32,
    /// See [`weight_layout`].
    pub b_layout: u32,
    /// Panels: panels of B in one slice (N runs over slices, then panels); 0 counts as 1.
    pub panels_per_slice: u32,
    /// Panels: units of B along K in one slice (K runs over slices, then units); 0 counts as 1.
    pub units_per_slice: u32,
    /// See [`gemm_flags`].
    pub flags: u32,
    /// Weight index of the first matrix or map of B: a chunk's are numbered from 0.
    pub first_weight: u32,
    /// One past the largest weight index; a group with another one counts as empty.
    pub weight_end: u32,
    /// Rows of A and D; a group that goes past them counts as empty.
    pub rows: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub reserved: u32,
}

/// Packs token rows for the first expert product: packed row r takes token
/// `source[r]`, rounded to bf16 or quantised; −1 gives a row of zeros.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PackRowsArgs {
    /// f32 or bf16 [T, hidden], rows `x_stride` apart.
    pub x: u64,
    /// i32 `[rows]`.
    pub source: u64,
    /// bf16 or i8 [rows, padded].
    pub out: u64,
    /// f32 [rows, blocks]; unused for bf16.
    pub scales: u64,
    /// Elements from one row of x to the next.
    pub x_stride: u64,
    /// Columns that hold values.
    pub hidden: u32,
    /// Columns written (the rest zero); a multiple of 16.
    pub padded: u32,
    /// Whether x is bf16: 0 or 1.
    pub x_bf16: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub reserved: u32,
}

/// Groups the slots of a few tokens by expert on the device, for work that is recorded once and
/// run with other routings.
///
/// Slots take rows in the order of their experts, slots of one expert in their own order; skipped
/// slots take the last rows, which belong to nobody.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GroupRowsArgs {
    /// i32 [T, top_k]: experts; −1, or any other number that is no expert, skips the slot.
    pub ids: u64,
    /// i32 `[T * top_k]`: the token of each row, −1 for a row of nobody.
    pub source: u64,
    /// i32 [T, top_k]: the row of each slot, −1 for a skipped one.
    pub output_index: u64,
    /// `[Group; T * top_k]`: an entry for each row; an expert's first row has its group, the
    /// other entries are empty.
    pub groups: u64,
    /// u32: becomes 1 if an id is neither −1 nor an expert.
    pub status: u64,
    /// Slots, T * top_k; at most 1024.
    pub slots: u32,
    /// Slots of a token.
    pub top_k: u32,
    /// Number of experts.
    pub experts: u32,
    /// Fills the struct to a multiple of 8 bytes.
    pub reserved: u32,
}

/// h = act(gate, up) for the packed rows of a chunk of experts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ActivateArgs {
    /// f32 [rows, slices * 256]: in each slice 16 gate columns, then 16 up columns, and so on.
    pub gate_up: u64,
    /// bf16 or i8 [rows, slices * 128].
    pub h: u64,
    /// f32 [rows, slices]; unused for bf16.
    pub scales: u64,
    /// Number of slices.
    pub slices: u32,
    /// Columns of h that the model has; those behind it, up to whole slices, become 0
    /// (an infinite token times the bank's zero padding would be NaN).
    pub intermediate: u32,
    /// 0: silu(gate) * up; 1: the clamped form.
    pub clamped: u32,
    /// Bound of the clamped form.
    pub limit: f32,
    /// Slope of the clamped form.
    pub alpha: f32,
    /// Fills the struct to a multiple of 8 bytes.
    pub reserved: u32,
}

/// `out[t]` = sum over slots of weight * `y[row]`, then the partial sums made elsewhere, then the
/// shared expert's row; rounded once.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CombineArgs {
    /// f32 [rows, hidden]: unweighted expert outputs.
    pub y: u64,
    /// i32 [T, top_k]: row of y, −1 for a skipped slot.
    pub output_index: u64,
    /// f32 [T, top_k].
    pub weights: u64,
    /// f32 [partial_count, T, hidden]: weighted sums of other devices, added in this order; may
    /// be host memory.
    pub partials: u64,
    /// Elements from one partial sum to the next.
    pub partial_stride: u64,
    /// f32 [T, hidden] of the shared expert, or 0.
    pub shared: u64,
    /// f32 `[T]`: the shared expert's weight for each token; used with `shared`.
    pub shared_weights: u64,
    /// f32 or bf16 [T, hidden]; may be host memory.
    pub out: u64,
    /// Columns.
    pub hidden: u32,
    /// Slots of a token.
    pub top_k: u32,
    /// Number of partial sums.
    pub partial_count: u32,
    /// Whether `out` is bf16: 0 or 1.
    pub out_bf16: u32,
}

/// Reads a buffer and does nothing with it: the rate of reads by the SMs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReadArgs {
    /// Device-visible address, 16-byte aligned.
    pub source: u64,
    /// 16-byte vectors to read.
    pub vectors: u64,
    /// One word, written only so that the reads are not dropped.
    pub sink: u64,
}
