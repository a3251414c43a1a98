//! Whether this process may use AMX tiles.
//!
//! Four things must agree: the processor has the instructions (CPUID leaf 7), its palette 1 has
//! eight tiles of 16 rows of 64 bytes (leaf 0x1D), the operating system saves tile state (XCR0
//! bits 17 and 18), and it grants this process the 8 KiB of tile data a thread, which Linux
//! does on request (`arch_prctl(ARCH_REQ_XCOMP_PERM, 18)`) and inherits to threads and children.

use std::sync::OnceLock;

/// The parts of AMX that can be used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AmxParts {
    pub(crate) tile: bool,
    pub(crate) int8: bool,
    pub(crate) bf16: bool,
}

/// What this process may use; asks the system once.
pub(crate) fn usable() -> AmxParts {
    static USABLE: OnceLock<AmxParts> = OnceLock::new();
    *USABLE.get_or_init(|| {
        let parts = present();
        if !parts.tile {
            return AmxParts::default();
        }
        match request() {
            Ok(()) => parts,
            Err(reason) => {
                tracing::warn!("AMX is not used: {reason}; falling back to AVX-512");
                AmxParts::default()
            }
        }
    })
}

/// What the processor has and the operating system saves.
#[cfg(target_arch = "x86_64")]
fn present() -> AmxParts {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    const OSXSAVE: u32 = 1 << 27;
    const TILE_STATE: u64 = 0b11 << 17;

    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 exists wherever xgetbv does.
        unsafe { _xgetbv(0) }
    }

    if __cpuid(0).eax < 0x1d || __cpuid(1).ecx & OSXSAVE == 0 {
        return AmxParts::default();
    }
    // SAFETY: OSXSAVE says that the system enabled xgetbv.
    if unsafe { xcr0() } & TILE_STATE != TILE_STATE {
        return AmxParts::default();
    }
    let palette = __cpuid_count(0x1d, 1);
    let bytes_a_row = palette.ebx & 0xffff;
    let names = palette.ebx >> 16;
    let rows = palette.ecx & 0xffff;
    let features = __cpuid_count(7, 0).edx;
    let has = |bit: u32| features & (1 << bit) != 0;
    if !has(24) || bytes_a_row < 64 || names < 8 || rows < 16 {
        return AmxParts::default();
    }
    AmxParts {
        tile: true,
        int8: has(25),
        bf16: has(22),
    }
}

/// AMX exists on x86-64 only.
#[cfg(not(target_arch = "x86_64"))]
fn present() -> AmxParts {
    AmxParts::default()
}

/// Asks for tile data.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn request() -> Result<(), String> {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this request takes two integers and changes only which registers may be used.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    match refused {
        0 => Ok(()),
        _ => Err(format!(
            "the system refused tile data ({})",
            std::io::Error::last_os_error()
        )),
    }
}

/// Other systems have no such request that this crate knows.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn request() -> Result<(), String> {
    Err("this operating system is not known to save tiles".into())
}
