//! Small checkpoints of published families against what the transformers library computes
//! from them in f32: router logits, choices, weights and the output of the whole block.

use asym_gemm::checkpoint::{Checkpoint, MoeLayer, TensorFile};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::Projection;
use std::path::PathBuf;

const FIXTURES: [(&str, usize); 7] = [
    ("qwen3_moe_bf16", 0),
    ("mixtral_bf16", 0),
    ("deepseek_v3_bf16", 1),
    ("gpt_oss_bf16", 0),
    ("deepseek_v3_fp8", 1),
    ("gpt_oss_mxfp4", 0),
    ("qwen3_moe_nvfp4_modelopt", 0),
];

fn folder(name: &str) -> PathBuf {
    let fixtures = std::env::var_os("ASYM_GEMM_FIXTURES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"),
        PathBuf::from,
    );
    fixtures.join(name)
}

struct Fixture {
    layer: MoeLayer,
    io: TensorFile,
    number: usize,
}

impl Fixture {
    fn open((name, number): (&str, usize)) -> Self {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let layer = checkpoint.moe_layer(number).unwrap();
        let io = TensorFile::open(folder(name).join("moe_io.safetensors")).unwrap();
        Self { layer, io, number }
    }

    fn f32(&self, what: &str) -> Vec<f32> {
        self.io
            .read_f32(&format!("layer{}.{what}", self.number))
            .unwrap()
    }
}

/// The (id, weight) pairs of a token, by id.
fn pairs(ids: &[i32], weights: &[f32]) -> Vec<(i32, f32)> {
    let mut pairs: Vec<_> = ids.iter().copied().zip(weights.iter().copied()).collect();
    pairs.sort_by_key(|pair| pair.0);
    pairs
}

#[test]
fn routing() {
    for fixture in FIXTURES {
        let f = Fixture::open(fixture);
        let router = &f.layer.router;
        let (x, logits) = (f.f32("input"), f.f32("gate_out0"));
        for (i, (got, want)) in router.logits(&x).unwrap().iter().zip(&logits).enumerate() {
            let bound = 1e-5 * want.abs().max(1.0);
            assert!(
                (got - want).abs() < bound,
                "{fixture:?} logit {i}: {got} {want}"
            );
        }

        let ids =
            f.io.read_i32(&format!("layer{}.gate_out2", f.number))
                .unwrap();
        let weights = f.f32("gate_out1");
        let k = router.top_k();
        for routing in [router.route(&x).unwrap(), router.select(&logits).unwrap()] {
            assert_eq!(routing.ids.len(), ids.len());
            for token in 0..ids.len() / k {
                let slots = token * k..(token + 1) * k;
                let got = pairs(&routing.ids[slots.clone()], &routing.weights[slots.clone()]);
                let want = pairs(&ids[slots.clone()], &weights[slots]);
                for (got, want) in got.iter().zip(&want) {
                    assert_eq!(got.0, want.0, "{fixture:?} token {token}");
                    assert!(
                        (got.1 - want.1).abs() < 1e-6,
                        "{fixture:?} {token}: {got:?} {want:?}"
                    );
                }
            }
        }
    }
}

/// One expert on one token in f64, from the layer's rows.
fn expert(
    layer: &MoeLayer,
    width: usize,
    x: &[f32],
    row: impl Fn(Projection, usize, &mut [f32]),
    bias: impl Fn(Projection, usize) -> f32,
) -> Vec<f64> {
    let product = |projection, r, input: &[f64]| {
        let mut weights = vec![f32::NAN; input.len()];
        row(projection, r, &mut weights);
        let sum: f64 = weights
            .iter()
            .zip(input)
            .map(|(&w, x)| f64::from(w) * x)
            .sum();
        sum + f64::from(bias(projection, r))
    };
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let h: Vec<f64> = (0..width)
        .map(|i| {
            let (gate, up) = (
                product(Projection::Gate, i, &x),
                product(Projection::Up, i, &x),
            );
            match layer.spec.activation {
                Activation::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
                Activation::ClampedSwiGlu { limit, alpha } => {
                    let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                    (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
                }
            }
        })
        .collect();
    (0..layer.spec.hidden)
        .map(|r| product(Projection::Down, r, &h))
        .collect()
}

fn block(layer: &MoeLayer, x: &[f32]) -> Vec<f64> {
    let spec = &layer.spec;
    let routing = layer.router.route(x).unwrap();
    let mut y = vec![0.0; x.len()];
    for (t, (x, y)) in x
        .chunks(spec.hidden)
        .zip(y.chunks_mut(spec.hidden))
        .enumerate()
    {
        let slots = t * spec.top_k..(t + 1) * spec.top_k;
        for (&id, &weight) in routing.ids[slots.clone()]
            .iter()
            .zip(&routing.weights[slots])
        {
            let id = id as usize;
            let out = expert(
                layer,
                spec.intermediate,
                x,
                |projection, row, out| layer.expert_row(id, projection, row, out),
                |projection, row| {
                    layer
                        .expert_bias(id, projection)
                        .map_or(0.0, |bias| bias[row])
                },
            );
            y.iter_mut()
                .zip(out)
                .for_each(|(y, out)| *y += f64::from(weight) * out);
        }
        if let Some(shared) = spec.shared {
            let out = expert(
                layer,
                shared.intermediate,
                x,
                |projection, row, out| layer.shared_row(projection, row, out),
                |_, _| 0.0,
            );
            let scale = layer.shared_gate.as_ref().map_or(1.0, |gate| {
                let z: f64 = gate
                    .iter()
                    .zip(x)
                    .map(|(&g, &x)| f64::from(g) * f64::from(x))
                    .sum();
                1.0 / (1.0 + (-z).exp())
            });
            y.iter_mut().zip(out).for_each(|(y, out)| *y += scale * out);
        }
    }
    y
}

#[test]
fn outputs() {
    for fixture in FIXTURES {
        let f = Fixture::open(fixture);
        let want = f.f32("output");
        let got = block(&f.layer, &f.f32("input"));
        assert_eq!(got.len(), want.len());
        for (t, (got, want)) in got
            .chunks(f.layer.spec.hidden)
            .zip(want.chunks(f.layer.spec.hidden))
            .enumerate()
        {
            let scale = want
                .iter()
                .fold(0.0f32, |max, v| max.max(v.abs()))
                .max(1e-3);
            for (i, (got, &want)) in got.iter().zip(want).enumerate() {
                let error = (got - f64::from(want)).abs() / f64::from(scale);
                assert!(
                    error < 2e-5,
                    "{fixture:?} token {t} column {i}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn layers_hold_their_tensors_once() {
    for (name, number) in FIXTURES {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let layer = checkpoint.moe_layer(number).unwrap();
        let router = ["gate.", "router.", "block_sparse_moe.gate."];
        let prefix = format!("model.layers.{number}.");
        let stored: usize = checkpoint
            .tensors()
            .filter(|(tensor, _)| tensor.starts_with(&prefix) && !tensor.ends_with("_bias"))
            .filter(|(tensor, _)| !router.iter().any(|part| tensor.contains(part)))
            .filter(|(tensor, _)| !tensor.contains("_scale"))
            .map(|(_, info)| info.bytes)
            .sum();
        assert_eq!(layer.weight_bytes(), stored, "{name}");
    }
}

#[test]
fn layers_that_cannot_be_read() {
    let deepseek = Checkpoint::open(folder("deepseek_v3_bf16")).unwrap();
    let text = |layer| deepseek.moe_layer(layer).unwrap_err().to_string();
    assert!(text(0).contains("layer 0 is dense") && text(0).contains("first_k_dense_replace"));
    assert!(text(2).contains("layer 2 is out of range") && text(2).contains("deepseek_v3"));
}

/// The formats are told by the tensors, and the codes of a bank in the same format are those of
/// the file.
#[test]
fn formats_of_quantised_layers() {
    for (name, layer, format) in [
        ("deepseek_v3_fp8", 1, WeightFormat::Fp8Block128),
        ("gpt_oss_mxfp4", 0, WeightFormat::Mxfp4),
        ("qwen3_moe_nvfp4_modelopt", 0, WeightFormat::Nvfp4),
        ("mixtral_bf16", 0, WeightFormat::Bf16),
    ] {
        let checkpoint = Checkpoint::open(folder(name)).unwrap();
        let layer = checkpoint.moe_layer(layer).unwrap();
        assert_eq!(layer.stored_format(), Some(format), "{name}");
        assert_eq!(layer.stored_names().len(), 1, "{name}");
    }
}
