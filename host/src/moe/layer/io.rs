//! Where a forward's tokens lie and where its output goes.

use super::super::MoeError;
use super::super::layout::LayoutError;
#[cfg(feature = "cuda")]
use crate::driver::{DeviceBuffer, Gpu, RawContext};
use asym_gemm_cpu::Rows;
use half::bf16;

/// Element type of x or of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

impl Element {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Rows [T, H] in device memory, dense.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) element: Element,
    context: Option<RawContext>,
    _memory: std::marker::PhantomData<&'a ()>,
}

#[cfg(feature = "cuda")]
impl DeviceRows<'_> {
    /// An error that names `what` if the memory is known to be another device's.
    pub(super) fn check_on(&self, gpu: &Gpu, what: &'static str) -> Result<(), MoeError> {
        match self.context {
            Some(context) if context != gpu.as_raw_context() => {
                Err(crate::gemm::GemmError::OtherGpu { what }.into())
            }
            _ => Ok(()),
        }
    }

    /// Memory of others: `len` elements at `address`, on the layer's first device.
    ///
    /// # Safety
    /// The memory is allocated in the context of the layer's first device and stays so for the
    /// lifetime chosen and until the forward's work is done; as output nobody else uses it
    /// meanwhile.
    pub unsafe fn from_raw(address: u64, len: usize, element: Element) -> Self {
        Self {
            address,
            len,
            element,
            context: None,
            _memory: std::marker::PhantomData,
        }
    }
}

/// Tokens x [T, H].
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// In host memory.
    Host(Rows<'a>),
    /// On the layer's first device.
    #[cfg(feature = "cuda")]
    Device(DeviceRows<'a>),
}

/// Output [T, H]; every element is written.
#[derive(Debug)]
pub enum Output<'a> {
    /// f32 in host memory.
    HostF32(&'a mut [f32]),
    /// bf16 in host memory.
    HostBf16(&'a mut [bf16]),
    /// On the layer's first device.
    #[cfg(feature = "cuda")]
    Device(DeviceRows<'a>),
}

impl Input<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(rows) => rows.len(),
            #[cfg(feature = "cuda")]
            Self::Device(rows) => rows.len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[cfg(feature = "cuda")]
    pub(super) fn element(&self) -> Element {
        match self {
            Self::Host(Rows::F32(_)) => Element::F32,
            Self::Host(Rows::Bf16(_)) => Element::Bf16,
            #[cfg(feature = "cuda")]
            Self::Device(rows) => rows.element,
        }
    }

    /// Whether x lies on a device.
    pub fn is_on_device(&self) -> bool {
        !matches!(self, Self::Host(_))
    }
}

impl Output<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::HostF32(out) => out.len(),
            Self::HostBf16(out) => out.len(),
            #[cfg(feature = "cuda")]
            Self::Device(rows) => rows.len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Checks x, the routing's slots and the output against each other; the number of tokens.
pub(super) fn check(
    x: &Input<'_>,
    slots: usize,
    weights: usize,
    top_k: usize,
    out: &Output<'_>,
    hidden: usize,
) -> Result<usize, MoeError> {
    if !x.len().is_multiple_of(hidden) {
        return Err(MoeError::Input {
            len: x.len(),
            hidden,
        });
    }
    let tokens = x.len() / hidden;
    let fits = |what, found, needed| match found == needed {
        true => Ok(()),
        false => Err(MoeError::Parts {
            what,
            found,
            needed,
        }),
    };
    fits("the output's elements", out.len(), x.len())?;
    if slots != tokens.saturating_mul(top_k) {
        return Err(MoeError::Layout(LayoutError::IdCount {
            tokens,
            top_k,
            found: slots,
        }));
    }
    fits("the routing's weights", weights, slots)?;
    Ok(tokens)
}

macro_rules! host_input {
    ($($element:ty),*) => {$(
        impl<'a> From<&'a [$element]> for Input<'a> {
            fn from(x: &'a [$element]) -> Self {
                Self::Host(x.into())
            }
        }

        impl<'a> From<&'a Vec<$element>> for Input<'a> {
            fn from(x: &'a Vec<$element>) -> Self {
                Self::Host(x.into())
            }
        }
    )*};
}
host_input!(f32, bf16);

macro_rules! host_output {
    ($($element:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a mut [$element]> for Output<'a> {
            fn from(out: &'a mut [$element]) -> Self {
                Self::$variant(out)
            }
        }

        impl<'a> From<&'a mut Vec<$element>> for Output<'a> {
            fn from(out: &'a mut Vec<$element>) -> Self {
                Self::$variant(out)
            }
        }
    )*};
}
host_output!(f32 => HostF32, bf16 => HostBf16);

#[cfg(feature = "cuda")]
macro_rules! device_rows {
    ($($element:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a DeviceBuffer<$element>> for Input<'a> {
            fn from(x: &'a DeviceBuffer<$element>) -> Self {
                // SAFETY: the buffer is borrowed, and a forward has ended before its borrows do.
                let rows = unsafe { DeviceRows::from_raw(x.as_raw(), x.len(), Element::$variant) };
                Self::Device(DeviceRows {
                    context: Some(x.as_raw_context()),
                    ..rows
                })
            }
        }

        impl<'a> From<&'a mut DeviceBuffer<$element>> for Output<'a> {
            fn from(out: &'a mut DeviceBuffer<$element>) -> Self {
                let (raw, len) = (out.as_raw(), out.len());
                // SAFETY: as above, and borrowed by nobody else.
                let rows = unsafe { DeviceRows::from_raw(raw, len, Element::$variant) };
                Self::Device(DeviceRows {
                    context: Some(out.as_raw_context()),
                    ..rows
                })
            }
        }
    )*};
}
#[cfg(feature = "cuda")]
device_rows!(f32 => F32, bf16 => Bf16);
