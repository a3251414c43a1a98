//! The program as people run it: exit status, what it says, the files it leaves.

use asym_gemm::checkpoint::{TensorData, TensorFile, write};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Checkpoints and their MoE layer; inputs and outputs lie beside them.
const FIXTURES: [(&str, usize); 7] = [
    ("qwen3_moe_bf16", 0),
    ("mixtral_bf16", 0),
    ("deepseek_v3_bf16", 1),
    ("gpt_oss_bf16", 0),
    ("deepseek_v3_fp8", 1),
    ("gpt_oss_mxfp4", 0),
    ("qwen3_moe_nvfp4_modelopt", 0),
];
const FORMATS: [&str; 6] = ["bf16", "int8", "int8-block128", "fp8", "nvfp4", "mxfp4"];
/// Tokens of each fixture.
const TOKENS: usize = 19;
/// Width of the Qwen3 fixture.
const HIDDEN: usize = 128;
/// What makes the program look for a driver where there is none.
const NO_DRIVER: (&str, &str) = ("ASYM_GEMM_LIBCUDA", "/nonexistent/libcuda.so.1");

fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("ASYM_GEMM_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"),
        PathBuf::from,
    );
    folder.join(name)
}

/// The program under test; the variable is set where tests run without cargo.
fn program() -> PathBuf {
    std::env::var_os("CARGO_BIN_EXE_asym-gemm")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_asym-gemm").into())
        .into()
}

fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().to_str().unwrap().to_owned()
}

/// `FILE:TENSOR` of a fixture's inputs and outputs.
fn io(name: &str, layer: usize, tensor: &str) -> String {
    format!(
        "{}:layer{layer}.{tensor}",
        text(fixture(name).join("moe_io.safetensors"))
    )
}

/// One call of the program.
#[derive(Clone, Debug)]
struct Call {
    words: Vec<String>,
    variables: Vec<(String, String)>,
}

/// What came of it.
#[derive(Debug)]
struct Outcome {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Call {
    fn new(words: &[&str]) -> Self {
        Self {
            words: words.iter().map(|&word| word.to_owned()).collect(),
            variables: Vec::new(),
        }
    }

    /// `moe` on the CPU.
    fn moe(model: &Path, layer: usize, input: &str) -> Self {
        let layer = layer.to_string();
        Self::new(&[
            "moe",
            "--backend",
            "cpu",
            "--model",
            &text(model),
            "--layer",
            &layer,
        ])
        .with(&["--input", input])
    }

    /// `moe` on the CPU over a fixture's own input.
    fn fixture((name, layer): (&str, usize)) -> Self {
        Self::moe(&fixture(name), layer, &io(name, layer, "input"))
    }

    fn with(mut self, words: &[&str]) -> Self {
        self.words.extend(words.iter().map(|&word| word.to_owned()));
        self
    }

    fn variable(mut self, (name, value): (&str, &str)) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    fn run(&self) -> Outcome {
        let mut command = assert_cmd::Command::new(program());
        for name in ["ASYM_GEMM_ISA", "RAYON_NUM_THREADS", "RUST_LOG"] {
            command.env_remove(name);
        }
        let variables = self.variables.iter().map(|(name, value)| (name, value));
        let output = command
            .args(&self.words)
            .envs(variables)
            .timeout(Duration::from_secs(120))
            .output()
            .unwrap();
        let outcome = Outcome {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert!(
            !outcome.stderr.contains("panicked"),
            "{self:?}: {outcome:?}"
        );
        outcome
    }

    /// Runs with `--json`; the document.
    fn json(&self, status: i32) -> Value {
        let outcome = self.clone().with(&["--json"]).run();
        assert_eq!(outcome.status, status, "{self:?}: {outcome:?}");
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}"))
    }

    /// Runs; what it printed.
    fn prints(&self, status: i32) -> String {
        let outcome = self.run();
        assert_eq!(outcome.status, status, "{self:?}: {outcome:?}");
        outcome.stdout
    }

    /// Is refused with status 2 and one line that has all of `parts`; `--json` has the same.
    fn refused(&self, parts: &[&str]) {
        let outcome = self.run();
        assert_eq!(outcome.status, 2, "{self:?}: {outcome:?}");
        assert_eq!(outcome.stdout, "", "{self:?}");
        let message = outcome
            .stderr
            .strip_prefix("error: ")
            .unwrap_or_default()
            .trim_end();
        assert!(
            !message.is_empty() && message.lines().count() == 1,
            "{self:?}: {outcome:?}"
        );
        for part in parts {
            assert!(message.contains(part), "no `{part}` in: {message}");
        }
        assert_eq!(self.json(2), serde_json::json!({ "error": message }));
    }

    /// Is refused with status 2 as a command line that makes no sense.
    fn misused(&self, parts: &[&str]) {
        let outcome = self.run();
        assert_eq!(outcome.status, 2, "{self:?}: {outcome:?}");
        assert_eq!(outcome.stdout, "", "{self:?}");
        for part in parts {
            assert!(
                outcome.stderr.contains(part),
                "no `{part}` in: {}",
                outcome.stderr
            );
        }
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A copy of a checkpoint to damage.
fn copy(name: &str) -> TempDir {
    let to = folder();
    for file in names(&fixture(name)) {
        fs::copy(fixture(name).join(&file), to.path().join(&file)).unwrap();
    }
    to
}

/// A file in `folder` with one tensor.
fn tensor_file(folder: &Path, shape: &[usize], values: &[f32]) -> String {
    let path = folder.join("tensor.safetensors");
    write(&path, &[TensorData::f32("tensor", shape, values)]).unwrap();
    text(path)
}

fn values((name, layer): (&str, usize), tensor: &str) -> Vec<f32> {
    let file = TensorFile::open(fixture(name).join("moe_io.safetensors")).unwrap();
    file.read_f32(&format!("layer{layer}.{tensor}")).unwrap()
}

#[test]
fn demo_passes() {
    let printed = Call::new(&["demo"]).prints(0);
    assert!(
        printed.ends_with("PASS\n") && !printed.contains("FAIL"),
        "{printed}"
    );

    let report = Call::new(&["demo"]).json(0);
    assert_eq!(report["passed"], true);
    assert_eq!(
        (&report["model_type"], &report["tokens"]),
        (&"qwen3_moe".into(), &TOKENS.into())
    );
    let runs = report["runs"].as_array().unwrap();
    let on_cpu: Vec<_> = runs.iter().filter(|run| run["backend"] == "cpu").collect();
    let formats: Vec<_> = on_cpu
        .iter()
        .map(|run| run["format"].as_str().unwrap())
        .collect();
    assert_eq!(formats, ["bf16", "int8", "fp8"]);
    for run in runs {
        assert_eq!(run["comparison"]["passed"], true, "{run}");
        assert!(run["seconds"].as_f64().unwrap() > 0.0);
        assert!(
            run["comparison"]["element_error"].as_f64().unwrap() > 0.0,
            "vacuous: {run}"
        );
    }
}

#[test]
fn demo_of_another_model() {
    let model = fixture("deepseek_v3_bf16");
    let call = Call::new(&["demo", "--layer", "1", "--model", &text(&model)]).variable(NO_DRIVER);
    let report = call.json(0);
    assert_eq!(report["model_type"], "deepseek_v3");
    assert!(
        report["gpu_skipped"]
            .as_str()
            .unwrap()
            .contains(NO_DRIVER.1),
        "{report}"
    );

    // Its output is not what it should be.
    let copy = copy("mixtral_bf16");
    let x = values(FIXTURES[1], "input");
    let shape = [TOKENS, HIDDEN];
    let io = copy.path().join("moe_io.safetensors");
    let tensors = [
        TensorData::f32("layer0.input", &shape, &x),
        TensorData::f32("layer0.output", &shape, &x),
    ];
    write(&io, &tensors).unwrap();
    let call = Call::new(&["demo", "--model", &text(copy.path())]).variable(NO_DRIVER);
    assert!(call.prints(1).ends_with("FAIL\n"));
    assert_eq!(call.json(1)["passed"], false);

    fs::remove_file(&io).unwrap();
    call.refused(&["moe_io.safetensors", "No such file"]);
    Call::new(&["demo", "--layer", "1"]).misused(&["--model"]);
}

#[test]
fn doctor_reports() {
    let look = Call::new(&["doctor", "--no-measure"]);
    let printed = look.prints(0);
    assert!(
        printed.contains("kernels") && printed.contains("int8-block128"),
        "{printed}"
    );

    let report = look.json(0);
    assert_eq!(report["dram_read_gb_per_second"], Value::Null);
    assert_eq!(report["kernels"].as_array().unwrap().len(), FORMATS.len());
    assert!(
        report["system"].is_object() && report["gpu"]["devices"].is_array(),
        "{report}"
    );

    let forced = look
        .clone()
        .variable(("ASYM_GEMM_ISA", "portable"))
        .variable(NO_DRIVER)
        .json(0);
    assert_eq!(forced["cpu_isa"], "portable");
    assert_eq!(forced["cpu_isa_reason"], "forced by ASYM_GEMM_ISA");
    assert!(
        forced["gpu"]["driver_missing"]
            .as_str()
            .unwrap()
            .contains(NO_DRIVER.1),
        "{forced}"
    );
    assert_eq!(forced["gpu"]["devices"], serde_json::json!([]));
    for kernel in forced["kernels"].as_array().unwrap() {
        assert!(
            kernel["cpu"].as_str().unwrap().starts_with("portable"),
            "{kernel}"
        );
        assert!(kernel["gpu"]["Err"].is_string(), "{kernel}");
    }
    let unset = look.clone().variable(("ASYM_GEMM_ISA", "")).json(0);
    assert_eq!(unset["cpu_isa"], report["cpu_isa"]);
    look.variable(("ASYM_GEMM_ISA", "bogus"))
        .refused(&["ASYM_GEMM_ISA", "`bogus`"]);
}

#[test]
fn every_fixture_is_as_expected_in_every_format() {
    for (name, layer) in FIXTURES {
        let call = Call::fixture((name, layer)).with(&[
            "--expect",
            &io(name, layer, "output"),
            "--format",
        ]);
        for format in FORMATS {
            let report = call.clone().with(&[format]).json(0);
            let comparison = &report["comparison"];
            assert_eq!(comparison["passed"], true, "{name} {report}");
            assert_eq!(
                (&report["format"], &report["backend"]),
                (&format.into(), &"cpu".into())
            );
            assert_eq!(
                (&report["tokens"], &report["layer"]),
                (&TOKENS.into(), &layer.into())
            );
            for error in ["element", "frobenius"] {
                let part = |what| comparison[format!("{error}_{what}")].as_f64().unwrap();
                assert!(
                    0.0 < part("error") && part("error") < part("limit"),
                    "{name} {report}"
                );
            }
        }
        assert!(
            call.with(&["bf16"])
                .prints(0)
                .contains("PASS (worst at token")
        );
    }
}

/// Without a driver `auto` is the CPU, and other transfers are no matter.
#[test]
fn auto_without_a_driver() {
    let (name, layer) = FIXTURES[0];
    let layer = layer.to_string();
    let model = text(fixture(name));
    let input = io(name, 0, "input");
    let call = Call::new(&[
        "moe", "--model", &model, "--layer", &layer, "--input", &input,
    ])
    .variable(NO_DRIVER);
    for transfer in ["auto", "direct", "staged", "resident"] {
        assert_eq!(
            call.clone().with(&["--transfer", transfer]).json(0)["backend"],
            "cpu"
        );
    }
    for backend in ["gpu", "both"] {
        call.clone()
            .with(&["--backend", backend])
            .refused(&[NO_DRIVER.1]);
    }
}

#[test]
fn a_wrong_expectation_fails() {
    let (name, layer) = FIXTURES[0];
    let call = Call::fixture((name, layer)).with(&["--expect", &io(name, layer, "input")]);
    for format in FORMATS {
        let call = call.clone().with(&["--format", format]);
        let printed = call.prints(1);
        assert!(
            printed.contains("FAIL (worst at token") && !printed.contains("PASS"),
            "{printed}"
        );
        assert_eq!(call.json(1)["comparison"]["passed"], false);
    }
}

/// One element off by a little more than bf16 may be, or not a number.
#[test]
fn one_wrong_element_fails_and_is_named() {
    let folder = folder();
    let want = values(FIXTURES[0], "output");
    let (row, column) = (TOKENS - 1, HIDDEN - 1);
    let at = row * HIDDEN + column;
    let rms = (want[row * HIDDEN..].iter().map(|x| x * x).sum::<f32>() / HIDDEN as f32).sqrt();
    for wrong in [want[at] + 0.03 * (want[at].abs() + rms), f32::NAN] {
        let mut values = want.clone();
        values[at] = wrong;
        let file = tensor_file(folder.path(), &[TOKENS, HIDDEN], &values);
        let comparison = &Call::fixture(FIXTURES[0])
            .with(&["--expect", &file])
            .json(1)["comparison"];
        assert_eq!(comparison["worst_row"], row, "{comparison}");
        // A row with NaN has no RMS to measure its elements by.
        let column = if wrong.is_nan() { 0 } else { column };
        assert_eq!(comparison["worst_column"], column, "{comparison}");
    }
}

#[test]
fn the_output_is_what_was_compared() {
    for fixture in FIXTURES {
        for format in FORMATS {
            let folder = folder();
            let path = folder.path().join("y.safetensors");
            let (file, want) = (text(&path), values(fixture, "output"));
            let call = Call::fixture(fixture).with(&["--format", format]);
            let expect = io(fixture.0, fixture.1, "output");
            let report = call
                .clone()
                .with(&["--output", &file, "--expect", &expect])
                .json(0);
            assert_eq!(report["output"], file);
            assert_eq!(names(folder.path()), ["y.safetensors"]);

            let written = TensorFile::open(&path).unwrap();
            let hidden = want.len() / TOKENS;
            assert_eq!(written.info("output").unwrap().shape, [TOKENS, hidden]);
            let got = written.read_f32("output").unwrap();
            let square = |x: f32| f64::from(x).powi(2);
            let error: f64 = got.iter().zip(&want).map(|(g, w)| square(g - w)).sum();
            let norm: f64 = want.iter().copied().map(square).sum();
            let (frobenius, reported) = (
                (error / norm).sqrt(),
                report["comparison"]["frobenius_error"].as_f64().unwrap(),
            );
            assert!(
                (frobenius - reported).abs() < 1e-4 * frobenius,
                "{frobenius} {reported}"
            );

            // The same bytes again: no error at all.
            let again = call.with(&["--expect", &file]).json(0);
            assert_eq!(
                again["comparison"]["element_error"], 0.0,
                "{fixture:?} {format}"
            );
            assert_eq!(
                again["comparison"]["frobenius_error"], 0.0,
                "{fixture:?} {format}"
            );
        }
    }
}

/// Thread counts that no machine has are refused, not tried.
#[test]
fn absurd_thread_counts_are_refused() {
    let call = || Call::new(&["doctor", "--no-measure"]);
    call()
        .with(&["--threads", "1025"])
        .refused(&["1025 threads", "--threads", "1024"]);
    for bad in ["99999999", "-1", "x"] {
        call()
            .variable(("RAYON_NUM_THREADS", bad))
            .refused(&["RAYON_NUM_THREADS", "1024"]);
    }
}

/// The output never takes the place of what the command reads, nor follows a link.
#[test]
fn output_spares_the_checkpoint_and_the_input() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    std::fs::create_dir(&model).expect("a folder");
    for name in ["config.json", "model.safetensors", "moe_io.safetensors"] {
        std::fs::copy(fixture("qwen3_moe_bf16").join(name), model.join(name)).expect("a copy");
    }
    let input = folder.path().join("input.safetensors");
    std::fs::copy(model.join("moe_io.safetensors"), &input).expect("a copy");
    let call = |output: &Path| {
        Call::moe(&model, 0, &format!("{}:layer0.input", text(&input)))
            .with(&["--output", &text(output)])
    };
    for name in ["config.json", "model.safetensors"] {
        let before = std::fs::read(model.join(name)).expect("a file");
        call(&model.join(name)).refused(&["--output", name, "checkpoint"]);
        assert_eq!(std::fs::read(model.join(name)).expect("a file"), before);
    }
    call(&input).refused(&["--output", "read by this command"]);
    call(&folder.path().join("absent/out")).refused(&["--output", "folder is not there"]);
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).expect("a link");
        call(&link).refused(&["--output", "a link"]);
    }
}

#[test]
fn threads_do_not_change_a_byte() {
    let folder = folder();
    for format in FORMATS {
        let bytes = ["1", "2", "5"].map(|threads| {
            let path = folder.path().join(threads);
            let words = [
                "--format",
                format,
                "--threads",
                threads,
                "--output",
                &text(&path),
            ];
            Call::fixture(FIXTURES[2]).with(&words).prints(0);
            fs::read(path).unwrap()
        });
        assert!(bytes[0] == bytes[1] && bytes[0] == bytes[2], "{format}");
    }
    let call = Call::fixture(FIXTURES[0]);
    call.clone()
        .with(&["--threads", "0"])
        .misused(&["--threads", "zero"]);
    call.with(&["--threads", "many"])
        .misused(&["--threads", "many"]);
}

#[test]
fn batches_of_sequences_are_tokens() {
    let folder = folder();
    let x = values(FIXTURES[0], "input");
    let model = fixture(FIXTURES[0].0);
    let outputs = [&[6, HIDDEN][..], &[2, 3, HIDDEN], &[1, 2, 3, 1, HIDDEN]].map(|shape| {
        let input = tensor_file(folder.path(), shape, &x[..6 * HIDDEN]);
        let output = text(folder.path().join("y"));
        let report = Call::moe(&model, 0, &input)
            .with(&["--output", &output])
            .json(0);
        assert_eq!(report["tokens"], 6);
        fs::read(output).unwrap()
    });
    assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
}

#[test]
fn no_tokens() {
    let folder = folder();
    for (name, layer) in FIXTURES {
        let hidden = values((name, layer), "input").len() / TOKENS;
        let input = tensor_file(folder.path(), &[0, hidden], &[]);
        let output = folder.path().join("y");
        for format in FORMATS {
            let words = [
                "--format",
                format,
                "--expect",
                &input,
                "--output",
                &text(&output),
            ];
            let call = Call::moe(&fixture(name), layer, &input).with(&words);
            assert_eq!(call.json(0)["tokens"], 0);
            assert!(call.prints(0).contains("0 tokens"));
            let written = TensorFile::open(&output).unwrap();
            assert_eq!(written.info("output").unwrap().shape, [0, hidden]);
        }
    }
}

#[test]
fn inputs_that_do_not_fit() {
    let folder = folder();
    let (name, layer) = FIXTURES[0];
    let model = fixture(name);
    let file = text(model.join("moe_io.safetensors"));
    let call = |input: &str| Call::moe(&model, layer, input);
    let all = ["layer0.gate_out0", "layer0.input", "layer0.output"];

    call(&format!("{file}:nope")).refused(&[&["no tensor `nope`"], &all[..]].concat());
    call(&file).refused(&[&["name one tensor as", ":NAME"], &all[..]].concat());
    call("/nonexistent.safetensors").refused(&["/nonexistent.safetensors", "No such file"]);
    call(&text(folder.path())).refused(&[&text(folder.path())]);
    call(&io(name, layer, "gate_out0")).refused(&["--input", "[19, 8]", "[tokens, 128]"]);
    let vector = tensor_file(folder.path(), &[HIDDEN], &[0.0; HIDDEN]);
    call(&vector).refused(&["--input", "[128]", "[tokens, 128]"]);
    let narrow = tensor_file(folder.path(), &[HIDDEN, 5], &[0.0; HIDDEN * 5]);
    call(&narrow).refused(&["--input", "[128, 5]", "[tokens, 128]"]);

    let integers = folder.path().join("integers");
    write(
        &integers,
        &[TensorData::i32("ids", &[1, HIDDEN], &[0; HIDDEN])],
    )
    .unwrap();
    call(&text(&integers)).refused(&["`ids` is I32", "BF16"]);

    let few = tensor_file(folder.path(), &[2, HIDDEN], &[0.0; 2 * HIDDEN]);
    let fixture = Call::fixture((name, layer));
    fixture
        .clone()
        .with(&["--expect", &few])
        .refused(&["--expect", "2 tokens", "has 19"]);
    let missing = format!("{file}:missing");
    fixture
        .with(&["--expect", &missing])
        .refused(&["no tensor `missing`"]);
}

#[test]
fn layers_that_are_not_there() {
    Call::fixture(FIXTURES[0])
        .variable(("ASYM_GEMM_ISA", "bogus"))
        .refused(&["`bogus`"]);
    let (name, _) = FIXTURES[2];
    let call = |layer| Call::moe(&fixture(name), layer, &io(name, 1, "input"));
    call(0).refused(&["layer 0 is dense"]);
    call(7).refused(&["layer 7 is out of range", "deepseek_v3", "0..2"]);
    call(usize::MAX).refused(&["out of range"]);

    let folder = folder();
    let call = |model: &Path| Call::moe(model, 0, "unread");
    call(&folder.path().join("absent")).refused(&["absent"]);
    call(folder.path()).refused(&[&text(folder.path()), "model.safetensors"]);
}

/// Without `--format` experts are computed as they are stored, and then only activations are
/// rounded.
#[test]
fn quantised_checkpoints_are_computed_as_stored() {
    for (name, layer, format) in [
        ("deepseek_v3_fp8", 1, "fp8"),
        ("gpt_oss_mxfp4", 0, "mxfp4"),
        ("qwen3_moe_nvfp4_modelopt", 0, "nvfp4"),
    ] {
        let expect = io(name, layer, "output");
        let report = Call::fixture((name, layer))
            .with(&["--expect", &expect])
            .json(0);
        assert_eq!(report["format"], format, "{report}");
        assert_eq!(report["comparison"]["element_limit"], 0.012, "{report}");
    }
}

#[test]
fn damaged_checkpoints() {
    let copy = copy("qwen3_moe_bf16");
    let input = io("qwen3_moe_bf16", 0, "input");
    let call = Call::moe(copy.path(), 0, &input);
    let path = copy.path().join("model.safetensors");

    // One expert lacks a projection.
    let lost = "model.layers.0.mlp.experts.3.up_proj.weight";
    let file = TensorFile::open(&path).unwrap();
    let kept = file.tensors().iter().filter(|(name, _)| *name != lost);
    let tensors: Vec<TensorData<'_>> = kept
        .map(|(name, info)| TensorData {
            name: name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: file.read_bytes(name).unwrap().into(),
        })
        .collect();
    write(&path, &tensors).unwrap();
    call.refused(&["missing", "experts.3.up_proj.weight"]);

    let bytes = fs::read(fixture("qwen3_moe_bf16").join("model.safetensors")).unwrap();
    for keep in [0, 7, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..keep]).unwrap();
        call.refused(&["model.safetensors", "bytes"]);
    }
    fs::remove_file(&path).unwrap();
    call.refused(&["model.safetensors", &text(copy.path())]);

    fs::write(&path, &bytes).unwrap();
    for config in ["{", "[]", r#"{"model_type":"llama"}"#] {
        fs::write(copy.path().join("config.json"), config).unwrap();
        call.refused(&["config.json"]);
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    let folder = folder();
    let call = |path: &Path| Call::fixture(FIXTURES[0]).with(&["--output", &text(path)]);
    call(&folder.path().join("absent/y")).refused(&["absent/y", "its folder is not there"]);
    assert!(names(folder.path()).is_empty());

    // A folder in the file's place stays, and nothing is left beside it.
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    call(&taken).refused(&["taken"]);
    assert_eq!(names(folder.path()), ["taken"]);

    // A failure before the end leaves the old file as it was.
    let old = folder.path().join("old");
    fs::write(&old, "old").unwrap();
    call(&old)
        .with(&["--expect", "/nonexistent"])
        .refused(&["/nonexistent"]);
    assert_eq!(fs::read(&old).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["old", "taken"]);
    call(&old).prints(0);
    assert!(TensorFile::open(&old).is_ok());
    assert_eq!(names(folder.path()), ["old", "taken"]);
}

#[test]
fn records_that_cannot_be_written_are_refused_at_once() {
    let folder = folder();
    let bench = |path: &Path| Call::new(&["bench", "cpu", "--quick", "--csv", &text(path)]);
    bench(&folder.path().join("absent/x.csv"))
        .refused(&["absent/x.csv", "its folder is not there"]);
    bench(folder.path()).refused(&["is a folder"]);
    #[cfg(feature = "cuda")]
    Call::new(&["bench", "gpu", "--csv", &text(folder.path())]).refused(&["is a folder"]);
    Call::new(&["bench", "layer", "--csv", &text(folder.path())]).refused(&["is a folder"]);
}

/// Replacing a device such as /dev/null by a file would break the machine.
#[cfg(unix)]
#[test]
fn only_files_are_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let folder = folder();
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let words = ["--output", &text(&socket)];
    Call::fixture(FIXTURES[0])
        .with(&words)
        .refused(&["socket", "not a regular file"]);
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    assert_eq!(names(folder.path()), ["socket"]);
}

/// A full disk behind standard output is an error; a reader that has left ends the program as
/// any filter, by SIGPIPE and without a word.
#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_cannot_be_written() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    const SIGPIPE: i32 = 13;
    let doctor = Call::new(&["doctor", "--no-measure"]);
    for call in [Call::fixture(FIXTURES[0]), doctor] {
        for words in [call.clone(), call.with(&["--json"])].map(|call| call.words) {
            let run = |stdout: Stdio| {
                let output = Command::new(program())
                    .args(&words)
                    .stdout(stdout)
                    .output()
                    .unwrap();
                (output.status, String::from_utf8(output.stderr).unwrap())
            };
            let full = fs::File::options().write(true).open("/dev/full").unwrap();
            let (status, stderr) = run(full.into());
            assert_eq!(status.code(), Some(2), "{words:?}: {stderr}");
            let message = "error: standard output: No space left on device";
            assert!(stderr.starts_with(message), "{stderr}");

            let (reader, closed) = std::io::pipe().unwrap();
            drop(reader);
            let (status, stderr) = run(closed.into());
            assert_eq!(
                (status.signal(), &stderr[..]),
                (Some(SIGPIPE), ""),
                "{words:?}"
            );
        }
    }
}

/// Nothing is measured here, so the same question has the same answer everywhere.
#[test]
fn plans_of_a_given_machine() {
    let words = "plan --shape 128,2048,768,8 --tokens 1,64,4096 --no-measure --gpus 1 --link 50 \
                 --dram 100 --zipf 1.1 --hbm-mib 150 --divisions";
    let call = Call::new(&words.split_whitespace().collect::<Vec<_>>());
    let table = call.prints(0);
    for word in [
        "T=4096",
        "cpu-only",
        "gpu-only",
        "static-16",
        "adaptive",
        "experts 0..=",
    ] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let json: Value = serde_json::from_str(&call.with(&["--json"]).prints(0)).unwrap();
    let answers = json["answers"].as_array().unwrap();
    assert_eq!(answers.len(), 3);
    for answer in answers {
        let floor = answer["floor_s"].as_f64().unwrap();
        let seconds = |policy: &Value| policy["prediction"]["total_s"].as_f64().unwrap();
        let policies = answer["policies"].as_array().unwrap();
        let adaptive = seconds(&policies[3]);
        assert!(adaptive > floor);
        assert!(
            policies
                .iter()
                .all(|policy| adaptive <= seconds(policy) * 1.006)
        );
    }
    assert_eq!(answers[0]["active"], 8);
    assert!(answers[0]["resident_experts"].as_u64().unwrap() >= 30);

    let folder = text(fixture(FIXTURES[0].0));
    let model = Call::new(&["plan", "--model", &folder, "--no-measure"]);
    let text = model.clone().with(&["--gpus", "0"]).prints(0);
    assert!(
        text.contains("no GPU") && !text.contains("adaptive"),
        "{text}"
    );
    model
        .with(&["--link", "0"])
        .refused(&["link_gb_s", "above 0"]);
    Call::new(&["plan", "--model", "/nonexistent"]).refused(&["/nonexistent"]);
    Call::new(&["plan", "--shape", "8,64,64,2", "--rates", "/nonexistent"])
        .refused(&["/nonexistent"]);
}

#[test]
fn misuse() {
    let call = Call::fixture(FIXTURES[0]);
    call.clone()
        .with(&["--format", "fp4"])
        .misused(&["fp4", "bf16, int8, int8-block128, fp8, nvfp4, mxfp4"]);
    call.clone()
        .with(&["--transfer", "pigeon"])
        .misused(&["pigeon", "staged"]);
    Call::new(&["moe", "--model", "m", "--layer", "-1", "--input", "x"]).misused(&["-1"]);
    Call::new(&["moe", "--layer", "0"]).misused(&["--model", "--input"]);
    Call::new(&["bench", "gears"]).misused(&["gears"]);
    Call::new(&["bake"]).misused(&["bake"]);
    Call::new(&[]).misused(&["Usage"]);
    assert!(
        Call::new(&["--version"])
            .prints(0)
            .starts_with("asym-gemm ")
    );
    let help = Call::new(&["bench", "cpu", "--help"]).prints(0);
    assert!(help.contains("--quick") && help.contains("--csv"));
    let help = Call::new(&["bench", "gpu", "--help"]).prints(0);
    assert!(help.contains("--quick") && help.contains("--csv"));
    let help = Call::new(&["bench", "layer", "--help"]).prints(0);
    assert!(help.contains("--quick") && help.contains("--plot"));
    assert!(Call::new(&["moe", "--help"]).prints(0).contains("--expect"));
    let plan = |words: &[&str]| Call::new(&["plan"]).with(words);
    plan(&[]).misused(&["--shape", "--model"]);
    plan(&["--shape", "1,2,3"]).misused(&["four numbers"]);
    plan(&["--shape", "4,64,64,8"]).misused(&["8 of 4"]);
    plan(&["--shape", "8,64,64,2", "--tokens", "0"]).misused(&["0"]);
}
