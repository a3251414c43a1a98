//! The grouped GEMM call: transfer, launches.

use super::groups::{Listed, Rows, check_groups};
use super::launch::{Launch, Launched, Launcher, map_rows};
use super::matrix::ROW_ALIGN;
use super::plan::choose_transfer;
use super::problem::{Piece, Problem, check_shapes};
use super::{
    Activations, DeviceGroups, GemmError, GroupRange, Output, Plan, WeightMemory, Weights,
};
use crate::driver::{DeviceBuffer, Gpu, Rows as MatrixRows, Stream, TensorMap, copy_rows};
use crate::transfer::{CHUNK_BYTES, DEFAULT_RING_BYTES, RING_SLOTS, Ring, Transfer, chunks};
use asym_gemm_kernels_gpu::args::Group;
use asym_gemm_kernels_gpu::gemm::choose_tile;

/// Grouped GEMMs on one GPU, with the ring and the scratch that calls share.
///
/// Calls must follow each other in stream order: a call on another stream than the last one
/// comes after a wait for that.
#[derive(Debug)]
pub struct GroupedGemm {
    gpu: Gpu,
    launcher: Launcher,
    ring_bytes: usize,
    ring: Option<Ring>,
    /// The last list of groups, and where it is on the device.
    groups: Option<(Vec<Group>, DeviceBuffer<u32>)>,
    /// A copy of an A whose rows TMA cannot read where they are.
    a_copy: Option<DeviceBuffer<u8>>,
}

impl GroupedGemm {
    /// Grouped GEMMs on `gpu` with a ring of [`DEFAULT_RING_BYTES`], allocated when needed.
    pub fn new(gpu: &Gpu) -> Self {
        Self::with_ring_bytes(gpu, DEFAULT_RING_BYTES)
    }

    /// As [`Self::new`] with a ring of at most `ring_bytes`.
    pub fn with_ring_bytes(gpu: &Gpu, ring_bytes: usize) -> Self {
        Self {
            gpu: gpu.clone(),
            launcher: Launcher::new(gpu),
            ring_bytes,
            ring: None,
            groups: None,
            a_copy: None,
        }
    }

    /// Computes D and waits until it is there.
    ///
    /// Rows of D outside the groups keep what they hold.
    ///
    /// # Errors
    /// If the operands do not fit each other, a group is out of range, the transfer is not
    /// possible for where the weights are, or the driver fails.
    pub fn run(
        &mut self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        groups: &[GroupRange],
        d: &mut Output<'_>,
        transfer: Transfer,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        // SAFETY: the borrows last until both waits below, which come on every path.
        let enqueued = unsafe { self.enqueue(a, b, groups, d, transfer, stream) };
        let computed = stream.synchronize();
        let copied = self.ring.as_ref().map_or(Ok(()), Ring::synchronize);
        let plan = enqueued?;
        computed?;
        copied?;
        Ok(plan)
    }

    /// Enqueues the call on `stream` and returns at once.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// Operands must stay alive and unchanged by others until the work on `stream` is done.
    pub unsafe fn enqueue(
        &mut self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        groups: &[GroupRange],
        d: &mut Output<'_>,
        transfer: Transfer,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        self.check(a, b, d, stream)?;
        let groups = check_groups(groups, a.rows(), b.count)?;
        if groups.is_empty() {
            return Ok(Plan::nothing(transfer));
        }
        let (transfer, source) = choose_transfer(transfer, b.memory)?;
        let a_rows = self.readable_a(a, stream)?;
        let problem = Problem::new(&self.gpu, a, a_rows, b, d)?;
        let listed = Listed {
            address: self.upload(&groups, stream)?,
            count: groups.len(),
            rows: Rows::Known(&groups),
        };
        // SAFETY: the caller's contract.
        unsafe {
            if !b.is_aligned() {
                let source = "rows are not a multiple of 16 bytes, copied to one";
                self.staged(&problem, &groups, listed.address, source, stream)
            } else if transfer == Transfer::Staged {
                self.staged(&problem, &groups, listed.address, source, stream)
            } else {
                let bytes = used_weights(&groups).len() * b.matrix_bytes();
                self.in_place(&problem, listed, bytes, transfer, source, stream)
            }
        }
    }

    /// As [`Self::enqueue`] with groups that the device reads when the work runs: direct or
    /// resident. Can be recorded into a graph once a call of this size has been made (the
    /// first one allocates); the plan counts the bytes of all weights.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::enqueue`]; the list too. No two groups share a row. Replays of a graph
    /// follow other calls in stream order, and this value outlives the graph.
    pub unsafe fn enqueue_listed(
        &mut self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        groups: &DeviceGroups<'_>,
        d: &mut Output<'_>,
        transfer: Transfer,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        self.check(a, b, d, stream)?;
        groups.check_on(&self.gpu)?;
        let (transfer, source) = match (transfer, b.memory) {
            (Transfer::Auto, WeightMemory::Pinned(_)) => {
                (Transfer::Direct, "the host does not know the groups")
            }
            (Transfer::Staged, WeightMemory::Pinned(_)) => {
                return Err(GemmError::Unsupported {
                    what: "transfer",
                    reason: "staged needs groups that the host knows; use direct".into(),
                });
            }
            _ => choose_transfer(transfer, b.memory)?,
        };
        if !b.is_aligned() {
            return Err(GemmError::Unsupported {
                what: "weights",
                reason: format!(
                    "rows of {} {} elements are not a multiple of 16 bytes, so that chunks of them are copied first, which needs groups that the host knows",
                    b.k, b.format
                ),
            });
        }
        let listed = groups.listed();
        if listed.count == 0 || a.rows() == 0 {
            return Ok(Plan::nothing(transfer));
        }
        let a_rows = self.readable_a(a, stream)?;
        let problem = Problem::new(&self.gpu, a, a_rows, b, d)?;
        let bytes = b.count * b.matrix_bytes();
        // SAFETY: the caller's contract.
        unsafe { self.in_place(&problem, listed, bytes, transfer, source, stream) }
    }

    /// Checks everything but the groups.
    fn check(
        &self,
        a: &Activations<'_>,
        b: &Weights<'_>,
        d: &Output<'_>,
        stream: &Stream,
    ) -> Result<(), GemmError> {
        if !stream.is_on(&self.gpu) {
            return Err(GemmError::OtherGpu { what: "stream" });
        }
        a.check_on(&self.gpu)?;
        b.check_on(&self.gpu)?;
        d.check_on(&self.gpu)?;
        check_shapes(a, b, d)
    }

    /// Weights where they are, one launch.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn in_place(
        &mut self,
        problem: &Problem<'_>,
        groups: Listed<'_>,
        weight_bytes: usize,
        transfer: Transfer,
        source: &'static str,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        let b = problem.b;
        let b_map = map_rows(
            &self.gpu,
            b.format,
            b.address(),
            b.count,
            b.n,
            b.k,
            b.pitch(),
        )?;
        let piece = Piece {
            groups,
            weights: 0..b.count,
            rows: 0..b.n,
        };
        let in_host_memory = transfer == Transfer::Direct;
        // SAFETY: the caller's contract.
        let launched = unsafe { self.launch(problem, &piece, &b_map, in_host_memory, stream)? };
        Ok(Plan {
            kernel: launched.kernel,
            transfer,
            transfer_source: source,
            chunks: 0,
            couriers: launched.couriers,
            weight_bytes,
        })
    }

    /// Weights through the ring, a launch for each chunk; from device memory too where rows
    /// must be copied to another pitch.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with `groups` on the device at `address`.
    unsafe fn staged(
        &mut self,
        problem: &Problem<'_>,
        groups: &[Group],
        address: u64,
        source: &'static str,
        stream: &Stream,
    ) -> Result<Plan, GemmError> {
        let b = problem.b;
        // Cut at the width of the widest tile, so that no tile is computed in two parts.
        const GRANULE: usize = 256;
        let slot_bytes = Ring::slot_bytes_of(self.ring_bytes, RING_SLOTS);
        let list = chunks(
            &used_weights(groups),
            b.n,
            b.pitch(),
            GRANULE.min(b.n),
            CHUNK_BYTES,
            slot_bytes,
        )
        .ok_or_else(|| GemmError::Unsupported {
            what: "ring",
            reason: format!(
                "a slot of {slot_bytes} bytes does not hold {} rows of {} bytes; give the ring more bytes",
                GRANULE.min(b.n),
                b.pitch()
            ),
        })?;
        let mut kernel = "";
        let mut weight_bytes = 0;
        for chunk in &list {
            let rows = chunk.weights.len() * chunk.rows.len();
            let bytes = rows * b.row_bytes();
            let first = chunk.weights.start * b.matrix_bytes() + chunk.rows.start * b.row_bytes();
            let ring = match &mut self.ring {
                Some(ring) => ring,
                empty => empty.insert(Ring::new(&self.gpu, RING_SLOTS, slot_bytes)?),
            };
            let slot = ring.begin()?;
            // SAFETY: the range was checked when `b` was made; the caller keeps it alive.
            unsafe {
                match b.memory {
                    WeightMemory::Pinned(pinned) if b.is_aligned() => {
                        ring.copy(slot, 0, &pinned.as_slice()[first..first + bytes])?;
                    }
                    _ => {
                        let source = MatrixRows {
                            address: b.address() + first as u64,
                            pitch: b.row_bytes(),
                        };
                        ring.copy_rows(slot, b.pitch(), source, b.row_bytes(), rows)?;
                    }
                }
            }
            ring.finish(slot, stream)?;
            let b_map = map_rows(
                &self.gpu,
                b.format,
                ring.address() + (slot * slot_bytes) as u64,
                chunk.weights.len(),
                chunk.rows.len(),
                b.k,
                b.pitch(),
            )?;
            let at = |weight| groups.partition_point(|g| (g.weight as usize) < weight);
            let some = at(chunk.weights.start)..at(chunk.weights.end);
            let piece = Piece {
                groups: Listed {
                    address: address + (some.start * size_of::<Group>()) as u64,
                    count: some.len(),
                    rows: Rows::Known(&groups[some]),
                },
                weights: chunk.weights.clone(),
                rows: chunk.rows.clone(),
            };
            // SAFETY: the caller's contract; the slot is held until the release below.
            kernel = unsafe { self.launch(problem, &piece, &b_map, false, stream)?.kernel };
            if let Some(ring) = &self.ring {
                ring.release(slot, stream)?;
            }
            weight_bytes += bytes;
        }
        let transfer = match b.memory {
            WeightMemory::Pinned(_) => Transfer::Staged,
            WeightMemory::Device(_) => Transfer::Resident,
        };
        Ok(Plan {
            kernel,
            transfer,
            transfer_source: source,
            chunks: list.len(),
            couriers: 0,
            weight_bytes,
        })
    }

    /// A's rows where TMA can read them: there, or in a copy made in stream order.
    fn readable_a(
        &mut self,
        a: &Activations<'_>,
        stream: &Stream,
    ) -> Result<MatrixRows, GemmError> {
        let (address, pitch) = a.place();
        let source = MatrixRows { address, pitch };
        if pitch.is_multiple_of(ROW_ALIGN) {
            return Ok(source);
        }
        let row_bytes = a.k() * a.element_bytes();
        let pitch = row_bytes.next_multiple_of(ROW_ALIGN);
        let bytes = pitch * a.rows();
        let buffer = match self.a_copy.take() {
            Some(buffer) if buffer.len() >= bytes => buffer,
            // Freeing waits for the device, so earlier calls are done with the old buffer.
            _ => DeviceBuffer::alloc(&self.gpu, bytes.next_power_of_two())?,
        };
        let address = self.a_copy.insert(buffer).as_raw();
        let target = MatrixRows { address, pitch };
        // SAFETY: the view was checked against its buffer, which the caller keeps; stream order
        // keeps the copy behind the kernels of earlier calls.
        unsafe { copy_rows(&self.gpu, target, source, row_bytes, a.rows(), stream)? };
        Ok(target)
    }

    /// Writes the groups to the device, in stream order, and returns their address. A list
    /// that is there already, as in the second product of a layer, is not written again.
    fn upload(&mut self, groups: &[Group], stream: &Stream) -> Result<u64, GemmError> {
        if let Some((list, buffer)) = &self.groups
            && list == groups
        {
            return Ok(buffer.as_raw());
        }
        let words: Vec<u32> = groups
            .iter()
            .flat_map(|g| [g.start, g.end, g.weight, g.reserved])
            .collect();
        let buffer = match self.groups.take() {
            Some((_, buffer)) if buffer.len() >= words.len() => buffer,
            // Freeing waits for the device, so earlier calls are done with the old buffer.
            _ => DeviceBuffer::alloc(&self.gpu, words.len().next_power_of_two())?,
        };
        // SAFETY: a copy from pageable memory has left it when the call returns; stream
        // order keeps it behind the kernels of earlier calls.
        unsafe { buffer.copy_from_host_async(0, &words, stream)? };
        let (_, buffer) = self.groups.insert((groups.to_vec(), buffer));
        Ok(buffer.as_raw())
    }

    /// One launch over a piece of the problem.
    ///
    /// # Safety
    /// As [`Self::enqueue`], with `b_map` over the piece's weights.
    unsafe fn launch(
        &mut self,
        problem: &Problem<'_>,
        piece: &Piece<'_>,
        b_map: &TensorMap,
        in_host_memory: bool,
        stream: &Stream,
    ) -> Result<Launched, GemmError> {
        let rows = &piece.groups.rows;
        let tile = choose_tile(problem.operands, rows.max());
        let launch = Launch {
            operands: problem.operands,
            tile,
            tiles: rows.tiles(piece.rows.len(), tile),
            // Where the host does not know the rows, there may be more than one row tile.
            relayed: in_host_memory
                && (rows.max() > tile.m as usize || matches!(rows, Rows::AtMost(_))),
            a_map: &problem.a_map,
            b_map,
            args: &problem.args(piece),
        };
        // SAFETY: `Problem` and the groups' check cover every range; the caller keeps the
        // memory alive.
        Ok(unsafe { self.launcher.launch(&launch, stream)? })
    }
}

/// Weights that some row uses, ascending, of groups by ascending weight.
fn used_weights(groups: &[Group]) -> Vec<usize> {
    let mut used: Vec<usize> = groups.iter().map(|g| g.weight as usize).collect();
    used.dedup();
    used
}
