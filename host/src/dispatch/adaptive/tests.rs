//! The policy's tries, probes and calibration; how well it divides is in `simulation`.

use super::super::rates::Rates;
use super::super::simulation::Layer;
use super::*;
use std::sync::Arc;

const LAYER: Layer = Layer::new(16, 2048, 768, 8);

fn loads() -> Vec<ExpertLoad> {
    (0..8)
        .map(|expert| ExpertLoad {
            expert: 2 * expert,
            rows: 1,
            resident: 6..6,
        })
        .collect()
}

fn adaptive() -> Adaptive {
    Adaptive::new(Model::new(Rates::default()).unwrap().shared())
}

/// One forward on a machine of these rates.
fn forward(policy: &mut dyn Divide, truth: &Rates, shape: &LayerShape) -> Division {
    let loads = loads();
    let division = policy.divide(&loads, shape);
    division.validate(&loads, shape).unwrap();
    let p = truth.costs(shape).predict(&Work::of(&division, &loads));
    let times = ForwardTimes {
        cpu_seconds: p.cpu_s,
        gpu_seconds: p.gpu_s,
        total_seconds: p.total_s,
        ..ForwardTimes::default()
    };
    policy.observe(&division, shape, &times);
    division
}

/// A GPU that is no use gets a slice at first and seldom later, never much.
#[test]
fn an_idle_side_is_probed_now_and_then() {
    let mut adaptive = adaptive();
    let shape = LAYER.shape(1, 1);
    let truth = Rates {
        link_gb_s: 0.5,
        gpu_launch_s: 2e-3,
        ..Rates::default()
    };
    let mut used = Vec::new();
    for number in 0..400 {
        let gpu = forward(&mut adaptive, &truth, &shape).summary().gpu.slices;
        if gpu > 0 {
            used.push((number, gpu));
        }
    }
    let later: Vec<_> = used.iter().filter(|(number, _)| *number > 20).collect();
    assert!((1..=12).contains(&later.len()), "{used:?}");
    assert!(later.iter().all(|(_, slices)| *slices == 1), "{used:?}");
}

/// And when it is of use again, it is used again.
#[test]
fn a_side_that_recovers_is_found() {
    let mut adaptive = adaptive();
    let shape = LAYER.shape(1, 1);
    let slow = Rates {
        link_gb_s: 0.5,
        gpu_launch_s: 2e-3,
        ..Rates::default()
    };
    for _ in 0..100 {
        forward(&mut adaptive, &slow, &shape);
    }
    let mut recovered = None;
    for number in 0..400 {
        let division = forward(&mut adaptive, &Rates::default(), &shape);
        if division.summary().gpu.slices >= 8 {
            recovered.get_or_insert(number);
        }
    }
    let last = forward(&mut adaptive, &Rates::default(), &shape);
    assert!(recovered.is_some(), "never found again");
    assert!(last.summary().gpu.slices >= 8, "{last}");
}

#[test]
fn calibration_runs_each_way_and_teaches_the_model() {
    let mut adaptive = adaptive();
    let truth = Rates {
        dram_gb_s: 60.0,
        link_gb_s: 30.0,
        ..Rates::default()
    };
    let mut calls = 0;
    adaptive
        .calibrate(&[1, 8], 3, |tokens, policy| {
            calls += 1;
            forward(policy, &truth, &LAYER.shape(tokens as usize, 1));
            Ok::<(), ()>(())
        })
        .unwrap();
    assert_eq!(calls, 2 * 3 * 4);
    let rates = lock(adaptive.model()).rates();
    assert!((rates.dram_gb_s / 60.0 - 1.0).abs() < 0.15, "{rates:?}");
    assert!((rates.link_gb_s / 30.0 - 1.0).abs() < 0.15, "{rates:?}");
    assert_eq!(adaptive.calibrate(&[1], 1, |_, _| Err(7)), Err(7));
}

/// Layers of different shapes on one model, from several threads.
#[test]
fn layers_share_a_model() {
    let model = Model::new(Rates::default()).unwrap().shared();
    std::thread::scope(|scope| {
        for tokens in [1, 4, 16, 64] {
            let mut adaptive = Adaptive::new(Arc::clone(&model));
            scope.spawn(move || {
                for _ in 0..50 {
                    forward(&mut adaptive, &Rates::default(), &LAYER.shape(tokens, 1));
                }
                assert!(adaptive.last_plan().is_some());
            });
        }
    });
    let snapshot = lock(&model).snapshot();
    let forwards: Vec<u64> = snapshot.regimes.iter().map(|r| r.forwards).collect();
    assert_eq!(forwards, [50; 4]);
}

#[test]
fn no_device_no_work_no_plan_for_a_gpu() {
    let mut adaptive = adaptive();
    let shape = LAYER.shape(1, 0);
    for _ in 0..5 {
        let division = forward(&mut adaptive, &Rates::default(), &shape);
        assert_eq!(division.summary().gpu.slices, 0);
    }
    assert_eq!(
        adaptive.divide(&[], &LAYER.shape(0, 1)),
        Division::default()
    );
}

/// What the executor says it copied counts, not what the division would have.
#[test]
fn copied_bytes_are_the_executors() {
    let mut adaptive = adaptive();
    let shape = LAYER.shape(1, 1);
    for _ in 0..12 {
        let loads = loads();
        let division = FixedPolicy::GpuOnly.divide(&loads, &shape);
        adaptive.remember(&loads);
        // Half was there already: the time is that of 24 slices.
        let bytes = 24 * shape.slice_bytes;
        let seconds = 50e-6 + bytes as f64 / 20e9;
        let times = ForwardTimes {
            gpu_seconds: seconds,
            total_seconds: seconds,
            streamed_bytes: bytes,
            resident_bytes: bytes,
            ..ForwardTimes::default()
        };
        adaptive.observe(&division, &shape, &times);
    }
    let link = lock(adaptive.model()).rates().link_gb_s;
    assert!((16.0..24.0).contains(&link), "{link}");
}
