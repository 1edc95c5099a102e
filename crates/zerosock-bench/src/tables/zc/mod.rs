//! Zero-copy sends on the kernel's sockets: `send` and `notify`, in namespaces of their own.
//!
//! Everything runs in this process: a sending thread, and for streams a receiving thread, each in a
//! network namespace and on a core of its own. Contestants take turns and send the same number of
//! buffers, over a new socket for each measurement.

mod loops;
pub(crate) mod notify;
pub(crate) mod send;
mod sockets;
mod tool;

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use zerosock::zc::{
    Completion, Copying, Outgoing, Pool, PoolBuf, SendBackend, Sender, Stable, notifications,
};

use crate::bench::Bench;
use crate::report::line;
use loops::{CopyMode, Counts, Posting, over_error_queue, over_ring};
use sockets::{Carried, Network, with_network};

/// Requests per submission to the kernel.
const BATCH: usize = 32;
/// Buffers that every contestant sends in turn: two batches.
const BUFFERS: usize = 64;

/// Measures cases in namespaces of their own; says why, if that is not possible.
fn measure_in_network(
    bench: &mut Bench<'_>,
    measure: impl FnOnce(&mut Bench<'_>, &Network) + Send,
) {
    let (cores, mut unsteered) = (bench.cores, None);
    let measured = with_network(cores, |network| {
        measure(bench, network);
        unsteered.clone_from(&network.unsteered);
        Ok(())
    });
    if let Err(reason) = measured {
        bench.table.note_missing("zerosock", &reason);
    }
    // An end of the veth pair did not work on its own core.
    if let Some(reason) = unsteered {
        bench.table.note_missing("steering", &reason);
    }
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    counts: Counts,
    time: Duration,
    /// CPU time of the sending thread.
    cpu: Duration,
}

/// Measures a loop that calls [`Window::continues`] once per iteration: first the warm-up, then the
/// time that counts.
struct Window {
    begin: Instant,
    warm: Duration,
    time: Duration,
    first: Option<(Instant, Duration, Counts)>,
    last: Option<Measured>,
}

impl Window {
    fn new(warm: Duration, time: Duration) -> Self {
        Self {
            begin: Instant::now(),
            warm,
            time,
            first: None,
            last: None,
        }
    }

    /// Whether the loop is to continue.
    fn continues(&mut self, counts: &Counts) -> bool {
        let now = Instant::now();
        let Some((since, cpu, before)) = self.first else {
            if now - self.begin >= self.warm {
                self.first = Some((now, thread_time(), *counts));
            }
            return true;
        };
        if now - since < self.time {
            return true;
        }
        if self.last.is_none() {
            self.last = Some(Measured {
                counts: Counts {
                    sends: counts.sends - before.sends,
                    bytes: counts.bytes - before.bytes,
                    notified: counts.notified - before.notified,
                    copied: counts.copied - before.copied,
                    calls: counts.calls - before.calls,
                },
                time: now - since,
                cpu: thread_time().saturating_sub(cpu),
            });
        }
        false
    }

    fn measured(self) -> Result<Measured, String> {
        self.last
            .ok_or_else(|| "the loop ended before the measured time was over".to_owned())
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Buffers in ordinary memory, with every page populated.
fn vectors(size: usize) -> Vec<Vec<u8>> {
    (0..BUFFERS)
        .map(|index| vec![index as u8 + 1; size])
        .collect()
}

/// Buffers of a pool, which a ring registers.
fn blocks(size: usize) -> Result<Vec<PoolBuf>, String> {
    let pool = Pool::new(BUFFERS, size).map_err(|error| format!("a pool: {error}"))?;
    let mut blocks: Vec<PoolBuf> = std::iter::from_fn(|| pool.loan()).take(BUFFERS).collect();
    for (index, block) in blocks.iter_mut().enumerate() {
        block.fill(index as u8 + 1);
        block
            .set_range(0, size)
            .map_err(|len| format!("a block of {len} bytes"))?;
    }
    Ok(blocks)
}

/// The kernel's interface without zerosock.
fn ring_loop<B: Deref<Target = [u8]>>(
    carried: &Carried,
    buffers: Vec<B>,
    mode: CopyMode,
    posting: Posting,
    mut window: Window,
) -> Result<Measured, String> {
    let socket = carried.socket()?;
    let is_stream = carried.is_stream();
    let mode = (mode, posting);
    over_ring(socket.as_fd(), buffers, BATCH, mode, is_stream, |counts| {
        window.continues(counts)
    })
    .map_err(line)?;
    window.measured()
}

/// Sends over the error queue, as the kernel's test program msg_zerocopy does.
fn error_queue_loop(
    carried: &Carried,
    size: usize,
    limit: u32,
    mut window: Window,
) -> Result<Measured, String> {
    let socket = carried.socket()?;
    if !notifications::permit(&socket) {
        return Err("the socket does not support zero-copy sends".to_owned());
    }
    over_error_queue(socket.as_fd(), vectors(size), limit, |counts| {
        window.continues(counts)
    })
    .map_err(line)?;
    window.measured()
}

/// Configuration of zerosock's sender.
#[derive(Clone, Copy, Debug)]
struct Ours {
    backend: Option<SendBackend>,
    copying: Copying,
    /// Requests between two submissions.
    batch: usize,
    /// A flush with every send; otherwise one at the end.
    flush: bool,
    /// Completions are collected inline after this number of sends; `None`: only at the end of a
    /// batch.
    notify_every: Option<u32>,
}

/// zerosock's sender.
fn ours<B: Stable>(
    carried: &Carried,
    buffers: Vec<B>,
    how: Ours,
    mut window: Window,
) -> Result<Measured, String> {
    let socket: OwnedFd = carried.socket()?;
    let mut builder = Sender::builder().capacity(2 * BUFFERS as u32);
    if how.notify_every.is_some() {
        builder = builder.inline_completions();
    }
    if let Some(backend) = how.backend {
        builder = builder.backend(backend);
    }
    let mut sender: Sender<B> = builder.open(socket).map_err(line)?;
    let mut spare: VecDeque<B> = buffers.into();
    let mut completions = [Completion::default(); 16];
    let mut since_notification = 0;
    while window.continues(&counts(&sender)) {
        for _ in 0..how.batch {
            let Some(buffer) = spare.pop_front() else {
                break;
            };
            let mut outgoing = Outgoing::new(buffer).slot(0).copying(how.copying);
            outgoing.flush = how.flush;
            since_notification += 1;
            if how
                .notify_every
                .is_some_and(|limit| since_notification >= limit)
            {
                let sent = sender.send_with(outgoing, &mut completions);
                sent.map_err(line)?;
                since_notification = 0;
            } else {
                sender.push(outgoing).map_err(line)?;
            }
        }
        sender.submit().map_err(line)?;
        loop {
            while let Some(returned) = sender.returned() {
                returned.outcome.map_err(line)?;
                spare.push_back(returned.buffer);
            }
            while sender.notification().is_some() {}
            if !spare.is_empty() {
                break;
            }
            sender.wait(None).map_err(line)?;
        }
    }
    let finished = sender.finish(Some(Duration::from_secs(10)));
    match finished {
        Ok(true) => window.measured(),
        Ok(false) => Err("notifications are missing".to_owned()),
        Err(error) => Err(line(error)),
    }
}

fn counts<B: Stable>(sender: &Sender<B>) -> Counts {
    let stats = sender.stats();
    Counts {
        sends: stats.over,
        bytes: stats.bytes,
        notified: stats.notified,
        copied: stats.copied_by_kernel,
        calls: stats.system_calls,
    }
}
