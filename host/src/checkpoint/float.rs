//! The element types in which weights are read.

use half::f16;
use safetensors::Dtype;

/// An element type whose values f32 holds exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    /// The names of the types, for messages.
    pub(super) const SUPPORTED: &str = "BF16, F16 or F32";

    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Decodes the elements `first`, `first + stride`, ... of `bytes` into `out`.
    ///
    /// Panics if an element lies outside of `bytes`.
    pub(super) fn decode(self, bytes: &[u8], first: usize, stride: usize, out: &mut [f32]) {
        let bf16 = |code| f32::from_bits(u32::from(u16::from_le_bytes(code)) << 16);
        match self {
            Self::F32 => gather(bytes, first, stride, out, f32::from_le_bytes),
            Self::Bf16 => gather(bytes, first, stride, out, bf16),
            Self::F16 => gather(bytes, first, stride, out, |b| {
                f16::from_le_bytes(b).to_f32()
            }),
        }
    }
}

fn gather<const N: usize>(
    bytes: &[u8],
    first: usize,
    stride: usize,
    out: &mut [f32],
    decode: impl Fn([u8; N]) -> f32,
) {
    let (elements, _) = bytes.as_chunks::<N>();
    if stride == 1 {
        let row = &elements[first..first + out.len()];
        for (out, &element) in out.iter_mut().zip(row) {
            *out = decode(element);
        }
    } else {
        for (i, out) in out.iter_mut().enumerate() {
            *out = decode(elements[first + i * stride]);
        }
    }
}
