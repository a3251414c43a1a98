//! A layer on CPU and GPUs: every division against the whole, the reference and itself.

use asym_gemm::cpu::{Engine, ExpertGroup, Slots};
use asym_gemm::driver::{DeviceBuffer, Gpu, Stream};
use asym_gemm::formats::WeightFormat;
use asym_gemm::formats::activation::Activation;
use asym_gemm::moe::division::{
    Divide, Division, DivisionError, ExpertLoad, ExpertShare, FixedPolicy, ForwardTimes, LayerShape,
};
use asym_gemm::moe::layer::{DecodeArgs, DecodeGraph, MoeLayerBuilder, Retain};
use asym_gemm::moe::layout::{LayoutError, pack};
use asym_gemm::moe::routing::Routing;
use asym_gemm::moe::{ExpertBank, MoeError, MoeLayer};
use asym_gemm_testkit::compare::{Bound, Output, check_close};
use asym_gemm_testkit::generate::{Pattern, RoutingCase, RoutingKind, matrix, rounded_to_bf16};
use asym_gemm_testkit::reference::{self, Expected, ExpertWeights};
use asym_gemm_testkit::skip;
use asym_gemm_tests::{FORMATS, GPU_FORMATS, Source, bank, geometry, gpu, is_exact};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex};

const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const HIDDEN: usize = 192;
/// Five slices, the last one ragged.
const INTERMEDIATE: usize = 4 * 128 + 40;
const SLICES: u32 = 5;
const CLAMPED: Activation = Activation::ClampedSwiGlu {
    limit: 7.0,
    alpha: 1.702,
};

/// Cuts every expert elsewhere: rows in two, slices by a hash of expert and row.
struct Patchwork(u32);

impl Divide for Patchwork {
    fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
        let cut = |n: u32| match shape.devices {
            0 => shape.slices,
            _ => n.wrapping_mul(2_654_435_761).rotate_left(9) % (shape.slices + 1),
        };
        let shares = loads.iter().flat_map(|load| {
            let half = load.rows / 2;
            let seed = load.expert * 2 + self.0;
            [(0..half, seed), (half..load.rows, seed + 1)]
                .into_iter()
                .filter(|(rows, _)| !rows.is_empty())
                .map(|(rows, seed)| ExpertShare::split(load.expert, rows, cut(seed), shape.slices))
                .collect::<Vec<_>>()
        });
        Division {
            shares: shares.collect(),
        }
    }
}

/// Experts in bf16 values, so that every format starts alike.
struct Model {
    experts: Vec<ExpertWeights>,
    activation: Activation,
}

impl Model {
    fn new(bias: bool, activation: Activation) -> Self {
        let weights = |seed| ExpertWeights::random(seed, HIDDEN, INTERMEDIATE, bias).to_bf16();
        Self {
            experts: (0..EXPERTS as u64).map(weights).collect(),
            activation,
        }
    }

    fn pinned(&self, gpu: &Gpu, format: WeightFormat) -> Arc<ExpertBank> {
        let geometry = geometry(format, &self.experts);
        let bank = ExpertBank::pinned(gpu, geometry, |e| Source(&self.experts[e]), || {});
        Arc::new(bank.unwrap())
    }

    fn plain(&self, format: WeightFormat) -> Arc<ExpertBank> {
        Arc::new(bank(format, &self.experts).unwrap())
    }

    fn builder(&self, bank: &Arc<ExpertBank>) -> MoeLayerBuilder {
        MoeLayer::builder(bank.clone())
            .activation(self.activation)
            .engine(Engine::detect().unwrap())
    }

    fn reference(&self) -> reference::MoeBlock<'_> {
        reference::MoeBlock {
            experts: &self.experts,
            shared: None,
            activation: self.activation,
        }
    }

    /// What any division must give.
    fn expected(&self, bank: &ExpertBank, case: &RoutingCase, x: &[f32]) -> Whole {
        let mut magnitude = vec![0f64; x.len()];
        for slot in 0..case.top_k {
            for slice in 0..SLICES as usize {
                let part = self.parts(bank, case, x, Some(slot), slice..slice + 1);
                for (sum, y) in magnitude.iter_mut().zip(part) {
                    *sum += f64::from(y).abs();
                }
            }
        }
        Whole {
            sums: self.parts(bank, case, x, None, 0..SLICES as usize),
            magnitude,
            terms: SLICES as usize + case.top_k,
            bf16: match bank.geometry().format {
                WeightFormat::Bf16 => Some(self.reference().bf16(x, case)),
                _ => None,
            },
        }
    }

    fn check_divided(
        &self,
        name: &str,
        bank: &ExpertBank,
        case: &RoutingCase,
        x: &[f32],
        got: &[f32],
    ) {
        self.expected(bank, case, x).check(name, 1, got);
    }

    /// The layer's sums over some slices of every expert, of all slots or one, on the CPU.
    fn parts(
        &self,
        bank: &ExpertBank,
        case: &RoutingCase,
        x: &[f32],
        slot: Option<usize>,
        slices: Range<usize>,
    ) -> Vec<f32> {
        let packed = pack(&case.ids, case.tokens, case.top_k, EXPERTS, 1).unwrap();
        let tokens: Vec<u32> = packed.source_token.iter().map(|&t| t as u32).collect();
        let groups: Vec<ExpertGroup<'_>> = packed
            .groups
            .iter()
            .map(|g| ExpertGroup {
                expert: g.expert,
                start: g.start,
                tokens: &tokens[g.start..g.end],
            })
            .collect();
        let index: Vec<i32> = packed
            .output_index
            .iter()
            .enumerate()
            .map(|(i, &row)| match slot {
                Some(slot) if i % case.top_k != slot => -1,
                _ => row,
            })
            .collect();
        let slots = Slots {
            top_k: case.top_k,
            output_index: &index,
            weights: &case.weights,
        };
        let ranges = vec![slices; groups.len()];
        let mut out = vec![f32::NAN; x.len()];
        let (bank, engine) = (bank.view().unwrap(), Engine::detect().unwrap());
        engine
            .expert_layer_slices(bank, self.activation, x, &groups, &ranges, slots, &mut out)
            .unwrap();
        out
    }
}

/// The sums of an undivided layer, and by how much the order of f32 additions can move them; in
/// bf16, where products of two sides differ by their own order, the reference with its bound.
struct Whole {
    sums: Vec<f32>,
    bf16: Option<Expected>,
    /// Sum over all slots and slices of |w y|.
    magnitude: Vec<f64>,
    terms: usize,
}

impl Whole {
    fn check(&self, name: &str, devices: usize, got: &[f32]) {
        if let Some(want) = &self.bf16 {
            check_close(name, got, want, Bound::f32_accumulated(Output::F32))
                .unwrap_or_else(|mismatch| panic!("{mismatch}"));
            return;
        }
        let terms = (self.terms + devices) as f64;
        for (i, (&got, &want)) in got.iter().zip(&self.sums).enumerate() {
            let bound = terms * f64::from(f32::EPSILON) * self.magnitude[i];
            let distance = (f64::from(got) - f64::from(want)).abs();
            assert!(
                distance <= bound,
                "{name}: token {}, column {}: {got}, the whole {want}, bound {bound:e}",
                i / HIDDEN,
                i % HIDDEN
            );
        }
    }
}

fn routing(case: &RoutingCase) -> Routing {
    Routing {
        top_k: case.top_k,
        ids: case.ids.clone(),
        weights: case.weights.clone(),
    }
}

fn input(tokens: usize) -> Vec<f32> {
    rounded_to_bf16(&matrix(Pattern::Gaussian, 5, tokens, HIDDEN))
}

fn to_bf16(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|x| x.to_bits()).collect()
}

fn forward(layer: &MoeLayer, x: &[f32], case: &RoutingCase) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len()];
    layer.forward(x, &routing(case), &mut out).unwrap();
    out
}

fn cases() -> impl Iterator<Item = (String, RoutingCase)> {
    RoutingKind::ALL.into_iter().flat_map(|kind| {
        [1, 19, 70].map(|tokens| {
            let case = RoutingCase::new(kind, 3, tokens, TOP_K, EXPERTS);
            (format!("{kind:?} T={tokens}"), case)
        })
    })
}

/// Without a device a layer is what the reference says, in every format and element type.
#[test]
fn on_the_cpu_alone() {
    let model = Model::new(true, CLAMPED);
    for format in FORMATS {
        let layer = model.builder(&model.plain(format)).build().unwrap();
        for (name, case) in cases() {
            let x = input(case.tokens);
            let out = forward(&layer, &x, &case);
            let name = format!("{name} {format}");
            if is_exact(format) {
                let want = model.reference().int8(format, &x, &case);
                assert_eq!(bits(&out), bits(&want), "{name}");
            } else {
                let want = match format {
                    WeightFormat::Bf16 => model.reference().bf16(&x, &case),
                    WeightFormat::Fp8Block128 => model.reference().fp8(&x, &case),
                    _ => model.reference().fp4(format, &x, &case),
                };
                check_close(&name, &out, &want, Bound::f32_accumulated(Output::F32))
                    .unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
            let mut halves = vec![bf16::NAN; x.len()];
            layer
                .forward(&to_bf16(&x), &routing(&case), &mut halves)
                .unwrap();
            assert_eq!(halves, to_bf16(&out), "{name}: bf16 in and out");
        }
    }
}

#[test]
fn nothing_to_do_and_what_cannot_be_done() {
    let model = Model::new(false, Activation::SwiGlu);
    let layer = model
        .builder(&model.plain(WeightFormat::Int8PerRow))
        .build()
        .unwrap();
    let route = |ids: &[i32]| Routing {
        top_k: 2,
        ids: ids.to_vec(),
        weights: vec![0.5; ids.len()],
    };
    let empty: [f32; 0] = [];
    let report = layer.forward(&empty[..], &route(&[]), &mut [][..] as &mut [f32]);
    assert_eq!(report.unwrap().tokens, 0);
    let x = input(3);
    let mut out = vec![f32::NAN; x.len()];
    layer.forward(&x, &route(&[-1; 6]), &mut out).unwrap();
    assert!(out.iter().all(|&x| x == 0.0));

    let mut out = vec![7.0f32; x.len()];
    let mut fails = |x: &[f32], ids: &[i32]| {
        let error = layer.forward(x, &route(ids), &mut out).unwrap_err();
        assert!(out.iter().all(|&x| x == 7.0), "{error}");
        error
    };
    for id in [EXPERTS as i32, -2, i32::MIN, i32::MAX] {
        let error = fails(&x, &[0, 1, 2, id, 0, 1]);
        assert!(
            matches!(
                &error,
                MoeError::Layout(LayoutError::Id {
                    token: 1,
                    slot: 1,
                    ..
                })
            ),
            "{error}"
        );
    }
    assert!(matches!(
        fails(&x, &[0; 4]),
        MoeError::Layout(LayoutError::IdCount {
            tokens: 3,
            top_k: 2,
            found: 4,
        })
    ));
    assert!(matches!(fails(&x[1..], &[0; 6]), MoeError::Input { .. }));
    assert!(matches!(
        fails(&x[..HIDDEN], &[0; 2]),
        MoeError::Parts { .. }
    ));

    /// Leaves out the last share.
    struct Forgetful;
    impl Divide for Forgetful {
        fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
            let mut division = FixedPolicy::CpuOnly.divide(loads, shape);
            division.shares.pop();
            division
        }
    }
    layer.set_policy(Forgetful);
    assert!(matches!(
        layer.forward(&x, &route(&[0, 1, 2, 3, 4, 5]), &mut out),
        Err(MoeError::Division(DivisionError::Uncovered {
            expert: 5,
            ..
        }))
    ));
}

/// Threads that share a layer get what one gets alone.
#[test]
fn threads_share_a_layer() {
    let gpu = gpu().ok();
    let model = Model::new(true, Activation::SwiGlu);
    let format = WeightFormat::Int8PerRow;
    let layer = match &gpu {
        Some(gpu) => model
            .builder(&model.pinned(gpu, format))
            .devices(std::slice::from_ref(gpu))
            .policy(FixedPolicy::Fraction(0.5)),
        None => model.builder(&model.plain(format)),
    };
    let layer = layer.build().unwrap();
    let cases: Vec<RoutingCase> = (0..8)
        .map(|seed| RoutingCase::new(RoutingKind::Uniform, seed, 1 + seed as usize, 3, EXPERTS))
        .collect();
    let alone: Vec<Vec<u32>> = cases
        .iter()
        .map(|case| bits(&forward(&layer, &input(case.tokens), case)))
        .collect();
    std::thread::scope(|scope| {
        for (case, alone) in cases.iter().zip(&alone) {
            let layer = &layer;
            scope.spawn(move || {
                let x = input(case.tokens);
                for _ in 0..200 {
                    assert_eq!(&bits(&forward(layer, &x, case)), alone);
                }
            });
        }
    });
}

/// Every division of every routing, with x and the output on either side, against the whole and
/// the reference; 40 repeats and dirty scratch give the same bytes.
#[test]
fn every_division() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    for (bias, activation) in [(false, Activation::SwiGlu), (true, CLAMPED)] {
        let model = Model::new(bias, activation);
        for format in GPU_FORMATS {
            let bank = model.pinned(&gpu, format);
            let devices = [gpu.clone(), gpu.clone(), gpu.clone()];
            let layers: Vec<(usize, bool, MoeLayer)> = [(1, false), (1, true), (3, false)]
                .into_iter()
                .map(|(count, direct)| {
                    let layer = model
                        .builder(&bank)
                        .devices(&devices[..count])
                        .ring_budget(6 * bank.geometry().expert_bytes())
                        .direct(direct);
                    (count, direct, layer.build().unwrap())
                })
                .collect();
            for (name, case) in cases() {
                let x = input(case.tokens);
                let whole = model.expected(&bank, &case, &x);
                if format != WeightFormat::Bf16 {
                    let want = model.reference().int8(format, &x, &case);
                    assert_eq!(bits(&whole.sums), bits(&want), "{name} {format}");
                }
                for (count, direct, layer) in &layers {
                    for policy in 0..4 {
                        match policy {
                            0 => layer.set_policy(FixedPolicy::GpuOnly),
                            1 => layer.set_policy(FixedPolicy::Fraction(0.4)),
                            2 => layer.set_policy(Patchwork(1)),
                            _ => layer.set_policy(Patchwork(6)),
                        }
                        let name = format!("{name} {format} x{count} direct {direct} #{policy}");
                        let got = all_ways(&name, &gpu, layer, &case, &x);
                        whole.check(&name, *count, &got);
                    }
                }
            }
        }
    }
}

/// The output, which must be the same from and to either side and on dirty scratch.
fn all_ways(name: &str, gpu: &Gpu, layer: &MoeLayer, case: &RoutingCase, x: &[f32]) -> Vec<f32> {
    let first = forward(layer, x, case);
    layer.poison_scratch().unwrap();
    let again = forward(layer, x, case);
    assert_eq!(bits(&again), bits(&first), "{name}: dirty scratch");
    let routing = routing(case);
    let on_device = DeviceBuffer::from_slice(gpu, x).unwrap();
    let mut out = DeviceBuffer::<f32>::alloc(gpu, x.len()).unwrap();
    out.fill_bytes(0xff).unwrap();
    layer.forward(&on_device, &routing, &mut out).unwrap();
    assert_eq!(bits(&out.to_vec().unwrap()), bits(&first), "{name}: device");
    let halves = DeviceBuffer::from_slice(gpu, &to_bf16(x)).unwrap();
    let mut out = DeviceBuffer::<bf16>::alloc(gpu, x.len()).unwrap();
    out.fill_bytes(0xff).unwrap();
    layer.forward(&halves, &routing, &mut out).unwrap();
    assert_eq!(
        out.to_vec().unwrap(),
        to_bf16(&first),
        "{name}: device bf16"
    );
    first
}

#[test]
fn repeats_are_identical() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let model = Model::new(true, Activation::SwiGlu);
    for format in GPU_FORMATS {
        let bank = model.pinned(&gpu, format);
        let layer = model
            .builder(&bank)
            .devices(std::slice::from_ref(&gpu))
            .policy(Patchwork(3))
            .build()
            .unwrap();
        let stream = Stream::new(&gpu).unwrap();
        for tokens in [1, 33] {
            let case = RoutingCase::new(RoutingKind::Uniform, 1, tokens, TOP_K, EXPERTS);
            let x = input(tokens);
            let first = bits(&forward(&layer, &x, &case));
            let on_device = DeviceBuffer::from_slice(&gpu, &x).unwrap();
            let mut outs: Vec<_> = (0..40)
                .map(|_| DeviceBuffer::<f32>::zeroed(&gpu, x.len()).unwrap())
                .collect();
            for out in &mut outs {
                // SAFETY: all buffers live until the stream is synchronised below.
                unsafe {
                    layer
                        .forward_on(&on_device, &routing(&case), out, &stream)
                        .unwrap();
                }
            }
            stream.synchronize().unwrap();
            for out in outs {
                assert_eq!(bits(&out.to_vec().unwrap()), first, "{format} T={tokens}");
            }
        }
    }
}

/// Residents, experts copied ahead and layers that share a ring change nothing but the order of
/// sums.
#[test]
fn residency_and_prefetch() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let (model, other) = (
        Model::new(true, Activation::SwiGlu),
        Model::new(false, CLAMPED),
    );
    for format in GPU_FORMATS {
        let bank = model.pinned(&gpu, format);
        let cell = bank.geometry().expert_bytes();
        let first = model
            .builder(&bank)
            .devices(&[gpu.clone(), gpu.clone()])
            .ring_budget(6 * cell)
            .hbm_budget(2 * cell + 1)
            .policy(FixedPolicy::GpuOnly)
            .build()
            .unwrap();
        let other_bank = other.pinned(&gpu, format);
        let second = other.builder(&other_bank).sharing(&first).build().unwrap();
        assert_eq!(first.device_bytes(), [(6 * cell, 2 * cell); 2]);
        for (name, case) in cases() {
            let x = input(case.tokens);
            let want = model.expected(&bank, &case, &x);
            let want_second = bits(&forward(&second, &x, &case));
            for experts in [&[11u32, 4, 7][..], &[2, 3, 4, 5, 6], &[], &[0, 1, 2, 3]] {
                first.make_resident(experts).unwrap();
                assert!(first.resident().len() <= 4);
                let ahead = first.prefetch(&[8, 9, 2, 11, 0]).unwrap();
                assert!(ahead > 0, "{name}");
                if experts.len() == 3 {
                    assert_eq!(bits(&forward(&second, &x, &case)), want_second, "{name}");
                }
                // Residents are whole on one device, the others divided between both.
                let out = forward(&first, &x, &case);
                want.check(&format!("{name} {format} {experts:?}"), 2, &out);
                assert_eq!(bits(&forward(&first, &x, &case)), bits(&out), "{name}");
            }
        }
        assert!(matches!(
            first.prefetch(&[EXPERTS as u32]),
            Err(MoeError::Expert { expert: 12, .. })
        ));
        let in_flight = input(150);
        let case = RoutingCase::new(RoutingKind::Uniform, 8, 150, TOP_K, EXPERTS);
        let stream = Stream::new(&gpu).unwrap();
        let x = DeviceBuffer::from_slice(&gpu, &in_flight).unwrap();
        let mut out = DeviceBuffer::<f32>::zeroed(&gpu, in_flight.len()).unwrap();
        // SAFETY: the buffers outlive the synchronise; the layer waits for its work when dropped.
        unsafe {
            first
                .forward_on(&x, &routing(&case), &mut out, &stream)
                .unwrap();
        }
        first.prefetch(&[1, 2, 3]).unwrap();
        drop((first, bank));
        stream.synchronize().unwrap();
        assert!(out.to_vec().unwrap().iter().any(|&y| y != 0.0));
        assert!(
            forward(&second, &in_flight, &case)
                .iter()
                .all(|y| y.is_finite())
        );
    }
}

/// A retention policy brings in what it wants, a few experts a forward, and the policy hears of
/// every forward.
#[test]
fn retention_and_observation() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    struct Latest(Vec<u32>);
    impl Retain for Latest {
        fn observe(&mut self, loads: &[ExpertLoad], _tokens: u32) {
            self.0 = loads.iter().map(|l| l.expert).collect();
        }
        fn wanted(&mut self, cells: usize) -> Vec<u32> {
            self.0.iter().copied().take(cells).collect()
        }
    }
    type Seen = Arc<Mutex<Vec<ForwardTimes>>>;
    struct Watcher(Seen);
    impl Divide for Watcher {
        fn divide(&mut self, loads: &[ExpertLoad], shape: &LayerShape) -> Division {
            let mut division = FixedPolicy::Fraction(0.5).divide(loads, shape);
            for (share, load) in division.shares.iter_mut().zip(loads) {
                if !load.resident.is_empty() {
                    *share = ExpertShare::gpu(load.expert, share.rows.clone(), shape.slices);
                }
            }
            division
        }
        fn observe(&mut self, _: &Division, _: &LayerShape, times: &ForwardTimes) {
            self.0.lock().unwrap().push(*times);
        }
    }
    let model = Model::new(true, Activation::SwiGlu);
    let bank = model.pinned(&gpu, WeightFormat::Int8PerRow);
    let seen = Seen::default();
    let layer = model
        .builder(&bank)
        .devices(std::slice::from_ref(&gpu))
        .hbm_budget(3 * bank.geometry().expert_bytes())
        .policy(Watcher(seen.clone()))
        .retain(Latest(Vec::new()))
        .build()
        .unwrap();
    let case = RoutingCase::new(RoutingKind::Uniform, 2, 2, TOP_K, EXPERTS);
    let x = input(2);
    let mut resident = Vec::new();
    for forwards in 1..=6 {
        let out = forward(&layer, &x, &case);
        model.check_divided("retention", &bank, &case, &x, &out);
        resident.push(layer.resident().len());
        assert_eq!(seen.lock().unwrap().len(), forwards);
    }
    assert_eq!(resident, [2, 3, 3, 3, 3, 3]);
    let seen = seen.lock().unwrap();
    assert!(
        seen.iter()
            .all(|t| t.cpu_seconds > 0.0 && t.gpu_seconds > 0.0)
    );
    assert_eq!(seen[0].resident_bytes, 0);
    assert!(seen[5].resident_bytes > 0 && seen[5].streamed_bytes < seen[0].streamed_bytes);
}

/// What does not fit is an error or a smaller ring, and nothing stays behind.
#[test]
fn memory_runs_out() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let model = Model::new(false, Activation::SwiGlu);
    let format = WeightFormat::Int8PerRow;
    let bank = model.pinned(&gpu, format);
    let devices = std::slice::from_ref(&gpu);
    let too_small = model.builder(&bank).devices(devices).ring_budget(1000);
    assert!(matches!(
        too_small.build(),
        Err(MoeError::Ring {
            ring_bytes: 1000,
            ..
        })
    ));
    let fp8 = model.pinned(&gpu, WeightFormat::Fp8Block128);
    assert!(matches!(
        model.builder(&fp8).devices(devices).build(),
        Err(MoeError::Backend { backend: "gpu", .. })
    ));
    // More than the device has: the ring and the cache shrink to what fits.
    let total = gpu.total_memory() as usize;
    let layer = model
        .builder(&bank)
        .devices(devices)
        .ring_budget(4 * total)
        .policy(FixedPolicy::GpuOnly)
        .build()
        .unwrap();
    let (ring, _) = layer.device_bytes()[0];
    assert!(ring < total, "{ring} of {total}");
    let case = RoutingCase::new(RoutingKind::Uniform, 2, 9, TOP_K, EXPERTS);
    let x = input(9);
    let out = forward(&layer, &x, &case);
    model.check_divided("small ring", &bank, &case, &x, &out);
    drop(layer);
    let free = || {
        gpu.synchronize().unwrap();
        gpu.free_memory().unwrap()
    };
    let make = |bank: &Arc<ExpertBank>| {
        let ring = 3 * bank.geometry().expert_bytes();
        let layer = model.builder(bank).devices(devices).ring_budget(ring);
        layer.build().map(drop)
    };
    make(&bank).unwrap();
    let before = free();
    for _ in 0..1000 {
        // Fails after ring and streams were made.
        assert!(make(&fp8).is_err());
    }
    make(&bank).unwrap();
    // Other tests of this program use the device meanwhile; rings would be a hundred times this.
    assert!(free() + (64 << 20) >= before, "{} of {before}", free());
}

/// A bank in ordinary memory works, more slowly.
#[test]
fn without_pinned_memory() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let model = Model::new(true, Activation::SwiGlu);
    let bank = model.plain(WeightFormat::Int8PerRow);
    assert!(!bank.is_pinned());
    let layer = model
        .builder(&bank)
        .devices(std::slice::from_ref(&gpu))
        .policy(FixedPolicy::Fraction(0.6))
        .build()
        .unwrap();
    for (name, case) in cases() {
        let x = input(case.tokens);
        let out = forward(&layer, &x, &case);
        model.check_divided(&name, &bank, &case, &x, &out);
    }
    let direct = model
        .builder(&bank)
        .devices(std::slice::from_ref(&gpu))
        .direct(true);
    assert!(matches!(direct.build(), Err(MoeError::Backend { .. })));
}

/// Replays of a recorded forward follow the routing in device memory.
#[test]
fn decode_graphs() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(reason) => skip!(gpu, "{reason}"),
    };
    let model = Model::new(true, CLAMPED);
    let stream = Stream::new(&gpu).unwrap();
    for format in GPU_FORMATS {
        let bank = model.pinned(&gpu, format);
        for direct in [true, false] {
            let layer = model
                .builder(&bank)
                .devices(std::slice::from_ref(&gpu))
                .hbm_budget(bank.geometry().bank_bytes())
                .direct(direct)
                .policy(FixedPolicy::GpuOnly)
                .build()
                .unwrap();
            let layer = Arc::new(layer);
            for tokens in [1, 5] {
                let halves = to_bf16(&input(tokens));
                let x = DeviceBuffer::from_slice(&gpu, &halves).unwrap();
                let mut ids = DeviceBuffer::<i32>::zeroed(&gpu, tokens * TOP_K).unwrap();
                let mut weights = DeviceBuffer::<f32>::zeroed(&gpu, tokens * TOP_K).unwrap();
                let mut out = DeviceBuffer::<f32>::zeroed(&gpu, x.len()).unwrap();
                let out_address = out.as_raw();
                // SAFETY: the buffers outlive the graph.
                let record = |out: &mut DeviceBuffer<f32>| unsafe {
                    DecodeGraph::record(
                        &layer,
                        &DecodeArgs {
                            x: (&x).into(),
                            ids: &ids,
                            weights: &weights,
                            out: out.into(),
                            top_k: TOP_K,
                        },
                    )
                };
                if !direct && layer.resident().is_empty() {
                    assert!(matches!(record(&mut out), Err(MoeError::Backend { .. })));
                    let all: Vec<u32> = (0..EXPERTS as u32).collect();
                    layer.make_resident(&all).unwrap();
                }
                let graph = record(&mut out).unwrap();
                assert_eq!(out.as_raw(), out_address);
                for kind in RoutingKind::ALL {
                    let case = RoutingCase::new(kind, 9, tokens, TOP_K, EXPERTS);
                    let mut want = vec![f32::NAN; x.len()];
                    layer.forward(&halves, &routing(&case), &mut want).unwrap();
                    ids.copy_from_host(&case.ids).unwrap();
                    weights.copy_from_host(&case.weights).unwrap();
                    for _ in 0..2 {
                        out.fill_bytes(0xff).unwrap();
                        // SAFETY: the buffers are not in other use until the synchronise.
                        unsafe { graph.launch(&stream).unwrap() };
                        stream.synchronize().unwrap();
                        assert_eq!(
                            bits(&out.to_vec().unwrap()),
                            bits(&want),
                            "{kind:?} {format}"
                        );
                    }
                }
                assert!(!graph.saw_foreign_ids().unwrap());
                // An id that is no expert counts as an empty slot, and is reported.
                let mut case = RoutingCase::new(RoutingKind::Uniform, 2, tokens, TOP_K, EXPERTS);
                case.ids[1] = -1;
                let mut want = vec![f32::NAN; x.len()];
                layer.forward(&halves, &routing(&case), &mut want).unwrap();
                for foreign in [EXPERTS as i32, -2, i32::MAX] {
                    case.ids[1] = foreign;
                    ids.copy_from_host(&case.ids).unwrap();
                    weights.copy_from_host(&case.weights).unwrap();
                    // SAFETY: as above.
                    unsafe { graph.launch(&stream).unwrap() };
                    stream.synchronize().unwrap();
                    assert_eq!(bits(&out.to_vec().unwrap()), bits(&want), "{foreign}");
                }
                assert!(graph.saw_foreign_ids().unwrap());
            }
        }
    }
}
