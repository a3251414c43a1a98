//! Router logits, combine, and the choice of the instruction set.

mod common;

use asym_gemm_cpu::{Combine, CpuError, Engine, Isa, Router, combine, router_logits};
use common::*;

/// The stated order: 16 lanes, products and sums rounded separately, lanes halved pairwise.
#[test]
fn router_logits_have_the_stated_bits() {
    for (tokens, experts, hidden) in [
        (1, 1, 1),
        (3, 5, 15),
        (2, 8, 16),
        (4, 7, 100),
        (1, 130, 257),
    ] {
        let mut rng = rng(hidden as u64);
        let x = uniform(&mut rng, tokens * hidden, 1.0);
        let w = uniform(&mut rng, experts * hidden, 1.0);
        let b = uniform(&mut rng, experts, 1.0);
        for bias in [None, Some(&b[..])] {
            let mut out = vec![f32::NAN; tokens * experts];
            router_logits(
                Router {
                    x: &x,
                    w: &w,
                    bias,
                    hidden,
                },
                &mut out,
            )
            .unwrap();
            for (i, &got) in out.iter().enumerate() {
                let (token, expert) = (i / experts, i % experts);
                let mut lanes = [0f32; 16];
                let mut exact = 0f64;
                for k in 0..hidden {
                    let (x, w) = (x[token * hidden + k], w[expert * hidden + k]);
                    lanes[k % 16] += x * w;
                    exact += f64::from(x) * f64::from(w);
                }
                for half in [8, 4, 2, 1] {
                    for lane in 0..half {
                        lanes[lane] += lanes[lane + half];
                    }
                }
                let mut want = lanes[0];
                if let Some(bias) = bias {
                    want += bias[expert];
                    exact += f64::from(bias[expert]);
                }
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "token {token} expert {expert}"
                );
                assert!((f64::from(got) - exact).abs() < 1e-4);
            }
        }
    }
    let refused = router_logits(
        Router {
            x: &[1.0],
            w: &[1.0, 2.0],
            bias: None,
            hidden: 1,
        },
        &mut [0.0],
    );
    expect_error(
        refused,
        CpuError::Mismatch {
            what: "the length of out",
            expected: 2,
            actual: 1,
        },
    );
}

/// Slots in order, fused; skipped slots are not read (their weight is NaN); no slot gives zero.
#[test]
fn combine_adds_in_slot_order() {
    let hidden = 19;
    let mut rng = rng(1);
    let mut y = uniform(&mut rng, 5 * hidden, 1.0);
    y[4 * hidden..].fill(f32::NAN);
    let index = [3, 0, -1, -1, -1, -1, 1, -1, 2];
    let mut weights = uniform(&mut rng, 9, 1.0);
    for (weight, &index) in weights.iter_mut().zip(&index) {
        if index < 0 {
            *weight = f32::NAN;
        }
    }
    let shared = uniform(&mut rng, 3 * hidden, 1.0);
    let gate = uniform(&mut rng, 3, 1.0);
    for shared in [None, Some((&shared[..], &gate[..]))] {
        let parts = Combine {
            y: &y,
            hidden,
            top_k: 3,
            output_index: &index,
            weights: &weights,
            shared,
        };
        let mut out = vec![f32::NAN; 3 * hidden];
        combine(parts, &mut out).unwrap();
        let mut want = vec![0f32; 3 * hidden];
        for (i, want) in want.iter_mut().enumerate() {
            let (token, column) = (i / hidden, i % hidden);
            for slot in 0..3 {
                let slot = token * 3 + slot;
                if index[slot] >= 0 {
                    *want = weights[slot].mul_add(y[index[slot] as usize * hidden + column], *want);
                }
            }
            if let Some((rows, weights)) = shared {
                *want = weights[token].mul_add(rows[i], *want);
            }
        }
        assert_same("combine", &out, &want);
    }
    for (bad, want) in [(5, 5), (-2, -2)] {
        let index = [0, 0, 0, 0, bad, 0];
        let parts = Combine {
            y: &y,
            hidden,
            top_k: 3,
            output_index: &index,
            weights: &[0.0; 6],
            shared: None,
        };
        let mut out = vec![7.0; 2 * hidden];
        expect_error(
            combine(parts, &mut out),
            CpuError::OutputIndex {
                token: 1,
                slot: 1,
                index: want,
                rows: 5,
            },
        );
        assert!(out.iter().all(|&x| x == 7.0), "out was written");
    }
}

#[test]
fn what_is_available_can_be_had() {
    let available = Engine::available();
    assert_eq!(available[0], Isa::Portable);
    for isa in Isa::ALL {
        match Engine::with_isa(isa) {
            Ok(engine) => {
                assert!(available.contains(&isa));
                assert_eq!(engine.isa(), isa);
                for format in FORMATS {
                    assert!(engine.kernel_name(format).starts_with(isa.name()));
                }
            }
            Err(error) => {
                assert!(!available.contains(&isa));
                assert!(
                    matches!(error, CpuError::IsaUnavailable { isa: i, ref missing } if i == isa && !missing.is_empty())
                );
            }
        }
    }
}

/// `ASYM_GEMM_ISA` is read by a child process, since changing the environment of this one would
/// race with its other threads.
#[test]
fn the_environment_forces_an_isa() {
    const CHILD: &str = "ASYM_GEMM_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        match Engine::detect() {
            Ok(engine) => println!("<{}>", engine.isa()),
            Err(error) => println!("<{error}>"),
        }
        return;
    }
    let detect = |name: &str| {
        let test = std::env::current_exe().unwrap();
        let output = std::process::Command::new(test)
            .args(["the_environment_forces_an_isa", "--exact", "--nocapture"])
            .env(CHILD, "1")
            .env("ASYM_GEMM_ISA", name)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (_, rest) = text.split_once('<').unwrap();
        rest.split_once('>').unwrap().0.to_owned()
    };
    assert_eq!(detect("portable"), "portable");
    assert!(detect("sse9").contains("`sse9`; it must be `amx`, `avx512`, `avx2` or `portable`"));
    for isa in [Isa::Avx2, Isa::Avx512] {
        let found = detect(isa.name());
        if Engine::available().contains(&isa) {
            assert_eq!(found, isa.name());
        } else {
            assert!(found.starts_with(&format!("{isa} needs")), "{found}");
        }
    }
}
