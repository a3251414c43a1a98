//! The driver layer against a driver library without a device (`fake_libcuda/lib.rs`), and
//! against no library at all. Each test runs in a process of its own, since a process
//! loads the driver once.
#![cfg(feature = "cuda")]

mod fake;

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use asym_gemm::driver::{
    self, DeviceBuffer, DriverError, Event, Gpu, KernelModule, L2Promotion, LIBRARY_VARIABLE,
    LaunchConfig, PinnedBuffer, Stream, TensorElement, TensorMap, TensorMapDesc,
};
use fake::{Fake, Knob, isolated, with_fake_driver, with_fake_driver_and};

const FAKE_DRIVER: &str = "before_12";

const MAP: TensorMapDesc<'static> = TensorMapDesc {
    element: TensorElement::Bf16,
    global_address: 0x7000_0010,
    sizes: &[4096, 1000, 8],
    strides_bytes: &[8192, 8_192_000],
    box_sizes: &[64, 128, 1],
    swizzle128: true,
    l2_promotion: L2Promotion::Bytes256,
};

#[test]
fn without_a_driver_everything_is_an_error_value() {
    let missing = [(LIBRARY_VARIABLE, "/no/such/libcuda.so.1")];
    isolated(
        "without_a_driver_everything_is_an_error_value",
        &missing,
        || {
            let is_missing = |error: DriverError| match error {
                DriverError::NoDriver { reason } => {
                    assert!(reason.contains("/no/such"), "{reason}")
                }
                other => panic!("unexpected {other}"),
            };
            is_missing(driver::load().expect_err("no driver"));
            is_missing(driver::device_count().expect_err("no driver"));
            is_missing(Gpu::open(0).expect_err("no driver"));
            is_missing(TensorMap::encode(&MAP).expect_err("no driver"));
            let probe = driver::probe();
            assert!(
                probe
                    .missing
                    .is_some_and(|reason| reason.contains("/no/such"))
            );
            assert_eq!(probe.driver_version, None);
            // Another user of cust in the program gets an error code, not a crash.
            let refused = cust::init(cust::CudaFlags::empty());
            assert_eq!(refused, Err(cust::error::CudaError::NoDevice));
        },
    );
}

#[test]
fn a_driver_too_old_for_the_kernels_is_named_with_both_versions() {
    with_fake_driver_and(
        "a_driver_too_old_for_the_kernels_is_named_with_both_versions",
        &[("FAKE_CUDA_VERSION", "11080")],
        || {
            let error = driver::load().expect_err("11.8 is below 12.0");
            let expected = DriverError::DriverTooOld {
                driver: (11, 8),
                needed: (12, 0),
            };
            assert_eq!(error, expected);
            let text = error.to_string();
            assert!(text.contains("11.8") && text.contains("12.0"), "{text}");
            assert_eq!(driver::probe().driver_version, Some((11, 8)));
        },
    );
}

/// An 11-argument call, four of them on the stack, must arrive as it was made, at the first
/// call (looked up on the way) and at later ones (a plain jump).
#[test]
fn calls_through_cust_reach_the_library_with_every_argument() {
    with_fake_driver(
        "calls_through_cust_reach_the_library_with_every_argument",
        || {
            let fake = Fake::open();
            let (mut x, mut y) = (5i64, 9i64);
            let mut params: [*mut c_void; 2] = [(&raw mut x).cast(), (&raw mut y).cast()];
            let expected = 0x3000
                + 3
                + 2 * 4
                + 3 * 5
                + 4 * 6
                + 5 * 7
                + 6 * 8
                + 7 * 9
                + 8 * 11
                + 5 * 13
                + 9 * 17;
            for round in 0..3 {
                fake.set(Knob::LaunchSum, 0);
                // SAFETY: the fake only adds the arguments up.
                let result = unsafe {
                    cust::sys::cuLaunchKernel(
                        // The fake's "axpy", the one whose arguments it adds up.
                        ptr::without_provenance_mut(0x3002),
                        1,
                        2,
                        3,
                        4,
                        5,
                        6,
                        7,
                        ptr::without_provenance_mut(8),
                        params.as_mut_ptr(),
                        ptr::null_mut(),
                    )
                };
                assert_eq!(result, cust::sys::cudaError_enum::CUDA_SUCCESS);
                assert_eq!(fake.get(Knob::LaunchSum), expected, "round {round}");
            }
            for bias in [-2.75f32, 1.5] {
                // SAFETY: the fake only stores the value.
                let result = unsafe {
                    cust::sys::cuTexRefSetMipmapLevelBias(ptr::without_provenance_mut(77), bias)
                };
                assert_eq!(result, cust::sys::cudaError_enum::CUDA_SUCCESS);
                assert_eq!(fake.get(Knob::FloatBits), i64::from(bias.to_bits()));
            }
            // A symbol that the library lacks.
            // SAFETY: the call ends in a stub that only returns.
            let result = unsafe { cust::sys::cuProfilerStart() };
            assert_eq!(result, cust::sys::cudaError_enum::CUDA_ERROR_NOT_FOUND);
            // cust itself over the same table.
            assert_eq!(cust::init(cust::CudaFlags::empty()), Ok(()));
            assert_eq!(cust::device::Device::num_devices(), Ok(2));
        },
    );
}

#[test]
fn devices_open_once_and_leave_the_callers_context_alone() {
    with_fake_driver(
        "devices_open_once_and_leave_the_callers_context_alone",
        || {
            let fake = Fake::open();
            assert_eq!(driver::device_count(), Ok(2));
            let no_device = DriverError::NoDevice {
                ordinal: 2,
                count: 2,
            };
            assert_eq!(Gpu::open(2).expect_err("two devices"), no_device);
            let first = Gpu::open(0).expect("device 0");
            let second = Gpu::open(1).expect("device 1");
            assert_eq!((first.name(), second.name()), ("Fake 0", "Fake 1"));
            assert_eq!(first.compute_capability(), (9, 0));
            assert_eq!(second.compute_capability(), (8, 6));
            assert_eq!(first.sm_count(), 132);
            assert_eq!(first.l2_bytes(), 50 << 20);
            assert_eq!(first.total_memory(), 1 << 30);
            assert_eq!(first.max_shared_bytes(), 232_448);
            assert_eq!(first.driver_version(), (12, 4));
            let again = Gpu::open(0).expect("still open");
            assert_eq!(fake.get(Knob::Retained), 2);

            // Alternate calls from one thread, with another context current.
            second.make_current().expect("a live context");
            for round in 0..3u8 {
                let a = DeviceBuffer::from_slice(&first, &[round; 5]).expect("small");
                let b = DeviceBuffer::from_slice(&second, &[round + 100; 5]).expect("small");
                assert_eq!(a.to_vec(), Ok(vec![round; 5]));
                assert_eq!(b.to_vec(), Ok(vec![round + 100; 5]));
            }
            let mut current = ptr::null_mut();
            // SAFETY: the pointer is to a live handle.
            let code = unsafe { cust::sys::cuCtxGetCurrent(&mut current) };
            assert_eq!(code, cust::sys::cudaError_enum::CUDA_SUCCESS);
            assert_eq!(current, second.as_raw_context());

            // Dropped in any order, from any thread.
            let buffer = DeviceBuffer::<u32>::alloc(&first, 7).expect("small");
            drop((first, again));
            assert_eq!(fake.get(Knob::Retained), 2, "the buffer holds the context");
            std::thread::spawn(move || drop(buffer))
                .join()
                .expect("no panic in drop");
            assert_eq!(fake.get(Knob::Retained), 1);
            drop(second);
            assert_eq!(
                (fake.get(Knob::Retained), fake.get(Knob::LiveObjects)),
                (0, 0)
            );
        },
    );
}

#[test]
fn a_foreign_context_is_used_but_not_released() {
    with_fake_driver("a_foreign_context_is_used_but_not_released", || {
        let fake = Fake::open();
        let owner = Gpu::open(1).expect("device 1");
        // SAFETY: `owner` keeps the context alive past `guest`.
        let guest = unsafe { Gpu::from_raw_context(owner.as_raw_context()) }.expect("live");
        assert_eq!((guest.ordinal(), guest.name()), (1, "Fake 1"));
        let buffer = DeviceBuffer::from_slice(&guest, &[1.5f32, 2.5]).expect("small");
        assert_eq!(buffer.to_vec(), Ok(vec![1.5, 2.5]));
        drop((buffer, guest));
        assert_eq!(fake.get(Knob::Retained), 1);
        // SAFETY: a null context is refused before it is used.
        let refused = unsafe { Gpu::from_raw_context(ptr::null_mut()) };
        assert!(matches!(refused, Err(DriverError::InvalidArgument { .. })));
        drop(owner);
    });
}

#[test]
fn device_buffers_copy_exactly_and_refuse_what_does_not_fit() {
    with_fake_driver(
        "device_buffers_copy_exactly_and_refuse_what_does_not_fit",
        || {
            let fake = Fake::open();
            let gpu = Gpu::open(0).expect("device 0");
            let values: Vec<u16> = (0..1009).collect();
            let mut buffer = DeviceBuffer::from_slice(&gpu, &values).expect("small");
            assert_eq!((buffer.len(), buffer.byte_len()), (1009, 2018));
            assert_ne!(buffer.as_raw(), 0);
            assert_eq!(buffer.to_vec(), Ok(values.clone()));

            buffer
                .copy_from_host_at(1007, &[7, 8])
                .expect("ends at the end");
            let mut tail = [0u16; 3];
            buffer
                .copy_to_host_at(1006, &mut tail)
                .expect("ends at the end");
            assert_eq!(tail, [1006, 7, 8]);

            let refused = |result: Result<(), DriverError>| {
                assert!(
                    matches!(result, Err(DriverError::InvalidArgument { .. })),
                    "{result:?}"
                );
            };
            refused(buffer.copy_from_host(&values[1..]));
            refused(buffer.copy_to_host(&mut [0; 1010]));
            refused(buffer.copy_from_host_at(1008, &[0, 0]));
            refused(buffer.copy_to_host_at(usize::MAX, &mut [0; 2]));
            refused(DeviceBuffer::<u64>::alloc(&gpu, usize::MAX).map(drop));
            refused(DeviceBuffer::<u64>::alloc(&gpu, 1 << 60).map(drop));
            assert_eq!(buffer.to_vec().expect("readable")[..1007], values[..1007]);

            buffer.fill_bytes(0xA5).expect("a live buffer");
            assert_eq!(buffer.to_vec(), Ok(vec![0xA5A5; 1009]));
            let zeroed = DeviceBuffer::<f32>::zeroed(&gpu, 33).expect("small");
            assert_eq!(zeroed.to_vec(), Ok(vec![0.0; 33]));

            let stream = Stream::new(&gpu).expect("a stream");
            let mut seen = [0u16; 4];
            // SAFETY: the slices and buffers outlive the synchronise below.
            unsafe {
                buffer
                    .copy_from_host_async(3, &[1, 2], &stream)
                    .expect("fits");
                refused(buffer.copy_from_host_async(1008, &[1, 2], &stream));
                let other = DeviceBuffer::from_slice(&gpu, &[9u16, 10, 11]).expect("small");
                buffer
                    .copy_from_device_async(5, &other, 1..3, &stream)
                    .expect("fits");
                refused(buffer.copy_from_device_async(5, &other, 2..4, &stream));
                refused(buffer.copy_from_device_async(1008, &other, 0..2, &stream));
                buffer
                    .copy_to_host_async(3, &mut seen, &stream)
                    .expect("fits");
                stream.synchronize().expect("nothing fails");
            }
            assert_eq!(seen, [1, 2, 10, 11]);

            let mut empty = DeviceBuffer::<f32>::from_slice(&gpu, &[]).expect("nothing to do");
            assert!(empty.is_empty() && empty.as_raw() == 0);
            assert_eq!(empty.fill_bytes(1), Ok(()));
            assert_eq!(empty.to_vec(), Ok(vec![]));

            fake.set(Knob::RefuseAllocation, 1);
            match DeviceBuffer::<f32>::alloc(&gpu, 1 << 20) {
                Err(DriverError::OutOfMemory {
                    what: "device",
                    bytes,
                    detail,
                }) => {
                    assert_eq!(bytes, 4 << 20);
                    assert!(
                        detail.contains("4096 of 1073741824 bytes free on GPU 0"),
                        "{detail}"
                    );
                }
                other => panic!("unexpected {other:?}"),
            }
            drop((buffer, zeroed, stream, empty));
            assert_eq!(fake.get(Knob::LiveObjects), 0);
        },
    );
}

#[test]
fn pinned_memory_falls_back_and_says_what_was_refused() {
    with_fake_driver("pinned_memory_falls_back_and_says_what_was_refused", || {
        let fake = Fake::open();
        let gpu = Gpu::open(0).expect("device 0");
        for refuse in [0, 1] {
            fake.set(Knob::RefuseRegister, refuse);
            for bytes in [1, 4097, (2 << 20) + 5] {
                let mut buffer = PinnedBuffer::alloc(&gpu, bytes).expect("small");
                assert_eq!(buffer.len(), bytes);
                assert_eq!(buffer.device_ptr(), buffer.as_ptr().addr() as u64);
                assert!(
                    buffer.as_slice().iter().all(|&byte| byte == 0),
                    "refuse {refuse}"
                );
                buffer.as_mut_slice()[bytes - 1] = 9;
                assert_eq!(buffer.as_slice()[bytes - 1], 9);
            }
        }
        assert_eq!(fake.get(Knob::LiveObjects), 0);
        fake.set(Knob::RefuseHostAlloc, 1);
        let text = PinnedBuffer::alloc(&gpu, 5000)
            .expect_err("both refused")
            .to_string();
        for part in [
            "pinned host memory",
            "5000 bytes",
            "cuMemHostRegister",
            "lock limit",
        ] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        // More than the machine has: an error before a page is touched.
        match PinnedBuffer::alloc(&gpu, 1 << 50) {
            Err(DriverError::OutOfMemory {
                what: "pinned host",
                detail,
                ..
            }) => {
                assert!(detail.contains("available"), "{detail}");
            }
            other => panic!("unexpected {other:?}"),
        }
        let empty = PinnedBuffer::alloc(&gpu, 0).expect("nothing to do");
        assert!(empty.is_empty() && empty.as_slice().is_empty());

        fake.set(Knob::RefuseRegister, 0);
        let mut owned = vec![3u8; 3 * 4096];
        let skip = owned.as_ptr().align_offset(4096);
        // SAFETY: the page lies in `owned`, which outlives the buffer and is not used
        // meanwhile.
        let lent = unsafe { PinnedBuffer::register(&gpu, owned.as_mut_ptr().add(skip), 4096) };
        let lent = lent.expect("one page");
        assert_eq!(lent.as_slice(), [3; 4096]);
        drop(lent);
        // SAFETY: an empty range is refused before it is used.
        let refused = unsafe { PinnedBuffer::register(&gpu, ptr::null_mut(), 1) };
        assert!(matches!(refused, Err(DriverError::InvalidArgument { .. })));
        assert_eq!(fake.get(Knob::LiveObjects), 0);
    });
}

#[test]
fn kernels_load_and_launch_with_checked_shapes() {
    with_fake_driver("kernels_load_and_launch_with_checked_shapes", || {
        let fake = Fake::open();
        let gpu = Gpu::open(0).expect("device 0");
        let text = ".version 8.0\n.target sm_90a\n";
        let module = Arc::new(KernelModule::load(&gpu, text).expect("the fake takes it"));
        assert_eq!(fake.get(Knob::ModulesLoaded), 1);
        let missing = module.function("gemm").expect_err("only axpy is there");
        assert!(missing.to_string().contains("\"gemm\""), "{missing}");
        let kernel = module.function("axpy").expect("it is there");
        drop((module, gpu));
        assert_eq!(
            fake.get(Knob::LiveObjects),
            1,
            "the kernel holds its module"
        );

        kernel
            .set_dynamic_shared(231_424)
            .expect("all but the static kilobyte");
        assert_eq!(fake.get(Knob::SharedLimit), 231_424);
        assert!(kernel.set_dynamic_shared(231_425).is_err());

        let (mut x, mut y) = (5i64, 9i64);
        let mut params: [*mut c_void; 2] = [(&raw mut x).cast(), (&raw mut y).cast()];
        let stream = ptr::without_provenance_mut(8);
        let launch = |grid, block, params: &mut [*mut c_void]| {
            // SAFETY: the fake reads two i64 parameters and no memory.
            unsafe { kernel.launch(grid, block, 7, stream, params) }
        };
        launch((1, 2, 3), (4, 5, 6), &mut params).expect("within every limit");
        let expected =
            0x3000 + 3 + 2 * 4 + 3 * 5 + 4 * 6 + 5 * 7 + 6 * 8 + 7 * 9 + 8 * 11 + 5 * 13 + 9 * 17;
        assert_eq!(fake.get(Knob::LaunchSum), expected);

        let refused = |result: Result<(), DriverError>, part: &str| match result {
            Err(DriverError::InvalidArgument { reason, .. }) => {
                assert!(reason.contains(part) && reason.contains("axpy"), "{reason}");
            }
            other => panic!("unexpected {other:?}"),
        };
        refused(launch((0, 1, 1), (32, 1, 1), &mut params), "grid");
        refused(launch((1, 1, 1), (513, 1, 1), &mut params), "block");
        refused(
            launch((1, 1, 1), (32, 1, 1), &mut params[..1]),
            "1 parameters given",
        );

        // The fake lacks cuLaunchKernelEx: a typed error.
        let config = LaunchConfig::new((2, 1, 1), (32, 1, 1), 0);
        // SAFETY: as above; the call is refused.
        let refused = unsafe { kernel.launch_with(&config, stream, &mut params) };
        assert!(
            matches!(refused, Err(DriverError::DriverTooOld { .. })),
            "{refused:?}"
        );
        drop(kernel);
        assert_eq!(
            (fake.get(Knob::LiveObjects), fake.get(Knob::Retained)),
            (0, 0)
        );
    });
}

#[test]
fn refused_ptx_brings_the_compilers_log_or_both_versions() {
    with_fake_driver(
        "refused_ptx_brings_the_compilers_log_or_both_versions",
        || {
            let gpu = Gpu::open(0).expect("device 0");
            match KernelModule::load(&gpu, ".version 8.0\nbroken") {
                Err(DriverError::Cuda {
                    call,
                    code: 218,
                    name,
                    log,
                }) => {
                    assert_eq!(call, "cuModuleLoadDataEx");
                    assert_eq!(name, "CUDA_ERROR_INVALID_PTX");
                    assert_eq!(log, "ptxas fatal : line 7 is broken");
                }
                other => panic!("unexpected {other:?}"),
            }
            let newer = KernelModule::load(&gpu, ".version 8.7\n").expect_err("12.4 reads 8.4");
            let expected = DriverError::DriverTooOld {
                driver: (12, 4),
                needed: (12, 8),
            };
            assert_eq!(newer, expected);
            assert!(KernelModule::load(&gpu, "a\0b").is_err());
            let unknown = gpu.module("no_such_family").expect_err("unknown");
            assert!(unknown.to_string().contains("no_such_family"), "{unknown}");
        },
    );
}

#[test]
fn streams_events_and_graphs_are_released() {
    with_fake_driver("streams_events_and_graphs_are_released", || {
        let fake = Fake::open();
        let gpu = Gpu::open(0).expect("device 0");
        let stream = Stream::with_priority(&gpu, -1).expect("a stream");
        let (start, end) = (
            Event::new(&gpu).expect("event"),
            Event::new(&gpu).expect("event"),
        );
        start.record(&stream).expect("recorded");
        stream.wait(&start).expect("waits");
        end.record(&stream).expect("recorded");
        end.synchronize().expect("reached");
        assert_eq!(end.elapsed_ms(&start), Ok(2.5));
        assert_eq!((stream.is_idle(), end.is_reached()), (Ok(true), Ok(false)));
        let order_only = Event::untimed(&gpu).expect("event");
        assert!(end.elapsed_ms(&order_only).is_err());

        let graph = stream.capture(|s| start.record(s)).expect("captured");
        // SAFETY: nothing with memory was recorded.
        unsafe { graph.launch(&stream) }.expect("launched");
        let failed = stream.capture(|_| {
            Err(DriverError::NoDevice {
                ordinal: 5,
                count: 2,
            })
        });
        assert!(
            matches!(failed, Err(DriverError::NoDevice { ordinal: 5, .. })),
            "{failed:?}"
        );
        assert_eq!(fake.get(Knob::Capturing), 0);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.capture::<DriverError>(|_| panic!("in the closure"))
        }));
        assert!(unwound.is_err());
        assert_eq!(fake.get(Knob::Capturing), 0);
        // SAFETY: null is the legacy default stream, which is always there.
        let legacy = unsafe { Stream::from_raw(&gpu, ptr::null_mut()) };
        assert!(legacy.capture::<DriverError>(|_| Ok(())).is_err());

        drop((graph, stream, start, end, order_only, legacy));
        assert_eq!(fake.get(Knob::LiveObjects), 0);
    });
}

#[test]
fn tensor_maps_reach_the_driver_as_described() {
    with_fake_driver("tensor_maps_reach_the_driver_as_described", || {
        let map = TensorMap::encode(&MAP).expect("a valid description");
        let words: Vec<u64> = map
            .as_bytes()
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .collect();
        let expected = [
            9,
            0x7000_0010,
            3,
            3,
            4096,
            1000,
            8,
            8192,
            8_192_000,
            64,
            128,
            1,
        ];
        assert_eq!(words[..12], expected);
        let plain = TensorMapDesc {
            element: TensorElement::U8,
            swizzle128: false,
            l2_promotion: L2Promotion::None,
            ..MAP
        };
        let map = TensorMap::encode(&plain).expect("a valid description");
        assert_eq!(map.as_bytes()[..8], [0; 8]);
        assert_eq!(map.as_bytes()[16..32], [0; 16]);
    });
}

#[test]
fn a_fork_gets_an_error_and_never_calls_the_driver() {
    with_fake_driver("a_fork_gets_an_error_and_never_calls_the_driver", || {
        let fake = Fake::open();
        let gpu = Gpu::open(0).expect("device 0");
        let buffer = DeviceBuffer::from_slice(&gpu, &[1u8, 2]).expect("small");
        let stream = Stream::new(&gpu).expect("a stream");
        // SAFETY: the child only compares, drops without allocating, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let forked = |result: Result<(), DriverError>| {
                matches!(result, Err(DriverError::ForkedAfterInit { .. }))
            };
            let refused = forked(driver::load().map(|_| ()))
                && forked(gpu.make_current())
                && forked(stream.synchronize())
                && forked(buffer.copy_to_host(&mut [0; 2]));
            drop((buffer, stream, gpu));
            let silent = fake.get(Knob::CallsAfterFork) == 0
                && fake.get(Knob::Retained) == 1
                && fake.get(Knob::LiveObjects) == 2;
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if refused && silent { 0 } else { 1 }) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: waits for the child made above.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert_eq!(buffer.to_vec(), Ok(vec![1, 2]), "the parent goes on");
    });
}
