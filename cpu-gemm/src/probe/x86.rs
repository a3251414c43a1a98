//! Loops of x86 product instructions on registers.
//!
//! Written as assembly so that no compiler moves the products out of the loop. Vector
//! loops have 12 accumulators, enough to hide the latency of two products a cycle. Tile loops have
//! three accumulators and two operands: two threads that share a core share its
//! physical tiles too, and run at half speed with all eight live.

use std::arch::asm;

use super::products::{Operands, Precision, Products};
use crate::isa::{Amx, Features};

/// Accumulators of a vector loop.
const VECTORS: u64 = 12;
/// Accumulators of a tile loop.
const TILES: u64 = 3;

/// Steps between two looks at the clock.
const VECTOR_STEPS: u64 = 4096;
const TILE_STEPS: u64 = 512;

/// What this process can run, the fastest of each precision last.
pub(super) fn available() -> Vec<Products> {
    use Precision::{Bf16, Int8};

    let vector = |name, precision, ops, run| {
        Products::new(name, precision, VECTORS * ops, VECTOR_STEPS, run)
    };
    let tile =
        |name, precision, ops, run| Products::new(name, precision, TILES * ops, TILE_STEPS, run);
    let has = Features::detect();
    let mut found = Vec::new();
    if has.contains(Features::AVX2) {
        found.push(vector("vpmaddwd ymm", Int8, 2 * 16, vpmaddwd_ymm));
        found.push(vector("vfmadd231ps ymm", Bf16, 2 * 8, vfmadd231ps_ymm));
    }
    if is_x86_feature_detected!("avxvnni") {
        found.push(vector("vpdpbusd ymm", Int8, 2 * 32, vpdpbusd_ymm));
    }
    if has.contains(Features::AVX512F) {
        found.push(vector("vfmadd231ps zmm", Bf16, 2 * 16, vfmadd231ps_zmm));
    }
    if has.contains(Features::AVX512F.and(Features::AVX512VNNI)) {
        found.push(vector("vpdpbusd zmm", Int8, 2 * 64, vpdpbusd_zmm));
    }
    if has.contains(Features::AVX512F.and(Features::AVX512BF16)) {
        found.push(vector("vdpbf16ps zmm", Bf16, 2 * 32, vdpbf16ps_zmm));
    }
    if Amx::new(has).is_some() {
        found.push(tile("tdpbssd", Int8, 2 * 16 * 16 * 64, tdpbssd));
        found.push(tile("tdpbf16ps", Bf16, 2 * 16 * 16 * 32, tdpbf16ps));
    }
    found
}

/// A function that applies `$product` to each of 12 accumulators in every step.
macro_rules! vector_loop {
    ($name:ident, $feature:literal, $register:literal, [$($product:literal),+]) => {
        /// Adds a·b to 12 accumulators, `steps` (at least 1) times.
        #[target_feature(enable = $feature)]
        fn $name(steps: u64, operands: &mut Operands) {
            // SAFETY: the vectors lie inside of the operands, which are aligned; only registers
            // named below are changed.
            unsafe {
                asm!(
                    concat!("vmovups ", $register, "12, [{a}]"),
                    concat!("vmovups ", $register, "13, [{b}]"),
                    // Clears the full registers whatever their width.
                    "vpxor xmm0, xmm0, xmm0",
                    "vpxor xmm1, xmm1, xmm1",
                    "vpxor xmm2, xmm2, xmm2",
                    "vpxor xmm3, xmm3, xmm3",
                    "vpxor xmm4, xmm4, xmm4",
                    "vpxor xmm5, xmm5, xmm5",
                    "vpxor xmm6, xmm6, xmm6",
                    "vpxor xmm7, xmm7, xmm7",
                    "vpxor xmm8, xmm8, xmm8",
                    "vpxor xmm9, xmm9, xmm9",
                    "vpxor xmm10, xmm10, xmm10",
                    "vpxor xmm11, xmm11, xmm11",
                    "2:",
                    vector_loop!(@step $register, "0", $($product),+),
                    vector_loop!(@step $register, "1", $($product),+),
                    vector_loop!(@step $register, "2", $($product),+),
                    vector_loop!(@step $register, "3", $($product),+),
                    vector_loop!(@step $register, "4", $($product),+),
                    vector_loop!(@step $register, "5", $($product),+),
                    vector_loop!(@step $register, "6", $($product),+),
                    vector_loop!(@step $register, "7", $($product),+),
                    vector_loop!(@step $register, "8", $($product),+),
                    vector_loop!(@step $register, "9", $($product),+),
                    vector_loop!(@step $register, "10", $($product),+),
                    vector_loop!(@step $register, "11", $($product),+),
                    "dec {steps}",
                    "jnz 2b",
                    concat!("vmovups [{sums}], ", $register, "0"),
                    // SSE code that follows would wait for the upper halves.
                    "vzeroupper",
                    a = in(reg) operands.a.as_ptr(),
                    b = in(reg) operands.b.as_ptr(),
                    sums = in(reg) operands.sums.as_mut_ptr(),
                    steps = inout(reg) steps.max(1) => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nostack),
                );
            }
        }
    };
    // One instruction: `op accumulator, a, b`.
    (@step $register:literal, $sum:literal, $op:literal) => {
        concat!($op, " ", $register, $sum, ", ", $register, "12, ", $register, "13")
    };
    // Two: the product, then its addition.
    (@step $register:literal, $sum:literal, $op:literal, $add:literal) => {
        concat!(
            $op, " ", $register, "14, ", $register, "12, ", $register, "13\n",
            $add, " ", $register, $sum, ", ", $register, $sum, ", ", $register, "14"
        )
    };
}

vector_loop!(vpmaddwd_ymm, "avx2", "ymm", ["vpmaddwd", "vpaddd"]);
vector_loop!(vfmadd231ps_ymm, "fma", "ymm", ["vfmadd231ps"]);
vector_loop!(vpdpbusd_ymm, "avx2", "ymm", ["{{vex}} vpdpbusd"]);
vector_loop!(vpdpbusd_zmm, "avx512f", "zmm", ["vpdpbusd"]);
vector_loop!(vfmadd231ps_zmm, "avx512f", "zmm", ["vfmadd231ps"]);
vector_loop!(vdpbf16ps_zmm, "avx512f", "zmm", ["vdpbf16ps"]);

/// The memory operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Palette {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_a_row: [u16; 16],
    rows: [u8; 16],
}

/// Five tiles of 16 rows of 64 bytes.
static FIVE_TILES: Palette = {
    let mut palette = Palette {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_a_row: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 5 {
        palette.bytes_a_row[tile] = 64;
        palette.rows[tile] = 16;
        tile += 1;
    }
    palette
};

/// A function that applies `$product` to each of three accumulators in every step.
macro_rules! tile_loop {
    ($name:ident, $product:literal) => {
        /// Adds a·b to three accumulators, `steps` (at least 1) times.
        ///
        /// # Safety
        /// The processor has the instruction, and this process may use tile data.
        unsafe fn $name(steps: u64, operands: &mut Operands) {
            // SAFETY: the caller vouches for the instructions; tiles of 16 rows at a stride of 64
            // are the 1024 bytes of each operand. The tile state is this block's alone: other
            // code that uses tiles configures them itself, and it is released at the end.
            unsafe {
                asm!(
                    "ldtilecfg [{palette}]",
                    "tileloadd tmm3, [{a} + {stride}*1]",
                    "tileloadd tmm4, [{b} + {stride}*1]",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "2:",
                    concat!($product, " tmm0, tmm3, tmm4"),
                    concat!($product, " tmm1, tmm3, tmm4"),
                    concat!($product, " tmm2, tmm3, tmm4"),
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{sums} + {stride}*1], tmm0",
                    "tilerelease",
                    palette = in(reg) &raw const FIVE_TILES,
                    a = in(reg) operands.a.as_ptr(),
                    b = in(reg) operands.b.as_ptr(),
                    sums = in(reg) operands.sums.as_mut_ptr(),
                    stride = in(reg) 64usize,
                    steps = inout(reg) steps.max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    options(nostack),
                );
            }
        }
    };
}

tile_loop!(tdpbssd, "tdpbssd");
tile_loop!(tdpbf16ps, "tdpbf16ps");
