//! The division of one forward that is predicted to end first.
//!
//! Every slice of an expert costs a side the same, so with linear costs the best division orders
//! the experts by what the CPU needs for a slice against what the GPU needs (few rows first,
//! resident slices last) and cuts the order once: a prefix on the CPU, the rest on the GPU. The cut
//! falls inside an expert, where it is made between slices, or between rows if one expert is so hot
//! that its slices are too coarse. The other way is to cut *every* expert at the same share of its
//! slices. All are found in O(E log E), and the first of them to end is taken.

use crate::moe::division::{Division, ExpertLoad, ExpertShare, LayerShape};

use super::cost::{Costs, Prediction, Work, padded_rows, resident_from};

/// How a division came about.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Everything on the CPU.
    Cpu,
    /// Everything on the GPUs.
    Gpu,
    /// Whole experts on either side.
    Experts,
    /// Whole experts, and the rows of one between both.
    ExpertsAndRows,
    /// Whole experts, and the slices of one between both.
    ExpertsAndSlices,
    /// The slices of every expert between both, at the same share.
    Slices,
}

impl Method {
    /// All, in the order in which equals are preferred.
    pub const ALL: [Self; 6] = [
        Self::Cpu,
        Self::Gpu,
        Self::Experts,
        Self::ExpertsAndSlices,
        Self::ExpertsAndRows,
        Self::Slices,
    ];

    /// As in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Experts => "experts",
            Self::ExpertsAndRows => "experts-and-rows",
            Self::ExpertsAndSlices => "experts-and-slices",
            Self::Slices => "slices",
        }
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A division with what it is predicted to take.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Plan {
    /// How it came about.
    pub method: Method,
    /// Seconds of both sides.
    pub prediction: Prediction,
    /// What both sides have to do.
    pub work: Work,
    /// Who does what.
    pub division: Division,
}

/// The plan that ends first. Without work it is empty, without devices all on the CPU.
///
/// `loads`: experts ascending; those without rows take no part.
pub fn best(loads: &[ExpertLoad], shape: &LayerShape, costs: &Costs) -> Plan {
    let problem = Problem::new(loads, shape, costs);
    let cuts = problem.cuts();
    problem.plan(fastest(&cuts, |cut| cut.prediction.total_s))
}

/// The best plan of each method that applies.
pub fn candidates(loads: &[ExpertLoad], shape: &LayerShape, costs: &Costs) -> Vec<Plan> {
    let problem = Problem::new(loads, shape, costs);
    let cuts = problem.cuts();
    cuts.iter().map(|cut| problem.plan(cut)).collect()
}

/// How much less a later method must take to be preferred: below it, predictions say nothing.
const GAIN: f64 = 0.995;

/// The cut of least time, the earlier if they hardly differ. There always is one.
pub(super) fn fastest(cuts: &[Cut], seconds: impl Fn(&Cut) -> f64) -> &Cut {
    cuts.iter()
        .reduce(|best, cut| match seconds(cut) < seconds(best) * GAIN {
            true => cut,
            false => best,
        })
        .unwrap_or(&cuts[0])
}

/// A division in short.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cut {
    pub(super) method: Method,
    pub(super) prediction: Prediction,
    pub(super) work: Work,
    /// Slices of each load on the CPU.
    cpu: Vec<u32>,
    /// One load of which the CPU takes all slices of the first rows, the GPU those of the others.
    rows: Option<(usize, u32)>,
}

/// Slices of one load that lie in one kind of memory, in the order of the cut.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// The CPU's time for a slice against the GPU's.
    ratio: f64,
    load: usize,
    /// The CPU's slices once it has these too.
    until: u32,
}

/// One forward to divide.
pub(super) struct Problem<'a> {
    loads: Vec<&'a ExpertLoad>,
    /// First slice of each load that lies in HBM.
    resident_from: Vec<u32>,
    shape: &'a LayerShape,
    costs: &'a Costs,
}

impl<'a> Problem<'a> {
    pub(super) fn new(loads: &'a [ExpertLoad], shape: &'a LayerShape, costs: &'a Costs) -> Self {
        let loads: Vec<&ExpertLoad> = loads.iter().filter(|load| load.rows > 0).collect();
        Self {
            resident_from: loads
                .iter()
                .map(|load| resident_from(load, shape.slices))
                .collect(),
            loads,
            shape,
            costs,
        }
    }

    /// The best cut of each method that applies, in order of preference.
    pub(super) fn cuts(&self) -> Vec<Cut> {
        let all = |method, slices: u32| self.cut(method, vec![slices; self.loads.len()], None);
        let mut cuts = vec![all(Method::Cpu, self.shape.slices)];
        if self.shape.devices == 0 || self.loads.is_empty() {
            return cuts;
        }
        cuts.push(all(Method::Gpu, 0));
        let order = self.order();
        let whole = self.prefix(&order);
        let split = [
            self.inside_an_expert(&order, whole),
            self.between_rows(&order, whole),
            self.inside_every_expert(),
        ];
        let state = self.state(&order, whole);
        cuts.push(self.cut(Method::Experts, state, None));
        cuts.extend(split.into_iter().flatten());
        // What has come to lie on one side is one of the first two.
        cuts.retain(|cut| match cut.method {
            Method::Cpu | Method::Gpu => true,
            _ => cut.work.on_cpu() && cut.work.on_gpu(),
        });
        cuts
    }

    /// All on one side but a slice of the expert with the fewest rows, to see what the other takes.
    pub(super) fn probe(&self, gpu: bool) -> Cut {
        let slices = self.shape.slices;
        let (most, other) = match gpu {
            true => (slices, slices.saturating_sub(1)),
            false => (0, 1.min(slices)),
        };
        let mut cpu = vec![most; self.loads.len()];
        let coldest = (0..cpu.len()).min_by_key(|&i| self.loads[i].rows);
        if let Some(i) = coldest {
            cpu[i] = other;
        }
        self.cut(Method::ExpertsAndSlices, cpu, None)
    }

    /// A cut as a plan.
    pub(super) fn plan(&self, cut: &Cut) -> Plan {
        Plan {
            method: cut.method,
            prediction: cut.prediction,
            work: cut.work,
            division: self.division(&cut.cpu, cut.rows),
        }
    }

    fn division(&self, cpu: &[u32], rows: Option<(usize, u32)>) -> Division {
        let slices = self.shape.slices;
        let mut shares = Vec::with_capacity(cpu.len() + 1);
        for (i, (load, &cpu)) in self.loads.iter().zip(cpu).enumerate() {
            match rows {
                Some((split, first)) if split == i => {
                    shares.push(ExpertShare::cpu(load.expert, 0..first, slices));
                    shares.push(ExpertShare::gpu(load.expert, first..load.rows, slices));
                }
                _ => shares.push(ExpertShare::split(load.expert, 0..load.rows, cpu, slices)),
            }
        }
        Division { shares }
    }

    fn cut(&self, method: Method, cpu: Vec<u32>, rows: Option<(usize, u32)>) -> Cut {
        let mut work = Work::default();
        for (i, &slices) in cpu.iter().enumerate() {
            match rows {
                Some((split, first)) if split == i => self.add_rows(&mut work, i, first),
                _ => self.add(&mut work, i, slices, 1.0),
            }
        }
        Cut {
            method,
            prediction: self.costs.predict(&work),
            work,
            cpu,
            rows,
        }
    }

    /// Adds load `i` with `cpu` slices on the CPU, or takes it away.
    fn add(&self, work: &mut Work, i: usize, cpu: u32, sign: f64) {
        let load = self.loads[i];
        let share = ExpertShare::split(load.expert, 0..load.rows, cpu, self.shape.slices);
        work.add(&share, self.resident_from[i], sign);
    }

    /// Adds load `i` with its `first` rows on the CPU.
    fn add_rows(&self, work: &mut Work, i: usize, first: u32) {
        let (load, slices) = (self.loads[i], self.shape.slices);
        let cpu = ExpertShare::cpu(load.expert, 0..first, slices);
        let gpu = ExpertShare::gpu(load.expert, first..load.rows, slices);
        work.add(&cpu, slices, 1.0);
        work.add(&gpu, self.resident_from[i], 1.0);
    }

    fn seconds(&self, work: &Work) -> f64 {
        self.costs.predict(work).total_s
    }

    /// Runs of slices, those first that the CPU should take first.
    fn order(&self) -> Vec<Run> {
        let slices = self.shape.slices;
        let Costs {
            cpu,
            streamed,
            resident,
            ..
        } = self.costs;
        let mut runs = Vec::with_capacity(2 * self.loads.len());
        for (i, (load, &from)) in self.loads.iter().zip(&self.resident_from).enumerate() {
            let padded = padded_rows(load.rows);
            let ratio = |side: &super::SideCost, count: u32| {
                let share = |side: &super::SideCost| side.share / f64::from(count.max(1));
                (cpu.slice_of(load.rows) + share(cpu)) / (side.slice_of(padded) + share(side))
            };
            let streamed = ratio(streamed, from);
            if from > 0 {
                runs.push(Run {
                    ratio: streamed,
                    load: i,
                    until: from,
                });
            }
            if from < slices {
                // The CPU's slices are the first, so these follow whatever their costs.
                runs.push(Run {
                    ratio: ratio(resident, slices - from).max(streamed),
                    load: i,
                    until: slices,
                });
            }
        }
        runs.sort_by(|a, b| {
            (a.ratio.total_cmp(&b.ratio)).then((a.load, a.until).cmp(&(b.load, b.until)))
        });
        runs
    }

    /// Slices of each load on the CPU where it has the first `count` runs.
    fn state(&self, order: &[Run], count: usize) -> Vec<u32> {
        let mut cpu = vec![0; self.loads.len()];
        for run in &order[..count] {
            cpu[run.load] = run.until;
        }
        cpu
    }

    /// How many of the runs the CPU takes.
    fn prefix(&self, order: &[Run]) -> usize {
        let mut cpu = vec![0; self.loads.len()];
        let mut work = Work::default();
        for i in 0..self.loads.len() {
            self.add(&mut work, i, 0, 1.0);
        }
        let mut best = (self.seconds(&work), 0);
        for (i, run) in order.iter().enumerate() {
            self.add(&mut work, run.load, cpu[run.load], -1.0);
            cpu[run.load] = run.until;
            self.add(&mut work, run.load, run.until, 1.0);
            let seconds = self.seconds(&work);
            if seconds < best.0 {
                best = (seconds, i + 1);
            }
        }
        best.1
    }

    /// Cuts the run at the end of the prefix, or the next, between slices.
    fn inside_an_expert(&self, order: &[Run], whole: usize) -> Option<Cut> {
        let mut best: Option<(f64, usize, u32)> = None;
        for count in whole.saturating_sub(1)..(whole + 1).min(order.len()) {
            let run = order[count];
            let cpu = self.state(order, count);
            let mut rest = Work::default();
            for (i, &slices) in cpu.iter().enumerate().filter(|(i, _)| *i != run.load) {
                self.add(&mut rest, i, slices, 1.0);
            }
            for slices in cpu[run.load] + 1..run.until {
                let mut work = rest;
                self.add(&mut work, run.load, slices, 1.0);
                let seconds = self.seconds(&work);
                if best.is_none_or(|best| seconds < best.0) {
                    best = Some((seconds, count, slices));
                }
            }
        }
        let (_, count, slices) = best?;
        let mut cpu = self.state(order, count);
        cpu[order[count].load] = slices;
        Some(self.cut(Method::ExpertsAndSlices, cpu, None))
    }

    /// Cuts one expert between rows, so that the GPU's are whole tiles: the one at the end of the
    /// prefix, the next, or the hottest on the GPU.
    fn between_rows(&self, order: &[Run], whole: usize) -> Option<Cut> {
        let mut best: Option<(f64, usize, (usize, u32))> = None;
        let around = whole.saturating_sub(1)..(whole + 1).min(order.len());
        let hottest = self
            .state(order, whole)
            .iter()
            .enumerate()
            .filter(|&(_, &slices)| slices == 0)
            .max_by_key(|&(i, _)| self.loads[i].rows)
            .map(|(i, _)| (whole, i));
        for (count, i) in around
            .map(|count| (count, order[count].load))
            .chain(hottest)
        {
            let rows = self.loads[i].rows;
            let cpu = self.state(order, count);
            if padded_rows(rows) <= padded_rows(1) || cpu[i] > 0 {
                continue;
            }
            let mut rest = Work::default();
            for (other, &slices) in cpu.iter().enumerate().filter(|(other, _)| *other != i) {
                self.add(&mut rest, other, slices, 1.0);
            }
            let mut attempt = |on_gpu: u32| {
                let first = rows - on_gpu;
                let mut work = rest;
                self.add_rows(&mut work, i, first);
                let prediction = self.costs.predict(&work);
                if best.is_none_or(|best| prediction.total_s < best.0) {
                    best = Some((prediction.total_s, count, (i, first)));
                }
                prediction.cpu_s > prediction.gpu_s
            };
            // More rows for the GPU take from the CPU: bisection for where they end together.
            attempt(64);
            let (mut low, mut high) = (0, (rows - 1) / 128);
            while low < high {
                let middle = (low + high).div_ceil(2);
                match attempt(middle * 128) {
                    true => low = middle,
                    false => high = middle - 1,
                }
            }
            for tiles in [low, low + 1] {
                if tiles > 0 && tiles * 128 < rows {
                    attempt(tiles * 128);
                }
            }
        }
        let (_, count, split) = best?;
        let mut cpu = self.state(order, count);
        cpu[split.0] = 0;
        Some(self.cut(Method::ExpertsAndRows, cpu, Some(split)))
    }

    /// Cuts every expert's slices that are not resident at one share.
    ///
    /// The share follows from the totals, as if slices could be cut. Whole slices are then dealt:
    /// each expert's rounded down, and one more to each of the first experts until the CPU's time is
    /// that of the share. So the sum is right to a slice, however few experts there are, and there
    /// are two runs of experts that are cut alike, which a GPU takes in as many launches.
    fn inside_every_expert(&self) -> Option<Cut> {
        let mut ends = [Work::default(); 2];
        for (i, &from) in self.resident_from.iter().enumerate() {
            self.add(&mut ends[0], i, 0, 1.0);
            self.add(&mut ends[1], i, from, 1.0);
        }
        let share = self.balanced_share(&ends);
        let weight = |i: usize| self.costs.cpu.slice_of(self.loads[i].rows);
        let mut owed = 0.0;
        let mut least = Vec::with_capacity(self.loads.len());
        let mut open = Vec::with_capacity(self.loads.len());
        for (i, &most) in self.resident_from.iter().enumerate() {
            let wanted = share * f64::from(most);
            let slices = wanted.floor() as u32;
            owed += (wanted - f64::from(slices)) * weight(i);
            least.push(slices);
            if slices < most {
                open.push(i);
            }
        }
        let more = open
            .iter()
            .take_while(|&&i| {
                let takes = owed >= 0.5 * weight(i) && owed > 0.0;
                owed -= weight(i);
                takes
            })
            .count();
        // The times are not linear in whole shares: the neighbours may be better.
        (more.saturating_sub(1)..=(more + 1).min(open.len()))
            .map(|more| {
                let mut cpu = least.clone();
                open[..more].iter().for_each(|&i| cpu[i] += 1);
                self.cut(Method::Slices, cpu, None)
            })
            .min_by(|a, b| a.prediction.total_s.total_cmp(&b.prediction.total_s))
    }

    /// The CPU's share of the slices at which both sides end together; `ends` is the work at 0 and 1.
    fn balanced_share(&self, ends: &[Work; 2]) -> f64 {
        let shares = self.loads.len() as f64;
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..24 {
            let share = 0.5 * (low + high);
            let mut work = ends[0];
            work.cpu.shares = shares;
            work.cpu.slices = share * ends[1].cpu.slices;
            work.cpu.row_slices = share * ends[1].cpu.row_slices;
            work.streamed.slices *= 1.0 - share;
            work.streamed.row_slices *= 1.0 - share;
            let prediction = self.costs.predict(&work);
            match prediction.cpu_s > prediction.gpu_s {
                true => high = share,
                false => low = share,
            }
        }
        0.5 * (low + high)
    }
}

#[cfg(test)]
mod tests;
