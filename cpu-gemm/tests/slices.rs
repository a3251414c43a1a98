//! Layers computed in parts of the intermediate dimension.

mod common;

use std::ops::Range;

use asym_gemm_cpu::{CpuError, Engine, ExpertGroup, Slots};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::BankGeometry;
use common::{Bank, CLAMPED, FORMATS, engines, rng, uniform};

const TOP_K: usize = 2;
const TOKENS: usize = 41;

/// A layer whose experts have 5 slices, the last one ragged.
struct Layer {
    bank: Bank,
    x: Vec<f32>,
    /// Tokens of each expert.
    tokens: [Vec<u32>; 3],
    output_index: Vec<i32>,
    weights: Vec<f32>,
}

impl Layer {
    fn new(format: WeightFormat, bias: bool) -> Self {
        let geometry = BankGeometry {
            experts: 3,
            hidden: 72,
            intermediate: 4 * 128 + 37,
            format,
            bias,
        };
        let mut rng = rng(7);
        let mut tokens: [Vec<u32>; 3] = Default::default();
        let mut slots = Vec::new();
        for token in 0..TOKENS {
            for expert in [token % 3, (token / 3 + 1) % 3] {
                slots.push((expert, tokens[expert].len()));
                tokens[expert].push(token as u32);
            }
        }
        let starts = [0, tokens[0].len(), tokens[0].len() + tokens[1].len()];
        Self {
            bank: Bank::random(geometry, 3),
            x: uniform(&mut rng, TOKENS * 72, 1.0),
            output_index: slots
                .iter()
                .map(|&(expert, row)| (starts[expert] + row) as i32)
                .collect(),
            weights: uniform(&mut rng, TOKENS * TOP_K, 1.0),
            tokens,
        }
    }

    fn groups(&self) -> Vec<ExpertGroup<'_>> {
        let mut start = 0;
        self.tokens
            .iter()
            .enumerate()
            .map(|(expert, tokens)| {
                let group = ExpertGroup {
                    expert,
                    start,
                    tokens,
                };
                start += tokens.len();
                group
            })
            .collect()
    }

    fn slots(&self) -> Slots<'_> {
        Slots {
            top_k: TOP_K,
            output_index: &self.output_index,
            weights: &self.weights,
        }
    }

    fn whole(&self, engine: &Engine, activation: Activation) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.x.len()];
        let (bank, groups) = (self.bank.view(), self.groups());
        engine
            .expert_layer(bank, activation, &self.x, &groups, self.slots(), &mut out)
            .unwrap();
        out
    }

    fn part(
        &self,
        engine: &Engine,
        activation: Activation,
        slices: &[Range<usize>],
    ) -> Result<Vec<f32>, CpuError> {
        let mut out = vec![f32::NAN; self.x.len()];
        let (bank, groups, slots) = (self.bank.view(), self.groups(), self.slots());
        engine.expert_layer_slices(bank, activation, &self.x, &groups, slices, slots, &mut out)?;
        Ok(out)
    }
}

/// The parts add up to the whole, each slice with its own weights, and the bias once.
#[test]
fn parts_add_up_to_the_whole() {
    for format in FORMATS {
        for (bias, activation) in [(false, Activation::SwiGlu), (true, CLAMPED)] {
            let layer = Layer::new(format, bias);
            for engine in engines() {
                let whole = layer.whole(&engine, activation);
                let name = engine.kernel_name(format);
                let full = layer.part(&engine, activation, &[0..5, 0..5, 0..5]);
                assert_eq!(full.unwrap(), whole, "{name}: all slices");
                for cuts in [[1, 4, 2], [3, 3, 3]] {
                    let first = layer
                        .part(&engine, activation, &cuts.map(|c| 0..c))
                        .unwrap();
                    let second = layer
                        .part(&engine, activation, &cuts.map(|c| c..5))
                        .unwrap();
                    assert_ne!(first, whole, "{name}: {cuts:?} leaves out something");
                    for (i, want) in whole.iter().enumerate() {
                        let got = first[i] + second[i];
                        // Each side has at most 5 slices and 2 slots of f32 additions.
                        let bound = 32.0 * f32::EPSILON * (first[i].abs() + second[i].abs() + 4.0);
                        assert!(
                            (got - want).abs() <= bound,
                            "{name} {cuts:?}: element {i} is {got}, the whole {want}"
                        );
                    }
                }
            }
        }
    }
}

/// A part's int8 bits are those of every instruction set, whatever the other groups take.
#[test]
fn parts_are_exact_and_independent() {
    for format in [WeightFormat::Int8PerRow, WeightFormat::Int8Block128] {
        let layer = Layer::new(format, true);
        let slices = [2..5, 0..1, 4..5];
        let mut first = None;
        for engine in engines() {
            let got = layer.part(&engine, Activation::SwiGlu, &slices).unwrap();
            let again = layer.part(&engine, Activation::SwiGlu, &slices).unwrap();
            assert_eq!(got, again, "{}", engine.kernel_name(format));
            assert_eq!(&got, first.get_or_insert(got.clone()));
        }
    }
}

#[test]
fn ranges_that_are_no_part_are_refused() {
    let layer = Layer::new(WeightFormat::Int8PerRow, false);
    let engine = Engine::detect().unwrap();
    let part = |slices: &[Range<usize>]| layer.part(&engine, Activation::SwiGlu, slices);
    assert!(matches!(
        part(&[0..5, 0..5]),
        Err(CpuError::Mismatch {
            expected: 3,
            actual: 2,
            ..
        })
    ));
    for bad in [3..3, 0..6, 5..9, 0..usize::MAX] {
        let got = part(&[0..5, bad.clone(), 0..5]);
        assert_eq!(
            got.unwrap_err(),
            CpuError::SliceRange {
                group: 1,
                range: bad,
                slices: 5
            }
        );
    }
}
