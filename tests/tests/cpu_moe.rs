//! Whole MoE blocks on the CPU against the reference: bf16 and fp8 within the bound of each element,
//! int8 to the bit, on every instruction set of the processor.

use asym_gemm::cpu::{CpuError, Engine};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::activation::{Activation, exp};
use asym_gemm::formats::bank::BankGeometry;
use asym_gemm::moe::layout::LayoutError;
use asym_gemm::moe::routing::{Router, Routing, RoutingError, Scoring};
use asym_gemm::moe::{Backend, BlockParts, ExpertBank, MoeBlock, MoeError};
use asym_gemm_testkit::compare::{Bound, Output, bits_equal, check_close};
use asym_gemm_testkit::generate::{Pattern, RoutingCase, RoutingKind, matrix, row_counts};
use asym_gemm_testkit::reference::{self, Expected, ExpertWeights};
use asym_gemm_tests::{FORMATS, Source, bank, engines, is_exact};

const CLAMPED: Activation = Activation::ClampedSwiGlu {
    limit: 7.0,
    alpha: 1.702,
};

/// A block's weights, from which both the reference and the block under test are made.
struct Model {
    experts: Vec<ExpertWeights>,
    /// Shared expert and its gate.
    shared: Option<(ExpertWeights, Option<Vec<f32>>)>,
    activation: Activation,
    top_k: usize,
}

impl Model {
    fn new(seed: u64, experts: usize, (hidden, intermediate): (usize, usize)) -> Self {
        let bias = seed.is_multiple_of(2);
        let expert = |e| ExpertWeights::random(1000 * seed + e, hidden, intermediate, bias);
        Self {
            experts: (0..experts as u64).map(expert).collect(),
            shared: None,
            activation: if bias { CLAMPED } else { Activation::SwiGlu },
            top_k: 1,
        }
    }

    fn hidden(&self) -> usize {
        self.experts[0].hidden
    }

    fn router(&self) -> Router {
        let (e, h) = (self.experts.len(), self.hidden());
        let weight = matrix(Pattern::Gaussian, 77, e, h);
        let scoring = Scoring::Softmax { renormalise: true };
        Router::new(e, h, self.top_k, weight, None, scoring).unwrap()
    }

    fn parts(&self, format: WeightFormat) -> BlockParts {
        let shared = self.shared.as_ref().map(|(weights, gate)| {
            let bank = bank(format, std::slice::from_ref(weights)).unwrap();
            (bank, gate.clone())
        });
        BlockParts {
            router: self.router(),
            activation: self.activation,
            experts: bank(format, &self.experts).unwrap(),
            shared,
        }
    }

    fn block(&self, format: WeightFormat, engine: &Engine) -> MoeBlock {
        MoeBlock::from_parts(self.parts(format), engine.clone()).unwrap()
    }

    /// What must come out.
    fn want(&self, format: WeightFormat, x: &[f32], case: &RoutingCase) -> Want {
        let weights = self.shared_weights(x);
        let block = reference::MoeBlock {
            experts: &self.experts,
            shared: self.shared.as_ref().map(|s| reference::SharedExpert {
                weights: &s.0,
                token_weights: weights.as_deref(),
            }),
            activation: self.activation,
        };
        match format {
            WeightFormat::Bf16 => Want::Near(block.bf16(x, case)),
            WeightFormat::Fp8Block128 => Want::Near(block.fp8(x, case)),
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => Want::Near(block.fp4(format, x, case)),
            _ => Want::Bits(block.int8(format, x, case)),
        }
    }

    /// sigmoid(x · gate) of each token; the tests see to sums that are exact in any order.
    fn shared_weights(&self, x: &[f32]) -> Option<Vec<f32>> {
        let gate = self.shared.as_ref()?.1.as_ref()?;
        let weight = |x: &[f32]| {
            let z: f32 = x.iter().zip(gate).map(|(x, g)| x * g).sum();
            1.0 / (1.0 + exp(-z))
        };
        Some(x.chunks(gate.len()).map(weight).collect())
    }

    /// Compares every format on every ISA, and a second call with the first.
    fn check(&self, name: &str, x: &[f32], case: &RoutingCase) {
        for format in FORMATS {
            let want = self.want(format, x, case);
            for engine in engines() {
                let name = format!("{name}: {}", engine.kernel_name(format));
                let mut block = self.block(format, &engine);
                let got = run(&mut block, x, &routing(case));
                want.check(&name, &got, self.hidden());
                let again = run(&mut block, x, &routing(case));
                bits_equal(&name, &again, &got, self.hidden()).unwrap();
            }
        }
    }
}

/// Expected values of a format.
enum Want {
    Near(Expected),
    Bits(Vec<f32>),
}

impl Want {
    fn check(&self, name: &str, got: &[f32], hidden: usize) {
        match self {
            Self::Near(want) => {
                let bound = Bound::f32_accumulated(Output::F32);
                check_close(name, got, want, bound).unwrap_or_else(|e| panic!("{e}"));
            }
            Self::Bits(want) => {
                bits_equal(name, got, want, hidden).unwrap_or_else(|e| panic!("{e}"));
            }
        }
    }

    /// The first `len` elements, whole tokens.
    fn first(&self, len: usize) -> Self {
        match self {
            Self::Near(want) => {
                let mut first = Expected::zeros(len / want.cols, want.cols, want.k);
                first.value.copy_from_slice(&want.value[..len]);
                first.magnitude.copy_from_slice(&want.magnitude[..len]);
                first.slack.copy_from_slice(&want.slack[..len]);
                Self::Near(first)
            }
            Self::Bits(want) => Self::Bits(want[..len].to_vec()),
        }
    }
}

fn routing(case: &RoutingCase) -> Routing {
    Routing {
        top_k: case.top_k,
        ids: case.ids.clone(),
        weights: case.weights.clone(),
    }
}

fn run(block: &mut MoeBlock, x: &[f32], routing: &Routing) -> Vec<f32> {
    block.forward_routed(x, routing, Backend::Cpu).unwrap().0
}

/// Every number of rows up to one past a tile, and around two, on a first and a last expert
/// with an idle one between; so the second group starts at every row, too.
#[test]
fn every_number_of_rows() {
    const MOST: usize = 257;
    let hidden = 70;
    let model = Model::new(1, 3, (hidden, 140));
    let x = matrix(Pattern::Gaussian, 2, MOST, hidden);
    let mut case = RoutingCase::new(RoutingKind::Uniform, 3, MOST, 2, 3);
    case.ids
        .chunks_mut(2)
        .for_each(|ids| ids.copy_from_slice(&[2, 0]));
    for format in FORMATS {
        let want = model.want(format, &x, &case);
        for engine in engines() {
            let mut block = model.block(format, &engine);
            for rows in row_counts() {
                let case = Routing {
                    top_k: 2,
                    ids: case.ids[..2 * rows].to_vec(),
                    weights: case.weights[..2 * rows].to_vec(),
                };
                let got = run(&mut block, &x[..rows * hidden], &case);
                let name = format!("{rows} rows: {}", engine.kernel_name(format));
                want.first(rows * hidden).check(&name, &got, hidden);
            }
        }
    }
}

#[test]
fn every_kind_of_routing() {
    for (seed, (experts, top_k, tokens)) in [
        (1, 1, 37),
        (3, 2, 41),
        (60, 8, 29),
        (384, 32, 7),
        (384, 1, 50),
    ]
    .into_iter()
    .enumerate()
    {
        let shape = (33, 20);
        let model = Model {
            top_k,
            ..Model::new(seed as u64, experts, shape)
        };
        let x = matrix(Pattern::Gaussian, 5, tokens, shape.0);
        for kind in RoutingKind::ALL {
            let case = RoutingCase::new(kind, 6, tokens, top_k, experts);
            model.check(&format!("{kind:?} {experts} top {top_k}"), &x, &case);
        }
    }
}

/// No, one or two blocks of 128 and a rest in H and in I; hard values in x.
#[test]
fn ragged_shapes() {
    let shapes = [(1, 1), (100, 33), (257, 300), (129, 128), (16, 257)];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for (pattern, kind) in [
            (Pattern::Outliers, RoutingKind::Uniform),
            (Pattern::TinyRows, RoutingKind::Holes),
            (Pattern::Adversarial, RoutingKind::Duplicates),
            (Pattern::ZeroRows, RoutingKind::LastExpert),
        ] {
            let model = Model::new(seed as u64, 4, shape);
            let x = matrix(pattern, 8, 9, shape.0);
            let case = RoutingCase::new(kind, 9, 9, 2, 4);
            model.check(&format!("{shape:?} {pattern:?}"), &x, &case);
        }
    }
}

/// The shared expert is wider than the routed ones. Its gate's products and sums are exact in
/// f32, so that the order of the sum is not prescribed.
#[test]
fn shared_experts() {
    let hidden = 100;
    let eighths = |values: Vec<f32>| -> Vec<f32> {
        values
            .iter()
            .map(|x| (x * 8.0).round_ties_even() / 8.0)
            .collect()
    };
    let x = eighths(matrix(Pattern::Gaussian, 1, 23, hidden));
    let gate = eighths(matrix(Pattern::Uniform, 2, 1, hidden));
    for (seed, gate) in [(1, None), (3, Some(gate.clone())), (4, Some(gate))] {
        let mut model = Model::new(seed, 5, (hidden, 33));
        model.shared = Some((ExpertWeights::random(99, hidden, 150, false), gate));
        for kind in RoutingKind::ALL {
            let case = RoutingCase::new(kind, seed, 23, 3, 5);
            model.check(&format!("shared {seed} {kind:?}"), &x, &case);
        }
    }
}

#[test]
fn no_tokens() {
    let mut model = Model::new(3, 3, (20, 10));
    for shared in [
        None,
        Some((ExpertWeights::random(9, 20, 10, false), Some(vec![1.0; 20]))),
    ] {
        model.shared = shared;
        for format in FORMATS {
            for engine in engines() {
                let mut block = model.block(format, &engine);
                let (out, report) = block.forward(&[], Backend::Cpu).unwrap();
                assert!(out.is_empty());
                assert_eq!((report.cpu_experts, report.gpu_experts), (0, 0));
            }
        }
    }
}

/// [`MoeBlock::forward`] is [`Router::route`] and [`MoeBlock::forward_routed`].
#[test]
fn forward_routes_with_the_router() {
    for (experts, top_k) in [(1, 1), (3, 2), (60, 8)] {
        let model = Model {
            top_k,
            ..Model::new(5, experts, (50, 60))
        };
        let x = matrix(Pattern::Gaussian, 4, 17, 50);
        let chosen = model.router().route(&x).unwrap();
        let case = RoutingCase {
            tokens: 17,
            top_k,
            experts,
            ids: chosen.ids.clone(),
            weights: chosen.weights.clone(),
        };
        for format in FORMATS {
            let want = model.want(format, &x, &case);
            for engine in engines() {
                let (got, _) = model
                    .block(format, &engine)
                    .forward(&x, Backend::Cpu)
                    .unwrap();
                want.check("forward", &got, 50);
            }
        }
    }
}

/// A token's bytes do not depend on its batch in int8; in bf16 its bound does not.
#[test]
fn batches_do_not_matter() {
    let (hidden, tokens) = (130, 67);
    let mut model = Model::new(4, 6, (hidden, 140));
    model.top_k = 3;
    model.shared = Some((ExpertWeights::random(9, hidden, 40, false), None));
    let x = matrix(Pattern::Outliers, 4, tokens, hidden);
    let chosen = model.router().route(&x).unwrap();
    for format in FORMATS {
        for engine in engines() {
            let mut block = model.block(format, &engine);
            let all = run(&mut block, &x, &chosen);
            for size in [1, 2, 7, 33] {
                let mut parts = Vec::new();
                for (i, x) in x.chunks(size * hidden).enumerate() {
                    let at = 3 * size * i..3 * (size * i + x.len() / hidden);
                    let part = Routing {
                        top_k: 3,
                        ids: chosen.ids[at.clone()].to_vec(),
                        weights: chosen.weights[at].to_vec(),
                    };
                    parts.extend(run(&mut block, x, &part));
                }
                if !is_exact(format) {
                    let want = Expected::from_values(hidden, &all);
                    check_close("parts", &parts, &want, Bound::relative(1e-2)).unwrap();
                } else {
                    bits_equal("parts", &parts, &all, hidden).unwrap();
                }
            }
        }
    }
}

/// Not a number, or infinite, in one token: the others keep their bytes.
#[test]
fn broken_tokens_spoil_only_themselves() {
    let (hidden, tokens, broken) = (70, 40, 17);
    let mut model = Model::new(3, 4, (hidden, 140));
    model.top_k = 2;
    model.shared = Some((
        ExpertWeights::random(9, hidden, 40, false),
        Some(vec![0.1; hidden]),
    ));
    let good = matrix(Pattern::Gaussian, 4, tokens, hidden);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for whole_row in [true, false] {
            let mut bad = good.clone();
            let row = &mut bad[broken * hidden..][..hidden];
            match whole_row {
                true => row.fill(value),
                false => row[hidden - 1] = value,
            }
            for format in FORMATS {
                for engine in engines() {
                    // The same routing for both, so that the broken token shares its tiles.
                    let chosen = model.router().route(&good).unwrap();
                    let mut block = model.block(format, &engine);
                    let mut want = run(&mut block, &good, &chosen);
                    let mut got = run(&mut block, &bad, &chosen);
                    let at = broken * hidden..(broken + 1) * hidden;
                    if value.is_nan() {
                        assert!(got[at.clone()].iter().all(|y| y.is_nan()), "{format}");
                    }
                    got[at.clone()].fill(0.0);
                    want[at].fill(0.0);
                    let name = format!("{value} {}", engine.kernel_name(format));
                    bits_equal(&name, &got, &want, hidden).unwrap();
                    // With the block's own router it must at least not be an error.
                    let (routed, _) = block.forward(&bad, Backend::Cpu).unwrap();
                    let others = |y: &f32| !y.is_nan();
                    assert!(routed[..broken * hidden].iter().all(others));
                    assert!(routed[(broken + 1) * hidden..].iter().all(others));
                }
            }
        }
    }
}

/// Blocks that run at the same time on one thread pool give what each gives alone.
#[test]
fn many_blocks_at_once() {
    let (hidden, tokens) = (64, 24);
    let mut model = Model::new(4, 8, (hidden, 130));
    model.top_k = 2;
    let x = matrix(Pattern::Gaussian, 4, tokens, hidden);
    let engine = engines().pop().unwrap();
    for format in FORMATS {
        let (want, _) = model
            .block(format, &engine)
            .forward(&x, Backend::Cpu)
            .unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut block = model.block(format, &engine);
                    for _ in 0..20 {
                        let (got, _) = block.forward(&x, Backend::Cpu).unwrap();
                        bits_equal("at once", &got, &want, hidden).unwrap();
                    }
                });
            }
        });
    }
}

#[test]
fn calls_that_do_not_fit() {
    let model = Model {
        top_k: 2,
        ..Model::new(3, 3, (20, 10))
    };
    let mut block = model.block(WeightFormat::Bf16, &engines()[0]);
    let x = [0.0; 2 * 20];
    let good = Routing {
        top_k: 2,
        ids: vec![0, 1, 2, -1],
        weights: vec![0.5; 4],
    };
    let error = block.forward(&x[..39], Backend::Cpu).unwrap_err();
    assert!(matches!(
        error,
        MoeError::Routing(RoutingError::Rows {
            row: 20,
            found: 39,
            ..
        })
    ));
    let mut refuse =
        |x: &[f32], routing: &Routing| block.forward_routed(x, routing, Backend::Cpu).unwrap_err();
    let error = refuse(&x[..39], &good);
    assert!(
        matches!(
            error,
            MoeError::Input {
                len: 39,
                hidden: 20
            }
        ),
        "{error}"
    );
    // Of another number of tokens, or slots.
    let error = refuse(&x[..20], &good);
    let count = LayoutError::IdCount {
        tokens: 1,
        top_k: 2,
        found: 4,
    };
    assert!(
        matches!(&error, MoeError::Layout(e) if *e == count),
        "{error}"
    );
    for top_k in [0, 1, 3, usize::MAX] {
        let routing = Routing {
            top_k,
            ..good.clone()
        };
        let error = refuse(&x, &routing);
        assert!(
            matches!(error, MoeError::Layout(LayoutError::IdCount { .. })),
            "{top_k} {error}"
        );
    }
    let routing = Routing {
        weights: vec![0.5; 3],
        ..good.clone()
    };
    let error = refuse(&x, &routing);
    assert!(
        matches!(
            error,
            MoeError::Parts {
                found: 3,
                needed: 4,
                ..
            }
        ),
        "{error}"
    );
    for id in [3, -2, i32::MAX, i32::MIN] {
        let routing = Routing {
            ids: vec![0, 1, 2, id],
            ..good.clone()
        };
        let error = refuse(&x, &routing);
        let want = LayoutError::Id {
            token: 1,
            slot: 1,
            id,
            experts: 3,
        };
        assert!(error.to_string().contains(&id.to_string()));
        assert!(matches!(error, MoeError::Layout(e) if e == want));
    }
    for backend in [Backend::Gpu, Backend::Both] {
        let error = block.forward(&x, backend).unwrap_err();
        assert!(
            matches!(error, MoeError::Backend { backend: "gpu", .. }),
            "{error}"
        );
    }
    // And it still works.
    assert_eq!(run(&mut block, &x, &good).len(), x.len());
}

/// No slots at all: only the shared expert is left.
#[test]
fn a_routing_without_slots() {
    let mut model = Model::new(3, 3, (20, 10));
    let none = Routing {
        top_k: 0,
        ids: Vec::new(),
        weights: Vec::new(),
    };
    let x = matrix(Pattern::Gaussian, 4, 2, 20);
    let mut block = model.block(WeightFormat::Int8PerRow, &engines()[0]);
    assert_eq!(run(&mut block, &x, &none), [0.0; 40]);
    model.shared = Some((ExpertWeights::random(9, 20, 10, false), None));
    let mut block = model.block(WeightFormat::Int8PerRow, &engines()[0]);
    assert!(run(&mut block, &x, &none).iter().all(|&y| y != 0.0));
}

#[test]
fn parts_that_do_not_fit() {
    type Change<'a> = &'a dyn Fn(&mut BlockParts);
    let model = Model::new(3, 3, (20, 10));
    let make = |change: Change<'_>| {
        let mut parts = model.parts(WeightFormat::Bf16);
        change(&mut parts);
        MoeBlock::from_parts(parts, engines().remove(0))
    };
    let one = |hidden| {
        bank(
            WeightFormat::Bf16,
            &[ExpertWeights::random(1, hidden, 10, false)],
        )
    };
    assert!(make(&|_| {}).is_ok());
    let bad: [(Change<'_>, &str); 6] = [
        (
            &|p| p.router = Model::new(3, 3, (21, 10)).router(),
            "the router's width: 21, needed 20",
        ),
        (
            &|p| p.router = Model::new(3, 2, (20, 10)).router(),
            "the router's experts: 2, needed 3",
        ),
        (
            &|p| p.experts = one(20).unwrap(),
            "the router's experts: 3, needed 1",
        ),
        (
            &|p| p.shared = Some((one(21).unwrap(), None)),
            "the shared expert's width: 21, needed 20",
        ),
        (
            &|p| {
                let two = [1, 2].map(|seed| ExpertWeights::random(seed, 20, 10, false));
                p.shared = Some((bank(WeightFormat::Bf16, &two).unwrap(), None));
            },
            "the shared bank's experts: 2, needed 1",
        ),
        (
            &|p| p.shared = Some((one(20).unwrap(), Some(vec![0.0; 19]))),
            "the shared gate's width: 19, needed 20",
        ),
    ];
    for (change, message) in bad {
        let error = make(change).unwrap_err();
        assert!(matches!(error, MoeError::Parts { .. }));
        assert_eq!(error.to_string(), message);
    }
}

/// Banks without a size, beyond all memory, or with a bias of another length.
#[test]
fn banks_that_cannot_be() {
    let weights = ExpertWeights::random(1, 20, 10, true);
    let plain = |geometry| ExpertBank::plain(geometry, |_| Source(&weights), || {});
    for format in FORMATS {
        let good = BankGeometry {
            experts: 1,
            hidden: 20,
            intermediate: 10,
            format,
            bias: true,
        };
        assert!(plain(good).is_ok());
        for bias in [true, false] {
            let good = BankGeometry { bias, ..good };
            for (name, zero) in [
                ("experts", BankGeometry { experts: 0, ..good }),
                ("hidden", BankGeometry { hidden: 0, ..good }),
                (
                    "width",
                    BankGeometry {
                        intermediate: 0,
                        ..good
                    },
                ),
            ] {
                let error = plain(zero).map(|_| ()).expect_err(name);
                assert!(
                    matches!(error, MoeError::Cpu(CpuError::Zero { .. })),
                    "{error}"
                );
                assert!(error.to_string().contains(name), "{error}");
            }
            for huge in [
                BankGeometry {
                    hidden: usize::MAX / 4,
                    ..good
                },
                BankGeometry {
                    intermediate: usize::MAX - 5,
                    ..good
                },
                BankGeometry {
                    experts: usize::MAX / 100,
                    ..good
                },
            ] {
                let error = plain(huge).map(|_| ()).expect_err("huge");
                assert!(
                    matches!(error, MoeError::Cpu(CpuError::TooLarge { .. })),
                    "{error}"
                );
            }
        }
        let mut short = weights.clone();
        short.down_bias = Some(vec![0.0; 19]);
        let error = ExpertBank::plain(good, |_| Source(&short), || {})
            .map(|_| ())
            .unwrap_err();
        assert!(
            matches!(
                error,
                MoeError::Cpu(CpuError::Mismatch {
                    expected: 20,
                    actual: 19,
                    ..
                })
            ),
            "{error}"
        );
    }
}
