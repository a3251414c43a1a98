//! One layer written in every spelling of experts gives the same rows; a layer that is not
//! wholly understood is refused with the names.

use asym_gemm::checkpoint::{
    Checkpoint, CheckpointError, Dtype, FileError, FusedLayout, MoeLayer, TensorData, write,
};
use asym_gemm_formats::bank::Projection::{self, Down, Gate, Up};
use tempfile::TempDir;

const E: usize = 3;
/// H = 2 I: the shapes of a fused bank and of its transpose are equal.
const I: usize = 5;
const H: usize = 10;

/// Distinct for every element of every matrix, shared expert (number E) included.
fn weight(expert: usize, projection: Projection, row: usize, k: usize) -> f32 {
    let matrix = expert * 3 + projection as usize;
    (matrix * I * H + row * columns(projection) + k) as f32 - 200.0
}

fn bias(expert: usize, projection: Projection, row: usize) -> f32 {
    2000.0 + ((expert * 3 + projection as usize) * H + row) as f32
}

fn rows(projection: Projection) -> usize {
    if projection == Down { H } else { I }
}

fn columns(projection: Projection) -> usize {
    if projection == Down { I } else { H }
}

/// A tensor of f32 values by a function of its indices.
struct Named {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn named(name: impl Into<String>, shape: &[usize], value: impl Fn(&[usize]) -> f32) -> Named {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|mut flat| {
        let mut index = vec![0; shape.len()];
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            (*i, flat) = (flat % n, flat / n);
        }
        value(&index)
    });
    Named {
        name: name.into(),
        shape: shape.to_vec(),
        values: values.collect(),
    }
}

fn matrix(name: String, expert: usize, projection: Projection) -> Named {
    named(name, &[rows(projection), columns(projection)], |i| {
        weight(expert, projection, i[0], i[1])
    })
}

fn router(name: &str) -> Named {
    named(name, &[E, H], |i| (i[0] * H + i[1]) as f32 / 64.0)
}

fn per_expert(names: [&str; 3]) -> Vec<Named> {
    let mut tensors = vec![router("gate.weight")];
    for e in 0..E {
        for (name, projection) in names.into_iter().zip([Gate, Up, Down]) {
            tensors.push(matrix(format!("experts.{e}.{name}.weight"), e, projection));
        }
    }
    tensors
}

const PROJ: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Gate and up by output number, in either order.
fn gate_up(interleaved: bool, output: usize) -> (Projection, usize) {
    let (up, row) = if interleaved {
        (output % 2, output / 2)
    } else {
        (output / I, output % I)
    };
    (if up == 1 { Up } else { Gate }, row)
}

fn fused(layout: FusedLayout, suffix: &str) -> Vec<Named> {
    let FusedLayout {
        transposed,
        interleaved,
    } = layout;
    let bank = |name: &str, outputs, inputs, value: &dyn Fn(usize, usize, usize) -> f32| {
        let shape = if transposed {
            [E, inputs, outputs]
        } else {
            [E, outputs, inputs]
        };
        named(
            format!("experts.{name}{suffix}"),
            &shape,
            |i| match transposed {
                true => value(i[0], i[2], i[1]),
                false => value(i[0], i[1], i[2]),
            },
        )
    };
    let both = bank("gate_up_proj", 2 * I, H, &|e, output, k| {
        let (projection, row) = gate_up(interleaved, output);
        weight(e, projection, row, k)
    });
    let down = bank("down_proj", H, I, &|e, row, k| weight(e, Down, row, k));
    vec![router("gate.weight"), both, down]
}

fn stacked(module: &str, suffix: &str) -> Vec<Named> {
    let mut tensors = vec![router("gate.weight")];
    for (name, projection) in PROJ.into_iter().zip([Gate, Up, Down]) {
        let shape = [E, rows(projection), columns(projection)];
        tensors.push(named(format!("{module}.{name}{suffix}"), &shape, |i| {
            weight(i[0], projection, i[1], i[2])
        }));
    }
    tensors
}

struct Model {
    folder: TempDir,
}

impl Model {
    fn new(model_type: &str, config: &str, prefix: &str, tensors: &[Named]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let json = format!(
            r#"{{"model_type": "{model_type}", "hidden_size": {H}, "moe_intermediate_size": {I},
                "intermediate_size": {I}, "num_experts_per_tok": 2, "num_hidden_layers": 4{config}}}"#
        );
        std::fs::write(folder.path().join("config.json"), json).unwrap();
        let tensors: Vec<_> = tensors
            .iter()
            .map(|t| TensorData::f32(format!("{prefix}{}", t.name), &t.shape, &t.values))
            .collect();
        write(folder.path().join("model.safetensors"), &tensors).unwrap();
        Self { folder }
    }

    fn open(&self) -> Checkpoint {
        Checkpoint::open(self.folder.path()).unwrap()
    }

    fn layer(&self) -> Result<MoeLayer, CheckpointError> {
        self.open().moe_layer(2)
    }
}

const EXPERTS: &str = r#", "num_experts": 3"#;
const PREFIX: &str = "model.layers.2.mlp.";

fn qwen(tensors: &[Named]) -> Model {
    Model::new("qwen3_moe", EXPERTS, PREFIX, tensors)
}

fn check_rows(layer: &MoeLayer) {
    for e in 0..E {
        for projection in [Gate, Up, Down] {
            for row in 0..rows(projection) {
                let mut got = vec![f32::NAN; columns(projection)];
                layer.expert_row(e, projection, row, &mut got);
                let want: Vec<f32> = (0..columns(projection))
                    .map(|k| weight(e, projection, row, k))
                    .collect();
                assert_eq!(got, want, "expert {e} {projection:?} row {row}");
            }
        }
    }
}

fn check_bias(layer: &MoeLayer) {
    for e in 0..E {
        for projection in [Gate, Up, Down] {
            let want: Vec<f32> = (0..rows(projection))
                .map(|r| bias(e, projection, r))
                .collect();
            assert_eq!(layer.expert_bias(e, projection), Some(&want[..]));
        }
    }
}

const CONCATENATED: FusedLayout = FusedLayout {
    transposed: false,
    interleaved: false,
};
const GPT_OSS: FusedLayout = FusedLayout {
    transposed: true,
    interleaved: true,
};

#[test]
fn spellings_give_the_same_rows() {
    let mixtral = r#", "num_local_experts": 3"#;
    let w = || per_expert(["w1", "w3", "w2"]);
    let models = [
        qwen(&per_expert(PROJ)),
        qwen(&fused(CONCATENATED, "")),
        qwen(&fused(CONCATENATED, ".weight")),
        qwen(&stacked("experts", "")),
        qwen(&stacked("experts", ".weight")),
        qwen(&stacked("switch_mlp", ".weight")),
        Model::new("mixtral", mixtral, "model.layers.2.block_sparse_moe.", &w()),
        Model::new(
            "mixtral",
            mixtral,
            "model.layers.2.mlp.",
            &fused(CONCATENATED, ""),
        ),
        Model::new("olmoe", EXPERTS, "layers.2.mlp.", &per_expert(PROJ)),
    ];
    for model in &models {
        let layer = model.layer().unwrap();
        check_rows(&layer);
        assert_eq!(layer.expert_bias(0, Gate), None);
        assert_eq!(layer.weight_bytes(), E * 3 * I * H * 4);
        assert_eq!(layer.router.weight(), router("gate.weight").values);
    }
}

/// With H = 2 I each of the four orders has the shapes of the others: it is told.
#[test]
fn layout_of_fused_banks_is_a_parameter() {
    for transposed in [false, true] {
        for interleaved in [false, true] {
            let layout = FusedLayout {
                transposed,
                interleaved,
            };
            let model = qwen(&fused(layout, ""));
            if transposed {
                // Down is [E, I, H] then, which is not the shape that the family has.
                assert!(matches!(model.layer(), Err(CheckpointError::Shape { .. })));
            }
            check_rows(&model.open().with_fused_layout(layout).moe_layer(2).unwrap());
            let wrong = FusedLayout {
                interleaved: !interleaved,
                ..layout
            };
            let layer = model.open().with_fused_layout(wrong).moe_layer(2).unwrap();
            let mut row = [0.0; H];
            layer.expert_row(0, Up, 0, &mut row);
            assert_ne!(row[0], weight(0, Up, 0, 0));
        }
    }
}

#[test]
fn biases() {
    let config = r#", "num_local_experts": 3"#;
    let router_bias = || named("router.bias", &[E], |i| i[0] as f32);
    let with_router = |mut tensors: Vec<Named>| {
        tensors[0].name = "router.weight".into();
        tensors.push(router_bias());
        tensors
    };

    let mut gpt_oss = with_router(fused(GPT_OSS, ""));
    gpt_oss.push(named("experts.gate_up_proj_bias", &[E, 2 * I], |i| {
        let (projection, row) = gate_up(true, i[1]);
        bias(i[0], projection, row)
    }));
    gpt_oss.push(named("experts.down_proj_bias", &[E, H], |i| {
        bias(i[0], Down, i[1])
    }));

    let mut singles = with_router(per_expert(PROJ));
    let mut stack = with_router(stacked("experts", ".weight"));
    for (name, projection) in PROJ.into_iter().zip([Gate, Up, Down]) {
        for e in 0..E {
            let name = format!("experts.{e}.{name}.bias");
            singles.push(named(name, &[rows(projection)], |i| {
                bias(e, projection, i[0])
            }));
        }
        stack.push(named(
            format!("experts.{name}.bias"),
            &[E, rows(projection)],
            |i| bias(i[0], projection, i[1]),
        ));
    }

    for (tensors, layout) in [
        (gpt_oss, GPT_OSS),
        (singles, GPT_OSS),
        (stack, CONCATENATED),
    ] {
        let model = Model::new("gpt_oss", config, PREFIX, &tensors);
        let layer = model.open().with_fused_layout(layout).moe_layer(2).unwrap();
        check_rows(&layer);
        check_bias(&layer);
        assert_eq!(layer.router.bias(), Some(&[0.0, 1.0, 2.0][..]));
    }
}

#[test]
fn shared_experts() {
    let check = |layer: &MoeLayer| {
        check_rows(layer);
        for projection in [Gate, Up, Down] {
            for row in 0..rows(projection) {
                let mut got = vec![f32::NAN; columns(projection)];
                layer.shared_row(projection, row, &mut got);
                assert_eq!(
                    got[columns(projection) - 1],
                    weight(E, projection, row, got.len() - 1)
                );
            }
        }
    };
    let with_shared = |module: &str| {
        let mut tensors = per_expert(PROJ);
        for (name, projection) in PROJ.into_iter().zip([Gate, Up, Down]) {
            tensors.push(matrix(format!("{module}.{name}.weight"), E, projection));
        }
        tensors
    };

    let mut qwen2 = with_shared("shared_expert");
    let config = format!(r#"{EXPERTS}, "shared_expert_intermediate_size": {I}"#);
    let model = Model::new("qwen2_moe", &config, PREFIX, &qwen2);
    let error = model.layer().unwrap_err().to_string();
    assert!(
        error.contains("missing model.layers.2.mlp.shared_expert_gate.weight"),
        "{error}"
    );
    qwen2.push(named("shared_expert_gate.weight", &[1, H], |i| i[1] as f32));
    let layer = Model::new("qwen2_moe", &config, PREFIX, &qwen2)
        .layer()
        .unwrap();
    check(&layer);
    assert_eq!(layer.shared_gate.as_ref().unwrap()[H - 1], (H - 1) as f32);

    let mut glm = with_shared("shared_experts");
    glm.push(named("gate.e_score_correction_bias", &[E], |i| i[0] as f32));
    let layer = Model::new("glm4_moe", r#", "n_routed_experts": 3"#, PREFIX, &glm)
        .layer()
        .unwrap();
    check(&layer);
    assert_eq!(layer.shared_gate, None);
}

#[test]
fn nothing_is_skipped() {
    let names = |tensors: &[Named]| match qwen(tensors).layer() {
        Err(CheckpointError::Tensors {
            missing,
            unexpected,
            ..
        }) => (missing, unexpected),
        other => panic!("{other:?}"),
    };
    let full = |name: &str| format!("{PREFIX}{name}");

    // An expert short, one too many, a scale that only quantised weights have.
    let mut tensors = per_expert(PROJ);
    tensors.retain(|t| !t.name.starts_with("experts.1.") && t.name != "experts.2.up_proj.weight");
    let (missing, unexpected) = names(&tensors);
    assert_eq!((missing.count, unexpected.count), (4, 0));
    assert_eq!(missing.first[3], full("experts.2.up_proj.weight"));

    let mut tensors = per_expert(PROJ);
    tensors.push(matrix("experts.3.gate_proj.weight".into(), 0, Gate));
    tensors.push(named(
        "experts.0.gate_proj.weight_scale_inv",
        &[1, 1],
        |_| 1.0,
    ));
    tensors.push(named("experts.0.gate_proj.input_scale", &[1], |_| 1.0));
    let (missing, unexpected) = names(&tensors);
    assert!(missing.is_empty());
    let want = [
        full("experts.0.gate_proj.weight_scale_inv"),
        full("experts.3.gate_proj.weight"),
    ];
    assert_eq!(unexpected.first, want);

    // Two spellings at once; another family's names; a bank without its other half.
    let mut tensors = fused(CONCATENATED, "");
    tensors.extend(per_expert(PROJ).into_iter().skip(1));
    assert_eq!(names(&tensors).1.count, 9);
    let mut tensors = per_expert(["linear", "linear_1", "linear_v"]);
    tensors.remove(0);
    let (missing, unexpected) = names(&tensors);
    assert_eq!(
        (missing.count, missing.first.len(), unexpected.count),
        (10, 8, 9)
    );
    let text = qwen(&tensors).layer().unwrap_err().to_string();
    assert!(
        text.contains("missing 10: ") && text.contains("and 2 more"),
        "{text}"
    );
    let mut tensors = fused(CONCATENATED, "");
    tensors.retain(|t| t.name != "experts.down_proj");
    assert_eq!(names(&tensors).0.first, [full("experts.down_proj")]);

    // The router's bias means something: not in this family, though.
    let mut tensors = per_expert(PROJ);
    tensors.push(named("gate.bias", &[E], |_| 0.0));
    assert_eq!(names(&tensors).1.first, [full("gate.bias")]);
}

#[test]
fn shapes_are_checked_against_the_config() {
    let mut tensors = per_expert(PROJ);
    tensors[4] = named("experts.1.gate_proj.weight", &[H, I], |_| 0.0);
    let text = qwen(&tensors).layer().unwrap_err().to_string();
    for part in [
        "experts.1.gate_proj.weight",
        "[10, 5]",
        "[5, 10]",
        "(intermediate, hidden)",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let model = Model::new(
        "qwen3_moe",
        r#", "num_experts": 4"#,
        PREFIX,
        &fused(CONCATENATED, ""),
    );
    let text = model.layer().unwrap_err().to_string();
    assert!(text.contains("gate.weight") && text.contains("[3, 10]") && text.contains("[4, 10]"));
}

#[test]
fn dtypes_and_prefixes() {
    let model = qwen(&per_expert(PROJ));
    let path = model.folder.path().join("model.safetensors");
    let tensors = per_expert(PROJ);
    let write_as = |dtype: Dtype, encode: &dyn Fn(f32) -> Vec<u8>, prefixes: &[&str]| {
        let data: Vec<_> = prefixes
            .iter()
            .flat_map(|prefix| {
                tensors.iter().map(move |t| TensorData {
                    name: format!("{prefix}{}", t.name),
                    dtype,
                    shape: t.shape.clone(),
                    bytes: t.values.iter().flat_map(|&v| encode(v)).collect(),
                })
            })
            .collect();
        write(&path, &data).unwrap();
        model.layer()
    };
    // Integers to 2048 are exact in f16.
    let f16 = |v: f32| half::f16::from_f32(v).to_le_bytes().to_vec();
    check_rows(&write_as(Dtype::F16, &f16, &[PREFIX]).unwrap());

    let bytes = |v: f32| vec![v as u8];
    for dtype in [Dtype::F8_E4M3, Dtype::U8] {
        let error = write_as(dtype, &bytes, &[PREFIX]).unwrap_err();
        assert!(
            matches!(error, CheckpointError::File(FileError::Dtype { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(&dtype.to_string()), "{error}");
    }

    // Layer 2 must not be found in layer 20 or 12.
    let others = [
        "model.layers.20.mlp.",
        "model.layers.12.mlp.",
        "model.layers.2.self_attn.",
    ];
    let error = write_as(Dtype::F16, &f16, &others).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NoLayer { layer: 2, .. }),
        "{error}"
    );
    let error = write_as(Dtype::F16, &f16, &[PREFIX, "layers.2.mlp."]).unwrap_err();
    assert!(
        matches!(error, CheckpointError::AmbiguousLayer { layer: 2, .. }),
        "{error}"
    );
}

/// The layer's tensors may be spread over shards.
#[test]
fn experts_in_several_shards() {
    let model = qwen(&[]);
    let tensors = per_expert(PROJ);
    let mut map = Vec::new();
    for (i, part) in tensors.chunks(3).enumerate() {
        let file = format!("part-{i}.safetensors");
        let data: Vec<_> = part
            .iter()
            .map(|t| TensorData::f32(format!("{PREFIX}{}", t.name), &t.shape, &t.values))
            .collect();
        map.extend(data.iter().map(|t| format!(r#""{}": "{file}""#, t.name)));
        write(model.folder.path().join(file), &data).unwrap();
    }
    let index = model.folder.path().join("model.safetensors.index.json");
    std::fs::write(index, format!(r#"{{"weight_map": {{{}}}}}"#, map.join(","))).unwrap();
    std::fs::remove_file(model.folder.path().join("model.safetensors")).unwrap();
    check_rows(&model.layer().unwrap());
}
