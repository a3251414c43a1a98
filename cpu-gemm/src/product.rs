//! Several panels times the groups of one pass.

use crate::kernels::{Group, Multiply, Panel, Span};
use crate::recipe::Recipe;
use crate::tile::{Lanes, Tile};

/// Consecutive panels of weights. Implement the methods with `#[inline(always)]`.
pub(crate) trait Weights {
    /// Panel `p`.
    fn panel(&self, p: usize) -> Panel<'_>;
    /// The row scales of block `block` of panel `p`.
    fn scales(&self, p: usize, block: usize) -> Lanes<f32>;
}

/// How the panels are gone through.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    /// Panels.
    pub(crate) panels: usize,
    /// Units of K of the weights.
    pub(crate) units: usize,
    /// Units after which the next panel's turn comes. At least `units`: panels are read one after
    /// the other, as one stream.
    pub(crate) chunk_units: usize,
    /// Bytes ahead to prefetch when chunks are read; 0 if the weights are in the cache.
    pub(crate) prefetch: usize,
}

/// Tiles that a thread keeps between tasks.
#[derive(Default)]
pub(crate) struct Tiles {
    /// Sums of any recipe, as bits.
    sums: Vec<Tile<u32>>,
    /// Scaled sums.
    y: Vec<Tile<f32>>,
}

impl Tiles {
    /// Room for `sums` sums and `y` scaled sums, both of unspecified value.
    #[inline(always)]
    pub(crate) fn room<R: Recipe>(
        &mut self,
        sums: usize,
        y: usize,
    ) -> (&mut [Tile<R::Sum>], &mut [Tile<f32>]) {
        if self.sums.len() < sums {
            self.sums.resize(sums, Tile::default());
        }
        if self.y.len() < y {
            self.y.resize(y, Tile::default());
        }
        (
            bytemuck::cast_slice_mut(&mut self.sums[..sums]),
            &mut self.y[..y],
        )
    }
}

/// The products of [`multiply`].
pub(crate) struct Products<'t, R: Recipe> {
    sums: &'t mut [Tile<R::Sum>],
    y: &'t mut [Tile<f32>],
    groups: usize,
}

impl<R: Recipe> Products<'_, R> {
    /// The scaled product of panel `p` and group `g`; `x` is that group, `rows` the panel's scales if
    /// K is one block.
    #[inline(always)]
    pub(crate) fn scaled(
        &self,
        p: usize,
        g: usize,
        x: &Group<'_>,
        rows: &Lanes<f32>,
        out: &mut Tile<f32>,
    ) {
        let i = p * self.groups + g;
        if R::BLOCKED_X {
            *out = self.y[i];
        } else {
            R::scale(&self.sums[i], rows, &x.scales[0], out);
        }
    }
}

/// Multiplies panels with groups.
///
/// In chunks of K so short that the groups' part of one stays in the first-level cache
/// while all panels pass by: the groups are then read from the second level once a pass instead of
/// once a panel.
#[inline(always)]
pub(crate) fn multiply<'t, R: Recipe, M: Multiply>(
    m: M,
    weights: &impl Weights,
    order: Order,
    x: &[Group<'_>],
    tiles: &'t mut Tiles,
) -> Products<'t, R> {
    let groups = x.len();
    let count = order.panels * groups;
    let (sums, y) = match R::BLOCKED_X {
        true => tiles.room::<R>(groups, count),
        false => tiles.room::<R>(count, 0),
    };
    let mut first = 0;
    while first < order.units {
        let units = order.chunk_units.min(order.units - first);
        for p in 0..order.panels {
            let mut panel = weights.panel(p).part(first, units);
            if units < order.units {
                panel = panel.prefetching(order.prefetch);
            }
            if R::BLOCKED_X {
                let y = &mut y[p * groups..][..groups];
                let mut unit = 0;
                while unit < units {
                    let count = R::BLOCK_UNITS.min(units - unit);
                    let block = (first + unit) / R::BLOCK_UNITS;
                    let span = Span {
                        unit: first + unit,
                        block,
                        accumulate: false,
                    };
                    R::multiply(m, panel.part(unit, count), x, span, sums);
                    let rows = weights.scales(p, block);
                    for g in 0..groups {
                        let tokens = &x[g].scales[block];
                        if block == 0 {
                            R::scale(&sums[g], &rows, tokens, &mut y[g]);
                        } else {
                            R::add_block(&sums[g], &rows, tokens, &mut y[g]);
                        }
                    }
                    unit += count;
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
        first += units;
    }
    Products { sums, y, groups }
}
