//! Grouped GEMMs over plain matrices.

mod common;

use asym_gemm_cpu::{
    CpuError, Engine, GroupRange, Int8Rows, Int8Scaling, Int8Weights, MatrixMut, MatrixRef, Output,
    WeightsRef,
};
use asym_gemm_formats::WeightFormat;
use common::*;
use half::bf16;
use rand::RngExt;

/// Matrices with gaps between rows.
struct Case {
    m: usize,
    n: usize,
    k: usize,
    groups: Vec<GroupRange>,
}

const WEIGHTS: usize = 3;
const GAP: usize = 3;

impl Case {
    fn all() -> Vec<Self> {
        let group = |weight, start, end| GroupRange { weight, start, end };
        let mut cases = vec![];
        for (n, k) in [
            (1, 1),
            (15, 63),
            (16, 64),
            (17, 65),
            (1, 100),
            (33, 129),
            (80, 257),
            (66, 300),
        ] {
            cases.push(Self {
                m: 12,
                n,
                k,
                groups: vec![
                    group(2, 0, 5),
                    group(0, 5, 5),
                    group(1, 6, 9),
                    group(2, 9, 11),
                ],
            });
        }
        for m in (0..=33).chain([129]) {
            cases.push(Self {
                m,
                n: 20,
                k: 130,
                groups: vec![group(1, 0, m)],
            });
        }
        cases
    }

    fn weight_of(&self, row: usize) -> Option<usize> {
        self.groups
            .iter()
            .find(|g| (g.start..g.end).contains(&row))
            .map(|g| g.weight)
    }
}

/// Runs into poisoned memory; returns D without the gaps, and checks that gaps and uncovered
/// rows were left alone.
fn run<O: Output + PartialEq + std::fmt::Debug>(
    case: &Case,
    poison: O,
    gemm: impl Fn(MatrixMut<'_, O>) -> Result<(), CpuError>,
) -> Vec<Option<Vec<O>>> {
    let stride = case.n + GAP;
    let mut d = vec![poison; case.m * stride];
    gemm(MatrixMut::new(&mut d, case.m, case.n, stride).unwrap()).unwrap();
    let rows: Vec<_> = d.chunks(stride).collect();
    let out = (0..case.m)
        .map(|row| {
            let covered = case.weight_of(row).is_some();
            let clean = if covered { case.n } else { 0 };
            assert!(
                rows[row][clean..].iter().all(|&x| x == poison),
                "row {row}: written beyond its columns"
            );
            covered.then(|| rows[row][..case.n].to_vec())
        })
        .collect();
    let once = d.clone();
    gemm(MatrixMut::new(&mut d, case.m, case.n, stride).unwrap()).unwrap();
    assert_eq!(d, once, "second call");
    out
}

#[test]
fn bf16_within_its_bound() {
    for case in Case::all() {
        let Case { m, n, k, .. } = case;
        let mut rng = rng((n * 1000 + k) as u64);
        let mut values = |len: usize| -> Vec<bf16> {
            uniform(&mut rng, len, 2.0)
                .into_iter()
                .map(bf16::from_f32)
                .collect()
        };
        let (a_stride, b_strides) = (k + GAP, [n * (k + 1) + 5, k + 1]);
        let a = values(m * a_stride);
        let b = values(WEIGHTS * b_strides[0]);
        let a_view = MatrixRef::new(&a, m, k, a_stride).unwrap();
        let b_view = WeightsRef::new(&b, [WEIGHTS, n, k], b_strides).unwrap();
        for engine in engines() {
            let f32s = run(&case, -777.0f32, |d| {
                engine.grouped_gemm_bf16(a_view, b_view, &case.groups, d)
            });
            let bf16s = run(&case, bf16::from_f32(-777.0), |d| {
                engine.grouped_gemm_bf16(a_view, b_view, &case.groups, d)
            });
            for row in 0..m {
                let Some(weight) = case.weight_of(row) else {
                    continue;
                };
                for col in 0..n {
                    let products = a_view.row(row).iter().zip(b_view.row(weight, col));
                    let (mut want, mut magnitude) = (0f64, 0f64);
                    for (a, b) in products {
                        want += a.to_f64() * b.to_f64();
                        magnitude += (a.to_f64() * b.to_f64()).abs();
                    }
                    let got = f32s[row].as_ref().unwrap()[col];
                    let error = (f64::from(got) - want).abs();
                    assert!(
                        error <= sum_bound(k, magnitude),
                        "m {m} n {n} k {k} at {row}, {col}: {got} for {want}"
                    );
                    assert_eq!(
                        bf16s[row].as_ref().unwrap()[col],
                        bf16::from_f32(got),
                        "rounded once"
                    );
                }
            }
        }
    }
}

/// The kernels of fused multiply-adds add in one order, and a row alone gives the bits that it
/// gives among others.
#[test]
fn bf16_has_one_order_of_additions() {
    let (m, n, k) = (9, 33, 333);
    let mut rng = rng(11);
    let mut values = |len: usize| -> Vec<bf16> {
        let values = uniform(&mut rng, len, 2.0);
        values.into_iter().map(bf16::from_f32).collect()
    };
    let (a, b) = (values(m * k), values(n * k));
    let b = WeightsRef::new(&b, [1, n, k], [n * k, k]).unwrap();
    let gemm = |engine: &Engine, a: &[bf16]| {
        let m = a.len() / k;
        let mut d = vec![f32::NAN; m * n];
        let group = [GroupRange {
            weight: 0,
            start: 0,
            end: m,
        }];
        engine
            .grouped_gemm_bf16(
                MatrixRef::new(a, m, k, k).unwrap(),
                b,
                &group,
                MatrixMut::new(&mut d, m, n, n).unwrap(),
            )
            .unwrap();
        d
    };
    let mut first = None;
    for engine in engines() {
        let name = engine.kernel_name(WeightFormat::Bf16);
        let whole = gemm(&engine, &a);
        for (row, a) in a.chunks(k).enumerate() {
            let what = format!("{name}, row {row} alone");
            assert_same(&what, &gemm(&engine, a), &whole[row * n..][..n]);
        }
        if has_portable_order(name) {
            assert_same(name, &whole, first.get_or_insert_with(|| whole.clone()));
        }
    }
}

#[test]
fn int8_is_exact() {
    for case in Case::all() {
        let Case { m, n, k, .. } = case;
        for scaling in [Int8Scaling::PerRow, Int8Scaling::Block128] {
            let blocks = scaling.blocks(k);
            let mut rng = rng((n * 1000 + k) as u64);
            let a: Vec<i8> = (0..m * (k + GAP)).map(|_| rng.random()).collect();
            let b: Vec<i8> = (0..WEIGHTS * n * k).map(|_| rng.random()).collect();
            let sa = uniform(&mut rng, m * blocks, 0.1);
            let sb = uniform(&mut rng, WEIGHTS * n * blocks, 0.1);
            let a = Int8Rows::new(
                MatrixRef::new(&a, m, k, k + GAP).unwrap(),
                MatrixRef::new(&sa, m, blocks, blocks).unwrap(),
            )
            .unwrap();
            let codes = WeightsRef::new(&b, [WEIGHTS, n, k], [n * k, k]).unwrap();
            let scales = WeightsRef::new(&sb, [WEIGHTS, n, blocks], [n * blocks, blocks]).unwrap();
            let b = Int8Weights::new(codes, scales, scaling).unwrap();
            for engine in engines() {
                let out = run(&case, -777.0f32, |d| {
                    engine.grouped_gemm_int8(a, b, &case.groups, d)
                });
                for (row, got) in out.iter().enumerate() {
                    let Some(weight) = case.weight_of(row) else {
                        continue;
                    };
                    let want: Vec<f32> = (0..n)
                        .map(|col| {
                            let span = if scaling == Int8Scaling::PerRow {
                                k
                            } else {
                                128
                            };
                            let w = codes.row(weight, col);
                            let mut sum = 0f32;
                            for block in 0..blocks {
                                let ks = block * span..k.min(block * span + span);
                                let acc: i64 = ks
                                    .map(|k| i64::from(a.codes().row(row)[k]) * i64::from(w[k]))
                                    .sum();
                                let s = sa[row * blocks + block] * scales.row(weight, col)[block];
                                sum = match scaling {
                                    Int8Scaling::PerRow => acc as f32 * s,
                                    Int8Scaling::Block128 => (acc as f32).mul_add(s, sum),
                                };
                            }
                            sum
                        })
                        .collect();
                    assert_same(
                        &format!("m {m} n {n} k {k} {scaling:?} row {row}"),
                        got.as_ref().unwrap(),
                        &want,
                    );
                }
            }
        }
    }
}

/// Where 16-bit intermediate sums would saturate, and the extremes at the largest K allowed.
#[test]
fn extreme_codes_do_not_saturate() {
    for engine in engines() {
        for (x, w) in [
            (127i8, 127i8),
            (-127, -127),
            (-128, -128),
            (-128, 127),
            (127, -128),
        ] {
            for k in [2, 4096, 131_071] {
                for m in [1, 2, 4, 5, 16] {
                    let (a, b) = (vec![x; m * k], vec![w; k]);
                    let ones = vec![1.0f32; m];
                    let a = Int8Rows::new(
                        MatrixRef::new(&a, m, k, k).unwrap(),
                        MatrixRef::new(&ones, m, 1, 1).unwrap(),
                    )
                    .unwrap();
                    let b = Int8Weights::new(
                        WeightsRef::new(&b, [1, 1, k], [k, k]).unwrap(),
                        WeightsRef::new(&[1.0], [1, 1, 1], [1, 1]).unwrap(),
                        Int8Scaling::PerRow,
                    )
                    .unwrap();
                    let mut d = vec![f32::NAN; m];
                    let group = [GroupRange {
                        weight: 0,
                        start: 0,
                        end: m,
                    }];
                    engine
                        .grouped_gemm_int8(a, b, &group, MatrixMut::new(&mut d, m, 1, 1).unwrap())
                        .unwrap();
                    let want = (k as i64 * i64::from(x) * i64::from(w)) as f32;
                    assert!(
                        d.iter().all(|&d| d == want),
                        "{x} * {w}, K {k}, m {m}: {d:?} for {want}"
                    );
                }
            }
        }
    }
}

/// Long K, cancelling and one-signed sums.
#[test]
fn long_sums_stay_within_the_bound() {
    for engine in engines() {
        for k in [7168usize, 18_432] {
            let positive = uniform(&mut rng(k as u64), k, 1.0)
                .into_iter()
                .map(|x| bf16::from_f32(x.abs()));
            let positive: Vec<bf16> = positive.collect();
            let cancelling: Vec<bf16> = (0..k)
                .map(|i| {
                    if i < k / 2 {
                        positive[i]
                    } else {
                        -positive[i - k / 2]
                    }
                })
                .collect();
            let ones = vec![bf16::from_f32(1.0 / 3.0); k];
            for a in [&positive, &cancelling] {
                let mut d = [f32::NAN];
                let group = [GroupRange {
                    weight: 0,
                    start: 0,
                    end: 1,
                }];
                engine
                    .grouped_gemm_bf16(
                        MatrixRef::new(a, 1, k, k).unwrap(),
                        WeightsRef::new(&ones, [1, 1, k], [k, k]).unwrap(),
                        &group,
                        MatrixMut::new(&mut d, 1, 1, 1).unwrap(),
                    )
                    .unwrap();
                let products = a.iter().map(|a| a.to_f64() * ones[0].to_f64());
                let (want, magnitude) =
                    products.fold((0.0, 0.0), |(s, m), p: f64| (s + p, m + p.abs()));
                assert!(
                    (f64::from(d[0]) - want).abs() <= sum_bound(k, magnitude),
                    "K {k}: {} for {want}",
                    d[0]
                );
            }
        }
    }
}

#[test]
fn bad_arguments_are_refused() {
    let engine = Engine::detect().unwrap();
    let data = vec![bf16::ONE; 64];
    let a = MatrixRef::new(&data, 4, 8, 8).unwrap();
    let b = WeightsRef::new(&data, [2, 4, 8], [32, 8]).unwrap();
    let group = |weight, start, end| GroupRange { weight, start, end };
    let mut d = vec![0f32; 16];
    for (groups, want) in [
        (
            vec![group(2, 0, 1)],
            CpuError::ExpertOutOfRange {
                group: 0,
                expert: 2,
                experts: 2,
            },
        ),
        (
            vec![group(1, 3, 5)],
            CpuError::RowsOutOfRange {
                group: 0,
                start: 3,
                end: 5,
                rows: 4,
            },
        ),
        (
            vec![group(1, 3, 2)],
            CpuError::RowsOutOfRange {
                group: 0,
                start: 3,
                end: 2,
                rows: 4,
            },
        ),
        (
            vec![group(0, 1, 4), group(1, 0, 2)],
            CpuError::OverlappingRows {
                first: 1,
                second: 0,
                row: 1,
            },
        ),
    ] {
        expect_error(
            engine.grouped_gemm_bf16(a, b, &groups, MatrixMut::new(&mut d, 4, 4, 4).unwrap()),
            want,
        );
    }
    let narrow = MatrixMut::new(&mut d, 4, 3, 4).unwrap();
    expect_error(
        engine.grouped_gemm_bf16(a, b, &[], narrow),
        CpuError::Mismatch {
            what: "the number of columns of D",
            expected: 4,
            actual: 3,
        },
    );
    expect_error(
        MatrixRef::new(&data, 4, 8, 7).map(|_| ()),
        CpuError::Stride {
            what: "a row stride",
            stride: 7,
            least: 8,
        },
    );
    expect_error(
        MatrixRef::new(&data, 9, 8, 8).map(|_| ()),
        CpuError::TooShort {
            what: "a matrix",
            needed: 72,
            actual: 64,
        },
    );
    expect_error(
        WeightsRef::new(&data, [2, 4, 8], [33, 8]).map(|_| ()),
        CpuError::TooShort {
            what: "the weights",
            needed: 65,
            actual: 64,
        },
    );
    let k = 133_152;
    let codes = vec![127i8; k];
    let a = Int8Rows::new(
        MatrixRef::new(&codes, 1, k, k).unwrap(),
        MatrixRef::new(&[1.0], 1, 1, 1).unwrap(),
    )
    .unwrap();
    let b = Int8Weights::new(
        WeightsRef::new(&codes, [1, 1, k], [k, k]).unwrap(),
        WeightsRef::new(&[1.0], [1, 1, 1], [1, 1]).unwrap(),
        Int8Scaling::PerRow,
    )
    .unwrap();
    expect_error(
        engine.grouped_gemm_int8(
            a,
            b,
            &[group(0, 0, 1)],
            MatrixMut::new(&mut d, 1, 1, 1).unwrap(),
        ),
        CpuError::TooLarge {
            what: "K of an int8 GEMM with one scale a row",
            value: k,
            limit: 131_071,
        },
    );
}
