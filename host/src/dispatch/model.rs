//! The rates of a machine, corrected by what forwards took.
//!
//! A fit's unknowns are multipliers of the prior's seconds, one for each feature, so that what one
//! layer teaches holds for layers of other shapes. Forwards are kept apart by the power of two of
//! their tokens: a CPU that is bound by memory at one token and by products at a thousand is linear
//! near each of them and not over both.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::moe::division::{ForwardTimes, LayerShape};

use super::cost::{Costs, Work};
use super::error::{DispatchError, load, save};
use super::fit::{Sample, dot, fit, recency};
use super::rates::Rates;

/// A model that several layers use and teach.
pub type SharedModel = Arc<Mutex<Model>>;

/// Observations of each side that a regime keeps.
const WINDOW: usize = 24;
/// From so many on, a regime needs no others'.
const ENOUGH: usize = 6;
/// Standard deviation, in powers of two of the tokens, of the weight of other regimes.
const REACH: f64 = 1.5;
/// Relative error of a fit that is a surprise.
const SURPRISE: f64 = 0.3;
/// So many surprises in a row, all in one direction, mean that the machine has changed.
const CHANGED: i32 = 3;
/// Beyond so many new observations, a regime is fitted again only every fourth.
const FIT_EACH: u32 = 16;

/// Features of the CPU: launch, shares, rows, bytes, bytes beside a busy link.
pub(super) const CPU_FEATURES: usize = 5;
/// Features of the GPUs: launch; shares, rows, bytes and bytes beside a reading CPU of streamed
/// work; shares, rows and bytes of resident work.
pub(super) const GPU_FEATURES: usize = 8;

/// Which sides a forward uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Sides {
    Cpu,
    Gpu,
    Both,
}

/// What is known of some sides.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tries {
    /// Forwards that were cut for them.
    pub(super) attempts: u64,
    /// Those that told something. Outliers do not, up to a limit: a machine may be all outliers.
    pub(super) told: u64,
    /// Forwards since the last.
    pub(super) passed: u64,
}

impl Sides {
    pub(super) const ALL: [Self; 3] = [Self::Cpu, Self::Gpu, Self::Both];

    pub(super) fn of(work: &Work) -> Self {
        match (work.on_cpu(), work.on_gpu()) {
            (true, true) => Self::Both,
            (false, true) => Self::Gpu,
            _ => Self::Cpu,
        }
    }
}

/// Observations of forwards of about as many tokens.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
struct Regime {
    cpu: VecDeque<Sample<CPU_FEATURES>>,
    gpu: VecDeque<Sample<GPU_FEATURES>>,
    /// Seconds of forwards beyond their longer side, by [`Sides`].
    overhead: [VecDeque<f64>; 3],
    /// Forwards so far.
    forwards: u64,
    /// How many were cut for each of [`Sides`], those of them that were no surprise, and the last.
    attempts: [u64; 3],
    tries: [u64; 3],
    last: [u64; 3],
    /// How often in a row the CPU and the GPUs took much longer (above 0) or less (below) than the
    /// fit says.
    #[serde(skip)]
    surprises: [i32; 2],
    #[serde(skip)]
    fitted: Option<Multipliers>,
    /// Whether the fit is to be made again, and the observations since it was.
    #[serde(skip)]
    refit: bool,
    #[serde(skip)]
    unfitted: u32,
}

impl Regime {
    fn push_cpu(&mut self, sample: Sample<CPU_FEATURES>) -> bool {
        let theta = self.fitted.map(|fitted| fitted.cpu);
        push(&mut self.cpu, theta, &mut self.surprises[0], sample)
    }

    fn push_gpu(&mut self, sample: Sample<GPU_FEATURES>) -> bool {
        let theta = self.fitted.map(|fitted| fitted.gpu);
        push(&mut self.gpu, theta, &mut self.surprises[1], sample)
    }
}

/// What the prior's features are to be multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(super) struct Multipliers {
    pub(super) cpu: [f64; CPU_FEATURES],
    pub(super) gpu: [f64; GPU_FEATURES],
}

impl Multipliers {
    const ONE: Self = Self {
        cpu: [1.0; CPU_FEATURES],
        gpu: [1.0; GPU_FEATURES],
    };

    /// The prior's costs, corrected.
    fn apply(&self, prior: &Costs) -> Costs {
        let mut costs = *prior;
        let [launch, share, row, slice, contention] = self.cpu;
        costs.cpu.launch *= launch;
        costs.cpu.share *= share;
        costs.cpu.row_slice *= row;
        costs.cpu.slice *= slice;
        costs.cpu_contention *= contention / slice;
        let [
            launch,
            share,
            row,
            slice,
            contention,
            r_share,
            r_row,
            r_slice,
        ] = self.gpu;
        costs.streamed.launch *= launch;
        costs.streamed.share *= share;
        costs.streamed.row_slice *= row;
        costs.streamed.slice *= slice;
        costs.link_contention *= contention / slice;
        costs.resident.launch *= launch;
        costs.resident.share *= r_share;
        costs.resident.row_slice *= r_row;
        costs.resident.slice *= r_slice;
        costs
    }

    /// The rates behind the corrected costs.
    fn rates(&self, prior: &Rates) -> Rates {
        let (c, g) = (&self.cpu, &self.gpu);
        Rates {
            cpu_launch_s: prior.cpu_launch_s * c[0],
            cpu_share_s: prior.cpu_share_s * c[1],
            cpu_tera_ops: prior.cpu_tera_ops / c[2],
            dram_gb_s: prior.dram_gb_s / c[3],
            cpu_contention: prior.cpu_contention * c[4] / c[3],
            gpu_launch_s: prior.gpu_launch_s * g[0],
            gpu_share_s: prior.gpu_share_s * g[1],
            gpu_tera_ops: prior.gpu_tera_ops / g[2],
            link_gb_s: prior.link_gb_s / g[3],
            link_contention: prior.link_contention * g[4] / g[3],
            hbm_gb_s: prior.hbm_gb_s / g[7],
            join_s: prior.join_s,
        }
    }
}

/// Rates of a machine and what forwards on it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    rates: Rates,
    regimes: BTreeMap<u8, Regime>,
    /// Whether each side has worked before: the first time loads kernels and touches buffers.
    warm: [bool; 2],
}

/// A model as it is saved.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    asym_gemm_dispatch: u32,
    rates: Rates,
    regimes: BTreeMap<u8, Regime>,
}

/// Version of [`Saved`].
const VERSION: u32 = 1;

/// The state of a model, for people and logs.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Snapshot {
    /// What it began with.
    pub prior: Rates,
    /// What all observations together say.
    pub rates: Rates,
    /// By tokens.
    pub regimes: Vec<RegimeSnapshot>,
}

/// One power of two of tokens.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RegimeSnapshot {
    /// Tokens of about this many.
    pub tokens: u64,
    /// Forwards seen.
    pub forwards: u64,
    /// Observations kept of the CPU.
    pub cpu_samples: usize,
    /// Observations kept of the GPUs.
    pub gpu_samples: usize,
    /// Median relative error of the fit on the CPU's.
    pub cpu_error: f64,
    /// Median relative error of the fit on the GPUs'.
    pub gpu_error: f64,
    /// The rates that the fit amounts to.
    pub rates: Rates,
}

impl Model {
    /// A model that has seen nothing yet.
    ///
    /// # Errors
    /// A rate that no machine has.
    pub fn new(rates: Rates) -> Result<Self, DispatchError> {
        rates.validate()?;
        Ok(Self {
            rates,
            regimes: BTreeMap::new(),
            warm: [false; 2],
        })
    }

    /// The model, to be shared by layers.
    pub fn shared(self) -> SharedModel {
        Arc::new(Mutex::new(self))
    }

    /// What it began with.
    pub fn prior(&self) -> &Rates {
        &self.rates
    }

    /// What all observations together say: the prior of a model for another format, machine state
    /// or process.
    pub fn rates(&self) -> Rates {
        self.multipliers(self.regimes.keys().map(|&key| (key, 1.0)))
            .rates(&self.rates)
    }

    /// Costs of a forward of this shape.
    pub fn costs(&mut self, shape: &LayerShape) -> Costs {
        let key = regime_of(shape.tokens);
        let fitted = self
            .regimes
            .get(&key)
            .filter(|regime| !regime.refit)
            .and_then(|regime| regime.fitted);
        let multipliers = fitted.unwrap_or_else(|| {
            let near = self.near(key);
            let multipliers = self.multipliers(near.into_iter());
            // Also of a regime that has seen nothing, so that its first outlier is seen as one.
            let regime = self.regimes.entry(key).or_default();
            regime.fitted = Some(multipliers);
            regime.refit = false;
            regime.unfitted = 0;
            multipliers
        });
        multipliers.apply(&self.rates.costs(shape))
    }

    /// Seconds beyond the longer side that forwards of these sides take: the median of those seen,
    /// or `join` where the CPU takes part.
    pub(super) fn overhead(&self, tokens: u32, sides: Sides, join: f64) -> f64 {
        let seen = self.regimes.get(&regime_of(tokens));
        let seen = seen.map(|regime| &regime.overhead[sides as usize]);
        asym_gemm_cpu::probe::median(seen.into_iter().flatten().copied()).unwrap_or(match sides {
            Sides::Gpu => 0.0,
            _ => join,
        })
    }

    /// Observations of the CPU and of the GPUs near these tokens.
    pub(super) fn samples(&self, tokens: u32) -> [usize; 2] {
        let regime = self.regimes.get(&regime_of(tokens));
        regime.map_or([0; 2], |regime| [regime.cpu.len(), regime.gpu.len()])
    }

    /// Whether the CPU (0) or the GPUs (1) last took much longer or less than expected.
    pub(super) fn is_surprised(&self, tokens: u32, side: usize) -> bool {
        let regime = self.regimes.get(&regime_of(tokens));
        regime.is_some_and(|regime| regime.surprises[side] != 0)
    }

    /// Forwards near these tokens.
    pub(super) fn forwards(&self, tokens: u32) -> u64 {
        let regime = self.regimes.get(&regime_of(tokens));
        regime.map_or(0, |regime| regime.forwards)
    }

    /// What is known of these sides near these tokens.
    pub(super) fn tries(&self, tokens: u32, sides: Sides) -> Tries {
        let regime = self.regimes.get(&regime_of(tokens));
        regime.map_or(Tries::default(), |regime| {
            let side = sides as usize;
            Tries {
                attempts: regime.attempts[side],
                told: regime.tries[side].max(regime.attempts[side] / 3),
                passed: regime.forwards - regime.last[side],
            }
        })
    }

    /// Learns what a forward took; one that only probes a side is no try of any.
    pub(super) fn record(
        &mut self,
        work: &Work,
        shape: &LayerShape,
        times: &ForwardTimes,
        probe: bool,
    ) {
        let prior = self.rates.costs(shape);
        let sides = Sides::of(work);
        let overlap = times.cpu_seconds.min(times.gpu_seconds);
        let warm = self.warm;
        let regime = self.regimes.entry(regime_of(shape.tokens)).or_default();
        regime.forwards += 1;
        let (cpu, gpu) = features(&prior, work);
        let intensity = |bytes: f64, all: f64| if all > 0.0 { bytes / all } else { 0.0 };
        let (cpu_busy, gpu_busy) = (
            intensity(cpu[3], cpu.iter().sum()),
            intensity(gpu[3], gpu.iter().sum()),
        );
        let mut fresh = false;
        if work.on_cpu() {
            let mut prior_s = cpu;
            let beside = intensity(overlap, times.cpu_seconds).min(1.0);
            prior_s[4] = prior.cpu_contention * cpu[3] * gpu_busy * beside;
            let sample = Sample {
                prior: prior_s,
                seconds: times.cpu_seconds,
                alone: !work.on_gpu(),
            };
            fresh |= warm[0] && regime.push_cpu(sample);
            self.warm[0] = true;
        }
        if work.on_gpu() {
            let mut prior_s = gpu;
            let beside = intensity(overlap, times.gpu_seconds).min(1.0);
            prior_s[4] = prior.link_contention * gpu[3] * cpu_busy * beside;
            let sample = Sample {
                prior: prior_s,
                seconds: times.gpu_seconds,
                alone: !work.on_cpu(),
            };
            fresh |= warm[1] && regime.push_gpu(sample);
            self.warm[1] = true;
        }
        let over = times.total_seconds - times.cpu_seconds.max(times.gpu_seconds);
        let was_warm = (!work.on_cpu() || warm[0]) && (!work.on_gpu() || warm[1]);
        if !probe && was_warm && over.is_finite() && times.total_seconds > 0.0 {
            bounded(
                &mut regime.overhead[sides as usize],
                over.max(0.0),
                WINDOW / 2,
            );
        }
        if !probe {
            let side = sides as usize;
            let surprise = [work.on_cpu(), work.on_gpu()];
            let surprise = (0..2).any(|i| surprise[i] && regime.surprises[i] != 0);
            regime.attempts[side] += 1;
            regime.tries[side] += u64::from(!surprise);
            regime.last[side] = regime.forwards;
        }
        if fresh {
            regime.unfitted += 1;
            let seen = regime.cpu.len().max(regime.gpu.len()) as u64;
            let young = seen < u64::from(FIT_EACH).min(WINDOW as u64);
            if young || regime.unfitted >= 4 {
                regime.refit = true;
            }
        }
    }

    /// Regimes that a fit at `key` draws on, with their weights.
    fn near(&self, key: u8) -> Vec<(u8, f64)> {
        let enough = |regime: &Regime| regime.cpu.len() >= ENOUGH && regime.gpu.len() >= ENOUGH;
        if self.regimes.get(&key).is_some_and(enough) {
            return vec![(key, 1.0)];
        }
        let weight = |other: u8| {
            let distance = (f64::from(other) - f64::from(key)) / REACH;
            (-0.5 * distance * distance).exp()
        };
        let all = self.regimes.keys().map(|&other| (other, weight(other)));
        all.filter(|(_, weight)| *weight > 0.01).collect()
    }

    fn multipliers(&self, regimes: impl Iterator<Item = (u8, f64)> + Clone) -> Multipliers {
        if self.regimes.is_empty() {
            return Multipliers::ONE;
        }
        let of = |key: u8| self.regimes.get(&key).into_iter();
        Multipliers {
            cpu: fit(regimes
                .clone()
                .flat_map(move |(key, weight)| of(key).flat_map(move |r| aged(&r.cpu, weight)))),
            gpu: fit(regimes
                .flat_map(move |(key, weight)| of(key).flat_map(move |r| aged(&r.gpu, weight)))),
        }
    }

    /// Its state.
    pub fn snapshot(&self) -> Snapshot {
        let one = |(&key, regime): (&u8, &Regime)| {
            let fitted = self.multipliers(self.near(key).into_iter());
            RegimeSnapshot {
                tokens: 1 << key,
                forwards: regime.forwards,
                cpu_samples: regime.cpu.len(),
                gpu_samples: regime.gpu.len(),
                cpu_error: median_error(&fitted.cpu, &regime.cpu),
                gpu_error: median_error(&fitted.gpu, &regime.gpu),
                rates: fitted.rates(&self.rates),
            }
        };
        Snapshot {
            prior: self.rates,
            rates: self.rates(),
            regimes: self.regimes.iter().map(one).collect(),
        }
    }

    /// Writes rates and observations to a file, which appears whole or not at all.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn save(&self, path: &Path) -> Result<(), DispatchError> {
        save(
            path,
            &Saved {
                asym_gemm_dispatch: VERSION,
                rates: self.rates,
                regimes: self.regimes.clone(),
            },
        )
    }

    /// Reads what [`Model::save`] wrote. Observations that make no sense are left out.
    ///
    /// # Errors
    /// A file that cannot be read or is another, or rates that no machine has.
    pub fn load(path: &Path) -> Result<Self, DispatchError> {
        let saved: Saved = load(path)?;
        if saved.asym_gemm_dispatch != VERSION {
            return Err(DispatchError::Version {
                path: path.into(),
                found: saved.asym_gemm_dispatch,
                expected: VERSION,
            });
        }
        let mut model = Self::new(saved.rates)?;
        model.regimes = saved.regimes;
        model.regimes.retain(|&key, _| key <= regime_of(u32::MAX));
        for regime in model.regimes.values_mut() {
            regime.cpu.retain(Sample::is_usable);
            regime.gpu.retain(Sample::is_usable);
            regime.cpu.truncate(WINDOW);
            regime.gpu.truncate(WINDOW);
            for overhead in &mut regime.overhead {
                overhead.retain(|s| s.is_finite() && *s >= 0.0);
                overhead.truncate(WINDOW);
            }
            for last in &mut regime.last {
                *last = (*last).min(regime.forwards);
            }
        }
        Ok(model)
    }
}

/// Nearest power of two of the tokens.
fn regime_of(tokens: u32) -> u8 {
    f64::from(tokens.max(1)).log2().round() as u8
}

/// The prior's seconds by feature, without contention.
pub(super) fn features(prior: &Costs, work: &Work) -> ([f64; CPU_FEATURES], [f64; GPU_FEATURES]) {
    let some = |is: bool, seconds: f64| if is { seconds } else { 0.0 };
    let (c, s, r) = (&work.cpu, &work.streamed, &work.resident);
    (
        [
            some(work.on_cpu(), prior.cpu.launch),
            c.shares * prior.cpu.share,
            c.row_slices * prior.cpu.row_slice,
            c.slices * prior.cpu.slice,
            0.0,
        ],
        [
            some(work.on_gpu(), prior.streamed.launch),
            s.shares * prior.streamed.share,
            s.row_slices * prior.streamed.row_slice,
            s.slices * prior.streamed.slice,
            0.0,
            r.shares * prior.resident.share,
            r.row_slices * prior.resident.row_slice,
            r.slices * prior.resident.slice,
        ],
    )
}

/// Keeps a sample that says anything. After [`CHANGED`] surprises in a row only those count.
fn push<const N: usize>(
    samples: &mut VecDeque<Sample<N>>,
    theta: Option<[f64; N]>,
    surprises: &mut i32,
    sample: Sample<N>,
) -> bool {
    if !sample.is_usable() {
        return false;
    }
    let error = theta.map_or(0.0, |theta| {
        sample.seconds / dot(&theta, &sample.prior) - 1.0
    });
    let direction = i32::from(error > SURPRISE) - i32::from(error < -SURPRISE / (1.0 + SURPRISE));
    *surprises = match direction != 0 && surprises.signum() != -direction {
        true => *surprises + direction,
        false => direction,
    };
    if samples.len() >= WINDOW {
        // Of the kind of which there are more than its part, so that many forwards of one kind do
        // not drive out what is known of the other.
        let alone = samples.iter().filter(|s| s.alone).count();
        let drop_alone = alone > WINDOW / 3;
        let oldest = samples.iter().position(|s| s.alone == drop_alone);
        samples.remove(oldest.unwrap_or(0));
    }
    samples.push_back(sample);
    if surprises.abs() >= CHANGED {
        let old = samples.len().saturating_sub(CHANGED as usize);
        samples.drain(..old);
        *surprises = 0;
    }
    true
}

fn bounded<T>(values: &mut VecDeque<T>, value: T, most: usize) {
    if values.len() >= most {
        values.pop_front();
    }
    values.push_back(value);
}

/// Samples with their weights: by age among those of the same kind.
fn aged<const N: usize>(
    samples: &VecDeque<Sample<N>>,
    weight: f64,
) -> impl Iterator<Item = (&Sample<N>, f64)> + Clone {
    samples.iter().rev().scan([0; 2], move |ages, sample| {
        let age = &mut ages[usize::from(sample.alone)];
        *age += 1;
        Some((sample, weight * recency(*age - 1)))
    })
}

fn median_error<const N: usize>(theta: &[f64; N], samples: &VecDeque<Sample<N>>) -> f64 {
    let error = |s: &Sample<N>| (dot(theta, &s.prior) / s.seconds - 1.0).abs();
    asym_gemm_cpu::probe::median(samples.iter().map(error)).unwrap_or(0.0)
}

#[cfg(test)]
mod tests;
