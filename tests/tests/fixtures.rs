//! MoE blocks of checkpoints whose own models' routing and output are known.

use asym_gemm::checkpoint::{Checkpoint, MoeLayer, TensorFile};
use asym_gemm::cpu::Engine;
use asym_gemm::formats::WeightFormat;
use asym_gemm::moe::{Backend, MoeBlock};
use asym_gemm_testkit::compare::{Bound, bits_equal, check_close};
use asym_gemm_testkit::reference::Expected;
use asym_gemm_tests::{FORMATS, engines, fixture, is_exact};
use std::sync::atomic::{AtomicUsize, Ordering};

const TOKENS: usize = 19;

struct Fixture {
    name: &'static str,
    layer: MoeLayer,
    io: TensorFile,
}

impl Fixture {
    fn all() -> Vec<Self> {
        [
            ("qwen3_moe_bf16", 0),
            ("mixtral_bf16", 0),
            ("deepseek_v3_bf16", 1),
            ("gpt_oss_bf16", 0),
            ("deepseek_v3_fp8", 1),
            ("gpt_oss_mxfp4", 0),
            ("qwen3_moe_nvfp4_modelopt", 0),
        ]
        .map(|(name, layer)| Self {
            name,
            layer: Checkpoint::open(fixture(name))
                .unwrap()
                .moe_layer(layer)
                .unwrap(),
            io: TensorFile::open(fixture(name).join("moe_io.safetensors")).unwrap(),
        })
        .into()
    }

    fn tensor(&self, what: &str) -> String {
        format!("layer{}.{what}", self.layer.spec.layer)
    }

    fn values(&self, what: &str) -> Vec<f32> {
        self.io.read_f32(&self.tensor(what)).unwrap()
    }

    fn block(&self, format: WeightFormat, engine: &Engine) -> MoeBlock {
        MoeBlock::for_cpu(&self.layer, format, engine.clone(), || {}).unwrap()
    }

    /// Within what the format may cost against a model that computes in f32: an element as a
    /// share of |expected| + row RMS, the whole as a relative Frobenius error.
    fn check(&self, format: WeightFormat, got: &[f32]) {
        let (element, frobenius) = match format {
            WeightFormat::Bf16 => (0.012, 0.012),
            // Exact, but for bf16 activations, if the file holds the same codes.
            _ if self.layer.stored_format() == Some(format) => (0.012, 0.012),
            WeightFormat::Int8PerRow | WeightFormat::Int8Block128 | WeightFormat::Fp8Block128 => {
                (0.2, 0.08)
            }
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => (1.2, 0.3),
        };
        let want = Expected::from_values(self.layer.spec.hidden, &self.values("output"));
        check_close(self.name, got, &want, Bound::relative(element))
            .and_then(|report| report.frobenius_below(frobenius))
            // An element may lose all of itself to fp4: there the Frobenius error is what tells.
            .and_then(|report| match element < 1.0 {
                true => report.not_vacuous(),
                false => Ok(report),
            })
            .unwrap_or_else(|error| panic!("{format}: {error}"));
    }
}

/// The (id, weight) pairs of a token, by id.
fn choices(ids: &[i32], weights: &[f32]) -> Vec<(i32, f32)> {
    let mut choices: Vec<_> = ids.iter().copied().zip(weights.iter().copied()).collect();
    choices.sort_by_key(|choice| choice.0);
    choices
}

#[test]
fn routers_choose_as_their_models() {
    for fixture in Fixture::all() {
        let routing = fixture
            .layer
            .router
            .route(&fixture.values("input"))
            .unwrap();
        let ids = fixture.io.read_i32(&fixture.tensor("gate_out2")).unwrap();
        let weights = fixture.values("gate_out1");
        let top_k = fixture.layer.spec.top_k;
        assert_eq!(routing.top_k, top_k);
        assert_eq!(
            (routing.ids.len(), ids.len()),
            (TOKENS * top_k, TOKENS * top_k)
        );
        for token in 0..TOKENS {
            let at = token * top_k..(token + 1) * top_k;
            let got = choices(&routing.ids[at.clone()], &routing.weights[at.clone()]);
            let want = choices(&ids[at.clone()], &weights[at]);
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(got.0, want.0, "{} token {token}", fixture.name);
                let error = (got.1 - want.1).abs();
                assert!(
                    error < 1e-6,
                    "{} token {token}: {got:?} {want:?}",
                    fixture.name
                );
            }
        }
    }
}

#[test]
fn outputs_are_the_models_in_every_format_and_isa() {
    for fixture in Fixture::all() {
        let x = fixture.values("input");
        for format in FORMATS {
            let outputs: Vec<Vec<f32>> = engines()
                .iter()
                .map(|engine| {
                    let mut block = fixture.block(format, engine);
                    let (out, report) = block.forward(&x, Backend::Cpu).unwrap();
                    assert_eq!(report.kernels, [engine.kernel_name(format)]);
                    assert_eq!(report.gpu_experts, 0);
                    fixture.check(format, &out);
                    out
                })
                .collect();
            // int8 is defined to the bit.
            if is_exact(format) {
                for other in &outputs[1..] {
                    bits_equal("ISAs", other, &outputs[0], fixture.layer.spec.hidden).unwrap();
                }
            }
        }
    }
}

/// `packed` is called for each expert; the report counts the experts and bytes used.
#[test]
fn progress_and_report() {
    for fixture in Fixture::all() {
        let spec = &fixture.layer.spec;
        let packed = AtomicUsize::new(0);
        let engine = engines().remove(0);
        let count = || _ = packed.fetch_add(1, Ordering::Relaxed);
        let mut block =
            MoeBlock::for_cpu(&fixture.layer, WeightFormat::Bf16, engine, count).unwrap();
        let shared = usize::from(spec.shared.is_some());
        assert_eq!(
            packed.into_inner(),
            spec.experts + shared,
            "{}",
            fixture.name
        );

        let x = fixture.values("input");
        let one = &x[..spec.hidden];
        let (_, report) = block.forward(one, Backend::Cpu).unwrap();
        assert_eq!(report.cpu_experts, spec.top_k);
        let routed = spec.top_k * block.experts().geometry().expert_bytes();
        assert_eq!(
            report.weight_bytes > routed,
            shared == 1,
            "{}",
            fixture.name
        );
        assert!(report.weight_bytes >= routed && report.seconds > 0.0);
    }
}

/// Each token alone gives its row of the batch, to the bit in int8.
#[test]
fn tokens_alone() {
    let engine = engines().pop().unwrap();
    for fixture in Fixture::all() {
        let (x, hidden) = (fixture.values("input"), fixture.layer.spec.hidden);
        for format in [WeightFormat::Int8PerRow, WeightFormat::Int8Block128] {
            let mut block = fixture.block(format, &engine);
            let (all, _) = block.forward(&x, Backend::Cpu).unwrap();
            let alone = x
                .chunks(hidden)
                .flat_map(|x| block.forward(x, Backend::Cpu).unwrap().0);
            let alone: Vec<f32> = alone.collect();
            bits_equal(fixture.name, &alone, &all, hidden).unwrap();
        }
    }
}
