//! A guest's port that leads to TCP: by a rule of `serve`, or by a relay behind the device's Unix
//! socket. The guest is zerosock's driver.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;

use super::address::Address;
use super::programs::{Load, Relay, Way};
use super::running::Running;
use crate::args::Settings;
use crate::pair::Cores;
use crate::tables::device;
use crate::tables::device::program::{self, Device};
use crate::tables::device::traffic::{self, Case, PORT};
use crate::worker::order::Outcome;

/// Bytes of each packet of the guest, and of each write to it.
pub(super) const SIZE: usize = 64 << 10;

/// How the guest's port leads to TCP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Path {
    /// By a rule of `serve`.
    Rule,
    /// `serve`, its Unix socket, and a relay.
    OurUnix(Relay),
    /// vhost-device-vsock, its Unix socket, and a relay.
    PeerUnix(Relay),
}

/// zerosock first, then its peers.
pub(super) const PATHS: [Path; 4] = [
    Path::Rule,
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
pub(super) enum Measured {
    MbPerSecond(f64),
    Trips(Outcome),
}

impl Path {
    /// Name in the tables.
    pub(super) fn title(self) -> String {
        match self {
            Path::Rule => program::OURS.to_owned(),
            Path::OurUnix(relay) => format!("zerosock serve, Unix, {}", relay.title()),
            Path::PeerUnix(relay) => format!("{}, {}", program::peer_title(), relay.title()),
        }
    }

    fn device(self, to: &TcpListener) -> Result<Device, String> {
        match self {
            Path::Rule => {
                let to = to.local_addr().map_err(text)?;
                let rule = format!("{PORT}=tcp:{to}");
                program::ours_with(&["serve", "--log-level", "off", "--forward", &rule])
            }
            Path::OurUnix(_) => program::ours(),
            Path::PeerUnix(_) => program::peer(),
        }
    }

    fn relay(self) -> Option<Relay> {
        match self {
            Path::Rule => None,
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
    settings: &Settings,
    cores: Cores,
) -> Result<Measured, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?;
    let device = path.device(&listener)?;
    let bytes = bytes.unwrap_or_else(|| device::probe_bytes(settings));
    traffic::with_device(&device, Case::STOCK_RX_BUFFER, cores, |running, driver| {
        let mut socket = running.uds_path.clone().into_os_string();
        socket.push(format!("_{PORT}"));
        let to = Address::Tcp(listener.local_addr().map_err(text)?);
        let relay = match path.relay() {
            None => None,
            Some(relay) => {
                let dir = tempfile::tempdir().map_err(text)?;
                let from = Address::Unix(PathBuf::from(socket));
                let started = Running::start_at(relay, from, &to, Load::One, cores.receiver, dir)?;
                Some(started)
            }
        };
        let accept = move || accept(&listener);
        let mb_s = |time: std::time::Duration| bytes as f64 / 1e6 / time.as_secs_f64();
        let measured = match traffic {
            Traffic::Send => traffic::to_host(driver, accept, SIZE, bytes)
                .map(|time| Measured::MbPerSecond(mb_s(time))),
            Traffic::Receive => traffic::back_to_guest(driver, accept, SIZE, bytes)
                .map(|time| Measured::MbPerSecond(mb_s(time))),
            Traffic::Ping => {
                traffic::ping(driver, accept, settings.warm, settings.time).map(Measured::Trips)
            }
        };
        measured.map_err(|reason| match &relay {
            Some(relay) => relay.explain(reason),
            None => reason,
        })
    })
}

fn accept(listener: &TcpListener) -> Result<TcpStream, String> {
    let (stream, _) = listener.accept().map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    Ok(stream)
}

impl Measured {
    pub(super) fn mb_s(&self) -> f64 {
        match self {
            Measured::MbPerSecond(speed) => *speed,
            Measured::Trips(_) => f64::NAN,
        }
    }

    pub(super) fn p50_us(&self) -> f64 {
        self.trip(|outcome| outcome.p50)
    }

    pub(super) fn p99_us(&self) -> f64 {
        self.trip(|outcome| outcome.p99)
    }

    fn trip(&self, of: impl Fn(&Outcome) -> Option<u64>) -> f64 {
        match self {
            Measured::MbPerSecond(_) => f64::NAN,
            Measured::Trips(outcome) => of(outcome).map_or(f64::NAN, |time| time as f64 / 1e3),
        }
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
