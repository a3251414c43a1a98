//! Every implementation against the scalar definitions, bit by bit.

use asym_gemm_formats::activation::Activation;
use asym_gemm_formats::int8;

use super::{Vector, VectorMath};
use crate::isa::Features;
use crate::kernels::{Body, Kernel, Multiply};
use crate::tile::{Lanes, TOKENS};

/// Bit patterns all over f32, with the special ones among them.
fn samples() -> Vec<Lanes<f32>> {
    let specials = [
        0x0000_0000,
        0x8000_0000,
        0x0000_0001,
        0x8000_0001,
        0x7f7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0xffc0_0001,
        0x7f80_0001,
        0x3f80_0000,
        0xc2ae_0000,
        0x42ae_0000,
        0x007f_ffff,
        0x3f7f_8000,
        0x3f80_8000,
    ];
    let spread = (0..4096u32).map(|i| i.wrapping_mul(0x9e37_79b9));
    let bits: Vec<u32> = specials.into_iter().chain(spread).collect();
    bits.as_chunks::<TOKENS>()
        .0
        .iter()
        .map(|lanes| lanes.map(f32::from_bits))
        .collect()
}

fn same(got: f32, want: f32, what: &str) {
    assert!(
        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
        "{what}: {got:e} for {want:e}"
    );
}

struct Check;

impl Body for Check {
    #[inline(always)]
    fn run<M: Multiply>(self, m: M) {
        let v = m.vector();
        let clamped = Activation::ClampedSwiGlu {
            limit: 7.0,
            alpha: 1.702,
        };
        for x in samples() {
            let inverse = 0.37f32;
            let (mut floats, mut words) = ([0.0; TOKENS], [0; TOKENS]);
            let (mut halves, mut bytes) = ([0u16; TOKENS], [0u8; TOKENS]);
            for activation in [Activation::SwiGlu, clamped] {
                let up: Lanes<f32> = std::array::from_fn(|t| (t as f32 - 7.5) * 1.3);
                v.store(v.activate(activation, v.load(&x), v.load(&up)), &mut floats);
                for t in 0..TOKENS {
                    let want = activation.apply(x[t], up[t]);
                    same(floats[t], want, &format!("{activation:?} of {:e}", x[t]));
                }
            }
            let codes = v.encode_int8(v.load(&x), v.splat(inverse));
            v.store_int(codes, &mut words);
            v.store_bytes(codes, &mut bytes);
            v.store_halves(v.encode_bf16(v.load(&x)), &mut halves);
            for t in 0..TOKENS {
                let code = int8::encode(x[t], inverse);
                assert_eq!(words[t] as i32, i32::from(code), "int8 of {:e}", x[t]);
                assert_eq!(bytes[t] as i8, code, "int8 of {:e}", x[t]);
                let half = asym_gemm_formats::bf16::encode(x[t]);
                assert_eq!(halves[t], half, "bf16 of {:e}", x[t]);
            }
            v.store(v.exp(v.load(&x)), &mut floats);
            for t in 0..TOKENS {
                let want = asym_gemm_formats::activation::exp(x[t]);
                same(floats[t], want, &format!("exp of {:e}", x[t]));
            }
        }
    }
}

#[test]
fn vectors_have_the_scalar_bits() {
    let avx2 = Features::AVX2;
    for mask in [Features::NONE, avx2, Features::ALL] {
        Kernel::best(mask).run(Check);
    }
}
