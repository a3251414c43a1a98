//! What the fuzz targets do with a string of bytes. `cargo test` runs the same functions over a
//! seeded corpus (host/tests/fuzzed.rs).

use asym_gemm::checkpoint::{Checkpoint, ModelConfig, TensorFile};
use asym_gemm_formats::{bf16, e2m1, e4m3, e5m2, e8m0, fp8, int4, int8, mxfp4, nvfp4};
use std::path::Path;
use tempfile::TempDir;

/// A small model, whose description does not vary.
pub(crate) const CONFIG: &str = r#"{"model_type": "qwen3_moe", "hidden_size": 32,
    "moe_intermediate_size": 32, "num_experts": 1, "num_experts_per_tok": 1,
    "num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8"}}"#;

/// More than a test of a moment should read.
const MAX_BYTES: usize = 1 << 24;

fn folder() -> TempDir {
    // In memory where there is such a folder.
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => TempDir::new_in(memory),
        false => TempDir::new(),
    };
    made.expect("a temporary folder")
}

/// A safetensors file: opened, and every tensor read, or refused.
pub(crate) fn header(data: &[u8]) {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    std::fs::write(&path, data).expect("room for the file");
    let Ok(file) = TensorFile::open(&path) else {
        return;
    };
    let mut total = 0;
    for (name, info) in file.tensors() {
        total += info.bytes;
        assert!(info.offset as usize + info.bytes <= data.len());
        let bytes = file.read_bytes(name).expect("the header was checked");
        assert_eq!(bytes.len(), info.bytes);
        let _ = file
            .read_f32(name)
            .map(|v| assert_eq!(v.len(), info.elements()));
        let _ = file.read_i32(name);
    }
    assert!(total <= data.len());
}

/// An index beside a good shard.
pub(crate) fn index(data: &[u8]) {
    let folder = folder();
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("room for the file");
    };
    write("config.json", CONFIG.as_bytes());
    let shard = shard(&[("a", "F32", &[1], &[0; 4]), ("b", "U8", &[2], &[1, 2])]);
    write("one.safetensors", &shard);
    write("model.safetensors.index.json", data);
    if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
        assert!(checkpoint.tensors().count() <= 2);
        assert!(checkpoint.moe_layer(0).is_err());
    }
}

/// A config.json.
pub(crate) fn config(data: &[u8]) {
    let Ok(config) = ModelConfig::parse(data) else {
        return;
    };
    assert!(config.top_k <= config.experts && config.hidden > 0);
    assert!(config.weight_block.iter().all(|&n| n > 0));
    let dense = (0..config.layers).filter(|&l| config.dense_reason(l).is_some());
    assert_eq!(dense.count() + config.moe_layers().count(), config.layers);
}

/// The file of a whole model.
pub(crate) fn layer(data: &[u8]) {
    if data.len() > MAX_BYTES {
        return;
    }
    let folder = folder();
    std::fs::write(folder.path().join("config.json"), CONFIG).expect("room for the file");
    std::fs::write(folder.path().join("model.safetensors"), data).expect("room for the file");
    let Ok(checkpoint) = Checkpoint::open(folder.path()) else {
        return;
    };
    let Ok(layer) = checkpoint.with_zero_nan_blocks().moe_layer(0) else {
        return;
    };
    let mut row = [f32::NAN; 32];
    for projection in [
        asym_gemm_formats::bank::Projection::Gate,
        asym_gemm_formats::bank::Projection::Up,
        asym_gemm_formats::bank::Projection::Down,
    ] {
        for r in 0..32 {
            layer.expert_row(0, projection, r, &mut row);
        }
    }
}

/// Any bytes as values and as codes of every format.
pub(crate) fn decoders(data: &[u8]) {
    for &code in data {
        let x = e4m3::decode(code);
        assert!(x.is_nan() || e4m3::encode(x) == code);
        assert_eq!(e2m1::encode(e2m1::decode(code)), code & 15);
        assert!(code == e8m0::NAN || e8m0::encode_up(e8m0::decode(code)) == code);
        let wide = e5m2::decode(code);
        assert!(wide.is_nan() || bf16::round(wide) == wide);
    }
    let (words, _) = data.as_chunks::<4>();
    let row: Vec<f32> = words.iter().map(|&w| f32::from_le_bytes(w)).collect();
    if row.is_empty() {
        return;
    }
    let k = row.len();
    // amax / 127 * 127 and the like may be rounded up beyond the largest number.
    let finite = row.iter().all(|x| x.abs() <= 3.39e38);
    let check = |what: &str, back: &[f32]| {
        if finite {
            let lost = back.iter().position(|x| !x.is_finite());
            assert_eq!(lost, None, "{what} made no number of a number");
        }
        for (x, y) in row.iter().zip(back) {
            assert!(x.is_finite() || !y.is_finite(), "{what} made {y} of {x}");
        }
    };
    let mut codes = vec![0u8; k];
    let mut packed = vec![0u8; k.div_ceil(2)];
    let mut back = vec![0f32; k];

    let finite_values = row.iter().filter(|x| x.is_finite());
    let amax = finite_values.fold(0f32, |m, x| m.max(x.abs()));
    let global = nvfp4::global_scale(amax);
    let mut scales = vec![0u8; k.div_ceil(nvfp4::BLOCK)];
    nvfp4::quantise_row(&row, global, &mut codes, &mut scales);
    e2m1::pack(&codes, &mut packed);
    nvfp4::dequantise_row(&packed, &scales, global, &mut back);
    check("nvfp4", &back);

    let mut scales = vec![0u8; k.div_ceil(mxfp4::BLOCK)];
    mxfp4::quantise_row(&row, &mut codes, &mut scales);
    e2m1::pack(&codes, &mut packed);
    mxfp4::dequantise_row(&packed, &scales, &mut back);
    check("mxfp4", &back);

    let mut scales = vec![0f32; k.div_ceil(fp8::BLOCK)];
    fp8::quantise_band(&row, k, &mut codes, &mut scales);
    for (i, back) in back.iter_mut().enumerate() {
        *back = e4m3::decode(codes[i]) * scales[i / fp8::BLOCK];
    }
    check("fp8", &back);

    let mut codes = vec![0i8; k];
    let scale = int8::quantise_per_row(&row, &mut codes);
    for (back, &code) in back.iter_mut().zip(&codes) {
        *back = f32::from(code) * scale;
    }
    check("int8", &back);

    int4::dequantise(data, &row, data.len().max(1), 0, &mut back);
}

/// A safetensors file of (name, dtype, shape, bytes).
pub(crate) fn shard(tensors: &[(&str, &str, &[usize], &[u8])]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut all = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let start = all.len();
        all.extend_from_slice(bytes);
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{}]}}"#,
            all.len()
        ));
    }
    let json = format!("{{{}}}", entries.join(","));
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    file.extend(all);
    file
}
