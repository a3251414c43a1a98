//! GPU kernels in Rust, and the schedules and layouts they share with the host.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

#[cfg(all(target_arch = "nvptx64", feature = "elementwise"))]
mod elementwise {
    use cuda_std::prelude::*;

    /// y += a * x.
    #[kernel(threads = 256)]
    pub unsafe fn axpy(n: u32, a: f32, x: *const f32, y: *mut f32) {
        let i = thread::index_1d();
        if i < n {
            unsafe {
                let y = y.add(i as usize);
                *y = asym_gemm_formats::fma(a, *x.add(i as usize), *y);
            }
        }
    }
}

#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod gemm {
    use core::arch::asm;
    use cuda_std::prelude::*;

    /// Writes the shared base and the map's address.
    #[kernel(threads = 384, min_blocks = 1, cluster = 2)]
    pub unsafe fn gemm_probe(out: *mut u64, #[grid_constant] map: &TensorMap) {
        let base = shared::dynamic_shared_base();
        let t = thread::thread_idx_x();
        if t == 0 {
            unsafe {
                asm!("st.shared.u32 [{0}], {1};", in(reg32) base, in(reg32) t, options(nostack))
            };
        }
        unsafe { asm!("bar.sync 1, 128;", options(nostack)) };
        if t == 0 {
            unsafe {
                *out = base as u64;
                *out.add(1) = map.address();
            }
        }
        thread::sync_threads();
    }
}
