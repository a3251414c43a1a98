//! Faults of files that hold models and profiles.

use std::path::PathBuf;

use super::{RatesError, ResidencyError};
use crate::checkpoint::FileError;

/// A model or profile that cannot be loaded or saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DispatchError {
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not what was saved.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where it stops making sense.
        source: serde_json::Error,
    },
    /// The file is of another version of this library.
    #[error("{}: version {found} of the file, expected {expected}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version that it states.
        found: u32,
        /// Version that can be read.
        expected: u32,
    },
    /// A rate that no machine has.
    #[error(transparent)]
    Rates(#[from] RatesError),
    /// A residency policy that cannot be.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
}

/// Largest file that is read: a model or a profile has some kilobytes.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a value from a JSON file.
pub(super) fn load<T: serde::de::DeserializeOwned>(
    path: &std::path::Path,
) -> Result<T, DispatchError> {
    use std::io::Read;
    let read = || {
        let mut text = Vec::new();
        let file = std::fs::File::open(path)?;
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|source| FileError::Io {
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| DispatchError::Json {
        path: path.into(),
        source,
    })
}

/// Writes a value as a JSON file, which appears whole or not at all.
pub(super) fn save<T: serde::Serialize>(
    path: &std::path::Path,
    value: &T,
) -> Result<(), DispatchError> {
    let text = serde_json::to_string_pretty(value).map_err(|source| DispatchError::Json {
        path: path.into(),
        source,
    })?;
    Ok(crate::checkpoint::replace(path, |out| {
        out.write_all(text.as_bytes())
    })?)
}
