//! The fp8 grouped GEMM against f64.

use asym_gemm::driver::{DeviceBuffer, Gpu, PinnedBuffer, Stream};
use asym_gemm::gemm::{
    Activations, DeviceMatrix, DeviceMatrixMut, GemmError, GroupRange, GroupedGemm, MatrixFormat,
    Output, WeightMemory, Weights,
};
use asym_gemm::transfer::Transfer;
use asym_gemm_formats::e4m3;
use asym_gemm_testkit::compare::{
    Bound, Output as OutputType, assert_poisoned, bits_equal, check_close,
};
use asym_gemm_testkit::generate::{Pattern, matrix, row_counts};
use asym_gemm_testkit::reference::{Group, Operand, Scales, grouped_gemm};
use asym_gemm_testkit::skip;
use asym_gemm_tests::gpu;

/// Columns of D beyond N, which nobody may write.
const GUARD_COLUMNS: usize = 8;
/// K and weight rows that share a scale.
const BLOCK: usize = 128;
/// Ring large enough for everything here.
const RING: usize = 24 << 20;

/// How operands are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scaling {
    /// 1 x 128 of A, 128 x 128 of B.
    Blocks,
    /// Each token, each channel.
    Rows,
    /// Each token, each weight matrix.
    Matrices,
    /// All of A, all of B.
    Tensors,
}

const SCALINGS: [Scaling; 4] = [
    Scaling::Blocks,
    Scaling::Rows,
    Scaling::Matrices,
    Scaling::Tensors,
];

/// One grouped GEMM: codes and scales in host memory, and where groups lie.
struct Case {
    scaling: Scaling,
    n: usize,
    k: usize,
    rows: usize,
    groups: Vec<GroupRange>,
    a: Vec<u8>,
    a_scales: Vec<f32>,
    /// [count][n, k].
    b: Vec<Vec<u8>>,
    b_scales: Vec<f32>,
}

fn codes(seed: u64, rows: usize, k: usize) -> Vec<u8> {
    let values = matrix(Pattern::Gaussian, seed, rows, k);
    values.iter().map(|&x| e4m3::encode(8.0 * x)).collect()
}

fn scales(seed: u64, count: usize) -> Vec<f32> {
    let values = matrix(Pattern::Uniform, seed, 1, count);
    values.iter().map(|x| (4.0 * x).exp2() * 0.01).collect()
}

impl Case {
    /// Groups of `counts` rows, one for each weight, with one unused row before each.
    fn new(scaling: Scaling, counts: &[usize], n: usize, k: usize) -> Self {
        let mut groups = Vec::new();
        let mut start = 0;
        for (weight, &count) in counts.iter().enumerate() {
            start += 1;
            let end = start + count;
            groups.push(GroupRange { weight, start, end });
            start = end;
        }
        let rows = start + 1;
        let (count, blocks) = (counts.len(), k.div_ceil(BLOCK));
        let (a_scales, b_scales) = match scaling {
            Scaling::Blocks => (rows * blocks, count * n.div_ceil(BLOCK) * blocks),
            Scaling::Rows => (rows, count * n),
            Scaling::Matrices => (rows, count),
            Scaling::Tensors => (1, 1),
        };
        Self {
            scaling,
            n,
            k,
            rows,
            groups,
            a: codes(1, rows, k),
            a_scales: scales(2, a_scales),
            b: (0..count).map(|w| codes(100 + w as u64, n, k)).collect(),
            b_scales: scales(3, b_scales),
        }
    }

    fn format(&self) -> MatrixFormat {
        match self.scaling {
            Scaling::Blocks => MatrixFormat::Fp8Block128,
            _ => MatrixFormat::Fp8PerRow,
        }
    }

    /// D as f32 [rows, n + GUARD_COLUMNS], poisoned where nothing was written.
    fn run(&self, gpu: &Gpu, transfer: Transfer) -> Vec<f32> {
        let stream = Stream::new(gpu).unwrap();
        let (n, k, count) = (self.n, self.k, self.b.len());
        let bytes: Vec<u8> = self.b.concat();
        let device = DeviceBuffer::from_slice(gpu, &bytes).unwrap();
        let mut pinned = PinnedBuffer::alloc(gpu, bytes.len()).unwrap();
        pinned.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        let memory = match transfer {
            Transfer::Resident => WeightMemory::Device(&device),
            _ => WeightMemory::Pinned(&pinned),
        };
        let (a, a_scales, b_scales) = (
            DeviceBuffer::from_slice(gpu, &self.a).unwrap(),
            DeviceBuffer::from_slice(gpu, &self.a_scales).unwrap(),
            DeviceBuffer::from_slice(gpu, &self.b_scales).unwrap(),
        );
        let columns = match self.scaling {
            Scaling::Blocks => k.div_ceil(BLOCK),
            _ => 1,
        };
        let table = |scales, len: usize| DeviceMatrix::new(scales, len / columns, columns, columns);
        let b = Weights::new(
            memory,
            self.format(),
            count,
            n,
            k,
            Some(table(&b_scales, self.b_scales.len()).unwrap()),
        );
        let a = Activations::Fp8 {
            codes: DeviceMatrix::new(&a, self.rows, k, k).unwrap(),
            scales: table(&a_scales, self.a_scales.len()).unwrap(),
        };
        let stride = n + GUARD_COLUMNS;
        let mut out = DeviceBuffer::<f32>::alloc(gpu, self.rows * stride).unwrap();
        out.fill_bytes(0xff).unwrap();
        let mut gemm = GroupedGemm::with_ring_bytes(gpu, RING);
        {
            let mut d = Output::F32(DeviceMatrixMut::new(&mut out, self.rows, n, stride).unwrap());
            gemm.run(&a, &b.unwrap(), &self.groups, &mut d, transfer, &stream)
                .unwrap();
        }
        out.to_vec().unwrap()
    }

    /// Asserts that `out` is right in the groups and untouched elsewhere.
    fn check(&self, name: &str, out: &[f32]) {
        let (n, k) = (self.n, self.k);
        let stride = n + GUARD_COLUMNS;
        let written: Vec<_> = self.groups.iter().map(|g| g.start..g.end).collect();
        assert_poisoned(name, out, stride, &written);
        let mut inner = Vec::with_capacity(self.rows * n);
        for row in out.chunks_exact(stride) {
            inner.extend_from_slice(&row[..n]);
            let guard = &row[n..];
            assert!(
                guard.iter().all(|x| x.to_bits() == u32::MAX),
                "{name}: guard columns"
            );
        }
        let decoded =
            |codes: &[u8]| -> Vec<f32> { codes.iter().map(|&c| e4m3::decode(c)).collect() };
        let a_scales = match self.scaling {
            Scaling::Tensors => self.a_scales.repeat(self.rows),
            _ => self.a_scales.clone(),
        };
        let a_scales = match self.scaling {
            Scaling::Blocks => Scales::Block128(&a_scales),
            _ => Scales::PerRow(&a_scales),
        };
        let a = Operand::scaled(self.rows, k, &decoded(&self.a), a_scales);
        let b: Vec<_> = self
            .b
            .iter()
            .enumerate()
            .map(|(w, codes)| {
                let part = self.b_scales.len() / self.b.len();
                let own = match self.scaling {
                    Scaling::Blocks | Scaling::Rows => {
                        self.b_scales[w * part..(w + 1) * part].to_vec()
                    }
                    Scaling::Matrices => vec![self.b_scales[w]; n],
                    Scaling::Tensors => vec![self.b_scales[0]; n],
                };
                let scales = match self.scaling {
                    Scaling::Blocks => Scales::Tile128(&own),
                    _ => Scales::PerRow(&own),
                };
                Operand::scaled(n, k, &decoded(codes), scales)
            })
            .collect();
        let groups: Vec<_> = self
            .groups
            .iter()
            .map(|g| Group::new(g.start..g.end, g.weight as i32))
            .collect();
        let want = grouped_gemm(&a, &b, &groups);
        let report = check_close(name, &inner, &want, Bound::fp8_accumulated(OutputType::F32));
        report
            .and_then(|report| report.not_vacuous())
            .unwrap_or_else(|mismatch| panic!("{mismatch}"));
    }
}

/// Every number of rows around the tiles, each way of scaling, each transfer to the bit.
#[test]
fn every_row_count_and_transfer() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let all: Vec<usize> = row_counts().collect();
    let small: Vec<usize> = all.iter().copied().filter(|&c| c <= 64).collect();
    for scaling in SCALINGS {
        for counts in [&small, &all] {
            let case = Case::new(scaling, counts, 264, 272);
            let want = case.run(&gpu, Transfer::Resident);
            case.check(&format!("{scaling:?}, {} counts", counts.len()), &want);
            for transfer in [Transfer::Staged, Transfer::Direct] {
                let got = case.run(&gpu, transfer);
                bits_equal("transfer", &got, &want, 264 + GUARD_COLUMNS)
                    .unwrap_or_else(|m| panic!("{scaling:?} {transfer}: {m}"));
            }
        }
    }
}

/// Odd N, K that ends inside a block or inside a step, long K.
#[test]
fn odd_shapes() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for scaling in SCALINGS {
        for (n, k) in [
            (1, 16),
            (33, 64),
            (127, 144),
            (129, 128),
            (320, 1152),
            (704, 768),
            (40, 7168),
        ] {
            for counts in [&[3, 0, 65][..], &[1, 130, 2]] {
                let case = Case::new(scaling, counts, n, k);
                let name = format!("{scaling:?} N={n} K={k} {counts:?}");
                case.check(&name, &case.run(&gpu, Transfer::Resident));
            }
        }
    }
}

/// Scales of the wrong shape are refused by name.
#[test]
fn bad_scales_are_named() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let device = DeviceBuffer::<u8>::zeroed(&gpu, 2 * 256 * 256).unwrap();
    let values = DeviceBuffer::<f32>::zeroed(&gpu, 1024).unwrap();
    let make = |format, rows, columns| {
        let scales = DeviceMatrix::new(&values, rows, columns, columns).unwrap();
        Weights::new(
            WeightMemory::Device(&device),
            format,
            2,
            256,
            256,
            Some(scales),
        )
    };
    for (rows, columns) in [(2 * 256, 1), (2, 1), (1, 1)] {
        assert!(make(MatrixFormat::Fp8PerRow, rows, columns).is_ok());
        assert!(make(MatrixFormat::Fp8Block128, rows, columns).is_err());
    }
    assert!(make(MatrixFormat::Fp8Block128, 4, 2).is_ok());
    assert!(matches!(
        make(MatrixFormat::Fp8PerRow, 4, 2),
        Err(GemmError::Shape {
            what: "weight scales",
            ..
        })
    ));
}
