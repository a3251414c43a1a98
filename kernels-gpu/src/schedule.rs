//! Tile order of the grouped GEMM.
//!
//! Tiles are numbered group by group; inside a group the row tile runs fastest, so
//! that the blocks of one wave share weight tiles in L2. Where a group has many row tiles,
//! they run in blocks of [`ROW_BLOCK`], whose activations stay in L2 over all columns, unless
//! weights are to come only once. Block `b` of a grid of `g`
//! takes tiles b, b + g, b + 2g, ...; the producer and both consumers of a block walk
//! the same list. Empty groups have no tile and cost one 16-byte load.

use crate::args::Group;

/// Reads the groups of a call: a slice on the host, global memory on the device.
pub trait Groups {
    /// Number of groups.
    fn count(&self) -> u32;
    /// Group `index`, which is below [`Groups::count`].
    fn get(&self, index: u32) -> Group;
}

impl Groups for &[Group] {
    fn count(&self) -> u32 {
        self.len() as u32
    }

    fn get(&self, index: u32) -> Group {
        self[index as usize]
    }
}

/// One tile of D.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileCoord {
    /// First row of D (and A).
    pub row: u32,
    /// One past the last row of the group.
    pub row_end: u32,
    /// First column of D.
    pub column: u32,
    /// Weight matrix of the group.
    pub weight: u32,
    /// Number of the column tile, over all groups that have rows: the order in which weights
    /// are needed.
    pub column_tile: u32,
    /// Row tiles of the group: how many tiles share these weights.
    pub row_tiles: u32,
}

/// Row tiles whose activations are read from L2 for all columns of a group.
pub const ROW_BLOCK: u32 = 16;

/// Number of tiles of a group with `rows` rows.
#[inline(always)]
pub const fn group_tiles(rows: u32, n: u32, tile_m: u32, tile_n: u32) -> u32 {
    rows.div_ceil(tile_m) * n.div_ceil(tile_n)
}

/// Walks the tiles of one block.
pub struct TileWalker<G> {
    groups: G,
    n_tiles: u32,
    tile_m: u32,
    tile_n: u32,
    row_block: u32,
    next: u32,
    step: u32,
    index: u32,
    group: Group,
    /// Number of the current group's first tile.
    base: u32,
    /// Number of the current group's first column tile.
    column_base: u32,
}

impl<G: Groups> TileWalker<G> {
    /// Walker of block `block` in a grid of `blocks`, over D with `n` columns.
    #[inline(always)]
    pub fn new(groups: G, n: u32, tile_m: u32, tile_n: u32, block: u32, blocks: u32) -> Self {
        let group = if groups.count() > 0 {
            groups.get(0)
        } else {
            Group::default()
        };
        let n_tiles = n.div_ceil(tile_n);
        Self {
            groups,
            n_tiles,
            tile_m,
            tile_n,
            row_block: ROW_BLOCK,
            next: block,
            step: blocks,
            index: 0,
            group,
            base: 0,
            column_base: 0,
        }
    }

    /// The same walk with all row tiles of a column tile before the next column tile.
    #[inline(always)]
    pub fn by_columns(self) -> Self {
        Self {
            row_block: u32::MAX,
            ..self
        }
    }

    /// Walker over the column tiles of all groups that have rows, in order.
    #[inline(always)]
    pub fn columns(groups: G, n: u32, tile_n: u32) -> Self {
        Self::new(groups, n, u32::MAX, tile_n, 0, 1).by_columns()
    }

    /// The block's next tile.
    #[inline(always)]
    pub fn next_tile(&mut self) -> Option<TileCoord> {
        let mut row_tiles;
        loop {
            if self.index >= self.groups.count() {
                return None;
            }
            row_tiles = (self.group.end - self.group.start).div_ceil(self.tile_m);
            let tiles = row_tiles * self.n_tiles;
            if self.next - self.base < tiles {
                break;
            }
            self.base += tiles;
            self.column_base += if tiles > 0 { self.n_tiles } else { 0 };
            self.index += 1;
            if self.index < self.groups.count() {
                self.group = self.groups.get(self.index);
            }
        }
        let mut local = self.next - self.base;
        let mut first_row = 0;
        let mut rows = row_tiles;
        if row_tiles > self.row_block {
            let block_tiles = self.row_block * self.n_tiles;
            // SAFETY: neither factor is 0: there is a tile.
            unsafe { core::hint::assert_unchecked(block_tiles != 0) };
            let row_block = local / block_tiles;
            local -= row_block * block_tiles;
            first_row = row_block * self.row_block;
            rows = (row_tiles - first_row).min(self.row_block);
        }
        // SAFETY: `next - base` is below row_tiles * n_tiles, so there are rows.
        unsafe { core::hint::assert_unchecked(rows != 0) };
        let column_tile = local / rows;
        let row_tile = first_row + local - column_tile * rows;
        self.next += self.step;
        Some(TileCoord {
            row: self.group.start + row_tile * self.tile_m,
            row_end: self.group.end,
            column: column_tile * self.tile_n,
            weight: self.group.weight,
            column_tile: self.column_base + column_tile,
            row_tiles,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn groups(counts: &[u32]) -> Vec<Group> {
        let mut start = 3;
        let group = |(weight, &count): (usize, &u32)| {
            let group = Group {
                start,
                end: start + count,
                weight: weight as u32,
                reserved: 0,
            };
            start += count + 1;
            group
        };
        counts.iter().enumerate().map(group).collect()
    }

    /// Over all blocks of a grid every tile comes exactly once, and its rows and columns
    /// cover the group.
    #[test]
    fn each_tile_exactly_once() {
        let cases: [&[u32]; 8] = [
            &[],
            &[0],
            &[0, 0, 5],
            &[1, 64, 65, 128, 129],
            &[1000],
            &[5000, 2100],
            &[0, 7, 0, 300, 0],
            &[1; 300],
        ];
        for counts in cases {
            let groups = groups(counts);
            for (tile_m, tile_n) in [(128, 192), (128, 256), (64, 256)] {
                for n in [1, 127, 128, 129, 512, 700] {
                    let mut columns = Vec::new();
                    let mut walker = TileWalker::columns(&groups[..], n, tile_n);
                    while let Some(t) = walker.next_tile() {
                        assert_eq!((t.column_tile, t.row_tiles), (columns.len() as u32, 1));
                        columns.push((t.weight, t.column));
                    }
                    for blocks in [1, 2, 132] {
                        let mut seen = HashSet::new();
                        // Column tiles in order of their numbers.
                        let mut last = 0;
                        let mut walker =
                            TileWalker::new(&groups[..], n, tile_m, tile_n, 0, 1).by_columns();
                        while let Some(t) = walker.next_tile() {
                            assert!(t.column_tile == last || t.column_tile == last + 1);
                            last = t.column_tile;
                        }
                        for block in 0..blocks {
                            let mut walker =
                                TileWalker::new(&groups[..], n, tile_m, tile_n, block, blocks);
                            while let Some(t) = walker.next_tile() {
                                let group = groups[t.weight as usize];
                                assert!(t.row >= group.start && t.row < t.row_end && t.column < n);
                                assert_eq!(t.row_end, group.end);
                                assert_eq!(columns[t.column_tile as usize], (t.weight, t.column));
                                assert_eq!(t.row_tiles, (group.end - group.start).div_ceil(tile_m));
                                assert!(seen.insert((t.weight, t.row, t.column)));
                            }
                        }
                        let want: u32 = counts
                            .iter()
                            .map(|&c| group_tiles(c, n, tile_m, tile_n))
                            .sum();
                        assert_eq!(seen.len() as u32, want);
                    }
                }
            }
        }
    }
}
