//! Rows grouped by expert.
//!
//! A grouped GEMM wants the rows of one expert next to each other. [`pack`] turns the
//! router's ids into that order and records both directions of the mapping:
//!
//! ```text
//! ids          [T, k]   token and slot        -> expert (-1: the slot is empty)
//! m_indices    [rows]   packed row            -> expert
//! output_index [T, k]   token and slot        -> packed row (-1: empty slot)
//! source_token [rows]   packed row            -> token (-1: padding)
//! groups                expert                -> packed rows start..end
//! ```
//!
//! Experts follow each other in ascending order, tokens keep their order inside an
//! expert, and an expert without tokens takes no rows. With an alignment above one,
//! each group is padded to a multiple of it; padding rows carry their expert's id in
//! `m_indices` and belong to no token. A token may name one expert several times: each
//! slot is a row of its own.
//!
//! [`GroupList`] reads the two forms in which other libraries hand over such groups.

use thiserror::Error;

/// The packed rows of one expert, `start..end`, without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRange {
    /// Expert id.
    pub expert: usize,
    /// First row.
    pub start: usize,
    /// Row after the last one: `start` + number of rows.
    pub end: usize,
}

/// Where each token's rows lie; see the [module documentation](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Packed rows, padding included.
    pub rows: usize,
    /// `[rows]`, the expert of each row.
    pub m_indices: Vec<i32>,
    /// `[tokens * top_k]`, the row of each slot, -1 for an empty slot.
    pub output_index: Vec<i32>,
    /// `[rows]`, the token of each row, -1 for padding.
    pub source_token: Vec<i32>,
    /// The experts that have tokens, ascending.
    pub groups: Vec<GroupRange>,
}

/// A grouping that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The number of ids is not tokens times top_k.
    #[error(
        "{tokens} tokens with {top_k} slots each need {tokens} x {top_k} expert ids, got {found}"
    )]
    IdCount {
        /// Tokens.
        tokens: usize,
        /// Slots of a token.
        top_k: usize,
        /// Ids given.
        found: usize,
    },
    /// An id is neither -1 nor an expert.
    #[error(
        "token {token}, slot {slot}: expert id {id} is not in 0..{experts} (-1 marks an empty slot)"
    )]
    Id {
        /// Token of the id.
        token: usize,
        /// Slot of the id.
        slot: usize,
        /// The id.
        id: i32,
        /// Number of experts.
        experts: usize,
    },
    /// The alignment is not a power of two.
    #[error("row alignment {0} is not a power of two")]
    Alignment(usize),
    /// Row numbers are i32.
    #[error("more than {max} packed rows: split the batch", max = i32::MAX)]
    TooManyRows,
    /// A list that is shorter than it says.
    #[error("`{name}` needs at least {expected} entries, got {found}")]
    Length {
        /// Which argument.
        name: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries given.
        found: usize,
    },
    /// The expert list does not end with -1.
    #[error("entry {index} of `experts` must be the end mark -1, got {found}")]
    Sentinel {
        /// Entry of the list.
        index: usize,
        /// What is there.
        found: i32,
    },
    /// A group's expert id is negative or not an expert.
    #[error("group {group}: expert id {id} is not an expert")]
    GroupExpert {
        /// Entry of the list, or row of `m_indices`.
        group: usize,
        /// The id.
        id: i32,
    },
    /// A group's rows do not lie in the matrix.
    #[error("group {group}: rows {start}..{end} are not in 0..{rows}")]
    GroupRange {
        /// Entry of the list.
        group: usize,
        /// First row.
        start: i32,
        /// Row after the last.
        end: i32,
        /// Rows of the matrix.
        rows: usize,
    },
    /// Two groups claim one row.
    #[error("row {row} belongs to two groups")]
    Overlap {
        /// The row.
        row: usize,
    },
}

/// Groups the slots of `tokens` tokens by expert.
///
/// `ids` is `[tokens, top_k]`, each an expert in `0..experts` or -1 for an empty slot.
/// Each group starts at a multiple of `alignment`, a power of two (1: no padding).
/// Memory is proportional to `tokens * top_k`, padding and `experts`.
///
/// # Errors
/// A wrong number of ids, an id out of range, an alignment that is not a power of two, or
/// more than `i32::MAX` rows.
pub fn pack(
    ids: &[i32],
    tokens: usize,
    top_k: usize,
    experts: usize,
    alignment: usize,
) -> Result<Packed, LayoutError> {
    if tokens.checked_mul(top_k) != Some(ids.len()) {
        return Err(LayoutError::IdCount {
            tokens,
            top_k,
            found: ids.len(),
        });
    }
    if !alignment.is_power_of_two() {
        return Err(LayoutError::Alignment(alignment));
    }
    if ids.len() > i32::MAX as usize {
        return Err(LayoutError::TooManyRows);
    }

    let mut counts: Vec<usize> = Vec::new();
    for (i, &id) in ids.iter().enumerate() {
        if id == -1 {
            continue;
        }
        let expert = usize::try_from(id)
            .ok()
            .filter(|&e| e < experts)
            .ok_or(LayoutError::Id {
                token: i / top_k,
                slot: i % top_k,
                id,
                experts,
            })?;
        if counts.len() <= expert {
            counts.resize(expert + 1, 0);
        }
        counts[expert] += 1;
    }

    // `counts` becomes each expert's next free row.
    let mut groups = Vec::new();
    let mut rows = 0usize;
    for (expert, count) in counts.iter_mut().enumerate() {
        let start = rows;
        let end = start + *count;
        if *count > 0 {
            groups.push(GroupRange { expert, start, end });
        }
        *count = start;
        rows = end
            .checked_next_multiple_of(alignment)
            .ok_or(LayoutError::TooManyRows)?;
        if rows > i32::MAX as usize {
            return Err(LayoutError::TooManyRows);
        }
    }

    let mut m_indices = Vec::with_capacity(rows);
    for (i, group) in groups.iter().enumerate() {
        let next = groups.get(i + 1).map_or(rows, |next| next.start);
        m_indices.resize(next, group.expert as i32);
    }
    let mut next_row = counts;
    let mut source_token = vec![-1; rows];
    let output_index = ids
        .iter()
        .enumerate()
        .map(|(i, &id)| match usize::try_from(id) {
            Ok(expert) => {
                let row = next_row[expert];
                next_row[expert] += 1;
                source_token[row] = (i / top_k) as i32;
                row as i32
            }
            Err(_) => -1,
        })
        .collect();
    Ok(Packed {
        rows,
        m_indices,
        output_index,
        source_token,
        groups,
    })
}

/// Groups of rows as another library hands them over.
///
/// Groups may come in any order and leave rows out; an expert may have several groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupList {
    /// Rows of the matrix that the groups lie in.
    pub rows: usize,
    /// The groups that have rows, in the order given.
    pub groups: Vec<GroupRange>,
}

impl GroupList {
    /// From row ranges and an expert list with an end mark.
    ///
    /// `offsets` holds a (start, end) pair of rows for each entry of `experts`; the list
    /// has `list_size` entries, the end mark -1 included. It may end earlier with -1; all
    /// that follows in the list must then be -1 too. Empty ranges are dropped.
    ///
    /// # Errors
    /// Lists shorter than `list_size` says, a missing end mark, negative ids, ranges that
    /// run backwards, leave `0..rows` or overlap.
    pub fn from_offsets(
        offsets: &[i32],
        experts: &[i32],
        list_size: usize,
        rows: usize,
    ) -> Result<Self, LayoutError> {
        let list = experts.get(..list_size).ok_or(LayoutError::Length {
            name: "experts",
            expected: list_size,
            found: experts.len(),
        })?;
        let Some(&last) = list.last() else {
            return Err(LayoutError::Length {
                name: "experts",
                expected: 1,
                found: 0,
            });
        };
        if last != -1 {
            return Err(LayoutError::Sentinel {
                index: list_size - 1,
                found: last,
            });
        }
        let count = list
            .iter()
            .position(|&id| id == -1)
            .unwrap_or(list_size - 1);
        if let Some(after) = list[count..].iter().position(|&id| id != -1) {
            let index = count + after;
            return Err(LayoutError::Sentinel {
                index,
                found: list[index],
            });
        }
        if offsets.len() / 2 < count {
            return Err(LayoutError::Length {
                name: "offsets",
                expected: 2 * count,
                found: offsets.len(),
            });
        }

        let mut groups = Vec::with_capacity(count);
        for (group, (&id, pair)) in list[..count]
            .iter()
            .zip(offsets.chunks_exact(2))
            .enumerate()
        {
            let expert = usize::try_from(id).map_err(|_| LayoutError::GroupExpert { group, id })?;
            let (start, end) = (pair[0], pair[1]);
            let range = LayoutError::GroupRange {
                group,
                start,
                end,
                rows,
            };
            let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) else {
                return Err(range);
            };
            if start > end || end > rows {
                return Err(range);
            }
            if start < end {
                groups.push(GroupRange { expert, start, end });
            }
        }
        let mut by_row = groups.clone();
        by_row.sort_unstable_by_key(|group| group.start);
        if let Some(pair) = by_row.windows(2).find(|pair| pair[1].start < pair[0].end) {
            return Err(LayoutError::Overlap { row: pair[1].start });
        }
        Ok(Self { rows, groups })
    }

    /// From the expert of each row, -1 for rows of nobody: each run of one id is a group.
    ///
    /// # Errors
    /// Ids below -1.
    pub fn from_m_indices(m_indices: &[i32]) -> Result<Self, LayoutError> {
        let mut groups = Vec::new();
        let mut start = 0;
        for run in m_indices.chunk_by(|a, b| a == b) {
            let end = start + run.len();
            match (run[0], usize::try_from(run[0])) {
                (_, Ok(expert)) => groups.push(GroupRange { expert, start, end }),
                (-1, Err(_)) => {}
                (id, Err(_)) => return Err(LayoutError::GroupExpert { group: start, id }),
            }
            start = end;
        }
        Ok(Self {
            rows: m_indices.len(),
            groups,
        })
    }

    /// Checks every group's expert against the number of experts there are.
    ///
    /// # Errors
    /// The first group whose expert is not in `0..experts`.
    pub fn check_experts(&self, experts: usize) -> Result<(), LayoutError> {
        match self.groups.iter().position(|group| group.expert >= experts) {
            None => Ok(()),
            Some(group) => Err(LayoutError::GroupExpert {
                group,
                id: self.groups[group].expert as i32,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Five tokens, two of four experts each.
    const IDS: [i32; 10] = [0, 2, 1, 3, 0, 2, 1, 3, 0, 2];

    fn range(expert: usize, start: usize, end: usize) -> GroupRange {
        GroupRange { expert, start, end }
    }

    #[test]
    fn worked_example_without_alignment() {
        let packed = pack(&IDS, 5, 2, 4, 1).unwrap();
        assert_eq!(
            packed,
            Packed {
                rows: 10,
                m_indices: vec![0, 0, 0, 1, 1, 2, 2, 2, 3, 3],
                output_index: vec![0, 5, 3, 8, 1, 6, 4, 9, 2, 7],
                source_token: vec![0, 2, 4, 1, 3, 0, 2, 4, 1, 3],
                groups: vec![
                    range(0, 0, 3),
                    range(1, 3, 5),
                    range(2, 5, 8),
                    range(3, 8, 10)
                ],
            }
        );
    }

    #[test]
    fn worked_example_aligned_to_128() {
        let packed = pack(&IDS, 5, 2, 4, 128).unwrap();
        assert_eq!(packed.rows, 512);
        let experts: Vec<i32> = (0..512).map(|row| row / 128).collect();
        assert_eq!(packed.m_indices, experts);
        assert_eq!(
            packed.output_index,
            [0, 256, 128, 384, 1, 257, 129, 385, 2, 258]
        );
        let mut source = vec![-1; 512];
        for (start, tokens) in [
            (0, &[0, 2, 4][..]),
            (128, &[1, 3]),
            (256, &[0, 2, 4]),
            (384, &[1, 3]),
        ] {
            source[start..start + tokens.len()].copy_from_slice(tokens);
        }
        assert_eq!(packed.source_token, source);
        assert_eq!(
            packed.groups,
            [
                range(0, 0, 3),
                range(1, 128, 130),
                range(2, 256, 259),
                range(3, 384, 386)
            ]
        );
    }

    #[test]
    fn experts_without_tokens_take_no_rows() {
        let packed = pack(&[5, 2, 5], 3, 1, 8, 4).unwrap();
        assert_eq!(packed.groups, [range(2, 0, 1), range(5, 4, 6)]);
        assert_eq!(packed.m_indices, [2, 2, 2, 2, 5, 5, 5, 5]);
        assert_eq!(packed.source_token, [1, -1, -1, -1, 0, 2, -1, -1]);
    }

    #[test]
    fn empty_slots_and_empty_batches() {
        let packed = pack(&[-1, -1, 1, -1, 0, 1], 3, 2, 2, 1).unwrap();
        assert_eq!(packed.output_index, [-1, -1, 1, -1, 0, 2]);
        assert_eq!(packed.source_token, [2, 1, 2]);
        for (ids, tokens, top_k) in [(&[-1; 16][..], 2, 8), (&[], 0, 8), (&[], 5, 0)] {
            let packed = pack(ids, tokens, top_k, 4, 128).unwrap();
            assert_eq!((packed.rows, packed.groups.len()), (0, 0));
            assert!(packed.output_index.iter().all(|&row| row == -1));
        }
    }

    #[test]
    fn one_expert_in_every_slot() {
        let packed = pack(&[3; 32], 4, 8, 4, 1).unwrap();
        assert_eq!(packed.groups, [range(3, 0, 32)]);
        assert_eq!(packed.output_index, (0..32).collect::<Vec<_>>());
        let packed = pack(&[3, 3, 5, 3], 1, 4, 6, 1).unwrap();
        assert_eq!(packed.output_index, [0, 1, 3, 2]);
    }

    #[test]
    fn many_experts_and_slots() {
        for experts in [1usize, 3, 60, 96, 384, 512, 1025, 2048, 65_536] {
            for slots in [65_535usize, 65_536, 65_537] {
                let ids: Vec<i32> = (0..slots).map(|i| (i * 7919 % experts) as i32).collect();
                let packed = pack(&ids, slots, 1, experts, 1).unwrap();
                assert_eq!(packed.rows, slots);
                let covered: usize = packed.groups.iter().map(|g| g.end - g.start).sum();
                assert_eq!(covered, slots);
            }
        }
        for hot in [383, 0] {
            let packed = pack(&[hot; 1024], 1024, 1, 384, 128).unwrap();
            assert_eq!(packed.groups, [range(hot as usize, 0, 1024)]);
        }
    }

    #[test]
    fn refuses_what_it_cannot_pack() {
        assert_eq!(
            pack(&[0; 5], 3, 2, 4, 1),
            Err(LayoutError::IdCount {
                tokens: 3,
                top_k: 2,
                found: 5
            })
        );
        assert!(matches!(
            pack(&[], usize::MAX, 2, 4, 1),
            Err(LayoutError::IdCount { .. })
        ));
        for id in [4, i32::MAX, -2, i32::MIN] {
            assert_eq!(
                pack(&[0, 1, 2, id], 2, 2, 4, 1),
                Err(LayoutError::Id {
                    token: 1,
                    slot: 1,
                    id,
                    experts: 4
                })
            );
        }
        for alignment in [0, 3, 127] {
            assert_eq!(
                pack(&IDS, 5, 2, 4, alignment),
                Err(LayoutError::Alignment(alignment))
            );
        }
        for alignment in [1 << 30, 1 << 31, 1 << 62] {
            assert_eq!(
                pack(&IDS, 5, 2, 4, alignment),
                Err(LayoutError::TooManyRows)
            );
        }
    }

    #[test]
    fn offsets_list() {
        let list = GroupList::from_offsets(&[4, 6, 0, 3, 3, 3], &[2, 0, 1, -1], 4, 8).unwrap();
        assert_eq!(list.groups, [range(2, 4, 6), range(0, 0, 3)]);
        assert_eq!(list.check_experts(3), Ok(()));
        assert_eq!(
            list.check_experts(2),
            Err(LayoutError::GroupExpert { group: 0, id: 2 })
        );
        // Only the sentinel; a list that ends early.
        assert!(
            GroupList::from_offsets(&[], &[-1], 1, 0)
                .unwrap()
                .groups
                .is_empty()
        );
        let early = GroupList::from_offsets(&[0, 1, 9, 9], &[0, -1, -1], 3, 1).unwrap();
        assert_eq!(early.groups, [range(0, 0, 1)]);
    }

    #[test]
    fn offsets_list_refusals() {
        type Call<'a> = (&'a [i32], &'a [i32], usize);
        let cases: [(Call<'_>, LayoutError); 9] = [
            (
                (&[0, 1], &[0, -1], 3),
                LayoutError::Length {
                    name: "experts",
                    expected: 3,
                    found: 2,
                },
            ),
            (
                (&[0, 1], &[0, -1], 0),
                LayoutError::Length {
                    name: "experts",
                    expected: 1,
                    found: 0,
                },
            ),
            (
                (&[0, 1], &[0, 1], 2),
                LayoutError::Sentinel { index: 1, found: 1 },
            ),
            (
                (&[0, 1, 1, 2], &[0, -1, 1, -1], 4),
                LayoutError::Sentinel { index: 2, found: 1 },
            ),
            (
                (&[0, 1, 1], &[0, 1, -1], 3),
                LayoutError::Length {
                    name: "offsets",
                    expected: 4,
                    found: 3,
                },
            ),
            (
                (&[0, 1], &[-2, -1], 2),
                LayoutError::GroupExpert { group: 0, id: -2 },
            ),
            (
                (&[2, 1], &[0, -1], 2),
                LayoutError::GroupRange {
                    group: 0,
                    start: 2,
                    end: 1,
                    rows: 8,
                },
            ),
            (
                (&[0, 9], &[0, -1], 2),
                LayoutError::GroupRange {
                    group: 0,
                    start: 0,
                    end: 9,
                    rows: 8,
                },
            ),
            (
                (&[4, 8, 0, 5], &[0, 1, -1], 3),
                LayoutError::Overlap { row: 4 },
            ),
        ];
        for ((offsets, experts, list_size), want) in cases {
            assert_eq!(
                GroupList::from_offsets(offsets, experts, list_size, 8),
                Err(want)
            );
        }
    }

    #[test]
    fn expert_of_each_row() {
        let list = GroupList::from_m_indices(&[1, 1, -1, 0, 1]).unwrap();
        assert_eq!(
            list.groups,
            [range(1, 0, 2), range(0, 3, 4), range(1, 4, 5)]
        );
        assert_eq!(list.rows, 5);
        assert_eq!(
            GroupList::from_m_indices(&[0, -2]),
            Err(LayoutError::GroupExpert { group: 1, id: -2 })
        );
    }

    proptest! {
        /// Both directions agree, order inside an expert is the tokens', padding is marked.
        #[test]
        fn mapping_is_consistent(
            experts in 1usize..20,
            top_k in 1usize..6,
            raw in proptest::collection::vec(-1i32..20, 0..200),
            shift in 0u32..8,
        ) {
            let tokens = raw.len() / top_k;
            let ids: Vec<i32> =
                raw[..tokens * top_k].iter().map(|&id| id.min(experts as i32 - 1)).collect();
            let alignment = 1usize << shift;
            let packed = pack(&ids, tokens, top_k, experts, alignment).unwrap();
            prop_assert_eq!(packed.rows % alignment, 0);
            let mut claimed = vec![-1; packed.rows];
            for (i, (&id, &row)) in ids.iter().zip(&packed.output_index).enumerate() {
                prop_assert_eq!(id == -1, row == -1);
                if row >= 0 {
                    prop_assert_eq!(packed.m_indices[row as usize], id);
                    prop_assert_eq!(claimed[row as usize], -1);
                    claimed[row as usize] = (i / top_k) as i32;
                }
            }
            prop_assert_eq!(&claimed, &packed.source_token);
            for group in &packed.groups {
                prop_assert_eq!(group.start % alignment, 0);
                let tokens = &packed.source_token[group.start..group.end];
                prop_assert!(tokens.iter().all(|&t| t >= 0) && tokens.is_sorted());
            }
            let list = GroupList::from_m_indices(&packed.m_indices).unwrap();
            prop_assert_eq!(list.groups.len(), packed.groups.len());
        }
    }
}
