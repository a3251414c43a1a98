//! The entry points by packing: right against f64, and nobody's rows untouched.

use asym_gemm::driver::{DeviceBuffer, Gpu, PinnedBuffer, Stream};
use asym_gemm::gemm::{
    DeviceMatrix, DeviceMatrixMut, GemmError, GroupedGemm, MatrixFormat, Output, Packing, Plan,
    WeightMemory, Weights, m_grouped_bf16_asym_gemm_nt_contiguous,
    m_grouped_bf16_asym_gemm_nt_masked, m_grouped_fp8_asym_gemm_nt_contiguous,
    m_grouped_fp8_asym_gemm_nt_masked, m_grouped_int8_asym_gemm_nt_contiguous,
    m_grouped_int8_asym_gemm_nt_masked,
};
use asym_gemm::transfer::Transfer;
use asym_gemm_formats::e4m3;
use asym_gemm_testkit::compare::{
    Bound, Output as OutputType, assert_poisoned, bits_equal, check_close,
};
use asym_gemm_testkit::generate::{Pattern, int8_codes, matrix, rounded_to_bf16};
use asym_gemm_testkit::reference::{Group, Operand, Scales, grouped_gemm};
use asym_gemm_testkit::skip;
use asym_gemm_tests::gpu;
use half::bf16;

const EXPERTS: usize = 3;
const MAX_M: usize = 72;
const ROWS: usize = EXPERTS * MAX_M;
const N: usize = 136;
const K: usize = 272;
/// Scales of K = 272.
const BLOCKS: usize = 3;
/// D's columns beyond N, which nobody may write.
const STRIDE: usize = N + 8;

const FORMATS: [MatrixFormat; 5] = [
    MatrixFormat::Bf16,
    MatrixFormat::Int8PerRow,
    MatrixFormat::Int8Block128,
    MatrixFormat::Fp8PerRow,
    MatrixFormat::Fp8Block128,
];

/// Two ranges of one expert, one of nobody (with rows that exist for none), one empty.
const RANGES: [(usize, usize); 5] = [(1, 67), (67, 70), (300, 7), (95, 200), (80, 80)];
const IDS: [i32; 5] = [2, 0, -1, 0, 1];
const COUNTS: [i32; EXPERTS] = [5, 0, MAX_M as i32];

/// How the caller says whose rows are whose.
#[derive(Clone, Copy, Debug)]
enum How<'a> {
    Contiguous(Packing<'a>),
    Masked(&'a [i32]),
}

/// Which entry points are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Bf16,
    Int8,
    Fp8,
}

/// Operands as stored; for bf16 the bytes are pairs.
struct Case {
    format: MatrixFormat,
    entry: Entry,
    a: Vec<u8>,
    a_scales: Vec<f32>,
    b: Vec<u8>,
    b_scales: Vec<f32>,
}

/// Elements of `format`, as stored.
fn elements(format: MatrixFormat, seed: u64, rows: usize) -> Vec<u8> {
    let values = || matrix(Pattern::Gaussian, seed, rows, K);
    match format {
        MatrixFormat::Bf16 => rounded_to_bf16(&values())
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        MatrixFormat::Int8PerRow | MatrixFormat::Int8Block128 => {
            let codes = int8_codes(seed, rows * K);
            codes.iter().map(|&x| x as u8).collect()
        }
        _ => values().iter().map(|&x| e4m3::encode(8.0 * x)).collect(),
    }
}

/// The values of `elements`, without scales.
fn decoded(format: MatrixFormat, bytes: &[u8]) -> Vec<f32> {
    match format {
        MatrixFormat::Bf16 => bytes
            .chunks_exact(2)
            .map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32())
            .collect(),
        MatrixFormat::Int8PerRow | MatrixFormat::Int8Block128 => {
            bytes.iter().map(|&x| f32::from(x as i8)).collect()
        }
        _ => bytes.iter().map(|&x| e4m3::decode(x)).collect(),
    }
}

fn scales(seed: u64, count: usize) -> Vec<f32> {
    let values = matrix(Pattern::Uniform, seed, 1, count);
    values.iter().map(|x| (4.0 * x).exp2() * 0.01).collect()
}

impl Case {
    fn new(format: MatrixFormat) -> Self {
        let (a_scales, b_scales) = match format {
            MatrixFormat::Bf16 => (0, 0),
            MatrixFormat::Int8PerRow | MatrixFormat::Fp8PerRow => (ROWS, EXPERTS * N),
            MatrixFormat::Int8Block128 => (ROWS * BLOCKS, EXPERTS * N * BLOCKS),
            MatrixFormat::Fp8Block128 => (ROWS * BLOCKS, EXPERTS * N.div_ceil(128) * BLOCKS),
        };
        let entry = match format {
            MatrixFormat::Bf16 => Entry::Bf16,
            MatrixFormat::Int8PerRow | MatrixFormat::Int8Block128 => Entry::Int8,
            MatrixFormat::Fp8PerRow | MatrixFormat::Fp8Block128 => Entry::Fp8,
        };
        Self {
            format,
            entry,
            a: elements(format, 1, ROWS),
            a_scales: scales(2, a_scales),
            b: elements(format, 3, EXPERTS * N),
            b_scales: scales(4, b_scales),
        }
    }

    /// Scales of a row.
    fn columns(&self) -> usize {
        match self.format {
            MatrixFormat::Int8Block128 | MatrixFormat::Fp8Block128 => BLOCKS,
            _ => 1,
        }
    }

    /// D [ROWS, STRIDE] of two calls into the same poisoned memory, waited for.
    fn run(&self, gpu: &Gpu, how: How<'_>, transfer: Transfer) -> Result<Vec<f32>, GemmError> {
        let stream = Stream::new(gpu)?;
        let mut gemm = GroupedGemm::new(gpu);
        let mut pinned = PinnedBuffer::alloc(gpu, self.b.len())?;
        pinned.as_mut_slice()[..self.b.len()].copy_from_slice(&self.b);
        let device = DeviceBuffer::from_slice(gpu, &self.b)?;
        let memory = match transfer {
            Transfer::Resident => WeightMemory::Device(&device),
            _ => WeightMemory::Pinned(&pinned),
        };
        let columns = self.columns();
        let table = |buffer, len: usize| DeviceMatrix::new(buffer, len / columns, columns, columns);
        let b_scales = DeviceBuffer::from_slice(gpu, &[&self.b_scales[..], &[0.0]].concat())?;
        let b_table = match self.b_scales.len() {
            0 => None,
            len => Some(table(&b_scales, len)?),
        };
        let b = Weights::new(memory, self.format, EXPERTS, N, K, b_table)?;
        let a_scales = DeviceBuffer::from_slice(gpu, &[&self.a_scales[..], &[0.0]].concat())?;
        let a_table = table(&a_scales, self.a_scales.len())?;
        let pairs = self.a.chunks_exact(2);
        let pairs: Vec<bf16> = pairs.map(|x| bf16::from_le_bytes([x[0], x[1]])).collect();
        let signed: Vec<i8> = self.a.iter().map(|&x| x as i8).collect();
        let a_bf16 = DeviceBuffer::from_slice(gpu, &pairs)?;
        let a_int8 = DeviceBuffer::from_slice(gpu, &signed)?;
        let a_fp8 = DeviceBuffer::from_slice(gpu, &self.a)?;
        let mut out = DeviceBuffer::<f32>::alloc(gpu, ROWS * STRIDE)?;
        out.fill_bytes(0xff)?;
        let mut results = Vec::new();
        for _ in 0..2 {
            let mut d = Output::F32(DeviceMatrixMut::new(&mut out, ROWS, N, STRIDE)?);
            let bf16 = || DeviceMatrix::new(&a_bf16, ROWS, K, K);
            let int8 = || Ok::<_, GemmError>((DeviceMatrix::new(&a_int8, ROWS, K, K)?, a_table));
            let fp8 = || Ok::<_, GemmError>((DeviceMatrix::new(&a_fp8, ROWS, K, K)?, a_table));
            let (gemm, d) = (&mut gemm, &mut d);
            // SAFETY: operands live until the wait below.
            let plan: Result<Plan, GemmError> = unsafe {
                match (self.entry, how) {
                    (Entry::Bf16, How::Contiguous(packing)) => {
                        m_grouped_bf16_asym_gemm_nt_contiguous(
                            gemm,
                            bf16()?,
                            &b,
                            d,
                            packing,
                            transfer,
                            &stream,
                        )
                    }
                    (Entry::Bf16, How::Masked(counts)) => m_grouped_bf16_asym_gemm_nt_masked(
                        gemm,
                        bf16()?,
                        &b,
                        d,
                        counts,
                        transfer,
                        &stream,
                    ),
                    (Entry::Int8, How::Contiguous(packing)) => {
                        m_grouped_int8_asym_gemm_nt_contiguous(
                            gemm,
                            int8()?,
                            &b,
                            d,
                            packing,
                            transfer,
                            &stream,
                        )
                    }
                    (Entry::Int8, How::Masked(counts)) => m_grouped_int8_asym_gemm_nt_masked(
                        gemm,
                        int8()?,
                        &b,
                        d,
                        counts,
                        transfer,
                        &stream,
                    ),
                    (Entry::Fp8, How::Contiguous(packing)) => {
                        m_grouped_fp8_asym_gemm_nt_contiguous(
                            gemm,
                            fp8()?,
                            &b,
                            d,
                            packing,
                            transfer,
                            &stream,
                        )
                    }
                    (Entry::Fp8, How::Masked(counts)) => m_grouped_fp8_asym_gemm_nt_masked(
                        gemm,
                        fp8()?,
                        &b,
                        d,
                        counts,
                        transfer,
                        &stream,
                    ),
                }
            };
            stream.synchronize()?;
            assert_ne!(plan?.kernel, "none", "{how:?}");
            results.push(out.to_vec()?);
        }
        bits_equal("second call", &results[1], &results[0], STRIDE)
            .unwrap_or_else(|mismatch| panic!("{how:?}: {mismatch}"));
        Ok(results.swap_remove(0))
    }

    /// Asserts that `out` is right in `groups` and untouched elsewhere.
    fn check(&self, name: &str, out: &[f32], groups: &[Group]) {
        let written: Vec<_> = groups.iter().map(|g| g.rows.clone()).collect();
        assert_poisoned(name, out, STRIDE, &written);
        let mut inner = Vec::with_capacity(ROWS * N);
        for row in out.chunks_exact(STRIDE) {
            let (values, guard) = row.split_at(N);
            inner.extend_from_slice(values);
            assert!(
                guard.iter().all(|x| x.to_bits() == u32::MAX),
                "{name}: guard columns"
            );
        }
        let operand = |bytes: &[u8], rows, scales: &[f32], tiles| {
            let values = decoded(self.format, bytes);
            let scales = match self.format {
                MatrixFormat::Bf16 => Scales::None,
                MatrixFormat::Int8PerRow | MatrixFormat::Fp8PerRow => Scales::PerRow(scales),
                MatrixFormat::Fp8Block128 if tiles => Scales::Tile128(scales),
                _ => Scales::Block128(scales),
            };
            Operand::scaled(rows, K, &values, scales)
        };
        let a = operand(&self.a, ROWS, &self.a_scales, false);
        let b: Vec<Operand> = (0..EXPERTS)
            .map(|expert| {
                let (bytes, scales) = (self.b.len() / EXPERTS, self.b_scales.len() / EXPERTS);
                operand(
                    &self.b[expert * bytes..][..bytes],
                    N,
                    &self.b_scales[expert * scales..][..scales],
                    true,
                )
            })
            .collect();
        let want = grouped_gemm(&a, &b, groups);
        let bound = match self.entry {
            Entry::Fp8 => Bound::fp8_accumulated(OutputType::F32),
            _ => Bound::f32_accumulated(OutputType::F32),
        };
        check_close(name, &inner, &want, bound)
            .and_then(|report| report.not_vacuous())
            .unwrap_or_else(|mismatch| panic!("{mismatch}"));
    }
}

/// Ranges with expert ids: any start, any length, -1 skipped; an id for each row gives the
/// same bits; every transfer too.
#[test]
fn contiguous_packings() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let groups: Vec<Group> = RANGES
        .iter()
        .zip(IDS)
        .filter(|((start, end), id)| *id >= 0 && start < end)
        .map(|(&(start, end), id)| Group::new(start..end, id))
        .collect();
    let mut m_indices = [-1; ROWS];
    for group in &groups {
        let id = group.expert.map_or(-1, |expert| expert as i32);
        m_indices[group.rows.clone()].fill(id);
    }
    for format in FORMATS {
        let case = Case::new(format);
        let ranges = Packing::Ranges {
            ranges: &RANGES,
            experts: &IDS,
        };
        let rows = Packing::Rows {
            m_indices: &m_indices,
        };
        let want = case
            .run(&gpu, How::Contiguous(ranges), Transfer::Resident)
            .unwrap();
        case.check(&format!("{format} ranges"), &want, &groups);
        for packing in [ranges, rows] {
            for transfer in [Transfer::Staged, Transfer::Direct, Transfer::Resident] {
                let got = case.run(&gpu, How::Contiguous(packing), transfer).unwrap();
                bits_equal("packing", &got, &want, STRIDE)
                    .unwrap_or_else(|m| panic!("{format} {transfer} {packing:?}: {m}"));
            }
        }
    }
}

/// Counts from none to all of max_m rows; the others are untouched.
#[test]
fn masked_packings() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let groups = Group::masked(&COUNTS.map(|count| count as usize), MAX_M);
    let groups: Vec<Group> = groups.into_iter().filter(|g| !g.rows.is_empty()).collect();
    for format in FORMATS {
        let case = Case::new(format);
        for transfer in [Transfer::Staged, Transfer::Direct, Transfer::Resident] {
            let out = case.run(&gpu, How::Masked(&COUNTS), transfer).unwrap();
            case.check(&format!("{format} {transfer} masked"), &out, &groups);
        }
    }
}

/// What cannot be computed is refused before anything is launched, by name.
#[test]
fn bad_packings_are_named() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let case = Case::new(MatrixFormat::Bf16);
    let run = |how| case.run(&gpu, how, Transfer::Resident).unwrap_err();
    let ranges = |ranges, experts| run(How::Contiguous(Packing::Ranges { ranges, experts }));
    assert!(matches!(
        ranges(&[(0, 1), (1, 2)], &[0, 3]),
        GemmError::Group { index: 1, .. }
    ));
    assert!(matches!(
        ranges(&[(0, 5), (9, 9), (4, 6)], &[0, -1, 1]),
        GemmError::Group { index: 2, .. }
    ));
    assert!(matches!(
        ranges(&[(0, ROWS + 1)], &[0]),
        GemmError::Group { index: 0, .. }
    ));
    let mut m_indices = [0; ROWS];
    m_indices[7] = -2;
    let rows = |m_indices| run(How::Contiguous(Packing::Rows { m_indices }));
    assert!(matches!(rows(&m_indices), GemmError::Row { row: 7, .. }));
    assert!(matches!(
        rows(&m_indices[..ROWS - 1]),
        GemmError::Shape {
            what: "m_indices",
            ..
        }
    ));
    assert!(matches!(
        run(How::Masked(&[0, MAX_M as i32 + 1, 0])),
        GemmError::Group { index: 1, .. }
    ));
    assert!(matches!(
        run(How::Masked(&[1, 1])),
        GemmError::Shape {
            what: "masked_m",
            ..
        }
    ));
    for (format, entry) in [
        (MatrixFormat::Bf16, Entry::Fp8),
        (MatrixFormat::Fp8PerRow, Entry::Int8),
        (MatrixFormat::Int8PerRow, Entry::Fp8),
    ] {
        let case = Case {
            entry,
            ..Case::new(format)
        };
        let error = case.run(&gpu, How::Masked(&COUNTS), Transfer::Resident);
        assert!(
            matches!(
                error,
                Err(GemmError::Shape {
                    what: "weights",
                    ..
                })
            ),
            "{format} to {entry:?}: {error:?}"
        );
    }
}
