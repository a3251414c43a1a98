//! The policy that divides by predicted time and learns from what forwards take.

use std::sync::PoisonError;

use crate::moe::division::{Divide, Division, ExpertLoad, FixedPolicy, ForwardTimes, LayerShape};

use super::cost::{Prediction, Work};
use super::model::{Model, SharedModel, Sides};
use super::partition::{Cut, Method, Plan, Problem, fastest};

/// When the policy tries what it does not believe to be best.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct AdaptiveSettings {
    /// Forwards after which a side that had nothing to do gets one slice; twice as many each time.
    pub probe_every: u64,
    /// Forwards after which a way of using the sides is tried again although it is predicted to
    /// take longer.
    pub retry_every: u64,
    /// How much longer, as a factor, a way may be predicted to take to be tried for the first time
    /// or again after so many forwards.
    pub limit: f64,
    /// The same factor for a way that has been tried, but less than three times.
    pub early_limit: f64,
}

impl Default for AdaptiveSettings {
    fn default() -> Self {
        Self {
            probe_every: 64,
            retry_every: 256,
            limit: 1.35,
            early_limit: 1.15,
        }
    }
}

/// Divides each forward so that it is predicted to end first.
#[derive(Debug)]
pub struct Adaptive {
    model: SharedModel,
    settings: AdaptiveSettings,
    /// The loads of the last division: what was resident.
    loads: Vec<ExpertLoad>,
    plan: Option<Plan>,
    /// Whether that plan only probes a side.
    probes: bool,
}

impl Adaptive {
    /// A policy on a model that others may use too.
    pub fn new(model: SharedModel) -> Self {
        Self::with_settings(model, AdaptiveSettings::default())
    }

    /// The same with other settings.
    pub fn with_settings(model: SharedModel, settings: AdaptiveSettings) -> Self {
        Self {
            model,
            settings,
            loads: Vec::new(),
            plan: None,
            probes: false,
        }
    }

    /// The model.
    pub fn model(&self) -> &SharedModel {
        &self.model
    }

    /// The plan of the last forward.
    pub fn last_plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// Runs forwards of `tokens` on the CPU alone, on the GPUs alone and on both, and learns from
    /// them: for each number of tokens and way one that does not count, then `repeats`.
    ///
    /// `forward` runs one forward of random tokens under the policy that it is given, which
    /// includes the call of [`Divide::observe`].
    ///
    /// # Errors
    /// The first of `forward`.
    pub fn calibrate<E>(
        &mut self,
        tokens: &[u32],
        repeats: u32,
        mut forward: impl FnMut(u32, &mut dyn Divide) -> Result<(), E>,
    ) -> Result<(), E> {
        for &tokens in tokens {
            for policy in [
                FixedPolicy::CpuOnly,
                FixedPolicy::GpuOnly,
                FixedPolicy::Fraction(0.35),
            ] {
                for round in 0..=repeats {
                    let mut forced = Forced {
                        adaptive: self,
                        policy,
                        counts: round > 0,
                    };
                    forward(tokens, &mut forced)?;
                }
            }
        }
        Ok(())
    }

    fn remember(&mut self, loads: &[ExpertLoad]) {
        self.loads.clear();
        self.loads.extend_from_slice(loads);
    }

    fn learn(&mut self, division: &Division, shape: &LayerShape, times: &ForwardTimes) {
        let mut work = Work::of(division, &self.loads);
        // What was really copied, where the executor says so.
        if shape.slice_bytes > 0 && times.streamed_bytes + times.resident_bytes > 0 {
            let slices = |bytes: u64| bytes as f64 / shape.slice_bytes as f64;
            work.streamed.slices = slices(times.streamed_bytes);
            work.resident.slices = slices(times.resident_bytes);
        }
        lock(&self.model).record(&work, shape, times, self.probes);
    }

    /// The cut to make: the fastest, or one that is worth a try; and whether it is a probe.
    fn choose(&self, model: &mut Model, problem: &Problem<'_>, shape: &LayerShape) -> (Cut, bool) {
        let cuts = problem.cuts();
        let join = model.costs(shape).join;
        let overheads = Sides::ALL.map(|sides| model.overhead(shape.tokens, sides, join));
        let seconds = |cut: &Cut| {
            let prediction = cut.prediction;
            prediction.cpu_s.max(prediction.gpu_s) + overheads[Sides::of(&cut.work) as usize]
        };
        let best = fastest(&cuts, seconds);
        if shape.devices == 0 || cuts.len() < 2 {
            return (best.clone(), false);
        }
        let best_sides = sides_of(best);
        let untried = Sides::ALL
            .into_iter()
            .filter(|&sides| sides != best_sides)
            .find_map(|sides| {
                let of_sides = |cut: &&Cut| match sides {
                    // The cut that keeps both busy tells most of them.
                    Sides::Both => cut.method == Method::Slices && sides_of(cut) == sides,
                    _ => cut.work.on_cpu() != cut.work.on_gpu() && sides_of(cut) == sides,
                };
                let cut = cuts.iter().find(of_sides)?;
                let factor = seconds(cut) / seconds(best);
                let tries = model.tries(shape.tokens, sides);
                let most = match tries.told {
                    // Nothing but outliers says nothing of the prediction.
                    0 if tries.attempts > 0 => f64::INFINITY,
                    1..3 => self.settings.early_limit,
                    3.. if tries.passed < self.settings.retry_every => 0.0,
                    _ => self.settings.limit,
                };
                let due = factor <= most;
                due.then(|| cut.clone())
            });
        if let Some(cut) = untried {
            return (cut, false);
        }
        match self.probe_is_due(model, shape, Sides::of(&best.work)) {
            true => (problem.probe(best.work.on_cpu()), true),
            false => (best.clone(), false),
        }
    }

    /// Whether the side that `sides` leaves idle should get a slice: while little is known of it at
    /// every power of two of forwards, again after a surprise, later seldom.
    fn probe_is_due(&self, model: &Model, shape: &LayerShape, sides: Sides) -> bool {
        let idle = match sides {
            Sides::Both => return false,
            Sides::Cpu => 1,
            Sides::Gpu => 0,
        };
        let next = model.forwards(shape.tokens) + 1;
        if model.samples(shape.tokens)[idle] < 3 {
            return next.is_power_of_two();
        }
        let every = self.settings.probe_every.max(1);
        let count = next / every;
        model.is_surprised(shape.tokens, idle)
            || next.is_multiple_of(every) && (count.is_power_of_two() || count.is_multiple_of(64))
    }
}

/// Which sides a cut really uses: one that has little to do beside the other tells little.
fn sides_of(cut: &Cut) -> Sides {
    let Prediction { cpu_s, gpu_s, .. } = cut.prediction;
    match Sides::of(&cut.work) {
        Sides::Both if gpu_s < 0.4 * cpu_s => Sides::Cpu,
        Sides::Both if cpu_s < 0.4 * gpu_s => Sides::Gpu,
        sides => sides,
    }
}

/// The model, whatever happened to another thread that held it: each change of it is whole.
fn lock(model: &SharedModel) -> std::sync::MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Divide for Adaptive {
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
        let (plan, probes) = {
            let mut model = lock(&self.model);
            let costs = model.costs(shape);
            let problem = Problem::new(loads, shape, &costs);
            let (cut, probes) = self.choose(&mut model, &problem, shape);
            let lopsided = sides_of(&cut) != Sides::of(&cut.work);
            (problem.plan(&cut), probes || lopsided)
        };
        self.probes = probes;
        self.remember(loads);
        let division = plan.division.clone();
        self.plan = Some(plan);
        division
    }

    fn observe(&mut self, division: &Division, shape: &LayerShape, times: &ForwardTimes) {
        self.learn(division, shape, times);
    }
}

/// A fixed policy whose forwards teach the model.
struct Forced<'a> {
    adaptive: &'a mut Adaptive,
    policy: FixedPolicy,
    counts: bool,
}

impl Divide for Forced<'_> {
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
        self.adaptive.remember(loads);
        self.adaptive.probes = false;
        self.policy.divide(loads, shape)
    }

    fn observe(&mut self, division: &Division, shape: &LayerShape, times: &ForwardTimes) {
        if self.counts {
            self.adaptive.learn(division, shape, times);
        }
    }
}

#[cfg(test)]
mod tests;
