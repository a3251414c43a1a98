//! Several panels times the groups of one pass.

use crate::kernels::{Group, Multiply, Panel, Span};
use crate::recipe::{Recipe, add_block};
use crate::tile::{Lanes, Tile};
use crate::vector::{LaneRows, Vector};

/// Consecutive panels of weights. Implement the methods with `#[inline(always)]`.
pub(crate) trait Weights {
    /// Panel `p`.
    fn panel(&self, p: usize) -> Panel<'_>;
    /// The row scales of block `block` of panel `p`.
    fn scales(&self, p: usize, block: usize) -> Lanes<f32>;
}

/// Which weights to multiply.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Panels.
    pub(crate) panels: usize,
    /// Units of K of the weights.
    pub(crate) units: usize,
    /// Whether an earlier pass has brought the weights to the cache.
    pub(crate) in_cache: bool,
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
    /// The scaled product of panel `p` and group `g`; `x` is that group, `rows` the panel's scales
    /// if K is one block.
    #[inline(always)]
    pub(crate) fn scaled<'p, V: Vector>(
        &'p self,
        v: V,
        p: usize,
        g: usize,
        x: &Group<'_>,
        rows: &'p Lanes<f32>,
    ) -> Scaled<'p, R, V> {
        let i = p * self.groups + g;
        match R::BLOCKED_X {
            true => Scaled::Done(&self.y[i]),
            false => Scaled::Sums {
                sums: &self.sums[i],
                rows,
                tokens: v.load(&x.scales[0]),
            },
        }
    }
}

/// A product with its scales.
pub(crate) enum Scaled<'p, R: Recipe, V: Vector> {
    /// Scaled block by block.
    Done(&'p Tile<f32>),
    /// To be scaled.
    Sums {
        sums: &'p Tile<R::Sum>,
        rows: &'p Lanes<f32>,
        tokens: V::F,
    },
}

impl<R: Recipe, V: Vector> LaneRows<V> for Scaled<'_, R, V> {
    #[inline(always)]
    fn row(&self, v: V, r: usize) -> V::F {
        match self {
            Self::Done(y) => y.row(v, r),
            Self::Sums { sums, rows, tokens } => {
                R::first(v, &sums.0[r], R::scale(v, *tokens, rows[r]))
            }
        }
    }
}

/// Multiplies panels with groups, over all of K.
///
/// (Cutting K so that the groups' part stays in the first-level cache while several panels pass by
/// was measured too: what is saved in loads of activations is lost in loads and stores of sums.)
#[inline(always)]
pub(crate) fn multiply<'t, R: Recipe, M: Multiply>(
    m: M,
    weights: &impl Weights,
    shape: Shape,
    x: &[Group<'_>],
    tiles: &'t mut Tiles,
) -> Products<'t, R> {
    let v = m.vector();
    let groups = x.len();
    let count = shape.panels * groups;
    let (sums, y) = match R::BLOCKED_X {
        true => tiles.room::<R>(2 * groups, count),
        false => tiles.room::<R>(count, 0),
    };
    for p in 0..shape.panels {
        let mut panel = weights.panel(p);
        if shape.in_cache {
            panel = panel.prefetching(0);
        }
        if !R::BLOCKED_X {
            let span = Span { unit: 0, block: 0 };
            R::multiply(m, panel, x, span, &mut sums[p * groups..][..groups]);
            continue;
        }
        let y = &mut y[p * groups..][..groups];
        let blocks = shape.units.div_ceil(R::BLOCK_UNITS);
        // Two sets of sums: a block is scaled while the next one is multiplied.
        for block in 0..=blocks {
            if block < blocks {
                let unit = block * R::BLOCK_UNITS;
                let units = R::BLOCK_UNITS.min(shape.units - unit);
                let sums = &mut sums[block % 2 * groups..][..groups];
                R::multiply(m, panel.part(unit, units), x, Span { unit, block }, sums);
            }
            if let Some(block) = block.checked_sub(1) {
                let sums = &sums[block % 2 * groups..][..groups];
                let rows = weights.scales(p, block);
                for g in 0..groups {
                    let tokens = &x[g].scales[block];
                    add_block::<R, _>(v, block == 0, &sums[g], Some(&rows), tokens, &mut y[g]);
                }
            }
        }
    }
    Products { sums, y, groups }
}
