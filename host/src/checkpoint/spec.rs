//! `FILE[:TENSOR]`, how a tensor is named on the command line.

use super::error::FileError;
use super::file::TensorFile;
use std::path::{Path, PathBuf};

/// A file and perhaps the name of a tensor in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The file.
    pub path: PathBuf,
    /// The tensor; without it the file must hold exactly one.
    pub tensor: Option<String>,
}

impl TensorSpec {
    /// Splits `text` at its last colon, unless all of `text` is the path of a file.
    pub fn parse(text: &str) -> Self {
        match text.rsplit_once(':') {
            Some((path, tensor)) if !tensor.is_empty() && !Path::new(text).exists() => Self {
                path: path.into(),
                tensor: Some(tensor.to_owned()),
            },
            _ => Self {
                path: text.into(),
                tensor: None,
            },
        }
    }

    /// Opens the file and settles on a tensor of it.
    ///
    /// # Errors
    /// Those of [`TensorFile::open`]; no tensor of that name; without a name, not exactly
    /// one tensor. The last two list the names there are.
    pub fn open(&self) -> Result<(TensorFile, String), FileError> {
        let file = TensorFile::open(&self.path)?;
        let name = match &self.tensor {
            Some(name) => {
                file.info(name)?;
                name.clone()
            }
            None => {
                let mut names = file.tensors().keys();
                match (names.next(), names.next()) {
                    (Some(name), None) => name.clone(),
                    _ => {
                        let (path, available) = (self.path.clone(), file.names());
                        return Err(FileError::AmbiguousTensor { path, available });
                    }
                }
            }
        };
        Ok((file, name))
    }
}
