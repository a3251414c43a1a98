//! Checks that several entry points share.

use crate::CpuError;

/// Checks that `ranges` (start and end, one for each group) lie in `0..rows` and share no row.
pub(crate) fn disjoint_rows(ranges: &[(usize, usize)], rows: usize) -> Result<(), CpuError> {
    for (group, &(start, end)) in ranges.iter().enumerate() {
        if start > end || end > rows {
            return Err(CpuError::RowsOutOfRange {
                group,
                start,
                end,
                rows,
            });
        }
    }
    let mut order: Vec<usize> = (0..ranges.len())
        .filter(|&group| ranges[group].0 < ranges[group].1)
        .collect();
    order.sort_unstable_by_key(|&group| ranges[group].0);
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if ranges[second].0 < ranges[first].1 {
            return Err(CpuError::OverlappingRows {
                first,
                second,
                row: ranges[second].0,
            });
        }
    }
    Ok(())
}

/// Checks that `actual` is `expected`; `what` names the quantity and its unit.
pub(crate) fn same(what: &'static str, expected: usize, actual: usize) -> Result<(), CpuError> {
    if expected == actual {
        Ok(())
    } else {
        Err(CpuError::Mismatch {
            what,
            expected,
            actual,
        })
    }
}
