//! General GEMM on the GPU against sums in f64, and its times (`--ignored`).

use asym_gemm::driver::{DeviceBuffer, DriverError, Event, Gpu, PinnedBuffer, Stream};
use asym_gemm::gemm::{
    ColMajor, Extent, Gemm, GpuElement, GpuGemm, GpuProblem, Layout, Matrix, MatrixMut, Multiply,
    OnGpu, Op, OutputElement, RowMajor, Scalar, ScatterPlan, pack,
};
use asym_gemm_testkit::skip::skip_gpu;
use bytemuck::Pod;
use half::{bf16, f16};

fn open(test: &str) -> Option<(Gpu, Stream)> {
    let opened = asym_gemm_tests::gpu().and_then(|gpu| {
        let stream = Stream::new(&gpu).map_err(|e| e.to_string())?;
        Ok((gpu, stream))
    });
    match opened {
        Ok(found) => Some(found),
        Err(reason) => {
            skip_gpu(test, &reason);
            None
        }
    }
}

/// An element type of the tests.
trait Value: Copy + PartialEq + std::fmt::Debug + Pod {
    const ULP: f64;
    /// The smallest number with all bits; smaller ones are as far apart as this one and the next.
    const NORMAL: f64;
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
}

macro_rules! value {
    ($type:ty, $ulp:expr, $normal:expr, $of:expr, $f64:expr) => {
        impl Value for $type {
            const ULP: f64 = $ulp;
            const NORMAL: f64 = $normal;
            fn of(x: f64) -> Self {
                $of(x)
            }
            fn f64(self) -> f64 {
                $f64(self)
            }
        }
    };
}
value!(
    f32,
    1.2e-7,
    f32::MIN_POSITIVE as f64,
    |x| x as f32,
    f64::from
);
value!(
    bf16,
    7.9e-3,
    f32::MIN_POSITIVE as f64,
    bf16::from_f64,
    |x: bf16| x.to_f64()
);
value!(f16, 9.8e-4, 6.2e-5, f16::from_f64, |x: f16| x.to_f64());
value!(i8, 0.0, 0.0, |x: f64| (x * 127.0) as i8, f64::from);
value!(i32, 0.0, 0.0, |x: f64| (x * 10.0) as i32, f64::from);

fn random(seed: &mut u64) -> f64 {
    *seed = seed
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    ((*seed >> 33) as f64) / f64::from(1u32 << 30) - 1.0
}

fn fill<T: Value>(count: usize, mut seed: u64) -> Vec<T> {
    (0..count).map(|_| T::of(random(&mut seed))).collect()
}

fn extent<L: Layout>((rows, cols): (usize, usize), pad: usize) -> (Extent, usize) {
    let (major, minor) = if L::ROW_MAJOR {
        (rows, cols)
    } else {
        (cols, rows)
    };
    let ld = minor.max(1) + pad;
    (Extent { rows, cols, ld }, (major * ld).max(1))
}

fn index<L: Layout>(e: &Extent, r: usize, c: usize) -> usize {
    if L::ROW_MAJOR {
        r * e.ld + c
    } else {
        c * e.ld + r
    }
}

struct Call {
    shape: [usize; 3],
    ops: [Op; 2],
    pads: [usize; 3],
    alpha: f64,
    beta: f64,
    pinned: bool,
}

fn check<T, D, LA: Layout, LB: Layout, LD: Layout>(
    gpu: &Gpu,
    stream: &Stream,
    gemm: &mut GpuGemm,
    call: &Call,
) -> &'static str
where
    T: Value + Multiply<D> + GpuElement,
    D: Value + OutputElement<T::Scalar>,
    T::Scalar: Value + Scalar,
{
    let [m, n, k] = call.shape;
    let exact = D::ULP == 0.0;
    let scalar = |x: f64| {
        if exact {
            T::Scalar::of(x / 10.0)
        } else {
            T::Scalar::of(x)
        }
    };
    let params = Gemm {
        m,
        n,
        k,
        op_a: call.ops[0],
        op_b: call.ops[1],
        alpha: scalar(call.alpha),
        beta: scalar(call.beta),
    };
    let (ea, la) = extent::<LA>(params.a_shape(), call.pads[0]);
    let (eb, lb) = extent::<LB>(params.b_shape(), call.pads[1]);
    let (ed, ld) = extent::<LD>((m, n), call.pads[2]);
    let (a, b) = (fill::<T>(la, 1), fill::<T>(lb, 2));
    // Old contents: C of an in-place call, else NaN where there is one.
    let in_place = call.beta != 0.0;
    let old = if in_place {
        fill::<D>(ld, 3)
    } else {
        vec![D::of(f64::NAN); ld]
    };
    let da = DeviceBuffer::from_slice(gpu, &a).unwrap();
    let db = DeviceBuffer::from_slice(gpu, &b).unwrap();
    let mut dd = DeviceBuffer::from_slice(gpu, &old).unwrap();
    let mut host = PinnedBuffer::alloc(gpu, la * size_of::<T>()).unwrap();
    let bytes: &[u8] = bytemuck::cast_slice(&a);
    host.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    let view_a: OnGpu<Matrix<'_, T, LA>> = match call.pinned {
        true => OnGpu::<Matrix<'_, T, LA>>::pinned(&host, 0, ea).unwrap(),
        false => OnGpu::<Matrix<'_, T, LA>>::device(gpu, &da, 0, ea).unwrap(),
    };
    let mut problem = GpuProblem::new(
        view_a,
        OnGpu::<Matrix<'_, T, LB>>::device(gpu, &db, 0, eb).unwrap(),
        OnGpu::<MatrixMut<'_, D, LD>>::device_mut(gpu, &mut dd, 0, ed).unwrap(),
    );
    problem.in_place = in_place;
    let kernel = gemm.single(&params, problem, stream).unwrap();
    let got = dd.to_vec().unwrap();
    let op = |op: Op, r, c| if op == Op::None { (r, c) } else { (c, r) };
    let mut written = vec![false; got.len()];
    // Every element of small results, a spread of large ones.
    let stride = (m * n / 20_000).max(1);
    for i in 0..m * n {
        let (r, c) = (i / n, i % n);
        let at = index::<LD>(&ed, r, c);
        written[at] = true;
        if i % stride != 0 {
            continue;
        }
        let (mut sum, mut size) = (0.0, 0.0);
        for j in 0..k {
            let (ar, ac) = op(params.op_a, r, j);
            let (br, bc) = op(params.op_b, j, c);
            let p = a[index::<LA>(&ea, ar, ac)].f64() * b[index::<LB>(&eb, br, bc)].f64();
            sum += p;
            size += p.abs();
        }
        let (alpha, beta) = (params.alpha.f64(), params.beta.f64());
        (sum, size) = (alpha * sum, alpha.abs() * size);
        if in_place {
            sum += beta * old[at].f64();
            size += (beta * old[at].f64()).abs();
        }
        let factor = (k as f64 / 16.0 + 2.0) * 2f64.powi(-22);
        let bound = if exact {
            0.0
        } else {
            0.5 * D::ULP * sum.abs().max(D::NORMAL) + factor * size
        };
        let got = got[at].f64();
        assert!(
            (got - sum).abs() <= bound,
            "{kernel} {:?} [{r}, {c}]: {got}, expected {sum}",
            call.shape
        );
    }
    for (i, written) in written.into_iter().enumerate() {
        let kept = got[i] == old[i] || (got[i].f64().is_nan() && old[i].f64().is_nan());
        assert!(
            written || kept,
            "{kernel}: element {i} between the rows was written"
        );
    }
    kernel
}

#[test]
fn products_match_f64_sums() {
    let Some((gpu, stream)) = open("products_match_f64_sums") else {
        return;
    };
    let mut gemm = GpuGemm::new(&gpu);
    let none = [Op::None; 2];
    let nt = [Op::None, Op::Transpose];
    let both = [Op::Transpose; 2];
    let mut calls = Vec::new();
    for (i, shape) in [
        [1, 1, 1],
        [64, 64, 64],
        [65, 63, 33],
        [7, 130, 17],
        [129, 200, 100],
        [200, 5, 513],
        [33, 33, 0],
    ]
    .into_iter()
    .enumerate()
    {
        for (ops, pads) in [
            (none, [0, 0, 0]),
            (nt, [1, 2, 3]),
            (both, [3, 0, 1]),
            (nt, [8, 8, 8]),
        ] {
            let beta = if i % 2 == 0 { 0.0 } else { -0.5 };
            calls.push(Call {
                shape,
                ops,
                pads,
                alpha: 1.5,
                beta,
                pinned: i == 3,
            });
        }
    }
    for c in &calls {
        let (g, s) = (&gpu, &stream);
        check::<f32, f32, RowMajor, RowMajor, RowMajor>(g, s, &mut gemm, c);
        check::<bf16, bf16, RowMajor, ColMajor, RowMajor>(g, s, &mut gemm, c);
        check::<bf16, f32, ColMajor, RowMajor, ColMajor>(g, s, &mut gemm, c);
        check::<f16, f16, RowMajor, RowMajor, ColMajor>(g, s, &mut gemm, c);
        check::<f16, f32, ColMajor, ColMajor, RowMajor>(g, s, &mut gemm, c);
        check::<i8, i32, RowMajor, RowMajor, RowMajor>(g, s, &mut gemm, c);
        check::<i8, i32, ColMajor, RowMajor, ColMajor>(g, s, &mut gemm, c);
    }
    // Large and aligned: the expert GEMM's kernels.
    for (shape, pads) in [([512, 512, 512], [0, 0, 0]), ([300, 521, 1024], [8, 0, 3])] {
        let c = Call {
            shape,
            ops: nt,
            pads,
            alpha: 1.0,
            beta: 0.0,
            pinned: false,
        };
        let kernel =
            check::<bf16, bf16, RowMajor, RowMajor, RowMajor>(&gpu, &stream, &mut gemm, &c);
        assert!(kernel.contains("grouped_gemm"), "{kernel}");
        let kernel = check::<bf16, f32, RowMajor, RowMajor, RowMajor>(&gpu, &stream, &mut gemm, &c);
        assert!(kernel.contains("grouped_gemm"), "{kernel}");
    }
}

/// Rows that atomic additions order: each expert has its tokens, wherever they are.
#[test]
fn scattered_rows_are_a_packing() {
    let Some((gpu, stream)) = open("scattered_rows_are_a_packing") else {
        return;
    };
    let mut gemm = GpuGemm::new(&gpu);
    let (tokens, top_k, experts, words) = (301, 3, 17, 5);
    let mut ids: Vec<i32> = (0..tokens * top_k)
        .map(|i| ((i / top_k * 7 + i % top_k * 5) % (experts - 2)) as i32)
        .collect();
    ids[4] = -1;
    let x: Vec<u32> = (0..tokens * words).map(|i| i as u32).collect();
    let dx = DeviceBuffer::from_slice(&gpu, &x).unwrap();
    let di = DeviceBuffer::from_slice(&gpu, &ids).unwrap();
    for alignment in [1, 128] {
        let want = pack(&ids, tokens, top_k, experts, alignment).unwrap();
        let plan = ScatterPlan {
            ids: &di,
            top_k,
            experts,
            alignment,
        };
        let got = gemm.scatter(&dx, words, plan, &stream).unwrap();
        assert_eq!(got.rows, want.rows);
        let m_indices = got.m_indices.to_vec().unwrap();
        assert_eq!(m_indices[..got.rows], want.m_indices);
        assert!(m_indices[got.rows..].iter().all(|&e| e == -1));
        let (output, packed) = (
            got.output_index.to_vec().unwrap(),
            got.packed.to_vec().unwrap(),
        );
        let mut rows = Vec::new();
        for (slot, (&row, &id)) in output.iter().zip(&ids).enumerate() {
            if id < 0 {
                assert_eq!(row, -1);
                continue;
            }
            assert_eq!(m_indices[row as usize], id);
            let (at, token) = (row as usize * words, slot / top_k);
            assert_eq!(
                packed[at..at + words],
                x[token * words..(token + 1) * words]
            );
            rows.push(row);
        }
        let mut stable: Vec<i32> = want.output_index.into_iter().filter(|&r| r >= 0).collect();
        rows.sort_unstable();
        stable.sort_unstable();
        assert_eq!(rows, stable);
    }
}

/// Median seconds of what `call` enqueues `calls` times.
fn time(stream: &Stream, gpu: &Gpu, calls: usize, mut call: impl FnMut()) -> f64 {
    call();
    stream.synchronize().unwrap();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let (start, end) = (Event::new(gpu).unwrap(), Event::new(gpu).unwrap());
            start.record(stream).unwrap();
            (0..calls).for_each(|_| call());
            end.record(stream).unwrap();
            end.synchronize().unwrap();
            f64::from(end.elapsed_ms(&start).unwrap()) / 1e3 / calls as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Products of 1 to 64 rows in one call and in many, large ones, and a batch.
#[test]
#[ignore = "measures"]
fn timings() {
    let Some((gpu, stream)) = open("timings") else {
        return;
    };
    let mut gemm = GpuGemm::new(&gpu);
    let packed = |rows, cols| Extent {
        rows,
        cols,
        ld: cols,
    };
    type A<'a> = OnGpu<Matrix<'a, bf16, RowMajor>>;
    type Out<'a> = OnGpu<MatrixMut<'a, bf16, RowMajor>>;
    for (name, count, size) in [("8192^3", 1, 8192), ("64 x 512^3", 64, 512)] {
        let a = DeviceBuffer::from_slice(&gpu, &fill::<bf16>(count * size * size, 1)).unwrap();
        let b = DeviceBuffer::from_slice(&gpu, &fill::<bf16>(count * size * size, 2)).unwrap();
        let mut d = DeviceBuffer::<bf16>::zeroed(&gpu, count * size * size).unwrap();
        let params = Gemm::nt(size, size, size);
        let mut kernel = "";
        let mut enqueue = |stream: &Stream| {
            let mut rest =
                Some(Out::device_mut(&gpu, &mut d, 0, packed(count * size, size)).unwrap());
            let mut problems: Vec<_> = (0..count)
                .map(|i| {
                    let (d, after) = rest.take().unwrap().split_rows(size);
                    rest = Some(after);
                    let at = i * size * size;
                    GpuProblem::new(
                        A::device(&gpu, &a, at, packed(size, size)).unwrap(),
                        A::device(&gpu, &b, at, packed(size, size)).unwrap(),
                        d,
                    )
                })
                .collect();
            // SAFETY: the buffers live until the waits of `time`.
            kernel = unsafe { gemm.enqueue(&mut [(params, &mut problems)], stream) }.unwrap();
        };
        enqueue(&stream);
        stream.synchronize().unwrap();
        // The second call uploads nothing.
        let graph = stream
            .capture(|stream| {
                enqueue(stream);
                Ok::<(), DriverError>(())
            })
            .unwrap();
        let seconds = time(&stream, &gpu, 20, || {
            // SAFETY: as above.
            unsafe { graph.launch(&stream).unwrap() }
        });
        let flops = 2.0 * count as f64 * (size as f64).powi(3);
        println!(
            "TIME {name} {:.1} us {:.1} TFLOP/s {kernel}",
            seconds * 1e6,
            flops / seconds / 1e12
        );
    }
    let (count, n, k) = (256, 512, 512);
    let rows = |i: usize| 1 + i * 37 % 64;
    let total: usize = (0..count).map(rows).sum();
    let a = DeviceBuffer::from_slice(&gpu, &fill::<bf16>(total * k, 1)).unwrap();
    let b = DeviceBuffer::from_slice(&gpu, &fill::<bf16>(count * n * k, 2)).unwrap();
    let mut d = DeviceBuffer::<bf16>::zeroed(&gpu, total * n).unwrap();
    let mut results = Vec::new();
    let mut seconds = Vec::new();
    for together in [false, true] {
        d.fill_bytes(0xff).unwrap();
        seconds.push(time(&stream, &gpu, 1, || {
            let mut rest = Some(Out::device_mut(&gpu, &mut d, 0, packed(total, n)).unwrap());
            let mut row = 0;
            let mut problems: Vec<_> = (0..count)
                .map(|i| {
                    let (d, after) = rest.take().unwrap().split_rows(rows(i));
                    rest = Some(after);
                    row += rows(i);
                    [GpuProblem::new(
                        A::device(&gpu, &a, (row - rows(i)) * k, packed(rows(i), k)).unwrap(),
                        A::device(&gpu, &b, i * n * k, packed(n, k)).unwrap(),
                        d,
                    )]
                })
                .collect();
            let mut groups: Vec<_> = problems
                .iter_mut()
                .enumerate()
                .map(|(i, p)| (Gemm::nt(rows(i), n, k), &mut p[..]))
                .collect();
            if together {
                // SAFETY: the buffers live until the waits of `time`.
                unsafe { gemm.enqueue(&mut groups, &stream) }.unwrap();
            } else {
                for group in groups.chunks_mut(1) {
                    // SAFETY: as above.
                    unsafe { gemm.enqueue(group, &stream) }.unwrap();
                }
            }
        }));
        results.push(d.to_vec().unwrap());
    }
    assert!(results[0] == results[1], "company changes results");
    println!(
        "TIME 256 small products: single {:.1} us, grouped {:.1} us, {:.1} x",
        seconds[0] * 1e6,
        seconds[1] * 1e6,
        seconds[0] / seconds[1]
    );
}
