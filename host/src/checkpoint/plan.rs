//! From the names of a layer's tensors to the places of its matrices.
//!
//! Checkpoints spell an expert's three matrices in several ways. Each becomes a [`View`]
//! into the bytes as stored, so that nothing is converted or copied before a weight bank
//! asks for its rows:
//!
//! ```text
//! experts.{e}.gate_proj | up_proj | down_proj .weight   [I, H] [I, H] [H, I]
//! experts.{e}.w1 | w3 | w2 .weight                      the same (Mixtral)
//! experts.gate_up_proj, experts.down_proj               [E, 2I, H] [E, H, I], gate rows first
//! the same, transposed and interleaved (gpt-oss)        [E, H, 2I] [E, I, H], gate even, up odd
//! experts.gate_proj | up_proj | down_proj               [E, I, H] [E, I, H] [E, H, I]
//! experts.gate_up_proj_blocks, experts.down_proj_blocks [E, 2I, H/32, 16] [E, H, I/32, 16]
//! ```
//!
//! What each matrix is stored as, its scales included, is for [`weights`] to find.

use super::config::{ModelType, SharedSpec};
use super::error::CheckpointError;
use super::float::Float;
use super::layer::MoeSpec;
use super::names::{Claims, Tensor};
use super::shards::Checkpoint;
use super::stored::{Shape, Source};
use super::weights::{self, Wanted};
use asym_gemm_formats::fp8;

/// Order of the dimensions in expert tensors of three dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedLayout {
    /// Matrices are stored as [inputs, outputs] instead of [outputs, inputs].
    pub transposed: bool,
    /// Gate and up outputs alternate instead of all gate outputs coming first.
    pub interleaved: bool,
}

impl FusedLayout {
    /// The layout that a family publishes.
    pub fn of(model_type: ModelType) -> Self {
        let gpt_oss = model_type == ModelType::GptOss;
        Self {
            transposed: gpt_oss,
            interleaved: gpt_oss,
        }
    }
}

/// A matrix inside a buffer; element (r, k) is number first + r * row_stride + k * step.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) buffer: usize,
    pub(super) first: usize,
    pub(super) row_stride: usize,
    pub(super) step: usize,
    /// Whether rows 0..128, 128..256, .. of the matrix are such rows of the tensor's matrix too,
    /// so that they share their blocks.
    pub(super) blocks_aligned: bool,
}

/// What is to be read, while names and shapes are being checked.
pub(super) struct Plan<'a> {
    claims: Claims<'a>,
    buffers: Vec<Source<'a>>,
    spec: MoeSpec,
    fused: FusedLayout,
    /// Rows and columns of an fp8 block.
    block: [usize; 2],
}

/// How experts are named; `suffix` is what follows the module's name.
enum Spelling {
    PerExpert {
        names: [&'static str; 3],
    },
    Fused {
        suffix: &'static str,
    },
    Stacked {
        module: &'static str,
        suffix: &'static str,
    },
}

const MATRICES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const UP_SHAPE: &str = "(intermediate, hidden)";
const DOWN_SHAPE: &str = "(hidden, intermediate)";

impl<'a> Plan<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        spec: MoeSpec,
        fused: FusedLayout,
    ) -> Result<Self, CheckpointError> {
        let claims = Claims::of_layer(checkpoint, spec.layer)?;
        Ok(Self {
            claims,
            buffers: Vec::new(),
            spec,
            fused,
            block: checkpoint.config().weight_block,
        })
    }

    /// What the names of the block's tensors start with.
    pub(super) fn prefix(&self) -> &str {
        self.claims.prefix()
    }

    /// The tensors to be read as they are, in the order of the views' buffer numbers.
    ///
    /// # Errors
    /// Tensors that are missing or left over.
    pub(super) fn finish(self) -> Result<Vec<Source<'a>>, CheckpointError> {
        self.claims.finish()?;
        Ok(self.buffers)
    }

    /// Weight, bias and correction.
    pub(super) fn router(
        &mut self,
        correction: bool,
    ) -> Result<[Option<Tensor<'a>>; 3], CheckpointError> {
        let (experts, hidden) = (self.spec.experts, self.spec.hidden);
        let module = if self.claims.has("router.weight") {
            "router"
        } else {
            "gate"
        };
        let mut claim = |name, shape: &[usize], meaning| {
            self.claims
                .take(&format!("{module}.{name}"), shape, meaning)
        };
        let weight = claim("weight", &[experts, hidden], "(experts, hidden)")?;
        let bias = match self.spec.bias {
            true => claim("bias", &[experts], "(experts)")?,
            false => None,
        };
        let correction = match correction {
            true => claim("e_score_correction_bias", &[experts], "(experts)")?,
            false => None,
        };
        Ok([weight, bias, correction])
    }

    fn spelling(&self) -> Spelling {
        for suffix in ["", ".weight", "_blocks"] {
            if self.claims.has(&format!("experts.gate_up_proj{suffix}")) {
                return Spelling::Fused { suffix };
            }
            for module in ["experts", "switch_mlp"] {
                if self.claims.has(&format!("{module}.gate_proj{suffix}")) {
                    return Spelling::Stacked { module, suffix };
                }
            }
        }
        let mixtral = self.claims.names().any(|name| {
            name.starts_with("experts.")
                && [".w1.weight", ".w2.weight", ".w3.weight"]
                    .iter()
                    .any(|part| name.contains(part))
        });
        let names = if mixtral {
            ["w1", "w3", "w2"]
        } else {
            MATRICES
        };
        Spelling::PerExpert { names }
    }

    pub(super) fn experts(&mut self) -> Result<(Vec<[View; 3]>, Biases<'a>), CheckpointError> {
        let &MoeSpec {
            hidden,
            intermediate,
            experts,
            bias,
            ..
        } = &self.spec;
        match self.spelling() {
            Spelling::PerExpert { names } => {
                let mut views = Vec::with_capacity(experts);
                let mut biases = Vec::new();
                for e in 0..experts {
                    let module = format!("experts.{e}");
                    views.push(self.matrices(&module, names, intermediate)?);
                    if bias {
                        for (name, len) in names.iter().zip([intermediate, intermediate, hidden]) {
                            let name = format!("{module}.{name}.bias");
                            biases.push(self.claims.take(&name, &[len], "(outputs)")?);
                        }
                    }
                }
                Ok((views, Biases::PerExpert(biases)))
            }
            Spelling::Fused { suffix } => {
                let outputs = 2 * intermediate;
                let up = self.bank("experts.gate_up_proj", suffix, outputs, hidden)?;
                let down = self.bank("experts.down_proj", suffix, hidden, intermediate)?;
                let FusedLayout { interleaved, .. } = self.fused;
                let (first_up, stride) = if interleaved {
                    (1, 2)
                } else {
                    (intermediate, 1)
                };
                let views = (0..experts)
                    .map(|e| {
                        let both = up.expert(e);
                        [
                            both.rows(0, stride),
                            both.rows(first_up, stride),
                            down.expert(e),
                        ]
                    })
                    .collect();
                let biases = if bias {
                    let gate_up = self.bank_bias("experts.gate_up_proj", suffix, outputs)?;
                    let down = self.bank_bias("experts.down_proj", suffix, hidden)?;
                    Biases::Fused {
                        gate_up,
                        down,
                        interleaved,
                    }
                } else {
                    Biases::PerExpert(Vec::new())
                };
                Ok((views, biases))
            }
            Spelling::Stacked { module, suffix } => {
                let name = |matrix: &str| format!("{module}.{matrix}");
                let [gate, up, down] = MATRICES.map(name);
                let banks = [
                    self.bank(&gate, suffix, intermediate, hidden)?,
                    self.bank(&up, suffix, intermediate, hidden)?,
                    self.bank(&down, suffix, hidden, intermediate)?,
                ];
                let views = (0..experts).map(|e| banks.each_ref().map(|bank| bank.expert(e)));
                let views = views.collect();
                let mut biases = Biases::PerExpert(Vec::new());
                if bias {
                    biases = Biases::Stacked([
                        self.bank_bias(&gate, suffix, intermediate)?,
                        self.bank_bias(&up, suffix, intermediate)?,
                        self.bank_bias(&down, suffix, hidden)?,
                    ]);
                }
                Ok((views, biases))
            }
        }
    }

    pub(super) fn shared(
        &mut self,
    ) -> Result<(Option<[View; 3]>, Option<Tensor<'a>>), CheckpointError> {
        let Some(SharedSpec {
            intermediate,
            gated,
        }) = self.spec.shared
        else {
            return Ok((None, None));
        };
        let module = match self.spec.model_type {
            ModelType::Qwen2Moe => "shared_expert",
            _ => "shared_experts",
        };
        let views = self.matrices(module, MATRICES, intermediate)?;
        let mut gate = None;
        if gated {
            let shape = [1, self.spec.hidden];
            gate = self
                .claims
                .take("shared_expert_gate.weight", &shape, "(1, hidden)")?;
        }
        Ok((Some(views), gate))
    }

    /// Three matrices of their own.
    fn matrices(
        &mut self,
        module: &str,
        names: [&str; 3],
        intermediate: usize,
    ) -> Result<[View; 3], CheckpointError> {
        let hidden = self.spec.hidden;
        let mut view = |name: &str, rows, columns, meaning| -> Result<View, CheckpointError> {
            let buffer = self.buffer(Wanted {
                module: &format!("{module}.{name}"),
                suffix: ".weight",
                experts: None,
                shape: Shape { rows, columns },
                meaning,
            })?;
            Ok(View {
                buffer,
                first: 0,
                row_stride: columns,
                step: 1,
                blocks_aligned: true,
            })
        };
        Ok([
            view(names[0], intermediate, hidden, UP_SHAPE)?,
            view(names[1], intermediate, hidden, UP_SHAPE)?,
            view(names[2], hidden, intermediate, DOWN_SHAPE)?,
        ])
    }

    /// One tensor with a matrix of each expert.
    fn bank(
        &mut self,
        name: &str,
        suffix: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Bank, CheckpointError> {
        let full = format!("{name}{suffix}");
        let float = self
            .claims
            .info(&full)
            .and_then(|info| Float::of(info.dtype));
        // What is packed along the inputs cannot be transposed.
        let transposed = self.fused.transposed && suffix != "_blocks";
        if let (true, None, Some(info)) = (transposed, float, self.claims.info(&full)) {
            return Err(CheckpointError::Transposed {
                tensor: full,
                dtype: info.dtype.to_string(),
            });
        }
        let (rows, columns, meaning) = match transposed {
            true => (inputs, outputs, "(experts, inputs, outputs)"),
            false => (outputs, inputs, "(experts, outputs, inputs)"),
        };
        let buffer = self.buffer(Wanted {
            module: name,
            suffix,
            experts: Some(self.spec.experts),
            shape: Shape { rows, columns },
            meaning,
        })?;
        let (row_stride, step) = match transposed {
            true => (1, outputs),
            false => (inputs, 1),
        };
        Ok(Bank {
            matrix: View {
                buffer,
                first: 0,
                row_stride,
                step,
                blocks_aligned: true,
            },
            size: outputs * inputs,
        })
    }

    fn bank_bias(
        &mut self,
        name: &str,
        suffix: &str,
        outputs: usize,
    ) -> Result<Option<Tensor<'a>>, CheckpointError> {
        let name = match suffix {
            ".weight" => format!("{name}.bias"),
            _ => format!("{name}_bias"),
        };
        self.claims
            .take(&name, &[self.spec.experts, outputs], "(experts, outputs)")
    }

    /// The number of the buffer for a matrix; of no meaning if a tensor of it is missing,
    /// which [`Claims::finish`] reports before anything is read.
    fn buffer(&mut self, wanted: Wanted<'_>) -> Result<usize, CheckpointError> {
        let number = self.buffers.len();
        let source = weights::claim(&mut self.claims, wanted, self.block)?;
        self.buffers.extend(source);
        Ok(number)
    }
}

/// The matrices of all experts in one buffer, `size` elements apart.
struct Bank {
    matrix: View,
    size: usize,
}

impl Bank {
    fn expert(&self, expert: usize) -> View {
        View {
            first: expert * self.size,
            ..self.matrix
        }
    }
}

impl View {
    /// The rows `first`, `first + stride`, ...
    fn rows(self, first: usize, stride: usize) -> View {
        View {
            first: self.first + first * self.row_stride,
            row_stride: stride * self.row_stride,
            blocks_aligned: stride == 1 && first.is_multiple_of(fp8::BLOCK),
            ..self
        }
    }
}

/// Where the experts' biases are.
#[derive(Debug)]
pub(super) enum Biases<'a> {
    /// Gate, up and down of each expert; none if there are no biases.
    PerExpert(Vec<Option<Tensor<'a>>>),
    /// Gate, up and down of all experts.
    Stacked([Option<Tensor<'a>>; 3]),
    Fused {
        gate_up: Option<Tensor<'a>>,
        down: Option<Tensor<'a>>,
        interleaved: bool,
    },
}

impl Biases<'_> {
    /// Reads them into the order of [`MoeLayer`]'s `biases`.
    pub(super) fn read(&self, spec: &MoeSpec) -> Result<Vec<f32>, CheckpointError> {
        let &MoeSpec {
            hidden,
            intermediate,
            experts,
            ..
        } = spec;
        let read = |tensor: &Option<Tensor<'_>>| match tensor {
            Some(tensor) => tensor.read_f32(),
            None => Ok(Vec::new()),
        };
        let mut biases = Vec::new();
        match self {
            Self::PerExpert(tensors) => {
                for tensor in tensors {
                    biases.extend(read(tensor)?);
                }
            }
            Self::Stacked([gate, up, down]) => {
                let (gate, up, down) = (read(gate)?, read(up)?, read(down)?);
                for e in 0..experts {
                    biases.extend(&gate[e * intermediate..][..intermediate]);
                    biases.extend(&up[e * intermediate..][..intermediate]);
                    biases.extend(&down[e * hidden..][..hidden]);
                }
            }
            Self::Fused {
                gate_up,
                down,
                interleaved,
            } => {
                let (gate_up, down) = (read(gate_up)?, read(down)?);
                for e in 0..experts {
                    let both = &gate_up[e * 2 * intermediate..][..2 * intermediate];
                    if *interleaved {
                        biases.extend(both.iter().step_by(2));
                        biases.extend(both.iter().skip(1).step_by(2));
                    } else {
                        biases.extend(both);
                    }
                    biases.extend(&down[e * hidden..][..hidden]);
                }
            }
        }
        Ok(biases)
    }
}
