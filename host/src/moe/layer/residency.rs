//! Which experts of a layer lie in a device's HBM.

/// The cells of a cache and the experts in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cached {
    /// Cell of each expert.
    cells: Vec<Option<u32>>,
    /// Expert in each cell.
    experts: Vec<Option<u32>>,
}

/// An expert that takes a cell of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Swap {
    /// The cell.
    pub(super) cell: usize,
    /// The expert that comes in.
    pub(super) expert: usize,
}

impl Cached {
    /// `cells` empty cells for `experts` experts.
    pub(super) fn new(experts: usize, cells: usize) -> Self {
        Self {
            cells: vec![None; experts],
            experts: vec![None; cells],
        }
    }

    /// The cell of `expert`, if it has one.
    pub(super) fn cell(&self, expert: usize) -> Option<usize> {
        self.cells
            .get(expert)
            .copied()
            .flatten()
            .map(|c| c as usize)
    }

    /// Number of cells.
    pub(super) fn len(&self) -> usize {
        self.experts.len()
    }

    /// The experts held, ascending.
    pub(super) fn experts(&self) -> Vec<u32> {
        (0..)
            .zip(&self.cells)
            .filter_map(|(expert, cell)| cell.map(|_| expert))
            .collect()
    }

    /// Puts `expert` into `cell`, in place of what is there.
    pub(super) fn place(&mut self, cell: usize, expert: usize) {
        self.evict(cell);
        self.cells[expert] = Some(cell as u32);
        self.experts[cell] = Some(expert as u32);
    }

    /// Empties a cell.
    pub(super) fn evict(&mut self, cell: usize) {
        if let Some(expert) = self.experts[cell].take() {
            self.cells[expert as usize] = None;
        }
    }

    /// The swaps towards holding `wanted` (most wanted first), at most `most` of them: experts that
    /// are not wanted leave, the least wanted of the others never.
    pub(super) fn swaps_towards(&self, wanted: &[u32], most: usize) -> Vec<Swap> {
        let wanted = &wanted[..wanted.len().min(self.len())];
        let keeps = |expert: &Option<u32>| expert.is_some_and(|e| wanted.contains(&e));
        let mut open = (0..self.len()).filter(|&cell| !keeps(&self.experts[cell]));
        wanted
            .iter()
            .filter(|&&expert| self.cell(expert as usize).is_none())
            .take(most)
            .map_while(|&expert| {
                Some(Swap {
                    cell: open.next()?,
                    expert: expert as usize,
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_and_cells_stay_each_others_inverse() {
        let mut cached = Cached::new(6, 2);
        cached.place(0, 5);
        cached.place(1, 2);
        assert_eq!((cached.cell(5), cached.cell(2)), (Some(0), Some(1)));
        cached.place(0, 1);
        assert_eq!((cached.cell(5), cached.cell(1)), (None, Some(0)));
        assert_eq!(cached.experts(), [1, 2]);
        cached.evict(1);
        assert_eq!(cached.experts(), [1]);
        assert_eq!(cached.cell(100), None);
    }

    #[test]
    fn swaps_are_bounded_and_keep_what_is_wanted() {
        let mut cached = Cached::new(8, 3);
        for (cell, expert) in [(0, 4), (1, 6), (2, 1)] {
            cached.place(cell, expert);
        }
        let swaps = cached.swaps_towards(&[7, 6, 5, 4], 8);
        let pairs: Vec<_> = swaps.iter().map(|s| (s.cell, s.expert)).collect();
        assert_eq!(pairs, [(0, 7), (2, 5)], "4 is wanted, but fourth of three");
        assert_eq!(cached.swaps_towards(&[7, 6, 5], 1).len(), 1);
        assert_eq!(cached.swaps_towards(&[6, 1, 4], 8), []);
        assert_eq!(Cached::new(8, 0).swaps_towards(&[1], 8), []);
    }
}
