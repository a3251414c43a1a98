//! The header of a safetensors file.
//!
//! A file is an 8-byte little-endian length, that many bytes of JSON, and the data. The
//! JSON is parsed here rather than by the safetensors crate because its errors name
//! neither tensor nor dtype and because it lets one name replace another; element types
//! are the crate's.

use super::error::{FileError, ForeignFile};
use safetensors::Dtype;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{
    Deserialize, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Bytes of the length.
pub(super) const PREFIX: u64 = 8;

/// Largest header, by the format.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        // In 128 bits: a sparse file may be of any size.
        (self.bytes as u128 * 8 / self.dtype.bitsize() as u128) as usize
    }
}

/// Checks the length of the header against format and file before anything is allocated.
///
/// `start` is the beginning of the file, up to 64 bytes.
pub(super) fn header_length(path: &Path, start: &[u8], file_len: u64) -> Result<u64, FileError> {
    let foreign = |otherwise: FileError| match sniff(start) {
        Some(kind) => FileError::Foreign {
            path: path.into(),
            kind,
        },
        None => otherwise,
    };
    let truncated = |expected| FileError::Truncated {
        path: path.into(),
        expected,
        found: file_len,
    };
    let Some(prefix) = start.first_chunk::<{ PREFIX as usize }>() else {
        return Err(foreign(truncated(PREFIX)));
    };
    let length = u64::from_le_bytes(*prefix);
    if length > MAX_HEADER {
        let limit = MAX_HEADER;
        return Err(foreign(FileError::HeaderTooLarge {
            path: path.into(),
            length,
            limit,
        }));
    }
    if length < 2 {
        return Err(FileError::HeaderTooSmall {
            path: path.into(),
            length,
        });
    }
    if length > file_len - PREFIX {
        return Err(foreign(truncated(PREFIX + length)));
    }
    Ok(length)
}

/// Recognises other kinds of file. Asked only once the length makes no sense, and with an
/// eye to truncated files: the upper bytes of a possible length are zero, so that it is
/// never text.
fn sniff(start: &[u8]) -> Option<ForeignFile> {
    match start {
        [b'P', b'K', 3, 4, ..] => return Some(ForeignFile::Zip),
        [b'G', b'G', b'U', b'F', ..] => return Some(ForeignFile::Gguf),
        // Protocol number, then an opcode that a pickle begins with.
        [0x80, 2..=5, 0x95 | b'}' | b']' | b'(' | b'c' | b'X', ..] => {
            return Some(ForeignFile::Pickle);
        }
        _ => {}
    }
    let is_text = |&byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    if !start.iter().take(PREFIX as usize).all(is_text) {
        return None;
    }
    let text = String::from_utf8_lossy(start)
        .trim_start()
        .to_ascii_lowercase();
    match text.as_bytes() {
        _ if text.starts_with("version https://git-lfs") => Some(ForeignFile::GitLfsPointer),
        [b'<', ..] => Some(ForeignFile::Html),
        [b'{' | b'[', ..] => Some(ForeignFile::Json),
        _ => None,
    }
}

/// What a header says, checked against the size of the file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
}

impl Header {
    /// Parses the JSON `header` of a file of `file_len` bytes.
    pub(super) fn parse(path: &Path, header: &[u8], file_len: u64) -> Result<Self, FileError> {
        let RawHeader {
            mut tensors,
            metadata,
        } = serde_json::from_slice(header).map_err(|err| FileError::HeaderJson {
            path: path.into(),
            message: err.to_string(),
        })?;
        tensors.sort_by_key(|(_, raw)| raw.data_offsets);

        let data_start = PREFIX + header.len() as u64;
        let mut end = 0u64;
        let mut known = BTreeMap::new();
        for (tensor, raw) in tensors {
            let info = raw.check(path, &tensor, end, data_start)?;
            end = raw.data_offsets.1;
            if known.insert(tensor.clone(), info).is_some() {
                return Err(FileError::DuplicateTensor {
                    path: path.into(),
                    tensor,
                });
            }
        }

        let expected = data_start.saturating_add(end);
        let (path, found) = (path.into(), file_len);
        match expected.cmp(&found) {
            std::cmp::Ordering::Greater => Err(FileError::Truncated {
                path,
                expected,
                found,
            }),
            std::cmp::Ordering::Less => Err(FileError::TrailingBytes {
                path,
                expected,
                found,
            }),
            std::cmp::Ordering::Equal => Ok(Self {
                tensors: known,
                metadata,
            }),
        }
    }
}

/// The JSON as it stands.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    #[serde(deserialize_with = "dimensions")]
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Dimensions that a tensor may have; a header could state millions.
const MAX_DIMENSIONS: usize = 64;
/// Bytes of a tensor's name; names stand in error texts.
const MAX_NAME: usize = 4096;
/// Entries of the metadata.
const MAX_METADATA: usize = 1 << 16;
/// Characters of a dtype that an error text repeats.
const SHOWN_DTYPE: usize = 32;

fn dimensions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    struct Dimensions;
    impl<'de> Visitor<'de> for Dimensions {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_DIMENSIONS} dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(dimension) = seq.next_element()? {
                if shape.len() == MAX_DIMENSIONS {
                    return Err(A::Error::invalid_length(shape.len() + 1, &self));
                }
                shape.push(dimension);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Dimensions)
}

/// The `__metadata__` entry: text to text, or null.
struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MetadataVisitor;
        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "null or an object of at most {MAX_METADATA} texts")
            }

            fn visit_unit<E: Error>(self) -> Result<Metadata, E> {
                Ok(Metadata(BTreeMap::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry()? {
                    if entries.len() == MAX_METADATA {
                        return Err(A::Error::invalid_length(entries.len() + 1, &self));
                    }
                    entries.insert(key, value);
                }
                Ok(Metadata(entries))
            }
        }
        deserializer.deserialize_any(MetadataVisitor)
    }
}

impl RawTensor {
    /// Checks the entry; the tensor before ends at `expected` of the data.
    fn check(
        &self,
        path: &Path,
        tensor: &str,
        expected: u64,
        data_start: u64,
    ) -> Result<TensorInfo, FileError> {
        let (path, tensor) = (path.to_path_buf(), tensor.to_owned());
        let dtype: String = self.dtype.chars().take(SHOWN_DTYPE).collect();
        let Some(known) = parse_dtype(&self.dtype) else {
            return Err(FileError::UnknownDtype {
                path,
                tensor,
                dtype,
            });
        };
        let (start, end) = self.data_offsets;
        if start != expected || end < start {
            return Err(FileError::Offsets {
                path,
                tensor,
                start,
                end,
                expected,
            });
        }
        let bits = known.bitsize() as u64;
        // Rows of packed formats start at byte boundaries, so that each can be read alone.
        let row_bits = self
            .shape
            .last()
            .map_or(Some(bits), |n| n.checked_mul(bits));
        let bytes = match row_bits {
            Some(row_bits) if row_bits.is_multiple_of(8) => {
                let outer = &self.shape[..self.shape.len().saturating_sub(1)];
                outer
                    .iter()
                    .try_fold(row_bits / 8, |bytes, &n| bytes.checked_mul(n))
            }
            _ => None,
        };
        let shape = self.shape.clone();
        let found = end - start;
        match bytes {
            None => Err(FileError::Shape {
                path,
                tensor,
                dtype,
                shape,
            }),
            Some(expected) if expected != found => Err(FileError::Length {
                path,
                tensor,
                dtype,
                shape,
                expected,
                found,
            }),
            Some(_) => {
                let too_large = |shape| FileError::Shape {
                    path,
                    tensor,
                    dtype,
                    shape,
                };
                let dims = shape.iter().map(|&n| usize::try_from(n)).collect();
                match (dims, usize::try_from(found), data_start.checked_add(start)) {
                    (Ok(dims), Ok(bytes), Some(offset)) => Ok(TensorInfo {
                        dtype: known,
                        shape: dims,
                        offset,
                        bytes,
                    }),
                    _ => Err(too_large(shape)),
                }
            }
        }
    }
}

fn parse_dtype(name: &str) -> Option<Dtype> {
    let name: StrDeserializer<'_, ValueError> = name.into_deserializer();
    Dtype::deserialize(name).ok()
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = Vec::new();
                let mut metadata = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > MAX_NAME {
                        return Err(A::Error::custom(format_args!(
                            "a tensor name of {} bytes, at most {MAX_NAME} are read",
                            name.len()
                        )));
                    }
                    let in_entry = |err| A::Error::custom(format_args!("`{name}`: {err}"));
                    if name == "__metadata__" {
                        metadata = map.next_value::<Metadata>().map_err(in_entry)?.0;
                    } else {
                        let tensor = map.next_value().map_err(in_entry)?;
                        tensors.push((name, tensor));
                    }
                }
                Ok(RawHeader { tensors, metadata })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
