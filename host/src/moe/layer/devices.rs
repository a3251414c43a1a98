//! A forward on the CPU and all devices.

use super::super::routing::Routing;
use super::super::{ExpertBank, MoeError};
use super::device::{Call, Device, DeviceX, LayerDevice, Sums, grown_pinned};
use super::io::{Element, Input, Output};
use super::plan::{self, DevicePart, Held};
use super::runtime::State;
use super::{Job, LayerReport};
use crate::driver::{DriverError, Event, Gpu, PinnedBuffer, Stream, copy_address_to_host_async};
use crate::transfer::{RING_SLOTS, ring_bytes_for};
use asym_gemm_cpu::Rows;
use asym_gemm_formats::activation::Activation;
use half::bf16;
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

/// Pieces from which their submission runs beside the CPU's part.
const PARALLEL_PIECES: usize = 4;
/// Host copies longer than this are made by several threads.
const PARALLEL_COPY_BYTES: usize = 4 << 20;

/// All devices of a layer, and the host memory through which they and the CPU exchange.
#[derive(Debug, Default)]
pub(super) struct Devices {
    pub(super) list: Vec<Device>,
    /// Whether the last forward may still run.
    pub(super) in_flight: bool,
    /// Which devices had products in the last forward.
    worked: Vec<bool>,
    exchange: Option<Exchange>,
}

/// Pinned host memory, and the events of x and of the caller.
#[derive(Debug)]
struct Exchange {
    /// x of the call.
    x: Option<PinnedBuffer>,
    /// Weighted sums of the CPU and of all devices but the first, f32 [.., T, H].
    partials: Option<PinnedBuffer>,
    /// The output, where it goes to the host.
    out: Option<PinnedBuffer>,
    x_arrived: Event,
    called: Event,
}

impl Devices {
    /// Rings of `ring_bytes` on each device, of no use but small where kernels read the bank itself.
    pub(super) fn new(
        gpus: &[Gpu],
        ring_bytes: Option<usize>,
        expert_bytes: usize,
        direct: bool,
    ) -> Result<Self, MoeError> {
        let Some(first) = gpus.first() else {
            return Ok(Self::default());
        };
        let bytes = ring_bytes.unwrap_or_else(|| ring_bytes_for(expert_bytes));
        if !direct && bytes / RING_SLOTS < expert_bytes {
            return Err(MoeError::Ring {
                ring_bytes: bytes,
                slots: RING_SLOTS,
                expert_bytes,
            });
        }
        let make = |gpu| Device::new(gpu, bytes, expert_bytes);
        Ok(Self {
            list: gpus.iter().map(make).collect::<Result<_, _>>()?,
            in_flight: false,
            worked: vec![false; gpus.len()],
            exchange: Some(Exchange {
                x: None,
                partials: None,
                out: None,
                x_arrived: Event::untimed(first)?,
                called: Event::untimed(first)?,
            }),
        })
    }

    /// Waits for the last forward's work.
    pub(super) fn settle(&mut self) -> Result<(), DriverError> {
        if self.in_flight {
            self.in_flight = false;
            // The first device's work ends after that of the others.
            if let Some(first) = self.list.first() {
                first.done.synchronize()?;
            }
        }
        Ok(())
    }

    /// Waits for everything, copies ahead included.
    pub(super) fn drain(&mut self) -> Result<(), DriverError> {
        self.in_flight = false;
        let mut drained = Ok(());
        // Each of them, also after one has failed.
        for device in &self.list {
            drained = drained.and(device.drain());
        }
        drained
    }

    /// Longest time of a device in the last forward, which is done.
    pub(super) fn gpu_seconds(&self) -> Result<f64, DriverError> {
        let mut longest = 0f64;
        for (device, _) in self.list.iter().zip(&self.worked).filter(|(_, w)| **w) {
            longest = longest.max(device.gpu_seconds()?);
        }
        Ok(longest)
    }

    /// Forgets who worked in the last forward.
    pub(super) fn start_over(&mut self) {
        self.worked.fill(false);
    }

    /// Drops what was copied ahead for a layer that goes.
    pub(super) fn forget(&mut self, layer: u64) {
        for device in &mut self.list {
            if device.ahead.layer == layer {
                device.ahead.experts.clear();
            }
        }
    }

    /// Fills scratch and exchange with NaN bytes.
    pub(super) fn poison(&mut self) -> Result<(), DriverError> {
        for device in &mut self.list {
            device.poison_scratch()?;
        }
        if let Some(exchange) = &mut self.exchange {
            let buffers = [&mut exchange.x, &mut exchange.partials, &mut exchange.out];
            for buffer in buffers.into_iter().flatten() {
                buffer.as_mut_slice().fill(0xff);
            }
        }
        Ok(())
    }
}

/// Runs `job` on the CPU and the devices of `state`; whatever fails, nothing of it runs any more
/// then.
///
/// # Safety
/// With a stream, x and a device output stay alive until it has passed the forward; without one
/// until this returns.
pub(super) unsafe fn forward(
    state: &mut State,
    job: &Job<'_>,
    layers: &[LayerDevice],
    out: Output<'_>,
    stream: Option<&Stream>,
) -> Result<LayerReport, MoeError> {
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: passed on.
        unsafe { start(state, job, layers, out, stream) }
    }));
    if let Ok(Ok(report)) = result {
        return Ok(report);
    }
    // What was enqueued before the error still uses the caller's memory.
    state.unobserved = None;
    if let Err(error) = state.devices.drain() {
        tracing::warn!(%error, "waiting for the devices after a forward failed");
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// # Safety
/// As [`forward`]; after an error the caller waits for the devices.
unsafe fn start(
    state: &mut State,
    job: &Job<'_>,
    layers: &[LayerDevice],
    mut out: Output<'_>,
    stream: Option<&Stream>,
) -> Result<LayerReport, MoeError> {
    let began = Instant::now();
    let geometry = job.layer.bank.geometry();
    let State {
        devices, engine, ..
    } = state;
    let Devices {
        list,
        worked,
        exchange,
        in_flight,
    } = devices;
    let (Some(first), Some(exchange)) = (list.first(), exchange) else {
        return Err(MoeError::Backend {
            backend: "gpu",
            reason: "x or the output is in device memory, but the layer has no device; build it \
                     with MoeLayerBuilder::devices"
                .into(),
        });
    };
    let gpu = first.gpu.clone();
    if let Input::Device(x) = &job.x {
        x.check_on(&gpu, "x")?;
    }
    if let Output::Device(out) = &out {
        out.check_on(&gpu, "the output")?;
    }
    let cpu = plan::cpu_part(job.packed, job.division);
    let held: Vec<Held<'_>> = list
        .iter()
        .zip(layers)
        .map(|(device, layer)| Held {
            cached: &layer.cache.cached,
            ahead: match device.ahead.layer == job.layer.id {
                true => &device.ahead.experts,
                false => &[],
            },
            direct: layer.direct().is_some(),
        })
        .collect();
    let ring = first.ring_shape(&geometry);
    let parts = plan::device_parts(job.packed, job.division, &geometry, ring, &held);
    for (worked, part) in worked.iter_mut().zip(&parts) {
        *worked = !part.source.is_empty();
    }

    let x = Source::new(job, &parts, !cpu.groups.is_empty());
    *in_flight = true;
    let ready = match stream {
        Some(stream) => {
            exchange.called.record(stream)?;
            Some(&exchange.called)
        }
        None => None,
    };
    for device in &mut *list {
        device.begin(ready)?;
    }
    // SAFETY: the caller keeps x; the exchange is used again only after the next `settle`.
    unsafe { x.bring_to_host(&gpu, &list[0], &mut exchange.x, &exchange.x_arrived)? };
    let x_host = exchange.x.as_ref().map_or(&[][..], PinnedBuffer::as_slice);
    let x_host = &x_host[..x.bytes.min(x_host.len())];

    // Sums of others than the first device: the CPU's, then the devices'.
    let elements = job.x.len();
    let cpu_works = !cpu.groups.is_empty();
    let cpu_sums = usize::from(cpu_works);
    let partial_count = cpu_sums + worked.iter().skip(1).filter(|w| **w).count();
    let partials = grown_pinned(&mut exchange.partials, &gpu, partial_count * elements * 4)?;
    let partials_address = partials.device_ptr();
    let submission = Submission {
        bank: &job.layer.bank,
        layers,
        parts: &parts,
        activation: job.layer.activation,
        routing: job.routing,
        tokens: job.tokens,
        x_host,
        element: x.element,
        on_device: x.on_device,
        x_arrived: &exchange.x_arrived,
        partials: partials_address + (cpu_sums * elements * 4) as u64,
        partial_bytes: (elements * 4) as u64,
    };
    let pieces = parts.iter().map(|p| p.pieces.len()).sum::<usize>();
    let mut compute = || -> Result<f64, MoeError> {
        if !cpu_works {
            return Ok(0.0);
        }
        let rows = match job.x {
            Input::Host(rows) => rows,
            Input::Device(_) => {
                submission.x_arrived.synchronize()?;
                match submission.element {
                    Element::F32 => Rows::F32(bytemuck::cast_slice(x_host)),
                    Element::Bf16 => Rows::Bf16(bytemuck::cast_slice::<u8, bf16>(x_host)),
                }
            }
        };
        let start = Instant::now();
        let sums = bytemuck::cast_slice_mut(&mut partials.as_mut_slice()[..elements * 4]);
        let (layer, routing) = (job.layer, job.routing);
        layer.cpu_sums::<f32>(engine, &cpu, rows, routing, sums)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let submit = |list: &mut [Device]| {
        // SAFETY: x, bank and exchange live until the work is done; parts are of this call.
        let kernels = unsafe { submission.run(list) }?;
        Ok::<_, MoeError>((kernels, began.elapsed().as_secs_f64()))
    };
    let (submitted, computed) = if cpu_works && pieces >= PARALLEL_PIECES {
        // Many calls of the driver take as long as a part of the CPU's work.
        std::thread::scope(|scope| {
            let submitting = scope.spawn(|| submit(list));
            let computed = compute();
            let submitted = submitting.join();
            (
                submitted.unwrap_or_else(|panic| resume_unwind(panic)),
                computed,
            )
        })
    } else {
        (submit(list), compute())
    };
    let ((kernels, enqueue_seconds), cpu_seconds) = (submitted?, computed?);

    let (out_address, out_element) = match &out {
        Output::Device(rows) => (rows.address, rows.element),
        Output::HostF32(out) => {
            let staged = grown_pinned(&mut exchange.out, &gpu, size_of_val(*out))?;
            (staged.device_ptr(), Element::F32)
        }
        Output::HostBf16(out) => {
            let staged = grown_pinned(&mut exchange.out, &gpu, size_of_val(*out))?;
            (staged.device_ptr(), Element::Bf16)
        }
    };
    let (first, others) = list.split_at_mut(1);
    let first = &mut first[0];
    for (other, _) in others.iter().zip(&worked[1..]).filter(|(_, w)| **w) {
        first.compute.wait(&other.done)?;
    }
    let sums = Sums {
        out: out_address,
        element: out_element,
        partials: partials_address,
        partial_count,
        partial_stride: elements,
    };
    // SAFETY: the caller keeps the output; the partial sums are complete or waited for.
    unsafe { first.combine(&submission.call(0), &sums)? };
    first.end()?;
    match (&mut out, stream) {
        (Output::Device(_), Some(stream)) => stream.wait(&first.done)?,
        (Output::Device(_), None) => first.done.synchronize()?,
        (Output::HostF32(out), _) => {
            first.done.synchronize()?;
            copy_from_staging(&exchange.out, bytemuck::cast_slice_mut(out));
        }
        (Output::HostBf16(out), _) => {
            first.done.synchronize()?;
            copy_from_staging(&exchange.out, bytemuck::cast_slice_mut(out));
        }
    }
    *in_flight = matches!(out, Output::Device(_)) && stream.is_some();
    let total = |bytes: fn(&DevicePart) -> usize| parts.iter().map(bytes).sum::<usize>() as u64;
    Ok(LayerReport {
        tokens: job.tokens,
        kernels,
        pieces,
        cpu_bytes: job.layer.cpu_bytes(&cpu),
        streamed_bytes: total(|p| p.streamed_bytes),
        resident_bytes: total(|p| p.resident_bytes),
        enqueue_seconds,
        cpu_seconds,
        ..LayerReport::default()
    })
}

/// What the devices are given to do.
struct Submission<'a> {
    bank: &'a ExpertBank,
    layers: &'a [LayerDevice],
    parts: &'a [DevicePart],
    activation: Activation,
    routing: &'a Routing,
    tokens: usize,
    /// x in pinned memory, from `x_arrived` on where it comes from the device.
    x_host: &'a [u8],
    element: Element,
    /// x on the first device, if it is there.
    on_device: Option<DeviceX>,
    x_arrived: &'a Event,
    /// Sums of the second device that works; those of later ones follow.
    partials: u64,
    partial_bytes: u64,
}

impl Submission<'_> {
    fn call(&self, device: usize) -> Call<'_> {
        Call {
            bank: self.bank,
            layer: &self.layers[device],
            part: &self.parts[device],
            activation: self.activation,
            weights: &self.routing.weights,
            top_k: self.routing.top_k,
            tokens: self.tokens,
        }
    }

    /// Enqueues the products of all devices, and the sums of all but the first. The kernels' names.
    ///
    /// # Safety
    /// Everything named lives until the work is done.
    unsafe fn run(&self, list: &mut [Device]) -> Result<Vec<String>, MoeError> {
        let mut kernels: Vec<String> = Vec::new();
        let mut partial = self.partials;
        for (i, device) in list.iter_mut().enumerate() {
            let call = self.call(i);
            if call.part.source.is_empty() {
                continue;
            }
            // SAFETY: the caller's contract.
            unsafe {
                let x = match (i, self.on_device) {
                    (0, Some(x)) => x,
                    (_, on_device) => {
                        let arrived = on_device.map(|_| self.x_arrived);
                        device.upload_x(self.x_host, self.element, arrived)?
                    }
                };
                for name in device.enqueue(&call, x)? {
                    if !kernels.iter().any(|k| k == name) {
                        kernels.push(name.to_owned());
                    }
                }
                if i > 0 {
                    let sums = Sums {
                        out: partial,
                        element: Element::F32,
                        partials: 0,
                        partial_count: 0,
                        partial_stride: 0,
                    };
                    partial += self.partial_bytes;
                    device.combine(&call, &sums)?;
                    device.end()?;
                }
            }
        }
        Ok(kernels)
    }
}

/// Where x comes from and who needs it in host memory.
struct Source<'a> {
    x: Input<'a>,
    element: Element,
    bytes: usize,
    on_device: Option<DeviceX>,
    /// Whether pinned host memory must hold it.
    through_host: bool,
}

impl<'a> Source<'a> {
    fn new(job: &Job<'a>, parts: &[DevicePart], cpu_works: bool) -> Self {
        let works = |part: &DevicePart| !part.source.is_empty();
        let (on_device, through_host) = match &job.x {
            Input::Host(_) => (None, parts.iter().any(works)),
            Input::Device(rows) => {
                let x = DeviceX {
                    address: rows.address,
                    element: rows.element,
                };
                (Some(x), cpu_works || parts.iter().skip(1).any(works))
            }
        };
        let element = job.x.element();
        Self {
            x: job.x,
            element,
            bytes: job.x.len() * element.bytes(),
            on_device,
            through_host,
        }
    }

    /// Copies x to pinned memory if somebody needs it there: from the host now, from the device as
    /// the first work, up to `arrived`.
    ///
    /// # Safety
    /// x on the device stays alive until the copy is done, and nobody uses `staging` until then.
    unsafe fn bring_to_host(
        &self,
        gpu: &Gpu,
        first: &Device,
        staging: &mut Option<PinnedBuffer>,
        arrived: &Event,
    ) -> Result<(), MoeError> {
        if !self.through_host {
            return Ok(());
        }
        let staging = grown_pinned(staging, gpu, self.bytes)?;
        let to = &mut staging.as_mut_slice()[..self.bytes];
        match self.x {
            Input::Host(Rows::F32(x)) => copy(bytemuck::cast_slice(x), to),
            Input::Host(Rows::Bf16(x)) => copy(bytemuck::cast_slice(x), to),
            Input::Device(rows) => {
                // SAFETY: the caller's contract; the side stream is the device's.
                unsafe { copy_address_to_host_async(gpu, rows.address, to, &first.side)? };
                arrived.record(&first.side)?;
            }
        }
        Ok(())
    }
}

/// Copies between host buffers of equal length.
fn copy(from: &[u8], to: &mut [u8]) {
    if to.len() < PARALLEL_COPY_BYTES {
        to.copy_from_slice(from);
        return;
    }
    let chunk = PARALLEL_COPY_BYTES / 4;
    to.par_chunks_mut(chunk)
        .zip(from.par_chunks(chunk))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

fn copy_from_staging(staging: &Option<PinnedBuffer>, out: &mut [u8]) {
    if let Some(staging) = staging {
        copy(&staging.as_slice()[..out.len()], out);
    }
}
