//! Writing safetensors files.

use super::error::FileError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct TensorData<'a> {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The elements, little-endian and row-major.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> TensorData<'a> {
    /// An F32 tensor.
    pub fn f32(name: impl Into<String>, shape: &[usize], values: &'a [f32]) -> Self {
        let bytes = little_endian(values, |v| v.to_le_bytes());
        Self {
            name: name.into(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// An I32 tensor.
    pub fn i32(name: impl Into<String>, shape: &[usize], values: &'a [i32]) -> Self {
        let bytes = little_endian(values, |v| v.to_le_bytes());
        Self {
            name: name.into(),
            dtype: Dtype::I32,
            shape: shape.to_vec(),
            bytes,
        }
    }
}

fn little_endian<T: bytemuck::NoUninit>(values: &[T], encode: fn(&T) -> [u8; 4]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        bytemuck::cast_slice(values).into()
    } else {
        values.iter().flat_map(encode).collect::<Vec<_>>().into()
    }
}

/// Writes `tensors` to `path`, replacing what is there only once all is written.
///
/// The file grows under another name in the same folder and is renamed at the end; on an
/// error it is removed.
///
/// # Errors
/// Bytes that do not match shape and dtype, a name that occurs twice, and whatever the
/// operating system refuses.
pub fn write(path: impl AsRef<Path>, tensors: &[TensorData<'_>]) -> Result<(), FileError> {
    let path = path.as_ref();
    let mut order: Vec<&TensorData<'_>> = tensors.iter().collect();
    // Widest elements first, so that each tensor is aligned to its own elements.
    order.sort_by(|a, b| {
        b.dtype
            .bitsize()
            .cmp(&a.dtype.bitsize())
            .then(a.name.cmp(&b.name))
    });
    let header = header(path, &order)?;
    replace(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        order.iter().try_for_each(|t| out.write_all(&t.bytes))
    })
}

/// Puts a file of what `fill` writes in the place of `path`, once all of it is on disk.
///
/// # Errors
/// A folder, pipe or device of that name, and whatever the operating system refuses.
pub(crate) fn replace(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    if path.metadata().is_ok_and(|about| !about.is_file()) {
        return Err(FileError::NotAFile { path: path.into() });
    }
    let mut temporary = Temporary::beside(path)?;
    let written = temporary.fill(fill).and_then(|()| {
        std::fs::rename(&temporary.path, path)?;
        temporary.renamed = true;
        Ok(())
    });
    written.map_err(FileError::io(path))
}

fn header(path: &Path, tensors: &[&TensorData<'_>]) -> Result<Vec<u8>, FileError> {
    let mut names = std::collections::BTreeSet::new();
    let mut infos = Vec::with_capacity(tensors.len());
    let mut offset = 0;
    for tensor in tensors {
        if !names.insert(&tensor.name) {
            let (path, tensor) = (path.into(), tensor.name.clone());
            return Err(FileError::DuplicateTensor { path, tensor });
        }
        let end = offset + tensor.bytes.len();
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data_offsets: (offset, end),
        };
        infos.push((tensor.name.clone(), info));
        offset = end;
    }
    let bad = |message: String| FileError::HeaderJson {
        path: path.into(),
        message,
    };
    let metadata = Metadata::new(None, infos).map_err(|err| bad(err.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|err| bad(err.to_string()))?;
    // The data starts at a multiple of eight.
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok(json)
}

/// A file under a temporary name, removed unless it has been renamed.
struct Temporary {
    path: PathBuf,
    file: File,
    renamed: bool,
}

impl Temporary {
    fn beside(target: &Path) -> Result<Self, FileError> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let mut attempt = 0u32;
        loop {
            let hidden = format!(".{name}.{}.{attempt}.tmp", std::process::id());
            let path = target.with_file_name(hidden);
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    return Ok(Self {
                        path,
                        file,
                        renamed: false,
                    });
                }
                // Left over, or of another thread.
                Err(err) if err.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {
                    attempt += 1;
                }
                Err(source) => {
                    return Err(FileError::Io {
                        path: target.into(),
                        source,
                    });
                }
            }
        }
    }

    fn fill(&self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, &self.file);
        fill(&mut out)?;
        out.flush()?;
        drop(out);
        // On disk before the name: a crash leaves the old file or the new one.
        self.file.sync_all()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // Nothing else can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
