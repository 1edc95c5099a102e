//! UDP over the loopback interface, at the rate at which the receiver gets the datagrams.
//!
//! At most [`WINDOW`] datagrams are in flight. The receiver acknowledges them over a Unix socket of
//! its own, past any relay. Without that a sender that shares a core with the receiver would spend
//! the time of that core on datagrams that are dropped. Datagrams that are lost all the same do not
//! count. One that others have overtaken does, because UDP promises no order and a relay that redirects
//! inside of the kernel keeps none (docs/sockmap.md); a duplicate is a fault.
//!
//! So that a relay and not the two sides is the bottleneck, the kernel cuts each send of the sender
//! into several datagrams, and the receiver takes several with one call. A relay gets single ones unless it asks for UDP_GRO.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;
use zerosock_sys::mmsg::{Batch, MAX_BATCH};
use zerosock_sys::network::set_segment_size;

use crate::peers::datagrams::{self, NUMBER};
use crate::report::line;
use crate::worker;
use crate::worker::order::{Job, Order, Outcome};
use crate::worker::touch::Fault;

/// Most datagrams in flight. As many with 1400 bytes fit into Linux's default receive buffer.
const WINDOW: u64 = 64;
/// Datagrams of each send, and for each acknowledgement.
const BATCH: u64 = 16;
/// Time after which the sender takes unacknowledged datagrams for lost.
const LOST: Duration = Duration::from_millis(20);
/// Time without a datagram after which the receiver gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait of the receiver for a datagram.
const TICK: Duration = Duration::from_millis(50);

/// Carries out an order as one of the two sides.
pub(crate) fn work(order: &Order) -> Result<(), Fault> {
    let acknowledgements = Path::new(&order.place).join("acknowledgements");
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(line)?;
    match order.job {
        Job::Receive => {
            let listener = UnixListener::bind(acknowledgements).map_err(line)?;
            worker::announce_open(&socket.local_addr().map_err(line)?.to_string())?;
            let (back, _) = listener.accept().map_err(line)?;
            worker::work_with(|| receive(&socket, back, order))
        }
        Job::Send => {
            let back = UnixStream::connect(acknowledgements).map_err(line)?;
            socket.connect(order.destination()?).map_err(line)?;
            worker::work_with(|| send(&socket, back, order))
        }
        Job::Ping | Job::Pong => Err("datagrams go one way".to_owned()),
    }
}

/// Length of each datagram.
fn length(order: &Order) -> usize {
    order.size.max(2 * NUMBER)
}

fn receive(socket: &UdpSocket, mut back: UnixStream, order: &Order) -> Result<Outcome, Fault> {
    let len = length(order);
    // A datagram that is too long must be seen.
    let mut batch = Batch::new(MAX_BATCH, len + 1);
    let (mut arrived, mut total, mut acknowledged) = (Arrived::default(), 0, 0);
    let mut window = Window::new(order);
    let mut latest = Instant::now();
    loop {
        match batch.receive(socket, MAX_BATCH) {
            Ok(got) => {
                for index in 0..got {
                    arrived.add(datagrams::number(batch.message(index), len)?)?;
                }
                total += got as u64;
                latest = Instant::now();
                if total - acknowledged < BATCH {
                    continue;
                }
            }
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                return Err(format!("receive: {error}"));
            }
            Err(_) if latest.elapsed() > PATIENCE => return Err("nothing arrives".to_owned()),
            Err(_) if wait(socket)? => continue,
            Err(_) => {}
        }
        if let Some(outcome) = window.look(total) {
            // The end of `back` ends the sender.
            return Ok(outcome);
        }
        acknowledged = total;
        back.write_all(&arrived.next.to_le_bytes())
            .map_err(|error| format!("acknowledge: {error}"))?;
    }
}

/// Which datagrams have arrived.
#[derive(Debug, Default)]
struct Arrived {
    /// One more than the highest number.
    next: u64,
    /// Those before `next`: the lowest bit is the highest number.
    latest: u128,
}

impl Arrived {
    fn add(&mut self, number: u64) -> Result<(), Fault> {
        if number >= self.next {
            let steps = u32::try_from(number - self.next + 1).unwrap_or(u32::MAX);
            self.latest = self.latest.checked_shl(steps).unwrap_or(0) | 1;
            self.next = number + 1;
            return Ok(());
        }
        let behind = u32::try_from(self.next - 1 - number).unwrap_or(u32::MAX);
        match 1u128.checked_shl(behind) {
            Some(bit) if self.latest & bit == 0 => self.latest |= bit,
            Some(_) => return Err(format!("datagram {number} is a duplicate")),
            None => return Err(format!("datagram {number} is {behind} datagrams late")),
        }
        Ok(())
    }
}

/// Waits for a datagram; false when there is none in time.
fn wait(socket: &UdpSocket) -> Result<bool, Fault> {
    let mut sockets = [PollFd::new(socket, PollFlags::IN)];
    let timeout = Timespec::try_from(TICK).map_err(line)?;
    match poll(&mut sockets, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(format!("wait: {error}")),
    }
}

/// The measured time: after the warm-up that begins with the first datagrams.
struct Window {
    warm: Duration,
    time: Duration,
    first: Option<Instant>,
    /// Begin of the measured time, and the datagrams before it.
    counted_from: Option<(Instant, u64)>,
}

impl Window {
    fn new(order: &Order) -> Window {
        Window {
            warm: order.warm,
            time: order.time,
            first: None,
            counted_from: None,
        }
    }

    /// The outcome, once the time is over; `total` is the number of datagrams up to now.
    fn look(&mut self, total: u64) -> Option<Outcome> {
        if total == 0 {
            return None;
        }
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        let Some((since, before)) = self.counted_from else {
            if now - first >= self.warm {
                self.counted_from = Some((now, total));
            }
            return None;
        };
        (now - since >= self.time && total > before).then(|| Outcome {
            messages: total - before,
            nanoseconds: u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX),
            total: Some(total),
            ..Outcome::default()
        })
    }
}

fn send(socket: &UdpSocket, mut back: UnixStream, order: &Order) -> Result<Outcome, Fault> {
    back.set_read_timeout(Some(LOST)).map_err(line)?;
    let give_up = Instant::now() + order.warm + order.time + PATIENCE;
    let len = length(order);
    let size = u16::try_from(len).map_err(|_| format!("datagrams of {len} bytes"))?;
    set_segment_size(socket, size).map_err(|error| format!("several at once: {error}"))?;
    let mut bytes = vec![0; len * BATCH as usize];
    let (mut number, mut acknowledged) = (0u64, 0u64);
    let mut answers = [0; 8 * WINDOW as usize];
    loop {
        while number + BATCH - acknowledged <= WINDOW {
            for (datagram, number) in bytes.chunks_exact_mut(len).zip(number..) {
                datagrams::write(number, datagram);
            }
            match socket.send(&bytes) {
                Ok(_) => {}
                // The answer to an earlier datagram, which is lost.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(format!("send: {error}")),
            }
            number += BATCH;
        }
        match back.read(&mut answers) {
            Ok(0) => break,
            Ok(got) => {
                // Each acknowledgement is written at once, and none is cut.
                let latest = answers[..got].as_chunks().0.last();
                let latest = latest.map_or(0, |latest| u64::from_le_bytes(*latest));
                acknowledged = acknowledged.max(latest);
            }
            Err(error) if is_timeout(&error) => acknowledged = number,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => return Err(format!("acknowledgement: {error}")),
        }
        if Instant::now() > give_up {
            return Err("the receiver does not end".to_owned());
        }
    }
    Ok(Outcome {
        messages: number,
        ..Outcome::default()
    })
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn overtaken_datagrams_count_and_duplicates_do_not() {
        let mut arrived = Arrived::default();
        for number in [0, 3, 2, 10, 1, 9, 300, 299, 301 - 128] {
            arrived.add(number).unwrap();
        }
        assert_eq!(arrived.next, 301);
        for number in [300, 299, 301 - 128, 10, 301 - 129] {
            arrived.add(number).unwrap_err();
        }
    }
    use crate::worker::order::Wait;

    /// Both sides, and between them a relay that sends the n-th datagram `copies(n)` times.
    fn run(copies: impl Fn(u64) -> usize + Send) -> [Result<Outcome, Fault>; 2] {
        let order = |job| Order {
            peer: String::new(),
            job,
            wait: Wait::Sleep,
            size: 100,
            warm: Duration::ZERO,
            time: Duration::from_millis(5),
            cpu: None,
            other_cpu: None,
            place: String::new(),
            to: None,
            how: None,
        };
        let socket = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let [sender, relay, receiver] = [socket(), socket(), socket()];
        sender.connect(relay.local_addr().unwrap()).unwrap();
        let to = receiver.local_addr().unwrap();
        relay.set_read_timeout(Some(TICK)).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let sending = scope.spawn(move || send(&sender, here, &order(Job::Send)));
            let receiving = scope.spawn(move || receive(&receiver, there, &order(Job::Receive)));
            let mut bytes = [0; 200];
            let mut number = 0;
            while !sending.is_finished() {
                let Ok(got) = relay.recv(&mut bytes) else {
                    continue;
                };
                for _ in 0..copies(number) {
                    relay.send_to(&bytes[..got], to).unwrap();
                }
                number += 1;
            }
            [sending.join().unwrap(), receiving.join().unwrap()]
        })
    }

    #[test]
    fn a_run_counts_what_arrived() {
        let [sent, received] = run(|_| 1).map(Result::unwrap);
        assert!(received.messages > 0 && received.nanoseconds > 0);
        assert!(received.messages < received.total.unwrap());
        assert!(received.total.unwrap() <= sent.messages);
    }

    #[test]
    fn lost_datagrams_do_not_count_and_do_not_stop_the_run() {
        let [sent, received] = run(|number| usize::from(number % 10 != 3)).map(Result::unwrap);
        assert!(received.total.unwrap() * 20 < sent.messages * 19);
    }

    #[test]
    fn a_datagram_that_comes_twice_ends_the_run() {
        let [_, received] = run(|number| if number == 40 { 2 } else { 1 });
        assert!(received.unwrap_err().contains("is a duplicate"));
    }
}
