//! Conversion of a checkpoint's experts to another format, layer by layer.
//!
//! One expert matrix after another is read, quantised, written, read back and compared with its
//! source, on all threads; a layer's file gets its name once all of it is on disk, and a manifest
//! lists the layers that are done. So memory holds no more than the matrices in work and the scales
//! of a layer, and what a crash leaves is resumed with the layers that were done.
//!
//! ```text
//! int8, int8-block   layer_{L}.safetensors   {gate,up,down}_int8 [E, N, K], _scales [E, N] or
//!                                            [E, N, K/128]; asym_int8_manifest.json, config.json
//! fp8, nvfp4, mxfp4  experts-layer-{L}.safetensors with the names of the model's experts,
//!                    other-{n}.safetensors with all other tensors, model.safetensors.index.json,
//!                    config.json with a quantization_config; asym_convert_manifest.json
//! ```
//!
//! config.json comes last: a folder without it is not complete.

mod encode;
mod output;

pub use encode::Check;
use encode::{Encoded, check, encode};

use crate::checkpoint::{
    Checkpoint, CheckpointError, FileError, LayerStream, TensorWriter, moe_layers,
};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::bank::Projection;
use output::{Layout, Manifest};
use rayon::prelude::*;
use std::ops::Range;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Bytes that matrices in work may take together; one always may.
const MEMORY: usize = 1536 << 20;

/// What to convert to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// int8, a scale for each row.
    Int8,
    /// int8, a scale for each row and 128 columns.
    Int8Block,
    /// fp8 e4m3, a scale for each 128 x 128, in the names of DeepSeek-V3.
    Fp8,
    /// NVFP4 in the names of ModelOpt.
    Nvfp4,
    /// MXFP4 in the names of compressed-tensors.
    Mxfp4,
}

impl Target {
    /// The name on the command line and in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int8Block => "int8-block",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// The format of a bank that holds the result as it is.
    pub const fn bank_format(self) -> WeightFormat {
        match self {
            Self::Int8 => WeightFormat::Int8PerRow,
            Self::Int8Block => WeightFormat::Int8Block128,
            Self::Fp8 => WeightFormat::Fp8Block128,
            Self::Nvfp4 => WeightFormat::Nvfp4,
            Self::Mxfp4 => WeightFormat::Mxfp4,
        }
    }
}

/// How to convert.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Layers of the model to convert (default: all MoE layers).
    pub layers: Option<Range<usize>>,
    /// Goes on in a folder that an earlier run with the same source and target has left.
    pub resume: bool,
}

/// Why a conversion stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The source.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file of the result.
    #[error(transparent)]
    File(#[from] FileError),
    /// The folder of the result holds something.
    #[error(
        "{}: holds a conversion already; go on with it by --resume, or delete the folder",
        path.display()
    )]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder of the result holds something else.
    #[error(
        "{}: holds `{entry}`, which no conversion wrote; name an empty or new folder",
        path.display()
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// What is there.
        entry: String,
    },
    /// The folder holds another conversion.
    #[error(
        "{}: its manifest says {what} {found}, this conversion has {expected}; delete the folder, or name another",
        path.display()
    )]
    Different {
        /// The manifest.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// In the manifest.
        found: String,
        /// Here.
        expected: String,
    },
    /// A manifest that cannot be read.
    #[error("{}: {message}; delete it, and the folder's other files with it", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The result would lie in the source's folder.
    #[error("{}: the folder of the checkpoint itself, which stays as it is", path.display())]
    InPlace {
        /// The folder.
        path: PathBuf,
    },
    /// Rows that the format's groups do not divide.
    #[error("{target} has groups of {group} columns; {columns} columns are not whole groups")]
    Groups {
        /// The format.
        target: &'static str,
        /// Columns of a group.
        group: usize,
        /// Columns of a matrix.
        columns: usize,
    },
}

/// The name of a converted int8 layer's file.
pub fn int8_layer_name(layer: usize) -> String {
    format!("layer_{layer}.safetensors")
}

/// What became of one layer.
#[derive(Clone, Debug, serde::Serialize)]
pub struct LayerReport {
    /// Its number.
    pub layer: usize,
    /// The comparison of all its experts; none if an earlier run had done the layer.
    pub check: Option<Check>,
    /// The first expert that is not what it should be.
    pub first_bad_expert: Option<usize>,
}

/// What became of the checkpoint.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// One for each layer asked for.
    pub layers: Vec<LayerReport>,
    /// Bytes of expert weights read.
    pub source_bytes: u64,
}

impl Report {
    /// Whether every comparison passed.
    pub fn passed(&self) -> bool {
        let mut checks = self.layers.iter().filter_map(|layer| layer.check);
        checks.all(|check| check.passed())
    }
}

/// Bytes of expert weights that a conversion will read, if all layers are as the first.
///
/// # Errors
/// Layers that are not there or cannot be read.
pub fn source_bytes(checkpoint: &Checkpoint, options: &Options) -> Result<u64, ConvertError> {
    let layers = moe_layers(checkpoint.config(), options.layers.clone())?;
    match layers.first() {
        Some(&layer) => {
            let stream = LayerStream::open(checkpoint, layer)?;
            Ok(layer_bytes(&stream) * layers.len() as u64)
        }
        None => Ok(0),
    }
}

/// Bytes of all experts of a layer.
fn layer_bytes(stream: &LayerStream<'_>) -> u64 {
    let matrices = PROJECTIONS.map(|p| stream.matrix_bytes(p) as u64);
    matrices.iter().sum::<u64>() * stream.spec().experts as u64
}

const PROJECTIONS: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

/// Converts the experts of `checkpoint` into the folder `out`.
///
/// `progress` is called with bytes of the source as they are done. Runs on the caller's rayon pool.
///
/// # Errors
/// A source that cannot be read, a folder that cannot be used, and what the operating system
/// refuses. Layers done so far stay, for `options.resume`.
pub fn convert(
    checkpoint: &Checkpoint,
    target: Target,
    out: &Path,
    options: &Options,
    progress: impl Fn(u64) + Sync,
) -> Result<Report, ConvertError> {
    let config = checkpoint.config();
    let layers = moe_layers(config, options.layers.clone())?;
    if let Some(group) = target.group() {
        for columns in [config.hidden, config.intermediate] {
            if !columns.is_multiple_of(group) {
                return Err(ConvertError::Groups {
                    target: target.name(),
                    group,
                    columns,
                });
            }
        }
    }
    let mut manifest = Manifest::open(checkpoint, target, out, options.resume)?;
    let mut report = Report {
        layers: Vec::with_capacity(layers.len()),
        source_bytes: 0,
    };
    for layer in layers {
        let stream = LayerStream::open(checkpoint, layer)?;
        let bytes = layer_bytes(&stream);
        let layout = Layout::new(target, &stream);
        if manifest.has(layer) && layout.is_complete(out)? {
            progress(bytes);
            report.layers.push(LayerReport {
                layer,
                check: None,
                first_bad_expert: None,
            });
            continue;
        }
        manifest.note_source(stream.stored_names());
        let writer = TensorWriter::create(layout.path(out), &layout.tensors())?;
        let checks = convert_layer(&stream, target, &layout, &writer, &progress)?;
        writer.finish()?;
        manifest.add(layer)?;
        report.source_bytes += bytes;
        report.layers.push(LayerReport {
            layer,
            first_bad_expert: checks.iter().position(|check| !check.passed()),
            check: Some(checks.into_iter().fold(Check::default(), Check::and)),
        });
    }
    manifest.finish()?;
    Ok(report)
}

/// Writes and checks all experts of a layer; one check for each expert.
fn convert_layer(
    stream: &LayerStream<'_>,
    target: Target,
    layout: &Layout,
    writer: &TensorWriter,
    progress: &(impl Fn(u64) + Sync),
) -> Result<Vec<Check>, ConvertError> {
    let experts = stream.spec().experts;
    let work = |(expert, projection): (usize, Projection)| -> Result<Check, ConvertError> {
        let matrix = stream.matrix(expert, projection)?;
        let encoded = encode(target, &matrix);
        layout.put(writer, expert, projection, &encoded)?;
        if let Some(bias) = stream.bias(expert, projection) {
            layout.put_bias(writer, expert, projection, bias)?;
        }
        let mut back = Encoded {
            codes: vec![0; encoded.codes.len()],
            scales: vec![0; encoded.scales.len()],
            global: f32::NAN,
        };
        drop(encoded);
        layout.read_back(writer, expert, projection, &mut back)?;
        let check = check(target, &matrix, &back);
        progress(stream.matrix_bytes(projection) as u64);
        Ok(check)
    };
    let tasks: Vec<_> = (0..experts)
        .flat_map(|expert| PROJECTIONS.map(|projection| (expert, projection)))
        .collect();
    // A task holds its source and its codes twice, of 8 bits at most.
    let largest = PROJECTIONS
        .map(|p| {
            let (rows, columns) = stream.shape(p);
            stream.matrix_bytes(p) + 2 * rows * columns
        })
        .into_iter()
        .max()
        .unwrap_or(1);
    let at_once = (MEMORY / largest).max(1);
    let at_once = match at_once < rayon::current_num_threads() {
        true => at_once,
        false => tasks.len(),
    };
    let mut checks = vec![Check::default(); experts];
    for tasks in tasks.chunks(at_once) {
        let done: Result<Vec<_>, _> = tasks.par_iter().map(|&task| work(task)).collect();
        for (&(expert, _), check) in tasks.iter().zip(done?) {
            checks[expert] = checks[expert].and(check);
        }
    }
    Ok(checks)
}
