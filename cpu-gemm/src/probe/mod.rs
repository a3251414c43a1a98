//! What this machine can do at most, measured on the workers that run the kernels.
//!
//! - [`dram`]: how fast weights can be read at all, the ceiling of products with few tokens;
//! - [`products`]: how fast each instruction set multiplies what is in registers already, the
//!   ceiling of products with many.
//!
//! A share of a ceiling says something only if both were measured in the same run with the same
//! number of threads: rates of a shared machine change between runs by tens of percent.

pub mod dram;
pub mod products;
mod read;
#[cfg(target_arch = "x86_64")]
mod x86;

/// The middle of the values; of an even number, the lower of both. `None` if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    Some(values[middle])
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.0));
        assert_eq!(median([]), None);
    }
}
