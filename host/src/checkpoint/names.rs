//! Accounting of a layer's tensors: each is used exactly once or reported.

use super::error::{CheckpointError, FileError, NameList};
use super::file::TensorFile;
use super::float::Float;
use super::shards::Checkpoint;
use std::collections::BTreeMap;

/// Where the MoE block of a layer may be; the first two are the usual ones, Mixtral has a
/// name of its own for it, and either may be saved without the outer model.
const ROOTS: [&str; 2] = ["model.layers.", "layers."];
const BLOCKS: [&str; 2] = ["mlp.", "block_sparse_moe."];

/// Tensors that other software needs and a layer may hold without harm: scales for
/// quantising activations do not change the weights.
const IGNORED: &str = ".input_scale";

/// A float tensor of the layer, its shape checked.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    file: &'a TensorFile,
    name: &'a str,
    pub(super) float: Float,
}

impl Tensor<'_> {
    pub(super) fn read_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        Ok(self.file.read_f32(self.name)?)
    }

    pub(super) fn read_bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        Ok(self.file.read_bytes(self.name)?)
    }
}

/// The tensors of one MoE block that have not been used yet.
pub(super) struct Claims<'a> {
    layer: usize,
    prefix: String,
    /// By name without the prefix.
    left: BTreeMap<&'a str, (&'a str, &'a TensorFile)>,
    missing: NameList,
}

impl<'a> Claims<'a> {
    /// All tensors of layer `layer`'s block.
    pub(super) fn of_layer(
        checkpoint: &'a Checkpoint,
        layer: usize,
    ) -> Result<Self, CheckpointError> {
        let prefixes: Vec<String> = ROOTS
            .iter()
            .flat_map(|root| BLOCKS.map(|block| format!("{root}{layer}.{block}")))
            .collect();
        let mut found = prefixes
            .iter()
            .filter(|prefix| checkpoint.has_prefix(prefix))
            .collect::<Vec<_>>();
        let prefix = match (found.pop(), found.is_empty()) {
            (None, _) => {
                let tried = prefixes.into_iter().collect();
                return Err(CheckpointError::NoLayer { layer, tried });
            }
            (Some(last), false) => {
                found.push(last);
                let found = found.into_iter().cloned().collect();
                return Err(CheckpointError::AmbiguousLayer { layer, found });
            }
            (Some(prefix), true) => prefix.clone(),
        };
        let left = checkpoint
            .with_prefix(&prefix)
            .map(|(name, file)| (&name[prefix.len()..], (name, file)))
            .collect();
        Ok(Self {
            layer,
            prefix,
            left,
            missing: NameList::default(),
        })
    }

    /// The names, without prefix, of the tensors not used yet.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.left.keys().copied()
    }

    /// Whether there is a tensor `name` that has not been used yet.
    pub(super) fn has(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    /// Uses up tensor `name`; notes it as missing and returns nothing if it is not there.
    ///
    /// # Errors
    /// Another shape, whose dimensions `meaning` names, or a dtype that is not a float.
    pub(super) fn take(
        &mut self,
        name: &str,
        shape: &[usize],
        meaning: &'static str,
    ) -> Result<Option<Tensor<'a>>, CheckpointError> {
        let Some((name, file)) = self.left.remove(name) else {
            self.missing.push(format!("{}{name}", self.prefix));
            return Ok(None);
        };
        let info = file.info(name)?;
        if info.shape != shape {
            return Err(CheckpointError::Shape {
                tensor: name.to_owned(),
                found: info.shape.clone(),
                expected: shape.to_vec(),
                meaning,
            });
        }
        let float = Float::of(info.dtype)
            .ok_or_else(|| -> FileError { file.dtype_error(name, info.dtype, Float::SUPPORTED) })?;
        Ok(Some(Tensor { file, name, float }))
    }

    /// # Errors
    /// Tensors that were missing, and tensors left that nothing has used.
    pub(super) fn finish(self) -> Result<(), CheckpointError> {
        let unexpected: NameList = self
            .left
            .values()
            .map(|&(name, _)| name)
            .filter(|name| !name.ends_with(IGNORED))
            .collect();
        let missing = self.missing;
        match missing.is_empty() && unexpected.is_empty() {
            true => Ok(()),
            false => Err(CheckpointError::Tensors {
                layer: self.layer,
                missing,
                unexpected,
            }),
        }
    }
}
