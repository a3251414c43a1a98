//! Seconds of a division: linear on each side, coupled where both read host memory.
//!
//! A side's time is `launch + shares·a + row_slices·b + slices·c`. While both sides work, each
//! takes longer, by its contention times the share of the time that the *other* spends on host
//! memory; when one has ended the other goes on alone:
//!
//! ```text
//! cpu   |============== slowed ======|                  cpu_s
//! gpu   |============== slowed ======|==== alone ====|  gpu_s
//! ```

use crate::moe::division::{Division, ExpertLoad, ExpertShare};

/// Rows as the GPU's kernels compute them: tiles of 64 up to 64 rows, of 128 beyond.
pub const fn padded_rows(rows: u32) -> u32 {
    match rows {
        0 => 0,
        1..=64 => 64,
        _ => rows.div_ceil(128).saturating_mul(128),
    }
}

/// Work of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct SideWork {
    /// Shares with slices.
    pub shares: f64,
    /// Slices times rows; on a GPU times padded rows.
    pub row_slices: f64,
    /// Slices, read once for each share.
    pub slices: f64,
}

impl SideWork {
    fn add(&mut self, slices: u32, rows: u32, sign: f64) {
        if slices > 0 {
            let slices = sign * f64::from(slices);
            self.shares += sign;
            self.slices += slices;
            self.row_slices += slices * f64::from(rows);
        }
    }

    /// Whether there is any.
    pub fn is_empty(&self) -> bool {
        self.shares < 0.5
    }
}

/// Work of a division, by who does it.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Work {
    /// The CPU's.
    pub cpu: SideWork,
    /// The GPUs' whose weights cross a link.
    pub streamed: SideWork,
    /// The GPUs' whose weights lie in HBM.
    pub resident: SideWork,
}

impl Work {
    /// All of a division's work; `loads` (experts ascending) say what is resident. An expert that
    /// they do not name has nothing in HBM.
    pub fn of(division: &Division, loads: &[ExpertLoad]) -> Self {
        let mut work = Self::default();
        for share in &division.shares {
            let load = loads.binary_search_by_key(&share.expert, |load| load.expert);
            let resident = load.map_or(share.gpu_slices.end, |at| {
                resident_from(&loads[at], share.gpu_slices.end)
            });
            work.add(share, resident, 1.0);
        }
        work
    }

    /// Adds a share, whose slices from `resident_from` on lie in HBM; `sign` -1 takes it away.
    pub(super) fn add(&mut self, share: &ExpertShare, resident_from: u32, sign: f64) {
        let rows = share.rows.end.saturating_sub(share.rows.start);
        let (from, to) = (share.gpu_slices.start, share.gpu_slices.end);
        let boundary = resident_from.clamp(from, to.max(from));
        let padded = padded_rows(rows);
        self.cpu.add(share.cpu_slices.end, rows, sign);
        self.streamed.add(boundary - from, padded, sign);
        self.resident.add(to.saturating_sub(boundary), padded, sign);
    }

    /// Whether a GPU has any.
    pub fn on_gpu(&self) -> bool {
        !self.streamed.is_empty() || !self.resident.is_empty()
    }

    /// Whether the CPU has any.
    pub fn on_cpu(&self) -> bool {
        !self.cpu.is_empty()
    }
}

/// First slice in HBM: those of a load are the last ones or none.
pub(super) fn resident_from(load: &ExpertLoad, slices: u32) -> u32 {
    match load.resident.end == slices && load.resident.start < slices {
        true => load.resident.start,
        false => slices,
    }
}

/// Seconds of one kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct SideCost {
    /// Of any work at all.
    pub launch: f64,
    /// Of each share.
    pub share: f64,
    /// Of each slice and row.
    pub row_slice: f64,
    /// Of each slice: its bytes.
    pub slice: f64,
}

impl SideCost {
    /// Seconds of `work` without the launch.
    pub fn variable(&self, work: &SideWork) -> f64 {
        work.shares * self.share + work.row_slices * self.row_slice + work.slices * self.slice
    }

    /// Seconds of one slice of `rows` rows, as the kernels see them.
    pub(super) fn slice_of(&self, rows: u32) -> f64 {
        self.slice + f64::from(rows) * self.row_slice
    }
}

/// Seconds of everything in one layer's forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Costs {
    /// The CPU's, with the links idle.
    pub cpu: SideCost,
    /// The GPUs' over the links, with the CPU idle.
    pub streamed: SideCost,
    /// The GPUs' from HBM.
    pub resident: SideCost,
    /// By how much of itself the CPU's reading takes longer beside the links.
    pub cpu_contention: f64,
    /// By how much of itself the links' copying takes longer beside the CPU.
    pub link_contention: f64,
    /// Of bringing the CPU's rows from a device and its sums back.
    pub join: f64,
}

/// Predicted seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Prediction {
    /// The CPU's part; 0 without one.
    pub cpu_s: f64,
    /// The GPUs' part; 0 without one.
    pub gpu_s: f64,
    /// The forward.
    pub total_s: f64,
}

impl Costs {
    /// Predicts a forward.
    pub fn predict(&self, work: &Work) -> Prediction {
        let (mut cpu, mut gpu) = (0.0, 0.0);
        if work.on_cpu() {
            cpu = self.cpu.launch + self.cpu.variable(&work.cpu);
        }
        if work.on_gpu() {
            // A forward that streams anything pays for the link's start; one launch of kernels.
            let launch = match work.streamed.is_empty() {
                true => self.resident.launch,
                false => self.streamed.launch,
            };
            gpu = launch
                + self.streamed.variable(&work.streamed)
                + self.resident.variable(&work.resident);
        }
        let reading = work.cpu.slices * self.cpu.slice;
        let copying = work.streamed.slices * self.streamed.slice;
        let (cpu_s, gpu_s) = side_by_side(
            (cpu, reading, self.cpu_contention),
            (gpu, copying, self.link_contention),
        );
        let join = if work.on_cpu() { self.join } else { 0.0 };
        Prediction {
            cpu_s,
            gpu_s,
            total_s: cpu_s.max(gpu_s) + join,
        }
    }
}

/// Ends of two sides that start together: for each, seconds alone, those of them on host memory,
/// and the contention.
fn side_by_side(cpu: (f64, f64, f64), gpu: (f64, f64, f64)) -> (f64, f64) {
    if cpu.0 <= 0.0 || gpu.0 <= 0.0 {
        return (cpu.0, gpu.0);
    }
    let both = (cpu.1 / cpu.0).min(1.0) * (gpu.1 / gpu.0).min(1.0);
    let (slow_cpu, slow_gpu) = (1.0 + cpu.2 * both, 1.0 + gpu.2 * both);
    let (end_cpu, end_gpu) = (cpu.0 * slow_cpu, gpu.0 * slow_gpu);
    if end_cpu <= end_gpu {
        (end_cpu, end_cpu + gpu.0 - end_cpu / slow_gpu)
    } else {
        (end_gpu + cpu.0 - end_gpu / slow_cpu, end_gpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Costs {
        let side = |slice| SideCost {
            launch: 1.0,
            share: 0.0,
            row_slice: 0.0,
            slice,
        };
        Costs {
            cpu: side(1.0),
            streamed: side(2.0),
            resident: side(0.1),
            cpu_contention: 0.5,
            link_contention: 0.25,
            join: 0.5,
        }
    }

    #[test]
    fn rows_are_padded_to_tiles() {
        let padded = [0, 1, 64, 65, 128, 129, u32::MAX].map(padded_rows);
        assert_eq!(padded, [0, 64, 64, 128, 128, 256, u32::MAX]);
    }

    #[test]
    fn shares_are_counted_by_where_their_weights_lie() {
        let loads = [
            ExpertLoad {
                expert: 3,
                rows: 10,
                resident: 4..6,
            },
            ExpertLoad {
                expert: 5,
                rows: 70,
                resident: 6..6,
            },
        ];
        let division = Division {
            shares: vec![
                ExpertShare::split(3, 0..10, 2, 6),
                ExpertShare::cpu(5, 0..5, 6),
                ExpertShare::gpu(5, 5..70, 6),
            ],
        };
        let work = Work::of(&division, &loads);
        let side = |shares, slices, row_slices| SideWork {
            shares,
            row_slices,
            slices,
        };
        assert_eq!(work.cpu, side(2.0, 8.0, 20.0 + 30.0));
        assert_eq!(work.streamed, side(2.0, 8.0, 2.0 * 64.0 + 6.0 * 128.0));
        assert_eq!(work.resident, side(1.0, 2.0, 128.0));
        let mut none = work;
        for share in &division.shares {
            none.add(share, if share.expert == 3 { 4 } else { 6 }, -1.0);
        }
        assert_eq!(none, Work::default());
    }

    #[test]
    fn a_side_alone_is_linear() {
        let mut work = Work::default();
        assert_eq!(costs().predict(&work), Prediction::default());
        work.cpu.add(9, 1, 1.0);
        let only = costs().predict(&work);
        assert_eq!((only.cpu_s, only.gpu_s, only.total_s), (10.0, 0.0, 10.5));
        let mut work = Work::default();
        work.resident.add(10, 64, 1.0);
        assert_eq!(costs().predict(&work).gpu_s, 2.0);
        assert_eq!(costs().predict(&work).total_s, 2.0);
    }

    /// While both work each is slowed; afterwards the longer goes on at its own rate.
    #[test]
    fn two_sides_slow_each_other_while_both_work() {
        let costs = Costs {
            cpu: SideCost {
                launch: 0.0,
                ..costs().cpu
            },
            streamed: SideCost {
                launch: 0.0,
                ..costs().streamed
            },
            ..costs()
        };
        let mut work = Work::default();
        work.cpu.add(4, 1, 1.0);
        work.streamed.add(10, 64, 1.0);
        // The CPU needs 4 x 1.5 = 6; the link has done 6 / 1.25 = 4.8 of its 20 by then.
        let p = costs.predict(&work);
        assert!((p.cpu_s - 6.0).abs() < 1e-12);
        assert!((p.gpu_s - (6.0 + 20.0 - 4.8)).abs() < 1e-12);
        assert!((p.total_s - (p.gpu_s + 0.5)).abs() < 1e-12);
    }
}
