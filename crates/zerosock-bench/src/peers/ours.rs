//! zerosock itself: streams of `zerosock::vsock`, messages written and read in place.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use zerosock::vsock::{
    self, Endpoint, Host, Listener, Loan, Message as Packet, Stream, StreamError,
};
use zerosock::{Address, Cid, Port};

use crate::peers::trust::trust;
use crate::peers::{dequeue, slow_reader};
use crate::processes::retry;
use crate::report::line;
use crate::worker::jobs;
use crate::worker::order::{Job, Order, Outcome, Wait};
use crate::worker::touch::{Check, Fault, Message, Seen};
use crate::worker::{self, Link};

const PORT: Port = Port::new(1234);
/// Bytes of a receive buffer, the largest size of a packet.
const PACKET: u32 = 64 << 10;
/// Largest number of unread bytes in flight to this side.
pub(crate) const WINDOW: u32 = 4 << 20;

/// Queue entries and window (bytes) for the traffic of an order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Tuning {
    queue_size: u16,
    window: u32,
}

impl Tuning {
    /// One-way small messages get a large queue: many in flight hide the latency between two cores.
    /// One-way large messages get a queue with buffers that fit into the caches. All other orders
    /// get the default queues.
    fn of(order: &Order) -> Tuning {
        let one_way = order.job.is_one_way() && order.how.is_none();
        let (queue_size, window) = match order.size {
            ..=SMALL if one_way => (1024, 2 * WINDOW),
            _ if one_way => (128, WINDOW),
            _ => (256, WINDOW),
        };
        Tuning { queue_size, window }
    }
}

/// Largest size of a small message, bytes.
const SMALL: usize = 4 << 10;
/// Bytes copied at once to or from memory of which there is no plain slice: they fit the L1 cache.
const PART: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// Description for the tables.
pub(crate) const HOW: &str = "zerosock: one process embeds the device, the other is attached to it; \
    both have declared trust in each other, which the other contestants imply. Buffers of 64 KiB.";

/// Carries out an order as one of the two sides.
pub(crate) fn work(order: &Order) -> Result<(), Fault> {
    let how = order.how.as_deref().unwrap_or_default();
    let how = how.trim_start_matches(TO_GUEST);
    let mut link = join(order)?;
    if let Some(second) = slow_reader::parse(how) {
        let stream = link.connect_second()?;
        return slow_reader::run(&stream, WINDOW as usize, second, order.job, || {
            worker::work(&mut link, order)
        });
    }
    if how.is_empty() || order.job != Job::Receive {
        return worker::work(&mut link, order);
    }
    receive(&link, how.parse()?, order)
}

/// Name in an order of a program in a guest, on pages of the guest.
pub(crate) const IN_GUEST: &str = "guest-endpoint";

/// Attaches in a guest, connects to the port of the host that the order names, and carries out the order.
pub(crate) fn run_in_guest(order: &Order) -> Result<Outcome, Fault> {
    let tuning = Tuning {
        queue_size: 256,
        window: WINDOW,
    };
    let endpoint = attach(Path::new(&order.place), order.wait.into(), tuning)?;
    let port = order.destination()?.parse();
    let port = port.map_err(|_| "no port of the host".to_owned())?;
    let stream = endpoint.connect(Address::new(Cid::HOST, Port::new(port)));
    let stream = stream.map_err(line)?;
    match &order.how {
        Some(how) => dequeue::run(&stream, how.parse()?, order),
        None => jobs::run(&mut Ours::over(stream), order),
    }
}

fn receive(link: &Ours, how: dequeue::DequeueMode, order: &Order) -> Result<(), Fault> {
    worker::work_with(|| dequeue::run(&link.stream, how, order))
}

impl From<Wait> for vsock::Wait {
    fn from(wait: Wait) -> vsock::Wait {
        match wait {
            Wait::Spin => vsock::Wait::Spin,
            Wait::Sleep => vsock::Wait::Sleep,
        }
    }
}

/// Prefix of `how` when the receiver is the attached process.
pub(crate) const TO_GUEST: &str = "guest:";

/// Connects the two sides: one embeds the device, the other attaches to it. The side that opens is
/// the host, unless the receiver is to attach.
fn join(order: &Order) -> Result<Ours, Fault> {
    worker::pin(order.cpu)?;
    let wait = order.wait.into();
    let tuning = Tuning::of(order);
    let is_open = order.job.is_open();
    let to_guest = order
        .how
        .as_ref()
        .is_some_and(|how| how.starts_with(TO_GUEST));
    let place = if is_open {
        &order.place
    } else {
        order.destination()?
    };
    let socket = Path::new(place).join("attach");
    let endpoint_here;
    let stream;
    if is_open != to_guest {
        let mut builder = Host::builder()
            .wait(wait)
            .window(tuning.window)
            .attach(&socket);
        if let Some(trust) = trust() {
            builder = builder.trust_processes(trust);
        }
        let host = builder.start().map_err(line)?;
        let listener = host.listen(PORT, 2).map_err(line)?;
        if is_open {
            worker::announce_open(place)?;
        }
        stream = listener.accept_timeout(PATIENCE).map_err(line)?.0;
        endpoint_here = LocalEndpoint::Host {
            _host: host,
            listener,
        };
    } else {
        if is_open {
            worker::announce_open(place)?;
        }
        let endpoint = retry(PATIENCE, || attach(&socket, wait, tuning))?;
        stream = connect(&endpoint)?;
        endpoint_here = LocalEndpoint::Process { endpoint };
    }
    Ok(Ours {
        endpoint: endpoint_here,
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
    builder.attach(socket).map_err(line)
}

fn connect(endpoint: &Endpoint) -> Result<Stream, Fault> {
    let to = Address::new(Cid::HOST, PORT);
    retry(PATIENCE, || endpoint.connect(to)).map_err(line)
}

/// The endpoint of this process.
enum LocalEndpoint {
    Host {
        _host: Host,
        listener: Listener,
    },
    Process {
        endpoint: Endpoint,
    },
    /// The caller of [`Ours::over`] owns the endpoint.
    CallerOwned,
}

/// A stream and the endpoint that keeps it open.
pub(crate) struct Ours {
    stream: Stream,
    endpoint: LocalEndpoint,
    /// A buffer of [`PART`] bytes, for bytes that are copied.
    part: Vec<u8>,
    /// Check of a message that is partly received.
    partial: Option<Check>,
}

impl Ours {
    /// Uses a stream of an endpoint that the caller owns.
    pub(crate) fn over(stream: Stream) -> Ours {
        Ours {
            stream,
            endpoint: LocalEndpoint::CallerOwned,
            part: vec![0; PART],
            partial: None,
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Makes a second connection; the other side must do so too.
    fn connect_second(&self) -> Result<Stream, Fault> {
        match &self.endpoint {
            LocalEndpoint::Host { listener, .. } => {
                Ok(listener.accept_timeout(PATIENCE).map_err(line)?.0)
            }
            LocalEndpoint::Process { endpoint } => connect(endpoint),
            LocalEndpoint::CallerOwned => {
                Err("no second connection: the caller owns the endpoint".to_owned())
            }
        }
    }
}

impl Link for Ours {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        if let Some(part) = self.part.get_mut(..message.len) {
            // Copying bytes that fit the L1 cache is faster than a loan.
            message.write(part);
            return (&self.stream).write_all(part).map_err(line);
        }
        let mut at = 0;
        while at < message.len {
            let mut loan = self.stream.loan(message.len - at).map_err(line)?;
            let len = loan.capacity().min(message.len - at);
            let filled = match loan.as_mut_slice() {
                Ok(mut bytes) => {
                    message.write_part(at, &mut bytes[..len]);
                    true
                }
                Err(StreamError::Untrusted) => false,
                Err(error) => return Err(line(error)),
            };
            if filled {
                loan.set_filled(len);
            } else {
                fill(&mut loan, message, at, len, &mut self.part).map_err(line)?;
            }
            at += loan.send().map_err(line)?;
        }
        Ok(())
    }

    fn send_run(&mut self, first: u64, count: u64, len: usize) -> Result<(), Fault> {
        if len > self.part.len() {
            return worker::link::send_each(self, first, count, len);
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
            batch.write(bytes).map_err(line)?;
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
            partial,
            ..
        } = self;
        let mut run = Run {
            check: partial.take().unwrap_or_else(|| Check::new(first, len)),
            number: first,
            len,
            seen: Ok(Seen::Next),
        };
        while run.number < first + most && run.seen == Ok(Seen::Next) {
            let left = usize::try_from(first + most - run.number).unwrap_or(usize::MAX);
            let got = stream.recv_each(left, |packet| run.packet(packet, part));
            if got.map_err(line)? == 0 {
                return Err("the other side has closed the connection".to_owned());
            }
        }
        let seen = run.seen?;
        if run.check.has_begun() {
            *partial = Some(run.check);
        }
        Ok((run.number - first, seen))
    }
}

/// State of receiving a run of messages.
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

    /// Accepts any packet boundaries, although each packet has bytes of one message only.
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

/// Writes the bytes `at..at + len` of a message into a loan that gives no plain slice.
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
