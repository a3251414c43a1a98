//! The record beside committed PTX: which modules there are and what made them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::builder::{Built, CudaBuilder, compiler_flags};
use crate::error::BuildError;
use crate::ptx::Entry;

/// File name of the manifest in the folder of PTX files.
pub const FILE_NAME: &str = "manifest.json";

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// First line of `rustc -vV`.
    pub rustc: String,
    /// LLVM's version.
    pub llvm: String,
    /// The flags that decide the code.
    pub flags: Vec<String>,
    /// The PTX files.
    pub modules: Vec<Module>,
}

/// One PTX file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Kernel family: the device crate's feature.
    pub family: String,
    /// GPU target.
    pub target: String,
    /// PTX version.
    pub ptx: String,
    /// Its kernels.
    pub entries: Vec<Entry>,
}

impl Module {
    /// Name of the PTX file, `gemm.sm_90a.ptx`.
    pub fn file_name(&self) -> String {
        file_name(&self.family, &self.target)
    }
}

/// Name of a module's PTX file.
pub fn file_name(family: &str, target: &str) -> String {
    format!("{family}.{target}.ptx")
}

impl Manifest {
    /// Builds `(family, target)` modules of a device crate into `folder` (when
    /// given), and describes them. All come from one toolchain.
    ///
    /// # Errors
    ///
    /// The first module's error that does not build.
    pub fn build(
        builder: &CudaBuilder,
        modules: impl IntoIterator<Item = (String, String)>,
        folder: &Path,
    ) -> Result<(Self, Vec<Built>), BuildError> {
        let mut built_modules = Vec::new();
        let mut records = Vec::new();
        for (family, target) in modules {
            let built = builder
                .clone()
                .feature(&family)
                .arch(&target)
                .copy_to(folder.join(file_name(&family, &target)))
                .build()?;
            records.push(Module {
                family,
                target,
                ptx: built.report.version.clone(),
                entries: built.report.entries.clone(),
            });
            built_modules.push(built);
        }
        let (rustc, llvm) = built_modules
            .first()
            .map(|built| {
                (
                    built.toolchain.version().to_owned(),
                    built.toolchain.llvm().to_owned(),
                )
            })
            .unwrap_or_default();
        let manifest = Self {
            rustc,
            llvm,
            flags: compiler_flags(),
            modules: records,
        };
        Ok((manifest, built_modules))
    }

    /// Reads the manifest of a folder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Manifest`] if there is none or it is not one.
    pub fn read(folder: &Path) -> Result<Self, BuildError> {
        let path = folder.join(FILE_NAME);
        let failed = |path: &PathBuf, reason: String| BuildError::Manifest {
            path: path.clone(),
            reason: format!("{reason}; run `cargo xtask ptx`"),
        };
        let text = std::fs::read_to_string(&path).map_err(|e| failed(&path, e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| failed(&path, e.to_string()))
    }

    /// Writes the manifest into a folder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Io`].
    pub fn write(&self, folder: &Path) -> Result<(), BuildError> {
        let path = folder.join(FILE_NAME);
        let mut text = serde_json::to_string_pretty(self).map_err(|e| BuildError::Manifest {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        text.push('\n');
        std::fs::write(&path, text).map_err(|e| BuildError::io(path.display(), e))
    }
}
