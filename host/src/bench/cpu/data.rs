//! Random weights and inputs, made fast: a benchmark reads gigabytes of them.

use asym_gemm_cpu::pool::{Workers, for_chunks};

use super::case::{Block, Shape};
use super::gemm::GemmData;
use super::layer::LayerData;
use super::{BenchError, Workload};
use crate::bench::random::Random;

/// Fills `weights` for a block, as often as it fits, and makes its inputs.
pub(super) fn workload<'a>(
    block: &Block,
    workers: &dyn Workers,
    weights: &'a mut [u8],
) -> Result<Box<dyn Workload + 'a>, BenchError> {
    let largest = block.sizes.iter().copied().max().unwrap_or(0);
    Ok(match block.shape {
        Shape::Gemm(shape) => Box::new(GemmData::new(
            shape,
            block.format,
            largest,
            workers,
            weights,
        )?),
        Shape::Layer(shape) => Box::new(LayerData::new(
            shape,
            block.format,
            largest,
            workers,
            weights,
        )?),
    })
}

/// How random bits become operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Every byte an int8.
    Int8,
    /// Every pair of bytes a bf16 of 0.5 to 2, of either sign.
    Bf16,
    /// Every byte an e4m3 of 0.5 to 2, of either sign.
    Fp8,
}

/// Fills `bytes` with random operands, the same for the same seed on any workers.
pub(super) fn fill(
    workers: &dyn Workers,
    bytes: &mut [u8],
    pattern: Pattern,
    seed: u64,
) -> Result<(), BenchError> {
    const CHUNK: usize = 1 << 20;
    let operands = move |bits: u64| match pattern {
        Pattern::Int8 => bits,
        // Sign and mantissa stay random; 0x3f00 and 0x3f80 are 0.5 and 1.
        Pattern::Bf16 => bits & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00,
        // Likewise; 0x30 and 0x38 are 0.5 and 1.
        Pattern::Fp8 => bits & 0x8f8f_8f8f_8f8f_8f8f | 0x3030_3030_3030_3030,
    };
    for_chunks(workers, bytes, CHUNK, |index, chunk| {
        let mut random = Random::new(seed << 32 | index as u64);
        let (words, rest) = chunk.as_chunks_mut::<8>();
        for word in words {
            *word = operands(random.bits()).to_le_bytes();
        }
        let last = operands(random.bits()).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    })
    .map_err(|panic| BenchError::Cpu(panic.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use asym_gemm_cpu::pool::SpinPool;
    use asym_gemm_formats::{bf16, e4m3};

    #[test]
    fn fills_depend_on_the_seed_only_and_are_operands() {
        let filled = |threads, pattern, seed| {
            let pool = SpinPool::new(threads).expect("threads can be started");
            let mut bytes = vec![0; (1 << 20) + 22];
            fill(&pool, &mut bytes, pattern, seed).expect("nothing panics");
            bytes
        };
        let int8 = filled(1, Pattern::Int8, 7);
        assert_eq!(int8, filled(2, Pattern::Int8, 7));
        assert_ne!(int8, filled(1, Pattern::Int8, 8));
        for bytes in filled(1, Pattern::Bf16, 7).as_chunks::<2>().0 {
            let value = bf16::decode(u16::from_le_bytes(*bytes)).abs();
            assert!((0.5..2.0).contains(&value), "{value}");
        }
        for &code in &filled(1, Pattern::Fp8, 7) {
            let value = e4m3::decode(code).abs();
            assert!((0.5..2.0).contains(&value), "{value}");
        }
    }
}
