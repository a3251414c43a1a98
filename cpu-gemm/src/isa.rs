//! Which instruction sets this process may use.
//!
//! A token such as [`Avx512Vnni`] exists only after its CPU features were detected in
//! this process: holding one is what the calls into `#[target_feature]` code rely on.
//! Detection includes the operating system's consent to save the wide registers.

use std::fmt;

use crate::CpuError;

/// Environment variable that forces an instruction set by its [`Isa::name`].
pub const ISA_VARIABLE: &str = "ASYM_GEMM_ISA";

/// Instruction sets with kernels of their own, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, on every processor.
    Portable,
    /// AVX2 with FMA; the int8 kernels also use AVX-VNNI where it exists.
    Avx2,
    /// AVX-512 F, BW and VNNI; the bf16 kernels also use BF16 where it exists.
    Avx512,
    /// AMX tiles for int8 and bf16, with the AVX-512 features above around them.
    Amx,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// The name used in `ASYM_GEMM_ISA`, in logs and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The instruction set of that name.
    ///
    /// # Errors
    /// [`CpuError::UnknownIsa`].
    pub fn parse(name: &str) -> Result<Self, CpuError> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| CpuError::UnknownIsa { name: name.into() })
    }

    /// Features without which the instruction set cannot be used at all.
    pub(crate) const fn required(self) -> Features {
        match self {
            Self::Portable => Features::NONE,
            Self::Avx2 => Features::AVX2,
            Self::Avx512 => Features::AVX512F
                .and(Features::AVX512BW)
                .and(Features::AVX512VNNI),
            Self::Amx => Self::Avx512
                .required()
                .and(Features::AVX512BF16)
                .and(Features::AMX_TILE)
                .and(Features::AMX_INT8)
                .and(Features::AMX_BF16),
        }
    }

    /// Features that the instruction set's kernels use where they exist.
    pub(crate) const fn most(self) -> Features {
        match self {
            Self::Avx2 => self.required().and(Features::AVXVNNI),
            Self::Avx512 => self.required().and(Features::AVX512BF16),
            _ => self.required(),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of CPU features that kernels are chosen by.
///
/// [`Engine::with_features`](crate::Engine::with_features) takes one, so that a test on a
/// large processor can see what a smaller one would run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(u16);

impl Features {
    /// No feature beyond the compilation target's.
    pub const NONE: Self = Self(0);
    /// Every feature that kernels are chosen by.
    pub const ALL: Self = Self(u16::MAX);
    /// AVX2 (with FMA, which every such processor has, checked alike).
    pub const AVX2: Self = Self(1);
    /// AVX-512 Foundation.
    pub const AVX512F: Self = Self(2);
    /// AVX-512 Byte and Word.
    pub const AVX512BW: Self = Self(4);
    /// AVX-512 Vector Neural Network Instructions: u8 x i8 dot products.
    pub const AVX512VNNI: Self = Self(8);
    /// AVX-512 BF16 dot products.
    pub const AVX512BF16: Self = Self(16);

    /// AMX tile registers, which the system permitted this process to use.
    pub const AMX_TILE: Self = Self(32);
    /// AMX int8 products.
    pub const AMX_INT8: Self = Self(64);
    /// AMX bf16 products.
    pub const AMX_BF16: Self = Self(128);
    /// AVX-VNNI: u8 x i8 dot products in 256-bit registers, without AVX-512.
    pub const AVXVNNI: Self = Self(256);

    const NAMES: [(Self, &'static str); 9] = [
        (Self::AVX2, "avx2"),
        (Self::AVX512F, "avx512f"),
        (Self::AVX512BW, "avx512bw"),
        (Self::AVX512VNNI, "avx512vnni"),
        (Self::AVX512BF16, "avx512bf16"),
        (Self::AMX_TILE, "amx-tile"),
        (Self::AMX_INT8, "amx-int8"),
        (Self::AMX_BF16, "amx-bf16"),
        (Self::AVXVNNI, "avxvnni"),
    ];

    /// The features of this processor that its operating system supports.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let mut found = Self::NONE;
            let mut add = |present: bool, feature| {
                if present {
                    found = found.and(feature);
                }
            };
            add(
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
                Self::AVX2,
            );
            add(is_x86_feature_detected!("avx512f"), Self::AVX512F);
            add(is_x86_feature_detected!("avx512bw"), Self::AVX512BW);
            add(is_x86_feature_detected!("avx512vnni"), Self::AVX512VNNI);
            add(is_x86_feature_detected!("avx512bf16"), Self::AVX512BF16);
            add(is_x86_feature_detected!("avxvnni"), Self::AVXVNNI);
            let amx = crate::amx_permission::usable();
            add(amx.tile, Self::AMX_TILE);
            add(amx.int8, Self::AMX_INT8);
            add(amx.bf16, Self::AMX_BF16);
            found
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::NONE
    }

    /// Both sets together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The features that are in both sets.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The names of what `self` has and `other` lacks, comma-separated.
    pub(crate) fn names_without(self, other: Self) -> String {
        let missing = Self(self.0 & !other.0);
        let names: Vec<_> = Self::NAMES
            .iter()
            .filter(|(feature, _)| missing.contains(*feature))
            .map(|(_, name)| *name)
            .collect();
        names.join(", ")
    }
}

/// Proof that AVX2 and FMA were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The token, if `allowed` and this processor both have the features.
    pub(crate) fn new(allowed: Features) -> Option<Self> {
        let usable = allowed.common(Features::detect());
        usable.contains(Isa::Avx2.required()).then_some(Self(()))
    }
}

/// Proof that AVX2, FMA and AVX-VNNI were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni(());

#[cfg(target_arch = "x86_64")]
impl AvxVnni {
    /// The token, if `allowed` and this processor both have the features.
    pub(crate) fn new(allowed: Features) -> Option<Self> {
        let usable = allowed.common(Features::detect());
        usable.contains(Isa::Avx2.most()).then_some(Self(()))
    }
}

/// Proof that AVX-512 F, BW and VNNI were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vnni(());

#[cfg(target_arch = "x86_64")]
impl Avx512Vnni {
    /// The token, if `allowed` and this processor both have the features.
    pub(crate) fn new(allowed: Features) -> Option<Self> {
        let usable = allowed.common(Features::detect());
        usable.contains(Isa::Avx512.required()).then_some(Self(()))
    }
}

/// Proof that AVX-512 F, BW, VNNI and BF16 were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Bf16(());

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    /// The token, if `allowed` and this processor both have the features.
    pub(crate) fn new(allowed: Features) -> Option<Self> {
        let usable = allowed.common(Features::detect());
        usable
            .contains(Isa::Avx512.required().and(Features::AVX512BF16))
            .then_some(Self(()))
    }
}

/// Proof that AMX tiles with int8 and bf16 products, and [`Avx512Bf16`]'s features, were
/// detected, and that the system lets this process use tile data.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

#[cfg(target_arch = "x86_64")]
impl Amx {
    /// The token, if `allowed` and this processor both have the features.
    pub(crate) fn new(allowed: Features) -> Option<Self> {
        let usable = allowed.common(Features::detect());
        usable.contains(Isa::Amx.required()).then_some(Self(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl From<Amx> for Avx512Bf16 {
    /// What AMX kernels require contains it.
    fn from(_token: Amx) -> Self {
        Self(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(Isa::parse(isa.name()), Ok(isa));
        }
        assert_eq!(
            Isa::parse("neon"),
            Err(CpuError::UnknownIsa {
                name: "neon".into()
            })
        );
    }

    #[test]
    fn missing_features_are_named() {
        let has = Features::AVX2.and(Features::AVX512F);
        assert_eq!(
            Isa::Avx512.required().names_without(has),
            "avx512bw, avx512vnni"
        );
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn no_mask_yields_a_token_beyond_it() {
        for bits in 0..512 {
            let mask = Features(bits);
            if Avx2::new(mask).is_some() {
                assert!(mask.contains(Isa::Avx2.required()), "{mask:?}");
            }
            if AvxVnni::new(mask).is_some() {
                assert!(Avx2::new(mask).is_some(), "{mask:?}");
                assert!(mask.contains(Features::AVXVNNI), "{mask:?}");
            }
            if Avx512Vnni::new(mask).is_some() {
                assert!(mask.contains(Isa::Avx512.required()), "{mask:?}");
            }
            if Avx512Bf16::new(mask).is_some() {
                assert!(Avx512Vnni::new(mask).is_some(), "{mask:?}");
                assert!(mask.contains(Features::AVX512BF16), "{mask:?}");
            }
            if Amx::new(mask).is_some() {
                assert!(mask.contains(Isa::Amx.required()), "{mask:?}");
            }
        }
    }
}
