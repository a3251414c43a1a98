//! Copies of parts of A and B in the order in which the kernels read them.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Most elements of K in a block.
pub(super) const MAX_BLOCK_K: usize = 256;

/// How an element type becomes words of a panel.
pub trait Words: Copy {
    /// What kernels multiply.
    type Word: Copy + bytemuck::Pod + Send + Sync;
    /// Elements of K in one word.
    const UNIT: usize;

    /// One word; the second element is ignored if the unit is 1.
    fn word(pair: [Self; 2]) -> Self::Word;

    /// Words of elements that lie one after the other; a missing last one is 0.
    fn words(elements: &[Self], words: &mut [Self::Word]);

    /// 0.
    fn zero() -> Self;
}

impl Words for f32 {
    type Word = f32;
    const UNIT: usize = 1;

    #[inline(always)]
    fn word([x, _]: [Self; 2]) -> f32 {
        x
    }

    #[inline(always)]
    fn words(elements: &[Self], words: &mut [f32]) {
        words.copy_from_slice(elements);
    }

    fn zero() -> Self {
        0.0
    }
}

impl Words for bf16 {
    type Word = f32;
    const UNIT: usize = 1;

    #[inline(always)]
    fn word([x, _]: [Self; 2]) -> f32 {
        f32::from_bits(u32::from(x.to_bits()) << 16)
    }

    #[inline(always)]
    fn words(elements: &[Self], words: &mut [f32]) {
        for (word, &x) in words.iter_mut().zip(elements) {
            *word = Self::word([x; 2]);
        }
    }

    fn zero() -> Self {
        Self::ZERO
    }
}

impl Words for f16 {
    type Word = f32;
    const UNIT: usize = 1;

    #[inline(always)]
    fn word([x, _]: [Self; 2]) -> f32 {
        x.to_f32()
    }

    #[inline(always)]
    fn words(elements: &[Self], words: &mut [f32]) {
        elements.convert_to_f32_slice(words);
    }

    fn zero() -> Self {
        Self::ZERO
    }
}

impl Words for i8 {
    type Word = [i16; 2];
    const UNIT: usize = 2;

    #[inline(always)]
    fn word([x, y]: [Self; 2]) -> [i16; 2] {
        [i16::from(x), i16::from(y)]
    }

    #[inline(always)]
    fn words(elements: &[Self], words: &mut [[i16; 2]]) {
        for (word, pair) in words.iter_mut().zip(elements.chunks(2)) {
            *word = Self::word([pair[0], pair.get(1).copied().unwrap_or(0)]);
        }
    }

    fn zero() -> Self {
        0
    }
}

/// Elements `data[i * step + k * k_step]`: rows of A or columns of B.
#[derive(Clone, Copy)]
pub(super) struct Side<T> {
    pub(super) data: *const T,
    /// Elements from one row of A (column of B) to the next.
    pub(super) step: usize,
    /// Elements from one k to the next.
    pub(super) k_step: usize,
}

impl<T: Words> Side<T> {
    /// Packs rows `0..count`, elements `0..k`, into panels of `width` rows; missing ones are 0.
    ///
    /// # Safety
    /// The elements exist; `k` is at most [`MAX_BLOCK_K`]; `out` has the words of whole panels.
    pub(super) unsafe fn pack(&self, count: usize, k: usize, width: usize, out: &mut [T::Word]) {
        let units = k.div_ceil(T::UNIT);
        let zero = T::word([T::zero(); 2]);
        for (p, panel) in out.chunks_exact_mut(units * width).enumerate() {
            let first = p * width;
            let rows = width.min(count - first);
            let data = self.data.wrapping_add(first * self.step);
            if rows < width {
                panel.fill(zero);
            }
            // SAFETY: rows and elements are inside by the caller's promise.
            unsafe {
                if self.k_step == 1 {
                    self.pack_rows(data, rows, k, width, panel);
                } else if self.step == 1 && T::UNIT == 1 {
                    for (unit, words) in panel.chunks_exact_mut(width).enumerate() {
                        let run = data.add(unit * self.k_step);
                        T::words(std::slice::from_raw_parts(run, rows), &mut words[..rows]);
                    }
                } else {
                    for (unit, words) in panel.chunks_exact_mut(width).enumerate() {
                        let low = data.add(unit * T::UNIT * self.k_step);
                        let both = unit * T::UNIT + 1 < k;
                        for (r, word) in words[..rows].iter_mut().enumerate() {
                            let x = low.add(r * self.step);
                            let y = match both {
                                true => *x.add(self.k_step),
                                false => T::zero(),
                            };
                            *word = T::word([*x, y]);
                        }
                    }
                }
            }
        }
    }

    /// Rows whose elements lie one after the other: converted row by row, four at a time
    /// turned into the panel.
    ///
    /// # Safety
    /// As [`Self::pack`], for one panel.
    #[inline(always)]
    unsafe fn pack_rows(
        &self,
        data: *const T,
        rows: usize,
        k: usize,
        width: usize,
        panel: &mut [T::Word],
    ) {
        const GROUP: usize = 4;
        let units = k.div_ceil(T::UNIT);
        let mut runs = [[T::word([T::zero(); 2]); MAX_BLOCK_K]; GROUP];
        let mut r = 0;
        while r < rows {
            let group = GROUP.min(rows - r);
            for (i, run) in runs[..group].iter_mut().enumerate() {
                // SAFETY: row r + i exists.
                let row = unsafe { std::slice::from_raw_parts(data.add((r + i) * self.step), k) };
                T::words(row, &mut run[..units]);
            }
            if group == GROUP {
                let [w, x, y, z] = &runs;
                let all = w.iter().zip(x).zip(y.iter().zip(z));
                for (words, ((w, x), (y, z))) in panel.chunks_exact_mut(width).zip(all) {
                    words[r..r + GROUP].copy_from_slice(&[*w, *x, *y, *z]);
                }
            } else {
                for (i, run) in runs[..group].iter().enumerate() {
                    for (words, word) in panel.chunks_exact_mut(width).zip(run) {
                        words[r + i] = *word;
                    }
                }
            }
            r += group;
        }
    }
}
