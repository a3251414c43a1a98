//! Kernel launches, plain and with launch attributes.

use std::ffi::{c_uint, c_void};
use std::ptr;

use super::error::{DriverError, invalid};
use super::module::Kernel;
use super::stream::RawStream;

// CUlaunchAttributeID values (cuda.h).
const COOPERATIVE: c_uint = 2;
const CLUSTER_DIMENSION: c_uint = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// Grid, block and what goes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: (u32, u32, u32),
    /// Threads of a block in x, y, z.
    pub block: (u32, u32, u32),
    /// Bytes of dynamic shared memory for a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster in x, y, z, if chosen at launch; needs sm_90. A kernel that
    /// declares its cluster in PTX needs none.
    pub cluster: Option<(u32, u32, u32)>,
    /// All blocks of the grid are on the GPU at once, or the launch is refused: for kernels
    /// whose blocks wait for each other.
    pub cooperative: bool,
    /// Lets the kernel start while the one before it in the stream still runs; it must
    /// then wait for it itself (`griddepcontrol.wait`). Needs sm_90.
    pub overlap_previous: bool,
}

impl LaunchConfig {
    /// A launch without attributes.
    pub const fn new(grid: (u32, u32, u32), block: (u32, u32, u32), shared_bytes: u32) -> Self {
        Self {
            grid,
            block,
            shared_bytes,
            cluster: None,
            cooperative: false,
            overlap_previous: false,
        }
    }

    /// Checks what the device and the kernel allow.
    fn validate(&self, max_threads: u32, shared_limit: u32) -> Result<(), String> {
        let (x, y, z) = self.grid;
        if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > 65_535 || z > 65_535 {
            return Err(format!(
                "grid ({x}, {y}, {z}) is outside 1..=(2^31-1, 65535, 65535)"
            ));
        }
        let (bx, by, bz) = self.block;
        let threads = u64::from(bx)
            .saturating_mul(by.into())
            .saturating_mul(bz.into());
        if threads == 0 || threads > u64::from(max_threads) || bz > 64 {
            return Err(format!(
                "block ({bx}, {by}, {bz}) is outside 1..={max_threads} threads"
            ));
        }
        if self.shared_bytes > shared_limit {
            return Err(format!(
                "{} bytes of dynamic shared memory, a block can have {shared_limit}",
                self.shared_bytes
            ));
        }
        if let Some((cx, cy, cz)) = self.cluster {
            let divides = |grid: u32, cluster: u32| cluster > 0 && grid.is_multiple_of(cluster);
            if !(divides(x, cx) && divides(y, cy) && divides(z, cz)) {
                return Err(format!(
                    "cluster ({cx}, {cy}, {cz}) does not divide grid ({x}, {y}, {z})"
                ));
            }
        }
        Ok(())
    }
}

/// `CUlaunchAttribute`: an id and a 64-byte union, of which the first words are used.
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchAttributeRaw {
    id: c_uint,
    padding: u32,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfigRaw {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: RawStream,
    attributes: *const LaunchAttributeRaw,
    attribute_count: c_uint,
}

impl Kernel {
    /// Starts the kernel on `stream`; returns before it has run.
    ///
    /// `params` holds one pointer for each kernel parameter, to its value; the values are
    /// copied during the call. A null stream is the legacy default stream.
    ///
    /// # Errors
    ///
    /// [`DriverError::InvalidArgument`] for a grid, block or shared size that the device
    /// or the kernel does not allow and, where the driver tells how many parameters the
    /// kernel has, for another number of them; [`DriverError::Cuda`] if the driver
    /// refuses, also for a failure of earlier asynchronous work.
    ///
    /// # Safety
    ///
    /// - `params` points to readable values of the types, in the order and of the number
    ///   that the kernel declares.
    /// - `stream` is null or a live stream of the kernel's context.
    /// - Whatever the kernel reads and writes through those values is alive until it has
    ///   run, large enough for this grid, and not used otherwise meanwhile, or only in an
    ///   order that streams and events establish.
    pub unsafe fn launch(
        &self,
        grid: (u32, u32, u32),
        block: (u32, u32, u32),
        shared_bytes: u32,
        stream: RawStream,
        params: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let config = LaunchConfig::new(grid, block, shared_bytes);
        self.check_launch(&config, params.len())?;
        let _current = self.context().enter()?;
        let driver = self.context().driver;
        // SAFETY: the function is loaded in the current context; the caller answers for
        // the parameters, the stream and the memory.
        let code = unsafe {
            (driver.api.launch)(
                self.raw,
                grid.0,
                grid.1,
                grid.2,
                block.0,
                block.1,
                block.2,
                shared_bytes,
                stream,
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        driver.check_with_log("cuLaunchKernel", code, || self.name().to_owned())
    }

    /// As [`Kernel::launch`], with launch attributes.
    ///
    /// # Errors
    ///
    /// As [`Kernel::launch`]; the cluster must divide the grid.
    ///
    /// # Safety
    ///
    /// As [`Kernel::launch`].
    pub unsafe fn launch_with(
        &self,
        config: &LaunchConfig,
        stream: RawStream,
        params: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        self.check_launch(config, params.len())?;
        let driver = self.context().driver;
        let Some(call) = driver.api.launch_ex else {
            return Err(DriverError::DriverTooOld {
                driver: driver.version(),
                needed: (12, 0),
            });
        };
        let (attributes, attribute_count) = config.attributes();
        let raw = LaunchConfigRaw {
            grid: config.grid.into(),
            block: config.block.into(),
            shared_bytes: config.shared_bytes,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count,
        };
        let _current = self.context().enter()?;
        // SAFETY: the function is loaded in the current context and `raw` with its
        // attributes outlives the call; the caller answers for the rest.
        let code = unsafe { call(&raw, self.raw, params.as_mut_ptr(), ptr::null_mut()) };
        driver.check_with_log("cuLaunchKernelEx", code, || self.name().to_owned())
    }

    fn check_launch(&self, config: &LaunchConfig, params: usize) -> Result<(), DriverError> {
        let refuse =
            |reason: String| invalid("Kernel::launch", format!("{}: {reason}", self.name()));
        config
            .validate(self.max_threads, self.dynamic_shared_limit())
            .map_err(refuse)?;
        match self.parameters {
            Some(declared) if declared != params => Err(refuse(format!(
                "{params} parameters given, the kernel has {declared}"
            ))),
            _ => Ok(()),
        }
    }
}

impl LaunchConfig {
    fn attributes(&self) -> ([LaunchAttributeRaw; 3], c_uint) {
        let mut list = [LaunchAttributeRaw {
            id: 0,
            padding: 0,
            value: [0; 16],
        }; 3];
        let mut count = 0;
        if let Some((x, y, z)) = self.cluster {
            list[count].id = CLUSTER_DIMENSION;
            list[count].value[..3].copy_from_slice(&[x, y, z]);
            count += 1;
        }
        if self.cooperative {
            list[count].id = COOPERATIVE;
            list[count].value[0] = 1;
            count += 1;
        }
        if self.overlap_previous {
            list[count].id = PROGRAMMATIC_STREAM_SERIALIZATION;
            list[count].value[0] = 1;
            count += 1;
        }
        (list, count as c_uint)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    #[test]
    fn structs_are_laid_out_as_in_cuda_h() {
        assert_eq!(size_of::<LaunchAttributeRaw>(), 72);
        assert_eq!(offset_of!(LaunchAttributeRaw, value), 8);
        assert_eq!(size_of::<LaunchConfigRaw>(), 56);
        assert_eq!(align_of::<LaunchConfigRaw>(), 8);
        assert_eq!(offset_of!(LaunchConfigRaw, shared_bytes), 24);
        assert_eq!(offset_of!(LaunchConfigRaw, stream), 32);
        assert_eq!(offset_of!(LaunchConfigRaw, attributes), 40);
        assert_eq!(offset_of!(LaunchConfigRaw, attribute_count), 48);
    }

    #[test]
    fn attributes_are_listed_only_when_asked_for() {
        let plain = LaunchConfig::new((8, 1, 1), (128, 1, 1), 0);
        assert_eq!(plain.attributes().1, 0);
        let full = LaunchConfig {
            cluster: Some((2, 1, 1)),
            cooperative: true,
            overlap_previous: true,
            ..plain
        };
        let (list, count) = full.attributes();
        assert_eq!(count, 3);
        assert_eq!((list[0].id, &list[0].value[..4]), (4, &[2, 1, 1, 0][..]));
        assert_eq!((list[1].id, &list[1].value[..2]), (2, &[1, 0][..]));
        assert_eq!((list[2].id, &list[2].value[..2]), (6, &[1, 0][..]));
    }

    #[test]
    fn launches_outside_the_device_limits_are_refused() {
        let good = LaunchConfig::new((7, 3, 1), (128, 2, 1), 1024);
        assert_eq!(good.validate(1024, 1024), Ok(()));
        let bad = [
            LaunchConfig {
                grid: (0, 1, 1),
                ..good
            },
            LaunchConfig {
                grid: (1, 65_536, 1),
                ..good
            },
            LaunchConfig {
                grid: (1, 1, 65_536),
                ..good
            },
            LaunchConfig {
                grid: (1 << 31, 1, 1),
                ..good
            },
            LaunchConfig {
                block: (0, 1, 1),
                ..good
            },
            LaunchConfig {
                block: (1025, 1, 1),
                ..good
            },
            LaunchConfig {
                block: (u32::MAX, u32::MAX, 2),
                ..good
            },
            LaunchConfig {
                block: (1, 1, 65),
                ..good
            },
            LaunchConfig {
                shared_bytes: 1025,
                ..good
            },
            LaunchConfig {
                cluster: Some((2, 1, 1)),
                ..good
            },
            LaunchConfig {
                cluster: Some((7, 0, 1)),
                ..good
            },
        ];
        for config in bad {
            assert!(config.validate(1024, 1024).is_err(), "{config:?}");
        }
        let cluster = Some((7, 3, 1));
        assert_eq!(
            LaunchConfig { cluster, ..good }.validate(1024, 1024),
            Ok(())
        );
    }
}
