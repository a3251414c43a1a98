//! AMX tile products, and the same in plain Rust.
//!
//! ```text
//! tmm6: W, 16 rows x 64 B         tmm7: x, 16 words x 16 tokens        tmm0..2: sums, 16 rows x 16 tokens
//!
//! for each unit (128 B of K), for each half of it:
//!     load W;  for each group c of 1 to 3:  load x[c];  tmm[c] += W . x[c]
//! ```
//!
//! The weights are the row operand, so they are loaded as they lie in memory and need no
//! packing; the few activations are packed instead ([`TokenLayout::Tiles`]).
//!
//! NOTE: at most five tiles are ever live. Two hardware threads of a core share a pool of
//! physical tiles: with all eight live in each, nothing is left for renaming, loads no longer overlap
//! with products and the rate halves. A tile is live from its first write after the configuration is
//! loaded, whether it is used again or not; hence one weight register, one token register, and
//! no textbook 2 x 2 blocking. On a core of its own a thread reaches the same rate either way.
//!
//! NOTE: `tdpbf16ps` treats subnormal operands and results as zero and rounds to nearest even,
//! whatever the mode of the floating-point unit.

use std::mem::MaybeUninit;

use asym_gemm_formats::bank::{UNIT_BYTES, UNIT_ROW_BYTES};
use bytemuck::{AnyBitPattern, NoUninit};

use super::fp4::Fp4;
use super::portable::Portable;
use super::{Dot, Expanded, Group, Multiply, Panel, Products, Span, TokenLayout};
use crate::tile::{TOKENS, Tile};
use crate::vector::{PlainVector, Vector};

/// Most groups of one product.
const MAX_GROUPS: usize = 3;

/// What a unit of weights is multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// 16 rows of 128 bytes.
    weights: *const u8,
    row_stride: usize,
    /// Two tiles of each group; of groups that do not take part, anything.
    x: [*const u8; MAX_GROUPS],
    /// Bytes from a load of weights to its prefetch; 0 for none, if the weights are in the cache.
    prefetch: usize,
}

/// What multiplies tiles: the instructions, or their emulation.
pub(crate) trait TileUnit: Copy {
    /// Arithmetic on lanes.
    type Vector: Vector;

    /// The registers that hold the sums of up to three groups.
    type Sums;

    /// A value of it.
    fn vector(self) -> Self::Vector;

    /// Sums of `G` groups, zero.
    fn zero<const G: usize>(self) -> Self::Sums;

    /// Adds the i8 products of one unit to the i32 sums of `G` groups.
    ///
    /// # Safety
    /// The weights and the tiles of `G` groups are valid to read.
    unsafe fn add_s8<const G: usize>(self, sums: &mut Self::Sums, step: Step);

    /// Adds bf16 products to f32 sums.
    ///
    /// # Safety
    /// As [`TileUnit::add_s8`].
    unsafe fn add_bf16<const G: usize>(self, sums: &mut Self::Sums, step: Step);

    /// Writes the sums of `G` groups.
    ///
    /// # Safety
    /// `out` is valid for `G` tiles, which nothing else refers to.
    unsafe fn store<const G: usize>(self, sums: &Self::Sums, out: *mut Tile<u32>);

    /// As [`Multiply::expand_e4m3`].
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded;

    /// As [`Multiply::expand_fp4`].
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded;
}

/// [`Multiply`] by tile products.
#[derive(Clone, Copy)]
pub(crate) struct Tiles<U>(pub(crate) U);

impl<U: TileUnit> Tiles<U> {
    /// Adds all units of `w` by `add` and writes the sums to `out`.
    #[inline(always)]
    fn product<const G: usize, T: NoUninit + AnyBitPattern>(
        self,
        w: Panel<'_>,
        x: &[Group<'_>],
        span: Span,
        out: Products<'_, T>,
        add: impl Fn(&mut U::Sums, Step),
    ) {
        let out: &mut [Tile<T>; G] = out.first_chunk_mut().expect("a tile for each group");
        let mut tiles = [std::ptr::null(); MAX_GROUPS];
        for (tiles, x) in tiles.iter_mut().zip(&x[..G]) {
            let start = span.unit * UNIT_BYTES;
            // The bound that makes the reads of the products valid.
            *tiles = x.bytes[start..][..w.total_units() * UNIT_BYTES].as_ptr();
        }
        let mut step = Step {
            weights: w.as_ptr(),
            row_stride: w.row_stride(),
            x: tiles,
            prefetch: w.prefetch(),
        };
        let mut sums = self.0.zero::<G>();
        for run in 0..w.run_count() {
            step.weights = w.as_ptr().wrapping_add(run * w.run_stride());
            for _ in 0..w.units() {
                add(&mut sums, step);
                step.weights = step.weights.wrapping_add(w.unit_stride());
                step.x = step.x.map(|x| x.wrapping_add(UNIT_BYTES));
            }
        }
        // SAFETY: `out` are as many tiles of 32-bit values, borrowed for this call.
        unsafe { self.0.store::<G>(&sums, out.as_mut_ptr().cast()) }
    }
}

/// Calls `$self.product::<G, _>(..)` with the number of groups as a constant; `$add` is the method
/// that adds a unit.
macro_rules! product {
    ($self:ident.$add:ident, $w:ident, $x:ident, $span:ident, $out:ident) => {{
        macro_rules! of {
            ($groups:literal) => {
                $self.product::<$groups, _>($w, $x, $span, $out, |sums, step| {
                    // SAFETY: `Panel` checked that its last row lies inside its bytes, `product` did
                    // the same for the tiles of the groups.
                    unsafe { $self.0.$add::<$groups>(sums, step) }
                })
            };
        }
        match $x.len() {
            1 => of!(1),
            2 => of!(2),
            3 => of!(3),
            groups => panic!("{groups} groups in a product of tiles"),
        }
    }};
}

impl<U: TileUnit> Multiply for Tiles<U> {
    type Vector = U::Vector;

    #[inline(always)]
    fn vector(self) -> U::Vector {
        self.0.vector()
    }

    const LAYOUT: TokenLayout = TokenLayout::Tiles;
    const GROUPS: usize = MAX_GROUPS;

    #[inline(always)]
    fn s8(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, i32>) {
        product!(self.add_s8, w, x, span, out);
    }

    #[inline(always)]
    fn bf16(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, f32>) {
        product!(self.add_bf16, w, x, span, out);
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        self.0.expand_e4m3(panel, out)
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        self.0.expand_fp4::<F>(panel, out)
    }
}

/// Tile products in plain Rust: what the instructions do, for tests on other processors.
#[derive(Clone, Copy)]
pub(crate) struct Emulated;

impl Emulated {
    /// Calls `multiply(row, word of W, token, word of x, group)` for all products of a unit in the
    /// order of the instructions.
    ///
    /// # Safety
    /// As [`TileUnit::add_s8`].
    unsafe fn for_products<const G: usize>(
        step: Step,
        mut multiply: impl FnMut(usize, [u8; 4], usize, [u8; 4], usize),
    ) {
        const WORD: usize = 4;
        for word in 0..UNIT_ROW_BYTES / WORD {
            for row in 0..TOKENS {
                for group in 0..G {
                    for token in 0..TOKENS {
                        // SAFETY: in bounds by this function's contract; bytes need no alignment.
                        let (w, x) = unsafe {
                            (
                                step.weights
                                    .add(row * step.row_stride + word * WORD)
                                    .cast::<[u8; 4]>()
                                    .read(),
                                step.x[group]
                                    .add((word * TOKENS + token) * WORD)
                                    .cast::<[u8; 4]>()
                                    .read(),
                            )
                        };
                        multiply(row, w, token, x, group);
                    }
                }
            }
        }
    }
}

impl TileUnit for Emulated {
    type Vector = PlainVector;
    type Sums = [Tile<u32>; MAX_GROUPS];

    #[inline(always)]
    fn vector(self) -> PlainVector {
        PlainVector
    }

    fn zero<const G: usize>(self) -> Self::Sums {
        Self::Sums::default()
    }

    unsafe fn add_s8<const G: usize>(self, sums: &mut Self::Sums, step: Step) {
        let add = |row: usize, w: [u8; 4], token: usize, x: [u8; 4], group: usize| {
            let products = w.iter().zip(x);
            let sum: i32 = products
                .map(|(&w, x)| i32::from(w as i8) * i32::from(x as i8))
                .sum();
            let total: &mut u32 = &mut sums[group].0[row][token];
            *total = total.wrapping_add(sum as u32);
        };
        // SAFETY: passed on from the caller.
        unsafe { Self::for_products::<G>(step, add) }
    }

    unsafe fn add_bf16<const G: usize>(self, sums: &mut Self::Sums, step: Step) {
        let float = |low: u8, high: u8| f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
        let add = |row: usize, w: [u8; 4], token: usize, x: [u8; 4], group: usize| {
            let total = &mut sums[group].0[row][token];
            let mut sum = f32::from_bits(*total);
            sum += float(w[0], w[1]) * float(x[0], x[1]);
            sum += float(w[2], w[3]) * float(x[2], x[3]);
            *total = sum.to_bits();
        };
        // SAFETY: passed on from the caller.
        unsafe { Self::for_products::<G>(step, add) }
    }

    unsafe fn store<const G: usize>(self, sums: &Self::Sums, out: *mut Tile<u32>) {
        // SAFETY: by this function's contract.
        let out = unsafe { std::slice::from_raw_parts_mut(out, G) };
        out.copy_from_slice(&sums[..G]);
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        Portable.expand_e4m3(panel, out)
    }

    #[inline(always)]
    fn expand_fp4<'e, F: Fp4>(
        self,
        panel: Panel<'_>,
        out: &'e mut MaybeUninit<Expanded>,
    ) -> &'e Expanded {
        Portable.expand_fp4::<F>(panel, out)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use instructions::run;

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;
    use std::mem::MaybeUninit;

    use super::{Step, TileUnit, Tiles};
    use crate::isa::Amx;
    use crate::kernels::fp4::{self, Fp4};
    use crate::kernels::{Body, Expanded, Panel, avx512};
    use crate::tile::Tile;
    use crate::vector::Avx512Vector;

    /// Runs `body` compiled for AVX-512 around tile products, with the tiles configured.
    pub(in crate::kernels) fn run<B: Body>(token: Amx, body: B) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512bf16")]
        fn inner<B: Body>(token: Amx, body: B) {
            body.run(Tiles(token));
        }
        let _tiles = TileConfig::load(token);
        // SAFETY: the token exists, so the features were detected.
        unsafe { inner(token, body) }
    }

    /// The tile configuration of this thread while the value lives: eight tiles of 16 rows of 64
    /// bytes.
    struct TileConfig {
        _token: Amx,
    }

    /// The memory operand of `ldtilecfg`: palette 1, bytes a row and rows of each tile.
    #[repr(C, align(64))]
    struct Palette {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl TileConfig {
        const EIGHT: [u16; 16] = [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0];

        fn load(token: Amx) -> Self {
            let palette = Palette {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: Self::EIGHT,
                rows: Self::EIGHT.map(|bytes| (bytes / 4) as u8),
            };
            // SAFETY: the token exists, so the processor has AMX with palette 1 and the system
            // permits tile data; the operand is 64 valid bytes.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &palette, options(nostack, readonly, preserves_flags));
            }
            Self { _token: token }
        }
    }

    impl Drop for TileConfig {
        fn drop(&mut self) {
            // SAFETY: the token existed when the configuration was loaded; no tile is in use between
            // products.
            unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
        }
    }

    /// The 16 prefetches that go with one load of 16 weight rows, `$half` bytes into them; or none.
    macro_rules! prefetch_rows {
        (cached, $half:literal) => {
            ""
        };
        (streamed, $half:literal) => {
            concat!(
                "lea {ahead}, [{w} + {far}]\n",
                prefetch_rows!(@four $half),
                "lea {ahead}, [{ahead} + {row}*4]\n",
                prefetch_rows!(@four $half),
                "lea {ahead}, [{ahead} + {row}*4]\n",
                prefetch_rows!(@four $half),
                "lea {ahead}, [{ahead} + {row}*4]\n",
                prefetch_rows!(@four $half),
            )
        };
        (@four $half:literal) => {
            concat!(
                "prefetcht1 [{ahead} + ", $half, "]\n",
                "prefetcht1 [{ahead} + {row} + ", $half, "]\n",
                "prefetcht1 [{ahead} + {row}*2 + ", $half, "]\n",
                "prefetcht1 [{ahead} + {rows3} + ", $half, "]\n",
            )
        };
    }

    /// Adds one unit, two halves of 64 bytes, for the groups listed as (name, index, tile of sums).
    macro_rules! add_unit {
        (
            $step:ident, $dot:literal, $memory:ident, [$(($x:ident, $index:literal, $sum:tt)),+],
            $($prefetch:tt)*
        ) => {
            asm!(
                "tileloadd tmm6, [{w} + {row}*1]",
                prefetch_rows!($memory, 0),
                $(
                    concat!("tileloadd tmm7, [{", stringify!($x), "} + {line}*1]"),
                    concat!($dot, " ", $sum, ", tmm6, tmm7"),
                )+
                "tileloadd tmm6, [{w} + {row}*1 + 64]",
                prefetch_rows!($memory, 64),
                $(
                    concat!("tileloadd tmm7, [{", stringify!($x), "} + {line}*1 + 1024]"),
                    concat!($dot, " ", $sum, ", tmm6, tmm7"),
                )+
                w = in(reg) $step.weights,
                row = in(reg) $step.row_stride,
                line = in(reg) 64usize,
                $($x = in(reg) $step.x[$index],)+
                $($prefetch)*
                $(out($sum) _,)+
                out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags)
            )
        };
        ($step:ident, $groups:expr, $dot:literal) => {
            match ($groups, $step.prefetch) {
                (1, 0) => add_unit!($step, $dot, cached, [(x0, 0, "tmm0")],),
                (2, 0) => add_unit!($step, $dot, cached, [(x0, 0, "tmm0"), (x1, 1, "tmm1")],),
                (_, 0) => add_unit!(
                    $step, $dot, cached, [(x0, 0, "tmm0"), (x1, 1, "tmm1"), (x2, 2, "tmm2")],
                ),
                (1, far) => add_unit!(
                    $step, $dot, streamed, [(x0, 0, "tmm0")],
                    far = in(reg) far, rows3 = in(reg) 3 * $step.row_stride, ahead = out(reg) _,
                ),
                (2, far) => add_unit!(
                    $step, $dot, streamed, [(x0, 0, "tmm0"), (x1, 1, "tmm1")],
                    far = in(reg) far, rows3 = in(reg) 3 * $step.row_stride, ahead = out(reg) _,
                ),
                (_, far) => add_unit!(
                    $step, $dot, streamed, [(x0, 0, "tmm0"), (x1, 1, "tmm1"), (x2, 2, "tmm2")],
                    far = in(reg) far, rows3 = in(reg) 3 * $step.row_stride, ahead = out(reg) _,
                ),
            }
        };
    }

    /// NOTE: sums stay in tile registers from one `asm!` to the next. No other code uses these
    /// registers: the compiler has no tile values here to allocate them for, and the system saves
    /// them when it switches threads. So vector work may stand between the steps of a product.
    impl TileUnit for Amx {
        type Vector = Avx512Vector;
        type Sums = ();

        #[inline(always)]
        fn vector(self) -> Avx512Vector {
            self.into()
        }

        #[inline(always)]
        fn zero<const G: usize>(self) {
            // SAFETY: the token exists and `run`, the only way to a `Tiles<Amx>`, configured the
            // tiles. Tiles that are not needed are not touched (see the module's first note).
            unsafe {
                match G {
                    1 => asm!("tilezero tmm0", out("tmm0") _,
                        options(nostack, nomem, preserves_flags)),
                    2 => asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _,
                        options(nostack, nomem, preserves_flags)),
                    _ => asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                        out("tmm0") _, out("tmm1") _, out("tmm2") _,
                        options(nostack, nomem, preserves_flags)),
                }
            }
        }

        #[inline(always)]
        unsafe fn add_s8<const G: usize>(self, (): &mut (), step: Step) {
            // SAFETY: the token exists and `run` configured the tiles; the pointers are valid by this
            // function's contract.
            unsafe { add_unit!(step, G, "tdpbssd") }
        }

        #[inline(always)]
        unsafe fn add_bf16<const G: usize>(self, (): &mut (), step: Step) {
            // SAFETY: as in `add_s8`.
            unsafe { add_unit!(step, G, "tdpbf16ps") }
        }

        #[inline(always)]
        unsafe fn store<const G: usize>(self, (): &(), out: *mut Tile<u32>) {
            // SAFETY: as in `add_s8`; `G` tiles are valid to write by this function's contract.
            unsafe {
                match G {
                    1 => asm!("tilestored [{out} + {line}*1], tmm0",
                        out = in(reg) out, line = in(reg) 64usize,
                        options(nostack, preserves_flags)),
                    2 => asm!("tilestored [{out} + {line}*1], tmm0",
                        "tilestored [{out} + {line}*1 + 1024], tmm1",
                        out = in(reg) out, line = in(reg) 64usize,
                        options(nostack, preserves_flags)),
                    _ => asm!("tilestored [{out} + {line}*1], tmm0",
                        "tilestored [{out} + {line}*1 + 1024], tmm1",
                        "tilestored [{out} + {line}*1 + 2048], tmm2",
                        out = in(reg) out, line = in(reg) 64usize,
                        options(nostack, preserves_flags)),
                }
            }
        }

        #[inline(always)]
        fn expand_e4m3<'e>(
            self,
            panel: Panel<'_>,
            out: &'e mut MaybeUninit<Expanded>,
        ) -> &'e Expanded {
            // SAFETY: the token exists, so AVX-512 F and BW were detected.
            unsafe { avx512::expand_e4m3(panel, out) }
        }

        #[inline(always)]
        fn expand_fp4<'e, F: Fp4>(
            self,
            panel: Panel<'_>,
            out: &'e mut MaybeUninit<Expanded>,
        ) -> &'e Expanded {
            // SAFETY: the token exists, so AVX-512 F and BW were detected.
            unsafe { fp4::expand_avx512::<F>(panel, out) }
        }
    }
}
