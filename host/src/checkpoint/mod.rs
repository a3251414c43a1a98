//! Model checkpoints in the Hugging Face layout.
//!
//! - [`TensorFile`], [`write()`], [`TensorSpec`]: single safetensors files.
//! - [`Checkpoint`]: config.json with one file or an index of shards.
//! - [`MoeLayer`]: the MoE block of a layer, whichever way its experts are spelt.
//! - [`ModelConfig`]: the families of models and what their config.json means.
//!
//! Files come from anywhere, so sizes are checked before anything is allocated and each
//! fault has an error of its own; a layer is only handed out if every tensor of its block
//! was understood and every expert is filled.

mod config;
mod error;
mod fields;
mod file;
mod float;
mod header;
mod layer;
mod names;
mod plan;
mod shards;
mod spec;
mod stored;
mod stream;
mod weights;
mod write;
mod writer;

pub use config::{ModelConfig, ModelType, ScoringConfig, SharedSpec};
pub use error::{CheckpointError, ConfigError, FileError, ForeignFile, NameList};
pub use file::TensorFile;
pub use header::TensorInfo;
pub use layer::{MoeLayer, MoeSpec};
pub use plan::FusedLayout;
pub use safetensors::Dtype;
pub use shards::Checkpoint;
pub use spec::TensorSpec;
pub(crate) use stream::moe_layers;
pub use stream::{LayerStream, StreamedMatrix};
pub(crate) use write::replace;
pub use write::{TensorData, write};
pub use writer::{TensorShape, TensorWriter};
pub(crate) use writer::{remove_unfinished, replace_file};
