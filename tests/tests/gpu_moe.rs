//! MoE blocks on the GPU, and on CPU and GPU together, against the reference: int8 to the bit,
//! bf16 within its bound.

use asym_gemm::cpu::Engine;
use asym_gemm::driver::Gpu;
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::activation::Activation;
use asym_gemm::formats::bank::BankGeometry;
use asym_gemm::moe::routing::{Router, Routing, Scoring};
use asym_gemm::moe::{Backend, BlockParts, ExpertBank, MoeBlock, MoeError};
use asym_gemm::transfer::Transfer;
use asym_gemm_testkit::compare::{Bound, Output, bits_equal, check_close};
use asym_gemm_testkit::generate::{
    Pattern, RoutingCase, RoutingKind, expert_shapes, matrix, rounded_to_bf16, row_counts,
};
use asym_gemm_testkit::reference::{self, ExpertWeights, SharedExpert};
use asym_gemm_testkit::skip;
use asym_gemm_tests::{GPU_FORMATS, Source, geometry, gpu};

const TRANSFERS: [Transfer; 3] = [Transfer::Staged, Transfer::Direct, Transfer::Resident];
const RING: usize = 48 << 20;
const CLAMPED: Activation = Activation::ClampedSwiGlu {
    limit: 7.0,
    alpha: 1.702,
};

/// Experts with or without a shared one, in bf16 values so that every format starts alike.
struct Model {
    hidden: usize,
    experts: Vec<ExpertWeights>,
    shared: Option<ExpertWeights>,
    activation: Activation,
}

impl Model {
    fn new(experts: usize, (hidden, intermediate): (usize, usize), bias: bool) -> Self {
        let weights = |seed| ExpertWeights::random(seed, hidden, intermediate, bias).to_bf16();
        Self {
            hidden,
            experts: (0..experts as u64).map(weights).collect(),
            shared: None,
            activation: Activation::SwiGlu,
        }
    }

    fn with_shared(mut self, intermediate: usize) -> Self {
        self.shared = Some(ExpertWeights::random(999, self.hidden, intermediate, false).to_bf16());
        self
    }

    fn block(&self, gpu: &Gpu, format: WeightFormat, transfer: Transfer, ring: usize) -> MoeBlock {
        let bank = |experts: &[ExpertWeights]| {
            ExpertBank::pinned(
                gpu,
                geometry(format, experts),
                |e| Source(&experts[e]),
                || {},
            )
            .unwrap()
        };
        let count = self.experts.len();
        let router = Router::new(
            count,
            self.hidden,
            1,
            vec![0.0; count * self.hidden],
            None,
            Scoring::Softmax { renormalise: false },
        );
        let parts = BlockParts {
            router: router.unwrap(),
            activation: self.activation,
            experts: bank(&self.experts),
            shared: self
                .shared
                .as_ref()
                .map(|s| (bank(std::slice::from_ref(s)), None)),
        };
        let mut block = MoeBlock::from_parts(parts, Engine::detect().unwrap()).unwrap();
        block.attach_gpu(gpu, transfer, Some(ring)).unwrap();
        block
    }

    fn reference(&self) -> reference::MoeBlock<'_> {
        reference::MoeBlock {
            experts: &self.experts,
            shared: self.shared.as_ref().map(|weights| SharedExpert {
                weights,
                token_weights: None,
            }),
            activation: self.activation,
        }
    }

    /// Runs `case` on `backend` and compares with the reference.
    fn check(
        &self,
        name: &str,
        block: &mut MoeBlock,
        format: WeightFormat,
        case: &RoutingCase,
        x: &[f32],
        backend: Backend,
    ) -> Vec<f32> {
        let routing = routing(case);
        let (out, report) = block.forward_routed(x, &routing, backend).unwrap();
        let name = format!(
            "{name} {format} {backend} ({} + {} experts)",
            report.cpu_experts, report.gpu_experts
        );
        match format {
            WeightFormat::Bf16 => {
                let want = self.reference().bf16(x, case);
                check_close(&name, &out, &want, Bound::f32_accumulated(Output::F32))
                    .unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
            _ => {
                let want = self.reference().int8(format, x, case);
                if backend == Backend::Both {
                    // Each side sums its own slots, and then both are added.
                    nearly_equal(&name, &out, &want, self.hidden);
                } else {
                    bits_equal(&name, &out, &want, self.hidden)
                        .unwrap_or_else(|mismatch| panic!("{mismatch}"));
                }
            }
        }
        out
    }
}

/// Equal but for the order of a few f32 additions, whose terms are about as large as the largest
/// sum of the token.
fn nearly_equal(name: &str, got: &[f32], want: &[f32], hidden: usize) {
    let tokens = got.chunks(hidden).zip(want.chunks(hidden));
    for (token, (got, want)) in tokens.enumerate() {
        let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        for (column, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(
                (got - want).abs() <= 16.0 * f32::EPSILON * largest,
                "{name}: token {token}, column {column}: {got}, expected {want}"
            );
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

fn input(tokens: usize, hidden: usize) -> Vec<f32> {
    rounded_to_bf16(&matrix(Pattern::Gaussian, 5, tokens, hidden))
}

/// Every number of rows an expert can have.
#[test]
fn every_row_count() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let all: Vec<usize> = row_counts().collect();
    let small: Vec<usize> = all.iter().copied().filter(|&c| c <= 64).collect();
    for counts in [small, all] {
        let model = Model::new(counts.len(), (72, 136), false);
        let ids: Vec<i32> = (0..).zip(&counts).flat_map(|(e, &c)| vec![e; c]).collect();
        let tokens = ids.len();
        let case = RoutingCase {
            tokens,
            top_k: 1,
            experts: counts.len(),
            weights: vec![0.75; tokens],
            ids,
        };
        let x = input(tokens, 72);
        for format in GPU_FORMATS {
            let mut block = model.block(&gpu, format, Transfer::Staged, RING);
            for backend in [Backend::Gpu, Backend::Both] {
                model.check("row counts", &mut block, format, &case, &x, backend);
            }
        }
    }
}

/// Every kind of routing, every transfer, both mixes, dirty buffers.
#[test]
fn every_routing_and_transfer() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let mut model = Model::new(12, (192, 160), true).with_shared(96);
    for activation in [Activation::SwiGlu, CLAMPED] {
        model.activation = activation;
        for format in GPU_FORMATS {
            for transfer in TRANSFERS {
                let mut block = model.block(&gpu, format, transfer, RING);
                for kind in RoutingKind::ALL {
                    for tokens in [1, 19, 200] {
                        let case = RoutingCase::new(kind, 3, tokens, 4, 12);
                        let x = input(tokens, 192);
                        let name = format!("{kind:?} T={tokens} {transfer}");
                        for backend in [Backend::Gpu, Backend::Both] {
                            let first = model.check(&name, &mut block, format, &case, &x, backend);
                            block.poison_scratch().unwrap();
                            let again = block
                                .forward_routed(&x, &routing(&case), backend)
                                .unwrap()
                                .0;
                            bits_equal("second call on dirty buffers", &again, &first, 192)
                                .unwrap_or_else(|mismatch| panic!("{name}: {mismatch}"));
                        }
                    }
                }
            }
        }
    }
}

/// Odd widths, with the ring so small that each expert is a copy of its own.
#[test]
fn odd_shapes_and_a_small_ring() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for &shape in expert_shapes()
        .iter()
        .chain(&[(1, 1), (257, 300), (100, 33), (2880, 96)])
    {
        let model = Model::new(5, shape, false);
        let case = RoutingCase::new(RoutingKind::Uniform, 1, 37, 2, 5);
        let x = input(37, shape.0);
        for format in GPU_FORMATS {
            let expert_bytes = geometry(format, &model.experts).expert_bytes();
            for ring in [3 * expert_bytes, RING] {
                let mut block = model.block(&gpu, format, Transfer::Staged, ring);
                model.check(
                    &format!("{shape:?}"),
                    &mut block,
                    format,
                    &case,
                    &x,
                    Backend::Gpu,
                );
            }
        }
    }
}

/// Numbers of experts and slots at the edges; no token at all.
#[test]
fn many_experts_and_no_tokens() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for (experts, top_k, tokens) in [(1, 1, 5), (3, 3, 9), (384, 8, 64), (384, 1, 0), (60, 32, 3)] {
        let model = Model::new(experts, (64, 64), false);
        let case = RoutingCase::new(RoutingKind::Uniform, 2, tokens, top_k, experts);
        let x = input(tokens, 64);
        for format in GPU_FORMATS {
            let mut block = model.block(&gpu, format, Transfer::Staged, RING);
            let name = format!("E={experts} k={top_k} T={tokens}");
            let first = model.check(&name, &mut block, format, &case, &x, Backend::Gpu);
            for _ in 0..20 {
                let again = block
                    .forward_routed(&x, &routing(&case), Backend::Gpu)
                    .unwrap()
                    .0;
                bits_equal("repeat", &again, &first, 64)
                    .unwrap_or_else(|mismatch| panic!("{name} {format}: {mismatch}"));
            }
        }
    }
}

/// A token's bytes do not depend on the other tokens, NaN and outliers among them included.
#[test]
fn tokens_are_independent() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let hidden = 128;
    // A ragged last slice: its padding must not turn an infinite token into NaN.
    let model = Model::new(4, (hidden, 200), false);
    let case = RoutingCase::new(RoutingKind::Uniform, 4, 40, 2, 4);
    let mut x = input(40, hidden);
    for format in GPU_FORMATS {
        let mut block = model.block(&gpu, format, Transfer::Resident, RING);
        let whole = block
            .forward_routed(&x, &routing(&case), Backend::Gpu)
            .unwrap()
            .0;
        let alone = Routing {
            top_k: 2,
            ids: case.ids[14..16].to_vec(),
            weights: case.weights[14..16].to_vec(),
        };
        let one = block
            .forward_routed(&x[7 * hidden..8 * hidden], &alone, Backend::Gpu)
            .unwrap()
            .0;
        bits_equal("alone", &one, &whole[7 * hidden..8 * hidden], hidden)
            .unwrap_or_else(|mismatch| panic!("{format}: {mismatch}"));
        for bad in [f32::NAN, f32::INFINITY, 3e38] {
            let kept = std::mem::replace(&mut x[3 * hidden + 5], bad);
            let got = block
                .forward_routed(&x, &routing(&case), Backend::Gpu)
                .unwrap()
                .0;
            x[3 * hidden + 5] = kept;
            for token in (0..40).filter(|&token| token != 3) {
                let rows = token * hidden..(token + 1) * hidden;
                bits_equal("others", &got[rows.clone()], &whole[rows], hidden)
                    .unwrap_or_else(|mismatch| panic!("{format} {bad}: {mismatch}"));
            }
            if bad.is_infinite() && format == WeightFormat::Bf16 {
                let on_cpu = block_output(&mut block, &mut x, 3 * hidden + 5, bad, &case);
                let kinds = |out: &[f32]| out.iter().map(|v| v.is_nan()).collect::<Vec<_>>();
                assert_eq!(kinds(&got), kinds(&on_cpu), "NaN where the CPU has none");
            }
            if bad.is_nan() {
                assert!(
                    got[3 * hidden..4 * hidden].iter().all(|v| v.is_nan()),
                    "{format}"
                );
            }
        }
    }
}

/// The CPU's output for x with one value replaced.
fn block_output(
    block: &mut MoeBlock,
    x: &mut [f32],
    at: usize,
    value: f32,
    case: &RoutingCase,
) -> Vec<f32> {
    let kept = std::mem::replace(&mut x[at], value);
    let out = block
        .forward_routed(x, &routing(case), Backend::Cpu)
        .unwrap()
        .0;
    x[at] = kept;
    out
}

#[test]
fn what_cannot_be_done_is_an_error() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let model = Model::new(2, (64, 64), false);
    let geometry = geometry(WeightFormat::Bf16, &model.experts);
    let parts = |experts| BlockParts {
        router: Router::new(
            2,
            64,
            1,
            vec![0.0; 128],
            None,
            Scoring::Softmax { renormalise: false },
        )
        .unwrap(),
        activation: Activation::SwiGlu,
        experts,
        shared: None,
    };
    let engine = || Engine::detect().unwrap();
    let plain = ExpertBank::plain(geometry, |e| Source(&model.experts[e]), || {}).unwrap();
    let mut block = MoeBlock::from_parts(parts(plain), engine()).unwrap();
    assert!(matches!(
        block.attach_gpu(&gpu, Transfer::Direct, None),
        Err(MoeError::Backend { backend: "gpu", .. })
    ));
    assert!(matches!(
        block.forward(&[0.0; 64], Backend::Gpu),
        Err(MoeError::Backend { backend: "gpu", .. })
    ));
    let fp8 = BankGeometry {
        format: WeightFormat::Fp8Block128,
        ..geometry
    };
    let pinned = ExpertBank::pinned(&gpu, fp8, |e| Source(&model.experts[e]), || {}).unwrap();
    let mut block = MoeBlock::from_parts(parts(pinned), engine()).unwrap();
    let error = block.attach_gpu(&gpu, Transfer::Auto, None).unwrap_err();
    assert!(
        error.to_string().contains("fp8") && error.to_string().contains("cpu"),
        "{error}"
    );
    let pinned = ExpertBank::pinned(&gpu, geometry, |e| Source(&model.experts[e]), || {}).unwrap();
    let mut block = MoeBlock::from_parts(parts(pinned), engine()).unwrap();
    assert!(matches!(
        block.attach_gpu(&gpu, Transfer::Staged, Some(1000)),
        Err(MoeError::Ring {
            ring_bytes: 1000,
            ..
        })
    ));
}
