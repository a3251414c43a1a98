//! Which experts tokens go to, for estimates: drawn, not recorded.

/// A generator of random bits, the same for the same seed (SplitMix64).
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in 0..1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub(super) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Popularity of experts by Zipf's law, the first the most popular; all alike at exponent 0.
pub(super) fn popularity(experts: usize, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=experts)
        .map(|rank| (rank as f64).powf(-exponent))
        .collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Tokens up to which each is drawn; the rows of more are nearly normal.
const DRAWN: usize = 64;

/// Rows of each expert where `tokens` tokens choose `top_k` different ones each.
pub(super) fn route(
    random: &mut Random,
    popularity: &[f64],
    tokens: usize,
    top_k: usize,
) -> Vec<u32> {
    let mut rows = vec![0; popularity.len()];
    if tokens > DRAWN {
        for (rows, popularity) in rows.iter_mut().zip(popularity) {
            let mean = (popularity * (tokens * top_k) as f64).min(tokens as f64);
            let value = mean + mean.sqrt() * random.normal();
            *rows = value.round().clamp(0.0, tokens as f64) as u32;
        }
        return rows;
    }
    for _ in 0..tokens {
        // The largest of ln(u) / weight are a weighted choice without replacement.
        let mut keys: Vec<(f64, usize)> = popularity
            .iter()
            .enumerate()
            .map(|(expert, weight)| (random.unit().ln() / weight, expert))
            .collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, expert) in keys.iter().take(top_k) {
            rows[*expert] += 1;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_choose_different_experts_and_popular_ones_more() {
        let mut random = Random(1);
        let popularity = popularity(32, 1.1);
        let rows = route(&mut random, &popularity, 60, 4);
        assert_eq!(rows.iter().sum::<u32>(), 240);
        assert!(rows.iter().all(|&rows| rows <= 60));
        assert!(rows[0] > rows[16]);
        let many = route(&mut random, &popularity, 4096, 4);
        let sum = f64::from(many.iter().sum::<u32>());
        // The most popular would be chosen more than once by a token.
        assert!((0.7..1.05).contains(&(sum / (4096.0 * 4.0))), "{sum}");
    }
}
