//! Files that are cut, padded, mislabelled or lying: each fault has its own error, found
//! before anything of the claimed size is allocated.

use asym_gemm::checkpoint::{
    Checkpoint, CheckpointError, Dtype, FileError, ForeignFile, TensorData, TensorFile, TensorSpec,
    write,
};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A file with the header `json` and `data` zero bytes.
fn raw(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn open_bytes(bytes: &[u8]) -> Result<TensorFile, FileError> {
    let folder = folder();
    let path = folder.path().join("x.safetensors");
    fs::write(&path, bytes).unwrap();
    TensorFile::open(path)
}

const TWO: &str = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}}"#;

#[test]
fn a_good_file() {
    let file = open_bytes(&raw(TWO, 34)).unwrap();
    assert_eq!(file.tensors().len(), 2);
    assert_eq!(file.info("a").unwrap().shape, [2, 3]);
    assert_eq!(file.read_f32("b").unwrap(), [0.0; 5]);
}

#[test]
fn cut_anywhere() {
    let good = raw(TWO, 34);
    let header_end = 8 + TWO.len();
    for cut in [
        0,
        7,
        8,
        8 + TWO.len() / 2,
        header_end - 1,
        header_end,
        header_end + 1,
        good.len() - 1,
    ] {
        let want = match cut {
            0..8 => 8,
            _ if cut < header_end => header_end as u64,
            _ => good.len() as u64,
        };
        match open_bytes(&good[..cut]) {
            Err(FileError::Truncated {
                expected, found, ..
            }) => {
                assert_eq!((expected, found), (want, cut as u64));
            }
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}

#[test]
fn bytes_after_the_end() {
    for extra in [1, 512] {
        let bytes = raw(TWO, 34 + extra);
        let error = open_bytes(&bytes).unwrap_err();
        assert!(matches!(error, FileError::TrailingBytes { .. }));
        assert!(
            error.to_string().contains(&format!("{extra} bytes follow")),
            "{error}"
        );
    }
}

#[test]
fn header_length_lies() {
    let with_length = |length: u64| {
        let mut bytes = raw(TWO, 34);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        open_bytes(&bytes).unwrap_err()
    };
    for length in [0, 1] {
        assert!(matches!(
            with_length(length),
            FileError::HeaderTooSmall { .. }
        ));
    }
    for length in [1 << 63, u64::MAX, u64::MAX - 8, 101_000_000] {
        assert!(
            matches!(with_length(length), FileError::HeaderTooLarge { .. }),
            "{length}"
        );
    }
    for length in [400, 99_000_000] {
        assert!(
            matches!(with_length(length), FileError::Truncated { .. }),
            "{length}"
        );
    }
    // Too short by one: the JSON is cut.
    assert!(matches!(
        with_length(TWO.len() as u64 - 1),
        FileError::HeaderJson { .. }
    ));

    // The limit holds where the file is large enough, too.
    let folder = folder();
    let path = folder.path().join("large");
    fs::write(&path, 101_000_000u64.to_le_bytes()).unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(200_000_000)
        .unwrap();
    assert!(matches!(
        TensorFile::open(path),
        Err(FileError::HeaderTooLarge { .. })
    ));
}

#[test]
fn other_kinds_of_file() {
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let cases: [(&[u8], ForeignFile); 9] = [
        (
            b"PK\x03\x04\x14\x00\x08\x08\x08\x00archive/data.pkl",
            ForeignFile::Zip,
        ),
        (
            b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq\x01",
            ForeignFile::Pickle,
        ),
        (
            b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}\x94.",
            ForeignFile::Pickle,
        ),
        (b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00", ForeignFile::Gguf),
        (b"<!DOCTYPE html><html><body>404", ForeignFile::Html),
        (b"\n  <html>", ForeignFile::Html),
        (b"{\"error\": \"not found\"}", ForeignFile::Json),
        (b"{}", ForeignFile::Json),
        (lfs, ForeignFile::GitLfsPointer),
    ];
    for (bytes, want) in cases {
        match open_bytes(bytes) {
            Err(FileError::Foreign { kind, .. }) => assert_eq!(kind, want),
            other => panic!("{want:?}: {other:?}"),
        }
    }
    let text = open_bytes(lfs).unwrap_err().to_string();
    assert!(text.contains("git lfs pull"), "{text}");
}

/// A length whose low bytes look like text or a pickle is still a length.
#[test]
fn truncated_files_are_not_mistaken() {
    for length in [60u64, 123, 0x0480, 0x0280] {
        let bytes = length.to_le_bytes();
        assert!(
            matches!(open_bytes(&bytes), Err(FileError::Truncated { .. })),
            "{length}"
        );
    }
}

#[test]
fn headers_that_are_wrong() {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let pair = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[8],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[8],"data_offsets":{b}}}}}"#
        )
    };
    let error = |json: &str, data| open_bytes(&raw(json, data)).unwrap_err();

    for json in [
        "[]",
        "nonsense",
        "{\"a\":3}",
        "{} x",
        "{\"a\":{\"dtype\":\"F32\"}}",
        "\u{0}\u{0}",
    ] {
        assert!(
            matches!(error(json, 0), FileError::HeaderJson { .. }),
            "{json}"
        );
    }
    for shape in ["[-1]", "[1.5]", "[99999999999999999999]", "3"] {
        let error = error(&tensor("F32", shape, "[0,4]"), 4);
        assert!(matches!(error, FileError::HeaderJson { .. }), "{error}");
        assert!(error.to_string().contains("`t`"), "{error}");
    }
    let unknown = error(&tensor("F7", "[4]", "[0,4]"), 4);
    assert!(matches!(unknown, FileError::UnknownDtype { .. }));
    assert!(unknown.to_string().contains("`t`") && unknown.to_string().contains("`F7`"));

    // Overlap, gap, backwards, not at the start, out of the file.
    for (a, b) in [
        ("[0,8]", "[4,12]"),
        ("[0,8]", "[12,20]"),
        ("[0,8]", "[0,8]"),
        ("[8,0]", "[8,16]"),
    ] {
        assert!(
            matches!(error(&pair(a, b), 20), FileError::Offsets { .. }),
            "{a} {b}"
        );
    }
    assert!(matches!(
        error(&pair("[4,12]", "[12,20]"), 20),
        FileError::Offsets { .. }
    ));
    assert!(matches!(
        error(&pair("[0,8]", "[8,16]"), 15),
        FileError::Truncated { .. }
    ));
    let far = u64::MAX / 8;
    let json = tensor("U8", &format!("[{far}]"), &format!("[0,{far}]"));
    assert!(matches!(error(&json, 8), FileError::Truncated { .. }));

    for (dtype, shape) in [
        ("F32", "[3]"),
        ("BF16", "[2,2,4]"),
        ("F32", "[]"),
        ("F32", "[0,9]"),
    ] {
        let error = error(&tensor(dtype, shape, "[0,16]"), 16);
        assert!(matches!(error, FileError::Length { .. }), "{error}");
    }
    let huge = format!("[{0},{0},{0}]", 1u64 << 32);
    for shape in [
        huge.as_str(),
        "[9223372036854775808]",
        "[4611686018427387904,4]",
    ] {
        let error = error(&tensor("F64", shape, "[0,16]"), 16);
        assert!(matches!(error, FileError::Shape { .. }), "{error}");
    }
    let twice = format!("{},{}", &TWO[..TWO.len() - 1], &TWO[1..]);
    assert!(open_bytes(&raw(&twice, 34)).is_err());
    let empty_twice = r#"{"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
    assert!(matches!(
        error(empty_twice, 0),
        FileError::DuplicateTensor { .. }
    ));
}

#[test]
fn every_dtype_is_known_and_few_are_floats() {
    for (dtype, bits) in [
        ("BOOL", 8),
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F8_E4M3", 8),
        ("F8_E5M2", 8),
        ("F8_E8M0", 8),
        ("U8", 8),
        ("I8", 8),
        ("I16", 16),
        ("I32", 32),
        ("I64", 64),
        ("F64", 64),
    ] {
        let bytes = 2 * 8 * bits / 8;
        let json =
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":[2,8],"data_offsets":[0,{bytes}]}}}}"#);
        let folder = folder();
        let path = folder.path().join("x");
        fs::write(&path, raw(&json, bytes)).unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.info("t").unwrap().elements(), 16);
        assert_eq!(file.read_bytes("t").unwrap().len(), bytes);
        let error = file.read_f32("t").unwrap_err();
        assert!(matches!(error, FileError::Dtype { .. }));
        assert!(error.to_string().contains(dtype) && error.to_string().contains("BF16"));
    }
    // Rows of four-bit elements must fill whole bytes.
    let odd = r#"{"t":{"dtype":"F4","shape":[2,7],"data_offsets":[0,7]}}"#;
    assert!(matches!(
        open_bytes(&raw(odd, 7)),
        Err(FileError::Shape { .. })
    ));
}

#[test]
fn metadata_only() {
    let file = open_bytes(&raw(r#"{"__metadata__":{"format":"pt"}}  "#, 0)).unwrap();
    assert!(file.tensors().is_empty());
    assert_eq!(file.metadata()["format"], "pt");
    assert!(open_bytes(&raw("{}", 0)).unwrap().tensors().is_empty());
    assert!(matches!(
        open_bytes(&raw(r#"{"__metadata__":{"format":1}}"#, 0)),
        Err(FileError::HeaderJson { .. })
    ));
}

#[test]
fn values_are_exact() {
    let f16 = [0x3c00u16, 0x0001, 0xfbff, 0x7c00, 0x8000];
    let bf16 = [0x3f80u16, 0x0001, 0xff7f, 0x7f80, 0x8000];
    let bytes = |codes: &[u16]| {
        codes
            .iter()
            .flat_map(|c| c.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let tensor = |name: &str, dtype, bytes: Vec<u8>| TensorData {
        name: name.into(),
        dtype,
        shape: vec![5],
        bytes: bytes.into(),
    };
    let folder = folder();
    let path = folder.path().join("x");
    let f32s = [1.0, f32::MIN_POSITIVE / 4.0, f32::MAX, f32::INFINITY, -0.0];
    let tensors = [
        tensor("f16", Dtype::F16, bytes(&f16)),
        tensor("bf16", Dtype::BF16, bytes(&bf16)),
        TensorData::f32("f32", &[5], &f32s),
        TensorData::i32("i32", &[2], &[-1, i32::MAX]),
        TensorData {
            name: "i64".into(),
            dtype: Dtype::I64,
            shape: vec![2],
            bytes: [-1i64, 1 << 31]
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect(),
        },
    ];
    write(&path, &tensors).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let want = [1.0, 2f32.powi(-24), -65504.0, f32::INFINITY, -0.0];
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&file.read_f32("f16").unwrap()), bits(&want));
    let want = bf16.map(|c| f32::from_bits(u32::from(c) << 16));
    assert_eq!(bits(&file.read_f32("bf16").unwrap()), bits(&want));
    assert_eq!(bits(&file.read_f32("f32").unwrap()), bits(&f32s));
    assert_eq!(file.read_i32("i32").unwrap(), [-1, i32::MAX]);
    assert!(matches!(
        file.read_i32("i64"),
        Err(FileError::IntegerRange { index: 1, .. })
    ));
    assert!(matches!(file.read_i32("f32"), Err(FileError::Dtype { .. })));
}

/// Larger than the block in which values are converted.
#[test]
fn long_tensors() {
    let values: Vec<f32> = (0..600_001).map(|i| i as f32).collect();
    let folder = folder();
    let path = folder.path().join("x");
    write(&path, &[TensorData::f32("v", &[600_001], &values)]).unwrap();
    assert_eq!(
        TensorFile::open(&path).unwrap().read_f32("v").unwrap(),
        values
    );
}

#[test]
fn a_file_that_shrinks_while_open() {
    let folder = folder();
    let path = folder.path().join("x");
    fs::write(&path, raw(TWO, 34)).unwrap();
    let file = TensorFile::open(&path).unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(150)
        .unwrap();
    let error = file.read_f32("b").unwrap_err();
    assert!(
        matches!(error, FileError::Truncated { found: 150, .. }),
        "{error}"
    );
}

#[test]
fn paths_that_are_no_files() {
    let folder = folder();
    assert!(matches!(
        TensorFile::open(folder.path()),
        Err(FileError::NotAFile { .. })
    ));
    let none = folder.path().join("none");
    assert!(matches!(TensorFile::open(&none), Err(FileError::Io { .. })));
    // A pipe must not block.
    let pipe = folder.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: `name` is a terminated string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert!(matches!(
        TensorFile::open(pipe),
        Err(FileError::NotAFile { .. })
    ));
    assert!(matches!(
        Checkpoint::open(folder.path()),
        Err(CheckpointError::NotACheckpoint { .. })
    ));
}

#[test]
fn writing_replaces_whole_files_only() {
    let folder = folder();
    let path = folder.path().join("out.safetensors");
    let names = || -> Vec<_> {
        fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect()
    };
    write(&path, &[TensorData::f32("x", &[2], &[1.0, 2.0])]).unwrap();
    write(&path, &[TensorData::f32("x", &[1, 3], &[3.0, 4.0, 5.0])]).unwrap();
    let before = fs::read(&path).unwrap();
    assert_eq!(before.len() % 4, 0);

    // Shape and bytes disagree; a name twice: nothing is touched.
    assert!(write(&path, &[TensorData::f32("x", &[2], &[1.0])]).is_err());
    let x = TensorData::f32("x", &[1], &[1.0]);
    assert!(matches!(
        write(&path, &[x.clone(), x]),
        Err(FileError::DuplicateTensor { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names(), ["out.safetensors"]);

    // What is no file is left alone, and no temporary file stays.
    fs::create_dir_all(folder.path().join("taken/inside")).unwrap();
    let y = [TensorData::f32("y", &[0], &[])];
    assert!(matches!(
        write(folder.path().join("taken"), &y),
        Err(FileError::NotAFile { .. })
    ));
    assert_eq!(names().len(), 2);
    assert!(write(folder.path().join("absent/x"), &y).is_err());

    write(&path, &y).unwrap();
    assert!(
        TensorFile::open(&path)
            .unwrap()
            .read_f32("y")
            .unwrap()
            .is_empty()
    );
    assert_eq!(TensorFile::open(&path).unwrap().tensors().len(), 1);
}

#[test]
fn file_and_tensor_on_one_line() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    write(at("one"), &[TensorData::f32("x", &[1], &[1.0])]).unwrap();
    write(at("co:lon"), &[TensorData::f32("x", &[1], &[1.0])]).unwrap();
    let (a, b) = (
        TensorData::f32("a", &[1], &[1.0]),
        TensorData::f32("b.c", &[1], &[2.0]),
    );
    write(at("two"), &[a, b]).unwrap();

    let name = |spec: &str| TensorSpec::parse(spec).open().map(|(_, name)| name);
    assert_eq!(name(&at("one")).unwrap(), "x");
    assert_eq!(name(&at("co:lon")).unwrap(), "x");
    assert_eq!(name(&at("co:lon:x")).unwrap(), "x");
    assert_eq!(name(&at("two:b.c")).unwrap(), "b.c");
    let error = name(&at("two")).unwrap_err();
    assert!(matches!(error, FileError::AmbiguousTensor { .. }));
    assert!(error.to_string().contains("a, b.c"), "{error}");
    let error = name(&at("two:z")).unwrap_err();
    assert!(matches!(error, FileError::NoTensor { .. }));
    assert!(error.to_string().contains("`z`") && error.to_string().contains("a, b.c"));
    assert!(matches!(name(&at("none:x")), Err(FileError::Io { .. })));
    assert!(matches!(name(""), Err(FileError::Io { .. })));
}

/// Three shards of two tensors each, and an index over them.
fn sharded(folder: &Path) -> Vec<PathBuf> {
    fs::write(folder.join("config.json"), r#"{"model_type": "mixtral"}"#).unwrap();
    let mut map = Vec::new();
    let shards = (1..=3).map(|shard| {
        let file = format!("model-0000{shard}-of-00003.safetensors");
        let names = [format!("t{shard}.a"), format!("t{shard}.b")];
        let tensors = names
            .each_ref()
            .map(|name| TensorData::f32(name, &[1], &[1.5]));
        write(folder.join(&file), &tensors).unwrap();
        map.extend(names.map(|name| format!(r#""{name}": "{file}""#)));
        folder.join(file)
    });
    let shards = shards.collect();
    write_index(folder, &map.join(","));
    shards
}

fn write_index(folder: &Path, map: &str) {
    let json = format!(r#"{{"metadata": {{"total_size": 24.0}}, "weight_map": {{{map}}}}}"#);
    fs::write(folder.join("model.safetensors.index.json"), json).unwrap();
}

#[test]
fn shards() {
    let folder = folder();
    let shards = sharded(folder.path());
    let names = |path: &Path| {
        let checkpoint = Checkpoint::open(path).unwrap();
        checkpoint
            .tensors()
            .map(|(name, _)| name.to_owned())
            .collect::<Vec<_>>()
    };
    let want = ["t1.a", "t1.b", "t2.a", "t2.b", "t3.a", "t3.b"];
    assert_eq!(names(folder.path()), want);
    assert_eq!(
        names(&folder.path().join("model.safetensors.index.json")),
        want
    );
    assert_eq!(names(&shards[1]), want[2..4]);
}

#[test]
fn missing_shards_are_listed() {
    for gone in [&[1][..], &[2], &[0, 1, 2]] {
        let folder = folder();
        let shards = sharded(folder.path());
        for &shard in gone {
            fs::remove_file(&shards[shard]).unwrap();
        }
        match Checkpoint::open(folder.path()) {
            Err(CheckpointError::MissingShards { missing, .. }) => {
                let want: Vec<_> = gone
                    .iter()
                    .map(|&s| shards[s].file_name().unwrap().to_str().unwrap())
                    .collect();
                assert_eq!(missing.first, want);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn index_and_shards_that_disagree() {
    let folder = folder();
    let shards = sharded(folder.path());
    let shard = shards[0].file_name().unwrap().to_str().unwrap();
    let open = || Checkpoint::open(folder.path()).unwrap_err();

    write_index(
        folder.path(),
        &format!(r#""t1.a": "{shard}", "ghost": "{shard}""#),
    );
    let error = open();
    assert!(matches!(error, CheckpointError::NotInShard { .. }));
    assert!(
        error.to_string().contains(&format!("ghost ({shard})")),
        "{error}"
    );

    for name in [
        "../x.safetensors",
        "/etc/passwd",
        "a/../b",
        "sub/x",
        "..",
        ".",
        "",
        "./x",
    ] {
        write_index(folder.path(), &format!(r#""t1.a": "{name}""#));
        let error = open();
        assert!(
            matches!(error, CheckpointError::ShardName { .. }),
            "{name}: {error}"
        );
    }

    fs::copy(&shards[0], folder.path().join("copy")).unwrap();
    write_index(
        folder.path(),
        &format!(r#""t1.a": "{shard}", "t1.b": "copy""#),
    );
    let error = open();
    assert!(
        matches!(error, CheckpointError::DuplicateTensor { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("t1.a"), "{error}");

    for index in [
        "",
        "[]",
        "{}",
        r#"{"weight_map": []}"#,
        r#"{"weight_map": {"a": 1}}"#,
    ] {
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(matches!(open(), CheckpointError::Index { .. }), "{index}");
    }
    fs::write(folder.path().join("config.json"), "{").unwrap();
    assert!(matches!(open(), CheckpointError::Config { .. }));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(open().to_string().contains("config.json"));
}

/// A sparse file can back any size: what memory does not hold is an error, not an abort.
#[test]
fn a_tensor_larger_than_memory_is_an_error() {
    let bytes = (1u64 << 31) * 512;
    let json = format!(
        r#"{{"x":{{"dtype":"F32","shape":[{},128],"data_offsets":[0,{bytes}]}}}}"#,
        1u64 << 31
    );
    let folder = folder();
    let path = folder.path().join("sparse.safetensors");
    let header = raw(&json, 0);
    fs::write(&path, &header).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(header.len() as u64 + bytes).unwrap();
    let file = TensorFile::open(&path).unwrap();
    for error in [
        file.read_f32("x").unwrap_err(),
        file.read_bytes("x").unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(
            text.contains("x needs") && text.contains("memory"),
            "{text}"
        );
    }
}

/// What a header repeats without end is cut off, also in the error's text.
#[test]
fn endless_shapes_names_and_metadata_are_refused() {
    let shape = format!(
        r#"{{"a":{{"dtype":"F32","shape":[0{}],"data_offsets":[0,0]}}}}"#,
        ",1".repeat(1 << 20)
    );
    let name = format!(
        r#"{{"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}}}"#,
        "n".repeat(1 << 20)
    );
    let dtype = format!(
        r#"{{"a":{{"dtype":"{}","shape":[0],"data_offsets":[0,0]}}}}"#,
        "F".repeat(1 << 20)
    );
    let entries: Vec<String> = (0..70_000).map(|i| format!(r#""{i}":"x""#)).collect();
    let metadata = format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(","));
    for json in [shape, name, dtype, metadata] {
        let error = open_bytes(&raw(&json, 0)).unwrap_err().to_string();
        assert!(error.len() < 1000, "{} bytes of error", error.len());
    }
}
