//! Ourselves: streams of `zerosock::vsock`, messages written and read in place.

use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use zerosock::vsock::{
    self, Endpoint, Host, Listener, Loan, Message as Packet, Stream, StreamError,
};
use zerosock::{Address, Cid, Port};

use crate::peers::trust::trust;
use crate::peers::{dequeue, destination, hoard};
use crate::worker::order::{Job, Order, Wait};
use crate::worker::touch::{Check, Fault, Message, Seen};
use crate::worker::{self, Link};

const PORT: Port = Port::new(1234);
/// Bytes of a packet at most, and of a receive buffer.
const PACKET: u32 = 64 << 10;
/// Bytes under way to us at most.
pub(crate) const WINDOW: u32 = 4 << 20;

/// What a user would choose for what is to be carried: entries of the queues, bytes under way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Tuning {
    queue_size: u16,
    window: u32,
}

impl Tuning {
    /// Messages one after the other in one direction: many small ones under way hide how far apart
    /// the two cores are; of large ones so many that their buffers still fit into the caches.
    /// Anything else has the usual queues.
    fn of(order: &Order) -> Tuning {
        let one_way = matches!(order.job, Job::Send | Job::Receive) && order.how.is_none();
        let (queue_size, window) = match order.size {
            ..=SMALL if one_way => (1024, 2 * WINDOW),
            _ if one_way => (128, WINDOW),
            _ => (256, WINDOW),
        };
        Tuning { queue_size, window }
    }
}

/// Bytes of a message that is a small one.
const SMALL: usize = 4 << 10;
/// What is written and read at once of memory that is no plain slice: stays in the nearest cache.
const PART: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// What the tables say of it.
pub(crate) const HOW: &str = "zerosock: one process has the device in itself, the other is attached \
    to it; both have declared trust in each other, as the peers have by their nature. Buffers of \
    64 KiB.";

/// Whether this build can take part.
pub(crate) fn available() -> Result<(), String> {
    Ok(())
}

/// One side's work.
pub(crate) fn work(order: &Order) -> Result<(), Fault> {
    let how = order.how.as_deref().unwrap_or_default();
    let how = how.trim_start_matches(TO_GUEST);
    let mut link = join(order)?;
    if let Some(beside) = hoard::beside(how) {
        let second = link.another()?;
        return hoard::run(&second, beside, order.job, || {
            worker::work(&mut link, order)
        });
    }
    if how.is_empty() || order.job != Job::Receive {
        return worker::work(&mut link, order);
    }
    receive(&link, how.parse()?, order)
}

fn receive(link: &Ours, how: dequeue::How, order: &Order) -> Result<(), Fault> {
    worker::work_with(|| dequeue::run(&link.stream, how, order))
}

/// Begins the ways to dequeue in which the receiver is the process that attaches.
pub(crate) const TO_GUEST: &str = "guest:";

/// Makes the connection: one side has the device in itself, the other attaches to it. The side
/// that is there first is the host, unless the receiver is to be the one that attaches.
fn join(order: &Order) -> Result<Ours, Fault> {
    worker::pin(order.cpu)?;
    let wait = match order.wait {
        Wait::Spin => vsock::Wait::Spin,
        Wait::Sleep => vsock::Wait::Sleep,
    };
    let tuning = Tuning::of(order);
    let is_open = order.job.is_open();
    let to_guest = order
        .how
        .as_ref()
        .is_some_and(|how| how.starts_with(TO_GUEST));
    let place = if is_open {
        &order.place
    } else {
        destination(order)?
    };
    let socket = Path::new(place).join("attach");
    let end;
    let stream;
    if is_open != to_guest {
        let mut builder = Host::builder()
            .wait(wait)
            .window(tuning.window)
            .attach(&socket);
        if let Some(trust) = trust() {
            builder = builder.trust_processes(trust);
        }
        let host = builder.start().map_err(text)?;
        let listener = host.listen(PORT, 2).map_err(text)?;
        if is_open {
            worker::say_open(place)?;
        }
        stream = listener.accept_timeout(PATIENCE).map_err(text)?.0;
        end = End::Host {
            _host: host,
            listener,
        };
    } else {
        if is_open {
            worker::say_open(place)?;
        }
        let endpoint = patiently(|| attach(&socket, wait, tuning))?;
        stream = connect(&endpoint)?;
        end = End::Process { endpoint };
    }
    Ok(Ours {
        end,
        ..Ours::over(stream)
    })
}

fn attach(socket: &Path, wait: vsock::Wait, tuning: Tuning) -> Result<Endpoint, Fault> {
    let mut builder = Endpoint::builder()
        .wait(wait)
        .receive_buffers(PACKET)
        .transmit_buffers(PACKET)
        .queue_size(tuning.queue_size)
        .window(tuning.window);
    if let Some(trust) = trust() {
        builder = builder.trust_host(trust);
    }
    builder.attach(socket).map_err(text)
}

fn connect(endpoint: &Endpoint) -> Result<Stream, Fault> {
    patiently(|| {
        endpoint
            .connect(Address::new(Cid::HOST, PORT))
            .map_err(text)
    })
}

/// The host may not be there yet, and not listen yet.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, Fault>) -> Result<T, Fault> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            outcome => return outcome,
        }
    }
}

enum End {
    Host {
        _host: Host,
        listener: Listener,
    },
    Process {
        endpoint: Endpoint,
    },
    /// Kept by somebody else.
    Elsewhere,
}

/// A stream, and what it needs to stay.
pub(crate) struct Ours {
    stream: Stream,
    end: End,
    part: Vec<u8>,
    /// The check of a message whose packets have not all come.
    begun: Option<Check>,
}

impl Ours {
    /// Over a stream whose endpoint is kept by somebody else.
    pub(crate) fn over(stream: Stream) -> Ours {
        Ours {
            stream,
            end: End::Elsewhere,
            part: vec![0; PART],
            begun: None,
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A further connection, which the other side makes as well.
    fn another(&self) -> Result<Stream, Fault> {
        match &self.end {
            End::Host { listener, .. } => Ok(listener.accept_timeout(PATIENCE).map_err(text)?.0),
            End::Process { endpoint } => connect(endpoint),
            End::Elsewhere => Err("the endpoint is elsewhere".to_owned()),
        }
    }
}

impl Link for Ours {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        if let Some(part) = self.part.get_mut(..message.len) {
            // What stays in the nearest cache is copied sooner than a loan is made.
            message.write(part);
            return (&self.stream).write_all(part).map_err(text);
        }
        let mut at = 0;
        while at < message.len {
            let mut loan = self.stream.loan(message.len - at).map_err(text)?;
            let len = loan.capacity().min(message.len - at);
            let filled = match loan.as_mut_slice() {
                Ok(mut bytes) => {
                    message.write_part(at, &mut bytes[..len]);
                    true
                }
                Err(StreamError::Untrusted) => false,
                Err(error) => return Err(text(error)),
            };
            if filled {
                loan.set_filled(len);
            } else {
                fill(&mut loan, message, at, len, &mut self.part).map_err(text)?;
            }
            at += loan.send().map_err(text)?;
        }
        Ok(())
    }

    fn send_run(&mut self, first: u64, count: u64, len: usize) -> Result<(), Fault> {
        if len > self.part.len() {
            return worker::send_each(self, first, count, len);
        }
        let Ours { stream, part, .. } = self;
        let bytes = &mut part[..len];
        let mut batch = stream.batch();
        for number in first..first + count {
            let message = Message {
                number,
                len,
                last: false,
            };
            message.write(bytes);
            batch.write(bytes).map_err(text)?;
        }
        Ok(())
    }

    fn recv(&mut self, check: Check) -> Result<Seen, Fault> {
        let (first, len) = (check.number(), check.missing());
        self.recv_run(first, 1, len).map(|(_, seen)| seen)
    }

    fn recv_run(&mut self, first: u64, most: u64, len: usize) -> Result<(u64, Seen), Fault> {
        let Ours {
            stream,
            part,
            begun,
            ..
        } = self;
        let mut run = Run {
            check: begun.take().unwrap_or_else(|| Check::new(first, len)),
            number: first,
            len,
            seen: Ok(Seen::Next),
        };
        while run.number < first + most && run.seen == Ok(Seen::Next) {
            let left = usize::try_from(first + most - run.number).unwrap_or(usize::MAX);
            let got = stream.recv_each(left, |packet| run.packet(packet, part));
            if got.map_err(text)? == 0 {
                return Err("the other side is gone".to_owned());
            }
        }
        let seen = run.seen?;
        if run.check.has_begun() {
            *begun = Some(run.check);
        }
        Ok((run.number - first, seen))
    }
}

/// Messages being received.
struct Run {
    check: Check,
    number: u64,
    len: usize,
    seen: Result<Seen, Fault>,
}

impl Run {
    #[inline]
    fn packet(&mut self, packet: Packet<'_>, part: &mut [u8]) {
        if let Some(bytes) = packet.as_slice() {
            return self.bytes(bytes);
        }
        let mut at = 0;
        while at < packet.len() {
            let got = packet.copy_to(at, part);
            self.bytes(&part[..got]);
            at += got.max(1);
        }
    }

    /// Messages do not share packets, but nothing here depends on it.
    #[inline]
    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.seen == Ok(Seen::Next) {
            let (now, rest) = bytes.split_at(bytes.len().min(self.check.missing()));
            self.check.part(now);
            bytes = rest;
            if self.check.missing() == 0 {
                let next = Check::new(self.number + 1, self.len);
                self.seen = std::mem::replace(&mut self.check, next).finish();
                self.number += 1;
            }
        }
    }
}

fn fill(
    loan: &mut Loan<'_>,
    message: Message,
    at: usize,
    len: usize,
    part: &mut [u8],
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let bytes = &mut part[..PART.min(len - done)];
        message.write_part(at + done, bytes);
        done += loan.write_at(done, bytes)?.max(1);
    }
    Ok(())
}

fn text(error: impl ToString) -> Fault {
    error.to_string()
}
