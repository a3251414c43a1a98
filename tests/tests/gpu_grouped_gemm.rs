//! The grouped GEMM against f64 (bf16) and against exact arithmetic (int8).

use asym_gemm::driver::{DeviceBuffer, Gpu, PinnedBuffer, Stream};
use asym_gemm::formats::WeightFormat;
use asym_gemm::gemm::{
    Activations, DeviceGroups, DeviceMatrix, DeviceMatrixMut, GemmError, GroupRange, GroupedGemm,
    Output, WeightMemory, Weights,
};
use asym_gemm::transfer::Transfer;
use asym_gemm_testkit::compare::{
    Bound, Output as OutputType, assert_poisoned, bits_equal, check_close,
};
use asym_gemm_testkit::generate::{
    Pattern, gemm_shapes, int8_codes, matrix, rounded_to_bf16, row_counts,
};
use asym_gemm_testkit::reference::{Group, Operand, QuantisedMatrix, grouped_gemm, int8_gemm};
use asym_gemm_testkit::skip;
use asym_gemm_tests::{GPU_FORMATS, gpu};
use half::bf16;

const TRANSFERS: [Transfer; 3] = [Transfer::Staged, Transfer::Direct, Transfer::Resident];
/// Columns of D beyond N, which nobody may write.
const GUARD_COLUMNS: usize = 8;

/// One grouped GEMM: operands in host memory, and where groups lie.
struct Case {
    format: WeightFormat,
    n: usize,
    k: usize,
    rows: usize,
    groups: Vec<GroupRange>,
    /// [rows, k].
    a: Vec<f32>,
    /// [count][n, k].
    b: Vec<Vec<f32>>,
}

impl Case {
    /// Groups of `counts` rows, one for each weight, with `gap` unused rows before each.
    fn new(format: WeightFormat, counts: &[usize], n: usize, k: usize, gap: usize) -> Self {
        let mut groups = Vec::new();
        let mut start = 0;
        for (weight, &count) in counts.iter().enumerate() {
            start += gap;
            groups.push(GroupRange {
                weight,
                start,
                end: start + count,
            });
            start += count;
        }
        let rows = start + gap;
        let bf16_exact = |seed, r, c| rounded_to_bf16(&matrix(Pattern::Gaussian, seed, r, c));
        let b = (0..counts.len())
            .map(|w| bf16_exact(100 + w as u64, n, k))
            .collect();
        Self {
            format,
            n,
            k,
            rows,
            groups,
            a: bf16_exact(1, rows, k),
            b,
        }
    }

    /// Fills rows that belong to no group with `value`.
    fn fill_gaps(&mut self, value: f32) {
        for row in 0..self.rows {
            if !self.groups.iter().any(|g| (g.start..g.end).contains(&row)) {
                self.a[row * self.k..(row + 1) * self.k].fill(value);
            }
        }
    }

    fn quantised_a(&self) -> QuantisedMatrix {
        QuantisedMatrix::new(self.format, &self.a, self.rows, self.k)
    }

    fn quantised_b(&self) -> Vec<QuantisedMatrix> {
        self.b
            .iter()
            .map(|b| QuantisedMatrix::new(self.format, b, self.n, self.k))
            .collect()
    }

    /// D as f32 bits [rows, n + GUARD_COLUMNS], poisoned where nothing was written.
    fn run(&self, gpu: &Gpu, bf16_out: bool, transfer: Transfer, ring_bytes: usize) -> Vec<f32> {
        let stream = Stream::new(gpu).unwrap();
        let mut gemm = GroupedGemm::with_ring_bytes(gpu, ring_bytes);
        let (codes, b_scales) = self.device_bytes();
        let pinned = (transfer != Transfer::Resident).then(|| {
            let mut buffer = PinnedBuffer::alloc(gpu, codes.len()).unwrap();
            buffer.as_mut_slice()[..codes.len()].copy_from_slice(&codes);
            buffer
        });
        let device = DeviceBuffer::from_slice(gpu, &codes).unwrap();
        let memory = match &pinned {
            Some(buffer) => WeightMemory::Pinned(buffer),
            None => WeightMemory::Device(&device),
        };
        let count = self.b.len();
        let blocks = b_scales.len() / (count * self.n);
        let b_scales = DeviceBuffer::from_slice(gpu, &b_scales).unwrap();
        let scales = (blocks > 0)
            .then(|| DeviceMatrix::new(&b_scales, count * self.n, blocks, blocks).unwrap());
        let b = Weights::new(memory, self.format, count, self.n, self.k, scales).unwrap();

        let stride = self.n + GUARD_COLUMNS;
        let mut f32_out = DeviceBuffer::<f32>::alloc(gpu, self.rows * stride).unwrap();
        let mut bf16_buffer = DeviceBuffer::<bf16>::alloc(gpu, self.rows * stride).unwrap();
        f32_out.fill_bytes(0xff).unwrap();
        bf16_buffer.fill_bytes(0xff).unwrap();

        let a_values: Vec<bf16> = self.a.iter().map(|&x| bf16::from_f32(x)).collect();
        let a_bf16 = DeviceBuffer::from_slice(gpu, &a_values).unwrap();
        let quantised = (self.format != WeightFormat::Bf16).then(|| self.quantised_a());
        let (a_codes, a_scales) = match &quantised {
            Some(q) => (q.codes.clone(), q.scales.clone()),
            None => (vec![0], vec![0.0]),
        };
        let (a_codes, a_scales) = (
            DeviceBuffer::from_slice(gpu, &a_codes).unwrap(),
            DeviceBuffer::from_slice(gpu, &a_scales).unwrap(),
        );
        let a = match &quantised {
            None => {
                Activations::Bf16(DeviceMatrix::new(&a_bf16, self.rows, self.k, self.k).unwrap())
            }
            Some(q) => Activations::Int8 {
                codes: DeviceMatrix::new(&a_codes, self.rows, self.k, self.k).unwrap(),
                scales: DeviceMatrix::new(&a_scales, self.rows, q.blocks(), q.blocks()).unwrap(),
            },
        };
        {
            let mut d = if bf16_out {
                Output::Bf16(
                    DeviceMatrixMut::new(&mut bf16_buffer, self.rows, self.n, stride).unwrap(),
                )
            } else {
                Output::F32(DeviceMatrixMut::new(&mut f32_out, self.rows, self.n, stride).unwrap())
            };
            gemm.run(&a, &b, &self.groups, &mut d, transfer, &stream)
                .unwrap();
        }
        if bf16_out {
            let out = bf16_buffer.to_vec().unwrap();
            // 0xffff stays recognisable as poison.
            out.iter()
                .map(|x| {
                    if x.to_bits() == 0xffff {
                        f32::from_bits(u32::MAX)
                    } else {
                        x.to_f32()
                    }
                })
                .collect()
        } else {
            f32_out.to_vec().unwrap()
        }
    }

    /// Weight bytes as stored and the scales of all weights.
    fn device_bytes(&self) -> (Vec<u8>, Vec<f32>) {
        if self.format == WeightFormat::Bf16 {
            let codes = self
                .b
                .iter()
                .flatten()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes());
            return (codes.collect(), Vec::new());
        }
        let quantised = self.quantised_b();
        (
            quantised
                .iter()
                .flat_map(|q| q.codes.iter().map(|&c| c as u8))
                .collect(),
            quantised
                .iter()
                .flat_map(|q| q.scales.iter().copied())
                .collect(),
        )
    }

    /// Asserts that `out` is right in the groups and untouched elsewhere.
    fn check(&self, name: &str, out: &[f32], bf16_out: bool) {
        let stride = self.n + GUARD_COLUMNS;
        let written: Vec<_> = self.groups.iter().map(|g| g.start..g.end).collect();
        assert_poisoned(name, out, stride, &written);
        let mut inner = Vec::with_capacity(self.rows * self.n);
        for row in out.chunks_exact(stride) {
            inner.extend_from_slice(&row[..self.n]);
            if row[..self.n].iter().any(|x| x.to_bits() != u32::MAX) {
                let guard = &row[self.n..];
                assert!(
                    guard.iter().all(|x| x.to_bits() == u32::MAX),
                    "{name}: guard columns"
                );
            }
        }
        if self.format == WeightFormat::Bf16 {
            let a = Operand::plain(self.rows, self.k, &self.a);
            let b: Vec<_> = self
                .b
                .iter()
                .map(|b| Operand::plain(self.n, self.k, b))
                .collect();
            let groups: Vec<_> = self
                .groups
                .iter()
                .map(|g| Group::new(g.start..g.end, g.weight as i32))
                .collect();
            let want = grouped_gemm(&a, &b, &groups);
            let output = if bf16_out {
                OutputType::Bf16
            } else {
                OutputType::F32
            };
            let report = check_close(name, &inner, &want, Bound::f32_accumulated(output));
            let report = report.unwrap_or_else(|mismatch| panic!("{mismatch}"));
            if written.iter().any(|rows| !rows.is_empty()) {
                report
                    .not_vacuous()
                    .unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
            return;
        }
        let (a, b) = (self.quantised_a(), self.quantised_b());
        for g in self.groups.iter().filter(|g| g.start < g.end) {
            let blocks = a.blocks();
            let rows = QuantisedMatrix {
                rows: g.end - g.start,
                codes: a.codes[g.start * self.k..g.end * self.k].to_vec(),
                scales: a.scales[g.start * blocks..g.end * blocks].to_vec(),
                ..a.clone()
            };
            let mut want = int8_gemm(&rows, &b[g.weight]);
            if bf16_out {
                for x in &mut want {
                    *x = bf16::from_f32(*x).to_f32();
                }
            }
            let got = &inner[g.start * self.n..g.end * self.n];
            bits_equal(&format!("{name}, weight {}", g.weight), got, &want, self.n)
                .unwrap_or_else(|mismatch| panic!("{mismatch}"));
        }
    }
}

/// Ring large enough for everything here, so that one slot takes several weights.
const RING: usize = 24 << 20;

/// Every number of rows an expert can have around the tiles, at ragged starts.
#[test]
fn every_row_count() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let all: Vec<usize> = row_counts().collect();
    let small: Vec<usize> = all.iter().copied().filter(|&c| c <= 64).collect();
    for format in GPU_FORMATS {
        // Up to 64 rows the 64-row tile is chosen, else the 128-row one.
        for counts in [&small, &all] {
            let case = Case::new(format, counts, 264, 144, 1);
            for (transfer, bf16_out) in [
                (Transfer::Staged, false),
                (Transfer::Staged, true),
                (Transfer::Direct, false),
            ] {
                let name = format!(
                    "{format} {transfer} bf16_out={bf16_out} {} counts",
                    counts.len()
                );
                case.check(&name, &case.run(&gpu, bf16_out, transfer, RING), bf16_out);
            }
        }
    }
}

/// Odd N and K: tails of tiles, columns that do not fill a vector.
#[test]
fn odd_shapes() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let more = [(7168, 33), (1152, 320), (16, 1), (2048, 129)];
    for format in GPU_FORMATS {
        for &(k, n) in gemm_shapes().iter().chain(&more) {
            for counts in [&[3, 0, 65][..], &[1, 130, 2]] {
                let case = Case::new(format, counts, n, k, 2);
                for bf16_out in [false, true] {
                    let name = format!("{format} N={n} K={k} {counts:?} bf16_out={bf16_out}");
                    case.check(
                        &name,
                        &case.run(&gpu, bf16_out, Transfer::Resident, RING),
                        bf16_out,
                    );
                }
            }
        }
    }
}

/// Rows that TMA cannot read where they are, for the number of their bytes: copied on their way,
/// with the same bits whichever way that is.
#[test]
fn rows_of_any_number_of_bytes() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for format in GPU_FORMATS {
        for k in [1, 2, 33, 63, 65, 100, 127, 129, 1001] {
            let case = Case::new(format, &[3, 0, 65, 129], 129, k, 2);
            let want = case.run(&gpu, false, Transfer::Resident, RING);
            case.check(&format!("{format} K={k}"), &want, false);
            for transfer in TRANSFERS {
                let got = case.run(&gpu, false, transfer, RING);
                bits_equal("transfer", &got, &want, 129 + GUARD_COLUMNS)
                    .unwrap_or_else(|m| panic!("{format} K={k} {transfer}: {m}"));
            }
        }
    }
}

/// Row i holds 2^i and weights are 1: every element must be exactly K * 2^i, 20 times.
#[test]
fn stores_stay_in_their_row() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for n in [1, 31, 33, 63, 65, 127, 129, 320, 704] {
        let mut case = Case::new(WeightFormat::Bf16, &[2, 2], n, 64, 0);
        for row in 0..4 {
            case.a[row * 64..(row + 1) * 64].fill((1 << row) as f32);
        }
        case.b.iter_mut().for_each(|b| b.fill(1.0));
        for _ in 0..20 {
            let out = case.run(&gpu, false, Transfer::Staged, RING);
            for (row, got) in out.chunks_exact(n + GUARD_COLUMNS).enumerate() {
                assert!(
                    got[..n].iter().all(|&x| x == (64 << row) as f32),
                    "N={n} row {row}"
                );
            }
        }
    }
}

/// Whatever lies between the groups, the groups' rows have the same bytes.
#[test]
fn padding_does_not_matter() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for format in GPU_FORMATS {
        let mut case = Case::new(format, &[5, 0, 70, 1], 136, 256, 3);
        case.fill_gaps(0.0);
        let clean = case.run(&gpu, false, Transfer::Resident, RING);
        for value in [f32::NAN, f32::INFINITY, 3e38] {
            case.fill_gaps(value);
            let dirty = case.run(&gpu, false, Transfer::Resident, RING);
            bits_equal("padding", &dirty, &clean, 136 + GUARD_COLUMNS)
                .unwrap_or_else(|mismatch| panic!("{format} {value}: {mismatch}"));
        }
    }
}

/// Transfers, ring sizes (also such that a matrix is cut into pieces) and repeats agree to the bit.
#[test]
fn transfers_agree_to_the_bit() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for format in GPU_FORMATS {
        for counts in [&[40, 0, 0, 3, 64][..], &[200, 1, 0, 129, 64]] {
            let case = Case::new(format, counts, 1032, 512, 1);
            let want = case.run(&gpu, true, Transfer::Resident, RING);
            case.check(&format!("{format} resident"), &want, true);
            let piece = 3 * 256 * 512 * format.element_bytes();
            for transfer in TRANSFERS {
                for ring in [piece, 4 * piece, RING] {
                    for _ in 0..5 {
                        let got = case.run(&gpu, true, transfer, ring);
                        bits_equal("transfer", &got, &want, 1032 + GUARD_COLUMNS)
                            .unwrap_or_else(|m| panic!("{format} {transfer} ring {ring}: {m}"));
                    }
                }
            }
        }
    }
}

/// Many experts, few used; all rows on the last one; no row at all.
#[test]
fn skewed_groups() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for format in GPU_FORMATS {
        let mut counts = vec![0; 384];
        counts[383] = 300;
        for counts in [&counts[..], &[0, 0, 0], &[1; 384]] {
            let case = Case::new(format, counts, 64, 128, 0);
            let out = case.run(&gpu, false, Transfer::Staged, RING);
            case.check(&format!("{format} {} groups", counts.len()), &out, false);
        }
    }
}

/// Long sums do not lose accuracy with K; all-positive and cancelling operands.
#[test]
fn long_k() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for k in [7168, 18432] {
        let mut case = Case::new(WeightFormat::Bf16, &[33], 40, k, 0);
        let run = |case: &Case, name: &str| {
            case.check(
                name,
                &case.run(&gpu, false, Transfer::Resident, RING),
                false,
            );
        };
        run(&case, "random");
        case.a.iter_mut().for_each(|x| *x = x.abs());
        case.b[0].iter_mut().for_each(|x| *x = x.abs());
        run(&case, "positive");
        let half = k / 2;
        for row in case.b[0].chunks_exact_mut(k) {
            let (first, second) = row.split_at_mut(half);
            second.iter_mut().zip(first).for_each(|(b, a)| *b = -*a);
        }
        for row in case.a.chunks_exact_mut(k) {
            let (first, second) = row.split_at_mut(half);
            second.copy_from_slice(first);
        }
        run(&case, "cancelling");
    }
}

/// More weights than the relay's ring holds, several row tiles that share them, K that ends
/// inside a unit: the same bytes as from device memory, whatever the buffers held.
#[test]
fn relay_reuses_its_ring() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let stream = Stream::new(&gpu).unwrap();
    let (count, n, k) = (12, 2056, 1552);
    let rows_of = |e: usize| [300, 1, 0, 129, 700, 65][e % 6];
    let mut groups = Vec::new();
    let mut start = 0;
    for weight in 0..count {
        let end = start + rows_of(weight);
        groups.push(GroupRange { weight, start, end });
        start = end;
    }
    let rows = start;
    let values = |seed, len: usize| -> Vec<bf16> {
        let some = matrix(Pattern::Gaussian, seed, 1, 100_003);
        let bf16s = some.iter().map(|&x| bf16::from_f32(x));
        bf16s.cycle().take(len).collect()
    };
    let a = DeviceBuffer::from_slice(&gpu, &values(1, rows * k)).unwrap();
    let bytes: Vec<u8> = values(2, count * n * k)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    assert!(bytes.len() > 64 << 20);
    let device = DeviceBuffer::from_slice(&gpu, &bytes).unwrap();
    let mut pinned = PinnedBuffer::alloc(&gpu, bytes.len()).unwrap();
    pinned.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
    let mut out = DeviceBuffer::<f32>::alloc(&gpu, rows * n).unwrap();
    let mut gemm = GroupedGemm::new(&gpu);
    let a = Activations::Bf16(DeviceMatrix::new(&a, rows, k, k).unwrap());
    let mut run = |memory, transfer| {
        out.fill_bytes(0xff).unwrap();
        let b = Weights::new(memory, WeightFormat::Bf16, count, n, k, None).unwrap();
        let mut d = Output::F32(DeviceMatrixMut::new(&mut out, rows, n, n).unwrap());
        let plan = gemm
            .run(&a, &b, &groups, &mut d, transfer, &stream)
            .unwrap();
        (out.to_vec().unwrap(), plan)
    };
    let (want, plan) = run(WeightMemory::Device(&device), Transfer::Resident);
    assert_eq!(plan.couriers, 0);
    assert!(want.iter().all(|x| x.is_finite()));
    for _ in 0..5 {
        let (got, plan) = run(WeightMemory::Pinned(&pinned), Transfer::Direct);
        assert!(plan.couriers > 0, "{plan}");
        bits_equal("relay", &got, &want, n).unwrap_or_else(|m| panic!("{m}"));
    }
}

/// Output of more than 2^31 elements: offsets of rows need 64 bits.
#[test]
fn output_past_2_31_elements() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let stream = Stream::new(&gpu).unwrap();
    let (experts, m, n, k) = (10, 53_000, 4096, 64);
    let rows = experts * m;
    assert!(rows * n > 1 << 31);
    let some = rounded_to_bf16(&matrix(Pattern::Gaussian, 1, 1009, k));
    let a_value = |row: usize, i: usize| some[row % 1009 * k + i];
    let b_values = rounded_to_bf16(&matrix(Pattern::Gaussian, 2, experts * n, k));
    let a: Vec<bf16> = (0..rows)
        .flat_map(|row| (0..k).map(move |i| (row, i)))
        .map(|(row, i)| bf16::from_f32(a_value(row, i)))
        .collect();
    let a = DeviceBuffer::from_slice(&gpu, &a).unwrap();
    let bytes: Vec<u8> = b_values
        .iter()
        .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
        .collect();
    let device = DeviceBuffer::from_slice(&gpu, &bytes).unwrap();
    let memory = WeightMemory::Device(&device);
    let b = Weights::new(memory, WeightFormat::Bf16, experts, n, k, None).unwrap();
    let a = Activations::Bf16(DeviceMatrix::new(&a, rows, k, k).unwrap());
    let groups: Vec<GroupRange> = (0..experts)
        .map(|weight| GroupRange {
            weight,
            start: weight * m,
            end: (weight + 1) * m,
        })
        .collect();
    let mut out = DeviceBuffer::<bf16>::alloc(&gpu, rows * n).unwrap();
    out.fill_bytes(0xff).unwrap();
    let mut d = Output::Bf16(DeviceMatrixMut::new(&mut out, rows, n, n).unwrap());
    let mut gemm = GroupedGemm::new(&gpu);
    gemm.run(&a, &b, &groups, &mut d, Transfer::Resident, &stream)
        .unwrap();
    let mut got = vec![bf16::NAN; n];
    for row in [0, m - 1, m, (1 << 31) / n - 1, (1 << 31) / n, rows - 1] {
        out.copy_to_host_at(row * n, &mut got).unwrap();
        for (column, got) in got.iter().enumerate() {
            let weights = &b_values[(row / m * n + column) * k..][..k];
            let terms = weights
                .iter()
                .enumerate()
                .map(|(i, &w)| f64::from(a_value(row, i)) * f64::from(w));
            let (want, size) = terms.fold((0.0, 0.0), |(s, z), x| (s + x, z + x.abs()));
            let bound = want.abs() * 0.004 + size * 1e-6;
            let within = (got.to_f64() - want).abs() <= bound; // false for NaN
            assert!(within, "[{row}, {column}]: {got}, expected {want}");
        }
    }
}

/// A bank of 512 experts of more than 2^31 elements: offsets of weights and scales.
#[test]
fn weights_past_2_31_elements() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let stream = Stream::new(&gpu).unwrap();
    let (experts, n, k) = (512, 2056, 2048);
    assert!(experts * n * k > 1 << 31);
    // Expert e takes its weights from 16 e on: all differ.
    let base: Vec<u8> = int8_codes(1, n * k + 16 * experts)
        .iter()
        .map(|&x| x as u8)
        .collect();
    let mut device = DeviceBuffer::<u8>::alloc(&gpu, experts * n * k).unwrap();
    for e in 0..experts {
        device
            .copy_from_host_at(e * n * k, &base[16 * e..][..n * k])
            .unwrap();
    }
    let b_scales: Vec<f32> = (0..experts * n).map(|i| (i % 977 + 1) as f32).collect();
    let a: Vec<i8> = int8_codes(2, experts * k);
    let (a_codes, a_scales, scales) = (
        DeviceBuffer::from_slice(&gpu, &a).unwrap(),
        DeviceBuffer::from_slice(&gpu, &vec![0.5f32; experts]).unwrap(),
        DeviceBuffer::from_slice(&gpu, &b_scales).unwrap(),
    );
    let b = Weights::new(
        WeightMemory::Device(&device),
        WeightFormat::Int8PerRow,
        experts,
        n,
        k,
        Some(DeviceMatrix::new(&scales, experts * n, 1, 1).unwrap()),
    );
    let a_view = Activations::Int8 {
        codes: DeviceMatrix::new(&a_codes, experts, k, k).unwrap(),
        scales: DeviceMatrix::new(&a_scales, experts, 1, 1).unwrap(),
    };
    let groups: Vec<GroupRange> = (0..experts)
        .map(|e| GroupRange {
            weight: e,
            start: e,
            end: e + 1,
        })
        .collect();
    let mut out = DeviceBuffer::<f32>::alloc(&gpu, experts * n).unwrap();
    out.fill_bytes(0xff).unwrap();
    let mut d = Output::F32(DeviceMatrixMut::new(&mut out, experts, n, n).unwrap());
    let mut gemm = GroupedGemm::new(&gpu);
    gemm.run(
        &a_view,
        &b.unwrap(),
        &groups,
        &mut d,
        Transfer::Resident,
        &stream,
    )
    .unwrap();
    let out = out.to_vec().unwrap();
    for e in [0, 1, 255, 509, 510, 511] {
        for column in 0..n {
            let weights = &base[16 * e + column * k..][..k];
            let sum: i32 = a[e * k..][..k]
                .iter()
                .zip(weights)
                .map(|(&x, &w)| i32::from(x) * i32::from(w as i8))
                .sum();
            let want = sum as f32 * (0.5 * b_scales[e * n + column]);
            assert_eq!(out[e * n + column], want, "expert {e} column {column}");
        }
    }
}

/// A recorded graph computes whatever the list of groups says when it is replayed, skips
/// groups that do not exist, and leaves other rows alone.
#[test]
fn graphs_replay_with_other_groups() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let stream = Stream::new(&gpu).unwrap();
    let lists = [
        vec![
            [3, 140, 1, 0],
            [140, 141, 0, 0],
            [0, 0, 2, 0],
            [200, 390, 3, 0],
        ],
        // A sentinel, a weight that does not exist, rows that do not exist.
        vec![
            [0, 5, u32::MAX, 0],
            [5, 9, 4, 0],
            [395, 401, 0, 0],
            [10, 400, 2, 0],
        ],
        vec![[0, 0, 0, 0]; 4],
    ];
    let case = |list: &[[u32; 4]]| {
        let mut case = Case::new(WeightFormat::Bf16, &[100; 4], 264, 320, 0);
        case.groups = list
            .iter()
            .filter(|[start, end, weight, _]| start < end && *end <= 400 && *weight < 4)
            .map(|&[start, end, weight, _]| GroupRange {
                weight: weight as usize,
                start: start as usize,
                end: end as usize,
            })
            .collect();
        case
    };
    let (n, k, rows) = (264, 320, 400);
    let first = case(&lists[0]);
    let (codes, _) = first.device_bytes();
    let device = DeviceBuffer::from_slice(&gpu, &codes).unwrap();
    let mut pinned = PinnedBuffer::alloc(&gpu, codes.len()).unwrap();
    pinned.as_mut_slice()[..codes.len()].copy_from_slice(&codes);
    let values: Vec<bf16> = first.a.iter().map(|&x| bf16::from_f32(x)).collect();
    let values = DeviceBuffer::from_slice(&gpu, &values).unwrap();
    let a = Activations::Bf16(DeviceMatrix::new(&values, rows, k, k).unwrap());
    let stride = n + GUARD_COLUMNS;
    for (memory, transfer) in [
        (WeightMemory::Device(&device), Transfer::Resident),
        (WeightMemory::Pinned(&pinned), Transfer::Direct),
    ] {
        let mut words = DeviceBuffer::from_slice(&gpu, lists[0].as_flattened()).unwrap();
        let mut out = DeviceBuffer::<f32>::alloc(&gpu, rows * stride).unwrap();
        let mut gemm = GroupedGemm::new(&gpu);
        let b = Weights::new(memory, WeightFormat::Bf16, 4, n, k, None).unwrap();
        let mut enqueue =
            |words: &DeviceBuffer<u32>, out: &mut DeviceBuffer<f32>, stream: &Stream| {
                let groups = DeviceGroups::new(words, 4, 200)?;
                let mut d = Output::F32(DeviceMatrixMut::new(out, rows, n, stride)?);
                // SAFETY: everything lives until the end of the test's loop, after a wait.
                unsafe { gemm.enqueue_listed(&a, &b, &groups, &mut d, transfer, stream) }
            };
        // The first call allocates, which a recording cannot.
        enqueue(&words, &mut out, &stream).unwrap();
        stream.synchronize().unwrap();
        let graph = stream
            .capture(|stream| enqueue(&words, &mut out, stream).map(drop))
            .unwrap();
        for list in lists.iter().chain(&lists) {
            words.copy_from_host_at(0, list.as_flattened()).unwrap();
            out.fill_bytes(0xff).unwrap();
            // SAFETY: what was recorded is still there.
            unsafe { graph.launch(&stream).unwrap() };
            stream.synchronize().unwrap();
            let got = out.to_vec().unwrap();
            case(list).check(&format!("{transfer} graph"), &got, false);
        }
    }
}

/// Bad arguments are errors that name the operand, before anything runs.
#[test]
fn bad_arguments_are_named() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let stream = Stream::new(&gpu).unwrap();
    let device = DeviceBuffer::<u8>::zeroed(&gpu, 2 * 64 * 64 * 2).unwrap();
    let values = DeviceBuffer::<bf16>::zeroed(&gpu, 8 * 64).unwrap();
    let mut out = DeviceBuffer::<f32>::zeroed(&gpu, 8 * 64).unwrap();
    let memory = WeightMemory::Device(&device);
    let format = WeightFormat::Bf16;
    assert!(matches!(
        Weights::new(memory, format, 3, 64, 64, None),
        Err(GemmError::Shape {
            what: "weights",
            ..
        })
    ));
    assert!(matches!(
        Weights::new(memory, WeightFormat::Int8PerRow, 1, 64, 64, None),
        Err(GemmError::Shape {
            what: "weight scales",
            ..
        })
    ));
    assert!(DeviceMatrix::new(&values, 8, 64, 63).is_err());
    assert!(DeviceMatrix::new(&values, 9, 64, 64).is_err());
    assert!(DeviceMatrix::new(&values, usize::MAX, 64, 64).is_err());
    let b = Weights::new(memory, format, 2, 64, 64, None).unwrap();
    let a = Activations::Bf16(DeviceMatrix::new(&values, 8, 64, 64).unwrap());
    let mut gemm = GroupedGemm::new(&gpu);
    let mut run = |groups: &[GroupRange], transfer| {
        let mut d = Output::F32(DeviceMatrixMut::new(&mut out, 8, 64, 64).unwrap());
        gemm.run(&a, &b, groups, &mut d, transfer, &stream)
    };
    let group = |weight, start, end| GroupRange { weight, start, end };
    assert!(matches!(
        run(&[group(2, 0, 1)], Transfer::Auto),
        Err(GemmError::Group { index: 0, .. })
    ));
    assert!(matches!(
        run(&[group(0, 0, 9)], Transfer::Auto),
        Err(GemmError::Group { index: 0, .. })
    ));
    assert!(matches!(
        run(&[group(0, 0, 4), group(1, 3, 5)], Transfer::Auto),
        Err(GemmError::Group { index: 1, .. })
    ));
    assert!(matches!(
        run(&[group(0, 0, 4)], Transfer::Direct),
        Err(GemmError::Unsupported {
            what: "transfer",
            ..
        })
    ));
    assert!(run(&[group(0, 0, 4)], Transfer::Auto).is_ok());
    // Scale rows so far apart that the kernel's 32-bit offsets would wrap.
    let apart = (1 << 22) + 1;
    let far = DeviceBuffer::<f32>::zeroed(&gpu, apart + 1).unwrap();
    let scales = DeviceMatrix::new(&far, 2, 1, apart).unwrap();
    assert!(matches!(
        Weights::new(memory, WeightFormat::Int8PerRow, 1, 2, 64, Some(scales)),
        Err(GemmError::Unsupported {
            what: "weight scales",
            ..
        })
    ));
}
