//! What can be wrong with a checkpoint.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::config::ModelType;
use crate::moe::routing::RoutingError;
use thiserror::Error;

/// Something else under the name of a safetensors file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignFile {
    /// A zip archive, as `torch.save` writes.
    Zip,
    /// A bare Python pickle.
    Pickle,
    /// GGUF.
    Gguf,
    /// A web page, often the error page of a failed download.
    Html,
    /// A JSON document.
    Json,
    /// The text that stands for a file in a repository cloned without Git LFS.
    GitLfsPointer,
}

impl fmt::Display for ForeignFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zip => "a zip archive (a PyTorch .bin or .pt file?): convert it to safetensors",
            Self::Pickle => "a Python pickle: convert it to safetensors",
            Self::Gguf => "a GGUF file: use the safetensors release of the model",
            Self::Html => "an HTML page, perhaps a failed download: download the file again",
            Self::Json => "a JSON document",
            Self::GitLfsPointer => "a Git LFS pointer: fetch the file itself with `git lfs pull`",
        })
    }
}

/// The beginning of a text from a file, without control characters.
fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

/// A safetensors file that cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// A tensor larger than the memory there is.
    #[error(transparent)]
    Memory(#[from] crate::system::MemoryShort),
    /// A folder, pipe or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Another kind of file.
    #[error("{}: not a safetensors file but {kind}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        kind: ForeignFile,
    },
    /// The file ends before the data that it announces, or ended while being read.
    #[error("{}: truncated: {expected} bytes expected, {found} found", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the file should have, as far as known.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The file goes on after the last tensor.
    #[error(
        "{}: {} bytes follow the last tensor: {expected} bytes expected, {found} found",
        path.display(), found - expected
    )]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// Bytes that the file should have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A header length that no header has.
    #[error("{}: header of {length} bytes is shorter than the shortest header, `{{}}`", path.display())]
    HeaderTooSmall {
        /// The file.
        path: PathBuf,
        /// Length that the file states.
        length: u64,
    },
    /// A header length above the format's limit.
    #[error("{}: header of {length} bytes is above the format's limit of {limit}", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// Length that the file states.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// The header is not the JSON that the format prescribes.
    #[error("{}: bad header: {message}", path.display())]
    HeaderJson {
        /// The file.
        path: PathBuf,
        /// Why and where.
        message: String,
    },
    /// A name occurs twice.
    #[error("{}: tensor `{tensor}` occurs twice", path.display())]
    DuplicateTensor {
        /// The file.
        path: PathBuf,
        /// The name.
        tensor: String,
    },
    /// An element type that the format does not know.
    #[error("{}: tensor `{tensor}` has the unknown dtype `{dtype}`", path.display())]
    UnknownDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// Rows of a packed format that do not fill whole bytes, or a size beyond 64 bits.
    #[error("{}: tensor `{tensor}`: {dtype} of shape {shape:?} has rows that do not fill whole bytes, or more bytes than 64 bits count", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Shape and dtype do not give the length that the offsets do.
    #[error(
        "{}: tensor `{tensor}`: {dtype} of shape {shape:?} needs {expected} bytes, its offsets span {found}",
        path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes by shape and dtype.
        expected: u64,
        /// Bytes by the offsets.
        found: u64,
    },
    /// Tensors that overlap, leave a gap or end before they start.
    #[error(
        "{}: tensor `{tensor}` lies at {start}..{end} of the data but the one before ends at {expected}",
        path.display()
    )]
    Offsets {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// First byte, from the start of the data.
        start: u64,
        /// Byte after the last.
        end: u64,
        /// Where the tensor should start.
        expected: u64,
    },
    /// No tensor of that name.
    #[error("{}: no tensor `{tensor}`; there are: {}", path.display(), available)]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name asked for.
        tensor: String,
        /// The names there are.
        available: NameList,
    },
    /// No name given and not exactly one tensor.
    #[error("{}: name one tensor as {}:NAME; there are: {}", path.display(), path.display(), available)]
    AmbiguousTensor {
        /// The file.
        path: PathBuf,
        /// The names there are.
        available: NameList,
    },
    /// A dtype that cannot be read as what was asked for.
    #[error("{}: tensor `{tensor}` is {dtype}; it can be read from {supported}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// The dtypes that can be read.
        supported: &'static str,
    },
    /// A range of bytes beyond the end of a tensor.
    #[error("{}: tensor `{tensor}` has {bytes} bytes, asked for were bytes up to {end}", path.display())]
    Range {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Byte after the last one asked for.
        end: usize,
        /// Bytes of the tensor.
        bytes: usize,
    },
    /// An integer outside of i32.
    #[error("{}: tensor `{tensor}`, element {index}: {value} does not fit 32 bits", path.display())]
    IntegerRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Position of the element.
        index: usize,
        /// The element.
        value: i64,
    },
}

impl FileError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

/// A model description that cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("not a JSON object: {0}")]
    Json(String),
    /// `model_type` is missing.
    #[error("no `model_type`; supported: {}", ModelType::list())]
    NoModelType,
    /// A model family without support.
    #[error("model_type `{}` is not supported; supported: {list}", shown(.0), list = ModelType::list())]
    UnknownModelType(String),
    /// A value of the wrong type or out of its range.
    #[error("`{key}` is {found}, expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// Two spellings of one setting that differ.
    #[error("`{first}` and `{second}` mean the same but differ")]
    Conflict {
        /// One spelling.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// Sizes that multiply beyond the address space.
    #[error("{experts} experts of {intermediate} x {hidden} are more than memory can address")]
    TooLarge {
        /// Experts E.
        experts: usize,
        /// Expert width I.
        intermediate: usize,
        /// Model width H.
        hidden: usize,
    },
}

/// A checkpoint that cannot be opened or does not hold the layer asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// One of its files.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its config.json.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// Neither `model.safetensors` nor an index.
    #[error("{}: neither model.safetensors nor model.safetensors.index.json in this folder", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
    },
    /// A JSON file that is too large to be one of ours.
    #[error("{}: {found} bytes are above the limit of {limit} for this file", path.display())]
    JsonTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The index is not what the format prescribes.
    #[error("{}: bad index: {message}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// Why and where.
        message: String,
    },
    /// A shard name that leads out of the checkpoint's folder.
    #[error("{}: shard name `{name}` is not a plain file name", path.display())]
    ShardName {
        /// The index.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// Shards that are not there.
    #[error("{}: missing {missing}", path.display())]
    MissingShards {
        /// The folder.
        path: PathBuf,
        /// Their names.
        missing: NameList,
    },
    /// Tensors that the index places in a shard that does not hold them.
    #[error("{}: not in the shards that the index names: {tensors}", path.display())]
    NotInShard {
        /// The index.
        path: PathBuf,
        /// The tensors and their shards.
        tensors: NameList,
    },
    /// A tensor in two shards.
    #[error("tensor `{tensor}` is both in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The name.
        tensor: String,
        /// A shard that holds it.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
    },
    /// A checkpoint that is quantised in a way that cannot be read.
    #[error(
        "quantization_config names `{method}`, which is not supported; supported: {}",
        QUANTISATIONS.join(", ")
    )]
    Quantised {
        /// Its method.
        method: String,
    },
    /// A scale that is not a finite number.
    #[error("tensor `{tensor}`, element {index}: scale {found} is not usable{hint}")]
    Scale {
        /// The tensor of scales.
        tensor: String,
        /// Position of the scale.
        index: usize,
        /// The scale.
        found: String,
        /// What to do, or nothing.
        hint: &'static str,
    },
    /// A packed tensor whose declared shape is not that of the matrix.
    #[error("tensor `{tensor}` says {found:?}, the matrix is {expected:?}")]
    PackedShape {
        /// The tensor of the shape.
        tensor: String,
        /// What it says.
        found: Vec<i32>,
        /// Rows and columns by config.json.
        expected: [usize; 2],
    },
    /// Rows that groups of columns do not divide.
    #[error("tensor `{tensor}`: rows of {columns} columns are not groups of {group}")]
    Groups {
        /// The tensor.
        tensor: String,
        /// Columns of a row.
        columns: usize,
        /// Columns that share a byte, a word or a scale.
        group: usize,
    },
    /// Quantised experts whose rows lie across the tensor.
    #[error(
        "tensor `{tensor}`: {dtype} experts can be read as (outputs, inputs) only, not transposed"
    )]
    Transposed {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// No such layer.
    #[error("layer {layer} is out of range: {model_type} has layers 0..{layers}")]
    LayerRange {
        /// The layer asked for.
        layer: usize,
        /// The model's type.
        model_type: ModelType,
        /// How many layers the model has.
        layers: usize,
    },
    /// A layer with an ordinary feed-forward block.
    #[error("layer {layer} is dense, not a Mixture of Experts ({reason})")]
    DenseLayer {
        /// The layer asked for.
        layer: usize,
        /// The setting that says so.
        reason: String,
    },
    /// No tensor of the layer's MoE block.
    #[error("layer {layer}: no tensor under {tried}")]
    NoLayer {
        /// The layer asked for.
        layer: usize,
        /// Prefixes looked for.
        tried: NameList,
    },
    /// The block is there under two prefixes.
    #[error("layer {layer}: tensors under several prefixes: {found}")]
    AmbiguousLayer {
        /// The layer asked for.
        layer: usize,
        /// The prefixes.
        found: NameList,
    },
    /// Tensors that are missing or that nothing uses.
    #[error("layer {layer}: missing {missing}; not understood: {unexpected}")]
    Tensors {
        /// The layer asked for.
        layer: usize,
        /// Tensors that the layer needs.
        missing: NameList,
        /// Tensors of the layer that have no known meaning.
        unexpected: NameList,
    },
    /// A shape that contradicts config.json.
    #[error("tensor `{tensor}` has shape {found:?}, but config.json gives {expected:?} {meaning}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape by config.json.
        expected: Vec<usize>,
        /// The names of the dimensions.
        meaning: &'static str,
    },
    /// Router settings that do not work.
    #[error("layer {layer}: {source}")]
    Router {
        /// The layer asked for.
        layer: usize,
        /// What is wrong.
        source: RoutingError,
    },
}

/// Values of `quant_method` of checkpoints that can be read; what each tensor holds is told by its
/// dtype and the scales beside it.
pub(super) const QUANTISATIONS: [&str; 6] = [
    "fp8",
    "mxfp4",
    "modelopt",
    "modelopt_fp4",
    "nvfp4",
    "compressed-tensors",
];

impl CheckpointError {
    pub(super) fn scale(tensor: &str, index: usize, found: f32) -> Self {
        Self::Scale {
            tensor: tensor.to_owned(),
            index,
            found: found.to_string(),
            hint: "",
        }
    }
}

/// Names in a message: how many and the first few.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameList {
    /// How many there are.
    pub count: usize,
    /// The first ones.
    pub first: Vec<String>,
}

impl NameList {
    /// Names kept for the message.
    const SHOWN: usize = 8;

    /// Whether there is no name.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a name.
    pub fn push(&mut self, name: impl Into<String>) {
        self.count += 1;
        if self.first.len() < Self::SHOWN {
            self.first.push(name.into());
        }
    }
}

impl<S: Into<String>> FromIterator<S> for NameList {
    fn from_iter<I: IntoIterator<Item = S>>(names: I) -> Self {
        let mut list = Self::default();
        for name in names {
            list.push(name);
        }
        list
    }
}

impl fmt::Display for NameList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        if self.count > 1 {
            write!(f, "{}: ", self.count)?;
        }
        f.write_str(&self.first.join(", "))?;
        match self.count - self.first.len() {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}
