//! Packing and unpacking of experts.

mod common;

use asym_gemm_cpu::{BankRef, CpuError, ExpertSource, StoredRow, pack_expert, unpack};
use asym_gemm_formats::bank::Projection;
use asym_gemm_formats::{WeightFormat, e2m1, e4m3, e8m0};
use common::*;
use half::bf16;

const PROJECTIONS: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

fn rows(source: &dyn ExpertSource, e: &Expert) -> [Vec<f32>; 3] {
    PROJECTIONS.map(|p| {
        let k = e.k(p as usize);
        let mut values = vec![f32::NAN; e.weights[p as usize].len()];
        for (row, values) in values.chunks_mut(k).enumerate() {
            source.row(p, row, values);
        }
        values
    })
}

/// bf16 values come back bit for bit, int8 and fp8 codes too (unpacking and packing again gives the
/// same bytes of codes), biases always; int8 and fp8 values are within half a step.
#[test]
fn round_trip() {
    for (hidden, intermediate) in [(1, 1), (100, 33), (192, 96), (257, 300), (128, 128)] {
        for format in FORMATS {
            for bias in [false, true] {
                let g = geometry(1, hidden, intermediate, format, bias);
                let mut e = Expert::random(g, &mut rng(5));
                if format == WeightFormat::Bf16 {
                    for w in e.weights.iter_mut().flatten() {
                        *w = bf16::from_f32(*w).to_f32();
                    }
                    e.weights[0][0] = -0.0;
                    e.weights[2][0] = f32::from_bits(0x0001_0000);
                }
                let mut bytes = vec![0xee; g.expert_bytes()];
                pack_expert(g, &mut bytes, &e).unwrap();
                let back = unpack(g, &bytes).unwrap();
                for (p, got) in rows(&back, &e).iter().enumerate() {
                    if format == WeightFormat::Bf16 {
                        assert_same("bf16", got, &e.weights[p]);
                        continue;
                    }
                    let k = e.k(p);
                    if format == WeightFormat::Fp8Block128 {
                        check_fp8(got, &e.weights[p], k);
                        continue;
                    }
                    if let Some(group) = format.scale_group() {
                        check_fp4(got, &e.weights[p], k, group);
                        continue;
                    }
                    let span = if format == WeightFormat::Int8PerRow {
                        k
                    } else {
                        128
                    };
                    for (got, want) in got.chunks(k).zip(e.weights[p].chunks(k)) {
                        for (got, want) in got.chunks(span).zip(want.chunks(span)) {
                            let amax = want.iter().fold(0f32, |m, w| m.max(w.abs()));
                            let half_step = amax / 127.0 * 0.5001;
                            for (got, want) in got.iter().zip(want) {
                                assert!((got - want).abs() <= half_step, "{g:?}: {got} for {want}");
                            }
                        }
                    }
                }
                for p in PROJECTIONS {
                    match bias {
                        true => assert_same("bias", back.bias(p).unwrap(), &e.bias[p as usize]),
                        false => assert!(back.bias(p).is_none()),
                    }
                }
                if format.scale_group().is_some() {
                    // A scale is not found again where no element has the largest code.
                    continue;
                }
                let mut again = vec![0x11; g.expert_bytes()];
                pack_expert(g, &mut again, &back).unwrap();
                for p in PROJECTIONS {
                    let (n, k) = match p {
                        Projection::Down => (hidden, intermediate),
                        _ => (intermediate, hidden),
                    };
                    for at in (0..n * k).map(|i| g.element_offset(p, i / k, i % k)) {
                        assert_eq!(again[at], bytes[at], "{g:?} code at byte {at}");
                    }
                }
            }
        }
    }
}

/// Each value within half a step of e4m3 at the scale of its block of 128 x 128.
fn check_fp8(got: &[f32], want: &[f32], k: usize) {
    let block = |i: usize| (i / k / 128, i % k / 128);
    let mut largest = std::collections::HashMap::new();
    for (i, w) in want.iter().enumerate() {
        let amax = largest.entry(block(i)).or_insert(0f32);
        *amax = amax.max(w.abs());
    }
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        // 2^-4 relative; half of 2^-9 scales where codes are subnormal.
        let half_step = (want.abs() / 16.0).max(largest[&block(i)] / 448.0 / 1024.0);
        let error = (got - want).abs();
        assert!(error <= half_step * 1.001, "element {i}: {got} for {want}");
    }
}

/// Each value within half of the largest step of e2m1 at the scale of its group, and what rounding
/// the scale adds.
fn check_fp4(got: &[f32], want: &[f32], k: usize, group: usize) {
    for (got, want) in got.chunks(k).zip(want.chunks(k)) {
        for (got, want) in got.chunks(group).zip(want.chunks(group)) {
            let amax = want.iter().fold(0f32, |m, w| m.max(w.abs()));
            // mxfp4 rounds its scale up to twice as much, nvfp4 by 1/16.
            let bound = match group {
                16 => amax * (1.0 / 6.0 + 1.0 / 16.0),
                _ => amax / 3.0,
            };
            for (got, want) in got.iter().zip(want) {
                assert!(
                    (got - want).abs() <= bound,
                    "{got} for {want}, largest {amax}"
                );
            }
        }
    }
}

/// Codes and scales that are stored in the bank's format arrive as they are.
struct Stored(WeightFormat);

impl ExpertSource for Stored {
    fn row(&self, _: Projection, _: usize, _: &mut [f32]) {
        panic!("nothing is to be quantised");
    }

    fn bias(&self, _: Projection) -> Option<&[f32]> {
        None
    }

    fn stored_row(
        &self,
        format: WeightFormat,
        projection: Projection,
        row: usize,
        out: StoredRow<'_>,
    ) -> Option<f32> {
        assert_eq!(format, self.0);
        for (i, code) in out.codes.iter_mut().enumerate() {
            *code = stored_code(projection, row, i);
        }
        match format.scale_group() {
            Some(_) => {
                for (i, scale) in out.scales.iter_mut().enumerate() {
                    *scale = stored_scale(row, i) as u8 + 0x20;
                }
            }
            None => {
                for (i, scale) in out.scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *scale = stored_scale(row, i).to_le_bytes();
                }
            }
        }
        Some([1.5, 2.5, 3.5][projection as usize])
    }
}

fn stored_code(projection: Projection, row: usize, i: usize) -> u8 {
    // Neither NaN of e4m3.
    (row * 7 + i * 3 + projection as usize) as u8 & 0x77
}

/// The same for 128 rows, as fp8 wants it.
fn stored_scale(row: usize, i: usize) -> f32 {
    (row / 128 * 5 + i % 9 + 1) as f32
}

#[test]
fn stored_codes_are_copied() {
    let (hidden, intermediate) = (300, 200);
    for format in FORMATS {
        let g = geometry(1, hidden, intermediate, format, false);
        if format == WeightFormat::Bf16 {
            continue;
        }
        let mut bytes = vec![0xee; g.expert_bytes()];
        pack_expert(g, &mut bytes, &Stored(format)).unwrap();
        let back = unpack(g, &bytes).unwrap();
        for p in PROJECTIONS {
            let (n, k) = match p {
                Projection::Down => (hidden, intermediate),
                _ => (intermediate, hidden),
            };
            let mut values = vec![f32::NAN; k];
            for row in 0..n {
                back.row(p, row, &mut values);
                for (i, &value) in values.iter().enumerate() {
                    let scale = |group: usize| stored_scale(row, i / group);
                    let nibble = || stored_code(p, row, i / 2) >> (i % 2 * 4);
                    let global = [1.5, 2.5, 3.5][p as usize];
                    let byte_scale = |group: usize| scale(group) as u8 + 0x20;
                    let want = match format {
                        WeightFormat::Int8PerRow => {
                            f32::from(stored_code(p, row, i) as i8) * scale(k)
                        }
                        WeightFormat::Int8Block128 => {
                            f32::from(stored_code(p, row, i) as i8) * scale(128)
                        }
                        WeightFormat::Fp8Block128 => {
                            e4m3::decode(stored_code(p, row, i)) * scale(128)
                        }
                        WeightFormat::Nvfp4 => {
                            e2m1::decode(nibble()) * e4m3::decode(byte_scale(16)) * global
                        }
                        WeightFormat::Mxfp4 => {
                            e2m1::decode(nibble()) * e8m0::decode(byte_scale(32))
                        }
                        WeightFormat::Bf16 => unreachable!("left out above"),
                    };
                    assert_eq!(value, want, "{format} {p:?} {row}, {i}");
                }
            }
        }
    }
}

/// fp8 has one scale for 128 x 128: a large value changes the codes of its block alone, and blocks
/// of zeros or of the smallest numbers come back finite.
#[test]
fn fp8_scales_belong_to_blocks() {
    let g = geometry(1, 300, 200, WeightFormat::Fp8Block128, false);
    let mut e = Expert::random(g, &mut rng(9));
    let pack = |e: &Expert| {
        let mut bytes = vec![0; g.expert_bytes()];
        pack_expert(g, &mut bytes, e).unwrap();
        bytes
    };
    let before = pack(&e);
    for (p, row, k) in [(0, 130, 290), (1, 5, 129), (2, 257, 140)] {
        let index = row * e.k(p) + k;
        let old = std::mem::replace(&mut e.weights[p][index], 1e4);
        let after = pack(&e);
        for q in PROJECTIONS {
            let (n, width) = match q {
                Projection::Down => (300, 200),
                _ => (200, 300),
            };
            for (r, c) in (0..n * width).map(|i| (i / width, i % width)) {
                let at = g.element_offset(q, r, c);
                let same_block = q as usize == p && r / 128 == row / 128 && c / 128 == k / 128;
                if !same_block {
                    assert_eq!(after[at], before[at], "{q:?} {r}, {c}");
                }
            }
        }
        let same = |(a, b): &(&u8, &u8)| a == b;
        let different = before.len() - before.iter().zip(&after).filter(same).count();
        assert!(different > 1000, "the block kept its codes");
        e.weights[p][index] = old;
    }
    for (i, w) in e.weights.iter_mut().flatten().enumerate() {
        *w = [0.0, 1e-45, 6.3e-38, 1.4e-36][i % 4];
    }
    let back = unpack(g, &pack(&e)).unwrap();
    for (p, got) in rows(&back, &e).iter().enumerate() {
        for (got, want) in got.iter().zip(&e.weights[p]) {
            assert!((got - want).abs() <= *want, "{got} for {want}");
        }
    }
}

/// Bytes that belong to no element are zero, whatever the buffer held.
#[test]
fn padding_is_zero() {
    for format in FORMATS {
        let g = geometry(1, 100, 33, format, false);
        let mut e = Expert::random(g, &mut rng(6));
        for w in e.weights.iter_mut().flatten() {
            *w = 1.0;
        }
        let mut bytes = vec![0xee; g.expert_bytes()];
        pack_expert(g, &mut bytes, &e).unwrap();
        let nonzero = bytes[..g.gate_up_scales_offset()]
            .iter()
            .filter(|&&b| b != 0)
            .count();
        let want: usize = [(33, 100), (33, 100), (100, 33)]
            .map(|(rows, k): (usize, usize)| {
                let scales = format.scale_group().map_or(0, |group| k.div_ceil(group));
                rows * ((k * format.element_bits()).div_ceil(8) + scales)
            })
            .iter()
            .sum();
        assert_eq!(nonzero, want, "{format}");
    }
}

#[test]
fn bad_arguments_are_refused() {
    let g = geometry(2, 16, 8, WeightFormat::Int8PerRow, true);
    let bytes = vec![0; g.bank_bytes()];
    expect_error(
        BankRef::new(g, &bytes[1..]),
        CpuError::Mismatch {
            what: "the bank, in bytes,",
            expected: g.bank_bytes(),
            actual: g.bank_bytes() - 1,
        },
    );
    expect_error(
        BankRef::new(geometry(2, 0, 8, WeightFormat::Bf16, false), &[]),
        CpuError::Zero {
            what: "the hidden size H",
        },
    );
    expect_error(
        BankRef::new(geometry(usize::MAX, 64, 8, WeightFormat::Bf16, false), &[]),
        CpuError::TooLarge {
            what: "the number of experts",
            value: usize::MAX,
            limit: 1 << 16,
        },
    );
    expect_error(
        BankRef::new(
            geometry(1, 133_152, 8, WeightFormat::Int8PerRow, false),
            &[],
        ),
        CpuError::TooLarge {
            what: "the hidden size H",
            value: 133_152,
            limit: 131_071,
        },
    );
    let mut e = Expert::random(g, &mut rng(6));
    e.bias[2].push(0.0);
    let mut out = vec![7; g.expert_bytes()];
    expect_error(
        pack_expert(g, &mut out, &e),
        CpuError::Mismatch {
            what: "a projection's bias, in elements,",
            expected: 16,
            actual: 17,
        },
    );
    assert!(out.iter().all(|&b| b == 7), "the output was written");
}
