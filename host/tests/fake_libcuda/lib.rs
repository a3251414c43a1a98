//! A driver library without a device: enough of libcuda for the host side to be tested
//! where there is no GPU. "Device" memory is host memory at a shifted address, streams run
//! everything at once, and a launch records its arguments.
//!
//! Built as a `cdylib` by the tests with plain rustc. `fake_set` and `fake_get` are the
//! tests' side door.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};

/// Device addresses are host addresses plus this, so that mixing them up faults.
const SHIFT: u64 = 1 << 52;

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const NOT_INITIALISED: u32 = 3;
const INVALID_CONTEXT: u32 = 201;
const INVALID_PTX: u32 = 218;
const NOT_FOUND: u32 = 500;
const LAUNCH_FAILED: u32 = 719;

/// What `fake_set` changes and `fake_get` reads.
static KNOBS: [AtomicI64; 16] = [const { AtomicI64::new(0) }; 16];
const LIVE_OBJECTS: usize = 0;
const REFUSE_ALLOCATION: usize = 1;
const REFUSE_REGISTER: usize = 2;
const REFUSE_HOST_ALLOC: usize = 3;
const RETAINED: usize = 4;
const LAUNCH_SUM: usize = 5;
const FLOAT_BITS: usize = 6;
const CAPTURING: usize = 7;
const MODULES_LOADED: usize = 8;
const SHARED_LIMIT: usize = 9;
const CALLS_AFTER_FORK: usize = 10;
/// Any kernel is there; one named after a GEMM takes three parameters, the others one.
const EVERY_KERNEL: usize = 11;
/// Calls until one fails that makes, starts or waits for something.
const FAIL_IN: usize = 12;

#[unsafe(no_mangle)]
pub extern "C" fn fake_set(knob: usize, value: i64) {
    KNOBS[knob].store(value, SeqCst);
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_get(knob: usize) -> i64 {
    KNOBS[knob].load(SeqCst)
}

fn knob(index: usize) -> i64 {
    KNOBS[index].load(SeqCst)
}

fn count(index: usize, by: i64) {
    KNOBS[index].fetch_add(by, SeqCst);
}

static INITIALISED_BY: AtomicU64 = AtomicU64::new(0);
static MEMORY: Mutex<BTreeMap<usize, Layout>> = Mutex::new(BTreeMap::new());

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn current() -> usize {
    CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Calls that make, start or wait for something need a context, and can be made to fail.
fn with_context(call: impl FnOnce() -> u32) -> u32 {
    releasing(|| match knob(FAIL_IN) {
        0 => call(),
        left => {
            count(FAIL_IN, -1);
            if left == 1 { LAUNCH_FAILED } else { call() }
        }
    })
}

/// Calls that need a context return this without one.
fn releasing(call: impl FnOnce() -> u32) -> u32 {
    let owner = INITIALISED_BY.load(SeqCst);
    if owner != 0 && owner != u64::from(std::process::id()) {
        count(CALLS_AFTER_FORK, 1);
    }
    if owner == 0 {
        NOT_INITIALISED
    } else if current() == 0 {
        INVALID_CONTEXT
    } else {
        call()
    }
}

macro_rules! export {
    ($($name:ident($($argument:ident: $type:ty),*) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            // SAFETY: the tests pass pointers as the driver API documents.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    )* };
}

export! {
    cuInit(_flags: c_uint) {
        INITIALISED_BY.store(std::process::id().into(), SeqCst);
        0
    }
    cuDriverGetVersion(version: *mut c_int) {
        let fake = std::env::var("FAKE_CUDA_VERSION");
        *version = fake.ok().and_then(|v| v.parse().ok()).unwrap_or(12_040);
        0
    }
    cuGetErrorName(code: u32, name: *mut *const c_char) {
        *name = match code {
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY".as_ptr(),
            INVALID_PTX => c"CUDA_ERROR_INVALID_PTX".as_ptr(),
            801 => c"CUDA_ERROR_NOT_SUPPORTED".as_ptr(),
            _ => { *name = std::ptr::null(); return INVALID_VALUE }
        };
        0
    }
    cuDeviceGetCount(count: *mut c_int) { *count = 2; 0 }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if !(0..2).contains(&ordinal) { return 101 }
        *device = ordinal;
        0
    }
    cuDeviceGetName(text: *mut c_char, bytes: c_int, device: c_int) {
        let name = format!("Fake {device}\0");
        if name.len() > bytes as usize { return INVALID_VALUE }
        std::ptr::copy_nonoverlapping(name.as_ptr().cast(), text, name.len());
        0
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { *bytes = 1 << 30; 0 }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        *value = match attribute {
            16 => 132,
            38 => 50 << 20,
            75 => 9 - device,
            76 => if device == 0 { 0 } else { 6 },
            97 => 232_448,
            _ => return INVALID_VALUE,
        };
        0
    }
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        count(RETAINED, 1);
        *context = 0x1000 + device as usize;
        0
    }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { count(RETAINED, -1); 0 }
    cuCtxGetCurrent(context: *mut usize) { *context = current(); 0 }
    cuCtxSetCurrent(context: usize) {
        CONTEXTS.with_borrow_mut(|stack| { stack.pop(); stack.push(context) });
        0
    }
    cuCtxPushCurrent_v2(context: usize) {
        CONTEXTS.with_borrow_mut(|stack| stack.push(context));
        0
    }
    cuCtxPopCurrent_v2(context: *mut usize) {
        match CONTEXTS.with_borrow_mut(Vec::pop) {
            Some(top) => { *context = top; 0 }
            None => INVALID_CONTEXT,
        }
    }
    cuCtxGetDevice(device: *mut c_int) {
        with_context(|| { *device = (current() - 0x1000) as c_int; 0 })
    }
    cuCtxSynchronize() { with_context(|| 0) }
    cuModuleLoadDataEx(
        module: *mut usize, image: *const c_void, count_of: c_uint, options: *mut c_int,
        values: *mut *mut c_void
    ) {
        with_context(|| {
            let text = CStr::from_ptr(image.cast()).to_string_lossy();
            if text.contains("broken") {
                let options = std::slice::from_raw_parts(options, count_of as usize);
                let values = std::slice::from_raw_parts(values, count_of as usize);
                let value = |option| values[options.iter().position(|&o| o == option).unwrap()];
                let log = "ptxas fatal : line 7 is broken".as_bytes();
                assert!(log.len() < value(6).addr());
                std::ptr::copy_nonoverlapping(log.as_ptr(), value(5).cast(), log.len());
                return INVALID_PTX;
            }
            count(MODULES_LOADED, 1);
            count(LIVE_OBJECTS, 1);
            *module = 0x2000;
            0
        })
    }
    cuModuleUnload(_module: usize) { releasing(|| { count(LIVE_OBJECTS, -1); 0 }) }
    cuModuleGetFunction(function: *mut usize, _module: usize, name: *const c_char) {
        with_context(|| {
            let name = CStr::from_ptr(name).to_string_lossy();
            *function = match (&*name, knob(EVERY_KERNEL)) {
                ("axpy", _) => 0x3002,
                (_, 0) => return NOT_FOUND,
                (name, _) if name.contains("gemm") => 0x3003,
                _ => 0x3001,
            };
            0
        })
    }
    cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _function: usize) {
        *value = match attribute { 0 => 512, 1 => 1024, _ => return INVALID_VALUE };
        0
    }
    cuFuncSetAttribute(_function: usize, attribute: c_int, value: c_int) {
        if attribute != 8 { return INVALID_VALUE }
        fake_set(SHARED_LIMIT, value.into());
        0
    }
    cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, bytes: *mut usize) {
        if index >= function - 0x3000 { return INVALID_VALUE }
        *offset = 8 * index;
        *bytes = 8;
        0
    }
    cuLaunchKernel(
        function: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        if !extra.is_null() { return INVALID_VALUE }
        if function != 0x3002 { return with_context(|| 0) }
        let mut sum = 0x3000;
        for (digit, part) in [gx, gy, gz, bx, by, bz, shared].into_iter().enumerate() {
            sum += i64::from(part) * (digit as i64 + 3);
        }
        sum += stream as i64 * 11;
        if !params.is_null() {
            sum += *(*params).cast::<i64>() * 13 + *(*params.add(1)).cast::<i64>() * 17;
        }
        fake_set(LAUNCH_SUM, sum);
        0
    }
    cuTexRefSetMipmapLevelBias(texture: usize, bias: f32) {
        if texture != 77 { return INVALID_VALUE }
        fake_set(FLOAT_BITS, bias.to_bits().into());
        0
    }
    cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, _priority: c_int) {
        with_context(|| {
            if flags != 1 { return INVALID_VALUE }
            count(LIVE_OBJECTS, 1);
            *stream = 0x4000;
            0
        })
    }
    cuStreamDestroy_v2(_stream: usize) { releasing(|| { count(LIVE_OBJECTS, -1); 0 }) }
    cuStreamSynchronize(_stream: usize) { with_context(|| 0) }
    cuStreamQuery(_stream: usize) { with_context(|| 0) }
    cuStreamWaitEvent(_stream: usize, _event: usize, _flags: c_uint) { with_context(|| 0) }
    cuStreamBeginCapture_v2(_stream: usize, _mode: c_int) { fake_set(CAPTURING, 1); 0 }
    cuStreamEndCapture(_stream: usize, graph: *mut usize) {
        if knob(CAPTURING) == 0 { return INVALID_VALUE }
        fake_set(CAPTURING, 0);
        count(LIVE_OBJECTS, 1);
        *graph = 0x5000;
        0
    }
    cuGraphInstantiateWithFlags(exec: *mut usize, _graph: usize, flags: u64) {
        if flags != 0 { return INVALID_VALUE }
        count(LIVE_OBJECTS, 1);
        *exec = 0x6000;
        0
    }
    cuGraphDestroy(_graph: usize) { count(LIVE_OBJECTS, -1); 0 }
    cuGraphExecDestroy(_graph: usize) { count(LIVE_OBJECTS, -1); 0 }
    cuGraphLaunch(_graph: usize, _stream: usize) { with_context(|| 0) }
    cuEventCreate(event: *mut usize, _flags: c_uint) {
        with_context(|| { count(LIVE_OBJECTS, 1); *event = 0x7000; 0 })
    }
    cuEventDestroy_v2(_event: usize) { releasing(|| { count(LIVE_OBJECTS, -1); 0 }) }
    cuEventRecord(_event: usize, _stream: usize) { with_context(|| 0) }
    cuEventSynchronize(_event: usize) { with_context(|| 0) }
    cuEventQuery(_event: usize) { 600 }
    cuEventElapsedTime(milliseconds: *mut f32, _start: usize, _end: usize) {
        *milliseconds = 2.5;
        0
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        with_context(|| { *free = 4096; *total = 1 << 30; 0 })
    }
    cuMemAlloc_v2(pointer: *mut u64, bytes: usize) {
        with_context(|| {
            if bytes == 0 { return INVALID_VALUE }
            if knob(REFUSE_ALLOCATION) != 0 { return OUT_OF_MEMORY }
            let layout = Layout::from_size_align(bytes, 256).unwrap();
            let host = alloc_zeroed(layout) as usize;
            std::ptr::write_bytes(host as *mut u8, 0xCD, bytes);
            MEMORY.lock().unwrap().insert(host, layout);
            count(LIVE_OBJECTS, 1);
            *pointer = host as u64 + SHIFT;
            0
        })
    }
    cuMemFree_v2(pointer: u64) {
        releasing(|| {
            let host = (pointer - SHIFT) as usize;
            let Some(layout) = MEMORY.lock().unwrap().remove(&host) else { return INVALID_VALUE };
            dealloc(host as *mut u8, layout);
            count(LIVE_OBJECTS, -1);
            0
        })
    }
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, _stream: usize) {
        with_context(|| { std::ptr::write_bytes((to - SHIFT) as *mut u8, value, bytes); 0 })
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, _stream: usize) {
        with_context(|| { std::ptr::copy(from, (to - SHIFT) as *mut u8, bytes); 0 })
    }
    cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, _stream: usize) {
        with_context(|| { std::ptr::copy((from - SHIFT) as *const u8, to, bytes); 0 })
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: usize) {
        with_context(|| {
            std::ptr::copy((from - SHIFT) as *const u8, (to - SHIFT) as *mut u8, bytes);
            0
        })
    }
    cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) {
        with_context(|| {
            if knob(REFUSE_HOST_ALLOC) != 0 { return OUT_OF_MEMORY }
            if flags != 3 { return INVALID_VALUE }
            let layout = Layout::from_size_align(bytes, 4096).unwrap();
            let host = alloc_zeroed(layout);
            std::ptr::write_bytes(host, 0xCD, bytes);
            MEMORY.lock().unwrap().insert(host as usize, layout);
            count(LIVE_OBJECTS, 1);
            *pointer = host.cast();
            0
        })
    }
    cuMemFreeHost(pointer: usize) {
        let Some(layout) = MEMORY.lock().unwrap().remove(&pointer) else { return INVALID_VALUE };
        dealloc(pointer as *mut u8, layout);
        count(LIVE_OBJECTS, -1);
        0
    }
    cuMemHostRegister_v2(pointer: usize, bytes: usize, flags: c_uint) {
        with_context(|| {
            if knob(REFUSE_REGISTER) != 0 { return 801 }
            if flags != 3 || pointer % 4096 != 0 || bytes % 4096 != 0 { return INVALID_VALUE }
            count(LIVE_OBJECTS, 1);
            0
        })
    }
    cuMemHostUnregister(_pointer: usize) { releasing(|| { count(LIVE_OBJECTS, -1); 0 }) }
    cuMemHostGetDevicePointer_v2(device: *mut u64, host: usize, flags: c_uint) {
        if flags != 0 { return INVALID_VALUE }
        *device = host as u64;
        0
    }
    cuTensorMapEncodeTiled(
        map: *mut u64, element: c_int, rank: c_uint, address: u64, sizes: *const u64,
        strides: *const u64, boxes: *const u32, steps: *const u32, interleave: c_int,
        swizzle: c_int, promotion: c_int, fill: c_int
    ) {
        if map.addr() % 64 != 0 || interleave != 0 || fill != 0 { return INVALID_VALUE }
        let rank = rank as usize;
        let mut words = vec![element as u64, address, swizzle as u64, promotion as u64];
        words.extend_from_slice(std::slice::from_raw_parts(sizes, rank));
        words.extend_from_slice(std::slice::from_raw_parts(strides, rank - 1));
        words.extend(std::slice::from_raw_parts(boxes, rank).iter().map(|&b| u64::from(b)));
        if std::slice::from_raw_parts(steps, rank).iter().any(|&step| step != 1) {
            return INVALID_VALUE;
        }
        std::ptr::copy_nonoverlapping(words.as_ptr(), map, words.len().min(16));
        0
    }
}

// Drivers before 12.0 lack it.
#[cfg(not(before_12))]
export! {
    cuLaunchKernelEx(
        config: *const c_void, _function: usize, params: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        if config.is_null() || params.is_null() || !extra.is_null() { return INVALID_VALUE }
        with_context(|| 0)
    }
}
