//! What can be wrong with a call.

use crate::Isa;
use crate::pool::TaskPanic;

/// Everything this crate refuses. Arguments are checked before any memory is touched,
/// so an error leaves the outputs as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// `ASYM_GEMM_ISA` names no instruction set of this crate.
    #[error(
        "ASYM_GEMM_ISA is `{name}`; it must be `amx`, `avx512`, `avx2` or `portable`, or unset"
    )]
    UnknownIsa {
        /// The value found.
        name: String,
    },
    /// A forced instruction set that this processor lacks.
    #[error("{isa} needs {missing}, which this processor or its operating system does not offer")]
    IsaUnavailable {
        /// The instruction set asked for.
        isa: Isa,
        /// The CPU features it misses, comma-separated.
        missing: String,
    },
    /// A dimension that must not be zero is.
    #[error("{what} is 0")]
    Zero {
        /// The dimension.
        what: &'static str,
    },
    /// A dimension is beyond what the arithmetic or the address space can take.
    #[error("{what} is {value}, the most is {limit}")]
    TooLarge {
        /// The dimension.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The largest value allowed.
        limit: usize,
    },
    /// A buffer or dimension does not fit the others.
    #[error("{what} is {actual}, expected {expected}")]
    Mismatch {
        /// The length or dimension, with its unit.
        what: &'static str,
        /// What the other arguments ask for.
        expected: usize,
        /// What was given.
        actual: usize,
    },
    /// A group's part of the slices is empty or goes past the expert.
    #[error("group {group}: slices {range:?} are not a part of 0..{slices}")]
    SliceRange {
        /// Index of the group.
        group: usize,
        /// The part.
        range: std::ops::Range<usize>,
        /// Slices of an expert.
        slices: usize,
    },
    /// A buffer is shorter than its shape and strides reach.
    #[error("{what} holds {actual} elements, its shape and strides reach {needed}")]
    TooShort {
        /// The buffer.
        what: &'static str,
        /// Elements that the shape and strides reach.
        needed: usize,
        /// Elements given.
        actual: usize,
    },
    /// Rows, or the matrices of two groups, would overlap.
    #[error("{what} is {stride}, it must be at least {least}")]
    Stride {
        /// The stride.
        what: &'static str,
        /// Its value.
        stride: usize,
        /// The smallest value allowed.
        least: usize,
    },
    /// A group names an expert or weight matrix that does not exist.
    #[error("group {group} uses expert {expert}, there are {experts}")]
    ExpertOutOfRange {
        /// Position of the group in the call.
        group: usize,
        /// The index given.
        expert: usize,
        /// How many there are.
        experts: usize,
    },
    /// A group names a token that does not exist.
    #[error("group {group}, position {position}: token {token}, there are {tokens}")]
    TokenOutOfRange {
        /// Position of the group in the call.
        group: usize,
        /// Position in the group's token list.
        position: usize,
        /// The index given.
        token: u32,
        /// Rows of x.
        tokens: usize,
    },
    /// A group's rows lie outside the output, or end before they start.
    #[error("group {group} covers rows {start}..{end} of {rows}")]
    RowsOutOfRange {
        /// Position of the group in the call.
        group: usize,
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Rows of the output.
        rows: usize,
    },
    /// Two groups write the same row.
    #[error("groups {first} and {second} both write row {row}")]
    OverlappingRows {
        /// The group that starts first.
        first: usize,
        /// The other.
        second: usize,
        /// The first row both cover.
        row: usize,
    },
    /// A slot of combine points outside y.
    #[error(
        "token {token}, slot {slot}: output index {index} is neither -1 nor one of {rows} rows"
    )]
    OutputIndex {
        /// The token.
        token: usize,
        /// Its slot.
        slot: usize,
        /// The index given.
        index: i32,
        /// Rows of y.
        rows: usize,
    },
    /// A number of threads that no pool can have.
    #[error("{origin}: `{value}` is no number of threads from 1 to 1024")]
    ThreadCount {
        /// Who asked.
        origin: &'static str,
        /// The number, as given.
        value: String,
    },
    /// The system refused to start a thread.
    #[error("a pool of {threads} threads cannot start: {reason}")]
    ThreadStart {
        /// Threads of the pool.
        threads: usize,
        /// The system's answer.
        reason: String,
    },
    /// A CPU to pin a thread to that this process may not use, or that another thread has.
    #[error("CPU {cpu} is outside of the affinity mask of this process, or named twice")]
    CpuUnavailable {
        /// The CPU.
        cpu: usize,
    },
    /// The system refused to pin a thread.
    #[error("a thread cannot be pinned to CPU {cpu}: {reason}")]
    Pin {
        /// The CPU.
        cpu: usize,
        /// The system's answer.
        reason: String,
    },
    /// Memory that the system does not give.
    #[error("{bytes} bytes of memory are not to be had")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// A parallel task panicked; what it computed is incomplete.
    #[error(transparent)]
    TaskPanic(#[from] TaskPanic),
}
