//! Several panels times the groups of one pass.

use crate::kernels::{Group, Multiply, Panel, Span};
use crate::recipe::Recipe;
use crate::tile::{Lanes, Tile};

/// Panels to multiply with the same groups.
pub(crate) struct Panels<F, S> {
    pub(crate) count: usize,
    /// Units of K.
    pub(crate) units: usize,
    /// Panel by number.
    pub(crate) panel: F,
    /// The row scales of a panel's block.
    pub(crate) scales: S,
    /// Bytes from a panel to the next.
    pub(crate) stride: usize,
    /// Units after which the next panel's turn comes. At least `units`: panels are read one after
    /// the other, as one stream.
    pub(crate) chunk_units: usize,
}

/// Tiles that a thread keeps between tasks.
#[derive(Default)]
pub(crate) struct Tiles {
    /// Sums of any recipe, as bits.
    sums: Vec<Tile<u32>>,
    /// Scaled sums.
    pub(crate) y: Vec<Tile<f32>>,
}

impl Tiles {
    /// `count` zeros in y, room for as many sums.
    #[inline(always)]
    pub(crate) fn clear(&mut self, count: usize) {
        self.y.clear();
        self.y.resize(count, Tile::default());
        if self.sums.len() < count {
            self.sums.resize(count, Tile::default());
        }
    }

    /// Both parts, the sums of unspecified value.
    #[inline(always)]
    pub(crate) fn of<R: Recipe>(&mut self) -> (&mut [Tile<R::Sum>], &mut [Tile<f32>]) {
        (bytemuck::cast_slice_mut(&mut self.sums), &mut self.y)
    }
}

/// `tiles.y[panel * x.len() + group]` = panel . group, scaled.
///
/// In chunks of K so short that the groups' part of one stays in the first-level cache
/// while all panels pass by: the groups are then read from the second level once a pass instead of
/// once a panel.
#[inline(always)]
pub(crate) fn multiply<'w, R: Recipe, M: Multiply>(
    m: M,
    panels: &Panels<impl Fn(usize) -> Panel<'w>, impl Fn(usize, usize) -> Lanes<f32>>,
    x: &[Group<'_>],
    tiles: &mut Tiles,
) {
    let groups = x.len();
    tiles.clear(panels.count * groups);
    let (sums, y) = tiles.of::<R>();
    let mut first = 0;
    while first < panels.units {
        let count = panels.chunk_units.min(panels.units - first);
        for p in 0..panels.count {
            let mut panel = (panels.panel)(p).part(first, count);
            if count < panels.units {
                panel = panel.prefetching(panels.stride);
            }
            if R::BLOCKED_X {
                let mut unit = 0;
                while unit < count {
                    let units = R::BLOCK_UNITS.min(count - unit);
                    let block = (first + unit) / R::BLOCK_UNITS;
                    let span = Span {
                        unit: first + unit,
                        block,
                        accumulate: false,
                    };
                    R::multiply(m, panel.part(unit, units), x, span, &mut sums[..groups]);
                    let rows = (panels.scales)(p, block);
                    for (g, x) in x.iter().enumerate() {
                        R::add_block(&sums[g], &rows, &x.scales[block], &mut y[p * groups + g]);
                    }
                    unit += units;
                }
            } else {
                let span = Span {
                    unit: first,
                    block: 0,
                    accumulate: first > 0,
                };
                R::multiply(m, panel, x, span, &mut sums[p * groups..][..groups]);
            }
        }
        first += count;
    }
    if !R::BLOCKED_X {
        for p in 0..panels.count {
            let rows = (panels.scales)(p, 0);
            for (g, x) in x.iter().enumerate() {
                let i = p * groups + g;
                R::add_block(&sums[i], &rows, &x.scales[0], &mut y[i]);
            }
        }
    }
}
