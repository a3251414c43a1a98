//! Warpgroup matrix multiply-accumulate: 64 rows of D from shared memory.
//!
//! Accumulators are one register for two columns a thread (64 for 128 columns), f32 or i32
//! (kept as the bits of f32, the register class is untyped): lane `4g + q` of warp w holds,
//! for each j, `d[4j], d[4j + 1]` = row 16w + g, columns 8j + 2q and + 1, and
//! `d[4j + 2], d[4j + 3]` = the same columns of row 16w + g + 8.
//!
//! Operands are K-major tiles of 128-byte rows with the 128-byte swizzle.

use super::convert;
use core::arch::asm;

/// Upper half of every descriptor: 128-byte swizzle (bit 62), 1024 bytes between groups of
/// eight rows.
const DESCRIPTOR_HIGH: u64 = 1 << 62 | 64 << 32;

/// Lower half of the descriptor of a K-major tile at `address` (1024-byte aligned); the leading
/// offset is unused and set to 1.
#[inline(always)]
pub(crate) fn descriptor(address: u32) -> u32 {
    1 << 16 | address >> 4
}

/// Added to a descriptor to step 32 bytes along K: one wgmma's depth.
pub(crate) const K_STEP: u32 = 2;

/// Orders register accesses before the next wgmma.
///
/// # Safety
/// The warpgroup must be converged.
#[inline(always)]
pub(crate) unsafe fn fence() {
    // SAFETY: the caller keeps the warpgroup converged.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
}

/// Closes a group of wgmmas.
///
/// # Safety
/// The warpgroup must be converged.
#[inline(always)]
pub(crate) unsafe fn commit() {
    // SAFETY: the caller keeps the warpgroup converged.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
}

/// Waits until at most one group is in flight.
///
/// # Safety
/// The warpgroup must be converged.
#[inline(always)]
pub(crate) unsafe fn wait_all_but_one() {
    // SAFETY: the caller keeps the warpgroup converged.
    unsafe { asm!("wgmma.wait_group.sync.aligned 1;", options(nostack)) }
}

/// Operand type of a wgmma.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    /// bf16, depth 16, f32 accumulation.
    Bf16,
    /// int8, depth 32, exact i32 accumulation.
    S8,
    /// e4m3, depth 32, f32 accumulation with fewer bits: to be added up elsewhere.
    E4m3,
}

/// The accumulators of one thread for 64 rows x [`Self::COLUMNS`] columns.
pub(crate) trait Accumulator: Sized {
    /// Columns of D.
    const COLUMNS: u32;
    /// Registers of a thread.
    const REGISTERS: usize = Self::COLUMNS as usize / 2;

    /// Neighbouring registers as pairs of bf16.
    type Packed;

    /// All registers, rounded to bf16.
    fn pack(&self) -> Self::Packed;

    /// Pair `index`; a constant after unrolling.
    fn packed(packed: &Self::Packed, index: usize) -> u32;

    /// Register `index`; a constant after unrolling.
    fn get(&self, index: usize) -> f32;

    /// Replaces register `index`; a constant after unrolling.
    fn set(&mut self, index: usize, value: f32);

    /// All zero.
    #[inline(always)]
    fn zeroed() -> Self {
        // SAFETY: implemented for arrays of f32 only, whose zero bits are 0.0.
        unsafe { core::mem::zeroed() }
    }

    /// Has all values computed here, not where they are used.
    fn settle(&mut self);

    /// `self = a * b`, or `self += a * b` if `accumulate` is not 0: one wgmma, 32 bytes deep.
    ///
    /// # Safety
    /// The warpgroup must be converged, the descriptors must name tiles that stay valid
    /// until the wait that covers this group, and `self` must not be touched before it.
    unsafe fn multiply(&mut self, element: Element, a: u32, b: u32, accumulate: u32);

    /// Waits until no group is in flight. Takes the accumulators, so that no use of them can
    /// move above the wait.
    ///
    /// # Safety
    /// The warpgroup must be converged.
    unsafe fn wait_all(&mut self);
}

/// Implements [`Accumulator`] for an array of registers; `$list` names them all.
macro_rules! accumulator {
    ($registers:literal, $columns:literal, [$($i:literal)*], [$($list:literal),*], [$a:literal, $b:literal, $p:literal]) => {
        impl Accumulator for [f32; $registers] {
            const COLUMNS: u32 = $columns;
            type Packed = [u32; $registers / 2];

            #[inline(always)]
            fn pack(&self) -> Self::Packed {
                core::array::from_fn(|i| convert::bf16x2(self[2 * i], self[2 * i + 1]))
            }

            #[inline(always)]
            fn packed(packed: &Self::Packed, index: usize) -> u32 {
                packed[index]
            }

            #[inline(always)]
            fn get(&self, index: usize) -> f32 {
                self[index]
            }

            #[inline(always)]
            fn set(&mut self, index: usize, value: f32) {
                self[index] = value;
            }

            #[inline(always)]
            unsafe fn multiply(&mut self, element: Element, a: u32, b: u32, accumulate: u32) {
                let [a, b] = [a, b].map(|low| DESCRIPTOR_HIGH | u64::from(low));
                /// One instruction with its operands.
                macro_rules! instruction {
                    ($name:literal, $tail:literal) => {
                        asm!(
                            concat!("{{ .reg .pred p; setp.ne.b32 p, {", $p, "}, 0;"),
                            concat!("wgmma.mma_async.sync.aligned.m64n", $columns, $name, " {{"),
                            $($list,)*
                            concat!("}}, {", $a, "}, {", $b, "}, p", $tail, "; }}"),
                            $(inout(reg32) self[$i],)*
                            in(reg64) a, in(reg64) b, in(reg32) accumulate, options(nostack)
                        )
                    };
                }
                // SAFETY: the caller keeps the trait's contract.
                unsafe {
                    match element {
                        Element::Bf16 => instruction!("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
                        Element::S8 => instruction!("k32.s32.s8.s8", ""),
                        Element::E4m3 => instruction!("k32.f32.e4m3.e4m3", ", 1, 1"),
                    }
                }
            }

            #[inline(always)]
            fn settle(&mut self) {
                // SAFETY: no instruction; the comment names the operands.
                unsafe {
                    asm!("/*", $($list,)* "*/", $(inout(reg32) self[$i],)* options(nostack))
                }
            }

            #[inline(always)]
            unsafe fn wait_all(&mut self) {
                // SAFETY: the caller keeps the warpgroup converged; the comment names the
                // operands.
                unsafe {
                    asm!(
                        "wgmma.wait_group.sync.aligned 0; /*", $($list,)* "*/",
                        $(inout(reg32) self[$i],)* options(nostack)
                    )
                }
            }
        }
    };
}

accumulator!(
    64,
    128,
    [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
        16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
        48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
    ],
    [
        "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7},",
        "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
        "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23},",
        "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
        "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39},",
        "{40}, {41}, {42}, {43}, {44}, {45}, {46}, {47},",
        "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55},",
        "{56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}"
    ],
    [64, 65, 66]
);

accumulator!(
    96,
    192,
    [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
        16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
        48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
        64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79
        80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
    ],
    [
        "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7},",
        "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
        "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23},",
        "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
        "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39},",
        "{40}, {41}, {42}, {43}, {44}, {45}, {46}, {47},",
        "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55},",
        "{56}, {57}, {58}, {59}, {60}, {61}, {62}, {63},",
        "{64}, {65}, {66}, {67}, {68}, {69}, {70}, {71},",
        "{72}, {73}, {74}, {75}, {76}, {77}, {78}, {79},",
        "{80}, {81}, {82}, {83}, {84}, {85}, {86}, {87},",
        "{88}, {89}, {90}, {91}, {92}, {93}, {94}, {95}"
    ],
    [96, 97, 98]
);

accumulator!(
    128,
    256,
    [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
        16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
        48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
        64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79
        80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
        96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111
        112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127
    ],
    [
        "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7},",
        "{8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
        "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23},",
        "{24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
        "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39},",
        "{40}, {41}, {42}, {43}, {44}, {45}, {46}, {47},",
        "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55},",
        "{56}, {57}, {58}, {59}, {60}, {61}, {62}, {63},",
        "{64}, {65}, {66}, {67}, {68}, {69}, {70}, {71},",
        "{72}, {73}, {74}, {75}, {76}, {77}, {78}, {79},",
        "{80}, {81}, {82}, {83}, {84}, {85}, {86}, {87},",
        "{88}, {89}, {90}, {91}, {92}, {93}, {94}, {95},",
        "{96}, {97}, {98}, {99}, {100}, {101}, {102}, {103},",
        "{104}, {105}, {106}, {107}, {108}, {109}, {110}, {111},",
        "{112}, {113}, {114}, {115}, {116}, {117}, {118}, {119},",
        "{120}, {121}, {122}, {123}, {124}, {125}, {126}, {127}"
    ],
    [128, 129, 130]
);
