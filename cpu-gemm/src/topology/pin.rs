//! Keeping a thread on one CPU.

use std::thread::JoinHandle;

use crate::CpuError;

/// Lets the thread run on `cpu` only.
#[cfg(target_os = "linux")]
pub(crate) fn pin(thread: &JoinHandle<()>, cpu: usize) -> Result<(), CpuError> {
    use std::os::unix::thread::JoinHandleExt;

    let mut mask = vec![0u64; cpu / 64 + 1];
    mask[cpu / 64] = 1 << (cpu % 64);
    // SAFETY: the handle is not joined, so its thread's id is valid; the mask has the stated
    // number of bytes.
    let code = unsafe {
        libc::pthread_setaffinity_np(
            thread.as_pthread_t(),
            size_of_val(mask.as_slice()),
            mask.as_ptr().cast(),
        )
    };
    match code {
        0 => Ok(()),
        code => Err(CpuError::Pin {
            cpu,
            reason: std::io::Error::from_raw_os_error(code).to_string(),
        }),
    }
}

/// Lets the thread run on `cpu` only.
#[cfg(not(target_os = "linux"))]
pub(crate) fn pin(_: &JoinHandle<()>, cpu: usize) -> Result<(), CpuError> {
    Err(CpuError::Pin {
        cpu,
        reason: std::io::Error::from(std::io::ErrorKind::Unsupported).to_string(),
    })
}
