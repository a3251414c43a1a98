//! Partitions against all divisions of small problems, and their invariants.

use super::super::rates::Rates;
use super::*;
use proptest::prelude::*;

fn shape(slices: u32) -> LayerShape {
    LayerShape {
        slices,
        slice_bytes: 786_432,
        hidden: 2048,
        tokens: 16,
        devices: 1,
        x_on_device: true,
    }
}

fn loads(rows: &[u32], slices: u32) -> Vec<ExpertLoad> {
    (0..)
        .zip(rows)
        .map(|(expert, &rows)| ExpertLoad {
            expert,
            rows,
            resident: slices..slices,
        })
        .collect()
}

/// The least time of all choices of slices, expert by expert.
fn exhaustive(loads: &[ExpertLoad], shape: &LayerShape, costs: &Costs) -> f64 {
    let mut best = f64::INFINITY;
    let choices = shape.slices as usize + 1;
    for number in 0..choices.pow(loads.len() as u32) {
        let mut rest = number;
        let share = |load: &ExpertLoad| {
            let cpu = (rest % choices) as u32;
            rest /= choices;
            ExpertShare::split(load.expert, 0..load.rows, cpu, shape.slices)
        };
        let division = Division {
            shares: loads.iter().map(share).collect(),
        };
        let seconds = costs.predict(&Work::of(&division, loads)).total_s;
        best = best.min(seconds);
    }
    best
}

#[test]
fn the_best_is_near_the_best_of_all_divisions() {
    let shape = shape(4);
    for link in [15.0, 54.0, 200.0] {
        for ops in [2.0, 16.0] {
            let rates = Rates {
                link_gb_s: link,
                cpu_tera_ops: ops,
                ..Rates::default()
            };
            let costs = rates.costs(&shape);
            for rows in [[1, 1, 1, 1, 1], [1, 2, 40, 200, 3], [300, 300, 300, 5, 900]] {
                let mut loads = loads(&rows, 4);
                loads[2].resident = 2..4;
                loads[4].resident = 0..4;
                let plan = best(&loads, &shape, &costs);
                plan.division.validate(&loads, &shape).unwrap();
                let least = exhaustive(&loads, &shape, &costs);
                let ratio = plan.prediction.total_s / least;
                assert!(
                    ratio < 1.05,
                    "{ratio} with {rows:?}, link {link}, {ops}: {plan:?}"
                );
            }
        }
    }
}

/// One token and eight experts: the sum of the slices is the optimum's, not each rounded alike.
#[test]
fn few_experts_are_cut_to_a_slice() {
    let shape = shape(6);
    let rates = Rates {
        link_gb_s: 45.0,
        ..Rates::default()
    };
    let costs = rates.costs(&shape);
    let loads = loads(&[1; 8], 6);
    let least = (0..=48)
        .map(|cpu: u32| {
            let share = |i: u32| {
                let cpu = cpu / 8 + u32::from(i < cpu % 8);
                ExpertShare::split(i, 0..1, cpu, 6)
            };
            let division = Division {
                shares: (0..8).map(share).collect(),
            };
            costs.predict(&Work::of(&division, &loads)).total_s
        })
        .fold(f64::INFINITY, f64::min);
    let plans = candidates(&loads, &shape, &costs);
    let of = |method| plans.iter().find(|plan| plan.method == method).unwrap();
    for method in [Method::Slices, Method::ExpertsAndSlices] {
        let seconds = of(method).prediction.total_s;
        assert!(
            seconds <= least * 1.0001,
            "{method}: {seconds} against {least}"
        );
    }
    assert!(of(Method::Experts).prediction.total_s > least * 1.001);
    let totals = of(Method::Slices).division.summary();
    assert!(
        totals.cpu.slices % 8 != 0 && totals.gpu.slices % 8 != 0,
        "{totals:?}"
    );
}

/// Rates that take no launches into account: bytes over the sum of both rates.
#[test]
fn time_tends_to_the_bytes_over_both_rates() {
    let shape = shape(6);
    let rates = Rates {
        cpu_contention: 0.0,
        link_contention: 0.0,
        ..Rates::default()
    };
    let loads = loads(&[2; 128], 6);
    let plan = best(&loads, &shape, &rates.costs(&shape));
    let bytes = 128.0 * 6.0 * 786_432.0;
    let ideal = bytes / (rates.dram_gb_s + rates.link_gb_s) * 1e-9;
    let ratio = plan.prediction.total_s / ideal;
    assert!((1.0..1.09).contains(&ratio), "{ratio}");
}

/// An expert so hot that one of its slices is too much is cut between rows.
#[test]
fn one_hot_expert_is_cut_between_rows() {
    let shape = LayerShape {
        tokens: 100_000,
        x_on_device: false,
        ..shape(1)
    };
    let rates = Rates {
        gpu_tera_ops: 16.0,
        ..Rates::default()
    };
    let loads = loads(&[100_000], 1);
    let plan = best(&loads, &shape, &rates.costs(&shape));
    assert_eq!(plan.method, Method::ExpertsAndRows);
    let [cpu, gpu] = &plan.division.shares[..] else {
        panic!("{:?}", plan.division);
    };
    assert_eq!((cpu.rows.end, gpu.rows.end), (gpu.rows.start, 100_000));
    assert_eq!((gpu.rows.end - gpu.rows.start) % 128, 0);
    let whole = rates.costs(&shape);
    let alone = whole.predict(&Work::of(
        &Division {
            shares: vec![ExpertShare::gpu(0, 0..100_000, 1)],
        },
        &loads,
    ));
    assert!(plan.prediction.total_s < 0.55 * alone.total_s, "{plan:?}");
}

#[test]
fn resident_experts_stay_on_the_gpu_and_are_counted() {
    let shape = shape(6);
    let costs = Rates::default().costs(&shape);
    let without = loads(&[1; 32], 6);
    let mut with = without.clone();
    for load in &mut with[..16] {
        load.resident = 0..6;
    }
    let (plain, cached) = (best(&without, &shape, &costs), best(&with, &shape, &costs));
    assert!(cached.prediction.total_s < 0.65 * plain.prediction.total_s);
    let on_gpu = |e: usize| cached.division.shares[e].gpu_slices.len();
    assert!((0..16).all(|e| on_gpu(e) == 6), "{:?}", cached.division);
    assert!(cached.work.cpu.slices > 40.0 && cached.work.streamed.slices > 20.0);
}

#[test]
fn nothing_to_do_and_nobody_to_do_it() {
    let costs = Rates::default().costs(&shape(6));
    let none = best(&[], &shape(6), &costs);
    assert_eq!(
        (none.method, none.prediction),
        (Method::Cpu, Prediction::default())
    );
    let alone = LayerShape {
        devices: 0,
        ..shape(6)
    };
    let loads = loads(&[5, 0, 7], 6);
    let plans = candidates(&loads, &alone, &costs);
    assert_eq!(plans.len(), 1);
    assert_eq!(plans[0].division.summary().cpu.slices, 12);
    plans[0].division.validate(&loads, &alone).unwrap();
}

fn rows() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..4, 1u32..200, 1u32..5000]
}

proptest! {
    /// Every method gives each row and slice to exactly one side, and the work that it states is
    /// the division's.
    #[test]
    fn each_row_and_slice_is_divided_once(
        experts in proptest::collection::vec((rows(), 0u32..20), 0..40),
        slices in 1u32..14,
        devices in 0u32..3,
        rates in (1.0..200.0f64, 1.0..400.0f64, 0.1..60.0f64, 0.0..0.01f64),
    ) {
        let shape = LayerShape { devices, ..shape(slices) };
        let loads: Vec<ExpertLoad> = (0..)
            .zip(&experts)
            .map(|(expert, &(rows, resident))| ExpertLoad {
                expert,
                rows,
                resident: resident.min(slices)..slices,
            })
            .collect();
        let rates = Rates {
            link_gb_s: rates.0,
            dram_gb_s: rates.1,
            cpu_tera_ops: rates.2,
            gpu_launch_s: rates.3,
            ..Rates::default()
        };
        let costs = rates.costs(&shape);
        let plans = candidates(&loads, &shape, &costs);
        for plan in &plans {
            prop_assert_eq!(plan.division.validate(&loads, &shape), Ok(()));
            let seconds = costs.predict(&Work::of(&plan.division, &loads)).total_s;
            prop_assert!((seconds - plan.prediction.total_s).abs() <= 1e-9 * seconds.max(1e-9));
        }
        let best = best(&loads, &shape, &costs);
        let least = plans.iter().map(|p| p.prediction.total_s).fold(f64::INFINITY, f64::min);
        prop_assert!(best.prediction.total_s <= least * 1.03);
    }
}
