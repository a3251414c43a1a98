//! Which experts stay in HBM.
//!
//! A resident expert saves its bytes on the link in each forward that routes to it. So experts are
//! ranked by how often they are used, counted with decay so that the ranking follows the traffic.
//! A prefill touches nearly every expert and would drown what decoding says; the two are counted
//! apart and weighed. Changes cost the link too: few a forward, and only where the outsider is
//! used more than the resident by a margin and by more than chance.

use std::collections::BTreeMap;
use std::path::Path;

use asym_gemm_formats::bank::BankGeometry;

use super::error::{DispatchError, load, save};

/// What a forward is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// A prompt: many tokens at once.
    Prefill,
    /// A token of each of some sequences.
    Decode,
}

/// How residency follows the traffic.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ResidencySettings {
    /// What a count of a decode keeps until the next decode.
    pub decode_decay: f64,
    /// The same of prefills, of which there are fewer.
    pub prefill_decay: f64,
    /// Share of decodes in the ranking, 0 to 1; prefills have the rest.
    pub decode_weight: f64,
    /// An outsider must be used this many times as much as the resident that it replaces.
    pub margin: f64,
    /// And by this many standard deviations of the counts more.
    pub deviations: f64,
    /// Most experts that change in one forward.
    pub moves_per_forward: usize,
    /// Tokens from which on a forward is a prefill, if nobody says.
    pub prefill_tokens: usize,
}

impl Default for ResidencySettings {
    /// Decodes of about a thousand forwards count; two experts a forward, which is 9 MB of an int8
    /// expert of 2048 x 768, hide behind the work of the forward.
    fn default() -> Self {
        Self {
            decode_decay: 0.999,
            prefill_decay: 0.9,
            decode_weight: 0.85,
            margin: 1.25,
            deviations: 1.5,
            moves_per_forward: 2,
            prefill_tokens: 256,
        }
    }
}

/// A fault of what a policy is made of.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// A setting outside of its range.
    #[error("{name} is {value}, expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// Experts of a profile are not those of the layer.
    #[error("the profile is of {found} experts, the layer has {expected}")]
    Experts {
        /// Experts of the profile.
        found: usize,
        /// Experts of the layer.
        expected: usize,
    },
    /// A profile without a layer of that name.
    #[error("the profile has no layer {layer:?}")]
    Layer {
        /// The name.
        layer: String,
    },
    /// A count that is no count.
    #[error("expert {expert} of the profile has count {value}")]
    Count {
        /// The expert.
        expert: usize,
        /// What is there.
        value: f64,
    },
}

impl ResidencySettings {
    fn validate(&self) -> Result<(), ResidencyError> {
        let unit = |name, value: f64, below_one: bool| {
            let fits = (0.0..=1.0).contains(&value) && !(below_one && value >= 1.0);
            let expected = match below_one {
                true => "at least 0 and below 1",
                false => "0 to 1",
            };
            match fits {
                true => Ok(()),
                false => Err(ResidencyError::Setting {
                    name,
                    value,
                    expected,
                }),
            }
        };
        unit("decode_decay", self.decode_decay, true)?;
        unit("prefill_decay", self.prefill_decay, true)?;
        unit("decode_weight", self.decode_weight, false)?;
        for (name, value, least, expected) in [
            ("margin", self.margin, 1.0, "a finite number of at least 1"),
            (
                "deviations",
                self.deviations,
                0.0,
                "a finite number of at least 0",
            ),
        ] {
            if !(value.is_finite() && value >= least) {
                return Err(ResidencyError::Setting {
                    name,
                    value,
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// One change: `evict`, then `admit` in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Move {
    /// The expert that gives way; `None` while there is room.
    pub evict: Option<u32>,
    /// The expert to be copied to HBM.
    pub admit: u32,
}

/// Decayed counts of one phase.
#[derive(Clone, Debug, PartialEq)]
struct Counts {
    decay: f64,
    /// Forwards that used each expert. Stored divided by `scale`, so that a forward touches only the
    /// experts that it used.
    raw: Vec<f64>,
    scale: f64,
    /// Sum of `raw`.
    sum: f64,
}

impl Counts {
    fn new(experts: usize, decay: f64) -> Self {
        Self {
            decay,
            raw: vec![0.0; experts],
            scale: 1.0,
            sum: 0.0,
        }
    }

    fn begin(&mut self) {
        self.scale *= self.decay;
        if self.scale < 1e-100 {
            let scale = self.scale;
            self.raw.iter_mut().for_each(|raw| *raw *= scale);
            self.sum *= scale;
            self.scale = 1.0;
        }
    }

    fn add(&mut self, expert: usize, amount: f64) {
        if let Some(raw) = self.raw.get_mut(expert) {
            *raw += amount / self.scale;
            self.sum += amount / self.scale;
        }
    }

    /// An expert's share of all uses, and the uses behind it.
    fn share(&self, expert: usize) -> (f64, f64) {
        match self.sum > 0.0 {
            true => (self.raw[expert] / self.sum, self.sum * self.scale),
            false => (0.0, 0.0),
        }
    }
}

/// Which experts of one layer lie in HBM, and which should.
#[derive(Clone, Debug, PartialEq)]
pub struct Residency {
    settings: ResidencySettings,
    capacity: usize,
    /// Bytes of an expert.
    expert_bytes: u64,
    resident: Vec<bool>,
    count: usize,
    decode: Counts,
    prefill: Counts,
}

impl Residency {
    /// A layer of this geometry that may keep `budget_bytes` of experts in HBM, none there yet.
    ///
    /// # Errors
    /// A setting outside of its range.
    pub fn new(
        geometry: &BankGeometry,
        budget_bytes: u64,
        settings: ResidencySettings,
    ) -> Result<Self, ResidencyError> {
        settings.validate()?;
        let expert_bytes = (geometry.expert_bytes() as u64).max(1);
        let experts = geometry.experts;
        Ok(Self {
            settings,
            capacity: usize::try_from(budget_bytes / expert_bytes)
                .unwrap_or(usize::MAX)
                .min(experts),
            expert_bytes,
            resident: vec![false; experts],
            count: 0,
            decode: Counts::new(experts, settings.decode_decay),
            prefill: Counts::new(experts, settings.prefill_decay),
        })
    }

    /// Experts that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes that the experts in HBM take.
    pub fn resident_bytes(&self) -> u64 {
        self.count as u64 * self.expert_bytes
    }

    /// Whether an expert is in HBM, or on its way there by a move that was handed out.
    pub fn is_resident(&self, expert: u32) -> bool {
        self.resident.get(expert as usize).copied() == Some(true)
    }

    /// The experts in HBM, ascending.
    pub fn residents(&self) -> impl Iterator<Item = u32> + '_ {
        (0..)
            .zip(&self.resident)
            .filter_map(|(expert, &resident)| resident.then_some(expert))
    }

    /// Changes the budget, as when HBM runs short. Experts beyond it are taken out at once, the
    /// least used first, and returned.
    pub fn set_budget(&mut self, budget_bytes: u64) -> Vec<u32> {
        self.set_capacity(usize::try_from(budget_bytes / self.expert_bytes).unwrap_or(usize::MAX))
    }

    /// The same in experts.
    pub(super) fn set_capacity(&mut self, experts: usize) -> Vec<u32> {
        self.capacity = experts.min(self.resident.len());
        let mut evicted = Vec::new();
        while self.count > self.capacity {
            let Some(coldest) = self.coldest() else { break };
            self.resident[coldest] = false;
            self.count -= 1;
            evicted.push(coldest as u32);
        }
        evicted
    }

    /// The phase of a forward of so many tokens, if nobody says.
    pub fn phase_of(&self, tokens: usize) -> Phase {
        match tokens >= self.settings.prefill_tokens {
            true => Phase::Prefill,
            false => Phase::Decode,
        }
    }

    /// Counts a forward: the experts that had rows, each with how many. Experts that the layer does
    /// not have are passed over.
    ///
    /// A decode counts an expert once, whatever its rows: its bytes cross once. A prefill uses most
    /// experts, so there the share of the rows tells them apart.
    pub fn record(&mut self, phase: Phase, loads: impl IntoIterator<Item = (u32, u32)>) {
        match phase {
            Phase::Decode => {
                self.decode.begin();
                for (expert, rows) in loads {
                    if rows > 0 {
                        self.decode.add(expert as usize, 1.0);
                    }
                }
            }
            Phase::Prefill => {
                self.prefill.begin();
                let loads: Vec<(u32, u32)> = loads.into_iter().collect();
                let rows: f64 = loads.iter().map(|&(_, rows)| f64::from(rows)).sum();
                let active = loads.iter().filter(|(_, rows)| *rows > 0).count() as f64;
                for (expert, own) in loads {
                    if own > 0 {
                        let amount = f64::from(own) / rows * active;
                        self.prefill.add(expert as usize, amount);
                    }
                }
            }
        }
    }

    /// An expert's rank: the weighed shares of both phases, of those that have been seen.
    fn score(&self, expert: usize) -> f64 {
        let (decode, seen_decode) = self.decode.share(expert);
        let (prefill, seen_prefill) = self.prefill.share(expert);
        let weight = self.settings.decode_weight;
        match (seen_decode > 0.0, seen_prefill > 0.0) {
            (true, true) => weight * decode + (1.0 - weight) * prefill,
            (true, false) => decode,
            _ => prefill,
        }
    }

    /// The rank of an expert that the layer has.
    pub(super) fn score_of(&self, expert: u32) -> f64 {
        self.score(expert as usize)
    }

    /// Uses behind the scores: how far chance moves them.
    fn uses(&self) -> f64 {
        (self.decode.sum * self.decode.scale).max(self.prefill.sum * self.prefill.scale)
    }

    fn coldest(&self) -> Option<usize> {
        (0..self.resident.len())
            .filter(|&expert| self.resident[expert])
            .min_by(|&a, &b| self.score(a).total_cmp(&self.score(b)).then(b.cmp(&a)))
    }

    fn hottest_outside(&self) -> Option<usize> {
        (0..self.resident.len())
            .filter(|&expert| !self.resident[expert])
            .max_by(|&a, &b| self.score(a).total_cmp(&self.score(b)).then(b.cmp(&a)))
            .filter(|&expert| self.score(expert) > 0.0)
    }

    /// The changes to make before the next forward, at most
    /// [`moves_per_forward`](ResidencySettings::moves_per_forward), most worthwhile first. They
    /// count as made; see [`Residency::undo`] for one that fails.
    pub fn plan(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        while moves.len() < self.settings.moves_per_forward && self.capacity > 0 {
            let Some(admit) = self.hottest_outside() else {
                break;
            };
            let evict = match self.count < self.capacity {
                true => None,
                false => {
                    let Some(evict) = self.coldest() else { break };
                    if !self.is_worth_it(self.score(evict), self.score(admit)) {
                        break;
                    }
                    Some(evict)
                }
            };
            if let Some(evict) = evict {
                self.resident[evict] = false;
            } else {
                self.count += 1;
            }
            self.resident[admit] = true;
            moves.push(Move {
                evict: evict.map(|expert| expert as u32),
                admit: admit as u32,
            });
        }
        moves
    }

    /// Whether an outsider's share is larger than a resident's by the margin and beyond chance:
    /// counts of independent uses vary by their square root.
    fn is_worth_it(&self, resident: f64, outside: f64) -> bool {
        let uses = self.uses();
        let chance = self.settings.deviations * ((resident + outside) * uses).sqrt();
        outside > resident * self.settings.margin && (outside - resident) * uses > chance
    }

    /// Takes a move back that could not be made: its copy failed or there was no memory. The
    /// evicted expert is gone all the same.
    pub fn undo(&mut self, failed: Move) {
        if let Some(resident) = self.resident.get_mut(failed.admit as usize)
            && std::mem::take(resident)
        {
            self.count -= 1;
        }
    }

    /// What the counts say, to be kept.
    pub fn profile(&self) -> LayerProfile {
        let counts = |counts: &Counts| counts.raw.iter().map(|raw| raw * counts.scale).collect();
        LayerProfile {
            decode: counts(&self.decode),
            prefill: counts(&self.prefill),
        }
    }

    /// Begins with the counts of a profile.
    ///
    /// # Errors
    /// A profile of another number of experts, or counts that are negative or not finite.
    pub fn apply(&mut self, profile: &LayerProfile) -> Result<(), ResidencyError> {
        for counts in [&profile.decode, &profile.prefill] {
            if counts.len() != self.resident.len() {
                return Err(ResidencyError::Experts {
                    found: counts.len(),
                    expected: self.resident.len(),
                });
            }
            let bad = |value: &f64| !(0.0..1e12).contains(value);
            if let Some(expert) = counts.iter().position(bad) {
                let value = counts[expert];
                return Err(ResidencyError::Count { expert, value });
            }
        }
        let apply = |counts: &mut Counts, from: &[f64]| {
            counts.raw.copy_from_slice(from);
            counts.scale = 1.0;
            counts.sum = from.iter().sum();
        };
        apply(&mut self.decode, &profile.decode);
        apply(&mut self.prefill, &profile.prefill);
        Ok(())
    }
}

/// Decayed counts of one layer's experts.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerProfile {
    /// Decodes that used each expert.
    pub decode: Vec<f64>,
    /// Prefills that used each expert, weighed by their rows.
    pub prefill: Vec<f64>,
}

/// Profiles of the layers of a model, by their names.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profiles {
    /// The layers.
    pub layers: BTreeMap<String, LayerProfile>,
}

impl Profiles {
    /// Reads a file of [`Profiles::save`].
    ///
    /// # Errors
    /// A file that cannot be read or is another.
    pub fn load(path: &Path) -> Result<Self, DispatchError> {
        load(path)
    }

    /// Writes a file, which appears whole or not at all.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn save(&self, path: &Path) -> Result<(), DispatchError> {
        save(path, self)
    }

    /// The profile of a layer.
    ///
    /// # Errors
    /// A name that is not there.
    pub fn layer(&self, name: &str) -> Result<&LayerProfile, ResidencyError> {
        self.layers.get(name).ok_or_else(|| ResidencyError::Layer {
            layer: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
