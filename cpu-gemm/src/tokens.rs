//! Activations: rounded once a call, then gathered into groups of 16 tokens.

use asym_gemm_formats::bank::PANEL_ROWS;
use asym_gemm_formats::int8::BLOCK;
use half::bf16;

use crate::kernels::{Group, Multiply, TokenLayout};
use crate::recipe::Recipe;
use crate::shared::Shared;
use crate::tile::{Lanes, TOKENS, Tile};
use crate::vector::{Vector, VectorMath};
use crate::workspace::{Buffer, GroupBuffers};

/// Rows of activations [T, H] as the caller holds them.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16, which f32 holds exactly.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Rows<'a> {
    fn from(x: &'a [f32]) -> Self {
        Self::F32(x)
    }
}

impl<'a> From<&'a Vec<f32>> for Rows<'a> {
    fn from(x: &'a Vec<f32>) -> Self {
        Self::F32(x)
    }
}

impl<'a> From<&'a [bf16]> for Rows<'a> {
    fn from(x: &'a [bf16]) -> Self {
        Self::Bf16(x)
    }
}

impl<'a> From<&'a Vec<bf16>> for Rows<'a> {
    fn from(x: &'a Vec<bf16>) -> Self {
        Self::Bf16(x)
    }
}

impl Rows<'_> {
    /// Elements of all rows.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes of K elements of `R`, padded to whole units.
pub(crate) fn row_bytes<R: Recipe>(k: usize) -> usize {
    (k * size_of::<R::Code>()).next_multiple_of(R::X_UNIT_BYTES)
}

/// The rounded rows of one call, which tasks fill and then read.
pub(crate) struct Encoded<'a> {
    k: usize,
    row_bytes: usize,
    blocks: usize,
    codes: Shared<'a, u8>,
    scales: Shared<'a, f32>,
    sums: Shared<'a, i32>,
}

impl<'a> Encoded<'a> {
    /// Room for `rows` rows of `k` elements.
    pub(crate) fn new<R: Recipe>(
        rows: usize,
        k: usize,
        codes: &'a mut Buffer,
        scales: &'a mut Buffer,
        sums: &'a mut Buffer,
    ) -> Self {
        let row_bytes = row_bytes::<R>(k);
        let blocks = R::blocks(k);
        Self {
            k,
            row_bytes,
            blocks,
            codes: Shared::new(codes.take(rows * row_bytes)),
            scales: Shared::new(scales.take(rows * blocks)),
            sums: Shared::new(sums.take(rows * blocks)),
        }
    }

    /// Rounds row `row` of `x`.
    ///
    /// # Safety
    /// Nobody else uses that row meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn encode<R: Recipe, V: Vector>(
        &self,
        v: V,
        x: Rows<'_>,
        row: usize,
        wide: &mut Vec<f32>,
    ) {
        // SAFETY: the row is this call's alone, by this function's contract.
        let (codes, scales, sums) = unsafe {
            (
                self.codes.write(row * self.row_bytes, self.row_bytes),
                self.scales.write(row * self.blocks, self.blocks),
                self.sums.write(row * self.blocks, self.blocks),
            )
        };
        let range = row * self.k..(row + 1) * self.k;
        let x = match x {
            Rows::F32(x) => &x[range],
            Rows::Bf16(x) => {
                wide.clear();
                wide.extend(x[range].iter().map(|x| x.to_f32()));
                wide
            }
        };
        let (head, padding) = codes.split_at_mut(self.k * size_of::<R::Code>());
        padding.fill(0);
        R::encode(v, x, bytemuck::cast_slice_mut(head), scales, sums);
    }

    /// Row `row`, encoded.
    ///
    /// # Safety
    /// The row was encoded, and the caller has waited for that.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, row: usize) -> EncodedRow<'_> {
        // SAFETY: nobody writes the row any more, by this function's contract.
        unsafe {
            EncodedRow {
                codes: self.codes.read(row * self.row_bytes, self.row_bytes),
                scales: self.scales.read(row * self.blocks, self.blocks),
                sums: Some(self.sums.read(row * self.blocks, self.blocks)),
            }
        }
    }
}

/// One rounded row.
#[derive(Clone, Copy)]
pub(crate) struct EncodedRow<'a> {
    /// Codes; a group pads them with zeros.
    pub(crate) codes: &'a [u8],
    /// One scale for each block of K.
    pub(crate) scales: &'a [f32],
    /// The sum of the int8 codes of each block, if it is known.
    pub(crate) sums: Option<&'a [i32]>,
}

/// Groups of 16 tokens with K elements each, which tasks fill and then read.
pub(crate) struct Groups<'a> {
    row_bytes: usize,
    blocks: usize,
    bytes: Shared<'a, u8>,
    scales: Shared<'a, Lanes<f32>>,
    sums: Shared<'a, Lanes<i32>>,
}

impl<'a> Groups<'a> {
    /// Room for `groups` groups whose tokens have `row_bytes` bytes and `blocks` scales.
    pub(crate) fn new(
        groups: usize,
        row_bytes: usize,
        blocks: usize,
        buffers: &'a mut GroupBuffers,
    ) -> Self {
        Self {
            row_bytes,
            blocks,
            bytes: Shared::new(buffers.bytes.take(groups * TOKENS * row_bytes)),
            scales: Shared::new(buffers.scales.take(groups * blocks)),
            sums: Shared::new(buffers.sums.take(groups * blocks)),
        }
    }

    /// Group `group`, of which `tokens` exist.
    ///
    /// # Safety
    /// What the caller reads of it was written, and the caller has waited for that.
    #[inline(always)]
    pub(crate) unsafe fn group(&self, group: usize, tokens: usize) -> Group<'_> {
        let bytes = TOKENS * self.row_bytes;
        // SAFETY: nobody writes the group any more, by this function's contract.
        unsafe {
            Group {
                bytes: self.bytes.read(group * bytes, bytes),
                tokens,
                scales: self.scales.read(group * self.blocks, self.blocks),
                sums: self.sums.read(group * self.blocks, self.blocks),
            }
        }
    }

    /// Gathers `tokens` rows, given by `row`, into group `group`.
    ///
    /// # Safety
    /// Nobody else uses that group meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn pack<'r, M: Multiply>(
        &self,
        m: M,
        group: usize,
        tokens: usize,
        row: impl Fn(usize) -> EncodedRow<'r>,
    ) {
        let bytes = TOKENS * self.row_bytes;
        // SAFETY: the group is this call's alone, by this function's contract.
        let (bytes, scales, sums) = unsafe {
            (
                self.bytes.write(group * bytes, bytes),
                self.scales.write(group * self.blocks, self.blocks),
                self.sums.write(group * self.blocks, self.blocks),
            )
        };
        scales.fill([0.0; TOKENS]);
        sums.fill([0; TOKENS]);
        let rows: [&[u8]; TOKENS] =
            std::array::from_fn(|t| if t < tokens { row(t).codes } else { &[] });
        for t in 0..tokens {
            let row = row(t);
            for (block, scales) in scales.iter_mut().enumerate() {
                scales[t] = row.scales[block];
            }
            match row.sums {
                Some(row) => {
                    for (sums, &sum) in sums.iter_mut().zip(row) {
                        sums[t] = sum;
                    }
                }
                // Products of tiles need none.
                None if M::LAYOUT == TokenLayout::Tiles => {}
                None => {
                    let span = if self.blocks == 1 {
                        row.codes.len().max(1)
                    } else {
                        BLOCK
                    };
                    for (sums, codes) in sums.iter_mut().zip(row.codes.chunks(span)) {
                        sums[t] = codes.iter().map(|&code| i32::from(code as i8)).sum();
                    }
                }
            }
        }
        match M::LAYOUT {
            TokenLayout::Rows => {
                for (row, out) in rows.iter().zip(bytes.chunks_exact_mut(self.row_bytes)) {
                    let (head, padding) = out.split_at_mut(row.len());
                    head.copy_from_slice(row);
                    padding.fill(0);
                }
            }
            TokenLayout::Tiles => {
                let v = m.vector();
                let (tiles, _) = bytes.as_chunks_mut::<{ size_of::<Tile<u32>>() }>();
                // As long as all have a whole line: from the rows to the tile in registers.
                let lines = rows[..tokens].iter().map(|row| row.len() / LINE);
                let shared = lines.min().unwrap_or(0);
                let (whole, rest) = tiles.split_at_mut(shared);
                for (i, out) in whole.iter_mut().enumerate() {
                    let mut lines = [v.splat_int(0); TOKENS];
                    for (words, row) in lines.iter_mut().zip(&rows[..tokens]) {
                        let line: Lanes<i32> =
                            bytemuck::pod_read_unaligned(&row[i * LINE..][..LINE]);
                        *words = v.load_int(&line);
                    }
                    let (out, _) = out.as_chunks_mut::<LINE>();
                    for (words, out) in v.transpose(lines).into_iter().zip(out) {
                        v.store_int(words, bytemuck::cast_mut(out));
                    }
                }
                for (i, out) in rest.iter_mut().enumerate() {
                    let start = (shared + i) * LINE;
                    let mut tile = Tile::<u32>::default();
                    for (row, words) in rows.iter().zip(&mut tile.0) {
                        copy_words(row.get(start..).unwrap_or(&[]), words);
                    }
                    let mut by_word = Tile::default();
                    v.transpose_tile(&tile, &mut by_word);
                    out.copy_from_slice(bytemuck::bytes_of(&by_word));
                }
            }
        }
    }

    /// Writes the 128 rounded elements of h that slice `slice` of group `group` has: `words` words
    /// of each token, and its scales.
    ///
    /// # Safety
    /// Nobody else uses that slice of the group meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn store_slice<M: Multiply>(
        &self,
        m: M,
        group: usize,
        slice: usize,
        words: &[Lanes<u32>],
        scales: Lanes<f32>,
        sums: Lanes<i32>,
    ) {
        let (group_bytes, slice_bytes) = (TOKENS * self.row_bytes, words.len() * 4);
        let start = group * group_bytes;
        // SAFETY: the slice is this call's alone, by this function's contract.
        unsafe {
            self.scales.write(group * self.blocks + slice, 1)[0] = scales;
            self.sums.write(group * self.blocks + slice, 1)[0] = sums;
        }
        match M::LAYOUT {
            TokenLayout::Tiles => {
                let start = start + slice * slice_bytes * TOKENS;
                // SAFETY: as above.
                let out = unsafe { self.bytes.write(start, slice_bytes * TOKENS) };
                out.copy_from_slice(bytemuck::cast_slice(words));
            }
            TokenLayout::Rows => {
                for (i, words) in words.as_chunks::<PANEL_ROWS>().0.iter().enumerate() {
                    let mut by_token = Tile::default();
                    m.vector().transpose_tile(&Tile(*words), &mut by_token);
                    for (t, words) in by_token.0.iter().enumerate() {
                        let start = start + t * self.row_bytes + slice * slice_bytes + i * LINE;
                        // SAFETY: as above.
                        let out = unsafe { self.bytes.write(start, LINE) };
                        out.copy_from_slice(bytemuck::cast_slice(words));
                    }
                }
            }
        }
    }
}

/// Most groups of a pass on any instruction set.
pub(crate) const MAX_PASS: usize = 8;

/// The `count` groups of a pass (and nothing in the rest of the array): those from `first` on of a
/// block that has `tokens` tokens in groups from `block_first` on.
///
/// # Safety
/// As [`Groups::group`].
#[inline(always)]
pub(crate) unsafe fn pass<'g>(
    groups: &'g Groups<'_>,
    block_first: usize,
    tokens: usize,
    first: usize,
    count: usize,
) -> [Group<'g>; MAX_PASS] {
    let mut pass = [Group::EMPTY; MAX_PASS];
    for (g, pass) in pass[..count].iter_mut().enumerate() {
        let left = tokens - (first + g) * TOKENS;
        // SAFETY: passed on from the caller.
        *pass = unsafe { groups.group(block_first + first + g, TOKENS.min(left)) };
    }
    pass
}

/// Bytes of 16 words.
const LINE: usize = 64;

/// Up to 16 words from the start of `bytes`; the others stay zero.
#[inline(always)]
fn copy_words(bytes: &[u8], words: &mut Lanes<u32>) {
    let words: &mut [u8] = bytemuck::cast_slice_mut(words);
    let count = bytes.len().min(LINE);
    words[..count].copy_from_slice(&bytes[..count]);
}
