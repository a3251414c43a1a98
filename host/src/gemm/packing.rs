//! From the ways in which callers say which rows are whose to lists of groups.

use super::{GemmError, GroupRange};

/// Value of an expert id that says: nobody's.
const NOBODY: i32 = -1;

/// Which expert the rows of a contiguous packing are for.
///
/// Rows may start anywhere and be any number; an expert may have none, or several ranges.
/// Rows that no expert has keep what they hold in D.
#[derive(Clone, Copy, Debug)]
pub enum Packing<'a> {
    /// Rows `ranges[i].0..ranges[i].1` are for expert `experts[i]`. An id of -1 leaves its
    /// range out, whatever that is.
    Ranges {
        /// First row and one past the last row.
        ranges: &'a [(usize, usize)],
        /// As many expert ids.
        experts: &'a [i32],
    },
    /// Row r is for expert `m_indices[r]`; -1 is padding.
    Rows {
        /// An expert id for each row of A.
        m_indices: &'a [i32],
    },
}

impl Packing<'_> {
    /// The groups of A with `rows` rows and B with `experts` matrices. Those of ranges are as
    /// many as the ranges, empty where they are left out; those of rows are the runs of equal
    /// ids, in the order of rows.
    ///
    /// # Errors
    /// [`GemmError::Shape`] if a list has the wrong length, [`GemmError::Group`] for a range
    /// and [`GemmError::Row`] for a row with an expert that does not exist. Whether ranges are
    /// inside A and apart from each other is for the product to check.
    pub fn groups(&self, rows: usize, experts: usize) -> Result<Vec<GroupRange>, GemmError> {
        match *self {
            Self::Ranges {
                ranges,
                experts: ids,
            } => of_ranges(ranges, ids, experts),
            Self::Rows { m_indices } => of_rows(m_indices, rows, experts),
        }
    }
}

/// The groups of a masked packing [experts, max_m, ..]: the first `masked_m[e]` rows of the
/// `max_m` of each expert e. The others keep what they hold in D.
///
/// # Errors
/// [`GemmError::Group`] for a count below 0 or above `max_m`.
pub fn masked_groups(masked_m: &[i32], max_m: usize) -> Result<Vec<GroupRange>, GemmError> {
    let group = |(weight, &count): (usize, &i32)| match usize::try_from(count) {
        Ok(count) if count <= max_m => {
            // What does not fit a usize is past the rows of any A, which the product refuses.
            let start = max_m.saturating_mul(weight);
            let end = start.saturating_add(count);
            Ok(GroupRange { weight, start, end })
        }
        _ => Err(GemmError::Group {
            index: weight,
            reason: format!("{count} rows; possible are 0 to {max_m}"),
        }),
    };
    masked_m.iter().enumerate().map(group).collect()
}

/// The expert of an id: `Ok(None)` for nobody, the id itself where there is no such expert.
fn expert(id: i32, experts: usize) -> Result<Option<usize>, i32> {
    match usize::try_from(id) {
        _ if id == NOBODY => Ok(None),
        Ok(expert) if expert < experts => Ok(Some(expert)),
        _ => Err(id),
    }
}

fn of_ranges(
    ranges: &[(usize, usize)],
    ids: &[i32],
    experts: usize,
) -> Result<Vec<GroupRange>, GemmError> {
    if ranges.len() != ids.len() {
        return Err(GemmError::Shape {
            what: "experts",
            reason: format!("{} ids for {} ranges of rows", ids.len(), ranges.len()),
        });
    }
    let group = |(index, (&(start, end), &id))| match expert(id, experts) {
        Ok(Some(weight)) => Ok(GroupRange { weight, start, end }),
        // Its place stays, so that errors of later ones name the caller's index.
        Ok(None) => Ok(GroupRange {
            weight: 0,
            start: 0,
            end: 0,
        }),
        Err(id) => Err(GemmError::Group {
            index,
            reason: format!("expert {id}; there are {experts}, and -1 for none"),
        }),
    };
    ranges.iter().zip(ids).enumerate().map(group).collect()
}

fn of_rows(m_indices: &[i32], rows: usize, experts: usize) -> Result<Vec<GroupRange>, GemmError> {
    if m_indices.len() != rows {
        return Err(GemmError::Shape {
            what: "m_indices",
            reason: format!("{} ids for {rows} rows of A", m_indices.len()),
        });
    }
    let mut groups: Vec<GroupRange> = Vec::new();
    for (row, &id) in m_indices.iter().enumerate() {
        let weight = match expert(id, experts) {
            Ok(Some(weight)) => weight,
            Ok(None) => continue,
            Err(id) => {
                return Err(GemmError::Row {
                    row,
                    expert: id,
                    experts,
                });
            }
        };
        match groups.last_mut() {
            Some(last) if last.weight == weight && last.end == row => last.end += 1,
            _ => groups.push(GroupRange {
                weight,
                start: row,
                end: row + 1,
            }),
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (weight, start, end) of each group.
    fn tuples(groups: &[GroupRange]) -> Vec<(usize, usize, usize)> {
        groups.iter().map(|g| (g.weight, g.start, g.end)).collect()
    }

    fn ranges<'a>(ranges: &'a [(usize, usize)], experts: &'a [i32]) -> Packing<'a> {
        Packing::Ranges { ranges, experts }
    }

    #[test]
    fn ranges_keep_their_order_and_nobodys_are_empty() {
        let packing = ranges(&[(4, 9), (7, 3), (0, 4), (9, 9)], &[2, -1, 0, 1]);
        let groups = packing.groups(9, 3).unwrap();
        assert_eq!(
            tuples(&groups),
            [(2, 4, 9), (0, 0, 0), (0, 0, 4), (1, 9, 9)]
        );
        assert!(ranges(&[], &[]).groups(9, 3).unwrap().is_empty());
        assert!(ranges(&[(0, 1)], &[0]).groups(9, 0).is_err());
    }

    #[test]
    fn lists_of_different_lengths_are_refused() {
        for (packing, list) in [
            (ranges(&[(0, 1)], &[]), "experts"),
            (ranges(&[], &[0]), "experts"),
            (Packing::Rows { m_indices: &[0; 4] }, "m_indices"),
            (Packing::Rows { m_indices: &[0; 6] }, "m_indices"),
        ] {
            match packing.groups(5, 3) {
                Err(GemmError::Shape { what, .. }) => assert_eq!(what, list),
                other => panic!("{packing:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn experts_that_do_not_exist_are_named() {
        for bad in [3, i32::MAX, -2, i32::MIN] {
            let ids = [0, -1, bad];
            let error = ranges(&[(0, 1), (1, 2), (2, 3)], &ids)
                .groups(3, 3)
                .unwrap_err();
            assert!(matches!(error, GemmError::Group { index: 2, .. }), "{bad}");
            assert!(error.to_string().contains(&bad.to_string()), "{error}");
            match (Packing::Rows { m_indices: &ids }).groups(3, 3) {
                Err(GemmError::Row {
                    row: 2,
                    expert,
                    experts: 3,
                }) => assert_eq!(expert, bad),
                other => panic!("{bad}: {other:?}"),
            }
        }
    }

    #[test]
    fn rows_become_the_runs_of_equal_ids() {
        let m_indices = [-1, 1, 1, -1, 1, 0, 0, 0, 2, -1, -1];
        let groups = Packing::Rows {
            m_indices: &m_indices,
        }
        .groups(11, 3)
        .unwrap();
        assert_eq!(
            tuples(&groups),
            [(1, 1, 3), (1, 4, 5), (0, 5, 8), (2, 8, 9)]
        );
        // Each row is in the one group of its expert, or in none.
        for (row, &id) in m_indices.iter().enumerate() {
            let of_row: Vec<i32> = groups
                .iter()
                .filter(|g| (g.start..g.end).contains(&row))
                .map(|g| g.weight as i32)
                .collect();
            assert_eq!(of_row, if id < 0 { vec![] } else { vec![id] });
        }
        assert!((Packing::Rows { m_indices: &[0] }).groups(1, 0).is_err());
        for padding in [&[][..], &[-1, -1]] {
            let packing = Packing::Rows { m_indices: padding };
            assert!(packing.groups(padding.len(), 1).unwrap().is_empty());
        }
    }

    #[test]
    fn masked_groups_start_at_multiples_of_max_m() {
        let groups = masked_groups(&[5, 0, 8], 8).unwrap();
        assert_eq!(tuples(&groups), [(0, 0, 5), (1, 8, 8), (2, 16, 24)]);
        assert!(masked_groups(&[], 8).unwrap().is_empty());
        let last = masked_groups(&[1; 3], usize::MAX).unwrap()[2];
        assert_eq!((last.start, last.end), (usize::MAX, usize::MAX));
        for bad in [-1, 9, i32::MIN, i32::MAX] {
            match masked_groups(&[8, bad], 8) {
                Err(GemmError::Group { index: 1, reason }) => {
                    assert!(reason.contains(&bad.to_string()), "{reason}");
                }
                other => panic!("{bad}: {other:?}"),
            }
        }
    }
}
