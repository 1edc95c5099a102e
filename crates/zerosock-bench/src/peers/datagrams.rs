//! Datagrams of zerosock, and UDP over the loopback interface. Both may lose datagrams, so only
//! delivered datagrams are counted.
//!
//! A measurement has one or more pairs of a sender and a receiver, each with a socket and a thread
//! of its own. All senders are in one process, all receivers in the other. A receiver measures from
//! its first datagram until its time is over, and counts each datagram with correct bytes and a
//! number above that of the one before. A sender continues until well after the receivers have
//! finished.
//!
//! Each call sends or receives one datagram. With `many` in the order, zerosock receives all
//! available datagrams with one call ([`Datagram::recv_each`]); the standard library has no such
//! call for UDP.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use zerosock::vsock::{Datagram, Endpoint, Host};
use zerosock::{Address, Cid, Port};

use crate::peers::trust::trust;
use crate::processes::retry;
use crate::report::line;
use crate::worker::order::{Job, Order, Outcome, Wait};
use crate::worker::touch::{Check, Fault, Message};
use crate::worker::{self};

/// UDP's send buffer in bytes: the usual one of Linux.
const SEND_BUFFER: usize = 212_992;
/// UDP's receive buffer: above the most that a system grants without privileges.
const RECEIVE_BUFFER: usize = 1 << 20;
/// Entries of zerosock's queues.
const QUEUE: u16 = 1024;
const PORT: Port = Port::new(514);
/// Header before the message: its number.
pub(super) const NUMBER: usize = 8;
/// Datagrams between two readings of the clock.
const BATCH: u64 = 32;
/// Timeout of blocking calls, so that the clock is read.
const TICK: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(30);
/// How much longer a sender runs than a receiver.
const LONGER: Duration = Duration::from_millis(300);

/// Variant of an order: the number of pairs, and whether receivers take many datagrams per call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct DatagramMode {
    pairs: usize,
    many: bool,
}

impl DatagramMode {
    fn of(order: &Order) -> Result<DatagramMode, Fault> {
        let how = order.how.as_deref().unwrap_or("1");
        let (pairs, many) = match how.strip_suffix("-many") {
            Some(pairs) => (pairs, true),
            None => (how, false),
        };
        match pairs.parse() {
            Ok(pairs @ 1..=256) => Ok(DatagramMode { pairs, many }),
            _ => Err(format!("how={how}: 1 to 256 pairs")),
        }
    }
}

/// The sender of a pair.
trait Sender: Send {
    /// False when the send timed out or the receiver has closed.
    fn send(&mut self, bytes: &[u8]) -> Result<bool, Fault>;
}

/// The receiver of a pair.
trait Receiver: Send {
    /// Waits for a limited time and passes on what has arrived; returns the number of datagrams.
    fn recv(&mut self, look: &mut dyn FnMut(&[u8])) -> Result<u64, Fault>;
}

/// Carries out an order as one of the two sides.
pub(crate) fn work(order: &Order, ours: bool) -> Result<(), Fault> {
    let how = DatagramMode::of(order)?;
    match (order.job, ours) {
        (Job::Receive, true) => {
            let base = PathBuf::from(&order.place);
            let mut hosts: Vec<_> = (0..how.pairs)
                .map(|index| OurReceiver::new(&base, index, order, how.many))
                .collect::<Result<_, _>>()?;
            worker::announce_open(&order.place)?;
            // A host makes progress during calls: accept the senders in the order in which they
            // connect.
            hosts
                .iter_mut()
                .try_for_each(OurReceiver::wait_for_sender)?;
            receive_all(hosts, order)
        }
        (Job::Receive, false) => {
            let sockets: Vec<_> = (0..how.pairs)
                .map(|_| Udp::new(order))
                .collect::<Result<_, _>>()?;
            let ports: Vec<String> = sockets.iter().map(Udp::port).collect::<Result<_, _>>()?;
            worker::announce_open(&ports.join(","))?;
            receive_all(sockets, order)
        }
        (Job::Send, true) => {
            let base = PathBuf::from(order.destination()?);
            let senders = (0..how.pairs).map(|index| OurSender::new(&base, index, order));
            send_all(senders.collect::<Result<Vec<_>, _>>()?, order)
        }
        (Job::Send, false) => {
            let ports = order.destination()?.split(',');
            let senders = ports.map(|port| Udp::sender(port, order));
            send_all(senders.collect::<Result<Vec<_>, _>>()?, order)
        }
        _ => Err("datagrams go one way".to_owned()),
    }
}

fn receive_all<R: Receiver>(receivers: Vec<R>, order: &Order) -> Result<(), Fault> {
    worker::work_with(|| {
        let outcomes = on_threads(receivers, |receiver| receive(receiver, order))?;
        // The measured times of the pairs differ by one tick at most.
        let time = outcomes.iter().map(|outcome| outcome.nanoseconds).max();
        Ok(Outcome {
            messages: outcomes.iter().map(|outcome| outcome.messages).sum(),
            nanoseconds: time.unwrap_or_default(),
            ..Outcome::default()
        })
    })
}

fn send_all<S: Sender>(senders: Vec<S>, order: &Order) -> Result<(), Fault> {
    worker::work_with(|| {
        let together = Barrier::new(senders.len());
        let sent = on_threads(senders, |sender| {
            together.wait();
            send(sender, order)
        })?;
        Ok(Outcome {
            messages: sent.into_iter().sum(),
            ..Outcome::default()
        })
    })
}

/// Runs each side on a thread of its own.
fn on_threads<S: Send, T: Send>(
    sides: Vec<S>,
    run: impl Fn(S) -> Result<T, Fault> + Sync,
) -> Result<Vec<T>, Fault> {
    thread::scope(|scope| {
        let start = |side| scope.spawn(|| run(side));
        let threads: Vec<_> = sides.into_iter().map(start).collect();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join();
        let done = threads.into_iter().map(join);
        done.map(|done| done.unwrap_or_else(|_| Err("a thread panicked".to_owned())))
            .collect()
    })
}

fn send(mut sender: impl Sender, order: &Order) -> Result<u64, Fault> {
    let mut bytes = vec![0; order.size.max(2 * NUMBER)];
    let end = Instant::now() + order.warm + order.time + LONGER;
    let mut number: u64 = 0;
    while Instant::now() < end {
        for _ in 0..BATCH {
            write(number, &mut bytes);
            if !sender.send(&bytes)? {
                break;
            }
            number += 1;
        }
    }
    Ok(number)
}

/// Writes a datagram: its number, and then the message of that number.
pub(super) fn write(number: u64, bytes: &mut [u8]) {
    let (front, rest) = bytes.split_at_mut(NUMBER);
    front.copy_from_slice(&number.to_le_bytes());
    message(number, rest.len()).write(rest);
}

fn message(number: u64, len: usize) -> Message {
    Message {
        number,
        len,
        last: false,
    }
}

fn receive(mut receiver: impl Receiver, order: &Order) -> Result<Outcome, Fault> {
    let len = order.size.max(2 * NUMBER);
    let mut next = 0;
    let mut fault = None;
    let mut look = |bytes: &[u8]| match check(bytes, len, next) {
        Ok(number) => next = number + 1,
        Err(reason) => fault = Some(reason),
    };
    let give_up = Instant::now() + PATIENCE;
    while receiver.recv(&mut look)? == 0 {
        if Instant::now() > give_up {
            return Err("no datagram has arrived in time".to_owned());
        }
    }
    let first = Instant::now();
    let mut of_warm_up = 1;
    while first.elapsed() < order.warm {
        for _ in 0..BATCH {
            of_warm_up += receiver.recv(&mut look)?;
        }
    }
    let mut start = Instant::now();
    let mut messages = 0;
    while start.elapsed() < order.time {
        for _ in 0..BATCH {
            messages += receiver.recv(&mut look)?;
        }
    }
    if messages == 0 {
        // The receiver got no processor time while the senders ran: the figure includes the
        // warm-up.
        (messages, start) = (of_warm_up, first);
    }
    let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    match fault {
        Some(reason) => Err(reason),
        None => Ok(Outcome {
            messages,
            nanoseconds,
            ..Outcome::default()
        }),
    }
}

/// The number of a datagram with correct bytes that is newer than the one before.
fn check(bytes: &[u8], len: usize, next: u64) -> Result<u64, Fault> {
    let number = number(bytes, len)?;
    if number < next {
        return Err(format!("datagram {number} is a duplicate or out of order"));
    }
    Ok(number)
}

/// The number of a datagram with correct bytes.
pub(super) fn number(bytes: &[u8], len: usize) -> Result<u64, Fault> {
    let Some((front, rest)) = bytes.split_first_chunk::<NUMBER>() else {
        return Err(format!("a datagram of {} bytes", bytes.len()));
    };
    let number = u64::from_le_bytes(*front);
    let mut check = Check::new(number, len - NUMBER);
    check.part(rest);
    check.finish()?;
    Ok(number)
}

/// Either end of UDP.
struct Udp {
    socket: UdpSocket,
    buffer: Vec<u8>,
}

impl Udp {
    fn new(order: &Order) -> Result<Udp, Fault> {
        if order.wait == Wait::Spin {
            return Err("UDP sockets have no spinning mode".to_owned());
        }
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(line)?;
        set_socket_send_buffer_size(&socket, SEND_BUFFER / 2).map_err(line)?;
        set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER).map_err(line)?;
        socket.set_read_timeout(Some(TICK)).map_err(line)?;
        socket.set_write_timeout(Some(TICK)).map_err(line)?;
        Ok(Udp {
            socket,
            buffer: vec![0; 65536],
        })
    }

    fn sender(port: &str, order: &Order) -> Result<Udp, Fault> {
        let udp = Udp::new(order)?;
        let port: u16 = port.parse().map_err(line)?;
        udp.socket
            .connect((Ipv4Addr::LOCALHOST, port))
            .map_err(line)?;
        Ok(udp)
    }

    fn port(&self) -> Result<String, Fault> {
        let address = self.socket.local_addr().map_err(line)?;
        Ok(address.port().to_string())
    }
}

impl Sender for Udp {
    fn send(&mut self, bytes: &[u8]) -> Result<bool, Fault> {
        match self.socket.send(bytes) {
            Ok(_) => Ok(true),
            // The receivers have finished.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(false),
            Err(error) if is_later(error.kind()) => Ok(false),
            Err(error) => Err(line(error)),
        }
    }
}

impl Receiver for Udp {
    fn recv(&mut self, look: &mut dyn FnMut(&[u8])) -> Result<u64, Fault> {
        match self.socket.recv(&mut self.buffer) {
            Ok(len) => {
                look(&self.buffer[..len]);
                Ok(1)
            }
            Err(error) if is_later(error.kind()) => Ok(0),
            Err(error) => Err(line(error)),
        }
    }
}

fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// zerosock's receiver: a process that embeds the device.
struct OurReceiver {
    socket: Datagram,
    _host: Host,
    many: bool,
    buffer: Vec<u8>,
}

impl OurReceiver {
    fn new(base: &Path, index: usize, order: &Order, many: bool) -> Result<OurReceiver, Fault> {
        let mut builder = Host::builder()
            .wait(order.wait.into())
            .attach(base.join(format!("attach{index}")));
        if let Some(trust) = trust() {
            builder = builder.trust_processes(trust);
        }
        let host = builder.start().map_err(line)?;
        let socket = Datagram::bind(&host, PORT).map_err(line)?;
        socket.set_read_timeout(Some(TICK)).map_err(line)?;
        Ok(OurReceiver {
            socket,
            _host: host,
            many,
            buffer: vec![0; 65536],
        })
    }
}

impl OurReceiver {
    /// Waits for the empty datagram with which the sender announces itself.
    fn wait_for_sender(&mut self) -> Result<(), Fault> {
        let give_up = Instant::now() + PATIENCE;
        while self.recv(&mut |_| {})? == 0 {
            if Instant::now() > give_up {
                return Err("the sender has not announced itself in time".to_owned());
            }
        }
        Ok(())
    }
}

impl Receiver for OurReceiver {
    fn recv(&mut self, look: &mut dyn FnMut(&[u8])) -> Result<u64, Fault> {
        let got = if self.many {
            let buffer = &mut self.buffer;
            self.socket
                .recv_each(BATCH as usize, |datagram, _| match datagram.as_slice() {
                    Some(bytes) => look(bytes),
                    None => {
                        let len = datagram.copy_to(0, buffer);
                        look(&buffer[..len]);
                    }
                })
        } else {
            let got = self.socket.recv(&mut self.buffer);
            got.map(|len| {
                look(&self.buffer[..len]);
                1
            })
        };
        match got {
            Ok(got) => Ok(got as u64),
            Err(error) if is_later(error.kind()) => Ok(0),
            Err(error) => Err(line(error)),
        }
    }
}

/// zerosock's sender: an attached process.
struct OurSender {
    socket: Datagram,
    _endpoint: Endpoint,
}

impl OurSender {
    fn new(base: &Path, index: usize, order: &Order) -> Result<OurSender, Fault> {
        let path = base.join(format!("attach{index}"));
        let attach = || {
            let wait = order.wait.into();
            let mut builder = Endpoint::builder().wait(wait).queue_size(QUEUE);
            if let Some(trust) = trust() {
                builder = builder.trust_host(trust);
            }
            builder.attach(&path)
        };
        let endpoint = retry(PATIENCE, attach).map_err(line)?;
        let socket = Datagram::bind(&endpoint, Port::ANY).map_err(line)?;
        socket.set_write_timeout(Some(TICK)).map_err(line)?;
        socket.connect(Address::new(Cid::HOST, PORT));
        socket.send(&[]).map_err(line)?;
        Ok(OurSender {
            socket,
            _endpoint: endpoint,
        })
    }
}

impl Sender for OurSender {
    fn send(&mut self, bytes: &[u8]) -> Result<bool, Fault> {
        match self.socket.send(bytes) {
            Ok(_) => Ok(true),
            Err(error) if is_later(error.kind()) => Ok(false),
            // The receivers have finished.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(false),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
            Err(error) => Err(line(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(number: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let (front, rest) = bytes.split_at_mut(NUMBER);
        front.copy_from_slice(&number.to_le_bytes());
        message(number, rest.len()).write(rest);
        bytes
    }

    #[test]
    fn check_accepts_gaps_and_rejects_damaged_or_repeated_datagrams() {
        assert_eq!(check(&datagram(5, 64), 64, 5), Ok(5));
        assert_eq!(check(&datagram(9, 64), 64, 5), Ok(9), "some were lost");
        assert!(check(&datagram(4, 64), 64, 5).is_err());
        for at in 0..64 {
            let mut bytes = datagram(5, 64);
            bytes[at] ^= 1;
            assert!(check(&bytes, 64, 5).is_err(), "byte {at}");
        }
        assert!(check(&datagram(5, 63), 64, 5).is_err());
        assert!(check(&[1, 2], 64, 5).is_err());
    }

    #[test]
    fn how_is_a_number_of_pairs_with_an_optional_suffix_many() {
        let order = |how: Option<&str>| Order {
            peer: String::new(),
            job: Job::Send,
            wait: Wait::Sleep,
            size: 64,
            warm: Duration::ZERO,
            time: Duration::ZERO,
            cpu: None,
            other_cpu: None,
            place: String::new(),
            to: None,
            how: how.map(str::to_owned),
        };
        let how = |pairs, many| Ok(DatagramMode { pairs, many });
        assert_eq!(DatagramMode::of(&order(None)), how(1, false));
        assert_eq!(DatagramMode::of(&order(Some("4"))), how(4, false));
        assert_eq!(DatagramMode::of(&order(Some("2-many"))), how(2, true));
        assert!(DatagramMode::of(&order(Some("0"))).is_err());
        assert!(DatagramMode::of(&order(Some("many"))).is_err());
    }
}
