//! Whether two strided matrices share memory.

use super::view::{Extent, Layout};

/// Where a matrix lies: bytes, along rows or columns of equal distance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Bytes from one row (or column) to the next.
    pitch: usize,
    /// Bytes of a row (or column).
    width: usize,
    row_major: bool,
}

impl Place {
    pub(crate) fn new<T, L: Layout>(address: usize, extent: &Extent) -> Self {
        let (major, minor) = extent.major_minor::<L>();
        let (pitch, width) = (extent.ld * size_of::<T>(), minor * size_of::<T>());
        let bytes = match major {
            0 => 0,
            _ if width == 0 => 0,
            _ => (major - 1) * pitch + width,
        };
        Self {
            start: address,
            end: address + bytes,
            pitch,
            width,
            row_major: L::ROW_MAJOR,
        }
    }

    /// Whether both have a byte in common. Matrices whose spans meet count as overlapping unless
    /// they lie side by side in rows of the same pitch.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.start >= other.end || other.start >= self.end {
            return false;
        }
        if self.pitch != other.pitch || self.row_major != other.row_major {
            return true;
        }
        let (first, second) = if self.start <= other.start {
            (self, other)
        } else {
            (other, self)
        };
        // In coordinates of the first one's rows: the second begins in column `offset`.
        let offset = (second.start - first.start) % self.pitch;
        let beside = offset >= first.width && offset + second.width <= self.pitch;
        !beside
    }

    /// Whether both are the same elements in the same order.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (self.start, self.end) == (other.start, other.end)
            && (self.pitch, self.width) == (other.pitch, other.width)
            && self.row_major == other.row_major
    }
}
