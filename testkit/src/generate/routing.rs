//! Routings: which experts each token goes to, and with what weight.

use rand::seq::{SliceRandom, index};
use rand::{Rng, RngExt};

use super::rng;

/// How tokens spread over the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingKind {
    /// Every expert equally likely; distinct within a token.
    Uniform,
    /// The r-th most popular expert with probability ~ 1/r; distinct within a token.
    Zipf,
    /// One expert (in the middle) is every token's first choice, the rest uniform.
    OneHot,
    /// Every slot of every token on the last expert: all others are empty.
    LastExpert,
    /// The first half of the tokens on expert 0, the rest on the last expert.
    FirstAndLast,
    /// Uniform with a third of the slots empty (id −1), all slots of token 0 among them.
    Holes,
    /// Every token names one expert in each of its slots, another for each token.
    Duplicates,
}

impl RoutingKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Uniform,
        Self::Zipf,
        Self::OneHot,
        Self::LastExpert,
        Self::FirstAndLast,
        Self::Holes,
        Self::Duplicates,
    ];
}

/// The router's answer for a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingCase {
    /// Tokens T.
    pub tokens: usize,
    /// Slots of each token.
    pub top_k: usize,
    /// Experts E.
    pub experts: usize,
    /// Expert of each slot, [T, top_k]; −1 marks an empty slot.
    pub ids: Vec<i32>,
    /// Weight of each slot, [T, top_k]. Those of a token's slots sum to 1, before
    /// slots are emptied; an empty slot has [`RoutingCase::HOLE_WEIGHT`].
    pub weights: Vec<f32>,
}

impl RoutingCase {
    /// Weight of an empty slot: so large that a combine that uses it is seen.
    pub const HOLE_WEIGHT: f32 = 1e30;

    /// A routing of `tokens` tokens.
    ///
    /// # Panics
    /// If `top_k` is 0 or above `experts`.
    pub fn new(kind: RoutingKind, seed: u64, tokens: usize, top_k: usize, experts: usize) -> Self {
        assert!(
            0 < top_k && top_k <= experts,
            "top_k {top_k} of {experts} experts"
        );
        let mut rng = rng(seed, 2);
        let mut by_popularity: Vec<usize> = (0..experts).collect();
        by_popularity.shuffle(&mut rng);
        let mut ids = Vec::with_capacity(tokens * top_k);
        let mut weights = Vec::with_capacity(tokens * top_k);
        for token in 0..tokens {
            let chosen: Vec<usize> = match kind {
                RoutingKind::Uniform | RoutingKind::Holes => {
                    index::sample(&mut rng, experts, top_k).into_vec()
                }
                RoutingKind::Zipf => zipf(&mut rng, top_k, &by_popularity),
                RoutingKind::OneHot => one_hot(&mut rng, top_k, experts),
                RoutingKind::LastExpert => vec![experts - 1; top_k],
                RoutingKind::FirstAndLast if token < tokens / 2 => vec![0; top_k],
                RoutingKind::FirstAndLast => vec![experts - 1; top_k],
                RoutingKind::Duplicates => vec![by_popularity[token % experts]; top_k],
            };
            ids.extend(chosen.into_iter().map(|e| e as i32));
            weights.extend(normalised_weights(&mut rng, top_k));
        }
        let mut case = Self {
            tokens,
            top_k,
            experts,
            ids,
            weights,
        };
        if kind == RoutingKind::Holes {
            for slot in 0..case.ids.len() {
                if slot < top_k || rng.random_ratio(1, 3) {
                    case.ids[slot] = -1;
                    case.weights[slot] = Self::HOLE_WEIGHT;
                }
            }
        }
        case
    }

    /// Slots on each expert.
    pub fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.experts];
        for &id in &self.ids {
            if let Ok(expert) = usize::try_from(id) {
                counts[expert] += 1;
            }
        }
        counts
    }

    /// The slots on `expert` in token order, as indices into `ids`; the token is the
    /// index divided by `top_k`.
    pub fn slots_of(&self, expert: usize) -> Vec<usize> {
        (0..self.ids.len())
            .filter(|&slot| self.ids[slot] == expert as i32)
            .collect()
    }
}

/// Without replacement, by popularity.
fn zipf(rng: &mut impl Rng, top_k: usize, by_popularity: &[usize]) -> Vec<usize> {
    let mut left = by_popularity.to_vec();
    let mut mass: Vec<f64> = (1..=left.len()).map(|rank| 1.0 / rank as f64).collect();
    (0..top_k)
        .map(|_| {
            let mut point = rng.random_range(0.0..mass.iter().sum());
            let at = mass
                .iter()
                .position(|&m| {
                    point -= m;
                    point < 0.0
                })
                .unwrap_or(mass.len() - 1);
            mass.remove(at);
            left.remove(at)
        })
        .collect()
}

fn one_hot(rng: &mut impl Rng, top_k: usize, experts: usize) -> Vec<usize> {
    let hot = experts / 2;
    let mut chosen = vec![hot];
    let rest = index::sample(rng, experts - 1, top_k - 1);
    chosen.extend(rest.into_iter().map(|e| if e < hot { e } else { e + 1 }));
    chosen
}

/// Descending, as routers return them.
fn normalised_weights(rng: &mut impl Rng, top_k: usize) -> Vec<f32> {
    let mut weights: Vec<f32> = (0..top_k).map(|_| rng.random_range(0.05f32..1.0)).collect();
    weights.sort_by(|a, b| b.total_cmp(a));
    let sum: f32 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    #[test]
    fn every_kind_is_well_formed() {
        for kind in RoutingKind::ALL {
            for (tokens, top_k, experts) in
                [(0, 1, 1), (1, 1, 1), (7, 2, 5), (64, 8, 8), (33, 3, 61)]
            {
                let case = RoutingCase::new(kind, 9, tokens, top_k, experts);
                assert_eq!(case, RoutingCase::new(kind, 9, tokens, top_k, experts));
                assert_eq!(case.ids.len(), tokens * top_k);
                assert_eq!(case.weights.len(), tokens * top_k);
                assert!(case.ids.iter().all(|&id| -1 <= id && id < experts as i32));
                assert_eq!(
                    case.ids.contains(&-1),
                    kind == RoutingKind::Holes && tokens > 0
                );
                if kind != RoutingKind::Holes {
                    for weights in case.weights.chunks(top_k) {
                        assert_relative_eq!(weights.iter().sum::<f32>(), 1.0, epsilon = 1e-6);
                        assert!(weights.iter().all(|&w| w > 0.0));
                    }
                }
                let real = case.ids.iter().filter(|&&id| id >= 0).count();
                assert_eq!(case.counts().iter().sum::<usize>(), real);
                for (expert, &count) in case.counts().iter().enumerate() {
                    assert_eq!(case.slots_of(expert).len(), count);
                }
            }
        }
    }

    fn counts(kind: RoutingKind) -> Vec<usize> {
        RoutingCase::new(kind, 3, 200, 4, 16).counts()
    }

    #[test]
    fn kinds_spread_as_they_say() {
        use RoutingKind::*;
        assert!(counts(Uniform).iter().all(|&n| n > 20));
        let mut zipf = counts(Zipf);
        zipf.sort_unstable();
        assert!(zipf[15] > 3 * zipf[0].max(1), "{zipf:?}");
        assert_eq!(counts(OneHot)[8], 200);
        assert_eq!(counts(LastExpert)[15], 800);
        assert_eq!(
            (counts(FirstAndLast)[0], counts(FirstAndLast)[15]),
            (400, 400)
        );
        let holes = RoutingCase::new(Holes, 3, 200, 4, 16);
        assert_eq!(holes.ids[..4], [-1; 4]);
        let empty = holes.ids.iter().filter(|&&id| id < 0).count();
        assert!((200..340).contains(&empty), "{empty}");
        let duplicates = RoutingCase::new(Duplicates, 3, 200, 4, 16);
        assert!(
            duplicates
                .ids
                .chunks(4)
                .all(|c| c.iter().all(|&id| id == c[0]))
        );
        assert!(duplicates.counts().iter().all(|&n| n >= 4 * 12));
    }

    #[test]
    fn distinct_kinds_do_not_repeat_within_a_token() {
        for kind in [RoutingKind::Uniform, RoutingKind::Zipf, RoutingKind::OneHot] {
            let case = RoutingCase::new(kind, 3, 100, 5, 6);
            for ids in case.ids.chunks(5) {
                let mut ids = ids.to_vec();
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(ids.len(), 5, "{kind:?}");
            }
        }
    }
}
