//! A layer's experts read one matrix at a time, for checkpoints larger than memory.

use super::config::ModelConfig;
use super::error::CheckpointError;
use super::layer::{Located, MoeSpec};
use super::plan::View;
use super::shards::Checkpoint;
use super::stored::Codes;
use asym_gemm_formats::bank::Projection;

/// A located MoE layer whose expert weights stay in the file; scales of quantised weights and
/// biases are in memory.
#[derive(Debug)]
pub struct LayerStream<'a> {
    located: Located<'a>,
    codes: Vec<Codes>,
    biases: Vec<f32>,
}

/// One expert's matrix as stored, in memory.
#[derive(Debug)]
pub struct StreamedMatrix<'s> {
    codes: &'s Codes,
    view: View,
    /// Element that `bytes` starts with.
    base: usize,
    bytes: Vec<u8>,
    rows: usize,
    columns: usize,
}

impl<'a> LayerStream<'a> {
    /// Finds and checks the tensors of a MoE layer; reads scales and biases.
    ///
    /// # Errors
    /// As [`Checkpoint::moe_layer`].
    pub fn open(checkpoint: &'a Checkpoint, layer: usize) -> Result<Self, CheckpointError> {
        let located = Located::find(checkpoint, layer, checkpoint.fused_layout())?;
        let read = |source: &super::stored::Source<'_>| source.codes(checkpoint.zero_nan_blocks());
        let codes = located.sources.iter().map(read).collect::<Result<_, _>>()?;
        let biases = located.read_biases()?;
        Ok(Self {
            located,
            codes,
            biases,
        })
    }

    /// Shape and meaning.
    pub fn spec(&self) -> &MoeSpec {
        &self.located.spec
    }

    /// What the names of the block's tensors start with, as `model.layers.3.mlp.`.
    pub fn prefix(&self) -> &str {
        &self.located.prefix
    }

    /// Names of the formats of the routed experts' weights, each once.
    pub fn stored_names(&self) -> Vec<String> {
        let views = self.located.experts.iter().flatten();
        let names = views.map(|view| self.codes[view.buffer].name());
        let names: std::collections::BTreeSet<_> = names.collect();
        names.into_iter().collect()
    }

    /// Rows and columns of a projection.
    pub fn shape(&self, projection: Projection) -> (usize, usize) {
        let spec = self.spec();
        match projection {
            Projection::Gate | Projection::Up => (spec.intermediate, spec.hidden),
            Projection::Down => (spec.hidden, spec.intermediate),
        }
    }

    /// Bytes in the file that one matrix spans.
    pub fn matrix_bytes(&self, projection: Projection) -> usize {
        let view = self.located.experts[0][projection as usize];
        let (first, count) = self.span(view, projection);
        self.codes[view.buffer].byte_range(first, count).1
    }

    fn span(&self, view: View, projection: Projection) -> (usize, usize) {
        let (rows, columns) = self.shape(projection);
        let last = (rows - 1) * view.row_stride + (columns - 1) * view.step;
        (view.first, last + 1)
    }

    /// Reads one matrix of expert `expert`.
    ///
    /// # Errors
    /// If the file cannot be read or memory is short.
    ///
    /// # Panics
    /// If the expert does not exist.
    pub fn matrix(
        &self,
        expert: usize,
        projection: Projection,
    ) -> Result<StreamedMatrix<'_>, CheckpointError> {
        let view = self.located.experts[expert][projection as usize];
        let codes = &self.codes[view.buffer];
        let (base, count) = self.span(view, projection);
        let (start, len) = codes.byte_range(base, count);
        let tensor = &self.located.sources[view.buffer].tensor;
        let mut bytes =
            crate::system::zeroed(tensor.name, len, 0u8).map_err(super::error::FileError::from)?;
        tensor.file.read_range(tensor.name, start, &mut bytes)?;
        let (rows, columns) = self.shape(projection);
        Ok(StreamedMatrix {
            codes,
            view,
            base,
            bytes,
            rows,
            columns,
        })
    }

    /// An expert's bias, if the model has biases.
    ///
    /// # Panics
    /// If the expert does not exist.
    pub fn bias(&self, expert: usize, projection: Projection) -> Option<&[f32]> {
        self.spec().bias_of(&self.biases, expert, projection)
    }
}

impl StreamedMatrix<'_> {
    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// Row `row` in f32.
    ///
    /// # Panics
    /// If the row does not exist or `out` has another length.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.columns, "row length");
        let first = self.view.first + row * self.view.row_stride;
        self.codes
            .decode(&self.bytes, self.base, first, self.view.step, out);
    }
}

/// The layers of `config` that `range` names and that are MoE layers.
///
/// # Errors
/// A range that ends beyond the model, or without a MoE layer.
pub(crate) fn moe_layers(
    config: &ModelConfig,
    range: Option<std::ops::Range<usize>>,
) -> Result<Vec<usize>, CheckpointError> {
    let range = range.unwrap_or(0..config.layers);
    if range.end > config.layers || range.is_empty() {
        return Err(CheckpointError::LayerRange {
            layer: range.end.saturating_sub(1),
            model_type: config.model_type,
            layers: config.layers,
        });
    }
    let layers: Vec<_> = config.moe_layers().filter(|l| range.contains(l)).collect();
    match (layers.is_empty(), config.dense_reason(range.start)) {
        (true, Some(reason)) => Err(CheckpointError::DenseLayer {
            layer: range.start,
            reason,
        }),
        _ => Ok(layers),
    }
}
