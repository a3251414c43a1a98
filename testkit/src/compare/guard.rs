//! Memory that shows what was written, and what was not.

use std::ops::Range;

use bytemuck::{NoUninit, Pod};

/// The byte that guards are filled with.
pub const GUARD: u8 = 0xa5;

/// Fills `out` with 0xff bytes: NaN as f32, f64, bf16 and f16, −1 as an integer.
///
/// An output that is not written completely then fails every comparison.
pub fn poison<T: Pod>(out: &mut [T]) {
    bytemuck::cast_slice_mut::<T, u8>(out).fill(0xff);
}

/// [`poison`] of f32.
pub fn poison_f32(out: &mut [f32]) {
    poison(out);
}

/// Asserts that the rows [.., cols] in none of `written` still hold their poison.
///
/// # Panics
/// With the first element that does not.
#[track_caller]
pub fn assert_poisoned<T: NoUninit>(name: &str, out: &[T], cols: usize, written: &[Range<usize>]) {
    for (i, x) in out.iter().enumerate() {
        let (row, col) = (i / cols, i % cols);
        if written.iter().any(|rows| rows.contains(&row)) {
            continue;
        }
        let bytes = bytemuck::bytes_of(x);
        assert!(
            bytes.iter().all(|&b| b == 0xff),
            "{name}: row {row}, column {col} was written: bytes {bytes:02x?}"
        );
    }
}

/// Asserts that every byte is [`GUARD`].
///
/// # Panics
/// With the position of the first that is not.
#[track_caller]
pub fn assert_guard_intact(name: &str, guard: &[u8]) {
    if let Some(at) = guard.iter().position(|&b| b != GUARD) {
        panic!(
            "{name}: guard byte {at} of {} was overwritten with {:#04x}",
            guard.len(),
            guard[at]
        );
    }
}

/// A poisoned buffer between two guards.
///
/// ```
/// use asym_gemm_testkit::compare::Guarded;
///
/// let mut out = Guarded::<f32>::new(10, 16);
/// assert!(out.iter().all(|x| x.is_nan()));
/// out.fill(0.0);
/// out.assert_intact("fill");
/// ```
#[derive(Clone, Debug)]
pub struct Guarded<T> {
    memory: Vec<T>,
    margin: usize,
}

impl<T: Pod> Guarded<T> {
    /// `len` poisoned elements with `margin` elements of guard on each side.
    pub fn new(len: usize, margin: usize) -> Self {
        let mut memory = vec![T::zeroed(); len + 2 * margin];
        bytemuck::cast_slice_mut::<T, u8>(&mut memory).fill(GUARD);
        poison(&mut memory[margin..margin + len]);
        Self { memory, margin }
    }

    /// Asserts that both guards are as they were.
    ///
    /// # Panics
    /// With the first guard byte that is not.
    #[track_caller]
    pub fn assert_intact(&self, name: &str) {
        let (before, rest) = self.memory.split_at(self.margin);
        let after = &rest[rest.len() - self.margin..];
        assert_guard_intact(&format!("{name}, before"), bytemuck::cast_slice(before));
        assert_guard_intact(&format!("{name}, after"), bytemuck::cast_slice(after));
    }
}

impl<T> std::ops::Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[self.margin..self.memory.len() - self.margin]
    }
}

impl<T> std::ops::DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let end = self.memory.len() - self.margin;
        &mut self.memory[self.margin..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_is_nan_in_every_float() {
        let mut f = [0f32; 3];
        poison_f32(&mut f);
        assert!(f.iter().all(|x| x.is_nan()));
        let mut b = [half::bf16::ZERO; 3];
        poison(&mut b);
        assert!(b.iter().all(|x| x.is_nan()));
        let mut i = [0i32; 3];
        poison(&mut i);
        assert_eq!(i, [-1; 3]);
    }

    #[test]
    fn the_inside_may_be_written() {
        let mut buffer = Guarded::<i8>::new(5, 3);
        assert_eq!(buffer.len(), 5);
        buffer.fill(7);
        buffer.assert_intact("inside");
    }

    #[test]
    #[should_panic(expected = "out, before: guard byte 7 of 8 was overwritten with 0x00")]
    fn a_write_before_is_seen() {
        let mut buffer = Guarded::<f32>::new(5, 2);
        buffer.memory[1] = f32::from_bits(0x00a5_a5a5);
        buffer.assert_intact("out");
    }

    #[test]
    #[should_panic(expected = "out, after: guard byte 0 of 8")]
    fn a_write_after_is_seen() {
        let mut buffer = Guarded::<f32>::new(5, 2);
        buffer.memory[7] = 0.0;
        buffer.assert_intact("out");
    }

    #[test]
    fn untouched_rows_pass() {
        let mut out = [0f32; 12];
        poison(&mut out);
        out[3..9].fill(1.0);
        assert_poisoned("out", &out, 3, std::slice::from_ref(&(1..3)));
    }

    #[test]
    #[should_panic(expected = "row 2, column 1 was written")]
    fn a_touched_row_is_seen() {
        let mut out = [0f32; 12];
        poison(&mut out);
        out[7] = 1.0;
        assert_poisoned("out", &out, 3, &[0..2, 3..4]);
    }
}
