//! config.json: the shape of a model's MoE layers.
//!
//! Each family spells its settings in its own way and leaves out those that equal its
//! default; both follow the configuration classes of the transformers library.

use super::error::ConfigError;
use super::fields::{Fields, value_error};
use crate::moe::routing::Scoring;
use asym_gemm_formats::activation::Activation;
use serde_json::{Map, Value};
use std::fmt;

/// The supported model families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelType {
    /// `qwen2_moe`.
    Qwen2Moe,
    /// `qwen3_moe`.
    Qwen3Moe,
    /// `olmoe`.
    Olmoe,
    /// `mixtral`.
    Mixtral,
    /// `deepseek_v3`.
    DeepseekV3,
    /// `glm4_moe`.
    Glm4Moe,
    /// `gpt_oss`.
    GptOss,
}

impl ModelType {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Olmoe,
        Self::Mixtral,
        Self::DeepseekV3,
        Self::Glm4Moe,
        Self::GptOss,
    ];

    /// The name in config.json.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Olmoe => "olmoe",
            Self::Mixtral => "mixtral",
            Self::DeepseekV3 => "deepseek_v3",
            Self::Glm4Moe => "glm4_moe",
            Self::GptOss => "gpt_oss",
        }
    }

    pub(super) fn list() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    const fn defaults(self) -> Defaults {
        // layers, hidden, expert width, experts, top_k, renormalise, dense layers in front
        let (layers, hidden, width, experts, top_k, renormalise, dense) = match self {
            Self::Qwen2Moe => (24, 2048, 1408, 60, 4, false, 0),
            Self::Qwen3Moe => (24, 2048, 768, 128, 8, false, 0),
            Self::Olmoe => (16, 2048, 2048, 64, 8, false, 0),
            Self::Mixtral => (32, 4096, 14336, 8, 2, true, 0),
            Self::DeepseekV3 => (61, 7168, 2048, 256, 8, true, 3),
            Self::Glm4Moe => (46, 4096, 1408, 128, 8, true, 1),
            Self::GptOss => (36, 2880, 2880, 128, 4, true, 0),
        };
        Defaults {
            layers,
            hidden,
            width,
            experts,
            top_k,
            renormalise,
            dense,
        }
    }
}

impl fmt::Display for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

struct Defaults {
    layers: usize,
    hidden: usize,
    width: usize,
    experts: usize,
    top_k: usize,
    renormalise: bool,
    dense: usize,
}

/// Far above any model: what a description may make us loop over.
const MAX_LAYERS: usize = 1 << 16;
/// As [`MAX_LAYERS`].
const MAX_EXPERTS: usize = 1 << 20;

/// An expert that every token visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSpec {
    /// Its width.
    pub intermediate: usize,
    /// Whether its output is scaled by the sigmoid of a linear layer of the input.
    pub gated: bool,
}

/// How the router scores, but for the tensors that it needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScoringConfig {
    /// [`Scoring::Softmax`].
    Softmax {
        /// Whether the weights of a token sum to one.
        renormalise: bool,
    },
    /// [`Scoring::SoftmaxOfTopK`].
    SoftmaxOfTopK,
    /// [`Scoring::GroupedSigmoid`].
    GroupedSigmoid {
        /// Number of groups.
        groups: usize,
        /// Groups from which experts may be chosen.
        chosen_groups: usize,
        /// Whether the weights of a token sum to `scale`.
        renormalise: bool,
        /// Factor of all weights.
        scale: f32,
    },
}

impl ScoringConfig {
    /// Whether choices are corrected by a tensor `e_score_correction_bias`.
    pub fn has_correction(&self) -> bool {
        matches!(self, Self::GroupedSigmoid { .. })
    }

    /// With the correction, which is ignored where there is none.
    pub fn with_correction(self, correction: Vec<f32>) -> Scoring {
        match self {
            Self::Softmax { renormalise } => Scoring::Softmax { renormalise },
            Self::SoftmaxOfTopK => Scoring::SoftmaxOfTopK,
            Self::GroupedSigmoid {
                groups,
                chosen_groups,
                renormalise,
                scale,
            } => Scoring::GroupedSigmoid {
                correction,
                groups,
                chosen_groups,
                renormalise,
                scale,
            },
        }
    }
}

/// What config.json says about the MoE layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub model_type: ModelType,
    /// Layers of the model, dense ones included.
    pub layers: usize,
    /// Model width H.
    pub hidden: usize,
    /// Expert width I.
    pub intermediate: usize,
    /// Experts E of a MoE layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Between gate, up and down.
    pub activation: Activation,
    /// How the router scores.
    pub scoring: ScoringConfig,
    /// The shared expert; several of them are one of their joint width.
    pub shared: Option<SharedSpec>,
    /// Whether router and experts have biases.
    pub bias: bool,
    /// Method of `quantization_config`, if there is one.
    pub quantization: Option<String>,
    /// Rows and columns of an fp8 block with one scale (128 x 128 if config.json does not say).
    pub weight_block: [usize; 2],
    sparsity: Sparsity,
}

/// Which layers are MoE layers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sparsity {
    All,
    /// Every `step`-th, but for those listed.
    Step {
        step: usize,
        dense: Vec<usize>,
    },
    /// From `dense` on, every `step`-th.
    From {
        dense: usize,
        step: usize,
    },
}

impl ModelConfig {
    /// Parses the text of a config.json.
    ///
    /// # Errors
    /// Unknown model types, activations and scorings; values of the wrong type or out of
    /// range. A quantised model is described all the same, with `quantization` set.
    pub fn parse(json: &[u8]) -> Result<Self, ConfigError> {
        let fields: Map<String, Value> =
            serde_json::from_slice(json).map_err(|err| ConfigError::Json(err.to_string()))?;
        let fields = Fields(fields);
        let name = match fields.get("model_type") {
            None => return Err(ConfigError::NoModelType),
            Some(Value::String(name)) => name,
            Some(other) => return Err(value_error("model_type", other, "a string")),
        };
        let model_type = ModelType::ALL
            .into_iter()
            .find(|family| family.name() == name)
            .ok_or_else(|| ConfigError::UnknownModelType(name.clone()))?;
        Self::of_family(model_type, &fields)
    }

    fn of_family(model_type: ModelType, fields: &Fields) -> Result<Self, ConfigError> {
        use ModelType::*;
        let default = model_type.defaults();
        let (width_key, expert_keys): (_, &[&'static str]) = match model_type {
            Qwen2Moe | Qwen3Moe => (
                "moe_intermediate_size",
                &["num_experts", "num_local_experts"],
            ),
            Olmoe => ("intermediate_size", &["num_experts", "num_local_experts"]),
            Mixtral | GptOss => ("intermediate_size", &["num_local_experts", "num_experts"]),
            DeepseekV3 | Glm4Moe => (
                "moe_intermediate_size",
                &["n_routed_experts", "num_local_experts"],
            ),
        };
        let hidden = fields.size("hidden_size", default.hidden)?;
        let intermediate = fields.size(width_key, default.width)?;
        let experts = fields.either(expert_keys, default.experts)?;
        at_most(expert_keys[0], experts, MAX_EXPERTS)?;
        let layers = fields.size("num_hidden_layers", default.layers)?;
        at_most("num_hidden_layers", layers, MAX_LAYERS)?;
        // The largest tensor of a layer as f32; every product of sizes stays below.
        let bytes = [2, experts, intermediate, hidden, 4];
        if bytes
            .iter()
            .try_fold(1usize, |n, &m| n.checked_mul(m))
            .is_none()
        {
            return Err(ConfigError::TooLarge {
                experts,
                intermediate,
                hidden,
            });
        }
        let top_k = fields.size("num_experts_per_tok", default.top_k)?;
        at_most("num_experts_per_tok", top_k, experts)?;
        let renormalise = match model_type {
            Mixtral | GptOss => default.renormalise,
            _ => fields.bool("norm_topk_prob", default.renormalise)?,
        };

        let activation = if model_type == GptOss {
            Activation::ClampedSwiGlu {
                limit: fields.positive("swiglu_limit", 7.0)?,
                alpha: fields.positive("swiglu_alpha", 1.702)?,
            }
        } else {
            fields.only("hidden_act", &["silu", "swish"])?;
            Activation::SwiGlu
        };

        let scoring = match model_type {
            Qwen2Moe | Qwen3Moe | Olmoe | Mixtral => ScoringConfig::Softmax { renormalise },
            GptOss => ScoringConfig::SoftmaxOfTopK,
            DeepseekV3 | Glm4Moe => {
                fields.only("scoring_func", &["sigmoid"])?;
                fields.only("topk_method", &["noaux_tc"])?;
                let (groups, chosen, scale) = match model_type {
                    DeepseekV3 => (8, 4, 2.5),
                    _ => (1, 1, 1.0),
                };
                ScoringConfig::GroupedSigmoid {
                    groups: fields.size("n_group", groups)?,
                    chosen_groups: fields.size("topk_group", chosen)?,
                    renormalise,
                    scale: fields.positive("routed_scaling_factor", scale)?,
                }
            }
        };

        let shared = match model_type {
            Qwen2Moe => {
                let width = fields.size("shared_expert_intermediate_size", 5632)?;
                Some(SharedSpec {
                    intermediate: width,
                    gated: true,
                })
            }
            DeepseekV3 | Glm4Moe => shared_experts(fields, intermediate)?,
            _ => None,
        };
        if let Some(SharedSpec { intermediate, .. }) = shared
            && intermediate.checked_mul(4 * hidden).is_none()
        {
            return Err(ConfigError::TooLarge {
                experts: 1,
                intermediate,
                hidden,
            });
        }

        let sparsity = match model_type {
            Qwen2Moe | Qwen3Moe => Sparsity::Step {
                step: fields.size("decoder_sparse_step", 1)?,
                dense: fields.layers("mlp_only_layers")?,
            },
            DeepseekV3 | Glm4Moe => Sparsity::From {
                dense: fields.count("first_k_dense_replace", default.dense)?,
                step: fields.size("moe_layer_freq", 1)?,
            },
            _ => Sparsity::All,
        };

        Ok(Self {
            model_type,
            layers,
            hidden,
            intermediate,
            experts,
            top_k,
            activation,
            scoring,
            shared,
            bias: model_type == GptOss,
            quantization: fields.quantization(),
            weight_block: fields.weight_block()?,
            sparsity,
        })
    }

    /// Why layer `layer` is dense, if it is.
    pub fn dense_reason(&self, layer: usize) -> Option<String> {
        match &self.sparsity {
            Sparsity::All => None,
            Sparsity::Step { dense, .. } if dense.contains(&layer) => {
                Some("listed in mlp_only_layers".to_owned())
            }
            Sparsity::Step { step, .. } if !(layer + 1).is_multiple_of(*step) => {
                Some(format!("decoder_sparse_step is {step}"))
            }
            Sparsity::From { dense, .. } if layer < *dense => {
                Some(format!("first_k_dense_replace is {dense}"))
            }
            Sparsity::From { step, .. } if !layer.is_multiple_of(*step) => {
                Some(format!("moe_layer_freq is {step}"))
            }
            _ => None,
        }
    }

    /// The layers that are MoE layers, ascending.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers).filter(|&layer| self.dense_reason(layer).is_none())
    }
}

fn at_most(key: &'static str, value: usize, limit: usize) -> Result<(), ConfigError> {
    match value <= limit {
        true => Ok(()),
        false => Err(value_error(
            key,
            &Value::from(value),
            format!("at most {limit}"),
        )),
    }
}

/// DeepSeek's shared experts, computed as one of their joint width.
fn shared_experts(fields: &Fields, width: usize) -> Result<Option<SharedSpec>, ConfigError> {
    const KEY: &str = "n_shared_experts";
    // Here null is a value: no shared expert.
    let count = if fields.is_null(KEY) {
        0
    } else {
        fields.count(KEY, 1)?
    };
    match width.checked_mul(count) {
        Some(0) => Ok(None),
        Some(intermediate) => Ok(Some(SharedSpec {
            intermediate,
            gated: false,
        })),
        None => Err(value_error(KEY, &Value::from(count), "a smaller number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ModelConfig, ConfigError> {
        ModelConfig::parse(json.as_bytes())
    }

    fn only_type(name: &str) -> ModelConfig {
        parse(&format!(r#"{{"model_type": "{name}"}}"#)).unwrap()
    }

    /// The published models at their families' defaults.
    #[test]
    fn defaults() {
        let shape = |name: &str| {
            let c = only_type(name);
            (c.layers, c.hidden, c.intermediate, c.experts, c.top_k)
        };
        assert_eq!(shape("qwen2_moe"), (24, 2048, 1408, 60, 4));
        assert_eq!(shape("qwen3_moe"), (24, 2048, 768, 128, 8));
        assert_eq!(shape("olmoe"), (16, 2048, 2048, 64, 8));
        assert_eq!(shape("mixtral"), (32, 4096, 14336, 8, 2));
        assert_eq!(shape("deepseek_v3"), (61, 7168, 2048, 256, 8));
        assert_eq!(shape("glm4_moe"), (46, 4096, 1408, 128, 8));
        assert_eq!(shape("gpt_oss"), (36, 2880, 2880, 128, 4));

        let softmax = |renormalise| ScoringConfig::Softmax { renormalise };
        assert_eq!(only_type("qwen2_moe").scoring, softmax(false));
        assert_eq!(only_type("qwen3_moe").scoring, softmax(false));
        assert_eq!(only_type("olmoe").scoring, softmax(false));
        assert_eq!(only_type("mixtral").scoring, softmax(true));
        let grouped = |groups, chosen_groups, scale| ScoringConfig::GroupedSigmoid {
            groups,
            chosen_groups,
            renormalise: true,
            scale,
        };
        assert_eq!(only_type("deepseek_v3").scoring, grouped(8, 4, 2.5));
        assert_eq!(only_type("glm4_moe").scoring, grouped(1, 1, 1.0));
        assert_eq!(
            only_type("gpt_oss").activation,
            Activation::ClampedSwiGlu {
                limit: 7.0,
                alpha: 1.702
            }
        );
        let shared = |name| only_type(name).shared.map(|s| (s.intermediate, s.gated));
        assert_eq!(shared("qwen2_moe"), Some((5632, true)));
        assert_eq!(shared("deepseek_v3"), Some((2048, false)));
        assert_eq!(shared("qwen3_moe"), None);
    }

    #[test]
    fn which_layers_are_sparse() {
        let layers = |json: &str| parse(json).unwrap().moe_layers().collect::<Vec<_>>();
        assert_eq!(
            layers(
                r#"{"model_type": "qwen3_moe", "num_hidden_layers": 6,
                    "decoder_sparse_step": 2, "mlp_only_layers": [3]}"#
            ),
            [1, 5]
        );
        assert_eq!(
            layers(
                r#"{"model_type": "deepseek_v3", "num_hidden_layers": 7,
                    "first_k_dense_replace": 3, "moe_layer_freq": 2}"#
            ),
            [4, 6]
        );
        assert_eq!(
            layers(r#"{"model_type": "mixtral", "num_hidden_layers": 2}"#),
            [0, 1]
        );
        let config = only_type("glm4_moe");
        assert!(
            config
                .dense_reason(0)
                .unwrap()
                .contains("first_k_dense_replace")
        );
        assert_eq!(config.dense_reason(1), None);
    }

    #[test]
    fn spellings() {
        let experts = |json: &str| parse(json).map(|c| c.experts);
        for key in ["num_experts", "num_local_experts"] {
            for family in ["qwen3_moe", "olmoe", "mixtral", "gpt_oss"] {
                let json = format!(r#"{{"model_type": "{family}", "{key}": 10}}"#);
                assert_eq!(experts(&json), Ok(10));
            }
        }
        let both = r#"{"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}"#;
        assert!(matches!(experts(both), Err(ConfigError::Conflict { .. })));
        let none = parse(r#"{"model_type": "deepseek_v3", "n_shared_experts": null}"#).unwrap();
        assert_eq!(none.shared, None);
        let two = parse(r#"{"model_type": "deepseek_v3", "n_shared_experts": 2}"#).unwrap();
        assert_eq!(
            two.shared,
            Some(SharedSpec {
                intermediate: 4096,
                gated: false
            })
        );
        let null = parse(r#"{"model_type": "qwen2_moe", "mlp_only_layers": null}"#).unwrap();
        assert_eq!(null.moe_layers().count(), 24);
    }

    #[test]
    fn quantisation_is_named() {
        let method = |config: &str| {
            let json = format!(r#"{{"model_type": "qwen3_moe", "quantization_config": {config}}}"#);
            parse(&json).unwrap().quantization
        };
        assert_eq!(method("null"), None);
        assert_eq!(method(r#"{"quant_method": "mxfp4"}"#).unwrap(), "mxfp4");
        assert_eq!(
            method(r#"{"quant_method": "fp8", "fmt": "e4m3"}"#).unwrap(),
            "fp8 (e4m3)"
        );
        assert_eq!(method("{}").unwrap(), "an unnamed method");
    }

    #[test]
    fn refusals_name_key_and_value() {
        let refused = |rest: &str, needles: &[&str]| {
            let text = parse(&format!("{{{rest}}}")).unwrap_err().to_string();
            for needle in needles {
                assert!(text.contains(needle), "{text} lacks {needle}");
            }
        };
        refused("", &["model_type", "qwen3_moe, olmoe"]);
        refused(r#""model_type": 3"#, &["model_type", "3"]);
        refused(
            r#""model_type": "llama""#,
            &["llama", "deepseek_v3", "gpt_oss"],
        );
        let q = r#""model_type": "qwen3_moe", "#;
        refused(
            &format!(r#"{q}"hidden_act": "gelu""#),
            &["hidden_act", "gelu", "silu"],
        );
        refused(&format!(r#"{q}"hidden_size": 0"#), &["hidden_size", "0"]);
        refused(&format!(r#"{q}"hidden_size": -5"#), &["hidden_size", "-5"]);
        refused(
            &format!(r#"{q}"hidden_size": 2.5"#),
            &["hidden_size", "2.5"],
        );
        refused(
            &format!(r#"{q}"num_experts": "8""#),
            &["num_experts", "\"8\""],
        );
        refused(&format!(r#"{q}"norm_topk_prob": 1"#), &["norm_topk_prob"]);
        refused(
            &format!(r#"{q}"num_experts_per_tok": 129"#),
            &["num_experts_per_tok", "129", "128"],
        );
        refused(
            &format!(r#"{q}"decoder_sparse_step": 0"#),
            &["decoder_sparse_step"],
        );
        refused(
            &format!(r#"{q}"mlp_only_layers": [1, "x"]"#),
            &["mlp_only_layers"],
        );
        refused(
            &format!(r#"{q}"num_experts": 1048577"#),
            &["num_experts", "1048577", "1048576"],
        );
        refused(
            &format!(r#"{q}"num_hidden_layers": 65537"#),
            &["num_hidden_layers", "65536"],
        );
        let huge = 1u64 << 40;
        refused(
            &format!(r#"{q}"hidden_size": {huge}, "moe_intermediate_size": {huge}"#),
            &["memory"],
        );
        let d = r#""model_type": "deepseek_v3", "#;
        refused(
            &format!(r#"{d}"scoring_func": "softmax""#),
            &["scoring_func", "softmax", "sigmoid"],
        );
        refused(
            &format!(r#"{d}"topk_method": "greedy""#),
            &["topk_method", "greedy"],
        );
        refused(
            &format!(r#"{d}"routed_scaling_factor": 0"#),
            &["routed_scaling_factor"],
        );
        assert!(matches!(parse("[]"), Err(ConfigError::Json(_))));
        assert!(matches!(parse(""), Err(ConfigError::Json(_))));
    }
}
