//! The expert feed-forward against an independent reference, on every kernel of the processor.

mod common;

use asym_gemm_cpu::{BankRef, CpuError, Engine, ExpertGroup};
use asym_gemm_formats::WeightFormat;
use asym_gemm_formats::activation::Activation;
use common::*;

/// A token that no group covers.
const GUARD: f32 = f32::from_bits(0x7fc0_1234);

/// Runs groups into a poisoned y, twice, and checks every row.
fn check(
    engine: &Engine,
    bank: &Bank,
    activation: Activation,
    x: &[f32],
    groups: &[ExpertGroup<'_>],
) -> Vec<f32> {
    let h = bank.geometry.hidden;
    // Rows that no group covers lie behind each group.
    let rows = groups
        .iter()
        .map(|g| g.start + g.tokens.len())
        .max()
        .unwrap_or(0)
        + 1;
    let mut y = vec![GUARD; rows * h];
    engine
        .expert_ffn(bank.view(), activation, x, groups, &mut y)
        .unwrap();
    let mut covered = vec![false; rows];
    for group in groups {
        for (i, &token) in group.tokens.iter().enumerate() {
            let row = group.start + i;
            covered[row] = true;
            check_row(
                &format!(
                    "{} {:?} expert {} row {row}",
                    engine.kernel_name(bank.geometry.format),
                    bank.geometry,
                    group.expert
                ),
                &bank.experts[group.expert],
                activation,
                &x[token as usize * h..][..h],
                &y[row * h..][..h],
            );
        }
    }
    for (row, covered) in covered.iter().enumerate() {
        if !covered {
            let untouched = y[row * h..][..h]
                .iter()
                .all(|y| y.to_bits() == GUARD.to_bits());
            assert!(untouched, "row {row} of no group was written");
        }
    }
    let first = y.clone();
    engine
        .expert_ffn(bank.view(), activation, x, groups, &mut y)
        .unwrap();
    assert_same("second call", &y, &first);
    y
}

fn tokens(rng: &mut rand_chacha::ChaCha8Rng, m: usize, of: usize) -> Vec<u32> {
    use rand::RngExt;
    (0..m).map(|_| rng.random_range(0..of as u32)).collect()
}

/// Odd shapes, empty groups, gaps between groups, both activations, with and without biases.
#[test]
fn odd_shapes() {
    for (seed, (hidden, intermediate)) in [
        (1, 1),
        (100, 33),
        (192, 96),
        (257, 160),
        (128, 300),
        (16, 128),
    ]
    .into_iter()
    .enumerate()
    {
        for format in FORMATS {
            for bias in [false, true] {
                let bank =
                    Bank::random(geometry(3, hidden, intermediate, format, bias), seed as u64);
                let mut rng = rng(100 + seed as u64);
                let x = uniform(&mut rng, 9 * hidden, 3.0);
                let [a, b, c] = [5, 3, 2].map(|m| tokens(&mut rng, m, 9));
                let groups = [
                    ExpertGroup {
                        expert: 2,
                        start: 0,
                        tokens: &a,
                    },
                    ExpertGroup {
                        expert: 0,
                        start: 6,
                        tokens: &[],
                    },
                    ExpertGroup {
                        expert: 1,
                        start: 11,
                        tokens: &b,
                    },
                    ExpertGroup {
                        expert: 2,
                        start: 7,
                        tokens: &c,
                    },
                ];
                for engine in engines() {
                    for activation in [Activation::SwiGlu, CLAMPED] {
                        check(&engine, &bank, activation, &x, &groups);
                    }
                }
            }
        }
    }
}

/// Every number of tokens across the block boundaries of the kernels (1, 2, 4) and of the tasks
/// (128); a token alone gives the bytes it gives among others, on the last expert and the only one.
#[test]
fn every_number_of_tokens() {
    let (hidden, intermediate) = (70, 40);
    for format in FORMATS {
        for experts in [1, 3] {
            let bank = Bank::random(geometry(experts, hidden, intermediate, format, true), 7);
            let expert = experts - 1;
            let mut rng = rng(8);
            let x = uniform(&mut rng, 130 * hidden, 2.0);
            for engine in engines() {
                let all: Vec<u32> = (0..130).collect();
                let whole = [ExpertGroup {
                    expert,
                    start: 0,
                    tokens: &all,
                }];
                let reference = check(&engine, &bank, Activation::SwiGlu, &x, &whole);
                for m in 0..=129 {
                    let first = 130 - m;
                    let mut y = vec![f32::NAN; m * hidden];
                    let group = [ExpertGroup {
                        expert,
                        start: 0,
                        tokens: &all[first..],
                    }];
                    engine
                        .expert_ffn(bank.view(), Activation::SwiGlu, &x, &group, &mut y)
                        .unwrap();
                    assert_same(
                        &format!("{m} tokens"),
                        &y,
                        &reference[first * hidden..][..m * hidden],
                    );
                }
            }
        }
    }
}

/// int8 gives the same bits on all kernels, also on rows with NaN, infinities and zeros.
#[test]
fn kernels_agree_on_int8() {
    for format in [WeightFormat::Int8PerRow, WeightFormat::Int8Block128] {
        let hidden = 257;
        let bank = Bank::random(geometry(2, hidden, 300, format, true), 3);
        let mut x = uniform(&mut rng(4), 8 * hidden, 5.0);
        x[..hidden].fill(0.0);
        x[hidden + 200] = f32::NAN;
        x[2 * hidden] = f32::INFINITY;
        x[3 * hidden] = 3e38;
        for x in &mut x[4 * hidden..5 * hidden] {
            *x *= 1e-30;
        }
        let all: Vec<u32> = (0..8).collect();
        let groups = [0, 1].map(|expert| ExpertGroup {
            expert,
            start: expert * 8,
            tokens: &all,
        });
        let outputs: Vec<Vec<f32>> = engines()
            .iter()
            .map(|engine| {
                let mut y = vec![0.0; 16 * hidden];
                engine
                    .expert_ffn(bank.view(), CLAMPED, &x, &groups, &mut y)
                    .unwrap();
                y
            })
            .collect();
        assert!(
            outputs[0][hidden..2 * hidden].iter().all(|y| y.is_nan()),
            "NaN was lost"
        );
        assert!(outputs[0][..hidden].iter().all(|y| y.is_finite()));
        for y in &outputs[1..] {
            assert_same("another kernel", y, &outputs[0]);
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    for (format, engine) in [
        WeightFormat::Bf16,
        WeightFormat::Fp8Block128,
        WeightFormat::Nvfp4,
        WeightFormat::Mxfp4,
    ]
    .into_iter()
    .flat_map(|format| engines().into_iter().map(move |engine| (format, engine)))
    {
        let bank = Bank::random(geometry(1, 64, 128, format, false), 3);
        let mut x = uniform(&mut rng(4), 3 * 64, 1.0);
        x[64 + 5] = f32::NAN;
        let mut y = vec![0.0; 3 * 64];
        let group = [ExpertGroup {
            expert: 0,
            start: 0,
            tokens: &[0, 1, 2],
        }];
        engine
            .expert_ffn(bank.view(), Activation::SwiGlu, &x, &group, &mut y)
            .unwrap();
        for (i, y) in y.iter().enumerate() {
            assert_eq!(y.is_nan(), i / 64 == 1, "element {i}");
        }
    }
}

/// In formats that are expanded the kernels of fused multiply-adds give the same bits, as their
/// sums have one order.
#[test]
fn fma_kernels_agree_on_expanded_formats() {
    for format in [
        WeightFormat::Fp8Block128,
        WeightFormat::Nvfp4,
        WeightFormat::Mxfp4,
    ] {
        fma_kernels_agree(format);
    }
}

fn fma_kernels_agree(format: WeightFormat) {
    let hidden = 257;
    let bank = Bank::random(geometry(1, hidden, 300, format, true), 3);
    let x = uniform(&mut rng(4), 7 * hidden, 5.0);
    let group = [ExpertGroup {
        expert: 0,
        start: 0,
        tokens: &[0, 1, 2, 3, 4, 5, 6],
    }];
    let mut first: Option<Vec<f32>> = None;
    for engine in engines() {
        let name = engine.kernel_name(format);
        if !has_portable_order(name) {
            continue;
        }
        let mut y = vec![f32::NAN; 7 * hidden];
        engine
            .expert_ffn(bank.view(), CLAMPED, &x, &group, &mut y)
            .unwrap();
        assert_same(name, &y, first.get_or_insert_with(|| y.clone()));
    }
}

/// A bank may lie at any address.
#[test]
fn unaligned_bank() {
    for format in FORMATS {
        let bank = Bank::random(geometry(1, 100, 33, format, true), 3);
        let mut moved = vec![0u8; bank.bytes.len() + 1];
        moved[1..].copy_from_slice(&bank.bytes);
        let moved = BankRef::new(bank.geometry, &moved[1..]).unwrap();
        let x = uniform(&mut rng(4), 100, 1.0);
        let group = [ExpertGroup {
            expert: 0,
            start: 0,
            tokens: &[0],
        }];
        for engine in engines() {
            let run = |bank| {
                let mut y = vec![0.0; 100];
                engine
                    .expert_ffn(bank, CLAMPED, &x, &group, &mut y)
                    .unwrap();
                y
            };
            assert_same("moved bank", &run(moved), &run(bank.view()));
        }
    }
}

#[test]
fn bad_arguments_are_refused_and_nothing_is_written() {
    let bank = Bank::random(geometry(2, 16, 8, WeightFormat::Int8PerRow, false), 3);
    let x = vec![1.0; 3 * 16];
    let engine = Engine::detect().unwrap();
    let group = |expert, start, tokens| ExpertGroup {
        expert,
        start,
        tokens,
    };
    let rows = |start, end| CpuError::RowsOutOfRange {
        group: 1,
        start,
        end,
        rows: 4,
    };
    for (second, want) in [
        (
            group(2, 1, &[0][..]),
            CpuError::ExpertOutOfRange {
                group: 1,
                expert: 2,
                experts: 2,
            },
        ),
        (
            group(1, 1, &[0, 3]),
            CpuError::TokenOutOfRange {
                group: 1,
                position: 1,
                token: 3,
                tokens: 3,
            },
        ),
        (group(1, 3, &[0, 1]), rows(3, 5)),
        (group(1, usize::MAX, &[0, 1]), rows(usize::MAX, usize::MAX)),
        (group(1, 5, &[]), rows(5, 5)),
        (
            group(1, 0, &[1]),
            CpuError::OverlappingRows {
                first: 0,
                second: 1,
                row: 0,
            },
        ),
    ] {
        let mut y = vec![GUARD; 4 * 16];
        let got = engine.expert_ffn(
            bank.view(),
            Activation::SwiGlu,
            &x,
            &[group(0, 0, &[2]), second],
            &mut y,
        );
        expect_error(got, want);
        assert!(
            y.iter().all(|y| y.to_bits() == GUARD.to_bits()),
            "y was written"
        );
    }
    let mut y = vec![GUARD; 4 * 16];
    let short = engine.expert_ffn(bank.view(), Activation::SwiGlu, &x[1..], &[], &mut y);
    expect_error(
        short,
        CpuError::Mismatch {
            what: "the length of x",
            expected: 32,
            actual: 47,
        },
    );
    let short = engine.expert_ffn(bank.view(), Activation::SwiGlu, &x, &[], &mut y[1..]);
    expect_error(
        short,
        CpuError::Mismatch {
            what: "the length of y",
            expected: 48,
            actual: 63,
        },
    );
    engine
        .expert_ffn(bank.view(), Activation::SwiGlu, &x, &[], &mut [])
        .unwrap();
}
