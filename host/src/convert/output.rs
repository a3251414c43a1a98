//! Where the results of a conversion lie: layer files, the manifest, the rest of the model.

use super::encode::Encoded;
use super::{ConvertError, Target, int8_layer_name};
use crate::checkpoint::{
    Checkpoint, FileError, LayerStream, ModelType, TensorFile, TensorShape, TensorWriter,
    remove_unfinished, replace_file,
};
use asym_gemm_formats::bank::Projection;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Bytes of a file of tensors that are not experts.
const SHARD_BYTES: usize = 4 << 30;
/// Bytes copied at a time.
const COPY_BYTES: usize = 8 << 20;

/// The tensors of one layer's file.
pub(super) struct Layout {
    target: Target,
    layer: usize,
    /// What the names of the block's tensors start with.
    prefix: String,
    names: [&'static str; 3],
    experts: usize,
    shapes: [(usize, usize); 3],
    bias: bool,
}

impl Layout {
    pub(super) fn new(target: Target, stream: &LayerStream<'_>) -> Self {
        let spec = stream.spec();
        let names = match spec.model_type {
            ModelType::Mixtral => ["w1", "w3", "w2"],
            _ => ["gate_proj", "up_proj", "down_proj"],
        };
        Self {
            target,
            layer: spec.layer,
            prefix: stream.prefix().to_owned(),
            names,
            experts: spec.experts,
            shapes: super::PROJECTIONS.map(|p| stream.shape(p)),
            // The reference layout of int8 has none: they stay in the checkpoint.
            bias: spec.bias && !target.is_int8(),
        }
    }

    fn file_name(&self) -> String {
        match self.target.is_int8() {
            true => int8_layer_name(self.layer),
            false => expert_file_name(self.layer),
        }
    }

    pub(super) fn path(&self, out: &Path) -> PathBuf {
        out.join(self.file_name())
    }

    /// Names of a matrix's codes, scales and scale of the whole.
    fn tensor_names(&self, expert: usize, projection: Projection) -> [String; 3] {
        if self.target.is_int8() {
            let name = ["gate", "up", "down"][projection as usize];
            return [
                format!("{name}_int8"),
                format!("{name}_scales"),
                String::new(),
            ];
        }
        let module = self.module(expert, projection);
        match self.target {
            Target::Mxfp4 => [
                format!("{module}.weight_packed"),
                format!("{module}.weight_scale"),
                String::new(),
            ],
            Target::Nvfp4 => [
                format!("{module}.weight"),
                format!("{module}.weight_scale"),
                format!("{module}.weight_scale_2"),
            ],
            _ => [
                format!("{module}.weight"),
                format!("{module}.weight_scale_inv"),
                String::new(),
            ],
        }
    }

    fn module(&self, expert: usize, projection: Projection) -> String {
        let name = self.names[projection as usize];
        format!("{}experts.{expert}.{name}", self.prefix)
    }

    /// Everything the file holds.
    pub(super) fn tensors(&self) -> Vec<TensorShape> {
        let mut tensors = Vec::new();
        let mut add = |name: String, dtype, shape: Vec<usize>| {
            tensors.push(TensorShape { name, dtype, shape });
        };
        let [code, scale] = match self.target {
            Target::Int8 | Target::Int8Block => [Dtype::I8, Dtype::F32],
            Target::Fp8 => [Dtype::F8_E4M3, Dtype::F32],
            Target::Nvfp4 => [Dtype::U8, Dtype::F8_E4M3],
            Target::Mxfp4 => [Dtype::U8, Dtype::U8],
        };
        let per_file = if self.target.is_int8() {
            1
        } else {
            self.experts
        };
        for expert in 0..per_file {
            for projection in super::PROJECTIONS {
                let (rows, columns) = self.shapes[projection as usize];
                let [codes, scales, global] = self.tensor_names(expert, projection);
                let lead = self.target.is_int8().then_some(self.experts);
                let dims = |last: &[usize]| lead.iter().chain(last).copied().collect();
                add(codes, code, dims(&[rows, self.target.row_bytes(columns)]));
                let scale_rows = rows.div_ceil(self.target.scale_rows());
                let row_scales = self.target.row_scales(columns);
                let scale_shape = match self.target {
                    Target::Int8 => dims(&[rows]),
                    _ => dims(&[scale_rows, row_scales]),
                };
                add(scales, scale, scale_shape);
                if self.target == Target::Nvfp4 {
                    add(global, Dtype::F32, Vec::new());
                }
                if self.bias {
                    let name = format!("{}.bias", self.module(expert, projection));
                    add(name, Dtype::F32, vec![rows]);
                }
            }
        }
        tensors
    }

    /// Whether the layer's file is there with all its tensors. What bears the name was complete
    /// on disk; this finds files that something else has changed since.
    pub(super) fn is_complete(&self, out: &Path) -> Result<bool, FileError> {
        let path = self.path(out);
        if !path.exists() {
            return Ok(false);
        }
        let file = TensorFile::open(path)?;
        let tensors = self.tensors();
        Ok(file.tensors().len() == tensors.len()
            && tensors.iter().all(|tensor| {
                let info = file.tensors().get(&tensor.name);
                info.is_some_and(|i| i.dtype == tensor.dtype && i.shape == tensor.shape)
            }))
    }

    /// Where an expert's part of a tensor starts, that has `len` bytes.
    fn start(&self, expert: usize, len: usize) -> usize {
        if self.target.is_int8() {
            expert * len
        } else {
            0
        }
    }

    pub(super) fn put(
        &self,
        writer: &TensorWriter,
        expert: usize,
        projection: Projection,
        matrix: &Encoded,
    ) -> Result<(), FileError> {
        let [codes, scales, global] = self.tensor_names(expert, projection);
        let start = |bytes: &[u8]| self.start(expert, bytes.len());
        writer.put(&codes, start(&matrix.codes), &matrix.codes)?;
        writer.put(&scales, start(&matrix.scales), &matrix.scales)?;
        if self.target == Target::Nvfp4 {
            writer.put(&global, 0, &matrix.global.to_le_bytes())?;
        }
        Ok(())
    }

    pub(super) fn put_bias(
        &self,
        writer: &TensorWriter,
        expert: usize,
        projection: Projection,
        bias: &[f32],
    ) -> Result<(), FileError> {
        if !self.bias {
            return Ok(());
        }
        let bytes: Vec<u8> = bias.iter().flat_map(|b| b.to_le_bytes()).collect();
        let name = format!("{}.bias", self.module(expert, projection));
        writer.put(&name, 0, &bytes)
    }

    /// Reads a matrix back into `matrix`, whose parts have their lengths.
    pub(super) fn read_back(
        &self,
        writer: &TensorWriter,
        expert: usize,
        projection: Projection,
        matrix: &mut Encoded,
    ) -> Result<(), FileError> {
        let [codes, scales, global] = self.tensor_names(expert, projection);
        let start = self.start(expert, matrix.codes.len());
        writer.read_back(&codes, start, &mut matrix.codes)?;
        let start = self.start(expert, matrix.scales.len());
        writer.read_back(&scales, start, &mut matrix.scales)?;
        matrix.global = 1.0;
        if self.target == Target::Nvfp4 {
            let mut bytes = [0; 4];
            writer.read_back(&global, 0, &mut bytes)?;
            matrix.global = f32::from_le_bytes(bytes);
        }
        Ok(())
    }
}

fn expert_file_name(layer: usize) -> String {
    format!("experts-layer-{layer:05}.safetensors")
}

impl Target {
    fn is_int8(self) -> bool {
        matches!(self, Self::Int8 | Self::Int8Block)
    }

    fn manifest_name(self) -> &'static str {
        match self.is_int8() {
            true => "asym_int8_manifest.json",
            false => "asym_convert_manifest.json",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Int8 => {
                "symmetric int8, one f32 scale for each output row: max(amax / 127, 1e-12)"
            }
            Self::Int8Block => {
                "symmetric int8, one f32 scale for each output row and 128 inputs: max(amax, 1e-4) / 127"
            }
            Self::Fp8 => "e4m3, one f32 scale for each 128 x 128: amax / 448",
            Self::Nvfp4 => "e2m1, e4m3 scale for each 16 inputs, f32 scale for each matrix",
            Self::Mxfp4 => "e2m1, power of two for each 32 inputs",
        }
    }

    /// The `quantization_config` that tells other software what the experts are.
    fn quantization_config(self, others: &[String]) -> Value {
        match self {
            Self::Nvfp4 => json!({
                "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                "ignore": others, "exclude_modules": others,
            }),
            Self::Mxfp4 => json!({
                "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                "config_groups": { "group_0": {
                    "targets": ["Linear"], "format": "mxfp4-pack-quantized",
                    "input_activations": null, "output_activations": null,
                    "weights": {
                        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                        "symmetric": true, "dynamic": false,
                    },
                } },
                "ignore": others, "quantization_status": "compressed",
            }),
            _ => json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": others,
            }),
        }
    }
}

/// What a manifest file holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Contents {
    format_version: u32,
    source: String,
    target: String,
    layout: String,
    layer_file_pattern: String,
    converted_layers: BTreeSet<usize>,
    source_type: String,
    quantization: String,
    model: Value,
}

/// The list of what is done, on disk after each layer.
pub(super) struct Manifest<'a> {
    checkpoint: &'a Checkpoint,
    target: Target,
    out: PathBuf,
    contents: Contents,
}

impl<'a> Manifest<'a> {
    /// Makes the folder, or goes on with what it holds.
    pub(super) fn open(
        checkpoint: &'a Checkpoint,
        target: Target,
        out: &Path,
        resume: bool,
    ) -> Result<Self, ConvertError> {
        std::fs::create_dir_all(out).map_err(FileError::io(out))?;
        let canonical = |path: &Path| path.canonicalize().map_err(FileError::io(path));
        let source = canonical(checkpoint.folder_or_here())?;
        if canonical(out)? == source {
            return Err(ConvertError::InPlace { path: out.into() });
        }
        let config = checkpoint.config();
        let contents = Contents {
            format_version: 1,
            source: source.display().to_string(),
            target: target.name().to_owned(),
            layout: match target.is_int8() {
                true => "[experts, outputs, inputs]".to_owned(),
                false => "one matrix an expert, [outputs, inputs]".to_owned(),
            },
            layer_file_pattern: match target.is_int8() {
                true => "layer_{L}.safetensors".to_owned(),
                false => "experts-layer-{L:05}.safetensors".to_owned(),
            },
            converted_layers: BTreeSet::new(),
            source_type: String::new(),
            quantization: target.description().to_owned(),
            model: json!({
                "model_type": config.model_type.name(),
                "num_hidden_layers": config.layers,
                "hidden_size": config.hidden,
                "moe_intermediate_size": config.intermediate,
                "num_experts": config.experts,
                "num_experts_per_tok": config.top_k,
            }),
        };
        let mut manifest = Self {
            checkpoint,
            target,
            out: out.into(),
            contents,
        };
        let path = manifest.path();
        if path.exists() {
            if !resume {
                return Err(ConvertError::Exists { path: out.into() });
            }
            manifest.resume(&path)?;
        } else if let Some(entry) = foreign_entry(out)? {
            return Err(ConvertError::Foreign {
                path: out.into(),
                entry,
            });
        }
        remove_unfinished(out)?;
        manifest.save()?;
        Ok(manifest)
    }

    fn path(&self) -> PathBuf {
        self.out.join(self.target.manifest_name())
    }

    fn resume(&mut self, path: &Path) -> Result<(), ConvertError> {
        let bytes = std::fs::read(path).map_err(FileError::io(path))?;
        let old: Contents =
            serde_json::from_slice(&bytes).map_err(|err| ConvertError::Manifest {
                path: path.into(),
                message: err.to_string(),
            })?;
        let new = &self.contents;
        for (what, found, expected) in [
            ("source", &old.source, &new.source),
            ("target", &old.target, &new.target),
            ("model", &old.model.to_string(), &new.model.to_string()),
        ] {
            if found != expected {
                return Err(ConvertError::Different {
                    path: path.into(),
                    what,
                    found: found.clone(),
                    expected: expected.clone(),
                });
            }
        }
        self.contents.converted_layers = old.converted_layers;
        self.contents.source_type = old.source_type;
        Ok(())
    }

    fn save(&self) -> Result<(), FileError> {
        let bytes =
            serde_json::to_vec_pretty(&self.contents).map_err(|err| FileError::HeaderJson {
                path: self.path(),
                message: err.to_string(),
            })?;
        replace_file(&self.path(), &bytes)
    }

    pub(super) fn has(&self, layer: usize) -> bool {
        self.contents.converted_layers.contains(&layer)
    }

    /// Notes what the source's experts are stored as.
    pub(super) fn note_source(&mut self, names: Vec<String>) {
        self.contents.source_type = names.join(", ");
    }

    pub(super) fn add(&mut self, layer: usize) -> Result<(), FileError> {
        self.contents.converted_layers.insert(layer);
        self.save()
    }

    /// Writes what makes the folder complete.
    pub(super) fn finish(&self) -> Result<(), ConvertError> {
        let source = self.checkpoint.folder().join("config.json");
        let bytes = std::fs::read(&source).map_err(FileError::io(&source))?;
        let config = self.out.join("config.json");
        if self.target.is_int8() {
            return Ok(replace_file(&config, &bytes)?);
        }
        let mut weight_map = BTreeMap::new();
        for &layer in &self.contents.converted_layers {
            let name = expert_file_name(layer);
            let file = TensorFile::open(self.out.join(&name))?;
            for tensor in file.tensors().keys() {
                weight_map.insert(tensor.clone(), name.clone());
            }
        }
        let others = self.copy_others(&mut weight_map)?;
        let total: u64 = weight_map
            .values()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .filter_map(|name| self.out.join(name).metadata().ok())
            .map(|about| about.len())
            .sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        let index_path = self.out.join("model.safetensors.index.json");
        replace_file(&index_path, index.to_string().as_bytes())?;
        let mut fields: serde_json::Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|err| ConvertError::Manifest {
                path: source,
                message: err.to_string(),
            })?;
        let quantization = self.target.quantization_config(&others);
        fields.insert("quantization_config".to_owned(), quantization);
        let text = serde_json::to_vec_pretty(&fields).map_err(|err| ConvertError::Manifest {
            path: config.clone(),
            message: err.to_string(),
        })?;
        Ok(replace_file(&config, &text)?)
    }

    /// Copies all tensors but the converted experts; returns the modules that stay as they are.
    fn copy_others(
        &self,
        weight_map: &mut BTreeMap<String, String>,
    ) -> Result<Vec<String>, ConvertError> {
        let mut prefixes = Vec::new();
        for &layer in &self.contents.converted_layers {
            let stream = LayerStream::open(self.checkpoint, layer)?;
            let prefix = stream.prefix();
            prefixes.push(format!("{prefix}experts."));
            prefixes.push(format!("{prefix}switch_mlp."));
        }
        let mut shards: Vec<Vec<TensorShape>> = Vec::new();
        let mut size = usize::MAX;
        let mut others = Vec::new();
        for (name, info) in self.checkpoint.tensors() {
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            if let (Some(module), true) = (name.strip_suffix(".weight"), info.shape.len() > 1) {
                others.push(module.to_owned());
            }
            if size.saturating_add(info.bytes) > SHARD_BYTES {
                shards.push(Vec::new());
                size = 0;
            }
            size += info.bytes;
            if let Some(shard) = shards.last_mut() {
                shard.push(TensorShape {
                    name: name.to_owned(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                });
            }
        }
        let mut block = vec![0; COPY_BYTES];
        for (number, shard) in shards.iter().enumerate() {
            let file_name = format!("other-{number:05}.safetensors");
            let writer = TensorWriter::create(self.out.join(&file_name), shard)?;
            for TensorShape { name, .. } in shard {
                let file = self.checkpoint.file_of(name)?;
                let bytes = file.info(name)?.bytes;
                for start in (0..bytes).step_by(COPY_BYTES) {
                    let block = &mut block[..COPY_BYTES.min(bytes - start)];
                    file.read_range(name, start, block)?;
                    writer.put(name, start, block)?;
                }
                weight_map.insert(name.clone(), file_name.clone());
            }
            writer.finish()?;
        }
        Ok(others)
    }
}

/// Something in a folder that no conversion leaves behind.
fn foreign_entry(out: &Path) -> Result<Option<String>, FileError> {
    for entry in std::fs::read_dir(out).map_err(FileError::io(out))? {
        let name = entry.map_err(FileError::io(out))?.file_name();
        let name = name.to_string_lossy();
        // A first manifest may not have got its name.
        if !(name.starts_with('.') && name.ends_with(".part")) {
            return Ok(Some(name.into_owned()));
        }
    }
    Ok(None)
}
