//! Cutting a list of weights into copies of a good size.

use std::ops::Range;

/// One copy through the ring: whole adjacent weights, or some rows of a single large one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Weights copied, adjacent in memory.
    pub weights: Range<usize>,
    /// Rows of each weight: all of them, unless a single weight is cut.
    pub rows: Range<usize>,
}

/// Cuts the weights `used` (ascending) of `rows` rows of `row_bytes` into chunks of at most
/// `slot_bytes`.
///
/// Adjacent weights are merged up to `target_bytes`; a weight larger than a slot is cut at
/// multiples of `row_granule` rows. Weights that are not used are not copied.
///
/// Returns `None` if not even `row_granule` rows fit into a slot.
pub fn chunks(
    used: &[usize],
    rows: usize,
    row_bytes: usize,
    row_granule: usize,
    target_bytes: usize,
    slot_bytes: usize,
) -> Option<Vec<Chunk>> {
    let weight_bytes = rows * row_bytes;
    let mut out: Vec<Chunk> = Vec::new();
    if weight_bytes > slot_bytes {
        let step = slot_bytes / row_bytes / row_granule * row_granule;
        if step == 0 {
            return None;
        }
        for &weight in used {
            for first in (0..rows).step_by(step) {
                let rows = first..(first + step).min(rows);
                out.push(Chunk {
                    weights: weight..weight + 1,
                    rows,
                });
            }
        }
        return Some(out);
    }
    let limit = target_bytes.clamp(weight_bytes, slot_bytes);
    for &weight in used {
        match out.last_mut() {
            Some(last)
                if last.weights.end == weight
                    && (last.weights.len() + 1) * weight_bytes <= limit =>
            {
                last.weights.end += 1;
            }
            _ => out.push(Chunk {
                weights: weight..weight + 1,
                rows: 0..rows,
            }),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_neighbours_up_to_the_target() {
        let got = chunks(&[0, 1, 2, 3, 7, 8], 10, 1, 4, 30, 100).unwrap();
        let weights: Vec<_> = got.iter().map(|c| c.weights.clone()).collect();
        assert_eq!(weights, [0..3, 3..4, 7..9]);
        assert!(got.iter().all(|c| c.rows == (0..10)));
    }

    #[test]
    fn cuts_a_large_weight_at_the_granule() {
        let got = chunks(&[5], 10, 10, 4, 30, 50).unwrap();
        let rows: Vec<_> = got.iter().map(|c| c.rows.clone()).collect();
        assert_eq!(rows, [0..4, 4..8, 8..10]);
        assert_eq!(chunks(&[5], 10, 10, 4, 30, 39), None);
    }

    #[test]
    fn nothing_used_nothing_copied() {
        assert_eq!(chunks(&[], 10, 10, 4, 30, 1000), Some(vec![]));
    }

    /// Every used row exactly once, no chunk above the slot.
    #[test]
    fn covers_each_used_row_once() {
        for (rows, row_bytes, slot) in [(7, 3, 21), (7, 3, 20), (256, 64, 5000), (1, 1, 1)] {
            let used = [0, 2, 3, 4, 9];
            let got = chunks(&used, rows, row_bytes, 1, 64, slot).unwrap();
            let mut seen = vec![0; 10 * rows];
            for c in &got {
                assert!(c.weights.len() * c.rows.len() * row_bytes <= slot);
                for w in c.weights.clone() {
                    for r in c.rows.clone() {
                        seen[w * rows + r] += 1;
                    }
                }
            }
            for (i, &n) in seen.iter().enumerate() {
                assert_eq!(n, usize::from(used.contains(&(i / rows))), "{i}");
            }
        }
    }
}
