//! Lanes as arrays: the definition of every operation.

use super::Vector;
use crate::tile::{Lanes, TOKENS};

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct PlainVector;

/// f(a, b) lane by lane.
#[inline(always)]
fn zip<A: Copy, B: Copy, T: Copy + Default>(
    a: Lanes<A>,
    b: Lanes<B>,
    f: impl Fn(A, B) -> T,
) -> Lanes<T> {
    let mut out = [T::default(); TOKENS];
    for t in 0..TOKENS {
        out[t] = f(a[t], b[t]);
    }
    out
}

impl Vector for PlainVector {
    type F = Lanes<f32>;
    type I = Lanes<u32>;

    #[inline(always)]
    fn load(self, x: &Lanes<f32>) -> Lanes<f32> {
        *x
    }

    #[inline(always)]
    fn store(self, x: Lanes<f32>, out: &mut Lanes<f32>) {
        *out = x;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes<f32> {
        [x; TOKENS]
    }

    #[inline(always)]
    fn add(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn mul(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        let mut out = c;
        for t in 0..TOKENS {
            out[t] = asym_gemm_formats::fma(a[t], b[t], c[t]);
        }
        out
    }

    #[inline(always)]
    fn at_least(self, x: Lanes<f32>, bound: Lanes<f32>) -> Lanes<f32> {
        zip(x, bound, |x, bound| if x < bound { bound } else { x })
    }

    #[inline(always)]
    fn at_most(self, x: Lanes<f32>, bound: Lanes<f32>) -> Lanes<f32> {
        zip(x, bound, |x, bound| if x > bound { bound } else { x })
    }

    #[inline(always)]
    fn nan_to_zero(self, x: Lanes<f32>) -> Lanes<f32> {
        zip(x, x, |x, _| if x.is_nan() { 0.0 } else { x })
    }

    #[inline(always)]
    fn load_int(self, x: &Lanes<i32>) -> Lanes<u32> {
        *bytemuck::cast_ref(x)
    }

    #[inline(always)]
    fn store_int(self, x: Lanes<u32>, out: &mut Lanes<u32>) {
        *out = x;
    }

    #[inline(always)]
    fn splat_int(self, x: u32) -> Lanes<u32> {
        [x; TOKENS]
    }

    #[inline(always)]
    fn add_int(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        zip(a, b, u32::wrapping_add)
    }

    #[inline(always)]
    fn and(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        zip(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        zip(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: Lanes<u32>) -> Lanes<u32> {
        zip(a, a, |a, _| a << N)
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: Lanes<u32>) -> Lanes<u32> {
        zip(a, a, |a, _| a >> N)
    }

    #[inline(always)]
    fn max_int(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        zip(a, b, u32::max)
    }

    #[inline(always)]
    fn if_greater(
        self,
        a: Lanes<u32>,
        b: Lanes<u32>,
        yes: Lanes<u32>,
        no: Lanes<u32>,
    ) -> Lanes<u32> {
        let mut out = no;
        for t in 0..TOKENS {
            out[t] = if a[t] as i32 > b[t] as i32 {
                yes[t]
            } else {
                no[t]
            };
        }
        out
    }

    #[inline(always)]
    fn to_float(self, x: Lanes<u32>) -> Lanes<f32> {
        zip(x, x, |x, _| x as i32 as f32)
    }

    #[inline(always)]
    fn to_int(self, x: Lanes<f32>) -> Lanes<u32> {
        zip(x, x, |x, _| x as i32 as u32)
    }

    #[inline(always)]
    fn bits(self, x: Lanes<f32>) -> Lanes<u32> {
        bytemuck::cast(x)
    }

    #[inline(always)]
    fn as_float(self, x: Lanes<u32>) -> Lanes<f32> {
        bytemuck::cast(x)
    }

    #[inline(always)]
    fn store_halves(self, x: Lanes<u32>, out: &mut Lanes<u16>) {
        *out = zip(x, x, |x, _| x as u16);
    }

    #[inline(always)]
    fn store_bytes(self, x: Lanes<u32>, out: &mut Lanes<u8>) {
        *out = zip(x, x, |x, _| x as u8);
    }

    #[inline(always)]
    fn write_line(self, x: Lanes<u32>, out: &mut [u8; 64], _stream: bool) {
        *out = bytemuck::cast(x);
    }

    #[inline(always)]
    fn fence(self) {}

    #[inline(always)]
    fn transpose(self, rows: [Lanes<u32>; TOKENS]) -> [Lanes<u32>; TOKENS] {
        std::array::from_fn(|r| std::array::from_fn(|t| rows[t][r]))
    }
}
