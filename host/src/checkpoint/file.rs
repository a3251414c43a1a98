//! One safetensors file.
//!
//! Files are read with `pread`, not mapped: the bytes are copied into a weight bank in any
//! case, a file that shrinks while it is open is then an error instead of a SIGBUS that
//! ends the process, and it works on file systems that cannot map.

use super::error::{FileError, NameList};
use super::float::Float;
use super::header::{Header, PREFIX, TensorInfo, header_length};
use crate::system::zeroed;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open safetensors file, its header checked.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    header: Header,
}

/// Bytes read at a time where the values are converted.
const BLOCK: usize = 1 << 20;

impl TensorFile {
    /// Opens `path` and checks the whole header, but reads no data.
    ///
    /// # Errors
    /// Everything that the format forbids, bytes after the last tensor included; other
    /// kinds of file by name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref().to_path_buf();
        // Asked before opening, since opening a pipe waits for its other end.
        let about = std::fs::metadata(&path).map_err(FileError::io(&path))?;
        if !about.is_file() {
            return Err(FileError::NotAFile { path });
        }
        let file = File::open(&path).map_err(FileError::io(&path))?;
        let file_len = file.metadata().map_err(FileError::io(&path))?.len();

        let mut start = [0; 64];
        let start = &mut start[..file_len.min(64) as usize];
        read_at(&path, &file, start, 0)?;
        let length = header_length(&path, start, file_len)? as usize;
        let mut header = zeroed("the header", length, 0)?;
        read_at(&path, &file, &mut header, PREFIX)?;
        let header = Header::parse(&path, &header, file_len)?;
        Ok(Self { path, file, header })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.header.tensors
    }

    /// The header's free texts.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// No such tensor.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, FileError> {
        self.header
            .tensors
            .get(name)
            .ok_or_else(|| FileError::NoTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                available: self.names(),
            })
    }

    pub(super) fn names(&self) -> NameList {
        self.header.tensors.keys().cloned().collect()
    }

    /// The bytes of a tensor as stored.
    ///
    /// # Errors
    /// No such tensor, or the file cannot be read or has shrunk.
    pub fn read_bytes(&self, name: &str) -> Result<Vec<u8>, FileError> {
        let info = self.info(name)?;
        let mut bytes = zeroed(name, info.bytes, 0)?;
        read_at(&self.path, &self.file, &mut bytes, info.offset)?;
        Ok(bytes)
    }

    /// Bytes `start..` of a tensor, as many as `out` holds.
    ///
    /// # Errors
    /// No such tensor, a range beyond its end, or the file cannot be read or has shrunk.
    pub fn read_range(&self, name: &str, start: usize, out: &mut [u8]) -> Result<(), FileError> {
        let info = self.info(name)?;
        match start.checked_add(out.len()) {
            Some(end) if end <= info.bytes => {
                read_at(&self.path, &self.file, out, info.offset + start as u64)
            }
            end => Err(FileError::Range {
                path: self.path.clone(),
                tensor: name.to_owned(),
                end: end.unwrap_or(usize::MAX),
                bytes: info.bytes,
            }),
        }
    }

    /// The values of a BF16, F16 or F32 tensor, exactly.
    ///
    /// # Errors
    /// No such tensor, another dtype, or the file cannot be read or has shrunk.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, FileError> {
        let info = self.info(name)?;
        let float = Float::of(info.dtype)
            .ok_or_else(|| self.dtype_error(name, info.dtype, Float::SUPPORTED))?;
        let mut values = zeroed(name, info.elements(), 0.0)?;
        let mut block = vec![0; info.bytes.min(BLOCK)];
        let mut offset = info.offset;
        for values in values.chunks_mut(BLOCK / float.size()) {
            let bytes = &mut block[..values.len() * float.size()];
            read_at(&self.path, &self.file, bytes, offset)?;
            float.decode(bytes, 0, 1, values);
            offset += bytes.len() as u64;
        }
        Ok(values)
    }

    /// The values of an I32 or I64 tensor, such as expert ids.
    ///
    /// # Errors
    /// No such tensor, another dtype, a value outside of i32, or the file cannot be read.
    pub fn read_i32(&self, name: &str) -> Result<Vec<i32>, FileError> {
        let dtype = self.info(name)?.dtype;
        if !matches!(dtype, Dtype::I32 | Dtype::I64) {
            return Err(self.dtype_error(name, dtype, "I32 or I64"));
        }
        let bytes = self.read_bytes(name)?;
        if dtype == Dtype::I32 {
            let (values, _) = bytes.as_chunks();
            return Ok(values.iter().map(|&v| i32::from_le_bytes(v)).collect());
        }
        let (values, _) = bytes.as_chunks();
        let values = values.iter().map(|&v| i64::from_le_bytes(v)).enumerate();
        values
            .map(|(index, value)| {
                i32::try_from(value).map_err(|_| FileError::IntegerRange {
                    path: self.path.clone(),
                    tensor: name.to_owned(),
                    index,
                    value,
                })
            })
            .collect()
    }

    pub(super) fn dtype_error(
        &self,
        name: &str,
        dtype: Dtype,
        supported: &'static str,
    ) -> FileError {
        FileError::Dtype {
            path: self.path.clone(),
            tensor: name.to_owned(),
            dtype: dtype.to_string(),
            supported,
        }
    }
}

fn read_at(path: &Path, file: &File, bytes: &mut [u8], offset: u64) -> Result<(), FileError> {
    file.read_exact_at(bytes, offset)
        .map_err(|source| match source.kind() {
            // The size was checked on opening, so the file has shrunk since.
            io::ErrorKind::UnexpectedEof => FileError::Truncated {
                path: path.into(),
                expected: offset + bytes.len() as u64,
                found: file.metadata().map_or(0, |about| about.len()),
            },
            _ => FileError::Io {
                path: path.into(),
                source,
            },
        })
}
