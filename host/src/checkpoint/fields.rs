//! Checked access to the values of a JSON object.

use super::error::ConfigError;
use serde_json::{Map, Value};

/// The object, read with checks. A null counts as absent.
pub(super) struct Fields(pub(super) Map<String, Value>);

impl Fields {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// An integer from zero.
    pub(super) fn count(&self, key: &'static str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.optional_count(key)?.unwrap_or(default))
    }

    fn optional_count(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        self.get(key)
            .map(|value| {
                let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
                number.ok_or_else(|| value_error(key, value, "an integer from 0"))
            })
            .transpose()
    }

    /// Whether `key` is there with the value null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(Value::is_null)
    }

    /// An integer from one.
    pub(super) fn size(&self, key: &'static str, default: usize) -> Result<usize, ConfigError> {
        self.either(&[key], default)
    }

    /// An integer from one under any of `keys`.
    pub(super) fn either(
        &self,
        keys: &[&'static str],
        default: usize,
    ) -> Result<usize, ConfigError> {
        let mut found: Option<(&'static str, usize)> = None;
        for &key in keys {
            let Some(value) = self.optional_count(key)? else {
                continue;
            };
            if value == 0 {
                return Err(value_error(key, &Value::from(0), "an integer from 1"));
            }
            match found {
                Some((first, other)) if other != value => {
                    return Err(ConfigError::Conflict { first, second: key });
                }
                _ => found = Some((key, value)),
            }
        }
        Ok(found.map_or(default, |(_, value)| value))
    }

    pub(super) fn bool(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(value_error(key, other, "true or false")),
        }
    }

    pub(super) fn positive(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .map(|x| x as f32)
                .filter(|x| x.is_finite() && *x > 0.0)
                .ok_or_else(|| value_error(key, value, "a positive number")),
        }
    }

    /// A setting of which only `supported` is, absence included.
    pub(super) fn only(&self, key: &'static str, supported: &[&str]) -> Result<(), ConfigError> {
        match self.get(key) {
            None => Ok(()),
            Some(Value::String(text)) if supported.contains(&text.as_str()) => Ok(()),
            Some(other) => Err(value_error(key, other, supported[0])),
        }
    }

    pub(super) fn layers(&self, key: &'static str) -> Result<Vec<usize>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let wrong = || value_error(key, value, "a list of layer numbers");
        let index = |layer: &Value| layer.as_u64().and_then(|n| usize::try_from(n).ok());
        let list = value.as_array().ok_or_else(wrong)?;
        list.iter()
            .map(|layer| index(layer).ok_or_else(wrong))
            .collect()
    }

    /// `weight_block_size` of the quantisation.
    pub(super) fn weight_block(&self) -> Result<[usize; 2], ConfigError> {
        const KEY: &str = "weight_block_size";
        let config = self.get("quantization_config");
        let Some(value) = config.and_then(|c| c.get(KEY)).filter(|v| !v.is_null()) else {
            return Ok([128, 128]);
        };
        let size = |v: &Value| v.as_u64().filter(|n| (1..=1 << 20).contains(n));
        let sizes: Option<Vec<u64>> = value
            .as_array()
            .and_then(|list| list.iter().map(size).collect());
        match sizes.as_deref() {
            Some(&[rows, columns]) => Ok([rows as usize, columns as usize]),
            _ => Err(value_error(KEY, value, "two sizes of 1 to 1048576")),
        }
    }

    pub(super) fn quantization(&self) -> Option<String> {
        let config = self.get("quantization_config")?;
        let text = |key| config.get(key).and_then(Value::as_str);
        let method = text("quant_method").unwrap_or("an unnamed method");
        Some(
            match text("quant_algo")
                .or_else(|| text("format"))
                .or_else(|| text("fmt"))
            {
                Some(detail) => format!("{method} ({detail})"),
                None => method.to_owned(),
            },
        )
    }
}

pub(super) fn value_error(
    key: &'static str,
    found: &Value,
    expected: impl Into<String>,
) -> ConfigError {
    let mut found = found.to_string();
    if found.len() > 60 {
        let cut = (0..=60)
            .rev()
            .find(|&i| found.is_char_boundary(i))
            .unwrap_or(0);
        found.truncate(cut);
        found.push_str("...");
    }
    ConfigError::Value {
        key,
        found,
        expected: expected.into(),
    }
}
