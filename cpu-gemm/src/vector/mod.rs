//! Arithmetic on the 16 lanes of a tile's row.
//!
//! Plain loops over tiles are no use here: with 16 lanes unrolled, the compiler likes to make vectors
//! of a *column* and to gather its elements. [`Vector`] says which values form a vector; every
//! operation is that of a scalar loop over the lanes, rounding included, so results do not depend
//! on who implements it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

use asym_gemm_formats::activation::{Activation, exp_constants};
use half::bf16;

use crate::tile::{Lanes, TOKENS, Tile};

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2Vector;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512Vector;
pub(crate) use plain::PlainVector;

/// 16 lanes of f32 or of 32-bit integers. All methods are `#[inline(always)]` and take on the target
/// features of the body they are called from.
pub(crate) trait Vector: Copy {
    /// f32 lanes.
    type F: Copy;
    /// Integer lanes.
    type I: Copy;

    fn load(self, x: &Lanes<f32>) -> Self::F;
    fn store(self, x: Self::F, out: &mut Lanes<f32>);
    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger one; x if it is NaN.
    fn at_least(self, x: Self::F, bound: Self::F) -> Self::F;
    /// The smaller one; x if it is NaN.
    fn at_most(self, x: Self::F, bound: Self::F) -> Self::F;
    /// Lanes that are NaN become zero.
    fn nan_to_zero(self, x: Self::F) -> Self::F;

    fn load_int(self, x: &Lanes<i32>) -> Self::I;
    fn store_int(self, x: Self::I, out: &mut Lanes<u32>);
    fn splat_int(self, x: u32) -> Self::I;
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn shift_left<const N: u32>(self, a: Self::I) -> Self::I;
    /// Zeros come in from the left.
    fn shift_right<const N: u32>(self, a: Self::I) -> Self::I;
    /// The larger one, unsigned.
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// `yes` where a > b as signed numbers, else `no`.
    fn if_greater(self, a: Self::I, b: Self::I, yes: Self::I, no: Self::I) -> Self::I;

    /// The nearest f32, ties to even.
    fn to_float(self, x: Self::I) -> Self::F;
    /// Towards zero; what is no i32 gives some value.
    fn to_int(self, x: Self::F) -> Self::I;
    fn bits(self, x: Self::F) -> Self::I;
    fn as_float(self, x: Self::I) -> Self::F;

    /// The lowest byte of each lane, whose value it holds as i8.
    fn store_bytes(self, x: Self::I, out: &mut Lanes<u8>);
    /// The lower half of each lane.
    fn store_halves(self, x: Self::I, out: &mut Lanes<u16>);

    /// Writes a cache line; if `stream`, past the caches where that is possible, and then visible to
    /// other threads only after a [`Vector::fence`].
    fn write_line(self, x: Self::I, out: &mut [u8; 64], stream: bool);
    /// Orders earlier writes, those past the caches too, before later ones.
    fn fence(self);

    /// Lane t of result r is lane r of row t.
    fn transpose(self, rows: [Self::I; TOKENS]) -> [Self::I; TOKENS];
}

/// Operations made of those of [`Vector`], each equal to its scalar definition in
/// `asym_gemm_formats` lane by lane.
pub(crate) trait VectorMath: Vector {
    /// Rows become columns of `out`.
    #[inline(always)]
    fn transpose_tile(self, tile: &Tile<u32>, out: &mut Tile<u32>) {
        let mut rows = [self.splat_int(0); TOKENS];
        for (row, lanes) in rows.iter_mut().zip(&tile.0) {
            *row = self.load_int(bytemuck::cast_ref(lanes));
        }
        for (column, out) in self.transpose(rows).into_iter().zip(&mut out.0) {
            self.store_int(column, out);
        }
    }

    /// `round_half_even`.
    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        let magic = self.splat(asym_gemm_formats::ROUND_MAGIC);
        let minus = self.splat(-asym_gemm_formats::ROUND_MAGIC);
        self.add(self.add(x, magic), minus)
    }

    /// `activation::exp`.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        use exp_constants::{CLAMP, LN2_HI, LN2_LO, LOG2_E, POLY};
        let x = self.at_most(self.at_least(x, self.splat(-CLAMP)), self.splat(CLAMP));
        let n = self.round(self.mul(x, self.splat(LOG2_E)));
        let r = self.fma(n, self.splat(-LN2_HI), x);
        let r = self.fma(n, self.splat(-LN2_LO), r);
        let mut p = self.splat(POLY[0]);
        for coefficient in &POLY[1..] {
            p = self.fma(p, r, self.splat(*coefficient));
        }
        let exponent = self.add_int(self.to_int(n), self.splat_int(127));
        self.mul(p, self.as_float(self.shift_left::<23>(exponent)))
    }

    /// `activation::swish`.
    #[inline(always)]
    fn swish(self, x: Self::F, scale: f32) -> Self::F {
        let x = self.at_least(x, self.splat(-1e4));
        let scaled = self.mul(self.splat(scale), x);
        let e = self.exp(self.mul(scaled, self.splat(-1.0)));
        self.div(x, self.add(self.splat(1.0), e))
    }

    /// `Activation::apply`.
    #[inline(always)]
    fn activate(self, activation: Activation, gate: Self::F, up: Self::F) -> Self::F {
        match activation {
            Activation::SwiGlu => self.mul(self.swish(gate, 1.0), up),
            Activation::ClampedSwiGlu { limit, alpha } => {
                let gate = self.at_most(gate, self.splat(limit));
                let up = self.at_least(up, self.splat(-limit));
                let up = self.at_most(up, self.splat(limit));
                self.mul(self.add(up, self.splat(1.0)), self.swish(gate, alpha))
            }
        }
    }

    /// `int8::encode` for the inverse scales `inverse`, as i32.
    #[inline(always)]
    fn encode_int8(self, x: Self::F, inverse: Self::F) -> Self::I {
        let scaled = self.mul(x, inverse);
        let scaled = self.at_least(scaled, self.splat(-127.0));
        let scaled = self.at_most(scaled, self.splat(127.0));
        self.to_int(self.round(self.nan_to_zero(scaled)))
    }

    /// `bf16::encode`, in the lower half of each lane.
    #[inline(always)]
    fn encode_bf16(self, x: Self::F) -> Self::I {
        let bits = self.bits(x);
        let upper = self.shift_right::<16>(bits);
        let odd = self.and(upper, self.splat_int(1));
        let rounded = self.add_int(self.add_int(bits, self.splat_int(0x7fff)), odd);
        let magnitude = self.and(bits, self.splat_int(0x7fff_ffff));
        self.if_greater(
            magnitude,
            self.splat_int(0x7f80_0000),
            self.or(upper, self.splat_int(0x0040)),
            self.shift_right::<16>(rounded),
        )
    }
}

impl<V: Vector> VectorMath for V {}

/// 16 rows of lanes, computed when they are asked for. Implement the method with
/// `#[inline(always)]`.
///
/// (No closures: one that is not inlined, or that goes through `array::from_fn`, is not compiled for
/// the instruction set at hand, and then every operation in it is a call.)
pub(crate) trait LaneRows<V: Vector> {
    /// Row `r`.
    fn row(&self, v: V, r: usize) -> V::F;
}

impl<V: Vector> LaneRows<V> for Tile<f32> {
    #[inline(always)]
    fn row(&self, v: V, r: usize) -> V::F {
        v.load(&self.0[r])
    }
}

/// Element types that 16 lanes can be rounded to.
pub(crate) trait FromLanes: Sized {
    /// Rounds to nearest even.
    fn from_lanes<V: Vector>(v: V, x: V::F, out: &mut Lanes<Self>);
}

impl FromLanes for f32 {
    #[inline(always)]
    fn from_lanes<V: Vector>(v: V, x: V::F, out: &mut Lanes<f32>) {
        v.store(x, out);
    }
}

impl FromLanes for bf16 {
    #[inline(always)]
    fn from_lanes<V: Vector>(v: V, x: V::F, out: &mut Lanes<bf16>) {
        v.store_halves(v.encode_bf16(x), bytemuck::cast_mut(out));
    }
}

#[cfg(test)]
mod tests;
