//! The MoE block of one layer, as read from a checkpoint.

use super::config::{ModelType, SharedSpec};
use super::error::{CheckpointError, QUANTISATIONS};
use super::file::TensorFile;
use super::names::Tensor;
use super::plan::{Biases, FusedLayout, Plan, View};
use super::shards::Checkpoint;
use super::stored::{Buffer, Shape, Source};
use super::weights::int8_source;
use crate::convert::int8_layer_name;
use crate::moe::routing::Router;
use asym_gemm_cpu::StoredRow;
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::bank::Projection;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// Shape and meaning of a MoE block.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// The model's family.
    pub model_type: ModelType,
    /// Number of the layer.
    pub layer: usize,
    /// Model width H.
    pub hidden: usize,
    /// Expert width I.
    pub intermediate: usize,
    /// Experts E.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Between gate, up and down.
    pub activation: Activation,
    /// Whether the experts have biases.
    pub bias: bool,
    /// The expert that every token visits.
    pub shared: Option<SharedSpec>,
}

impl MoeSpec {
    /// The part of `[experts]` of gate `[I]`, up `[I]`, down `[H]` that belongs to a matrix.
    pub(super) fn bias_of<'b>(
        &self,
        biases: &'b [f32],
        expert: usize,
        projection: Projection,
    ) -> Option<&'b [f32]> {
        let &Self {
            hidden,
            intermediate,
            experts,
            bias,
            ..
        } = self;
        assert!(expert < experts, "expert {expert} of {experts}");
        let (start, len) = match projection {
            Projection::Gate => (0, intermediate),
            Projection::Up => (intermediate, intermediate),
            Projection::Down => (2 * intermediate, hidden),
        };
        let start = expert * (2 * intermediate + hidden) + start;
        bias.then(|| &biases[start..start + len])
    }
}

/// A MoE block with its weights as stored.
pub struct MoeLayer {
    /// Shape and meaning.
    pub spec: MoeSpec,
    /// The router.
    pub router: Router,
    /// `[hidden]`, whose product with the input gates the shared expert through a sigmoid.
    pub shared_gate: Option<Vec<f32>>,
    buffers: Vec<Buffer>,
    experts: Vec<[View; 3]>,
    shared: Option<[View; 3]>,
    /// `[experts]` of gate `[I]`, up `[I]`, down `[H]`; empty without biases.
    biases: Vec<f32>,
}

/// A layer whose tensors are found and checked; none of its expert weights is read.
#[derive(Debug)]
pub(super) struct Located<'a> {
    pub(super) spec: MoeSpec,
    pub(super) prefix: String,
    pub(super) sources: Vec<Source<'a>>,
    pub(super) experts: Vec<[View; 3]>,
    pub(super) shared: Option<[View; 3]>,
    biases: Biases<'a>,
    router: [Option<Tensor<'a>>; 3],
    shared_gate: Option<Tensor<'a>>,
}

impl<'a> Located<'a> {
    /// Checks that the layer is one that can be read and that its names and shapes are right.
    pub(super) fn find(
        checkpoint: &'a Checkpoint,
        layer: usize,
        fused: Option<FusedLayout>,
    ) -> Result<Self, CheckpointError> {
        let config = checkpoint.config();
        if let Some(method) = &config.quantization
            && !QUANTISATIONS
                .iter()
                .any(|known| method.split(' ').next() == Some(known))
        {
            return Err(CheckpointError::Quantised {
                method: method.clone(),
            });
        }
        let (model_type, layers) = (config.model_type, config.layers);
        if layer >= layers {
            return Err(CheckpointError::LayerRange {
                layer,
                model_type,
                layers,
            });
        }
        if let Some(reason) = config.dense_reason(layer) {
            return Err(CheckpointError::DenseLayer { layer, reason });
        }
        let spec = MoeSpec {
            model_type,
            layer,
            hidden: config.hidden,
            intermediate: config.intermediate,
            experts: config.experts,
            top_k: config.top_k,
            activation: config.activation,
            bias: config.bias,
            shared: config.shared,
        };
        let fused = fused.unwrap_or(FusedLayout::of(model_type));
        let mut plan = Plan::new(checkpoint, spec.clone(), fused)?;
        let prefix = plan.prefix().to_owned();
        let router = plan.router(config.scoring.has_correction())?;
        let (experts, biases) = plan.experts()?;
        let (shared, shared_gate) = plan.shared()?;
        let sources = plan.finish()?;
        Ok(Self {
            spec,
            prefix,
            sources,
            experts,
            shared,
            biases,
            router,
            shared_gate,
        })
    }

    pub(super) fn read_biases(&self) -> Result<Vec<f32>, CheckpointError> {
        self.biases.read(&self.spec)
    }
}

impl MoeLayer {
    pub(super) fn load(
        checkpoint: &Checkpoint,
        layer: usize,
        fused: Option<FusedLayout>,
    ) -> Result<Self, CheckpointError> {
        let config = checkpoint.config();
        // First all names and shapes, then all reading.
        let Located {
            spec,
            sources,
            experts,
            shared,
            biases,
            router,
            shared_gate,
            ..
        } = Located::find(checkpoint, layer, fused)?;
        let read = |tensor: &Option<Tensor<'_>>| match tensor {
            Some(tensor) => tensor.read_f32().map(Some),
            None => Ok(None),
        };
        let [weight, bias, correction] = router;
        let router = Router::new(
            spec.experts,
            spec.hidden,
            spec.top_k,
            read(&weight)?.unwrap_or_default(),
            read(&bias)?,
            config
                .scoring
                .with_correction(read(&correction)?.unwrap_or_default()),
        )
        .map_err(|source| CheckpointError::Router { layer, source })?;
        let shared_gate = read(&shared_gate)?;
        let biases = biases.read(&spec)?;
        let zero_nan_blocks = checkpoint.zero_nan_blocks();
        let buffers = sources
            .par_iter()
            .map(|source| Buffer::read(source, zero_nan_blocks))
            .collect::<Result<_, CheckpointError>>()?;
        Ok(Self {
            spec,
            router,
            shared_gate,
            buffers,
            experts,
            shared,
            biases,
        })
    }

    /// The layer with its routed experts from a folder that `asym-gemm convert --to int8` or
    /// `int8-block` wrote, code by code; all else stays as it is.
    ///
    /// # Errors
    /// If the folder has no such layer, or one of another shape.
    pub fn with_int8_experts(mut self, folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let spec = &self.spec;
        let path = folder.as_ref().join(int8_layer_name(spec.layer));
        let file = TensorFile::open(path)?;
        let first = self.buffers.len();
        for (projection, name) in [
            (Projection::Gate, "gate"),
            (Projection::Up, "up"),
            (Projection::Down, "down"),
        ] {
            let (rows, columns) = match projection {
                Projection::Down => (spec.hidden, spec.intermediate),
                _ => (spec.intermediate, spec.hidden),
            };
            let source = int8_source(&file, name, spec.experts, Shape { rows, columns })?;
            self.buffers.push(Buffer::read(&source, false)?);
            for (expert, views) in self.experts.iter_mut().enumerate() {
                views[projection as usize] = View {
                    buffer: first + projection as usize,
                    first: expert * rows * columns,
                    row_stride: columns,
                    step: 1,
                    blocks_aligned: true,
                };
            }
        }
        Ok(self)
    }

    /// Row `row` of an expert's matrix: of gate and up (`intermediate` rows) `hidden`
    /// values, of down (`hidden` rows) `intermediate` values.
    ///
    /// # Panics
    /// If expert or row do not exist or `out` has another length.
    pub fn expert_row(&self, expert: usize, projection: Projection, row: usize, out: &mut [f32]) {
        self.row(
            &self.experts[expert],
            self.spec.intermediate,
            projection,
            row,
            out,
        );
    }

    /// An expert's bias: `intermediate` values for gate and up, `hidden` for down.
    ///
    /// # Panics
    /// If the expert does not exist.
    pub fn expert_bias(&self, expert: usize, projection: Projection) -> Option<&[f32]> {
        self.spec.bias_of(&self.biases, expert, projection)
    }

    /// Row `row` of the shared expert's matrix, as [`Self::expert_row`] with the width of
    /// `spec.shared`.
    ///
    /// # Panics
    /// If there is no shared expert, the row does not exist or `out` has another length.
    pub fn shared_row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        match (&self.shared, self.spec.shared) {
            (Some(views), Some(shared)) => {
                self.row(views, shared.intermediate, projection, row, out);
            }
            _ => panic!("layer {} has no shared expert", self.spec.layer),
        }
    }

    /// Bytes of weights held.
    pub fn weight_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes.len()).sum()
    }

    fn row(
        &self,
        views: &[View; 3],
        width: usize,
        projection: Projection,
        row: usize,
        out: &mut [f32],
    ) {
        let hidden = self.spec.hidden;
        let (view, rows, columns) = match projection {
            Projection::Gate => (views[0], width, hidden),
            Projection::Up => (views[1], width, hidden),
            Projection::Down => (views[2], hidden, width),
        };
        assert!(row < rows, "row {row} of {rows}");
        assert_eq!(out.len(), columns, "row length");
        let Buffer { codes, bytes } = &self.buffers[view.buffer];
        let first = view.first + row * view.row_stride;
        codes.decode(bytes, 0, first, view.step, out);
    }

    /// If an expert's matrix is stored in `format`, writes row `row` as it is and returns the
    /// scale of the matrix; see [`asym_gemm_cpu::ExpertSource::stored_row`].
    ///
    /// # Panics
    /// If expert or row do not exist or `out` has other lengths.
    pub fn stored_expert_row(
        &self,
        format: WeightFormat,
        expert: usize,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        self.stored_row(format, self.experts[expert][projection as usize], row, out)
    }

    /// The same of the shared expert.
    ///
    /// # Panics
    /// If there is none, the row does not exist or `out` has other lengths.
    pub fn stored_shared_row(
        &self,
        format: WeightFormat,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        match &self.shared {
            Some(views) => self.stored_row(format, views[projection as usize], row, out),
            None => panic!("layer {} has no shared expert", self.spec.layer),
        }
    }

    fn stored_row(
        &self,
        format: WeightFormat,
        view: View,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        let Buffer { codes, bytes } = &self.buffers[view.buffer];
        let first = view.first + row * view.row_stride;
        codes.stored_row(format, bytes, first, view.blocks_aligned, out)
    }

    /// The format that keeps the routed experts as they are stored; `None` if they are stored in
    /// several formats, or in one that no bank has.
    pub fn stored_format(&self) -> Option<WeightFormat> {
        self.common_format(self.experts.iter().flatten())
    }

    /// The same of the shared expert; `None` also if there is none.
    pub fn stored_shared_format(&self) -> Option<WeightFormat> {
        self.common_format(self.shared.iter().flatten())
    }

    fn common_format<'v>(&self, mut views: impl Iterator<Item = &'v View>) -> Option<WeightFormat> {
        let format = |view: &View| self.buffers[view.buffer].codes.bank_format();
        let first = format(views.next()?)?;
        views
            .all(|view| format(view) == Some(first))
            .then_some(first)
    }

    /// Names of the formats of the routed experts' weights, each once.
    pub fn stored_names(&self) -> Vec<String> {
        let views = self.experts.iter().flatten();
        let names = views.map(|view| self.buffers[view.buffer].codes.name());
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

impl fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeLayer")
            .field("spec", &self.spec)
            .field("weight_bytes", &self.weight_bytes())
            .finish_non_exhaustive()
    }
}
