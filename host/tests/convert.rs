//! Conversions: what they write is what packing the source would have made, whatever interrupts
//! them.

use asym_gemm::checkpoint::{Checkpoint, CheckpointError, Dtype, TensorData, TensorFile, write};
use asym_gemm::convert::{ConvertError, Options, Target, convert};
use asym_gemm::cpu::Engine;
use asym_gemm::moe::MoeBlock;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

const TARGETS: [Target; 5] = [
    Target::Int8,
    Target::Int8Block,
    Target::Fp8,
    Target::Nvfp4,
    Target::Mxfp4,
];

fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("ASYM_GEMM_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"),
        PathBuf::from,
    );
    folder.join(name)
}

fn program() -> PathBuf {
    std::env::var_os("CARGO_BIN_EXE_asym-gemm")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_asym-gemm").into())
        .into()
}

fn is_int8(target: Target) -> bool {
    matches!(target, Target::Int8 | Target::Int8Block)
}

/// The bytes of a layer's bank, quantised while it is packed.
fn bank(checkpoint: &Checkpoint, layer: usize, target: Target, experts: Option<&Path>) -> Vec<u8> {
    let mut layer = checkpoint.moe_layer(layer).unwrap();
    if let Some(folder) = experts {
        layer = layer.with_int8_experts(folder).unwrap();
        assert_eq!(layer.stored_format(), Some(target.bank_format()));
    }
    let engine = Engine::detect().unwrap();
    let block = MoeBlock::for_cpu(&layer, target.bank_format(), engine, || {}).unwrap();
    block.experts().bytes().to_vec()
}

/// For every family and target: a bank of the result holds the bytes that quantising the source on
/// the way gives.
#[test]
fn results_are_the_bytes_of_online_quantisation() {
    for (name, layer) in [
        ("qwen3_moe_bf16", 0),
        ("mixtral_bf16", 0),
        ("deepseek_v3_bf16", 1),
        ("gpt_oss_bf16", 0),
        ("deepseek_v3_fp8", 1),
        ("gpt_oss_mxfp4", 0),
    ] {
        let source = Checkpoint::open(fixture(name)).unwrap();
        for target in TARGETS {
            if source.moe_layer(layer).unwrap().stored_format() == Some(target.bank_format()) {
                // Packing keeps the codes; a conversion to the same format makes new ones.
                continue;
            }
            let folder = TempDir::new().unwrap();
            let out = folder.path().join("out");
            let bytes = AtomicU64::new(0);
            let report = convert(&source, target, &out, &Options::default(), |n| {
                bytes.fetch_add(n, Ordering::Relaxed);
            })
            .unwrap_or_else(|error| panic!("{name} to {}: {error}", target.name()));
            assert!(report.passed(), "{name} to {}: {report:?}", target.name());
            let error = report.layers[0].check.unwrap().max_error;
            assert!(
                error > 0.0 && error < 0.2,
                "{name} {}: {error}",
                target.name()
            );
            assert_eq!(bytes.into_inner(), report.source_bytes, "{name}");

            let want = bank(&source, layer, target, None);
            let got = match is_int8(target) {
                true => bank(&source, layer, target, Some(&out)),
                false => {
                    let result = Checkpoint::open(&out).unwrap();
                    let format = result.moe_layer(layer).unwrap().stored_format();
                    assert_eq!(format, Some(target.bank_format()), "{name}");
                    bank(&result, layer, target, None)
                }
            };
            assert!(got == want, "{name} to {}: other bytes", target.name());
        }
    }
}

/// The names, types and shapes of the int8 layout.
#[test]
fn int8_layout() {
    let source = Checkpoint::open(fixture("qwen3_moe_bf16")).unwrap();
    let folder = TempDir::new().unwrap();
    convert(
        &source,
        Target::Int8,
        folder.path(),
        &Options::default(),
        |_| {},
    )
    .unwrap();
    let file = TensorFile::open(folder.path().join("layer_0.safetensors")).unwrap();
    for (name, dtype, shape) in [
        ("gate_int8", Dtype::I8, vec![8, 96, 128]),
        ("up_int8", Dtype::I8, vec![8, 96, 128]),
        ("down_int8", Dtype::I8, vec![8, 128, 96]),
        ("gate_scales", Dtype::F32, vec![8, 96]),
        ("up_scales", Dtype::F32, vec![8, 96]),
        ("down_scales", Dtype::F32, vec![8, 128]),
    ] {
        let info = file.info(name).unwrap();
        assert_eq!((info.dtype, &info.shape), (dtype, &shape), "{name}");
    }
    assert_eq!(file.tensors().len(), 6);
    let text = std::fs::read_to_string(folder.path().join("asym_int8_manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(manifest["format_version"], 1);
    assert_eq!(manifest["converted_layers"], serde_json::json!([0]));
    assert_eq!(manifest["source_type"], "bf16");
    assert!(folder.path().join("config.json").exists());
}

/// A model of `layers` layers with values of many sizes.
fn model(layers: usize, hidden: usize, intermediate: usize, experts: usize) -> TempDir {
    let folder = TempDir::new().unwrap();
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": intermediate,
        "num_experts": experts, "num_experts_per_tok": 1, "num_hidden_layers": layers,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut state = 7u32;
    let mut values = |count: usize| {
        let mut bytes = Vec::with_capacity(2 * count);
        for _ in 0..count {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Exponents 2^-8 to 2^-1.
            let code = (state >> 16) as u16 & 0x83ff | 0x3c00;
            bytes.extend(code.to_le_bytes());
        }
        Cow::Owned(bytes)
    };
    let mut tensors = Vec::new();
    for layer in 0..layers {
        let mut add = |name: String, rows: usize, columns: usize| {
            tensors.push(TensorData {
                name: format!("model.layers.{layer}.mlp.{name}.weight"),
                dtype: Dtype::BF16,
                shape: vec![rows, columns],
                bytes: values(rows * columns),
            });
        };
        add("gate".into(), experts, hidden);
        for e in 0..experts {
            add(format!("experts.{e}.gate_proj"), intermediate, hidden);
            add(format!("experts.{e}.up_proj"), intermediate, hidden);
            add(format!("experts.{e}.down_proj"), hidden, intermediate);
        }
    }
    write(folder.path().join("model.safetensors"), &tensors).unwrap();
    folder
}

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}

/// Killed again and again at different moments, a conversion still ends with the files of one that
/// ran through.
#[test]
fn killed_conversions_resume() {
    let source = model(6, 192, 128, 8);
    let checkpoint = Checkpoint::open(source.path()).unwrap();
    for (name, target) in [("int8", Target::Int8), ("nvfp4", Target::Nvfp4)] {
        let folder = TempDir::new().unwrap();
        let whole = folder.path().join("whole");
        convert(&checkpoint, target, &whole, &Options::default(), |_| {}).unwrap();
        let out = folder.path().join("out");
        let command = || {
            let mut command = Command::new(program());
            command.args([
                "convert",
                "--to",
                name,
                "--resume",
                "--threads",
                "1",
                "--model",
            ]);
            command.arg(source.path()).arg("--out").arg(&out);
            command.stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        let mut kills = 0;
        for attempt in 0..12u64 {
            let mut child = command().spawn().unwrap();
            std::thread::sleep(Duration::from_millis(3 + attempt * 17 % 120));
            kills += u32::from(child.try_wait().unwrap().is_none());
            child.kill().unwrap();
            child.wait().unwrap();
            // What bears a name is whole, at any moment.
            if !out.exists() {
                continue;
            }
            for (name, bytes) in &files(&out) {
                if name.ends_with(".safetensors") && !name.starts_with('.') {
                    TensorFile::open(out.join(name)).unwrap();
                    let same = files(&whole).iter().any(|f| f.0 == *name && f.1 == *bytes);
                    assert!(same, "{name} differs after a kill");
                }
            }
        }
        println!("{name}: killed {kills} of 12 times");
        let output = command().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let (got, want) = (files(&out), files(&whole));
        let names =
            |files: &[(String, Vec<u8>)]| files.iter().map(|f| f.0.clone()).collect::<Vec<_>>();
        assert_eq!(names(&got), names(&want));
        for (got, want) in got.iter().zip(&want) {
            assert!(got.1 == want.1, "{} differs", got.0);
        }
    }
}

#[test]
fn layers_are_kept_and_added() {
    let source = model(4, 64, 64, 2);
    let checkpoint = Checkpoint::open(source.path()).unwrap();
    let out = TempDir::new().unwrap();
    let options = |layers, resume| Options { layers, resume };
    let run = |layers, resume| {
        convert(
            &checkpoint,
            Target::Int8,
            out.path(),
            &options(layers, resume),
            |_| {},
        )
    };
    run(Some(1..3), false).unwrap();
    let kept = std::fs::metadata(out.path().join("layer_1.safetensors")).unwrap();
    let report = run(None, true).unwrap();
    let done: Vec<_> = report
        .layers
        .iter()
        .map(|layer| layer.check.is_none())
        .collect();
    assert_eq!(done, [false, true, true, false]);
    let now = std::fs::metadata(out.path().join("layer_1.safetensors")).unwrap();
    assert_eq!(kept.modified().unwrap(), now.modified().unwrap());

    // A file that was cut is named; one that is gone is made again.
    let path = out.path().join("layer_2.safetensors");
    std::fs::remove_file(&path).unwrap();
    run(None, true).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = run(None, true).unwrap_err().to_string();
    assert!(
        error.contains("layer_2.safetensors") && error.contains("truncated"),
        "{error}"
    );
}

#[test]
fn folders_that_cannot_be_used() {
    let source = model(1, 64, 64, 2);
    let checkpoint = Checkpoint::open(source.path()).unwrap();
    let run = |target, out: &Path, resume| {
        let options = Options {
            layers: None,
            resume,
        };
        convert(&checkpoint, target, out, &options, |_| {}).unwrap_err()
    };
    let in_place = run(Target::Int8, source.path(), false);
    assert!(
        matches!(in_place, ConvertError::InPlace { .. }),
        "{in_place}"
    );

    let out = TempDir::new().unwrap();
    std::fs::write(out.path().join("letter.txt"), "dear").unwrap();
    let foreign = run(Target::Fp8, out.path(), true);
    assert!(foreign.to_string().contains("letter.txt"), "{foreign}");
    assert!(out.path().join("letter.txt").exists());

    let out = TempDir::new().unwrap();
    convert(
        &checkpoint,
        Target::Int8,
        out.path(),
        &Options::default(),
        |_| {},
    )
    .unwrap();
    let exists = run(Target::Int8, out.path(), false);
    assert!(exists.to_string().contains("--resume"), "{exists}");
    let other = run(Target::Int8Block, out.path(), true);
    assert!(
        matches!(other, ConvertError::Different { what: "target", .. }),
        "{other}"
    );
    std::fs::write(out.path().join("asym_int8_manifest.json"), "{").unwrap();
    let torn = run(Target::Int8, out.path(), true);
    assert!(torn.to_string().contains("delete it"), "{torn}");

    let range = Options {
        layers: Some(0..2),
        resume: false,
    };
    let out = TempDir::new().unwrap();
    let error = convert(&checkpoint, Target::Int8, out.path(), &range, |_| {}).unwrap_err();
    let beyond = matches!(
        error,
        ConvertError::Checkpoint(CheckpointError::LayerRange { layer: 1, .. })
    );
    assert!(beyond, "{error}");
}

/// NaN in the source is counted, with its expert, and the program says so by its status.
#[test]
fn nan_is_counted() {
    let source = model(1, 64, 64, 3);
    let path = source.path().join("model.safetensors");
    let file = TensorFile::open(&path).unwrap();
    let name = "model.layers.0.mlp.experts.2.up_proj.weight";
    let at = file.info(name).unwrap().offset as usize + 2 * 77;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(source.path()).unwrap();
    for target in TARGETS {
        let out = TempDir::new().unwrap();
        let report = convert(&checkpoint, target, out.path(), &Options::default(), |_| {}).unwrap();
        assert!(!report.passed(), "{}", target.name());
        let layer = &report.layers[0];
        assert_eq!(layer.first_bad_expert, Some(2));
        assert_eq!(layer.check.unwrap().source_nan, 1);
        assert!(layer.check.unwrap().nan > 0, "a NaN became a number");
    }
    let out = TempDir::new().unwrap();
    let mut command = Command::new(program());
    command.args(["convert", "--to", "fp8", "--model"]);
    command.arg(source.path()).arg("--out").arg(out.path());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("FAIL"));
}

#[test]
fn inspect_tells_formats_and_sizes() {
    let output = Command::new(program())
        .args(["inspect", "--json", "--model"])
        .arg(fixture("qwen3_moe_nvfp4_modelopt"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["model_type"], "qwen3_moe");
    assert_eq!(report["stored"][0]["formats"], serde_json::json!(["nvfp4"]));
    let bytes = |i: usize| report["banks"][i]["expert_bytes"].as_f64().unwrap();
    assert_eq!(report["banks"][4]["format"], "nvfp4");
    assert!((bytes(4) / bytes(0) - 0.2825).abs() < 0.01);
}
