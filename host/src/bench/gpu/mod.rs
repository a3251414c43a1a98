//! Grouped GEMM on the GPU: staged, direct and resident weights against this machine's limits.
//!
//! [`run`] takes a [`Plan`], which is data. Limits come first ([`LinkRates`]). Each case is
//! warmed up, then timed as the median of several measurements between events, and sampled
//! elements of its result are compared with f64; what is wrong has no time. Resident calls are
//! enqueued ten at a time, so that what is measured is the GPU and not the host. Operands are
//! random.

mod data;
mod report;

pub use report::{CSV_COLUMNS, Report, Row};

use self::data::{Data, Resident, repeated};
use super::Machine;
use super::cpu::{Progress, Skipped};
use crate::driver::{DeviceBuffer, DriverError, Event, Gpu, PinnedBuffer, Stream};
use crate::gemm::{
    DeviceMatrixMut, GemmError, GroupRange, GroupedGemm, MatrixFormat, Output, WeightMemory,
    Weights,
};
#[cfg(doc)]
use crate::transfer::LinkRates;
use crate::transfer::{Transfer, measure_link};
use half::bf16;
use std::fmt;
use std::time::Instant;

/// Every format of B.
pub const FORMATS: [MatrixFormat; 5] = [
    MatrixFormat::Bf16,
    MatrixFormat::Int8PerRow,
    MatrixFormat::Int8Block128,
    MatrixFormat::Fp8PerRow,
    MatrixFormat::Fp8Block128,
];

/// Every way of the weights to the GPU.
pub const TRANSFERS: [Transfer; 3] = [Transfer::Staged, Transfer::Direct, Transfer::Resident];

/// Bytes with which the link is measured.
const LINK_BYTES: usize = 512 << 20;

/// What to measure: every combination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Experts, N and K.
    pub shapes: Vec<[usize; 3]>,
    /// Formats of B.
    pub formats: Vec<MatrixFormat>,
    /// Rows of each expert; none is 0.
    pub rows: Vec<usize>,
    /// Ways of the weights.
    pub transfers: Vec<Transfer>,
}

impl Plan {
    /// Many experts and wide experts, from one row to thousands.
    pub fn full() -> Self {
        Self {
            shapes: vec![[32, 4096, 2048], [16, 4096, 7168]],
            formats: FORMATS.to_vec(),
            rows: vec![1, 16, 64, 256, 1024, 4096],
            transfers: TRANSFERS.to_vec(),
        }
    }

    /// The first shape in bf16 and the two block formats, few rows and many.
    pub fn quick() -> Self {
        Self {
            shapes: vec![[32, 4096, 2048]],
            formats: vec![
                MatrixFormat::Bf16,
                MatrixFormat::Int8Block128,
                MatrixFormat::Fp8Block128,
            ],
            rows: vec![16, 1024],
            transfers: TRANSFERS.to_vec(),
        }
    }

    /// The cases of one shape and format.
    fn cases(&self, [experts, n, k]: [usize; 3], format: MatrixFormat) -> Vec<Case> {
        let case = |m, transfer| Case {
            experts,
            n,
            k,
            format,
            m,
            transfer,
        };
        let of_rows = |&m: &usize| {
            self.transfers
                .iter()
                .map(move |&transfer| case(m, transfer))
        };
        self.rows.iter().flat_map(of_rows).collect()
    }
}

/// One grouped GEMM: each of `experts` has `m` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Case {
    /// Weight matrices.
    pub experts: usize,
    /// Columns of D.
    pub n: usize,
    /// Columns of A.
    pub k: usize,
    /// Format of B.
    #[serde(serialize_with = "as_text")]
    pub format: MatrixFormat,
    /// Rows of each expert.
    pub m: usize,
    /// Way of the weights.
    pub transfer: Transfer,
}

/// The name that command line and records use.
fn as_text<S: serde::Serializer>(format: &MatrixFormat, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(format.name())
}

impl Case {
    fn weight_bytes(&self) -> usize {
        self.experts * self.n * self.k * self.format.element_bytes()
    }

    fn ops(&self) -> f64 {
        2.0 * (self.experts * self.m) as f64 * (self.n * self.k) as f64
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            experts,
            n,
            k,
            format,
            m,
            transfer,
        } = self;
        write!(f, "{format} {experts}x[{n}, {k}] m={m} {transfer}")
    }
}

/// Runs the plan. `progress` is told what comes next.
///
/// # Errors
/// If the driver fails or the GPU lacks a kernel. A case that computes something wrong, or for
/// which there is no memory, is no error: the report names it.
pub fn run(
    plan: &Plan,
    gpu: &Gpu,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Report, GemmError> {
    let begin = Instant::now();
    let mut report = Report {
        machine: Machine::read(1),
        gpu: gpu.name().to_owned(),
        link: measure_link(gpu, LINK_BYTES)?,
        rows: Vec::new(),
        skipped: Vec::new(),
        wrong: Vec::new(),
        seconds: 0.0,
    };
    let total = plan.shapes.len() * plan.formats.len() * plan.rows.len() * plan.transfers.len();
    let mut done = 0;
    for &shape in &plan.shapes {
        for &format in &plan.formats {
            let cases = plan.cases(shape, format);
            let before = done;
            let mut next = |case: &Case| {
                let now = case.to_string();
                progress(&Progress { done, total, now });
                done += 1;
            };
            match block(gpu, &cases, &mut report, &mut next) {
                Err(GemmError::Driver(error @ DriverError::OutOfMemory { .. })) => {
                    // The case under way and those after it; none if all were done.
                    let first = (done - before).saturating_sub(1);
                    report
                        .skipped
                        .extend(cases[first..].iter().map(|case| Skipped {
                            case: case.to_string(),
                            reason: error.to_string(),
                        }));
                    done = before + cases.len();
                }
                other => other?,
            }
        }
    }
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// Runs cases of one shape and format.
fn block(
    gpu: &Gpu,
    cases: &[Case],
    report: &mut Report,
    next: &mut dyn FnMut(&Case),
) -> Result<(), GemmError> {
    let Some(&Case {
        experts,
        n,
        k,
        format,
        ..
    }) = cases.first()
    else {
        return Ok(());
    };
    let data = Data::new(format, n, k);
    let rows = experts * cases.iter().map(|case| case.m).max().unwrap_or(0);
    let weight_bytes = experts * data.b_bytes.len();
    let mut pinned = PinnedBuffer::alloc(gpu, weight_bytes)?;
    for copy in pinned.as_mut_slice()[..weight_bytes].chunks_exact_mut(data.b_bytes.len()) {
        copy.copy_from_slice(&data.b_bytes);
    }
    let device = repeated(gpu, &data.b_bytes, weight_bytes)?;
    let operands = Resident::new(gpu, &data, rows, experts)?;
    let mut out = DeviceBuffer::<bf16>::alloc(gpu, rows * n)?;
    let mut gemm = GroupedGemm::new(gpu);
    for &case in cases {
        next(&case);
        let memory = match case.transfer {
            Transfer::Resident => WeightMemory::Device(&device),
            _ => WeightMemory::Pinned(&pinned),
        };
        let b = Weights::new(
            memory,
            format,
            experts,
            n,
            k,
            operands.weight_scales(experts)?,
        )?;
        out.fill_bytes(0xff)?;
        let (kernel, ms) = time(gpu, &mut gemm, &case, &operands, &b, &mut out)?;
        match data.verify(experts * case.m, &out)? {
            None => report.rows.push(Row::new(case, kernel, ms, &report.link)),
            Some(reason) => report.wrong.push(Skipped {
                case: case.to_string(),
                reason,
            }),
        }
    }
    Ok(())
}

/// The kernel of a case and the median milliseconds of a call.
fn time(
    gpu: &Gpu,
    gemm: &mut GroupedGemm,
    case: &Case,
    operands: &Resident,
    b: &Weights<'_>,
    out: &mut DeviceBuffer<bf16>,
) -> Result<(&'static str, f64), GemmError> {
    let stream = Stream::new(gpu)?;
    let rows = case.experts * case.m;
    let groups: Vec<GroupRange> = (0..case.experts)
        .map(|weight| GroupRange {
            weight,
            start: weight * case.m,
            end: (weight + 1) * case.m,
        })
        .collect();
    let a = operands.activations(rows)?;
    let (calls, rounds) = match case.transfer {
        Transfer::Resident => (10, 7),
        _ => (1, 5),
    };
    let mut ms = Vec::with_capacity(rounds);
    let mut kernel = "";
    // The first round is the warm-up.
    for round in 0..=rounds {
        let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
        start.record(&stream)?;
        for _ in 0..calls {
            let mut d = Output::Bf16(DeviceMatrixMut::new(out, rows, case.n, case.n)?);
            // SAFETY: the caller's operands outlive the synchronisation below.
            let plan = unsafe { gemm.enqueue(&a, b, &groups, &mut d, case.transfer, &stream)? };
            kernel = plan.kernel;
        }
        end.record(&stream)?;
        stream.synchronize()?;
        if round > 0 {
            ms.push(f64::from(end.elapsed_ms(&start)?) / f64::from(calls));
        }
    }
    ms.sort_by(f64::total_cmp);
    Ok((kernel, ms[ms.len() / 2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_every_combination() {
        let plan = Plan::quick();
        let cases = plan.cases([32, 4096, 2048], MatrixFormat::Fp8Block128);
        let names: Vec<String> = cases.iter().map(Case::to_string).collect();
        assert_eq!(cases.len(), plan.rows.len() * plan.transfers.len());
        assert_eq!(names[0], "fp8-block128 32x[4096, 2048] m=16 staged");
        assert_eq!(names[5], "fp8-block128 32x[4096, 2048] m=1024 resident");
        assert_eq!(cases[0].weight_bytes(), 32 * 4096 * 2048);
        assert_eq!(cases[0].ops(), 2.0 * 16.0 * 32.0 * 4096.0 * 2048.0);
    }
}
