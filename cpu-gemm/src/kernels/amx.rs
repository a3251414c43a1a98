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

use super::portable::Portable;
use super::{Dot, Expanded, Group, Multiply, Panel, Products, Span, TokenLayout};
use crate::tile::{TOKENS, Tile};
use crate::vector::{PlainVector, Vector};

/// Most groups of one product.
const MAX_GROUPS: usize = 3;

/// The operands of one product, as the instruction sequence reads them.
#[repr(C)]
pub(crate) struct TileArgs {
    weights: *const u8,
    row_stride: usize,
    unit_stride: usize,
    /// Units of a run.
    units: usize,
    runs: usize,
    /// Bytes from the end of a run to the start of the next (modulo 2^64).
    run_gap: usize,
    /// Tiles of each group.
    x: [*const u8; MAX_GROUPS],
    /// A tile for each group.
    out: *mut u8,
    /// Bytes from a load of weights to its prefetch; 0 for none, if the weights are in the cache.
    prefetch: usize,
}

/// What multiplies tiles: the instructions, or their emulation.
pub(crate) trait TileUnit: Copy {
    /// Arithmetic on lanes.
    type Vector: Vector;

    /// A value of it.
    fn vector(self) -> Self::Vector;

    /// i8 products into i32 tiles for `groups` groups.
    ///
    /// # Safety
    /// All pointers of `args` are valid for what the counts and strides say.
    unsafe fn s8(self, args: &TileArgs, groups: usize);

    /// bf16 products into f32 tiles.
    ///
    /// # Safety
    /// As [`TileUnit::s8`].
    unsafe fn bf16(self, args: &TileArgs, groups: usize);

    /// As [`Multiply::expand_e4m3`].
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded;

    /// Rows become columns of `out`.
    fn transpose(self, tile: &Tile<u32>, out: &mut Tile<u32>);
}

/// [`Multiply`] by tile products.
#[derive(Clone, Copy)]
pub(crate) struct Tiles<U>(pub(crate) U);

impl<U> Tiles<U> {
    #[inline(always)]
    fn args<T>(w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, T>) -> TileArgs {
        assert!(!x.is_empty() && x.len() <= MAX_GROUPS && x.len() <= out.len());
        assert!(w.total_units() > 0);
        let mut tiles = [std::ptr::null(); MAX_GROUPS];
        for (tiles, x) in tiles.iter_mut().zip(x) {
            let start = span.unit * UNIT_BYTES;
            // The bound that makes the reads of the product valid.
            *tiles = x.bytes[start..][..w.total_units() * UNIT_BYTES].as_ptr();
        }
        TileArgs {
            weights: w.as_ptr(),
            row_stride: w.row_stride(),
            unit_stride: w.unit_stride(),
            units: w.units(),
            runs: w.run_count(),
            run_gap: w.run_stride().wrapping_sub(w.units() * w.unit_stride()),
            x: tiles,
            out: out.as_mut_ptr().cast(),
            prefetch: w.prefetch(),
        }
    }
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
        let args = Self::args(w, x, span, out);
        // SAFETY: `Panel` checked that its last row lies inside its bytes, `args` did the same for
        // the groups and counted the tiles of `out`.
        unsafe { self.0.s8(&args, x.len()) }
    }

    #[inline(always)]
    fn bf16(self, w: Panel<'_>, x: &[Group<'_>], span: Span, out: Products<'_, f32>) {
        let args = Self::args(w, x, span, out);
        // SAFETY: as in `s8`.
        unsafe { self.0.bf16(&args, x.len()) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        self.0.expand_e4m3(panel, out)
    }

    #[inline(always)]
    fn transpose(self, tile: &Tile<u32>, out: &mut Tile<u32>) {
        self.0.transpose(tile, out);
    }
}

/// Tile products in plain Rust: what the instructions do, for tests on other processors.
#[derive(Clone, Copy)]
pub(crate) struct Emulated;

impl Emulated {
    /// Calls `multiply(row, word of W, token, word of x, group)` for all products in the order of the
    /// instructions.
    ///
    /// # Safety
    /// The weights and x of `args` are valid for what the counts and strides say.
    unsafe fn for_products(
        args: &TileArgs,
        groups: usize,
        mut multiply: impl FnMut(usize, [u8; 4], usize, [u8; 4], usize),
    ) {
        const WORD: usize = 4;
        let mut w = args.weights;
        for unit in 0..args.runs * args.units {
            for word in 0..UNIT_ROW_BYTES / WORD {
                for row in 0..TOKENS {
                    for group in 0..groups {
                        for token in 0..TOKENS {
                            let x = (unit * UNIT_ROW_BYTES / WORD + word) * TOKENS + token;
                            // SAFETY: in bounds by this function's contract; bytes need no
                            // alignment.
                            let (w, x) = unsafe {
                                (
                                    w.add(row * args.row_stride + word * WORD)
                                        .cast::<[u8; 4]>()
                                        .read(),
                                    args.x[group].add(x * WORD).cast::<[u8; 4]>().read(),
                                )
                            };
                            multiply(row, w, token, x, group);
                        }
                    }
                }
            }
            w = w.wrapping_add(args.unit_stride);
            if (unit + 1) % args.units == 0 {
                w = w.wrapping_add(args.run_gap);
            }
        }
    }

    /// Runs `products` on the output tiles of `args`, zeroed.
    ///
    /// # Safety
    /// `out` of `args` is valid for `groups` tiles of `T`, which nothing else refers to.
    unsafe fn with_out<T: Copy + Default>(
        args: &TileArgs,
        groups: usize,
        products: impl FnOnce(&mut [Tile<T>]),
    ) {
        // SAFETY: by this function's contract.
        let out = unsafe { std::slice::from_raw_parts_mut(args.out.cast::<Tile<T>>(), groups) };
        out.fill(Tile::default());
        products(out);
    }
}

impl TileUnit for Emulated {
    type Vector = PlainVector;

    #[inline(always)]
    fn vector(self) -> PlainVector {
        PlainVector
    }

    unsafe fn s8(self, args: &TileArgs, groups: usize) {
        let multiply = |out: &mut [Tile<i32>]| {
            let add = |row: usize, w: [u8; 4], token: usize, x: [u8; 4], group: usize| {
                let products = w.iter().zip(x);
                let sum: i32 = products
                    .map(|(&w, x)| i32::from(w as i8) * i32::from(x as i8))
                    .sum();
                out[group].0[row][token] += sum;
            };
            // SAFETY: passed on from the caller.
            unsafe { Self::for_products(args, groups, add) }
        };
        // SAFETY: passed on from the caller.
        unsafe { Self::with_out(args, groups, multiply) }
    }

    unsafe fn bf16(self, args: &TileArgs, groups: usize) {
        let float = |low: u8, high: u8| f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
        let multiply = |out: &mut [Tile<f32>]| {
            let add = |row: usize, w: [u8; 4], token: usize, x: [u8; 4], group: usize| {
                let sum = &mut out[group].0[row][token];
                *sum += float(w[0], w[1]) * float(x[0], x[1]);
                *sum += float(w[2], w[3]) * float(x[2], x[3]);
            };
            // SAFETY: passed on from the caller.
            unsafe { Self::for_products(args, groups, add) }
        };
        // SAFETY: passed on from the caller.
        unsafe { Self::with_out(args, groups, multiply) }
    }

    #[inline(always)]
    fn expand_e4m3<'e>(self, panel: Panel<'_>, out: &'e mut MaybeUninit<Expanded>) -> &'e Expanded {
        Portable.expand_e4m3(panel, out)
    }

    #[inline(always)]
    fn transpose(self, tile: &Tile<u32>, out: &mut Tile<u32>) {
        tile.transpose_into(out);
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use instructions::run;

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;
    use std::mem::MaybeUninit;

    use super::{TileArgs, TileUnit, Tiles};
    use crate::isa::Amx;
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
                "mov rcx, [rdi + 80]\n",
                "add rcx, r8\n",
                prefetch_rows!(@four $half),
                "lea rcx, [rcx + r9*4]\n",
                prefetch_rows!(@four $half),
                "lea rcx, [rcx + r9*4]\n",
                prefetch_rows!(@four $half),
                "lea rcx, [rcx + r9*4]\n",
                prefetch_rows!(@four $half),
            )
        };
        (@four $half:literal) => {
            concat!(
                "prefetcht1 [rcx + ", $half, "]\n",
                "prefetcht1 [rcx + r9 + ", $half, "]\n",
                "prefetcht1 [rcx + r9*2 + ", $half, "]\n",
                "prefetcht1 [rcx + rax + ", $half, "]\n",
            )
        };
    }

    /// One product for the groups listed as (tile of sums, register of x, offset of x in the
    /// arguments, offset in `out`).
    macro_rules! product {
        (
            $args:expr, $dot:literal, $memory:ident,
            [$(($sum:literal, $x:literal, $x_arg:literal, $out:literal)),+]
        ) => {
            asm!(
                // Operands.
                "mov r8, [rdi]",
                "mov r9, [rdi + 8]",
                "mov r10, [rdi + 16]",
                "mov r11, [rdi + 32]",
                "mov r12, [rdi + 40]",
                $(concat!("mov ", $x, ", [rdi + ", $x_arg, "]"),)+
                "lea rax, [r9 + r9*2]",
                "mov edx, 64",
                $(concat!("tilezero ", $sum),)+
                // Runs.
                "3:",
                "mov rsi, [rdi + 24]",
                // Units of a run, two halves each.
                "4:",
                "tileloadd tmm6, [r8 + r9*1]",
                prefetch_rows!($memory, 0),
                $(
                    concat!("tileloadd tmm7, [", $x, " + rdx*1]"),
                    concat!($dot, " ", $sum, ", tmm6, tmm7"),
                )+
                "tileloadd tmm6, [r8 + r9*1 + 64]",
                prefetch_rows!($memory, 64),
                $(
                    concat!("tileloadd tmm7, [", $x, " + rdx*1 + 1024]"),
                    concat!($dot, " ", $sum, ", tmm6, tmm7"),
                )+
                "add r8, r10",
                $(concat!("add ", $x, ", 2048"),)+
                "dec rsi",
                "jnz 4b",
                "add r8, r12",
                "dec r11",
                "jnz 3b",
                "mov rcx, [rdi + 72]",
                $(concat!("tilestored [rcx + rdx*1 + ", $out, "], ", $sum),)+
                in("rdi") $args,
                out("rax") _, out("rcx") _, out("rdx") _, out("rsi") _,
                out("r8") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _,
                out("r13") _, out("r14") _, out("r15") _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            )
        };
        ($args:expr, $groups:expr, $dot:literal, $memory:ident) => {
            match $groups {
                1 => product!($args, $dot, $memory, [("tmm0", "r13", 48, 0)]),
                2 => product!(
                    $args, $dot, $memory,
                    [("tmm0", "r13", 48, 0), ("tmm1", "r14", 56, 1024)]
                ),
                _ => product!(
                    $args, $dot, $memory,
                    [
                        ("tmm0", "r13", 48, 0),
                        ("tmm1", "r14", 56, 1024),
                        ("tmm2", "r15", 64, 2048)
                    ]
                ),
            }
        };
    }

    impl TileUnit for Amx {
        type Vector = Avx512Vector;

        #[inline(always)]
        fn vector(self) -> Avx512Vector {
            self.into()
        }

        #[inline(always)]
        unsafe fn s8(self, args: &TileArgs, groups: usize) {
            // SAFETY: the token exists and `run`, the only way to a `Tiles<Amx>`, configured the
            // tiles; the pointers are valid by this function's contract. At least one run of at
            // least one unit: K is not 0.
            unsafe {
                match args.prefetch {
                    0 => product!(args, groups, "tdpbssd", cached),
                    _ => product!(args, groups, "tdpbssd", streamed),
                }
            }
        }

        #[inline(always)]
        unsafe fn bf16(self, args: &TileArgs, groups: usize) {
            // SAFETY: as in `s8`.
            unsafe {
                match args.prefetch {
                    0 => product!(args, groups, "tdpbf16ps", cached),
                    _ => product!(args, groups, "tdpbf16ps", streamed),
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
        fn transpose(self, tile: &Tile<u32>, out: &mut Tile<u32>) {
            // SAFETY: the token exists, so AVX-512 F was detected.
            unsafe { avx512::transpose(tile, out) }
        }
    }
}
