//! Dynamic shared memory.
//!
//! Its size is a launch parameter. All kernels of a module see the same array,
//! so it is declared once, here. A Rust `static` cannot take its place: rustc
//! puts every static into global memory.

// 1024 bytes is what a TMA tile with 128-byte swizzle needs. Only the linker
// of a kernel that uses the array allocates it.
#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

/// Shared-space address of the block's dynamic shared memory, a multiple of 1024.
///
/// The address is for `.shared` instructions (`ld.shared`, `mbarrier`, `cp.async.bulk`
/// and so on), not a generic pointer. How many bytes lie behind it is the
/// launch's `shared_mem_bytes`.
///
/// # Panics
///
/// Panics on the host.
#[inline(always)]
#[must_use]
pub fn dynamic_shared_base() -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let base: u32;
        // SAFETY: takes the address of the array declared above, no access.
        unsafe {
            core::arch::asm!(
                "mov.u32 {0}, dyn_smem;",
                out(reg32) base,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        base
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::device_only("shared::dynamic_shared_base")
}
