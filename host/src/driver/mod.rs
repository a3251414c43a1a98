//! The GPU driver: loading it, devices, modules, launches, streams and memory.
//!
//! libcuda is opened at run time, so a program with this crate starts, tests and runs
//! on a machine without CUDA; the first GPU call then says [`DriverError::NoDriver`].
//! cust's `-lcuda` is satisfied by the `cu*` symbols defined in `symbols.rs`, which
//! hand every call on to the same library: cust and this module can be used side by
//! side on one device.
//!
//! - [`load()`], [`probe`], [`device_count`]: the driver itself.
//! - [`Gpu`]: a device and its context; [`KernelModule`] and [`Kernel`]: embedded
//!   kernels, compiled by the driver at first use and kept for the life of the `Gpu`.
//! - [`Stream`], [`Event`], [`Graph`]: order and time.
//! - [`DeviceBuffer`], [`PinnedBuffer`], [`TensorMap`]: memory.
//!
//! Methods switch to their device's context and back, so several GPUs can be driven
//! from one thread and a context that another library made current is left alone.
//! Nothing panics in a destructor: a failed release is logged. After `fork` the
//! child gets [`DriverError::ForkedAfterInit`] instead of a hang.

mod buffer;
mod error;
mod gpu;
mod graph;
mod launch;
mod library;
mod load;
mod module;
mod pinned;
mod ptx;
mod rows;
mod stream;
mod symbols;
mod tensor_map;

pub use buffer::{DeviceBuffer, copy_address_to_host_async};
pub use error::DriverError;
pub use gpu::{Current, Gpu, RawContext};
pub use graph::Graph;
pub use launch::LaunchConfig;
pub use library::LIBRARY_VARIABLE;
pub use load::{Driver, Probe, device_count, load, probe};
pub use module::{Kernel, KernelModule};
pub use pinned::PinnedBuffer;
pub(crate) use rows::{Rows, copy_rows};
pub use stream::{Event, RawStream, Stream};
pub use tensor_map::{L2Promotion, TensorElement, TensorMap, TensorMapDesc};
