//! Models: learning, forgetting, carrying to other shapes and files.

use super::super::cost::SideWork;
use super::*;

fn shape(tokens: u32, hidden: u32) -> LayerShape {
    LayerShape {
        slices: 6,
        slice_bytes: 384 * u64::from(hidden),
        hidden,
        tokens,
        devices: 1,
        x_on_device: true,
    }
}

fn work(cpu: f64, gpu: f64, rows: f64) -> Work {
    let side = |slices: f64, rows: f64| SideWork {
        shares: (slices / 6.0).ceil(),
        slices,
        row_slices: slices * rows,
    };
    Work {
        cpu: side(cpu, rows),
        streamed: side(gpu, 64.0),
        resident: SideWork::default(),
    }
}

/// Runs forwards of both sides and of each on a machine of these rates.
fn teach(model: &mut Model, truth: &Rates, shape: &LayerShape, forwards: usize) {
    for forward in 0..forwards {
        let slices = 6.0 * (2 + forward % 5) as f64;
        let work = match forward % 3 {
            0 => work(slices, 0.0, 1.0),
            1 => work(0.0, slices, 1.0),
            _ => work(slices, slices / 2.0, 1.0),
        };
        let p = truth.costs(shape).predict(&work);
        let times = ForwardTimes {
            cpu_seconds: p.cpu_s,
            gpu_seconds: p.gpu_s,
            total_seconds: p.total_s,
            ..ForwardTimes::default()
        };
        model.costs(shape);
        model.record(&work, shape, &times, false);
    }
}

fn truth() -> Rates {
    Rates {
        dram_gb_s: 70.0,
        link_gb_s: 25.0,
        cpu_launch_s: 40e-6,
        ..Rates::default()
    }
}

#[test]
fn a_new_model_predicts_by_its_prior_and_a_taught_one_by_what_it_saw() {
    let mut model = Model::new(Rates::default()).unwrap();
    let shape = shape(1, 2048);
    assert_eq!(model.costs(&shape), Rates::default().costs(&shape));
    teach(&mut model, &truth(), &shape, 40);
    let (found, real) = (model.costs(&shape), truth().costs(&shape));
    for work in [
        work(24.0, 0.0, 1.0),
        work(0.0, 24.0, 1.0),
        work(24.0, 12.0, 1.0),
    ] {
        let ratio = found.predict(&work).total_s / real.predict(&work).total_s;
        assert!((ratio - 1.0).abs() < 0.03, "{ratio} of {work:?}");
    }
    let rates = model.rates();
    assert!((rates.dram_gb_s / 70.0 - 1.0).abs() < 0.1, "{rates:?}");
    assert!((rates.link_gb_s / 25.0 - 1.0).abs() < 0.1, "{rates:?}");
    let overhead = model.overhead(1, Sides::Cpu, 1.0);
    assert!((overhead - real.join).abs() < 1e-9);
    assert_eq!(model.overhead(4096, Sides::Cpu, 1.0), 1.0);
}

/// One layer teaches another of twice the width; rates carry to a model of another process.
#[test]
fn what_one_shape_teaches_holds_for_another() {
    let mut model = Model::new(Rates::default()).unwrap();
    teach(&mut model, &truth(), &shape(1, 2048), 40);
    let other = shape(2, 4096);
    let carried = Model::new(model.rates()).unwrap().costs(&other);
    let real = truth().costs(&other);
    for costs in [model.costs(&other), carried] {
        for work in [work(24.0, 0.0, 1.0), work(0.0, 24.0, 1.0)] {
            let ratio = costs.predict(&work).total_s / real.predict(&work).total_s;
            assert!((ratio - 1.0).abs() < 0.05, "{ratio} of {work:?}");
        }
    }
}

/// A link that loses half of its rate is believed after a few forwards.
#[test]
fn a_machine_that_changes_is_learnt_again() {
    let mut model = Model::new(truth()).unwrap();
    let shape = shape(1, 2048);
    teach(&mut model, &truth(), &shape, 60);
    let slow = Rates {
        link_gb_s: 12.0,
        ..truth()
    };
    teach(&mut model, &slow, &shape, 12);
    let work = work(0.0, 24.0, 1.0);
    let (found, real) = (model.costs(&shape), slow.costs(&shape));
    let ratio = found.predict(&work).gpu_s / real.predict(&work).gpu_s;
    assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
}

#[test]
fn times_that_make_no_sense_teach_nothing() {
    let mut model = Model::new(Rates::default()).unwrap();
    let shape = shape(1, 2048);
    for seconds in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
        let times = ForwardTimes {
            cpu_seconds: seconds,
            gpu_seconds: seconds,
            total_seconds: seconds,
            ..ForwardTimes::default()
        };
        for _ in 0..3 {
            model.record(&work(6.0, 6.0, 1.0), &shape, &times, false);
        }
    }
    assert_eq!(model.samples(1), [0, 0]);
    assert_eq!(model.costs(&shape), Rates::default().costs(&shape));
}

#[test]
fn files_give_the_model_back_and_refuse_what_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.json");
    let mut model = Model::new(Rates::default()).unwrap();
    let shape = shape(1, 2048);
    teach(&mut model, &truth(), &shape, 40);
    model.save(&path).unwrap();
    let mut loaded = Model::load(&path).unwrap();
    let (dram, link) = (model.rates().dram_gb_s, model.rates().link_gb_s);
    let rates = loaded.rates();
    assert!((rates.dram_gb_s / dram - 1.0).abs() < 1e-9, "{rates:?}");
    assert!((rates.link_gb_s / link - 1.0).abs() < 1e-9, "{rates:?}");
    let work = work(24.0, 12.0, 1.0);
    let [a, b] = [&mut model, &mut loaded].map(|m| m.costs(&shape).predict(&work).total_s);
    assert!((a / b - 1.0).abs() < 0.02, "{a} {b}");
    let snapshot = serde_json::to_value(loaded.snapshot()).unwrap();
    assert_eq!(snapshot["regimes"][0]["tokens"], 1);
    assert!(snapshot["regimes"][0]["cpu_error"].as_f64().unwrap() < 0.05);

    let text = std::fs::read_to_string(&path).unwrap();
    let version = text.replace("\"asym_gemm_dispatch\": 1", "\"asym_gemm_dispatch\": 9");
    let rates = text.replacen("\"dram_gb_s\": 105.0", "\"dram_gb_s\": 0.0", 1);
    for (bad, named) in [
        (version, "version 9"),
        (rates, "dram_gb_s"),
        ("[".into(), "line 1"),
    ] {
        std::fs::write(&path, bad).unwrap();
        let error = Model::load(&path).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    let absent = folder.path().join("absent.json");
    assert!(
        Model::load(&absent)
            .unwrap_err()
            .to_string()
            .contains("absent.json")
    );
}
