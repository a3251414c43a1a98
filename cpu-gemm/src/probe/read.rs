//! Reading memory as fast as an instruction set can, with a prefetch distance.

use std::hint::black_box;

/// How far ahead of its loads a reader prefetches, in bytes; 0 leaves that to the hardware.
/// Which is best depends on the machine, so all are tried.
pub(super) const DISTANCES: [usize; 4] = [0, 512, 2048, 8192];

/// Bytes that one step of every reader loads: two cache lines.
const STEP: usize = 128;

/// Adds up `bytes` in 8-byte words, in whole steps; what is left of the last step is not read.
#[derive(Clone, Copy)]
pub(super) struct Reader {
    name: &'static str,
    /// Safe to call: a reader is made only after its features were detected.
    read: unsafe fn(&[u8], usize) -> u64,
}

impl Reader {
    /// The widest of this processor.
    pub(super) fn best() -> Self {
        Self::all().pop().unwrap_or(PORTABLE)
    }

    /// Those that this processor can run, widest last.
    pub(super) fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let native = x86::available();
        #[cfg(not(target_arch = "x86_64"))]
        let native = Vec::new();
        [vec![PORTABLE], native].concat()
    }

    pub(super) fn name(self) -> &'static str {
        self.name
    }

    pub(super) fn read(self, bytes: &[u8], distance: usize) -> u64 {
        // SAFETY: the features of `read` were detected when this was made.
        unsafe { (self.read)(black_box(bytes), distance) }
    }
}

const PORTABLE: Reader = Reader {
    name: "portable",
    read: portable,
};

/// Leaves prefetching to the hardware at any distance.
fn portable(bytes: &[u8], _: usize) -> u64 {
    let mut sums = [0u64; STEP / 8];
    for step in bytes.as_chunks::<STEP>().0 {
        for (sum, word) in sums.iter_mut().zip(step.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.iter().fold(0, |sum, &part| sum.wrapping_add(part))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Reader, STEP};

    /// The readers of this processor, widest last.
    pub(super) fn available() -> Vec<Reader> {
        let mut found = Vec::new();
        if is_x86_feature_detected!("avx2") {
            found.push(Reader {
                name: "avx2",
                read: avx2,
            });
        }
        if is_x86_feature_detected!("avx512f") {
            found.push(Reader {
                name: "avx512",
                read: avx512,
            });
        }
        found
    }

    /// Bytes ahead of a step; beyond the buffer, where a prefetch does nothing, too.
    #[inline(always)]
    fn prefetch(step: &[u8; STEP], distance: usize) {
        let ahead = step.as_ptr().wrapping_add(distance).cast();
        // SAFETY: SSE is part of x86-64, and a prefetch of any address has no effect but on caches.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(ahead);
            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(64));
        }
    }

    #[target_feature(enable = "avx512f")]
    fn avx512(bytes: &[u8], distance: usize) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 2];
        for step in bytes.as_chunks::<STEP>().0 {
            if distance > 0 {
                prefetch(step, distance);
            }
            for (sum, line) in sums.iter_mut().zip(step.as_chunks::<64>().0) {
                // SAFETY: a line is 64 bytes, and the load takes any alignment.
                let words = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
                *sum = _mm512_add_epi64(*sum, words);
            }
        }
        _mm512_reduce_add_epi64(_mm512_add_epi64(sums[0], sums[1])) as u64
    }

    #[target_feature(enable = "avx2")]
    fn avx2(bytes: &[u8], distance: usize) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 4];
        for step in bytes.as_chunks::<STEP>().0 {
            if distance > 0 {
                prefetch(step, distance);
            }
            for (sum, half_line) in sums.iter_mut().zip(step.as_chunks::<32>().0) {
                // SAFETY: half a line is 32 bytes, and the load takes any alignment.
                let words = unsafe { _mm256_loadu_si256(half_line.as_ptr().cast()) };
                *sum = _mm256_add_epi64(*sum, words);
            }
        }
        let [a, b, c, d] = sums;
        let sum = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
        let words = [
            _mm256_extract_epi64::<0>(sum),
            _mm256_extract_epi64::<1>(sum),
            _mm256_extract_epi64::<2>(sum),
            _mm256_extract_epi64::<3>(sum),
        ];
        words
            .iter()
            .fold(0, |sum, &word| sum.wrapping_add(word as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reader_reads_every_byte_of_whole_steps() {
        let bytes: Vec<u8> = (0..10 * STEP + 1).map(|i| (i * 37 % 251) as u8).collect();
        let expected = |bytes: &[u8]| {
            let whole = &bytes[..bytes.len() / STEP * STEP];
            whole.chunks_exact(8).fold(0u64, |sum, word| {
                sum.wrapping_add(u64::from_ne_bytes(word.try_into().expect("8 bytes")))
            })
        };
        for reader in Reader::all() {
            for len in [0, 1, STEP - 1, STEP, STEP + 1, 10 * STEP] {
                // Also at an odd address.
                let bytes = &bytes[1..][..len];
                for distance in DISTANCES {
                    let sum = reader.read(bytes, distance);
                    assert_eq!(sum, expected(bytes), "{}, {len} bytes", reader.name());
                }
            }
        }
    }
}
