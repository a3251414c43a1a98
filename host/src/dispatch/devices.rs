//! The GPUs' part of a division over several GPUs.
//!
//! Either each GPU takes some slices of every expert, so that all links work on each expert at
//! once, or whole experts. Both follow the rates of the links; slices come nearer to them.

use std::ops::Range;

use crate::moe::division::Division;

/// What one GPU computes of a share.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceShare {
    /// Index of the GPU in the rates.
    pub device: usize,
    /// Index of the share in the division.
    pub share: usize,
    /// Slices of the share's experts, not empty.
    pub slices: Range<u32>,
}

/// Shares of the whole; rates that are not positive numbers get nothing, unless all are so.
fn weights(rates: &[f64]) -> Vec<f64> {
    let rate = |&rate: &f64| {
        if rate.is_finite() && rate > 0.0 {
            rate
        } else {
            0.0
        }
    };
    let sum: f64 = rates.iter().map(rate).sum();
    match sum > 0.0 && sum.is_finite() {
        true => rates.iter().map(|r| rate(r) / sum).collect(),
        false => vec![1.0 / rates.len() as f64; rates.len()],
    }
}

/// Cuts the GPU slices of each share between the devices, in their order, by the rates of their
/// links; what rounding keeps from a device in one share it gets in the next ones.
///
/// No devices, no shares.
pub fn by_slices(division: &Division, rates: &[f64]) -> Vec<DeviceShare> {
    if rates.is_empty() {
        return Vec::new();
    }
    let weights = weights(rates);
    let mut owed = vec![0.0; rates.len()];
    let mut shares = Vec::new();
    for (index, share) in division.shares.iter().enumerate() {
        let count = share.gpu_slices.len() as u32;
        for (owed, weight) in owed.iter_mut().zip(&weights) {
            *owed += f64::from(count) * weight;
        }
        // Whole slices that are owed, as far as there are any; then one each for the most owed.
        let mut given: Vec<u32> = owed
            .iter()
            .map(|owed| owed.max(0.0).floor() as u32)
            .collect();
        let mut left = count;
        for given in &mut given {
            *given = (*given).min(left);
            left -= *given;
        }
        while left > 0 {
            let most = (0..rates.len())
                .max_by(|&a, &b| {
                    let still = |d: usize| owed[d] - f64::from(given[d]);
                    still(a).total_cmp(&still(b)).then(b.cmp(&a))
                })
                .unwrap_or(0);
            given[most] += 1;
            left -= 1;
        }
        let mut start = share.gpu_slices.start;
        for (device, &count) in given.iter().enumerate() {
            owed[device] -= f64::from(count);
            if count > 0 {
                shares.push(DeviceShare {
                    device,
                    share: index,
                    slices: start..start + count,
                });
                start += count;
            }
        }
    }
    shares
}

/// Gives the GPU slices of each share to one device: the largest first, each to the device that
/// would have them soonest. In the order of the shares.
///
/// No devices, no shares.
pub fn by_experts(division: &Division, rates: &[f64]) -> Vec<DeviceShare> {
    if rates.is_empty() {
        return Vec::new();
    }
    let weights = weights(rates);
    let mut order: Vec<usize> = (0..division.shares.len())
        .filter(|&i| !division.shares[i].gpu_slices.is_empty())
        .collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(division.shares[i].gpu_slices.len()), i));
    let mut slices = vec![0.0; rates.len()];
    let mut shares: Vec<DeviceShare> = Vec::with_capacity(order.len());
    for index in order {
        let range = division.shares[index].gpu_slices.clone();
        let end = |device: usize| match weights[device] > 0.0 {
            true => (slices[device] + range.len() as f64) / weights[device],
            false => f64::INFINITY,
        };
        let device = (0..rates.len())
            .min_by(|&a, &b| end(a).total_cmp(&end(b)))
            .unwrap_or(0);
        slices[device] += range.len() as f64;
        shares.push(DeviceShare {
            device,
            share: index,
            slices: range,
        });
    }
    shares.sort_by_key(|share| share.share);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::division::ExpertShare;
    use proptest::prelude::*;

    fn division(gpu: &[(u32, u32)]) -> Division {
        Division {
            shares: (0..)
                .zip(gpu)
                .map(|(expert, &(cpu, slices))| ExpertShare::split(expert, 0..1, cpu, slices))
                .collect(),
        }
    }

    fn totals(shares: &[DeviceShare], devices: usize) -> Vec<u32> {
        let mut totals = vec![0; devices];
        for share in shares {
            totals[share.device] += share.slices.len() as u32;
        }
        totals
    }

    #[test]
    fn slices_follow_the_rates_over_all_shares() {
        let division = division(&[(1, 6); 40]);
        assert_eq!(totals(&by_slices(&division, &[50.0, 50.0]), 2), [100, 100]);
        assert_eq!(totals(&by_slices(&division, &[60.0, 40.0]), 2), [120, 80]);
        assert_eq!(
            totals(&by_slices(&division, &[f64::NAN, 40.0]), 2),
            [0, 200]
        );
        assert_eq!(totals(&by_slices(&division, &[0.0, 0.0]), 2), [100, 100]);
        assert!(by_slices(&division, &[]).is_empty());
    }

    #[test]
    fn whole_experts_are_balanced_too() {
        let division = division(&[(0, 6), (2, 6), (6, 6), (0, 6), (4, 6), (0, 6), (0, 6)]);
        let shares = by_experts(&division, &[50.0, 50.0]);
        let totals = totals(&shares, 2);
        assert_eq!(totals.iter().sum::<u32>(), 30);
        assert!(totals[0].abs_diff(totals[1]) <= 2, "{totals:?}");
        assert!(shares.is_sorted_by_key(|share| share.share));
        assert!(shares.iter().all(|share| share.share != 2));
    }

    proptest! {
        /// Each GPU slice of each share lies with exactly one device, and no device is more than a
        /// slice for each device away from what its rate deserves.
        #[test]
        fn every_gpu_slice_has_one_device(
            cuts in proptest::collection::vec((0u32..9, 1u32..9), 0..40),
            rates in proptest::collection::vec(1.0..100.0f64, 1..5),
        ) {
            let division = division(&cuts);
            for shares in [by_slices(&division, &rates), by_experts(&division, &rates)] {
                let mut next: Vec<u32> =
                    division.shares.iter().map(|share| share.gpu_slices.start).collect();
                for part in &shares {
                    prop_assert!(part.device < rates.len() && !part.slices.is_empty());
                    prop_assert_eq!(part.slices.start, next[part.share]);
                    next[part.share] = part.slices.end;
                }
                for (share, next) in division.shares.iter().zip(next) {
                    prop_assert_eq!(share.gpu_slices.end, next.max(share.gpu_slices.start));
                }
            }
            let shares = by_slices(&division, &rates);
            let all: u32 = division.shares.iter().map(|s| s.gpu_slices.len() as u32).sum();
            let sum: f64 = rates.iter().sum();
            for (total, rate) in totals(&shares, rates.len()).into_iter().zip(&rates) {
                let deserved = f64::from(all) * rate / sum;
                prop_assert!((f64::from(total) - deserved).abs() <= rates.len() as f64);
            }
        }
    }
}
