//! The processor: its name, and the instruction sets that both it and the operating
//! system allow.

use std::fs;
use std::io;

/// The processor.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CpuInfo {
    /// The name it gives itself, or `unknown`.
    pub model: String,
    /// The target architecture, as `x86_64`.
    pub architecture: &'static str,
    /// Features that can be used: the processor has them and the operating system saves
    /// their registers. Names as in `/proc/cpuinfo`.
    pub features: Vec<&'static str>,
    /// Features of the processor that the operating system has not enabled.
    pub disabled_by_os: Vec<&'static str>,
}

impl CpuInfo {
    /// Asks the processor; on other architectures than x86-64 the feature lists are empty.
    pub fn read() -> Self {
        let (features, disabled_by_os) = features();
        Self {
            model: model(),
            architecture: std::env::consts::ARCH,
            features,
            disabled_by_os,
        }
    }

    /// Whether a feature can be used.
    pub fn has(&self, feature: &str) -> bool {
        self.features.contains(&feature)
    }
}

// Register state that the operating system must have enabled in XCR0: SSE and AVX, the
// AVX-512 masks and registers, the tile configuration and data.
const NO_STATE: u64 = 0;
const AVX_STATE: u64 = 0b110;
const AVX512_STATE: u64 = 0b1110_0110;
const AMX_STATE: u64 = 0b11 << 17;

/// CPUID leaves in the order of [`Leaves`].
#[derive(Clone, Copy)]
enum Register {
    Leaf1Ecx,
    Leaf7Ebx,
    Leaf7Ecx,
    Leaf7Edx,
    Leaf7Sub1Eax,
}

/// Feature bits as CPUID gives them.
type Leaves = [u32; 5];

const FEATURES: [(&str, Register, u32, u64); 22] = [
    ("sse4_2", Register::Leaf1Ecx, 20, NO_STATE),
    ("avx", Register::Leaf1Ecx, 28, AVX_STATE),
    ("f16c", Register::Leaf1Ecx, 29, AVX_STATE),
    ("fma", Register::Leaf1Ecx, 12, AVX_STATE),
    ("avx2", Register::Leaf7Ebx, 5, AVX_STATE),
    ("avx_vnni", Register::Leaf7Sub1Eax, 4, AVX_STATE),
    ("avx512f", Register::Leaf7Ebx, 16, AVX512_STATE),
    ("avx512dq", Register::Leaf7Ebx, 17, AVX512_STATE),
    ("avx512cd", Register::Leaf7Ebx, 28, AVX512_STATE),
    ("avx512bw", Register::Leaf7Ebx, 30, AVX512_STATE),
    ("avx512vl", Register::Leaf7Ebx, 31, AVX512_STATE),
    ("avx512_vbmi", Register::Leaf7Ecx, 1, AVX512_STATE),
    ("avx512_vbmi2", Register::Leaf7Ecx, 6, AVX512_STATE),
    ("avx512_vnni", Register::Leaf7Ecx, 11, AVX512_STATE),
    ("avx512_bitalg", Register::Leaf7Ecx, 12, AVX512_STATE),
    ("avx512_bf16", Register::Leaf7Sub1Eax, 5, AVX512_STATE),
    ("avx512_fp16", Register::Leaf7Edx, 23, AVX512_STATE),
    ("amx_tile", Register::Leaf7Edx, 24, AMX_STATE),
    ("amx_int8", Register::Leaf7Edx, 25, AMX_STATE),
    ("amx_bf16", Register::Leaf7Edx, 22, AMX_STATE),
    ("amx_fp16", Register::Leaf7Sub1Eax, 21, AMX_STATE),
    ("movdir64b", Register::Leaf7Ecx, 28, NO_STATE),
];

/// Divides what the processor has into what the enabled state allows and what it does not.
fn divide(leaves: &Leaves, enabled_state: u64) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut usable = Vec::new();
    let mut disabled = Vec::new();
    for (name, register, bit, state) in FEATURES {
        if leaves[register as usize] >> bit & 1 == 1 {
            if enabled_state & state == state {
                usable.push(name);
            } else {
                disabled.push(name);
            }
        }
    }
    (usable, disabled)
}

#[cfg(target_arch = "x86_64")]
fn features() -> (Vec<&'static str>, Vec<&'static str>) {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    const OSXSAVE: u32 = 1 << 27;
    let highest = __cpuid(0).eax;
    let leaf1 = __cpuid(1);
    let mut leaves: Leaves = [leaf1.ecx, 0, 0, 0, 0];
    if highest >= 7 {
        let leaf7 = __cpuid_count(7, 0);
        leaves[1..4].copy_from_slice(&[leaf7.ebx, leaf7.ecx, leaf7.edx]);
        if leaf7.eax >= 1 {
            leaves[4] = __cpuid_count(7, 1).eax;
        }
    }
    let enabled_state = if leaf1.ecx & OSXSAVE != 0 {
        let (low, high): (u32, u32);
        // SAFETY: the OSXSAVE bit says that xgetbv may be executed; register 0 exists.
        unsafe {
            std::arch::asm!(
                "xgetbv",
                in("ecx") 0,
                out("eax") low,
                out("edx") high,
                options(nomem, nostack, preserves_flags),
            );
        }
        u64::from(high) << 32 | u64::from(low)
    } else {
        0
    };
    divide(&leaves, enabled_state)
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> (Vec<&'static str>, Vec<&'static str>) {
    divide(&[0; 5], 0)
}

#[cfg(target_arch = "x86_64")]
fn model() -> String {
    use std::arch::x86_64::__cpuid;

    const BRAND: u32 = 0x8000_0002;
    if __cpuid(0x8000_0000).eax < BRAND + 2 {
        return model_from_proc();
    }
    let bytes: Vec<u8> = (BRAND..=BRAND + 2)
        .map(__cpuid)
        .flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx])
        .flat_map(u32::to_le_bytes)
        .take_while(|&byte| byte != 0)
        .collect();
    let name = String::from_utf8_lossy(&bytes).trim().to_owned();
    if name.is_empty() {
        model_from_proc()
    } else {
        name
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn model() -> String {
    model_from_proc()
}

fn model_from_proc() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    find_model(&text).unwrap_or_else(|| "unknown".to_owned())
}

fn find_model(cpuinfo: &str) -> Option<String> {
    ["model name", "Model", "cpu model", "CPU part"]
        .iter()
        .find_map(|key| {
            cpuinfo.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == *key && !value.trim().is_empty()).then(|| value.trim().to_owned())
            })
        })
}

/// What the kernel says about AMX tile data in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AmxPermission {
    /// The kernel can grant it.
    pub supported: bool,
    /// This process has it.
    pub granted: bool,
}

/// Asks whether the kernel knows AMX and has granted it to this process; changes nothing.
pub fn amx_permission() -> AmxPermission {
    let has = |question| features_of_state(question).is_some_and(|bits| bits >> TILE_DATA & 1 == 1);
    AmxPermission {
        supported: has(GET_SUPPORTED),
        granted: has(GET_PERMISSION),
    }
}

/// Asks the kernel to let this process use AMX tiles. Needed once, before any thread
/// executes a tile instruction; threads started later inherit it.
///
/// # Errors
///
/// What the kernel answers: `ENOSPC` if a thread's alternate signal stack is too small,
/// `EOPNOTSUPP` or `EINVAL` without AMX, `EPERM` where a sandbox forbids the call.
#[inline(never)]
pub fn request_amx() -> io::Result<()> {
    arch_prctl(REQUEST_PERMISSION, TILE_DATA as usize)
}

// arch_prctl codes (asm/prctl.h) and the state component of tile data.
const GET_SUPPORTED: i32 = 0x1021;
const GET_PERMISSION: i32 = 0x1022;
const REQUEST_PERMISSION: i32 = 0x1023;
const TILE_DATA: u32 = 18;

fn features_of_state(question: i32) -> Option<u64> {
    let mut bits = 0u64;
    arch_prctl(question, (&raw mut bits).addr()).ok()?;
    Some(bits)
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn arch_prctl(code: i32, argument: usize) -> io::Result<()> {
    // SAFETY: of the three codes used, two write 8 bytes at `argument`, which is then a
    // live u64; the third takes a number.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, code, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn arch_prctl(_code: i32, _argument: usize) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_need_both_the_bit_and_the_enabled_state() {
        let all: Leaves = [u32::MAX; 5];
        let (usable, disabled) = divide(&all, AVX_STATE | AVX512_STATE | AMX_STATE);
        assert_eq!(usable.len(), FEATURES.len());
        assert!(disabled.is_empty());

        let (usable, disabled) = divide(&all, AVX_STATE);
        assert!(usable.contains(&"avx2") && !usable.contains(&"avx512f"));
        assert!(disabled.contains(&"avx512f") && disabled.contains(&"amx_tile"));

        // AVX-512 enabled, tiles not: a guest without AMX state.
        let (usable, disabled) = divide(&all, AVX512_STATE);
        assert!(usable.contains(&"avx512_vnni") && !usable.contains(&"amx_bf16"));
        assert_eq!(disabled, ["amx_tile", "amx_int8", "amx_bf16", "amx_fp16"]);

        assert_eq!(divide(&[0; 5], u64::MAX), (vec![], vec![]));
    }

    #[test]
    fn each_bit_is_the_documented_one() {
        let only = |register: Register, bit: u32| {
            let mut leaves: Leaves = [0; 5];
            leaves[register as usize] = 1 << bit;
            divide(&leaves, u64::MAX).0
        };
        assert_eq!(only(Register::Leaf7Ebx, 5), ["avx2"]);
        assert_eq!(only(Register::Leaf7Ebx, 16), ["avx512f"]);
        assert_eq!(only(Register::Leaf7Ecx, 11), ["avx512_vnni"]);
        assert_eq!(only(Register::Leaf7Sub1Eax, 5), ["avx512_bf16"]);
        assert_eq!(only(Register::Leaf7Edx, 25), ["amx_int8"]);
        assert!(only(Register::Leaf7Edx, 0).is_empty());
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn this_processor_agrees_with_the_standard_library() {
        let cpu = CpuInfo::read();
        assert_eq!(cpu.has("avx2"), is_x86_feature_detected!("avx2"));
        assert_eq!(cpu.has("fma"), is_x86_feature_detected!("fma"));
        assert_eq!(cpu.has("avx512f"), is_x86_feature_detected!("avx512f"));
        assert_eq!(
            cpu.has("avx512_vnni"),
            is_x86_feature_detected!("avx512vnni")
        );
        assert_eq!(
            cpu.has("avx512_bf16"),
            is_x86_feature_detected!("avx512bf16")
        );
        assert_ne!(cpu.model, "");
    }

    #[test]
    fn the_model_is_found_in_the_forms_that_kernels_print() {
        let x86 = "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Some CPU @ 2.0GHz\n";
        assert_eq!(find_model(x86).as_deref(), Some("Some CPU @ 2.0GHz"));
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(find_model(arm).as_deref(), Some("0xd4f"));
        assert_eq!(find_model(""), None);
    }

    #[test]
    fn a_granted_permission_was_supported() {
        let AmxPermission { supported, granted } = amx_permission();
        assert!(supported || !granted);
    }
}
