//! Accounting of a layer's tensors: each is used exactly once or reported.

use super::error::{CheckpointError, NameList};
use super::file::TensorFile;
use super::float::Float;
use super::header::TensorInfo;
use super::shards::Checkpoint;
use std::collections::BTreeMap;

/// Where the MoE block of a layer may be; the first two are the usual ones, Mixtral has a
/// name of its own for it, and either may be saved without the outer model.
const ROOTS: [&str; 2] = ["model.layers.", "layers."];
const BLOCKS: [&str; 2] = ["mlp.", "block_sparse_moe."];

/// Tensors that other software needs and a layer may hold without harm: scales for
/// quantising activations do not change the weights.
const IGNORED: [&str; 2] = [".input_scale", ".input_global_scale"];

/// A tensor of the layer, its shape checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawTensor<'a> {
    pub(super) file: &'a TensorFile,
    pub(super) name: &'a str,
}

/// A float tensor of the layer, its shape checked.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    file: &'a TensorFile,
    name: &'a str,
}

impl Tensor<'_> {
    pub(super) fn read_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        Ok(self.file.read_f32(self.name)?)
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

    /// What the tensors' names start with.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The names, without prefix, of the tensors not used yet.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.left.keys().copied()
    }

    /// Whether there is a tensor `name` that has not been used yet.
    pub(super) fn has(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    /// What the file says about a tensor that has not been used yet.
    pub(super) fn info(&self, name: &str) -> Option<&'a TensorInfo> {
        let (name, file) = self.left.get(name)?;
        file.tensors().get(*name)
    }

    /// Uses up float tensor `name`; notes it as missing and returns nothing if it is not there.
    ///
    /// # Errors
    /// Another shape, whose dimensions `meaning` names, or a dtype that is not a float.
    pub(super) fn take(
        &mut self,
        name: &str,
        shape: &[usize],
        meaning: &'static str,
    ) -> Result<Option<Tensor<'a>>, CheckpointError> {
        let Some(raw) = self.take_raw(name, &[shape], meaning)? else {
            return Ok(None);
        };
        let RawTensor { file, name } = raw;
        let dtype = file.info(name)?.dtype;
        if Float::of(dtype).is_none() {
            return Err(file.dtype_error(name, dtype, Float::SUPPORTED).into());
        }
        Ok(Some(Tensor { file, name }))
    }

    /// Uses up tensor `name` of any dtype; notes it as missing and returns nothing if it is not
    /// there.
    ///
    /// # Errors
    /// None of `shapes`; the first, whose dimensions `meaning` names, is reported.
    pub(super) fn take_raw(
        &mut self,
        name: &str,
        shapes: &[&[usize]],
        meaning: &'static str,
    ) -> Result<Option<RawTensor<'a>>, CheckpointError> {
        let Some((name, file)) = self.left.remove(name) else {
            self.missing.push(format!("{}{name}", self.prefix));
            return Ok(None);
        };
        let info = file.info(name)?;
        if !shapes.contains(&info.shape.as_slice()) {
            return Err(CheckpointError::Shape {
                tensor: name.to_owned(),
                found: info.shape.clone(),
                expected: shapes[0].to_vec(),
                meaning,
            });
        }
        Ok(Some(RawTensor { file, name }))
    }

    /// # Errors
    /// Tensors that were missing, and tensors left that nothing has used.
    pub(super) fn finish(self) -> Result<(), CheckpointError> {
        let unexpected: NameList = self
            .left
            .values()
            .map(|&(name, _)| name)
            .filter(|name| !IGNORED.iter().any(|end| name.ends_with(end)))
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
