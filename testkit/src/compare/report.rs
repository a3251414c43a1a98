//! What a comparison found, and why it failed.

use std::fmt;
use std::ops::Range;

/// Where an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinate {
    /// Index into the expected groups.
    pub group: usize,
    /// Row of the whole matrix.
    pub row: usize,
    /// Column.
    pub col: usize,
}

impl fmt::Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, row, col } = self;
        write!(f, "row {row}, column {col} (group {group})")
    }
}

/// How one group of rows did.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupReport {
    /// Its rows.
    pub rows: Range<usize>,
    /// Elements out of bounds.
    pub failures: usize,
    /// Largest |error| / tolerance; infinite for a NaN.
    pub worst_ratio: f64,
    /// Norm of the errors over the norm of the expected values (0 / 0 is 0); NaN for a NaN.
    pub frobenius: f64,
    /// Whether a group of zeros would be within bounds too although it is wrong: the
    /// bound then says nothing about this group.
    pub accepts_zeros: bool,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What was compared.
    pub name: String,
    /// Elements compared.
    pub elements: usize,
    /// Largest |error| / tolerance.
    pub worst_ratio: f64,
    /// Where that is; `None` if nothing was compared.
    pub worst_at: Option<Coordinate>,
    /// Norm of all errors over the norm of all expected values.
    pub frobenius: f64,
    /// The same for each group.
    pub groups: Vec<GroupReport>,
}

impl Report {
    /// The report, if no group's Frobenius error is above `limit`.
    ///
    /// An addition to the element bounds, not a replacement: it sees errors that are
    /// small everywhere but all of one kind.
    ///
    /// # Errors
    /// [`Mismatch::Frobenius`] with the first group above the limit.
    pub fn frobenius_below(self, limit: f64) -> Result<Self, Mismatch> {
        let above = |g: &GroupReport| g.frobenius.is_nan() || g.frobenius > limit;
        match self.groups.iter().position(above) {
            None => Ok(self),
            Some(group) => Err(Mismatch::Frobenius {
                name: self.name,
                group,
                rows: self.groups[group].rows.clone(),
                found: self.groups[group].frobenius,
                limit,
            }),
        }
    }

    /// The report, if the bound of every group tells its values from zeros.
    ///
    /// # Errors
    /// [`Mismatch::Vacuous`] with the first group for which it does not.
    pub fn not_vacuous(self) -> Result<Self, Mismatch> {
        match self.groups.iter().position(|g| g.accepts_zeros) {
            None => Ok(self),
            Some(group) => Err(Mismatch::Vacuous {
                name: self.name,
                group,
                rows: self.groups[group].rows.clone(),
            }),
        }
    }
}

/// Why a comparison failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Mismatch {
    /// The lengths differ.
    #[error("{name}: {got} elements, expected {want}")]
    Length {
        /// What was compared.
        name: String,
        /// Elements found.
        got: usize,
        /// Elements expected.
        want: usize,
    },
    /// Elements are out of bounds.
    #[error(
        "{}: {failures} of {} elements out of bounds; first at {at}: got {got:e}, expected \
         {want:e} ± {tolerance:e}; worst error {:.3e} times its tolerance at {}; Frobenius \
         error {:.3e}; groups with failures: {}",
        report.name, report.elements, report.worst_ratio, worst_at(report), report.frobenius,
        failing_groups(report)
    )]
    Element {
        /// First element out of bounds.
        at: Coordinate,
        /// Its value.
        got: f64,
        /// Its expected value.
        want: f64,
        /// Its tolerance.
        tolerance: f64,
        /// How many are out of bounds.
        failures: usize,
        /// All the rest.
        report: Box<Report>,
    },
    /// Bits differ.
    #[error(
        "{name}: {failures} of {elements} elements differ; first at row {row}, column {col}: got {got}, expected {want}"
    )]
    Bits {
        /// What was compared.
        name: String,
        /// Row of the first element that differs.
        row: usize,
        /// Its column.
        col: usize,
        /// Its value and bytes.
        got: String,
        /// The expected ones.
        want: String,
        /// How many differ.
        failures: usize,
        /// Elements compared.
        elements: usize,
    },
    /// A group's errors are too large together.
    #[error(
        "{name}: Frobenius error {found:e} of group {group} (rows {rows:?}) is above {limit:e}"
    )]
    Frobenius {
        /// What was compared.
        name: String,
        /// The group.
        group: usize,
        /// Its rows.
        rows: Range<usize>,
        /// Its error.
        found: f64,
        /// The largest allowed.
        limit: f64,
    },
    /// A bound cannot fail.
    #[error(
        "{name}: zeros would pass for group {group} (rows {rows:?}); use larger values or a tighter bound"
    )]
    Vacuous {
        /// What was compared.
        name: String,
        /// The group.
        group: usize,
        /// Its rows.
        rows: Range<usize>,
    },
}

fn worst_at(report: &Report) -> String {
    report
        .worst_at
        .map_or_else(String::new, |at| at.to_string())
}

fn failing_groups(report: &Report) -> String {
    let failing = report
        .groups
        .iter()
        .enumerate()
        .filter(|(_, g)| g.failures > 0);
    let mut text: Vec<String> = failing
        .clone()
        .take(8)
        .map(|(i, g)| {
            let GroupReport {
                rows,
                failures,
                frobenius,
                ..
            } = g;
            format!("{i} (rows {rows:?}: {failures} elements, Frobenius error {frobenius:.2e})")
        })
        .collect();
    let more = failing.count().saturating_sub(text.len());
    if more > 0 {
        text.push(format!("{more} more"));
    }
    text.join(", ")
}
