//! Errors of the grouped GEMM.

use crate::driver::DriverError;
use asym_gemm_cpu::dense::DenseError;

impl From<std::convert::Infallible> for GemmError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// What can be wrong with a grouped GEMM call.
#[derive(Debug, thiserror::Error)]
pub enum GemmError {
    /// A view does not fit the memory it borrows, or two operands do not fit each other.
    #[error("{what}: {reason}")]
    Shape {
        /// The operand.
        what: &'static str,
        /// What does not fit, with the numbers.
        reason: String,
    },
    /// The hardware path needs what the operand does not have.
    #[error("{what}: {reason}")]
    Unsupported {
        /// The operand.
        what: &'static str,
        /// What is needed, and what to do.
        reason: String,
    },
    /// A group is out of range, overlaps another or is malformed.
    #[error("group {index}: {reason}")]
    Group {
        /// Position in the list of groups.
        index: usize,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A row is for an expert that does not exist.
    #[error("m_indices: row {row} is for expert {expert}; there are {experts}, and -1 for padding")]
    Row {
        /// The row of A.
        row: usize,
        /// The id found there.
        expert: i32,
        /// Number of experts.
        experts: usize,
    },
    /// An operand or the stream belongs to another GPU than the GEMM.
    #[error("{what} is of another GPU; copy it over or use a GroupedGemm of that GPU")]
    OtherGpu {
        /// The operand.
        what: &'static str,
    },
    /// Operands of a general GEMM that do not fit.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
