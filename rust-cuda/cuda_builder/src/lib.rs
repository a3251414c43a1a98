//! Compiles a device crate to PTX with whichever Rust toolchain can.
//!
//! ```no_run
//! use cuda_builder::CudaBuilder;
//!
//! let built = CudaBuilder::new("kernels-gpu")
//!     .arch("sm_90a")
//!     .feature("gemm")
//!     .copy_to("gemm.sm_90a.ptx")
//!     .build()?;
//! for entry in &built.report.entries {
//!     println!("{} {:?}", entry.name, entry.collectives);
//! }
//! # Ok::<(), cuda_builder::BuildError>(())
//! ```
//!
//! rustc's own NVPTX back end does the work. It is complete but unstable, so the
//! build needs the standard library's source (or the precompiled target) and
//! unlocks the unstable options of a stable compiler: [`DeviceToolchain::find`]
//! says where it looks. Nothing of CUDA is needed.
//!
//! The result is one self-contained PTX module, the same bytes whatever folder
//! it was built in ([`ptx`] describes what is edited and what is checked).

mod builder;
mod error;
pub mod manifest;
pub mod ptx;
mod toolchain;

pub use builder::{Built, CudaBuilder, TARGET, compiler_flags};
pub use error::BuildError;
pub use manifest::Manifest;
pub use toolchain::{DeviceToolchain, Library, TOOLCHAIN_VARIABLE};
