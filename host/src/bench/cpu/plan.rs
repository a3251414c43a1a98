//! How much is run.

use std::ops::Range;
use std::time::Duration;

use asym_gemm_formats::WeightFormat;

use super::case::{Block, GemmShape, LayerShape, Shape};
use crate::system::{Memory, MemoryShort};

const GEMM: GemmShape = GemmShape {
    experts: 32,
    n: 4096,
    k: 2048,
};
/// Gate and up of 128 experts with H = 2048, I = 768.
const NARROW_EXPERTS: GemmShape = GemmShape {
    experts: 128,
    n: 2 * 768,
    k: 2048,
};
/// Gate and up of 64 experts with H = 4096, I = 1536.
const WIDE_EXPERTS: GemmShape = GemmShape {
    experts: 64,
    n: 2 * 1536,
    k: 4096,
};
const NARROW_LAYER: LayerShape = LayerShape {
    experts: 128,
    hidden: 2048,
    intermediate: 768,
    top_k: 8,
};
const WIDE_LAYER: LayerShape = LayerShape {
    experts: 64,
    hidden: 4096,
    intermediate: 1536,
    top_k: 8,
};

const FORMATS: [WeightFormat; 4] = [
    WeightFormat::Int8PerRow,
    WeightFormat::Int8Block128,
    WeightFormat::Fp8Block128,
    WeightFormat::Bf16,
];

/// Weights to rotate through: several times the largest caches of today.
const WEIGHT_BYTES: usize = 1536 << 20;

/// What to run and for how long.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Blocks of weights, with their sizes.
    pub(super) blocks: Vec<Block>,
    /// Bytes of weights to rotate through, cut to the memory there is.
    pub(super) weight_bytes: usize,
    /// Time for the calls of one case.
    pub case_time: Duration,
    /// Fewest and most timed calls of a case.
    pub(super) calls: Range<usize>,
    /// Rounds of the memory ceiling, each with four prefetch distances.
    pub(super) read_rounds: usize,
    /// Time of one of three rounds of a product ceiling.
    pub(super) product_time: Duration,
    /// When to start no further case; `None` runs all of them.
    pub(super) limit: Option<Duration>,
}

impl Plan {
    /// All shapes, formats and sizes.
    pub fn full() -> Self {
        let rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
        let tokens = [1, 8, 64, 512, 4096];
        let gemms = [GEMM, NARROW_EXPERTS, WIDE_EXPERTS];
        let layers = [NARROW_LAYER, WIDE_LAYER];
        let gemms = gemms
            .iter()
            .flat_map(|&s| FORMATS.map(|f| gemm(s, f, &rows)));
        let layers = layers
            .iter()
            .flat_map(|&s| FORMATS.map(|f| layer(s, f, &tokens)));
        Self {
            blocks: gemms.chain(layers).collect(),
            weight_bytes: WEIGHT_BYTES,
            case_time: Duration::from_millis(1500),
            calls: 5..300,
            read_rounds: 5,
            product_time: Duration::from_millis(50),
            limit: None,
        }
    }

    /// The most telling cases, in less than a minute: what does not fit is skipped.
    pub fn quick() -> Self {
        let rows = [1, 4, 16, 64, 256];
        let tokens = [1, 8, 64, 512];
        Self {
            blocks: vec![
                gemm(GEMM, WeightFormat::Int8PerRow, &rows),
                gemm(GEMM, WeightFormat::Bf16, &rows),
                layer(NARROW_LAYER, WeightFormat::Int8PerRow, &tokens),
                layer(NARROW_LAYER, WeightFormat::Fp8Block128, &tokens),
                layer(NARROW_LAYER, WeightFormat::Nvfp4, &tokens),
                layer(NARROW_LAYER, WeightFormat::Bf16, &tokens),
            ],
            case_time: Duration::from_millis(400),
            calls: 3..100,
            read_rounds: 3,
            product_time: Duration::from_millis(30),
            limit: Some(Duration::from_secs(45)),
            ..Self::full()
        }
    }

    /// Sizes of all blocks.
    pub fn sizes(&self) -> usize {
        self.blocks.iter().map(|block| block.sizes.len()).sum()
    }

    /// Bytes of weights that this run can have: what is wished for or the largest block needs, but
    /// not more than half of the available memory.
    pub(super) fn weight_memory(&self) -> Result<usize, MemoryShort> {
        self.weight_memory_of(Memory::read().usable_bytes())
    }

    fn weight_memory_of(&self, usable: Option<u64>) -> Result<usize, MemoryShort> {
        let needs = || self.blocks.iter().map(Block::weight_bytes);
        let (least, most) = (needs().min().unwrap_or(1), needs().max().unwrap_or(1));
        let room = usable.map_or(usize::MAX, |usable| {
            usize::try_from(usable / 2).unwrap_or(usize::MAX)
        });
        if room < least {
            return Err(MemoryShort {
                what: "the smallest block of weights".to_owned(),
                bytes: 2 * least as u64,
                usable,
            });
        }
        Ok(self.weight_bytes.max(most).min(room))
    }
}

fn gemm(shape: GemmShape, format: WeightFormat, rows: &[usize]) -> Block {
    Block {
        shape: Shape::Gemm(shape),
        format,
        sizes: rows.to_vec(),
    }
}

fn layer(shape: LayerShape, format: WeightFormat, tokens: &[usize]) -> Block {
    Block {
        shape: Shape::Layer(shape),
        format,
        sizes: tokens.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_take_what_they_need_but_half_of_the_memory_at_most() {
        let plan = Plan::quick();
        let largest = plan
            .blocks
            .iter()
            .map(Block::weight_bytes)
            .max()
            .expect("has blocks");
        assert_eq!(plan.weight_memory_of(None), Ok(WEIGHT_BYTES.max(largest)));
        assert_eq!(plan.weight_memory_of(Some(1 << 30)), Ok(1 << 29));
        let short = plan
            .weight_memory_of(Some(1 << 20))
            .expect_err("too little");
        assert_eq!(short.usable, Some(1 << 20));
    }

    #[test]
    fn the_full_plan_has_every_shape_in_every_format() {
        let plan = Plan::full();
        let (gemms, layers) = (3 * FORMATS.len(), 2 * FORMATS.len());
        assert_eq!(plan.blocks.len(), gemms + layers);
        assert_eq!(plan.sizes(), 10 * gemms + 5 * layers);
        let quick = Plan::quick();
        assert!(quick.blocks.iter().all(|block| {
            let mut shapes = plan.blocks.iter();
            shapes.any(|full| full.shape == block.shape && full.format == block.format)
        }));
    }
}
