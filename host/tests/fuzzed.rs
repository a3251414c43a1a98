//! The bodies of the fuzz targets over a seeded corpus: good input, and what changes of a few
//! bytes make of it. The targets themselves (fuzz/) want a nightly compiler.

#[path = "../../fuzz/bodies.rs"]
mod bodies;

use bodies::{CONFIG, shard};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Changes, removes, repeats or inserts a few bytes.
fn mutate(rng: &mut ChaCha8Rng, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..bytes.len().max(1));
        let len = rng
            .random_range(1..9)
            .min(bytes.len() - at.min(bytes.len()));
        match rng.random_range(0..5) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.random_range(0..8),
            1 if !bytes.is_empty() => {
                bytes[at] = b"0129\"[]{},:.eE-\xff\0"[rng.random_range(0..17)]
            }
            2 => drop(bytes.drain(at..at + len)),
            3 => {
                let part = bytes[at..at + len].to_vec();
                bytes.splice(at..at, part);
            }
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn run(body: fn(&[u8]), corpus: &[Vec<u8>], rounds: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(0x5eed);
    for seed in corpus {
        body(seed);
        for _ in 0..rounds {
            body(&mutate(&mut rng, seed));
        }
    }
}

fn headers() -> Vec<Vec<u8>> {
    vec![
        shard(&[]),
        shard(&[("a", "F32", &[1], &[0; 4]), ("b", "F4", &[2, 2], &[1, 2])]),
        shard(&[("i", "I64", &[2], &[7; 16]), ("z", "F8_E4M3", &[0, 3], &[])]),
    ]
}

#[test]
fn header() {
    run(bodies::header, &headers(), 1500);
}

#[test]
fn index() {
    let good =
        r#"{"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}"#;
    run(bodies::index, &[good.into()], 1500);
}

#[test]
fn config() {
    let gpt_oss = r#"{"model_type": "gpt_oss", "num_hidden_layers": 3, "swiglu_limit": 7.0,
        "quantization_config": {"weight_block_size": [128, 128]}}"#;
    let deepseek = r#"{"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_group": 8,
        "num_hidden_layers": 4, "n_shared_experts": 2, "mlp_only_layers": [1]}"#;
    let corpus = [CONFIG, gpt_oss, deepseek].map(|text| text.as_bytes().to_vec());
    run(bodies::config, &corpus, 4000);
}

#[test]
fn layer() {
    const P: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
    let module = |p: &str, end: &str| format!("model.layers.0.mlp.experts.0.{p}.{end}");
    let router = (
        "model.layers.0.mlp.gate.weight".to_owned(),
        "F32",
        vec![1, 32],
        vec![0; 128],
    );
    let file = |mut tensors: Vec<(String, &'static str, Vec<usize>, Vec<u8>)>| {
        tensors.push(router.clone());
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (&**name, *dtype, &**shape, &**bytes))
            .collect();
        shard(&tensors)
    };
    let one = 1f32.to_le_bytes().to_vec();
    let fp8 = P.iter().flat_map(|p| {
        [
            (
                module(p, "weight"),
                "F8_E4M3",
                vec![32, 32],
                vec![0x31; 1024],
            ),
            (
                module(p, "weight_scale_inv"),
                "F32",
                vec![1, 1],
                one.clone(),
            ),
        ]
    });
    let nvfp4 = P.iter().flat_map(|p| {
        [
            (module(p, "weight"), "U8", vec![32, 16], vec![0x31; 512]),
            (
                module(p, "weight_scale"),
                "F8_E4M3",
                vec![32, 2],
                vec![0x38; 64],
            ),
            (module(p, "weight_scale_2"), "F32", vec![], one.clone()),
        ]
    });
    let int4 = P.iter().flat_map(|p| {
        [
            (
                module(p, "weight_packed"),
                "I32",
                vec![32, 4],
                vec![0x31; 512],
            ),
            (
                module(p, "weight_scale"),
                "F32",
                vec![32, 1],
                one.repeat(32),
            ),
        ]
    });
    let corpus = [
        file(fp8.collect()),
        file(nvfp4.collect()),
        file(int4.collect()),
    ];
    run(bodies::layer, &corpus, 700);
}

#[test]
fn decoders() {
    let floats = |values: &[f32]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let corpus = [
        (0..=255).collect(),
        floats(&[0.0; 40]),
        floats(&[
            1e-45,
            6.3e-38,
            1.3e-36,
            1.4e-36,
            -3e38,
            65504.0,
            f32::MAX,
            f32::MIN_POSITIVE,
        ]),
        floats(&[f32::NAN, 1.0, f32::INFINITY, -1.0]),
        floats(
            &(0..300)
                .map(|i| (i as f32 - 150.0) * 0.01)
                .collect::<Vec<_>>(),
        ),
    ];
    run(bodies::decoders, &corpus, 3000);
}
