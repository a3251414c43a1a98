//! Both implementations under the same situations.

use std::collections::HashSet;
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::CpuError;

/// More threads than a small machine has CPUs, on purpose.
const THREADS: usize = 4;

fn spin(threads: usize) -> SpinPool {
    SpinPool::start(threads).expect("threads can be started")
}

fn rayon_pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("threads can be started")
}

/// Calls `test` with a pool of each kind, and says which it is.
fn with_each(test: impl Fn(&str, &dyn Workers) + Send + Sync) {
    for threads in [1, 2, THREADS] {
        test(&format!("spin {threads}"), &spin(threads));
        let workers = RayonWorkers::new();
        rayon_pool(threads).install(|| test(&format!("in rayon {threads}"), &workers));
    }
    test("rayon, from outside", &RayonWorkers::new());
}

/// Adds up `0..tickets` by pulling tickets, and checks what `Workers` promises.
fn sum(workers: &dyn Workers, tickets: usize) -> usize {
    let next = AtomicUsize::new(0);
    let total = AtomicUsize::new(0);
    let calls: Vec<_> = (0..workers.threads())
        .map(|_| AtomicUsize::new(0))
        .collect();
    let caller = thread::current().id();
    workers
        .run(&|participant| {
            calls[participant].fetch_add(1, Relaxed);
            assert_eq!(participant == 0, thread::current().id() == caller);
            loop {
                let ticket = next.fetch_add(1, Relaxed);
                if ticket >= tickets {
                    break;
                }
                total.fetch_add(ticket, Relaxed);
            }
        })
        .expect("nothing panics");
    assert_eq!(calls[0].load(Relaxed), 1);
    assert!(calls.iter().all(|calls| calls.load(Relaxed) <= 1));
    total.load(Relaxed)
}

fn expected(tickets: usize) -> usize {
    tickets * tickets.saturating_sub(1) / 2
}

#[test]
fn thousands_of_tiny_regions_lose_nothing() {
    with_each(|kind, workers| {
        for round in 0..3000 {
            let tickets = round % 17;
            assert_eq!(sum(workers, tickets), expected(tickets), "{kind}, {round}");
        }
    });
}

#[test]
fn sleeping_workers_come_back() {
    let pool = spin(THREADS);
    for _ in 0..20 {
        // Longer than they spin.
        thread::sleep(Duration::from_millis(2));
        let met = Barrier::new(THREADS);
        // Passes only with everybody in the region.
        pool.run(&|_| {
            met.wait();
        })
        .expect("nothing panics");
    }
}

#[test]
fn every_worker_has_its_own_index_and_name() {
    let pool = spin(THREADS);
    let met = Barrier::new(THREADS);
    let seen = Mutex::new(HashSet::new());
    pool.run(&|participant| {
        met.wait();
        let name = thread::current().name().map(str::to_owned);
        seen.lock().expect("no panic").insert((participant, name));
    })
    .expect("nothing panics");
    let seen = seen.into_inner().expect("no panic");
    for participant in 1..THREADS {
        let name = Some(format!("asym-gemm-{participant}"));
        assert!(seen.contains(&(participant, name)), "{seen:?}");
    }
    assert_eq!(seen.len(), THREADS);
}

#[test]
fn no_call_outlives_its_region() {
    with_each(|kind, workers| {
        let open = AtomicBool::new(false);
        for round in 0..2000 {
            let tickets = AtomicUsize::new(0);
            open.store(true, Relaxed);
            workers
                .run(&|_| {
                    assert!(open.load(Relaxed), "{kind}, {round}");
                    while tickets.fetch_add(1, Relaxed) < 3 {}
                    assert!(open.load(Relaxed), "{kind}, {round}");
                })
                .expect("nothing panics");
            open.store(false, Relaxed);
        }
    });
}

#[test]
fn a_region_inside_a_region_runs_alone() {
    with_each(|kind, workers| {
        let inner = AtomicUsize::new(0);
        let outer = AtomicUsize::new(0);
        workers
            .run(&|_| {
                outer.fetch_add(1, Relaxed);
                let caller = thread::current().id();
                workers
                    .run(&|participant| {
                        assert_eq!(participant, 0);
                        assert_eq!(thread::current().id(), caller);
                        inner.fetch_add(1, Relaxed);
                    })
                    .expect("nothing panics");
            })
            .expect("nothing panics");
        assert_eq!(inner.into_inner(), outer.into_inner(), "{kind}");
        // The thread is outside again.
        assert_eq!(sum(workers, 10), expected(10), "{kind}");
    });
}

#[test]
fn eight_callers_at_once_all_get_their_sums() {
    with_each(|kind, workers| {
        thread::scope(|scope| {
            for caller in 0..8 {
                scope.spawn(move || {
                    for round in 0..200 {
                        let tickets = (caller * 31 + round) % 50;
                        assert_eq!(sum(workers, tickets), expected(tickets), "{kind}");
                    }
                });
            }
        });
    });
}

#[test]
fn regions_from_the_tasks_of_a_rayon_pool() {
    let workers: [(&str, &dyn Workers); 2] =
        [("spin", &spin(THREADS)), ("rayon", &RayonWorkers::new())];
    for (kind, workers) in workers {
        for threads in [1, 3] {
            rayon_pool(threads).install(|| {
                use rayon::prelude::*;
                (0..300usize).into_par_iter().for_each(|tickets| {
                    assert_eq!(sum(workers, tickets), expected(tickets), "{kind}");
                });
            });
        }
    }
}

#[test]
fn a_body_may_use_rayon_whose_tasks_start_regions() {
    let pool = spin(THREADS);
    rayon_pool(2).install(|| {
        pool.run(&|_| {
            rayon::join(
                || assert_eq!(sum(&pool, 100), expected(100)),
                || assert_eq!(sum(&pool, 50), expected(50)),
            );
        })
        .expect("nothing panics");
    });
}

#[test]
fn blocked_rayon_threads_are_not_waited_for() {
    let pool = rayon_pool(2);
    let release = Arc::new(Barrier::new(2));
    let held = Arc::clone(&release);
    pool.spawn(move || {
        held.wait();
    });
    pool.install(|| {
        let workers = RayonWorkers::new();
        // More regions than tasks may queue up.
        for _ in 0..100 {
            assert_eq!(sum(&workers, 20), expected(20));
        }
    });
    release.wait();
}

#[test]
fn a_caller_does_not_wait_for_ever_for_its_turn() {
    let pool = spin(2);
    let started = Barrier::new(2);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            pool.run(&|participant| {
                if participant == 0 {
                    started.wait();
                    // Lasts until the other region has run.
                    let start = Instant::now();
                    while !done.load(Relaxed) && start.elapsed() < Duration::from_secs(20) {
                        thread::yield_now();
                    }
                    assert!(done.load(Relaxed));
                }
            })
            .expect("the other region does not wait for this one");
        });
        started.wait();
        assert_eq!(sum(&pool, 100), expected(100));
        done.store(true, Relaxed);
    });
}

/// Runs `test` without the messages of its panics on standard error.
fn quietly(test: impl FnOnce()) {
    static HOOK: Mutex<()> = Mutex::new(());
    let _one_at_a_time = HOOK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    test();
    panic::set_hook(hook);
}

#[test]
fn a_panic_ends_the_region_and_leaves_the_pool_usable() {
    quietly(|| {
        with_each(|kind, workers| {
            for round in 0..50 {
                let error = workers
                    .run(&|participant| {
                        if participant == 0 {
                            panic!("round {round}");
                        }
                    })
                    .expect_err(kind);
                assert_eq!(error.participant, 0, "{kind}");
                assert_eq!(error.message, format!("round {round}"), "{kind}");
                assert_eq!(sum(workers, 30), expected(30), "{kind}");
            }
        });
    });
}

#[test]
fn a_panic_on_every_participant_gives_one_error() {
    quietly(|| {
        let pool = spin(THREADS);
        for _ in 0..50 {
            let met = Barrier::new(THREADS);
            let error = pool.run(&|participant| {
                met.wait();
                assert!(participant == usize::MAX, "all of them");
            });
            assert_eq!(
                error.map_err(|panic| panic.message),
                Err("all of them".into())
            );
            assert_eq!(sum(&pool, 30), expected(30));
        }
    });
}

#[test]
fn a_panic_of_a_worker_alone_reaches_the_caller() {
    quietly(|| {
        let pool = spin(2);
        let met = Barrier::new(2);
        let error = pool
            .run(&|participant| {
                met.wait();
                if participant == 1 {
                    panic::panic_any(7u8);
                }
            })
            .expect_err("the worker panics");
        assert_eq!(error.participant, 1);
        assert_eq!(error.message, "a payload that is no text");
        assert_eq!(sum(&pool, 30), expected(30));
    });
}

#[test]
fn dropping_a_pool_ends_its_threads() {
    for idle in [Duration::ZERO, Duration::from_millis(1)] {
        let pool = spin(THREADS);
        let shared = Arc::downgrade(&pool.shared);
        sum(&pool, 10);
        thread::sleep(idle);
        drop(pool);
        assert_eq!(shared.strong_count(), 0);
    }
}

#[test]
fn a_pool_has_no_more_threads_than_there_are_cpus() {
    let cpus = crate::topology::affinity().len();
    let pool = SpinPool::new(MAX_THREADS).expect("cut to the CPUs");
    assert_eq!(pool.threads(), cpus);
    for bad in [0, MAX_THREADS + 1] {
        assert!(matches!(
            SpinPool::new(bad),
            Err(CpuError::ThreadCount { .. })
        ));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn pinned_workers_stay_on_their_cpus() {
    let cpus = crate::topology::affinity();
    let pool = SpinPool::pinned(&cpus).expect("the mask allows them");
    let met = Barrier::new(cpus.len());
    let before = crate::topology::affinity();
    pool.run(&|participant| {
        met.wait();
        if participant > 0 {
            assert_eq!(crate::topology::affinity(), [cpus[participant]]);
        }
    })
    .expect("nothing panics");
    assert_eq!(crate::topology::affinity(), before);
    let outside = cpus.iter().max().expect("there is one") + 1;
    for bad in [[cpus[0], outside], [cpus[0], cpus[0]]] {
        assert_eq!(
            SpinPool::pinned(&bad).err(),
            Some(CpuError::CpuUnavailable { cpu: bad[1] })
        );
    }
    assert!(matches!(
        SpinPool::pinned(&[]),
        Err(CpuError::ThreadCount { .. })
    ));
}

#[cfg(unix)]
mod fork {
    use std::sync::atomic::AtomicI32;

    use super::*;

    /// The child's id in the parent, 0 in the child, where a hang ends by a signal.
    fn fork() -> libc::pid_t {
        // SAFETY: the child calls allocation, thread starts and this crate only, which all work
        // after a fork with this platform's C library, and ends by `leave`.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: takes a number; SIGALRM ends the process by default.
                unsafe { libc::alarm(20) };
                0
            }
            child => child,
        }
    }

    /// Ends the child without unwinding or destructors.
    fn leave(passed: bool) -> ! {
        // SAFETY: takes a number and does not return.
        unsafe { libc::_exit(if passed { 0 } else { 1 }) }
    }

    /// Status of a child that has ended; 0 if it passed.
    fn wait_for(child: libc::pid_t) -> i32 {
        let mut status = 0;
        // SAFETY: the pointer is to a live i32.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status
    }

    /// Runs `child` in a forked process and gives its exit status.
    fn in_child(child: impl FnOnce() -> bool) -> i32 {
        match fork() {
            0 => leave(panic::catch_unwind(panic::AssertUnwindSafe(child)).unwrap_or(false)),
            child => wait_for(child),
        }
    }

    #[test]
    fn a_child_runs_alone_and_may_drop_the_pool() {
        let pool = spin(THREADS);
        assert_eq!(sum(&pool, 10), expected(10));
        let mut pool = Some(pool);
        let status = in_child(|| {
            let pool = pool.take().expect("still there");
            let right = sum(&pool, 40) == expected(40);
            drop(pool);
            right && sum(&RayonWorkers::new(), 40) == expected(40)
        });
        assert_eq!(status, 0);
        assert_eq!(sum(&pool.expect("the parent's"), 40), expected(40));
    }

    #[test]
    fn a_child_is_not_held_up_by_locks_that_others_hold_at_the_fork() {
        let pool = spin(2);
        let workers = RayonWorkers::new();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        sum(&pool, 10);
                        sum(&workers, 10);
                    }
                });
            }
            for _ in 0..30 {
                let status = in_child(|| {
                    sum(&pool, 40) == expected(40) && sum(&workers, 40) == expected(40)
                });
                assert_eq!(status, 0);
            }
            stop.store(true, Relaxed);
        });
    }

    #[test]
    fn a_fork_inside_a_region_ends_it_in_both_processes() {
        let (pool, workers, rayon) = (spin(2), RayonWorkers::new(), rayon_pool(2));
        rayon.install(|| {
            for workers in [&pool as &dyn Workers, &workers] {
                let met = Barrier::new(2);
                let forked = Barrier::new(2);
                let child = AtomicI32::new(-1);
                workers
                    .run(&|participant| {
                        met.wait();
                        if participant == 0 {
                            child.store(fork(), Relaxed);
                        }
                        // The other participant is inside at the fork, so the child sees it there
                        // for ever.
                        if child.load(Relaxed) != 0 {
                            forked.wait();
                        }
                    })
                    .expect("nothing panics");
                match child.into_inner() {
                    0 => leave(sum(workers, 40) == expected(40)),
                    child => assert_eq!(wait_for(child), 0),
                }
                assert_eq!(sum(workers, 40), expected(40));
            }
        });
    }

    #[test]
    fn a_child_has_a_default_pool_of_its_own() {
        let parents = default_workers().expect("threads can be started");
        let status = in_child(|| {
            let own = default_workers().expect("threads can be started");
            !Arc::ptr_eq(&own, &parents) && sum(&*own, 40) == expected(40)
        });
        assert_eq!(status, 0);
        assert!(Arc::ptr_eq(
            &parents,
            &default_workers().expect("as before")
        ));
    }
}
