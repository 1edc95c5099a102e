//! A guest at a network card, without offloads: by AF_XDP with the guest's memory, or by a TAP interface
//! and the kernel's bridge. The card is one end of a veth pair; the guest is zerosock's driver.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;
use zerosock_net::interface::{Interface, InterfaceConfig, LoanError, Repr};
use zerosock_proto::wire::net::{Mac, Offloads};
use zerosock_sys::network::packet_socket;

use super::daemon::{Daemon, START, zerosock_by};
use crate::args::Settings;
use crate::bench::Bench;
use crate::binary::Binary;
use crate::image::short_dir;
use crate::namespace::{ip, set};
use crate::processes::{self, CpuTimes};
use crate::report::line;

/// The guest's address, and that of the other end.
const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 1, 1]);
const FAR: Mac = Mac([0x52, 0x54, 0, 0, 1, 2]);
/// The ends of the veth pair: the card, and the other one.
const CARD: &str = "card0";
const OTHER: &str = "far0";
/// Frames of a burst, and received frames in flight at most.
const BURST: usize = 32;
const WINDOW: usize = 128;
/// Frames of which none arrives for this long are lost.
const LOST: Duration = Duration::from_millis(20);
/// Bytes in front of a frame of a packet socket: `struct virtio_net_hdr`.
const PACKET_HEADER: usize = 10;

/// The way between the guest and the card.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    Xdp(Binary),
    Bridge(Binary),
}

/// Names in the tables: AF_XDP first, then its peer.
pub(super) const WAYS: [(&str, Way); 2] = [
    ("zerosock net --xdp", Way::Xdp(Binary::OWN)),
    ("zerosock net --tap, bridge", Way::Bridge(Binary::OWN)),
];

/// The direction, seen from the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Direction {
    Transmit,
    Receive,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) direction: Direction,
    /// Bytes of a frame.
    pub(super) size: usize,
    /// The device has the receiver's core. Otherwise it shares that of the driver, and runs when the driver
    /// sleeps, so that frames come to it many at a time.
    pub(super) has_own_core: bool,
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) mb_s: f64,
    /// CPU nanoseconds for a frame that arrives: of the back-end and the kernel, and in
    /// [`Direction::Receive`] of the thread that sends and receives the frames.
    pub(super) cpu_ns: f64,
}

impl Way {
    /// Measures once.
    pub(super) fn measure(self, case: Case, bench: &Bench<'_>) -> Result<Figures, String> {
        let (settings, cores) = (bench.settings, bench.cores);
        let dir = short_dir()?;
        let socket = dir.path().join("net");
        let _card = Card::new(self)?;
        let core = match case.has_own_core {
            true => cores.receiver,
            false => cores.sender,
        };
        // The back-end ends with the thread that starts it.
        processes::on_core(core, || {
            let daemon = self.serve(&socket, case.has_own_core)?;
            processes::on_core(cores.sender, || drive(&socket, &daemon, case, settings))
        })
    }

    fn serve(self, socket: &Path, has_own_core: bool) -> Result<Daemon, String> {
        let (binary, options): (_, &[&str]) = match self {
            Way::Xdp(binary) => (binary, &["--xdp", CARD]),
            Way::Bridge(binary) => (binary, &["--tap", "card-tap", "--bridge", "card-br"]),
        };
        // A batch process does not interrupt the one that wakes it.
        let starter = (!has_own_core).then_some("chrt --batch 0");
        zerosock_by(starter, binary, options, &[socket])
    }
}

/// Attaches a driver to the back-end and measures.
fn drive(
    socket: &Path,
    daemon: &Daemon,
    case: Case,
    settings: &Settings,
) -> Result<Figures, String> {
    let config = InterfaceConfig {
        offloads: Offloads::default(),
        mac: Some(GUEST),
        ..InterfaceConfig::default()
    };
    let guest = Interface::connect(socket, &config).map_err(line)?;
    match case.direction {
        Direction::Transmit => transmit(&guest, daemon, case.size, settings),
        Direction::Receive => receive(&guest, daemon, case.size, settings),
    }
}

/// The veth pair, and the bridge. Dropping it removes them.
struct Card;

impl Card {
    fn new(way: Way) -> Result<Card, String> {
        // Only frames that are measured. A kernel without IPv6 has no such setting.
        let _ = set("ipv6/conf/all/disable_ipv6", "1");
        let _ = set("ipv6/conf/default/disable_ipv6", "1");
        ip(&format!("link add {CARD} type veth peer name {OTHER}"))?;
        let card = Card;
        ip(&format!("link set {OTHER} address {FAR} up"))?;
        ip(&format!("link set {CARD} up"))?;
        if let Way::Bridge(_) = way {
            ip("link add card-br type bridge")?;
            ip("link set card-br up")?;
            ip(&format!("link set {CARD} master card-br"))?;
        }
        Ok(card)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {CARD}"));
        let _ = ip("link del card-br");
    }
}

fn transmit(
    guest: &Interface,
    daemon: &Daemon,
    size: usize,
    settings: &Settings,
) -> Result<Figures, String> {
    let frame = frame(FAR, GUEST, size);
    wait_for_arrival(guest, &frame)?;
    send_for(guest, &frame, settings.warm)?;
    let before = (CpuTimes::now(&[daemon.process.id()])?, arrived()?);
    let begin = Instant::now();
    let (mut cpu, mut count) = (0.0, 0);
    // A kernel may count CPU time at ticks of its clock, and a busy machine may stop the device for long.
    while (cpu == 0.0 || count == 0) && begin.elapsed() < START {
        send_for(guest, &frame, settings.time)?;
        count = arrived()? - before.1;
        cpu = CpuTimes::now(&[daemon.process.id()])?.seconds_since(&before.0);
    }
    let time = begin.elapsed();
    figures(count, size, time, cpu)
}

/// Sends frames until one has arrived at the other end: the back-end may need some time to start.
fn wait_for_arrival(guest: &Interface, frame: &[u8]) -> Result<(), String> {
    let (begin, before) = (Instant::now(), arrived()?);
    while arrived()? == before {
        if begin.elapsed() > START {
            return Err("no frame arrives in 20 s".to_owned());
        }
        send_for(guest, frame, Duration::from_millis(1))?;
    }
    Ok(())
}

/// Sends as many frames as possible.
fn send_for(guest: &Interface, frame: &[u8], time: Duration) -> Result<(), String> {
    let end = Instant::now() + time;
    loop {
        let mut count = 0;
        while count < BURST {
            match guest.loan(frame.len()) {
                Ok(mut loan) => {
                    loan.write(0, frame);
                    loan.queue(&Repr::PLAIN).map_err(line)?;
                    count += 1;
                }
                Err(LoanError::Full) => break,
                Err(error) => return Err(line(error)),
            }
        }
        guest.flush();
        if Instant::now() >= end {
            return Ok(());
        }
        if count < BURST {
            guest.wait(Some(end)).map_err(line)?;
        }
    }
}

/// Frames that have arrived at the other end of the pair.
fn arrived() -> Result<u64, String> {
    // Of this thread's namespace.
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").map_err(line)?;
    received(&text, OTHER).ok_or_else(|| format!("/proc/thread-self/net/dev has no {OTHER}"))
}

/// Packets received, of an interface in /proc/net/dev: `NAME: BYTES PACKETS ...`.
fn received(text: &str, interface: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, numbers) = lines.find(|(name, _)| name.trim() == interface)?;
    numbers.split_whitespace().nth(1)?.parse().ok()
}

fn receive(
    guest: &Interface,
    daemon: &Daemon,
    size: usize,
    settings: &Settings,
) -> Result<Figures, String> {
    let other = OTHER.parse().map_err(line)?;
    let socket = packet_socket(&other).map_err(line)?;
    let frame = [vec![0; PACKET_HEADER], frame(GUEST, FAR, size)].concat();
    let mut buffer = vec![0; size];
    let mut last = Instant::now();
    let mut limit = last + START;
    // The end of the warm-up, and the CPU times then.
    let mut begin: Option<(Instant, Option<(CpuTimes, u64)>)> = None;
    let (mut in_flight, mut count) = (0_usize, 0_u64);
    loop {
        let mut got = 0;
        while got < BURST {
            let Some(frame) = guest.recv() else { break };
            frame.read(0, &mut buffer);
            got += 1;
        }
        let now = Instant::now();
        if got > 0 {
            in_flight = in_flight.saturating_sub(got);
            last = now;
        } else if now - last > LOST {
            in_flight = 0;
            last = now;
        }
        match &mut begin {
            None if got > 0 => {
                begin = Some((now + settings.warm, None));
                limit = now + settings.warm + settings.time;
            }
            Some((at, times)) if now >= *at => match times {
                None => {
                    let cpu = CpuTimes::now(&[daemon.process.id()])?;
                    *times = Some((cpu, processes::own_cpu_time()?));
                    *at = Instant::now();
                    limit = *at + settings.time;
                }
                Some(_) => count += got as u64,
            },
            _ => {}
        }
        if now >= limit {
            let Some((at, Some((before, own)))) = &begin else {
                return Err("no frame arrives in 20 s".to_owned());
            };
            let cpu = CpuTimes::now(&[daemon.process.id()])?.seconds_since(before);
            let own = (processes::own_cpu_time()? - own) as f64 / 1e9;
            // As in `transmit`.
            if cpu > 0.0 && own > 0.0 && count > 0 || now - *at > START {
                return figures(count, size, now - *at, cpu + own);
            }
            limit = now + settings.time;
        }
        let room = (WINDOW - in_flight).min(BURST);
        for _ in 0..room {
            match rustix::net::send(&socket, &frame, SendFlags::DONTWAIT) {
                Ok(_) => in_flight += 1,
                Err(Errno::NOBUFS | Errno::AGAIN) => break,
                Err(error) => return Err(format!("send to {OTHER}: {error}")),
            }
        }
        if got == 0 && in_flight >= WINDOW {
            guest.wait(Some(now + LOST)).map_err(line)?;
        }
    }
}

/// A frame of an EtherType for experiments.
fn frame(to: Mac, from: Mac, size: usize) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &[0x88, 0xb5]].concat();
    frame.resize(size, 0);
    frame
}

fn figures(count: u64, size: usize, time: Duration, cpu: f64) -> Result<Figures, String> {
    match count {
        0 => Err("no frame arrived".to_owned()),
        count => Ok(Figures {
            mb_s: count as f64 * size as f64 / 1e6 / time.as_secs_f64(),
            cpu_ns: cpu * 1e9 / count as f64,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received_packets_are_those_of_the_interface() {
        let text = "Inter-| Receive\n face |bytes packets\n    lo: 1 2 3\n  far0: 900 15 0 0\n";
        assert_eq!(received(text, "far0"), Some(15));
        assert_eq!(received(text, "far"), None);
    }
}
