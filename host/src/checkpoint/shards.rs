//! A model's folder: config.json and one or many safetensors files.

use super::config::ModelConfig;
use super::error::{CheckpointError, FileError, NameList};
use super::file::TensorFile;
use super::header::TensorInfo;
use super::layer::MoeLayer;
use super::plan::FusedLayout;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Far above any real config.json.
const MAX_CONFIG: u64 = 16 << 20;
/// An index line takes about 100 bytes; the largest known model has 1.3 million tensors.
const MAX_INDEX: u64 = 1 << 30;

/// An open checkpoint in the Hugging Face layout.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    config: ModelConfig,
    files: Vec<TensorFile>,
    /// Each tensor's file.
    tensors: BTreeMap<String, usize>,
    fused: Option<FusedLayout>,
    zero_nan_blocks: bool,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder, or the one that a safetensors file or an index
    /// (`*.index.json`) with a config.json beside it makes up.
    ///
    /// Reads config.json, the index and the header of every shard, but no tensor. In a
    /// folder `model.safetensors` goes before `model.safetensors.index.json`.
    ///
    /// # Errors
    /// Files that are missing or malformed, tensors that are not where the index says, or
    /// that are in two shards.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let about = std::fs::metadata(path).map_err(FileError::io(path))?;
        let (folder, main) = if about.is_dir() {
            let main = [SINGLE, INDEX]
                .into_iter()
                .map(|name| path.join(name))
                .find(|p| p.exists());
            let not_found = || CheckpointError::NotACheckpoint { path: path.into() };
            (path.to_path_buf(), main.ok_or_else(not_found)?)
        } else {
            (
                path.parent().unwrap_or(Path::new("")).to_path_buf(),
                path.to_path_buf(),
            )
        };

        let config_path = folder.join("config.json");
        let config =
            ModelConfig::parse(&read_limited(&config_path, MAX_CONFIG)?).map_err(|source| {
                CheckpointError::Config {
                    path: config_path,
                    source,
                }
            })?;
        let files = if main.extension().is_some_and(|e| e == "json") {
            open_shards(&folder, &main)?
        } else {
            vec![TensorFile::open(main)?]
        };
        let tensors = place(&files)?;
        Ok(Self {
            folder,
            config,
            files,
            tensors,
            fused: None,
            zero_nan_blocks: false,
        })
    }

    /// Reads expert tensors of three dimensions in `layout` instead of the family's.
    ///
    /// Such tensors do not say which dimension is which, and with H = 2 I not even their
    /// shape tells; nothing is guessed.
    pub fn with_fused_layout(mut self, layout: FusedLayout) -> Self {
        self.fused = Some(layout);
        self
    }

    /// Takes NVFP4 blocks whose scale is NaN and whose codes are all zero for zeros, which some
    /// converters write for them. Otherwise they are an error, as a NaN scale of other codes
    /// always is.
    pub fn with_zero_nan_blocks(mut self) -> Self {
        self.zero_nan_blocks = true;
        self
    }

    pub(super) fn zero_nan_blocks(&self) -> bool {
        self.zero_nan_blocks
    }

    /// The layout of expert tensors of three dimensions, if it is not the family's.
    pub(super) fn fused_layout(&self) -> Option<FusedLayout> {
        self.fused
    }

    /// The model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The folder of its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder, `.` if the checkpoint was named as a file of the current one.
    pub(crate) fn folder_or_here(&self) -> &Path {
        match self.folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => &self.folder,
        }
    }

    /// The file that holds a tensor.
    ///
    /// # Errors
    /// No such tensor.
    pub fn file_of(&self, tensor: &str) -> Result<&TensorFile, FileError> {
        match self.tensors.get(tensor) {
            Some(&file) => Ok(&self.files[file]),
            None => Err(FileError::NoTensor {
                path: self.folder.clone(),
                tensor: tensor.to_owned(),
                available: self.tensors.keys().cloned().collect(),
            }),
        }
    }

    /// How many files of tensors it has.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// All tensors by name, ascending.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors
            .iter()
            .filter_map(|(name, &file)| Some((&**name, self.files[file].tensors().get(name)?)))
    }

    /// Whether a tensor's name starts with `prefix`.
    pub(super) fn has_prefix(&self, prefix: &str) -> bool {
        self.with_prefix(prefix).next().is_some()
    }

    /// Tensors whose names start with `prefix`, with their files.
    pub(super) fn with_prefix<'a>(
        &'a self,
        prefix: &str,
    ) -> impl Iterator<Item = (&'a str, &'a TensorFile)> {
        self.tensors
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(move |(name, _)| name.starts_with(prefix))
            .map(|(name, &file)| (&**name, &self.files[file]))
    }

    /// Reads MoE layer `layer`: checks that the checkpoint is one that can be used, that
    /// all tensors of the block are there, understood and of the right shape, then reads
    /// them.
    ///
    /// The result holds the layer's tensors once, as stored.
    ///
    /// # Errors
    /// Unknown ways of quantising, scales that are not numbers, layers out of range or dense, tensors that are missing, not
    /// understood or of another shape than config.json says, files that cannot be read.
    pub fn moe_layer(&self, layer: usize) -> Result<MoeLayer, CheckpointError> {
        MoeLayer::load(self, layer, self.fused)
    }
}

fn open_shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } =
        serde_json::from_slice(&read_limited(index, MAX_INDEX)?).map_err(|err| {
            CheckpointError::Index {
                path: index.into(),
                message: err.to_string(),
            }
        })?;

    let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    for &name in &names {
        let mut parts = Path::new(name).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None)
            if part == name);
        if !plain {
            let (path, name) = (index.into(), name.to_owned());
            return Err(CheckpointError::ShardName { path, name });
        }
    }
    let missing: NameList = names
        .iter()
        .copied()
        .filter(|name| !folder.join(name).exists())
        .collect();
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards {
            path: folder.into(),
            missing,
        });
    }

    let mut files = BTreeMap::new();
    for &name in &names {
        files.insert(name, TensorFile::open(folder.join(name))?);
    }
    let tensors: NameList = weight_map
        .iter()
        .filter(|(tensor, shard)| {
            !files
                .get(shard.as_str())
                .is_some_and(|file| file.tensors().contains_key(*tensor))
        })
        .map(|(tensor, shard)| format!("{tensor} ({shard})"))
        .collect();
    if !tensors.is_empty() {
        return Err(CheckpointError::NotInShard {
            path: index.into(),
            tensors,
        });
    }
    Ok(files.into_values().collect())
}

/// The file of each tensor.
fn place(files: &[TensorFile]) -> Result<BTreeMap<String, usize>, CheckpointError> {
    let mut tensors = BTreeMap::new();
    for (i, file) in files.iter().enumerate() {
        for tensor in file.tensors().keys() {
            if let Some(first) = tensors.insert(tensor.clone(), i) {
                return Err(CheckpointError::DuplicateTensor {
                    tensor: tensor.clone(),
                    first: files[first].path().into(),
                    second: file.path().into(),
                });
            }
        }
    }
    Ok(tensors)
}

/// The whole of a JSON file of at most `limit` bytes.
fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let about = std::fs::metadata(path).map_err(FileError::io(path))?;
    if !about.is_file() {
        return Err(FileError::NotAFile { path: path.into() }.into());
    }
    if about.len() > limit {
        return Err(CheckpointError::JsonTooLarge {
            path: path.into(),
            found: about.len(),
            limit,
        });
    }
    let read = |path| -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(
            &mut io::Read::take(std::fs::File::open(path)?, limit),
            &mut bytes,
        )?;
        Ok(bytes)
    };
    Ok(read(path).map_err(FileError::io(path))?)
}
