//! Linear least squares that stay near their prior and shrug off outliers.

/// How much the prior weighs against one observation.
const RIDGE: f64 = 5e-3;
/// Residuals beyond this many robust standard deviations count less.
const HUBER: f64 = 1.5;
/// Relative noise that is always granted, so that few samples that agree do not make outliers of
/// the others.
const LEAST_NOISE: f64 = 0.02;
/// A multiplier outside of this is a fault of the observations.
const LIMITS: (f64, f64) = (0.02, 50.0);
/// Weight of an observation against the next newer one.
const RECENCY: f64 = 0.94;

/// One observation: the prior's seconds by feature, and the seconds that it took.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Sample<const N: usize> {
    /// Seconds of each feature by the prior.
    #[serde(with = "array")]
    pub(super) prior: [f64; N],
    /// Seconds that it took.
    pub(super) seconds: f64,
    /// Whether the other side had nothing to do meanwhile.
    pub(super) alone: bool,
}

/// serde knows arrays of 32 elements at most and not of a generic length.
mod array {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer, const N: usize>(
        values: &[f64; N],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        values.as_slice().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(
        from: D,
    ) -> Result<[f64; N], D::Error> {
        let values = Vec::<f64>::deserialize(from)?;
        let found = values.len();
        <[f64; N]>::try_from(values)
            .map_err(|_| D::Error::custom(format!("{found} features, expected {N}")))
    }
}

impl<const N: usize> Sample<N> {
    /// Whether it says anything.
    pub(super) fn is_usable(&self) -> bool {
        let predicted: f64 = self.prior.iter().sum();
        let finite = self.prior.iter().all(|f| f.is_finite() && *f >= 0.0);
        finite && self.seconds.is_finite() && self.seconds > 0.0 && predicted > 0.0
    }
}

/// Fits the multipliers of the prior: minimises
/// `Σ w (Σ_j θ_j f_j / t - 1)² + RIDGE · Σ_j (θ_j - 1)²` over `samples`, each with a weight; relative errors, so that short forwards count as much as long ones.
///
/// Huber weights over three rounds; multipliers at a limit are held there and the others fitted
/// again.
pub(super) fn fit<'a, const N: usize>(
    samples: impl Iterator<Item = (&'a Sample<N>, f64)> + Clone,
) -> [f64; N] {
    let mut theta = [1.0; N];
    let mut residuals = Vec::new();
    for round in 0..3 {
        let scale = match round {
            0 => f64::INFINITY,
            _ => robust_scale(&mut residuals),
        };
        let mut normal = Normal::prior();
        for (sample, weight) in samples.clone() {
            let huber = match relative(&theta, sample).abs() {
                _ if round == 0 => 1.0,
                residual => (HUBER * scale / residual).min(1.0),
            };
            normal.add(&sample.prior, sample.seconds, weight * huber);
        }
        theta = normal.solve_within_limits();
        residuals.clear();
        residuals.extend(samples.clone().map(|(s, _)| relative(&theta, s).abs()));
    }
    theta
}

/// Weight of the sample `age` places before the newest.
pub(super) fn recency(age: usize) -> f64 {
    RECENCY.powi(age.min(1000) as i32)
}

fn relative<const N: usize>(theta: &[f64; N], sample: &Sample<N>) -> f64 {
    dot(theta, &sample.prior) / sample.seconds - 1.0
}

pub(super) fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Standard deviation by the median of absolute residuals.
fn robust_scale(residuals: &mut [f64]) -> f64 {
    if residuals.is_empty() {
        return LEAST_NOISE;
    }
    let middle = residuals.len() / 2;
    let (_, median, _) = residuals.select_nth_unstable_by(middle, f64::total_cmp);
    (1.4826 * *median).max(LEAST_NOISE)
}

/// Normal equations of the fit.
struct Normal<const N: usize> {
    matrix: [[f64; N]; N],
    right: [f64; N],
}

impl<const N: usize> Normal<N> {
    fn prior() -> Self {
        let mut matrix = [[0.0; N]; N];
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] = RIDGE;
        }
        Self {
            matrix,
            right: [RIDGE; N],
        }
    }

    fn add(&mut self, features: &[f64; N], seconds: f64, weight: f64) {
        for i in 0..N {
            let a = weight * features[i] / seconds;
            self.right[i] += a;
            for (sum, f) in self.matrix[i].iter_mut().zip(features) {
                *sum += a * f / seconds;
            }
        }
    }

    fn solve_within_limits(&self) -> [f64; N] {
        let mut held = [None; N];
        for _ in 0..=N {
            let theta = self.solve(&held);
            let mut moved = false;
            for (held, theta) in held.iter_mut().zip(theta) {
                if held.is_none() && !(LIMITS.0..=LIMITS.1).contains(&theta) {
                    *held = Some(theta.clamp(LIMITS.0, LIMITS.1));
                    moved = true;
                }
            }
            if !moved {
                return theta;
            }
        }
        held.map(|held| held.unwrap_or(1.0))
    }

    /// Solves for the multipliers that are not held, by Cholesky's decomposition; the ridge makes
    /// the matrix positive definite.
    fn solve(&self, held: &[Option<f64>; N]) -> [f64; N] {
        let mut a = self.matrix;
        let mut b = self.right;
        for i in 0..N {
            match held[i] {
                Some(value) => {
                    a[i] = [0.0; N];
                    a[i][i] = 1.0;
                    b[i] = value;
                }
                None => {
                    for j in 0..N {
                        if let Some(value) = held[j] {
                            b[i] -= a[i][j] * value;
                            a[i][j] = 0.0;
                        }
                    }
                }
            }
        }
        for i in 0..N {
            for j in 0..=i {
                let inner: f64 = (0..j).map(|k| a[i][k] * a[j][k]).sum();
                let value = a[i][j] - inner;
                a[i][j] = match i == j {
                    true => value.max(1e-12).sqrt(),
                    false => value / a[j][j],
                };
            }
            let inner: f64 = (0..i).map(|k| a[i][k] * b[k]).sum();
            b[i] = (b[i] - inner) / a[i][i];
        }
        for i in (0..N).rev() {
            let inner: f64 = (i + 1..N).map(|k| a[k][i] * b[k]).sum();
            b[i] = (b[i] - inner) / a[i][i];
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(truth: [f64; 3], count: usize) -> Vec<Sample<3>> {
        (0..count)
            .map(|i| {
                let i = i as f64;
                let prior = [1.0, 0.5 * i, (i * 7.0) % 5.0];
                let seconds = dot(&truth, &prior);
                Sample {
                    prior,
                    seconds,
                    alone: false,
                }
            })
            .collect()
    }

    fn of(samples: &[Sample<3>]) -> [f64; 3] {
        fit(samples.iter().map(|sample| (sample, 1.0)))
    }

    #[test]
    fn nothing_seen_is_the_prior() {
        assert_eq!(of(&[]), [1.0; 3]);
    }

    #[test]
    fn exact_observations_are_found_again() {
        let truth = [3.0, 0.4, 1.5];
        for (found, truth) in of(&samples(truth, 30)).iter().zip(truth) {
            assert!((found / truth - 1.0).abs() < 0.02, "{found} for {truth}");
        }
    }

    /// What the observations leave open stays as the prior has it.
    #[test]
    fn one_observation_scales_what_it_saw() {
        let one = Sample {
            prior: [0.0, 2.0, 0.0],
            seconds: 6.0,
            alone: true,
        };
        let [a, b, c] = of(&[one]);
        assert_eq!((a, c), (1.0, 1.0));
        assert!((b - 3.0).abs() < 0.1, "{b}");
    }

    #[test]
    fn a_tenth_of_wild_outliers_does_not_matter() {
        let truth = [2.0, 0.7, 1.2];
        let mut samples = samples(truth, 40);
        for sample in samples.iter_mut().step_by(10) {
            sample.seconds *= 8.0;
        }
        for (found, truth) in of(&samples).iter().zip(truth) {
            assert!((found / truth - 1.0).abs() < 0.12, "{found} for {truth}");
        }
    }

    #[test]
    fn multipliers_stay_within_their_limits() {
        let absurd = Sample {
            prior: [1.0, 0.0, 0.0],
            seconds: 1e9,
            alone: true,
        };
        let [a, b, _] = of(&vec![absurd; 20]);
        assert!(a <= LIMITS.1 && b == 1.0, "{a} {b}");
        // The second feature seems to speed things up.
        let odd: Vec<_> = (1..20)
            .map(|i| Sample {
                prior: [1.0, 0.05 * f64::from(i), 0.0],
                seconds: 2.0 - 0.05 * f64::from(i),
                alone: true,
            })
            .collect();
        let [_, b, _] = of(&odd);
        assert_eq!(b, LIMITS.0);
    }

    #[test]
    fn unusable_samples_are_seen() {
        let good = Sample {
            prior: [1.0, 0.0, 0.0],
            seconds: 1.0,
            alone: true,
        };
        assert!(good.is_usable());
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(!Sample { seconds, ..good }.is_usable());
        }
        let nothing = Sample {
            prior: [0.0; 3],
            ..good
        };
        assert!(!nothing.is_usable());
    }
}
