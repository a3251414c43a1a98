//! Warpgroup matrix multiply-accumulate: 64 x 128 of D from shared memory.
//!
//! Accumulators are 64 registers a thread, f32 or i32 (kept as the bits of f32, the
//! register class is untyped): lane `4g + q` of warp w holds, for j in 0..16,
//! `d[4j], d[4j + 1]` = row 16w + g, columns 8j + 2q and + 1, and
//! `d[4j + 2], d[4j + 3]` = the same columns of row 16w + g + 8.
//!
//! Operands are K-major tiles of 128-byte rows with the 128-byte swizzle.

use core::arch::asm;

/// Accumulator registers of one thread.
pub(crate) type Accumulator = [f32; 64];

/// Descriptor of a K-major tile at `address` (1024-byte aligned): 128-byte swizzle (bit 62),
/// 1024 bytes between groups of eight rows; the leading offset is unused and set to 1.
#[inline(always)]
pub(crate) fn descriptor(address: u32) -> u64 {
    (1 << 62) | (64 << 32) | (1 << 16) | (address >> 4) as u64
}

/// Added to a descriptor to step 32 bytes along K: one wgmma's depth.
pub(crate) const K_STEP: u64 = 2;

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

macro_rules! asm64 {
    ($d:ident, [$($text:literal),+], [$($operand:tt)*]) => {
        asm!($($text),+,
             inout(reg32) $d[0], inout(reg32) $d[1], inout(reg32) $d[2], inout(reg32) $d[3],
             inout(reg32) $d[4], inout(reg32) $d[5], inout(reg32) $d[6], inout(reg32) $d[7],
             inout(reg32) $d[8], inout(reg32) $d[9], inout(reg32) $d[10], inout(reg32) $d[11],
             inout(reg32) $d[12], inout(reg32) $d[13], inout(reg32) $d[14], inout(reg32) $d[15],
             inout(reg32) $d[16], inout(reg32) $d[17], inout(reg32) $d[18], inout(reg32) $d[19],
             inout(reg32) $d[20], inout(reg32) $d[21], inout(reg32) $d[22], inout(reg32) $d[23],
             inout(reg32) $d[24], inout(reg32) $d[25], inout(reg32) $d[26], inout(reg32) $d[27],
             inout(reg32) $d[28], inout(reg32) $d[29], inout(reg32) $d[30], inout(reg32) $d[31],
             inout(reg32) $d[32], inout(reg32) $d[33], inout(reg32) $d[34], inout(reg32) $d[35],
             inout(reg32) $d[36], inout(reg32) $d[37], inout(reg32) $d[38], inout(reg32) $d[39],
             inout(reg32) $d[40], inout(reg32) $d[41], inout(reg32) $d[42], inout(reg32) $d[43],
             inout(reg32) $d[44], inout(reg32) $d[45], inout(reg32) $d[46], inout(reg32) $d[47],
             inout(reg32) $d[48], inout(reg32) $d[49], inout(reg32) $d[50], inout(reg32) $d[51],
             inout(reg32) $d[52], inout(reg32) $d[53], inout(reg32) $d[54], inout(reg32) $d[55],
             inout(reg32) $d[56], inout(reg32) $d[57], inout(reg32) $d[58], inout(reg32) $d[59],
             inout(reg32) $d[60], inout(reg32) $d[61], inout(reg32) $d[62], inout(reg32) $d[63],
             $($operand)*
             options(nostack))
    };
}

/// Waits until no group is in flight. Takes the accumulators, so that no use of them can
/// move above the wait.
///
/// # Safety
/// The warpgroup must be converged.
#[inline(always)]
pub(crate) unsafe fn wait_all(d: &mut Accumulator) {
    // SAFETY: the caller keeps the warpgroup converged; the comment names the operands.
    unsafe {
        asm64!(
            d,
            [
                "wgmma.wait_group.sync.aligned 0;",
                "/*",
                "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}",
                "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}",
                "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}",
                "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}",
                "*/"
            ],
            []
        )
    }
}

macro_rules! wgmma {
    ($name:ident, $doc:literal, $instruction:literal, $tail:literal) => {
        #[doc = $doc]
        ///
        /// `d = a * b`, or `d += a * b` if `accumulate` is not 0.
        ///
        /// # Safety
        /// The warpgroup must be converged, the descriptors must name tiles that stay
        /// valid until the wait that covers this group, and `d` must not be touched before it.
        #[inline(always)]
        pub(crate) unsafe fn $name(d: &mut Accumulator, a: u64, b: u64, accumulate: u32) {
            // SAFETY: the caller keeps the contract above.
            unsafe {
                asm64!(d, [
                    "{{", ".reg .pred p;", "setp.ne.b32 p, {66}, 0;",
                    $instruction, "{{",
             "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
             "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
             "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47},",
             "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}",
                    "}},", "{64}, {65}, p", $tail, ";", "}}"
                ], [in(reg64) a, in(reg64) b, in(reg32) accumulate,])
            }
        }
    };
}

wgmma!(
    mma_bf16,
    "64 x 128 x 16, bf16 operands, f32 accumulation.",
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    ", 1, 1, 0, 0"
);
wgmma!(
    mma_s8,
    "64 x 128 x 32, int8 operands, exact i32 accumulation (the bits in `d`).",
    "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8",
    ""
);
