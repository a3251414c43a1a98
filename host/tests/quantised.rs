//! Quantised experts in each published spelling against their definitions, and what is refused.

use asym_gemm::checkpoint::{
    Checkpoint, CheckpointError, Dtype, FileError, MoeLayer, TensorData, write,
};
use asym_gemm::formats::WeightFormat;
use asym_gemm_formats::bank::Projection::{self, Down, Gate, Up};
use std::borrow::Cow;
use tempfile::TempDir;

const E: usize = 2;
const I: usize = 160;
const H: usize = 64;
const PROJECTIONS: [(Projection, &str, usize, usize); 3] = [
    (Gate, "gate_proj", I, H),
    (Up, "up_proj", I, H),
    (Down, "down_proj", H, I),
];

/// Bytes that differ from place to place and from seed to seed.
fn bytes(seed: usize, len: usize, mask: u8) -> Vec<u8> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8 & mask
    };
    (0..len).map(|_| next()).collect()
}

fn raw(name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> TensorData<'static> {
    TensorData {
        name,
        dtype,
        shape: shape.to_vec(),
        bytes: Cow::Owned(bytes),
    }
}

fn floats(name: String, shape: &[usize], values: &[f32]) -> TensorData<'static> {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    raw(name, Dtype::F32, shape, bytes)
}

/// e2m1 by its list.
fn e2m1(nibble: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
    if nibble & 8 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// A float of 8 bits by its fields; no NaN.
fn float8(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// A model of one layer whose experts are made matrix by matrix.
struct Model {
    folder: TempDir,
    tensors: Vec<TensorData<'static>>,
    quantization: String,
}

impl Model {
    fn new(
        mut matrix: impl FnMut(usize, usize, String, usize, usize) -> Vec<TensorData<'static>>,
    ) -> Self {
        let router = vec![0.5; E * H];
        let mut tensors = vec![floats(
            "model.layers.0.mlp.gate.weight".into(),
            &[E, H],
            &router,
        )];
        for e in 0..E {
            for (p, (_, name, rows, columns)) in PROJECTIONS.into_iter().enumerate() {
                let module = format!("model.layers.0.mlp.experts.{e}.{name}");
                tensors.extend(matrix(e, p, module, rows, columns));
            }
        }
        Self {
            folder: TempDir::new().unwrap(),
            tensors,
            quantization: r#"{"quant_method": "compressed-tensors"}"#.into(),
        }
    }

    fn open(&self) -> Checkpoint {
        let config = format!(
            r#"{{"model_type": "qwen3_moe", "hidden_size": {H}, "moe_intermediate_size": {I},
                "num_experts": {E}, "num_experts_per_tok": 1, "num_hidden_layers": 1,
                "quantization_config": {}}}"#,
            self.quantization
        );
        let folder = self.folder.path();
        std::fs::write(folder.join("config.json"), config).unwrap();
        write(folder.join("model.safetensors"), &self.tensors).unwrap();
        Checkpoint::open(folder).unwrap()
    }

    fn layer(&self) -> MoeLayer {
        self.open().moe_layer(0).unwrap()
    }

    fn error(&self) -> CheckpointError {
        self.open().moe_layer(0).unwrap_err()
    }

    fn tensor(&mut self, end: &str) -> &mut TensorData<'static> {
        let mut named = self.tensors.iter_mut().filter(|t| t.name.ends_with(end));
        named.next().unwrap()
    }
}

/// Every element of the layer is `want(expert, projection, row, column)`, to the last bit of f32.
fn check(layer: &MoeLayer, want: impl Fn(usize, usize, usize, usize) -> f64) {
    for e in 0..E {
        for (p, (projection, name, rows, columns)) in PROJECTIONS.into_iter().enumerate() {
            let mut row = vec![f32::NAN; columns];
            for r in 0..rows {
                layer.expert_row(e, projection, r, &mut row);
                for (c, &got) in row.iter().enumerate() {
                    let want = want(e, p, r, c);
                    let off = (f64::from(got) - want).abs();
                    // Products with a scale are rounded, once each.
                    assert!(
                        off <= want.abs() * 2f64.powi(-23),
                        "expert {e} {name} {r}, {c}: {got} for {want}"
                    );
                }
            }
        }
    }
}

const GLOBALS: [f32; 3] = [1.0, 4.0, 0.1];

fn nvfp4(
    modelopt: bool,
    e: usize,
    p: usize,
    module: String,
    n: usize,
    k: usize,
) -> Vec<TensorData<'static>> {
    let seed = e * 3 + p;
    let codes = bytes(seed, n * k / 2, 0xff);
    let scales = bytes(seed + 100, n * k / 16, 0x77);
    let scales = raw(
        format!("{module}.weight_scale"),
        Dtype::F8_E4M3,
        &[n, k / 16],
        scales,
    );
    let input = |end: &str| floats(format!("{module}.{end}"), &[1], &[0.5]);
    match modelopt {
        true => vec![
            raw(format!("{module}.weight"), Dtype::U8, &[n, k / 2], codes),
            scales,
            floats(format!("{module}.weight_scale_2"), &[], &[GLOBALS[p]]),
            input("input_scale"),
        ],
        false => vec![
            raw(
                format!("{module}.weight_packed"),
                Dtype::U8,
                &[n, k / 2],
                codes,
            ),
            scales,
            floats(
                format!("{module}.weight_global_scale"),
                &[1],
                &[1.0 / GLOBALS[p]],
            ),
            input("input_global_scale"),
        ],
    }
}

/// Both spellings of the global scale, one of which is a reciprocal; gate's and up's differ.
#[test]
fn nvfp4_in_both_spellings() {
    for modelopt in [true, false] {
        let model = Model::new(|e, p, module, n, k| nvfp4(modelopt, e, p, module, n, k));
        let layer = model.layer();
        assert_eq!(layer.stored_format(), Some(WeightFormat::Nvfp4));
        // The values of a row are made once for all of it.
        let mut table = Vec::new();
        for e in 0..E {
            for (p, (_, _, n, k)) in PROJECTIONS.into_iter().enumerate() {
                let global = match modelopt {
                    true => GLOBALS[p],
                    false => 1.0 / (1.0 / GLOBALS[p]),
                };
                let codes = bytes(e * 3 + p, n * k / 2, 0xff);
                let scales = bytes(e * 3 + p + 100, n * k / 16, 0x77);
                let value = |i: usize| {
                    e2m1(codes[i / 2] >> (i % 2 * 4) & 15)
                        * float8(scales[i / 16], 3, 7)
                        * f64::from(global)
                };
                table.push((0..n * k).map(value).collect::<Vec<_>>());
            }
        }
        check(&layer, |e, p, r, c| {
            table[e * 3 + p][r * PROJECTIONS[p].3 + c]
        });
    }
}

/// A NaN scale is reported with its place; one of zero codes can be taken for zeros.
#[test]
fn nvfp4_scales_that_are_nan() {
    let mut model = Model::new(|e, p, module, n, k| nvfp4(true, e, p, module, n, k));
    let end = "experts.1.up_proj.weight_scale";
    model.tensor(end).bytes.to_mut()[7] = 0x7f;
    let text = model.error().to_string();
    for part in [end, "element 7", "NaN", "damaged"] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    let damaged = model.open().with_zero_nan_blocks().moe_layer(0);
    assert!(matches!(
        damaged,
        Err(CheckpointError::Scale { index: 7, .. })
    ));

    // Zeros of either sign.
    let codes = model.tensor("experts.1.up_proj.weight").bytes.to_mut();
    codes[7 * 8..8 * 8].copy_from_slice(&[0x80; 8]);
    let text = model.error().to_string();
    assert!(text.contains("--zero-nan-blocks"), "{text}");
    let layer = model.open().with_zero_nan_blocks().moe_layer(0).unwrap();
    let mut row = vec![f32::NAN; H];
    layer.expert_row(1, Up, 7 * 16 / H, &mut row);
    assert!(row[7 * 16 % H..][..16].iter().all(|&x| x == 0.0));
    assert!(row.iter().all(|x| x.is_finite()));
}

#[test]
fn nvfp4_global_scales_that_are_not_numbers() {
    for (modelopt, bad) in [(true, f32::NAN), (true, f32::INFINITY), (false, 0.0)] {
        let mut model = Model::new(|e, p, module, n, k| nvfp4(modelopt, e, p, module, n, k));
        let end = if modelopt {
            "weight_scale_2"
        } else {
            "weight_global_scale"
        };
        *model.tensor(end).bytes.to_mut() = bad.to_le_bytes().to_vec();
        let error = model.error();
        assert!(
            matches!(error, CheckpointError::Scale { index: 0, .. }),
            "{error}"
        );
        assert!(error.to_string().contains(end), "{error}");
    }
}

/// Packed pairs as U8 and the same bytes as F4 of logical shape.
#[test]
fn fp4_as_a_dtype_of_its_own() {
    let packed = Model::new(|e, p, module, n, k| nvfp4(true, e, p, module, n, k));
    let mut logical = Model::new(|e, p, module, n, k| nvfp4(true, e, p, module, n, k));
    for tensor in &mut logical.tensors {
        if tensor.dtype == Dtype::U8 {
            tensor.dtype = Dtype::F4;
            tensor.shape[1] *= 2;
        }
    }
    let (packed, logical) = (packed.layer(), logical.layer());
    let (mut a, mut b) = (vec![f32::NAN; H], vec![0.0; H]);
    for row in 0..I {
        packed.expert_row(1, Gate, row, &mut a);
        logical.expert_row(1, Gate, row, &mut b);
        assert_eq!(a, b);
    }
    // An odd number of them has no whole bytes; the file itself is refused.
    let header = r#"{"w":{"dtype":"F4","shape":[2,7],"data_offsets":[0,7]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0; 7]);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("odd.safetensors");
    std::fs::write(&path, file).unwrap();
    let error = asym_gemm::checkpoint::TensorFile::open(path).unwrap_err();
    assert!(matches!(error, FileError::Shape { .. }), "{error}");
}

fn mxfp4(e: usize, p: usize, module: String, n: usize, k: usize) -> Vec<TensorData<'static>> {
    let seed = e * 3 + p;
    let scales: Vec<u8> = (0..n * k / 32)
        .map(|i| ((i * 7 + seed) % 253) as u8)
        .collect();
    let codes = bytes(seed, n * k / 2, 0xff);
    vec![
        raw(
            format!("{module}.weight_packed"),
            Dtype::U8,
            &[n, k / 2],
            codes,
        ),
        raw(
            format!("{module}.weight_scale"),
            Dtype::U8,
            &[n, k / 32],
            scales,
        ),
    ]
}

/// Scales 0 to 252, subnormal ones included; 255 is refused.
#[test]
fn mxfp4_of_compressed_tensors() {
    let mut model = Model::new(mxfp4);
    let layer = model.layer();
    assert_eq!(layer.stored_format(), Some(WeightFormat::Mxfp4));
    let all: Vec<_> = (0..6)
        .map(|m| bytes(m, PROJECTIONS[m % 3].2 * PROJECTIONS[m % 3].3 / 2, 0xff))
        .collect();
    check(&layer, |e, p, r, c| {
        let i = r * PROJECTIONS[p].3 + c;
        let scale = (i / 32 * 7 + e * 3 + p) % 253;
        let code = all[e * 3 + p][i / 2] >> (i % 2 * 4) & 15;
        e2m1(code) * 2f64.powi(scale as i32 - 127)
    });
    model
        .tensor("experts.0.down_proj.weight_scale")
        .bytes
        .to_mut()[3] = 255;
    let error = model.error();
    assert!(
        matches!(error, CheckpointError::Scale { index: 3, .. }),
        "{error}"
    );
}

/// Eight codes a word, offset by 8, in groups of 32 columns.
#[test]
fn int4_in_groups() {
    let scale = |seed: usize, i: usize| ((i * 5 + seed) % 17) as f32 * 0.25 + 0.125;
    let make = |e: usize, p: usize, module: String, n: usize, k: usize| {
        let seed = e * 3 + p;
        let scales: Vec<u8> = (0..n * k / 32)
            .flat_map(|i| half::bf16::from_f32(scale(seed, i)).to_le_bytes())
            .collect();
        let words = bytes(seed, n * k / 2, 0xff);
        let shape = [n as i64, k as i64].map(i64::to_le_bytes).concat();
        vec![
            raw(
                format!("{module}.weight_packed"),
                Dtype::I32,
                &[n, k / 8],
                words,
            ),
            raw(
                format!("{module}.weight_scale"),
                Dtype::BF16,
                &[n, k / 32],
                scales,
            ),
            raw(format!("{module}.weight_shape"), Dtype::I64, &[2], shape),
        ]
    };
    let mut model = Model::new(make);
    let layer = model.layer();
    assert_eq!(layer.stored_format(), None);
    assert_eq!(layer.stored_names(), ["int4, groups of 32"]);
    let all: Vec<_> = (0..6)
        .map(|m| bytes(m, PROJECTIONS[m % 3].2 * PROJECTIONS[m % 3].3 / 2, 0xff))
        .collect();
    check(&layer, |e, p, r, c| {
        let i = r * PROJECTIONS[p].3 + c;
        let code = f64::from(all[e * 3 + p][i / 2] >> (i % 2 * 4) & 15) - 8.0;
        code * f64::from(scale(e * 3 + p, i / 32))
    });
    let shape = [I as i64, 2 * H as i64].map(i64::to_le_bytes).concat();
    *model.tensor("gate_proj.weight_shape").bytes.to_mut() = shape;
    let error = model.error();
    let wrong = matches!(
        &error,
        CheckpointError::PackedShape {
            expected: [I, H],
            ..
        }
    );
    assert!(wrong, "{error}");
}

/// What a scale of fp8 covers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cover {
    Blocks,
    PowerBlocks,
    Rows,
    Matrix,
}

fn fp8(
    cover: Cover,
    dtype: Dtype,
    e: usize,
    p: usize,
    module: String,
    n: usize,
    k: usize,
) -> Vec<TensorData<'static>> {
    let mask = if dtype == Dtype::F8_E5M2 { 0xfb } else { 0xf7 };
    let codes = raw(
        format!("{module}.weight"),
        dtype,
        &[n, k],
        bytes(e * 3 + p, n * k, mask),
    );
    let grid = [n.div_ceil(128), k.div_ceil(128)];
    let values = |count: usize| (0..count).map(fp8_scale).collect::<Vec<_>>();
    let scales = match cover {
        Cover::Blocks => floats(
            format!("{module}.weight_scale_inv"),
            &grid,
            &values(grid[0] * grid[1]),
        ),
        Cover::PowerBlocks => raw(
            format!("{module}.weight_scale_inv"),
            Dtype::F8_E8M0,
            &grid,
            (0..grid[0] * grid[1]).map(|i| 120 + i as u8).collect(),
        ),
        Cover::Rows => floats(format!("{module}.weight_scale"), &[n, 1], &values(n)),
        Cover::Matrix => floats(format!("{module}.weight_scale"), &[], &values(1)),
    };
    vec![codes, scales]
}

fn fp8_scale(i: usize) -> f32 {
    (i % 11) as f32 * 0.3 + 0.3
}

/// Blocks (the last ones partial), rows and whole matrices; e4m3 and e5m2; scales in f32 or as
/// powers of two.
#[test]
fn fp8_scales_of_every_kind() {
    for cover in [
        Cover::Blocks,
        Cover::PowerBlocks,
        Cover::Rows,
        Cover::Matrix,
    ] {
        for dtype in [Dtype::F8_E4M3, Dtype::F8_E5M2] {
            let model = Model::new(|e, p, module, n, k| fp8(cover, dtype, e, p, module, n, k));
            let layer = model.layer();
            let exact =
                dtype == Dtype::F8_E4M3 && matches!(cover, Cover::Blocks | Cover::PowerBlocks);
            let format = exact.then_some(WeightFormat::Fp8Block128);
            assert_eq!(layer.stored_format(), format, "{cover:?} {dtype:?}");
            let mask = if dtype == Dtype::F8_E5M2 { 0xfb } else { 0xf7 };
            let all: Vec<_> = (0..6)
                .map(|m| bytes(m, PROJECTIONS[m % 3].2 * PROJECTIONS[m % 3].3, mask))
                .collect();
            check(&layer, |e, p, r, c| {
                let k = PROJECTIONS[p].3;
                let code = all[e * 3 + p][r * k + c];
                let value = match dtype {
                    Dtype::F8_E5M2 => float8(code, 2, 15),
                    _ => float8(code, 3, 7),
                };
                let block = r / 128 * k.div_ceil(128) + c / 128;
                value
                    * match cover {
                        Cover::Blocks => f64::from(fp8_scale(block)),
                        Cover::PowerBlocks => 2f64.powi(block as i32 - 7),
                        Cover::Rows => f64::from(fp8_scale(r)),
                        Cover::Matrix => f64::from(fp8_scale(0)),
                    }
            });
        }
    }
}

#[test]
fn fp8_scales_that_are_missing_or_wrong() {
    let make =
        || Model::new(|e, p, module, n, k| fp8(Cover::Blocks, Dtype::F8_E4M3, e, p, module, n, k));
    let end = "experts.1.down_proj.weight_scale_inv";
    let mut model = make();
    model.tensors.retain(|tensor| !tensor.name.ends_with(end));
    let text = model.error().to_string();
    assert!(text.contains("experts.1.down_proj.weight_scale"), "{text}");

    let mut model = make();
    model.tensor(end).bytes.to_mut()[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let error = model.error();
    assert!(
        matches!(error, CheckpointError::Scale { index: 1, .. }),
        "{error}"
    );

    let mut model = make();
    *model.tensor(end) = floats(format!("model.layers.0.mlp.{end}"), &[1, 1], &[1.0]);
    let error = model.error();
    assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");

    let mut model = make();
    let shape = model.tensor(end).shape.clone();
    *model.tensor(end) = raw(
        format!("model.layers.0.mlp.{end}"),
        Dtype::I16,
        &shape,
        vec![0; 4],
    );
    let error = model.error();
    assert!(error.to_string().contains("I16"), "{error}");
}

/// Each matrix says itself what it is.
#[test]
fn formats_may_differ_inside_an_expert() {
    let model = Model::new(|e, p, module, n, k| match p {
        0 => fp8(Cover::Blocks, Dtype::F8_E4M3, e, p, module, n, k),
        1 => nvfp4(false, e, p, module, n, k),
        _ => {
            let values: Vec<f32> = (0..n * k).map(|i| i as f32).collect();
            vec![floats(format!("{module}.weight"), &[n, k], &values)]
        }
    });
    let layer = model.layer();
    assert_eq!(layer.stored_format(), None);
    assert_eq!(
        layer.stored_names(),
        ["f32", "fp8 e4m3, a scale for 128 x 128", "nvfp4"]
    );
    let mut row = vec![f32::NAN; I];
    layer.expert_row(1, Down, 5, &mut row);
    assert_eq!(row[7], (5 * I + 7) as f32);
    let mut row = vec![f32::NAN; H];
    layer.expert_row(1, Gate, 130, &mut row);
    let code = bytes(3, I * H, 0xf7)[130 * H + 9];
    assert_eq!(row[9], float8(code, 3, 7) as f32 * fp8_scale(1));
}

/// A block size that config.json names.
#[test]
fn fp8_blocks_of_another_size() {
    let mut model = Model::new(|e, p, module, n, k| {
        let grid = [n.div_ceil(32), k.div_ceil(64)];
        let values: Vec<_> = (0..grid[0] * grid[1]).map(fp8_scale).collect();
        vec![
            raw(
                format!("{module}.weight"),
                Dtype::F8_E4M3,
                &[n, k],
                bytes(e * 3 + p, n * k, 0xf7),
            ),
            floats(format!("{module}.weight_scale_inv"), &grid, &values),
        ]
    });
    let size = |text: &str| format!(r#"{{"quant_method": "fp8", "weight_block_size": {text}}}"#);
    model.quantization = size("[32, 64]");
    let layer = model.layer();
    assert_eq!(layer.stored_format(), None);
    let mut row = vec![f32::NAN; I];
    layer.expert_row(0, Down, 33, &mut row);
    let code = bytes(2, H * I, 0xf7)[33 * I + 100];
    let want = float8(code, 3, 7) as f32 * fp8_scale(3 + 1);
    assert_eq!(row[100], want);
    for wrong in ["[0, 64]", "[32]", "128", "[32, \"a\"]"] {
        model.quantization = size(wrong);
        let config = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.open()));
        assert!(config.is_err(), "{wrong} was accepted");
    }
}

#[test]
fn unknown_methods_are_refused_by_name() {
    let mut model = Model::new(|e, p, module, n, k| nvfp4(true, e, p, module, n, k));
    for method in ["awq", "gptq", "bitsandbytes"] {
        model.quantization = format!(r#"{{"quant_method": "{method}"}}"#);
        let error = model.error();
        assert!(
            matches!(error, CheckpointError::Quantised { .. }),
            "{error}"
        );
        assert!(error.to_string().contains(method), "{error}");
    }
}
