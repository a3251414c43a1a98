//! Element by element against expected values.

use super::Bound;
use super::report::{Coordinate, GroupReport, Mismatch, Report};
use crate::reference::Expected;

/// An element type that has an exact f64 value.
pub trait Real: Copy {
    /// That value.
    fn real(self) -> f64;
}

impl Real for f32 {
    fn real(self) -> f64 {
        self as f64
    }
}

impl Real for f64 {
    fn real(self) -> f64 {
        self
    }
}

impl Real for half::bf16 {
    fn real(self) -> f64 {
        self.to_f64()
    }
}

impl Real for half::f16 {
    fn real(self) -> f64 {
        self.to_f64()
    }
}

/// Compares `got` [rows, cols] with `want` element by element in the rows of its groups.
///
/// NaN never passes, neither as a result nor as an expected value. An infinity passes
/// if the expected value is the same infinity, or rounds to it in the output type of a
/// [`Bound::Product`]. Rows in no group are not looked at: see
/// [`assert_poisoned`](super::assert_poisoned).
///
/// # Errors
/// [`Mismatch::Length`], or [`Mismatch::Element`] with the first bad element, both values
/// and an account of all groups.
pub fn check_close<T: Real>(
    name: &str,
    got: &[T],
    want: &Expected,
    bound: Bound,
) -> Result<Report, Mismatch> {
    if got.len() != want.value.len() {
        return Err(Mismatch::Length {
            name: name.to_owned(),
            got: got.len(),
            want: want.value.len(),
        });
    }
    let mut first = None;
    let mut total = Tally::default();
    let mut groups = Vec::with_capacity(want.groups.len());
    for (group, rows) in want.groups.iter().enumerate() {
        let mut tally = Tally::default();
        for row in rows.clone() {
            for (col, tolerance) in bound.tolerances(want, row).into_iter().enumerate() {
                let i = row * want.cols + col;
                let at = Coordinate { group, row, col };
                let (got, want) = (got[i].real(), want.value[i]);
                let ratio = ratio(got, want, tolerance, bound);
                if ratio > 1.0 && first.is_none() {
                    first = Some((at, got, want, tolerance));
                }
                tally.add(at, got, want, tolerance, ratio);
            }
        }
        groups.push(GroupReport {
            rows: rows.clone(),
            failures: tally.failures,
            worst_ratio: tally.worst_ratio,
            frobenius: tally.frobenius(),
            accepts_zeros: tally.accepts_zeros(),
        });
        total.merge(&tally);
    }
    let report = Report {
        name: name.to_owned(),
        elements: total.elements,
        worst_ratio: total.worst_ratio,
        worst_at: total.worst_at,
        frobenius: total.frobenius(),
        groups,
    };
    match first {
        None => Ok(report),
        Some((at, got, want, tolerance)) => Err(Mismatch::Element {
            at,
            got,
            want,
            tolerance,
            failures: total.failures,
            report: Box::new(report),
        }),
    }
}

/// |error| / tolerance; infinite for whatever is wrong at any tolerance.
fn ratio(got: f64, want: f64, tolerance: f64, bound: Bound) -> f64 {
    if got == want {
        return 0.0;
    }
    if got.is_infinite() {
        let same_sign = got.is_sign_positive() == want.is_sign_positive();
        let right = same_sign && bound.overflows(want.abs() + tolerance);
        return if right { 0.0 } else { f64::INFINITY };
    }
    let ratio = (got - want).abs() / tolerance;
    if ratio.is_nan() || tolerance.is_infinite() {
        f64::INFINITY
    } else {
        ratio
    }
}

#[derive(Default)]
struct Tally {
    elements: usize,
    failures: usize,
    worst_ratio: f64,
    worst_at: Option<Coordinate>,
    error_squares: f64,
    want_squares: f64,
    zeros_fail: bool,
}

impl Tally {
    fn add(&mut self, at: Coordinate, got: f64, want: f64, tolerance: f64, ratio: f64) {
        self.elements += 1;
        self.failures += (ratio > 1.0) as usize;
        if ratio > self.worst_ratio || self.worst_at.is_none() {
            self.worst_ratio = ratio;
            self.worst_at = Some(at);
        }
        // Two equal infinities have no error; any other that passed rounds to one.
        let error = if ratio == 0.0 { 0.0 } else { got - want };
        self.error_squares += error * error;
        self.want_squares += want * want;
        self.zeros_fail |= want.abs() > tolerance;
    }

    fn merge(&mut self, other: &Self) {
        self.elements += other.elements;
        self.failures += other.failures;
        if other.worst_ratio > self.worst_ratio || self.worst_at.is_none() {
            self.worst_ratio = other.worst_ratio;
            self.worst_at = other.worst_at;
        }
        self.error_squares += other.error_squares;
        self.want_squares += other.want_squares;
    }

    fn frobenius(&self) -> f64 {
        if self.error_squares == 0.0 {
            return 0.0;
        }
        (self.error_squares / self.want_squares).sqrt()
    }

    fn accepts_zeros(&self) -> bool {
        self.want_squares > 0.0 && !self.zeros_fail
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Output;

    const F32: Bound = Bound::f32_accumulated(Output::F32);

    fn want() -> Expected {
        let values: Vec<f64> = (0..12).map(|i| 1.0 + i as f64).collect();
        Expected::from_values(3, &values).with_groups(vec![0..1, 1..1, 2..4])
    }

    fn got() -> Vec<f32> {
        (0..12).map(|i| 1.0 + i as f32).collect()
    }

    #[test]
    fn equal_values_pass_and_are_counted() {
        let report = check_close("equal", &got(), &want(), F32).unwrap();
        assert_eq!((report.elements, report.worst_ratio), (9, 0.0));
        assert_eq!(report.frobenius, 0.0);
        assert_eq!(report.groups.len(), 3);
        report.frobenius_below(0.0).unwrap().not_vacuous().unwrap();
    }

    #[test]
    fn rows_in_no_group_are_not_looked_at() {
        let mut got = got();
        got[4] = f32::NAN;
        assert!(check_close("padding", &got, &want(), F32).is_ok());
    }

    #[test]
    fn the_first_bad_element_is_reported() {
        let mut got = got();
        got[8] = 9.5;
        got[10] = 0.0;
        let error = check_close("two", &got, &want(), F32).unwrap_err();
        let text = error.to_string();
        let Mismatch::Element {
            at,
            got,
            want,
            failures,
            report,
            ..
        } = error
        else {
            panic!("{text}");
        };
        assert_eq!((at.group, at.row, at.col), (2, 2, 2));
        assert_eq!((got, want, failures), (9.5, 9.0, 2));
        assert_eq!(report.worst_at.map(|at| (at.row, at.col)), Some((3, 1)));
        assert_eq!(
            report.groups.iter().map(|g| g.failures).collect::<Vec<_>>(),
            [0, 0, 2]
        );
        for part in [
            "two: 2 of 9",
            "row 2, column 2 (group 2)",
            "got 9.5e0",
            "2 (rows 2..4: 2",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn nan_never_passes() {
        let loose = Bound::relative(1e30);
        for i in [0, 7, 11] {
            let mut bad = got();
            bad[i] = f32::NAN;
            let error = check_close("nan", &bad, &want(), loose).unwrap_err();
            let Mismatch::Element { report, .. } = &error else {
                panic!("{error}");
            };
            assert!(report.worst_ratio.is_infinite() && report.frobenius.is_nan());
            let mut nan = want();
            nan.value[i] = f64::NAN;
            assert!(check_close("nan", &got(), &nan, loose).is_err());
            assert!(check_close("nan", &bad, &nan, loose).is_err());
            let mut nan = want();
            nan.slack[i] = f64::NAN;
            assert!(check_close("nan slack", &bad, &nan, F32).is_err());
        }
    }

    #[test]
    fn infinities_pass_only_where_the_value_overflows() {
        let bound = Bound::f32_accumulated(Output::F16);
        let inf = half::f16::INFINITY;
        let check = |got: half::f16, want: f64| {
            check_close("f16", &[got], &Expected::from_values(1, &[want]), bound)
        };
        check(inf, 1e6).unwrap();
        check(inf, 65520.0).unwrap();
        check(inf, f64::INFINITY).unwrap();
        check(inf, 65000.0).unwrap_err();
        check(inf, -1e6).unwrap_err();
        check(half::f16::MAX, f64::INFINITY).unwrap_err();
        let fixture = Expected::from_values(1, &[1e30]);
        check_close("f32", &[f32::INFINITY], &fixture, Bound::relative(1.0)).unwrap_err();
    }

    #[test]
    fn one_rounding_passes_and_two_do_not() {
        let exact = 1.0 + 2f64.powi(-8) + 2f64.powi(-10);
        let want = Expected::from_values(1, &[exact]);
        let bound = Bound::f32_accumulated(Output::Bf16);
        let up = half::bf16::from_f32(1.0 + 2f32.powi(-7));
        assert!(check_close("nearest", &[up], &want, bound).is_ok());
        assert!(check_close("down", &[half::bf16::ONE], &want, bound).is_err());
    }

    #[test]
    fn lengths_must_agree() {
        let error = check_close("short", &got()[1..], &want(), F32).unwrap_err();
        assert!(matches!(
            error,
            Mismatch::Length {
                got: 11,
                want: 12,
                ..
            }
        ));
    }

    #[test]
    fn a_limit_on_the_norm_sees_a_bias_within_bounds() {
        let got: Vec<f32> = got().iter().map(|x| x * 1.01).collect();
        let report = check_close("biased", &got, &want(), Bound::relative(0.02)).unwrap();
        let error = report.clone().frobenius_below(0.005).unwrap_err();
        assert!(matches!(error, Mismatch::Frobenius { group: 0, .. }));
        report.frobenius_below(0.011).unwrap();
    }

    #[test]
    fn a_bound_that_accepts_zeros_is_called_vacuous() {
        let report = check_close("loose", &got(), &want(), Bound::relative(1.0)).unwrap();
        let error = report.not_vacuous().unwrap_err();
        assert!(matches!(error, Mismatch::Vacuous { group: 0, .. }));
        let zeros = Expected::zeros(2, 2, 1);
        let report = check_close("zeros", &[0f32; 4], &zeros, F32).unwrap();
        report.not_vacuous().unwrap();
    }
}
