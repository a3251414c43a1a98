//! What differs between operand types: the instruction, and where scales enter.

use crate::ptx::wgmma::{self, Accumulator, Element};

/// Where the scales of an operand enter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// There are none.
    None,
    /// One for each row (or column) and step of K.
    Step,
    /// One for 128 columns (kept for each 64, a box) and each step of K.
    StepBlock,
    /// One for each row (or column), at the end of K.
    End,
}

/// Operand type and scaling of a kernel.
pub(super) trait Format {
    /// Operand type.
    const ELEMENT: Element;
    /// Scales of A.
    const ROWS: Scales;
    /// Scales of B.
    const COLUMNS: Scales;
    /// Each step's product is exact or short enough to be trusted, and is added to f32 sums
    /// outside of the tensor cores.
    const PER_STEP: bool;

    /// Scales come with each stage.
    const STEP_SCALES: bool = matches!(Self::ROWS, Scales::Step)
        || matches!(Self::COLUMNS, Scales::Step | Scales::StepBlock);

    /// An accumulator register as a number.
    #[inline(always)]
    fn value(register: f32) -> f32 {
        match Self::ELEMENT {
            Element::S8 => register.to_bits() as i32 as f32,
            _ => register,
        }
    }

    /// Four wgmmas: the product of one stage, 128 bytes deep.
    ///
    /// # Safety
    /// As [`Accumulator::multiply`].
    #[inline(always)]
    unsafe fn step<A: Accumulator>(d: &mut A, a: u32, b: u32, accumulate: u32) {
        const S: u32 = wgmma::K_STEP;
        // SAFETY: the caller keeps wgmma's contract; the four steps stay inside the stage.
        unsafe {
            d.multiply(Self::ELEMENT, a, b, accumulate);
            d.multiply(Self::ELEMENT, a + S, b + S, 1);
            d.multiply(Self::ELEMENT, a + 2 * S, b + 2 * S, 1);
            d.multiply(Self::ELEMENT, a + 3 * S, b + 3 * S, 1);
        }
    }
}

macro_rules! format {
    ($name:ident, $element:ident, rows $rows:ident, columns $columns:ident, per_step $per_step:literal) => {
        #[doc = concat!("[`super::Operands::", stringify!($name), "`].")]
        pub(super) struct $name;

        impl Format for $name {
            const ELEMENT: Element = Element::$element;
            const ROWS: Scales = Scales::$rows;
            const COLUMNS: Scales = Scales::$columns;
            const PER_STEP: bool = $per_step;
        }
    };
}

format!(Bf16, Bf16, rows None, columns None, per_step false);
format!(Int8PerRow, S8, rows End, columns End, per_step false);
format!(Int8Slices, S8, rows Step, columns End, per_step true);
format!(Int8Blocks, S8, rows Step, columns Step, per_step true);
format!(Fp8PerRow, E4m3, rows End, columns End, per_step true);
format!(Fp8Blocks, E4m3, rows Step, columns StepBlock, per_step true);
