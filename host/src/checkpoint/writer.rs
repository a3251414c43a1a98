//! Writing a safetensors file piece by piece, from several threads.
//!
//! Names and shapes are known beforehand, so the header is written first and every tensor has its
//! place: pieces may come in any order, and nothing but them is in memory. The file has a temporary
//! name until all of it is there and on disk.

use super::error::FileError;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct TensorShape {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// A file that is being written.
#[derive(Debug)]
pub struct TensorWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    /// First byte and length of each tensor.
    places: HashMap<String, (u64, u64)>,
    total: u64,
    written: AtomicU64,
    finished: bool,
}

impl TensorWriter {
    /// Starts the file that will be `path`, with room for `tensors`.
    ///
    /// # Errors
    /// Names that occur twice, sizes that do not fit, and whatever the operating system refuses.
    pub fn create(path: impl AsRef<Path>, tensors: &[TensorShape]) -> Result<Self, FileError> {
        let path = path.as_ref().to_path_buf();
        let mut order: Vec<&TensorShape> = tensors.iter().collect();
        // Widest elements first, so that each tensor is aligned to its own elements.
        order.sort_by(|a, b| {
            let widths = b.dtype.bitsize().cmp(&a.dtype.bitsize());
            widths.then_with(|| a.name.cmp(&b.name))
        });
        let bad = |message: String| FileError::HeaderJson {
            path: path.clone(),
            message,
        };
        let mut infos = Vec::with_capacity(order.len());
        let mut end = 0usize;
        for tensor in &order {
            let elements = tensor
                .shape
                .iter()
                .try_fold(tensor.dtype.bitsize(), |n, &d| n.checked_mul(d));
            let bits = elements.ok_or_else(|| bad(format!("{} is too large", tensor.name)))?;
            let start = end;
            end += bits.div_ceil(8);
            let info = TensorInfo {
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                data_offsets: (start, end),
            };
            infos.push((tensor.name.clone(), info));
        }
        let mut places = HashMap::with_capacity(infos.len());
        for (name, info) in &infos {
            let (start, end) = info.data_offsets;
            let place = (start as u64, (end - start) as u64);
            if places.insert(name.clone(), place).is_some() {
                let tensor = name.clone();
                return Err(FileError::DuplicateTensor { path, tensor });
            }
        }
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let metadata = Metadata::new(Some(metadata.into_iter().collect()), infos)
            .map_err(|err| bad(err.to_string()))?;
        let mut json = serde_json::to_vec(&metadata).map_err(|err| bad(err.to_string()))?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let data = 8 + json.len() as u64;
        for place in places.values_mut() {
            place.0 += data;
        }

        let temporary = temporary_name(&path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(FileError::io(&temporary))?;
        let writer = Self {
            total: end as u64,
            path,
            temporary,
            file,
            places,
            written: AtomicU64::new(0),
            finished: false,
        };
        let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        writer
            .file
            .write_all_at(&header, 0)
            .map_err(FileError::io(&writer.path))?;
        Ok(writer)
    }

    fn place(&self, name: &str, start: usize, len: usize) -> Result<u64, FileError> {
        let (first, bytes) = *self.places.get(name).ok_or_else(|| FileError::NoTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            available: self.places.keys().cloned().collect(),
        })?;
        match start.checked_add(len) {
            Some(end) if end as u64 <= bytes => Ok(first + start as u64),
            end => Err(FileError::Range {
                path: self.path.clone(),
                tensor: name.to_owned(),
                end: end.unwrap_or(usize::MAX),
                bytes: bytes as usize,
            }),
        }
    }

    /// Writes bytes `start..` of a tensor. Each byte is to be written once.
    ///
    /// # Errors
    /// No such tensor or place, or the operating system refuses.
    pub fn put(&self, name: &str, start: usize, bytes: &[u8]) -> Result<(), FileError> {
        let at = self.place(name, start, bytes.len())?;
        self.file
            .write_all_at(bytes, at)
            .map_err(FileError::io(&self.path))?;
        self.written
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Reads bytes `start..` of a tensor back from the file.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn read_back(&self, name: &str, start: usize, out: &mut [u8]) -> Result<(), FileError> {
        let at = self.place(name, start, out.len())?;
        self.file
            .read_exact_at(out, at)
            .map_err(FileError::io(&self.path))
    }

    /// Gives the file its name, once it is on disk.
    ///
    /// # Errors
    /// If fewer bytes were written than the tensors have, or the operating system refuses.
    pub fn finish(mut self) -> Result<(), FileError> {
        let written = *self.written.get_mut();
        if written != self.total {
            return Err(FileError::Truncated {
                path: self.path.clone(),
                expected: self.total,
                found: written,
            });
        }
        let renamed = self
            .file
            .sync_all()
            .and_then(|()| std::fs::rename(&self.temporary, &self.path));
        renamed.map_err(FileError::io(&self.path))?;
        self.finished = true;
        sync_folder(&self.path)
    }
}

impl Drop for TensorWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing else can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// What the end of temporary names is.
const TEMPORARY: &str = ".part";

fn temporary_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{TEMPORARY}"))
}

/// Makes names in the folder of `path` last.
fn sync_folder(path: &Path) -> Result<(), FileError> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(FileError::io(folder))
}

/// Writes a small file whole: under a temporary name, to disk, then renamed.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let temporary = temporary_name(path);
    let write = || {
        let file = File::create(&temporary)?;
        file.write_all_at(bytes, 0)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(FileError::io(path))?;
    sync_folder(path)
}

/// Removes what a writer that was killed has left in `folder`.
pub(crate) fn remove_unfinished(folder: &Path) -> Result<usize, FileError> {
    let mut removed = 0;
    for entry in std::fs::read_dir(folder).map_err(FileError::io(folder))? {
        let path = entry.map_err(FileError::io(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') && name.ends_with(TEMPORARY) {
            std::fs::remove_file(&path).map_err(FileError::io(&path))?;
            removed += 1;
        }
    }
    Ok(removed)
}
