//! Tables of sizes: one, primes, and each side of every tile edge.

/// Rows of a group: every count up to one past a 128-row tile, and around two tiles.
pub fn row_counts() -> impl Iterator<Item = usize> {
    (1..=129).chain(255..=257)
}

/// 1 and both sides of one and two tiles, ascending and without repeats.
pub fn around(tile: usize) -> Vec<usize> {
    let mut sizes = vec![1];
    for edge in [tile, 2 * tile] {
        sizes.extend([edge - 1, edge, edge + 1]);
    }
    sizes.retain(|&size| size > 0);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// (K, N) of single products: small enough for the f64 reference, odd enough to leave
/// remainders in both dimensions for tiles of 16, 32, 64, 128 and 256.
pub fn gemm_shapes() -> &'static [(usize, usize)] {
    &[
        (1, 1),
        (1, 129),
        (2, 3),
        (7, 5),
        (15, 17),
        (16, 16),
        (31, 33),
        (32, 8),
        (63, 65),
        (64, 64),
        (65, 63),
        (97, 101),
        (127, 129),
        (128, 128),
        (129, 127),
        (191, 2),
        (255, 31),
        (256, 256),
        (257, 10),
        (383, 193),
        (509, 97),
        (512, 1),
        (1021, 61),
        (1024, 48),
        (2053, 19),
    ]
}

/// (H, I) of experts: ragged slices of 128 in I, padded units and panels in H.
pub fn expert_shapes() -> &'static [(usize, usize)] {
    &[
        (1, 1),
        (16, 32),
        (17, 5),
        (63, 129),
        (64, 128),
        (96, 127),
        (100, 33),
        (127, 64),
        (128, 96),
        (129, 128),
        (192, 160),
        (251, 257),
        (256, 384),
        (320, 255),
        (509, 131),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_counts_are_the_promised_ones() {
        let counts: Vec<usize> = row_counts().collect();
        assert_eq!(counts.len(), 132);
        assert_eq!(counts[..3], [1, 2, 3]);
        assert_eq!(counts[128..], [129, 255, 256, 257]);
    }

    #[test]
    fn around_small_and_large_tiles() {
        assert_eq!(around(64), [1, 63, 64, 65, 127, 128, 129]);
        assert_eq!(around(1), [1, 2, 3]);
        assert_eq!(around(2), [1, 2, 3, 4, 5]);
    }

    /// Every tile size leaves a remainder and none, in each dimension.
    #[test]
    fn tables_hit_both_sides_of_every_tile() {
        for tile in [16, 32, 64, 128] {
            for table in [gemm_shapes(), expert_shapes()] {
                assert!(table.iter().any(|s| s.0 % tile == 0));
                assert!(table.iter().any(|s| s.1 % tile == 0));
                for rest in [1, tile - 1] {
                    assert!(table.iter().any(|s| s.0 % tile == rest), "{tile} {rest}");
                    assert!(table.iter().any(|s| s.1 % tile == rest), "{tile} {rest}");
                }
            }
        }
    }
}
