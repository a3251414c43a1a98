//! A small valid file with arbitrary bytes changed, removed or added: reading it never
//! panics and never allocates beyond what the file's own size justifies.

use asym_gemm::checkpoint::{TensorData, TensorFile, write};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Remembers the largest allocation.
struct Watch;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to `System` with its arguments unchanged.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is `System`'s.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`, which is `System`'s.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, which is `System`'s.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watch = Watch;

#[derive(Clone, Debug)]
enum Edit {
    Set(usize, u8),
    Remove(usize),
    Insert(usize, u8),
    /// Replaces a digit of the header, the likeliest way to another valid header.
    Digit(usize, u8),
    Cut(usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = 0usize..600;
    prop_oneof![
        (at.clone(), any::<u8>()).prop_map(|(i, b)| Edit::Set(i, b)),
        at.clone().prop_map(Edit::Remove),
        (at.clone(), any::<u8>()).prop_map(|(i, b)| Edit::Insert(i, b)),
        (at.clone(), b'0'..=b'9').prop_map(|(i, b)| Edit::Digit(i, b)),
        at.prop_map(Edit::Cut),
    ]
}

fn apply(bytes: &mut Vec<u8>, edit: &Edit) {
    match *edit {
        Edit::Set(i, b) if i < bytes.len() => bytes[i] = b,
        Edit::Remove(i) if i < bytes.len() => drop(bytes.remove(i)),
        Edit::Insert(i, b) if i <= bytes.len() => bytes.insert(i, b),
        Edit::Digit(i, b) => {
            let digits = bytes.iter_mut().skip(8).filter(|b| b.is_ascii_digit());
            if let Some(digit) = digits.into_iter().nth(i % 40) {
                *digit = b;
            }
        }
        Edit::Cut(i) => bytes.truncate(i),
        _ => {}
    }
}

#[test]
fn mutations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let tensors = [
        TensorData::f32("model.a.weight", &[2, 8], &[1.0; 16]),
        TensorData::i32("b", &[3, 1, 2], &[-1; 6]),
        TensorData::f32("empty", &[0, 4], &[]),
    ];
    write(&path, &tensors).unwrap();
    let good = std::fs::read(&path).unwrap();

    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let edits = proptest::collection::vec(edit(), 1..4);
    let accepted = std::cell::Cell::new(0);
    runner
        .run(&edits, |edits| {
            let mut bytes = good.clone();
            edits.iter().for_each(|edit| apply(&mut bytes, edit));
            std::fs::write(&path, &bytes).unwrap();
            LARGEST.store(0, Ordering::Relaxed);
            match TensorFile::open(&path) {
                Ok(file) => {
                    accepted.set(accepted.get() + 1);
                    for name in file.tensors().keys() {
                        let _ = (file.read_f32(name), file.read_i32(name));
                    }
                }
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
            prop_assert!(LARGEST.load(Ordering::Relaxed) < 16 << 10);
            Ok(())
        })
        .unwrap();
    // Edits of the data leave a valid file: both ways were taken.
    assert!(accepted.get() > 5, "{}", accepted.get());
}
