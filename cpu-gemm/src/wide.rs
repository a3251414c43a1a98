//! Plain loops compiled for the widest vectors of the processor.
//!
//! For code whose bits do not depend on the instruction set: rustc neither reorders nor
//! contracts floating-point operations, so only the speed differs.

/// A piece of work. Implement `run` with `#[inline(always)]`.
pub(crate) trait WideBody {
    /// Does the work.
    fn run(self);
}

/// Runs `body`, compiled for AVX-512, AVX2 with FMA, or the target's baseline.
pub(crate) fn run<B: WideBody>(body: B) {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::isa::Features;

        #[target_feature(enable = "avx512f")]
        fn avx512<B: WideBody>(body: B) {
            body.run();
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<B: WideBody>(body: B) {
            body.run();
        }
        let features = Features::detect();
        if features.contains(Features::AVX512F) {
            // SAFETY: avx512f was detected.
            return unsafe { avx512(body) };
        }
        if features.contains(Features::AVX2) {
            // SAFETY: avx2 and fma were detected.
            return unsafe { avx2(body) };
        }
    }
    body.run();
}
