//! MoE layers on a driver of which any call can fail: an error each time, nothing left behind, and
//! the next forward works. Each test runs in a process of its own with the driver library without
//! a device.
#![cfg(feature = "cuda")]

mod fake;

use asym_gemm::cpu::{Engine, ExpertSource};
use asym_gemm::driver::{DeviceBuffer, DriverError, Gpu};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::bank::{BankGeometry, Projection};
use asym_gemm::moe::division::FixedPolicy;
use asym_gemm::moe::routing::Routing;
use asym_gemm::moe::{ExpertBank, MoeError, MoeLayer};
use fake::{Fake, Knob, with_fake_driver};
use std::sync::Arc;

const FAKE_DRIVER: &str = "from_12";
const GEOMETRY: BankGeometry = BankGeometry {
    experts: 6,
    hidden: 64,
    intermediate: 300,
    format: WeightFormat::Int8PerRow,
    bias: false,
};
const TOKENS: usize = 3;

/// Some weights.
struct Ramp(usize);

impl ExpertSource for Ramp {
    fn row(&self, projection: Projection, row: usize, out: &mut [f32]) {
        for (k, out) in out.iter_mut().enumerate() {
            let n = (self.0 * 31 + projection as usize * 17 + row * 7 + k * 3) % 23;
            *out = n as f32 / 23.0 - 0.5;
        }
    }

    fn bias(&self, _: Projection) -> Option<&[f32]> {
        None
    }
}

fn routing() -> Routing {
    Routing {
        top_k: 2,
        ids: vec![0, 5, 2, 3, -1, 2],
        weights: vec![0.5; 2 * TOKENS],
    }
}

fn x() -> Vec<f32> {
    (0..TOKENS * GEOMETRY.hidden)
        .map(|i| (i % 13) as f32 - 6.0)
        .collect()
}

/// A layer on two logical devices, with a cache.
fn build(gpu: &Gpu, bank: &Arc<ExpertBank>) -> Result<MoeLayer, MoeError> {
    MoeLayer::builder(bank.clone())
        .engine(Engine::detect()?)
        .devices(&[gpu.clone(), gpu.clone()])
        .ring_budget(6 * GEOMETRY.expert_bytes())
        .hbm_budget(GEOMETRY.expert_bytes())
        .policy(FixedPolicy::Fraction(0.5))
        .build()
}

fn on_the_cpu(layer: &MoeLayer) -> Vec<f32> {
    layer.set_policy(FixedPolicy::CpuOnly);
    let mut out = vec![f32::NAN; x().len()];
    layer.forward(&x(), &routing(), &mut out).unwrap();
    out
}

/// Everything that a layer does with devices: residents, a prefetch, device and host memory.
fn work(gpu: &Gpu, layer: &MoeLayer) -> Result<(), MoeError> {
    layer.set_policy(FixedPolicy::Fraction(0.5));
    layer.make_resident(&[3])?;
    layer.prefetch(&[2, 5])?;
    let on_device = DeviceBuffer::from_slice(gpu, &x())?;
    let mut out = DeviceBuffer::<f32>::zeroed(gpu, x().len())?;
    layer.forward(&on_device, &routing(), &mut out)?;
    let mut out = vec![0.0f32; x().len()];
    layer.forward(&x(), &routing(), &mut out)?;
    Ok(())
}

#[test]
fn any_call_can_fail() {
    with_fake_driver("any_call_can_fail", || {
        let fake = Fake::open();
        fake.set(Knob::EveryKernel, 1);
        let gpu = Gpu::open(0).unwrap();
        let bank = ExpertBank::pinned(&gpu, GEOMETRY, Ramp, || {});
        let bank = Arc::new(bank.unwrap());
        let layer = build(&gpu, &bank).unwrap();
        let want = on_the_cpu(&layer);
        work(&gpu, &layer).unwrap();
        drop(layer);
        let live = fake.get(Knob::LiveObjects);

        let mut failures = 0;
        for call in 1.. {
            fake.set(Knob::FailIn, call);
            let built = build(&gpu, &bank);
            let reached = fake.get(Knob::FailIn) == 0;
            fake.set(Knob::FailIn, 0);
            match built {
                Err(error) => assert!(matches!(error, MoeError::Driver(_)), "{error}"),
                Ok(layer) => assert_eq!(on_the_cpu(&layer), want),
            }
            assert_eq!(fake.get(Knob::LiveObjects), live, "built to call {call}");
            if !reached {
                break;
            }
            failures += 1;
        }
        assert!(failures > 20, "{failures} calls in a construction");

        let mut failures = 0;
        for call in 1.. {
            let layer = build(&gpu, &bank).unwrap();
            fake.set(Knob::FailIn, call);
            let worked = work(&gpu, &layer);
            let reached = fake.get(Knob::FailIn) == 0;
            fake.set(Knob::FailIn, 0);
            if let Err(error) = &worked {
                assert!(matches!(error, MoeError::Driver(_)), "{error}");
                failures += 1;
            }
            assert_eq!(on_the_cpu(&layer), want, "after call {call}");
            work(&gpu, &layer).unwrap();
            drop(layer);
            assert_eq!(fake.get(Knob::LiveObjects), live, "worked to call {call}");
            if !reached {
                worked.unwrap();
                break;
            }
        }
        assert!(failures > 50, "{failures} calls in the work");
    });
}

#[test]
fn a_layer_in_flight_can_be_dropped() {
    with_fake_driver("a_layer_in_flight_can_be_dropped", || {
        let fake = Fake::open();
        fake.set(Knob::EveryKernel, 1);
        let gpu = Gpu::open(0).unwrap();
        let live = fake.get(Knob::LiveObjects);
        {
            let bank = ExpertBank::pinned(&gpu, GEOMETRY, Ramp, || {}).unwrap();
            let layer = build(&gpu, &Arc::new(bank)).unwrap();
            let x = DeviceBuffer::from_slice(&gpu, &x()).unwrap();
            let mut out = DeviceBuffer::<f32>::zeroed(&gpu, x.len()).unwrap();
            let stream = asym_gemm::driver::Stream::new(&gpu).unwrap();
            // SAFETY: the buffers outlive the layer, which waits for its work.
            unsafe {
                layer.forward_on(&x, &routing(), &mut out, &stream).unwrap();
            }
            drop(layer);
        }
        let modules = fake.get(Knob::ModulesLoaded);
        assert_eq!(fake.get(Knob::LiveObjects), live + modules);
    });
}

#[test]
fn memory_that_cannot_be_pinned_or_had() {
    with_fake_driver("memory_that_cannot_be_pinned_or_had", || {
        let fake = Fake::open();
        fake.set(Knob::EveryKernel, 1);
        let gpu = Gpu::open(0).unwrap();
        fake.set(Knob::RefuseRegister, 1);
        fake.set(Knob::RefuseHostAlloc, 1);
        assert!(matches!(
            ExpertBank::pinned(&gpu, GEOMETRY, Ramp, || {}),
            Err(MoeError::Driver(DriverError::OutOfMemory {
                what: "pinned host",
                ..
            }))
        ));
        let bank = ExpertBank::pinned_or_plain(&gpu, GEOMETRY, Ramp, || {}).unwrap();
        assert!(!bank.is_pinned());
        fake.set(Knob::RefuseRegister, 0);
        fake.set(Knob::RefuseHostAlloc, 0);
        let bank = Arc::new(bank);
        work(&gpu, &build(&gpu, &bank).unwrap()).unwrap();
        fake.set(Knob::RefuseAllocation, 1);
        assert!(matches!(
            build(&gpu, &bank),
            Err(MoeError::Driver(DriverError::OutOfMemory {
                what: "device",
                ..
            }))
        ));
    });
}
