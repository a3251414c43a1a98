//! Who computes what of a layer: the seam between policies and execution.
//!
//! An expert's work is a rectangle, its packed rows by its slices of 128 of the
//! intermediate dimension I. A [`Division`] cuts each rectangle into [`ExpertShare`]s: the
//! rows into consecutive ranges, and for each range the slices between the CPU, which takes
//! the first ones, and the GPUs, which take the rest.
//!
//! ```text
//!            slices 0 .. c     c .. S
//! rows 0..a |  CPU           | GPU      |   one share
//! rows a..m |                  GPU      |   another
//! ```
//!
//! Whole experts, rows of a hot expert and slices of every expert are thus one form.

use std::fmt;
use std::ops::Range;

/// What the policy may know of one expert in a forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLoad {
    /// The expert.
    pub expert: u32,
    /// Rows routed to it, at least 1.
    pub rows: u32,
    /// Slices that lie in HBM already: the last ones, or none.
    pub resident: Range<u32>,
}

/// Shape of the layer, as far as a division depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Slices of each expert, S.
    pub slices: u32,
    /// Bytes of one slice.
    pub slice_bytes: u64,
    /// Model width H.
    pub hidden: u32,
    /// Tokens of this forward.
    pub tokens: u32,
    /// Devices that can take work; 0 leaves all of it to the CPU.
    pub devices: u32,
    /// Whether x lies on a device, so that rows for the CPU cross the link first.
    pub x_on_device: bool,
}

/// What each side computes of some rows of one expert.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ExpertShare {
    /// The expert.
    pub expert: u32,
    /// Of this expert's packed rows, counted from its first.
    pub rows: Range<u32>,
    /// The CPU's slices: `0..c`.
    pub cpu_slices: Range<u32>,
    /// The GPUs' slices: `c..S`.
    pub gpu_slices: Range<u32>,
}

impl ExpertShare {
    /// All slices of some rows on the CPU.
    pub fn cpu(expert: u32, rows: Range<u32>, slices: u32) -> Self {
        Self::split(expert, rows, slices, slices)
    }

    /// All slices of some rows on the GPU.
    pub fn gpu(expert: u32, rows: Range<u32>, slices: u32) -> Self {
        Self::split(expert, rows, 0, slices)
    }

    /// The first `cpu` of `slices` slices on the CPU, the others on the GPU.
    pub fn split(expert: u32, rows: Range<u32>, cpu: u32, slices: u32) -> Self {
        let cpu = cpu.min(slices);
        Self {
            expert,
            rows,
            cpu_slices: 0..cpu,
            gpu_slices: cpu..slices,
        }
    }
}

/// A whole layer's division: each (row, slice) of each routed expert on exactly one side.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Division {
    /// Experts ascending, then rows ascending.
    pub shares: Vec<ExpertShare>,
}

/// A division that does not cover the layer's work exactly once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DivisionError {
    /// The shares name other experts than the routing, or in another order.
    #[error("share {share} is of expert {found}, expected {expected:?}")]
    Expert {
        /// Index of the share.
        share: usize,
        /// The expert named.
        found: u32,
        /// The expert whose rows come next; `None` after the last.
        expected: Option<u32>,
    },
    /// An expert's row ranges leave a gap, overlap, are empty or go past its rows.
    #[error("expert {expert}: a share covers rows {found:?}, expected a part of {expected:?}")]
    Rows {
        /// The expert.
        expert: u32,
        /// Rows of the share.
        found: Range<u32>,
        /// Rows that are still to be covered.
        expected: Range<u32>,
    },
    /// The two sides' slices are not `0..c` and `c..slices`.
    #[error(
        "expert {expert}: slices {cpu:?} on the CPU and {gpu:?} on the GPU do not make 0..{slices}"
    )]
    Slices {
        /// The expert.
        expert: u32,
        /// The CPU's.
        cpu: Range<u32>,
        /// The GPU's.
        gpu: Range<u32>,
        /// Slices of an expert.
        slices: u32,
    },
    /// Work for a GPU in a layer that has none.
    #[error("expert {expert} has work for a GPU, but the layer has none")]
    NoDevice {
        /// The expert.
        expert: u32,
    },
    /// Rows of an expert that no share covers.
    #[error("expert {expert}: rows {rows:?} are in no share")]
    Uncovered {
        /// The expert.
        expert: u32,
        /// The rows left over.
        rows: Range<u32>,
    },
}

impl Division {
    /// Checks that the shares cover `loads` (experts ascending) exactly once.
    ///
    /// # Errors
    /// The first share that does not fit, or the first expert left uncovered.
    pub fn validate(&self, loads: &[ExpertLoad], shape: &LayerShape) -> Result<(), DivisionError> {
        let mut loads = loads.iter().filter(|load| load.rows > 0);
        let mut current = loads.next();
        let mut covered = 0;
        for (i, share) in self.shares.iter().enumerate() {
            let expert = share.expert;
            let load =
                current
                    .filter(|load| load.expert == expert)
                    .ok_or(DivisionError::Expert {
                        share: i,
                        found: expert,
                        expected: current.map(|load| load.expert),
                    })?;
            let rows = &share.rows;
            if rows.start != covered || rows.end <= rows.start || rows.end > load.rows {
                return Err(DivisionError::Rows {
                    expert,
                    found: rows.clone(),
                    expected: covered..load.rows,
                });
            }
            let (cpu, gpu) = (&share.cpu_slices, &share.gpu_slices);
            if cpu.start != 0
                || cpu.end != gpu.start
                || gpu.start > gpu.end
                || gpu.end != shape.slices
            {
                return Err(DivisionError::Slices {
                    expert,
                    cpu: cpu.clone(),
                    gpu: gpu.clone(),
                    slices: shape.slices,
                });
            }
            if shape.devices == 0 && !gpu.is_empty() {
                return Err(DivisionError::NoDevice { expert });
            }
            covered = rows.end;
            if covered == load.rows {
                current = loads.next();
                covered = 0;
            }
        }
        match current {
            None => Ok(()),
            Some(load) => Err(DivisionError::Uncovered {
                expert: load.expert,
                rows: covered..load.rows,
            }),
        }
    }

    /// Totals of both sides.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        let mut expert = None;
        for share in &self.shares {
            let rows = u64::from(share.rows.end - share.rows.start);
            summary.experts += usize::from(expert != Some(share.expert));
            expert = Some(share.expert);
            for (side, slices) in [
                (&mut summary.cpu, &share.cpu_slices),
                (&mut summary.gpu, &share.gpu_slices),
            ] {
                if !slices.is_empty() {
                    side.shares += 1;
                    side.slices += slices.len() as u64;
                    side.row_slices += rows * slices.len() as u64;
                }
            }
        }
        summary
    }
}

/// Work of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SideTotals {
    /// Shares with slices on this side.
    pub shares: usize,
    /// Slices read, once for each share.
    pub slices: u64,
    /// Slices times rows.
    pub row_slices: u64,
}

/// Work of a division.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Experts with rows.
    pub experts: usize,
    /// The CPU's part.
    pub cpu: SideTotals,
    /// The GPUs' part.
    pub gpu: SideTotals,
}

impl fmt::Display for Division {
    /// One line of totals, then one line for each run of experts that are cut alike.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = self.summary();
        writeln!(
            f,
            "{} experts: cpu {} slices in {} shares, gpu {} slices in {} shares",
            totals.experts,
            totals.cpu.slices,
            totals.cpu.shares,
            totals.gpu.slices,
            totals.gpu.shares
        )?;
        let alike = |a: &ExpertShare, b: &ExpertShare| {
            a.cpu_slices == b.cpu_slices && a.rows == b.rows && a.gpu_slices == b.gpu_slices
        };
        for run in self.shares.chunk_by(alike) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            match first.expert == last.expert {
                true => write!(f, "  expert {}", first.expert)?,
                false => write!(f, "  experts {}..={}", first.expert, last.expert)?,
            }
            writeln!(
                f,
                " rows {:?}: cpu {:?}, gpu {:?}",
                first.rows, first.cpu_slices, first.gpu_slices
            )?;
        }
        Ok(())
    }
}

/// How a layer's work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Everything on the CPU.
    CpuOnly,
    /// Everything on the GPUs.
    GpuOnly,
    /// Experts with more than `m_cpu` rows on the GPUs, the others on the CPU.
    Static {
        /// Most rows of an expert that stays on the CPU.
        m_cpu: u32,
    },
    /// By predicted time.
    Adaptive,
}

/// Rows up to which an expert stays on the CPU under [`PolicyKind::Static`] unless told
/// otherwise: its weights cost more on the link than the CPU needs to use them in place.
pub const STATIC_M_CPU: u32 = 16;

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CpuOnly => f.write_str("cpu-only"),
            Self::GpuOnly => f.write_str("gpu-only"),
            Self::Static { m_cpu } => write!(f, "static-{m_cpu}"),
            Self::Adaptive => f.write_str("adaptive"),
        }
    }
}

/// What a forward took, for a policy that learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct ForwardTimes {
    /// From the start of the CPU's part to its end; 0 without one. The GPU worked meanwhile
    /// if its time is not 0.
    pub cpu_seconds: f64,
    /// From the first copy or kernel of the GPUs to their last, before the join; 0 without one.
    /// Of several GPUs the longest.
    pub gpu_seconds: f64,
    /// The whole forward on the host's clock.
    pub total_seconds: f64,
    /// Weight bytes that the CPU read.
    pub cpu_bytes: u64,
    /// Weight bytes that crossed the links.
    pub streamed_bytes: u64,
    /// Weight bytes that the GPUs read from HBM where they already lay.
    pub resident_bytes: u64,
}

/// A policy: divides each forward and may learn from what it took.
pub trait Divide: Send {
    /// Divides the work of `loads` (experts ascending, each with rows).
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division;

    /// Reports what the division last made for this shape took.
    fn observe(&mut self, division: &Division, shape: &LayerShape, times: &ForwardTimes) {
        let _ = (division, shape, times);
    }
}

/// The policies that follow one rule and learn nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FixedPolicy {
    /// Everything on the CPU.
    CpuOnly,
    /// Everything on the GPUs.
    GpuOnly,
    /// Experts with more rows than this on the GPUs.
    Static(u32),
    /// This share of all slices on the GPUs, spread evenly over the experts.
    Fraction(f64),
}

impl Divide for FixedPolicy {
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
        let slices = shape.slices;
        let mut owed = 0.0;
        let share = |load: &ExpertLoad| {
            let rows = 0..load.rows;
            let on_cpu = match *self {
                _ if shape.devices == 0 => slices,
                Self::CpuOnly => slices,
                Self::GpuOnly => 0,
                Self::Static(m_cpu) if load.rows > m_cpu => 0,
                Self::Static(_) => slices,
                Self::Fraction(fraction) => {
                    // What rounding kept from one expert the next ones get.
                    owed += fraction.clamp(0.0, 1.0) * f64::from(slices);
                    let on_gpu = (owed + 0.5).floor().clamp(0.0, f64::from(slices));
                    owed -= on_gpu;
                    slices - on_gpu as u32
                }
            };
            ExpertShare::split(load.expert, rows, on_cpu, slices)
        };
        Division {
            shares: loads.iter().filter(|l| l.rows > 0).map(share).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> LayerShape {
        LayerShape {
            slices: 6,
            slice_bytes: 786_432,
            hidden: 2048,
            tokens: 4,
            devices: 1,
            x_on_device: true,
        }
    }

    fn loads(rows: &[u32]) -> Vec<ExpertLoad> {
        (0..)
            .zip(rows)
            .map(|(expert, &rows)| ExpertLoad {
                expert,
                rows,
                resident: 6..6,
            })
            .collect()
    }

    #[test]
    fn fixed_policies_cover_the_work_and_follow_their_rule() {
        let loads = loads(&[1, 40, 0, 16, 17, 3]);
        for devices in [0, 1, 2] {
            let shape = LayerShape { devices, ..shape() };
            for mut policy in [
                FixedPolicy::CpuOnly,
                FixedPolicy::GpuOnly,
                FixedPolicy::Static(STATIC_M_CPU),
                FixedPolicy::Fraction(0.4),
            ] {
                let division = policy.divide(&loads, &shape);
                division.validate(&loads, &shape).unwrap();
                assert_eq!(division.shares.len(), 5);
                let gpu = division.summary().gpu.slices;
                let wanted = match policy {
                    _ if devices == 0 => 0,
                    FixedPolicy::CpuOnly => 0,
                    FixedPolicy::GpuOnly => 30,
                    FixedPolicy::Static(_) => 12,
                    FixedPolicy::Fraction(_) => 12,
                };
                assert_eq!(gpu, wanted, "{policy:?}");
            }
        }
    }

    #[test]
    fn a_fraction_is_met_to_half_a_slice() {
        let loads = loads(&[1; 37]);
        for percent in 0..=100 {
            let fraction = f64::from(percent) / 100.0;
            let division = FixedPolicy::Fraction(fraction).divide(&loads, &shape());
            let wanted = fraction * 6.0 * 37.0;
            let got = division.summary().gpu.slices as f64;
            assert!((got - wanted).abs() <= 0.5 + 1e-9, "{percent} %: {got}");
        }
    }

    #[test]
    fn what_does_not_cover_the_work_once_is_refused() {
        let loads = loads(&[4, 0, 2]);
        let good = vec![
            ExpertShare::cpu(0, 0..1, 6),
            ExpertShare::split(0, 1..4, 2, 6),
            ExpertShare::gpu(2, 0..2, 6),
        ];
        let check = |shares: &[ExpertShare], shape| {
            Division {
                shares: shares.to_vec(),
            }
            .validate(&loads, &shape)
        };
        assert_eq!(check(&good, shape()), Ok(()));
        assert!(matches!(
            check(
                &good,
                LayerShape {
                    devices: 0,
                    ..shape()
                }
            ),
            Err(DivisionError::NoDevice { expert: 0 })
        ));
        let mut uncovered = good.clone();
        uncovered.pop();
        assert!(matches!(
            check(&uncovered, shape()),
            Err(DivisionError::Uncovered { expert: 2, .. })
        ));
        let edits: [fn(&mut ExpertShare); 6] = [
            |s| s.rows = 2..4,
            |s| s.rows = 1..5,
            |s| s.rows = 1..1,
            |s| s.cpu_slices = 1..2,
            |s| s.gpu_slices = 3..6,
            |s| s.gpu_slices = 2..5,
        ];
        for edit in edits {
            let mut shares = good.clone();
            edit(&mut shares[1]);
            assert!(check(&shares, shape()).is_err(), "{:?}", shares[1]);
        }
        let mut other = good.clone();
        other[2].expert = 1;
        assert!(matches!(
            check(&other, shape()),
            Err(DivisionError::Expert {
                share: 2,
                found: 1,
                expected: Some(2)
            })
        ));
        let mut more = good;
        more.push(ExpertShare::cpu(3, 0..1, 6));
        assert!(check(&more, shape()).is_err());
    }

    #[test]
    fn a_division_prints_in_runs() {
        let division = FixedPolicy::Fraction(0.5).divide(&loads(&[2; 8]), &shape());
        assert_eq!(
            division.to_string(),
            "8 experts: cpu 24 slices in 8 shares, gpu 24 slices in 8 shares\n  experts 0..=7 rows 0..2: cpu 0..3, gpu 3..6\n"
        );
    }
}
