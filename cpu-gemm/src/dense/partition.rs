//! How problems are cut into tasks. What a task is does not change any result.

use std::ops::Range;

/// Most rows of D in a task.
const MAX_ROWS: usize = 1024;
/// Most columns of D in a task.
const MAX_COLS: usize = 1024;
/// Multiply-adds under which a product is not worth another thread.
const MIN_WORK: usize = 1 << 17;
/// Multiply-adds of a core in the time that packing takes for one element.
const PACK_COST: usize = 12;

/// Part of a problem's D.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) problem: usize,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

/// The tasks of problem number `problem`, m x n x k, for `threads` threads of its own and tiles
/// of `mr` x `nr`.
pub(super) fn cut(
    problem: usize,
    [m, n, k]: [usize; 3],
    (mr, nr): (usize, usize),
    threads: usize,
    tasks: &mut Vec<Task>,
) {
    if m == 0 || n == 0 {
        return;
    }
    let least = (m.div_ceil(MAX_ROWS), n.div_ceil(MAX_COLS));
    let work = m.saturating_mul(n).saturating_mul(k.max(1));
    let most = threads.min(work / MIN_WORK).max(1);
    let mut best = (usize::MAX, (m, n));
    // More parts than threads along a side cannot pay.
    for parts_m in least.0..=(least.0 * 2).max(most) {
        let rows = m.div_ceil(parts_m).next_multiple_of(mr);
        for parts_n in least.1..=(least.1 * 2).max(most) {
            let cols = n.div_ceil(parts_n).next_multiple_of(nr);
            let count = m.div_ceil(rows) * n.div_ceil(cols);
            let cost = rows * cols + PACK_COST * (rows + cols);
            let cost = count.div_ceil(most).saturating_mul(cost);
            if cost < best.0 {
                best = (cost, (rows, cols));
            }
        }
    }
    let (rows, cols) = best.1;
    for row in (0..m).step_by(rows) {
        for col in (0..n).step_by(cols) {
            tasks.push(Task {
                problem,
                rows: row..m.min(row + rows),
                cols: col..n.min(col + cols),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_in_one_task() {
        for (m, n) in [
            (1, 1),
            (5, 40),
            (130, 17),
            (1024, 1024),
            (3000, 2049),
            (1, 5000),
        ] {
            for threads in [1, 2, 3, 16] {
                let mut tasks = Vec::new();
                cut(0, [m, n, 512], (14, 32), threads, &mut tasks);
                let covered: usize = tasks.iter().map(|t| t.rows.len() * t.cols.len()).sum();
                assert_eq!(covered, m * n, "{m} {n} {threads}");
                for t in &tasks {
                    assert!(t.rows.len() <= MAX_ROWS + 14 && t.cols.len() <= MAX_COLS + 32);
                    assert!(t.rows.end <= m && t.cols.end <= n);
                    assert_eq!((t.rows.start % 14, t.cols.start % 32), (0, 0));
                }
            }
        }
    }

    #[test]
    fn threads_share_a_large_product_evenly() {
        let mut tasks = Vec::new();
        cut(0, [1024, 1024, 1024], (6, 16), 2, &mut tasks);
        assert_eq!(tasks.len(), 2);
        tasks.clear();
        cut(0, [4, 4, 4], (6, 16), 16, &mut tasks);
        assert_eq!(tasks.len(), 1);
    }
}
