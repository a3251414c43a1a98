//! General GEMM on the CPU against the `gemm` crate's f32, both on all threads of this machine:
//! `cargo bench -p asym-gemm-benches --bench cpu_dense [size [threads]]`.
//!
//! The two run in turns; the best time of each counts.

use std::sync::Arc;
use std::time::Instant;

use asym_gemm_cpu::Engine;
use asym_gemm_cpu::dense::{C, Gemm, Group, Matrix, MatrixMut, Problem, RowMajor, grouped, single};
use asym_gemm_cpu::pool::SpinPool;
use half::bf16;

/// Turns.
const TURNS: usize = 15;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut numbers = std::env::args()
        .skip(1)
        .filter_map(|a| a.parse::<usize>().ok());
    let size = numbers.next().unwrap_or(1024);
    let available = std::thread::available_parallelism()?.get();
    let threads = numbers.next().unwrap_or(available);
    let engine = Engine::detect()?.with_workers(Arc::new(SpinPool::new(threads)?));
    let value = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) / 500.0;
    let a: Vec<f32> = (0..size * size).map(value).collect();
    let b: Vec<f32> = (0..size * size).map(|i| value(i + 13)).collect();
    let narrow = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
    let (a16, b16) = (narrow(&a), narrow(&b));
    let (mut ours, mut theirs) = (vec![0.0f32; size * size], vec![0.0f32; size * size]);
    let mut ours16 = vec![bf16::ZERO; size * size];
    let nn = Gemm::new(size, size, size);
    let nt = Gemm::nt(size, size, size);

    let mut best = [f64::INFINITY; 4];
    for _ in 0..TURNS {
        let mut time = |case: usize, call: &mut dyn FnMut()| {
            let start = Instant::now();
            call();
            best[case] = best[case].min(start.elapsed().as_secs_f64());
        };
        time(0, &mut || reference(size, &a, &b, &mut theirs, threads));
        let mut result = Ok(());
        for (case, gemm) in [(1, &nn), (2, &nt)] {
            time(case, &mut || {
                result = (|| {
                    single(
                        &engine,
                        gemm,
                        Matrix::<_, RowMajor>::packed(&a, size, size)?,
                        Matrix::<_, RowMajor>::packed(&b, size, size)?,
                        C::None,
                        MatrixMut::<_, RowMajor>::packed(&mut ours, size, size)?,
                    )
                })();
            });
            result.clone()?;
            if case == 1 {
                let far = ours.iter().zip(&theirs).any(|(x, y)| (x - y).abs() > 1e-2);
                assert!(!far, "the two disagree");
            }
        }
        time(3, &mut || {
            result = (|| {
                single(
                    &engine,
                    &nt,
                    Matrix::<_, RowMajor>::packed(&a16, size, size)?,
                    Matrix::<_, RowMajor>::packed(&b16, size, size)?,
                    C::None,
                    MatrixMut::<_, RowMajor>::packed(&mut ours16, size, size)?,
                )
            })();
        });
        result?;
    }
    let gflops = |seconds: f64| 2.0 * (size as f64).powi(3) / seconds / 1e9;
    println!(
        "{} on {threads} threads, {size}^3, best of {TURNS}",
        engine.isa()
    );
    let names = ["gemm crate f32 NN", "f32 NN", "f32 NT", "bf16 NT"];
    for (name, seconds) in names.iter().zip(best) {
        let ratio = best[0] / seconds;
        println!(
            "{name:<18} {:8.2} ms {:8.1} GFLOP/s   {ratio:.2} x",
            seconds * 1e3,
            gflops(seconds)
        );
    }
    small_problems(&engine)?;
    Ok(())
}

/// The `gemm` crate, row-major.
fn reference(size: usize, a: &[f32], b: &[f32], d: &mut [f32], threads: usize) {
    let parallelism = match threads {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    let step = size as isize;
    // SAFETY: all three are size x size with rows `size` apart.
    unsafe {
        gemm::gemm(
            size,
            size,
            size,
            d.as_mut_ptr(),
            1,
            step,
            false,
            a.as_ptr(),
            1,
            step,
            b.as_ptr(),
            1,
            step,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// One grouped call over 256 products of 1 to 64 rows against 256 single calls.
fn small_problems(engine: &Engine) -> Result<(), Box<dyn std::error::Error>> {
    let (count, n, k) = (256, 256, 256);
    let rows = |i: usize| 1 + i * 37 % 64;
    let a = vec![0.5f32; 64 * k];
    let b = vec![0.25f32; n * k];
    let total: usize = (0..count).map(rows).sum();
    let mut d = vec![f32::NAN; total * n];
    let mut best = [f64::INFINITY; 2];
    for _ in 0..TURNS {
        let mut rest = &mut d[..];
        let start = Instant::now();
        for i in 0..count {
            let (d, after) = rest.split_at_mut(rows(i) * n);
            rest = after;
            single(
                engine,
                &Gemm::nt(rows(i), n, k),
                Matrix::<_, RowMajor>::packed(&a, rows(i), k)?,
                Matrix::<_, RowMajor>::packed(&b, n, k)?,
                C::None,
                MatrixMut::<_, RowMajor>::packed(d, rows(i), n)?,
            )?;
        }
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        let mut rest = &mut d[..];
        let mut problems = Vec::new();
        for i in 0..count {
            let (d, after) = rest.split_at_mut(rows(i) * n);
            rest = after;
            let problem = Problem {
                a: Matrix::<_, RowMajor>::packed(&a, rows(i), k)?,
                b: Matrix::<_, RowMajor>::packed(&b, n, k)?,
                c: C::None,
                d: MatrixMut::<_, RowMajor>::packed(d, rows(i), n)?,
            };
            problems.push((Gemm::nt(rows(i), n, k), [problem]));
        }
        let mut groups: Vec<_> = problems
            .iter_mut()
            .map(|(gemm, problems)| Group {
                gemm: *gemm,
                problems,
            })
            .collect();
        let start = Instant::now();
        grouped(engine, &mut groups)?;
        best[1] = best[1].min(start.elapsed().as_secs_f64());
    }
    println!(
        "{count} products of 1 to 64 rows: single calls {:.2} ms, grouped {:.2} ms, {:.2} x",
        best[0] * 1e3,
        best[1] * 1e3,
        best[0] / best[1]
    );
    Ok(())
}
