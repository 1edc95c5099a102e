//! A guest's port that leads to TCP: by a rule of `serve`, or by a relay behind the device's Unix
//! socket. The guest is zerosock's driver.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use zerosock_relay::relay::Way;

use super::address::Address;
use super::programs::{Load, Relay};
use super::running::Running;
use crate::bench::Bench;
use crate::binary::Binary;
use crate::report::{Metric, line};
use crate::tables::device;
use crate::tables::device::program::{self, Device};
use crate::tables::device::traffic::{self, Case, PORT};
use crate::worker;
use crate::worker::order::Outcome;

pub(super) const MB_S: Metric = Metric::higher("throughput", "MB/s");

/// Bytes of each packet of the guest, and of each write to it.
pub(super) const SIZE: usize = 64 << 10;

/// How the guest's port leads to TCP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Path {
    /// By a rule of `serve`.
    Rule(Binary),
    /// `serve`, its Unix socket, and a relay.
    OurUnix(Relay),
    /// vhost-device-vsock, its Unix socket, and a relay.
    PeerUnix(Relay),
}

/// zerosock first, then its peers.
pub(super) const PATHS: [Path; 4] = [
    Path::Rule(Binary::OWN),
    Path::PeerUnix(Relay::Socat(8192)),
    Path::PeerUnix(Relay::Socat(262_144)),
    Path::OurUnix(Relay::Zerosock(Way::Splice)),
];

/// What the guest does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Traffic {
    Send,
    Receive,
    Ping,
}

/// Result of a measurement: one of the two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// Of a stream; otherwise NaN.
    pub(super) mb_s: f64,
    /// Round trips; none of a stream.
    pub(super) trips: Outcome,
}

impl Path {
    /// Name in the tables.
    pub(super) fn title(self) -> String {
        match self {
            Path::Rule(binary) => binary.title().to_owned(),
            Path::OurUnix(relay) => format!("zerosock serve, Unix, {}", relay.title()),
            Path::PeerUnix(relay) => format!("{}, {}", program::peer_title(), relay.title()),
        }
    }

    fn device(self, to: &TcpListener) -> Result<Device, String> {
        match self {
            Path::Rule(binary) => {
                let to = to.local_addr().map_err(line)?;
                let rule = format!("{PORT}=tcp:{to}");
                let words = ["serve", "--log-level", "off", "--forward", &rule];
                program::release_with(binary, &words)
            }
            Path::OurUnix(_) => program::ours(),
            Path::PeerUnix(_) => program::peer(),
        }
    }

    fn relay(self) -> Option<Relay> {
        match self {
            Path::Rule(_) => None,
            Path::OurUnix(relay) | Path::PeerUnix(relay) => Some(relay),
        }
    }
}

/// Measures once. The device, and a relay behind it, have the receiver's core; the guest and the
/// program at the TCP socket share the other. `bytes` is the length of a stream, `None` for one that
/// only finds out how fast it is.
pub(super) fn measure(
    path: Path,
    traffic: Traffic,
    bytes: Option<u64>,
    bench: &Bench<'_>,
) -> Result<Measured, String> {
    let (settings, cores) = (bench.settings, bench.cores);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(line)?;
    let device = path.device(&listener)?;
    let bytes = bytes.unwrap_or_else(|| device::probe_bytes(settings));
    traffic::with_device(&device, Case::STOCK_RX_BUFFER, cores, |running, driver| {
        let mut socket = running.uds_path.clone().into_os_string();
        socket.push(format!("_{PORT}"));
        let to = Address::Tcp(listener.local_addr().map_err(line)?);
        let relay = match path.relay() {
            None => None,
            Some(relay) => {
                let dir = tempfile::tempdir().map_err(line)?;
                let from = Address::Unix(PathBuf::from(socket));
                let started = Running::start_at(relay, from, &to, Load::One, cores.receiver, dir)?;
                Some(started)
            }
        };
        let accept = move || accept(&listener, cores.host);
        let stream = |time: Duration| Measured {
            mb_s: bytes as f64 / 1e6 / time.as_secs_f64(),
            trips: Outcome::default(),
        };
        let trips = |trips| Measured {
            mb_s: f64::NAN,
            trips,
        };
        let measured = match traffic {
            Traffic::Send => traffic::to_host(driver, accept, SIZE, bytes).map(stream),
            Traffic::Receive => traffic::back_to_guest(driver, accept, SIZE, bytes).map(stream),
            Traffic::Ping => traffic::ping(driver, accept, settings.warm, settings.time).map(trips),
        };
        measured.map_err(|reason| match &relay {
            Some(relay) => relay.explain(reason),
            None => reason,
        })
    })
}

/// On the thread of the program at the TCP socket, which runs on core `cpu` from here on.
fn accept(listener: &TcpListener, cpu: Option<usize>) -> Result<TcpStream, String> {
    worker::pin(cpu)?;
    let (stream, _) = listener.accept().map_err(line)?;
    stream.set_nodelay(true).map_err(line)?;
    Ok(stream)
}
