//! A ring of slots in HBM, filled by the copy engine.
//!
//! Two events a slot carry the hand-over: `filled` holds back the kernels until the bytes
//! are there, `freed` holds back the next copy until the kernels are done. The host never
//! waits.

use crate::driver::{DeviceBuffer, DriverError, Event, Gpu, Rows, Stream, copy_rows};

/// Slots start at multiples of this.
const SLOT_ALIGN: usize = 256;

/// Slots in HBM and the stream that fills them.
#[derive(Debug)]
pub struct Ring {
    gpu: Gpu,
    buffer: DeviceBuffer<u8>,
    slot_bytes: usize,
    copies: Stream,
    filled: Vec<Event>,
    freed: Vec<Event>,
    next: usize,
}

impl Ring {
    /// Bytes of each of `slots` slots in `ring_bytes`: tensor maps want aligned addresses.
    pub fn slot_bytes_of(ring_bytes: usize, slots: usize) -> usize {
        ring_bytes / slots.max(1) / SLOT_ALIGN * SLOT_ALIGN
    }

    /// A ring of `slots` slots of `slot_bytes` each.
    ///
    /// # Errors
    /// If `slot_bytes` is not a multiple of 256 or the device has no room.
    pub fn new(gpu: &Gpu, slots: usize, slot_bytes: usize) -> Result<Self, DriverError> {
        let bytes = slots
            .checked_mul(slot_bytes)
            .filter(|_| slots > 0 && slot_bytes.is_multiple_of(SLOT_ALIGN))
            .ok_or_else(|| DriverError::InvalidArgument {
                call: "Ring::new",
                reason: format!(
                    "{slots} slots of {slot_bytes} bytes: at least one, in multiples of {SLOT_ALIGN}"
                ),
            })?;
        let events = || {
            (0..slots)
                .map(|_| Event::untimed(gpu))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            gpu: gpu.clone(),
            buffer: DeviceBuffer::alloc(gpu, bytes)?,
            slot_bytes,
            copies: Stream::new(gpu)?,
            filled: events()?,
            freed: events()?,
            next: 0,
        })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.filled.len()
    }

    /// Device address of slot 0; slots follow each other.
    pub fn address(&self) -> u64 {
        self.buffer.as_raw()
    }

    /// The slot that the next [`Ring::begin`] takes.
    pub fn next_slot(&self) -> usize {
        self.next
    }

    /// Takes the next slot for filling, once its last users are done.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn begin(&mut self) -> Result<usize, DriverError> {
        let slot = self.next;
        self.next = (slot + 1) % self.slots();
        self.copies.wait(&self.freed[slot])?;
        Ok(slot)
    }

    /// Starts the copy of `source` to byte `offset` of `slot`.
    ///
    /// # Errors
    /// If it does not fit into the slot, or the driver fails.
    ///
    /// # Safety
    /// `source` must be pinned, stay alive and unchanged until the copy is done, and `slot`
    /// must come from [`Ring::begin`] with [`Ring::finish`] still to come.
    pub unsafe fn copy(
        &self,
        slot: usize,
        offset: usize,
        source: &[u8],
    ) -> Result<(), DriverError> {
        self.check("Ring::copy", slot)?;
        if offset
            .checked_add(source.len())
            .is_none_or(|end| end > self.slot_bytes)
        {
            return Err(DriverError::InvalidArgument {
                call: "Ring::copy",
                reason: format!(
                    "{} bytes at {offset} exceed a slot of {}",
                    source.len(),
                    self.slot_bytes
                ),
            });
        }
        // SAFETY: the range is inside the slot; the caller answers for the source and the order.
        unsafe {
            self.buffer
                .copy_from_host_async(slot * self.slot_bytes + offset, source, &self.copies)
        }
    }

    /// Starts the copy of `rows` rows of `row_bytes` at `source` to the start of `slot`, where they
    /// are `pitch` bytes apart.
    ///
    /// # Errors
    /// As [`Ring::copy`].
    ///
    /// # Safety
    /// As [`Ring::copy`], for all rows; they may be on the device too.
    pub(crate) unsafe fn copy_rows(
        &self,
        slot: usize,
        pitch: usize,
        source: Rows,
        row_bytes: usize,
        rows: usize,
    ) -> Result<(), DriverError> {
        self.check("Ring::copy_rows", slot)?;
        if rows
            .checked_mul(pitch)
            .is_none_or(|bytes| bytes > self.slot_bytes)
        {
            return Err(DriverError::InvalidArgument {
                call: "Ring::copy_rows",
                reason: format!(
                    "{rows} rows {pitch} bytes apart exceed a slot of {}",
                    self.slot_bytes
                ),
            });
        }
        let target = Rows {
            address: self.buffer.as_raw() + (slot * self.slot_bytes) as u64,
            pitch,
        };
        // SAFETY: the rows are inside the slot; the caller answers for the source and the order.
        unsafe { copy_rows(&self.gpu, target, source, row_bytes, rows, &self.copies) }
    }

    /// An error that names a slot that the ring does not have.
    fn check(&self, call: &'static str, slot: usize) -> Result<(), DriverError> {
        match slot < self.slots() {
            true => Ok(()),
            false => Err(DriverError::InvalidArgument {
                call,
                reason: format!("slot {slot} of {}", self.slots()),
            }),
        }
    }

    /// Ends the slot's copies: [`Ring::join`] waits for those so far.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn end(&self, slot: usize) -> Result<(), DriverError> {
        self.check("Ring::end", slot)?;
        self.filled[slot].record(&self.copies)
    }

    /// Makes `compute` wait for the slot's copies, which have ended.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn join(&self, slot: usize, compute: &Stream) -> Result<(), DriverError> {
        self.check("Ring::join", slot)?;
        compute.wait(&self.filled[slot])
    }

    /// [`Ring::end`] and [`Ring::join`].
    ///
    /// # Errors
    /// If the driver fails.
    pub fn finish(&self, slot: usize, compute: &Stream) -> Result<(), DriverError> {
        self.end(slot)?;
        self.join(slot, compute)
    }

    /// Gives the slot back after the work now on `compute`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn release(&self, slot: usize, compute: &Stream) -> Result<(), DriverError> {
        self.check("Ring::release", slot)?;
        self.freed[slot].record(compute)
    }

    /// Waits until every copy is done; sources may then go.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.copies.synchronize()
    }
}
