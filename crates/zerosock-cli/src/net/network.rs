//! A network: its guests, and what carries their frames. From flags, or an entry of `net` in a file.

use std::fmt::Display;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use tracing::info;
use zerosock_net::backend::{Backend, Never};
use zerosock_net::model::MAX_PAIRS;
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::stats::NetStats;
use zerosock_net::tap::TapBackend;
use zerosock_net::xdp::XdpBackend;
use zerosock_proto::wire::net::{ETHERNET_LEN, MIN_MTU, Mac};
use zerosock_sys::account::Limits;
use zerosock_sys::tun::{AccessError, InterfaceName, Sharing, Tap, TapError};
use zerosock_sys::xdp::{MAX_FRAME, MAX_QUEUES};
use zerosock_sys::{reaper, wait_ready};

use super::xdp::{self, Claim, Interfaces, XdpQueue, XdpQueueOptions};
use crate::failure::Failure;
use crate::sandbox::Needs;
use crate::sockets::{self, Access, SocketFile};

/// Descriptors that a front-end may have sent and that are not closed.
const DESCRIPTORS: u64 = 256;

/// Largest MTU of a TAP: the kernel's limit of 65535 bytes less the Ethernet header.
const MAX_TAP_MTU: u16 = u16::MAX - ETHERNET_LEN as u16;
/// Largest MTU of a guest on AF_XDP.
const MAX_XDP_MTU: u16 = MAX_FRAME as u16 - ETHERNET_LEN as u16;

/// A network. With one guest, an interface carries its frames; otherwise a switch does, and the
/// interface is its uplink.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Network {
    #[serde(default, deserialize_with = "parsed")]
    pub(crate) tap: Option<InterfaceName>,
    /// Instead of `tap`.
    #[serde(skip)]
    pub(crate) tap_fd: Vec<i32>,
    /// Other programs may have queues of `tap`.
    #[serde(default, alias = "share-tap")]
    pub(crate) share_tap: bool,
    /// Instead of `tap`.
    #[serde(default, deserialize_with = "parsed")]
    pub(crate) xdp: Option<XdpQueue>,
    #[serde(default, alias = "xdp-drop-long")]
    pub(crate) xdp_drop_long: bool,
    #[serde(default, alias = "xdp-copy")]
    pub(crate) xdp_copy: bool,
    #[serde(default, deserialize_with = "parsed")]
    pub(crate) bridge: Option<InterfaceName>,
    pub(crate) mtu: Option<u16>,
    #[serde(default = "one")]
    pub(crate) queues: u16,
    pub(crate) guests: Vec<Guest>,
}

/// A guest of a network.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Guest {
    pub(crate) socket: PathBuf,
    #[serde(default, deserialize_with = "parsed")]
    pub(crate) mac: Option<Mac>,
    /// Frames with another source address are dropped.
    #[serde(default, alias = "mac-filter")]
    pub(crate) mac_filter: bool,
}

/// What all networks of a process have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub(crate) access: Access,
    /// Limit of mapped memory of a guest, bytes.
    pub(crate) max_memory: u64,
    pub(crate) sealed_memory: bool,
    pub(crate) spin: Duration,
}

fn one() -> u16 {
    1
}

fn parsed<'de, D, T>(input: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let text = String::deserialize(input)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

impl FromStr for Guest {
    type Err = String;

    /// `PATH[,mac=MAC][,mac-filter]`.
    fn from_str(text: &str) -> Result<Guest, String> {
        let mut parts = text.split(',');
        let mut guest = Guest {
            socket: parts.next().unwrap_or_default().into(),
            mac: None,
            mac_filter: false,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("mac", mac)) => {
                    guest.mac = Some(mac.parse().map_err(|error| format!("{part}: {error}"))?);
                }
                None if part == "mac-filter" => guest.mac_filter = true,
                _ => return Err(format!("`{part}`: give mac=MAC or mac-filter")),
            }
        }
        Ok(guest)
    }
}

impl Network {
    /// Checks what the parser has not. `option` makes the name of an option of its key.
    pub(crate) fn check(&self, option: impl Fn(&str) -> String) -> Result<(), String> {
        let wrong = |key: &str, fix: String| Err(format!("{}: {fix}", option(key)));
        let Network { mtu, queues, .. } = *self;
        if !(1..=MAX_PAIRS).contains(&queues) {
            return wrong("queues", format!("1 to {MAX_PAIRS}, not {queues}"));
        }
        if let Some(mtu) = mtu.filter(|mtu| !(MIN_MTU..=MAX_TAP_MTU).contains(mtu)) {
            return wrong("mtu", format!("{MIN_MTU} to {MAX_TAP_MTU}, not {mtu}"));
        }
        let is_switch = self.guests.len() > 1;
        let has_tap = self.tap.is_some() || !self.tap_fd.is_empty();
        let has_interface = has_tap || self.xdp.is_some();
        if !is_switch && !has_interface {
            let fix = "name the interface of the guest, or several guests for a switch";
            return wrong("tap", fix.to_owned());
        }
        if self.bridge.is_some() && self.tap.is_none() {
            return wrong("bridge", "needs tap".to_owned());
        }
        if self.share_tap && self.tap.is_none() {
            return wrong("share-tap", "needs tap".to_owned());
        }
        match self.xdp {
            Some(_) if has_tap => return wrong("xdp", "not together with a TAP".to_owned()),
            Some(first) if first.queue + u32::from(queues) > MAX_QUEUES => {
                return wrong("queues", format!("beyond queue {}", MAX_QUEUES - 1));
            }
            Some(_) if mtu.is_some_and(|mtu| mtu > MAX_XDP_MTU) => {
                return wrong("mtu", format!("at most {MAX_XDP_MTU} with xdp"));
            }
            None if self.xdp_drop_long => return wrong("xdp-drop-long", "needs xdp".to_owned()),
            None if self.xdp_copy => return wrong("xdp-copy", "needs xdp".to_owned()),
            _ => {}
        }
        if is_switch && (queues > 1 || self.tap_fd.len() > 1) {
            let fix = "a switch has one queue pair for each guest, and its uplink one queue";
            return wrong("queues", fix.to_owned());
        }
        if self.guests.is_empty() {
            return wrong("guests", "none".to_owned());
        }
        for (index, guest) in self.guests.iter().enumerate() {
            if let Err(reason) = sockets::check_path(&guest.socket) {
                return wrong("socket", reason.to_string());
            }
            if guest.mac_filter && guest.mac.is_none() {
                return wrong("mac-filter", "needs mac".to_owned());
            }
            let others = || self.guests.iter().take(index);
            if others().any(|other| other.socket == guest.socket) {
                let path = guest.socket.display();
                return wrong("socket", format!("{path}: used by two guests"));
            }
            if guest.mac.is_some() && others().any(|other| other.mac == guest.mac) {
                return wrong("mac", "used by two guests".to_owned());
            }
        }
        Ok(())
    }

    /// Adds what it needs of the sandbox.
    pub(crate) fn needs(&self, needs: &mut Needs) {
        let guests = self.guests.iter();
        guests.for_each(|guest| needs.socket(&guest.socket));
        if self.tap.is_some() || self.xdp.is_some() {
            needs.interface(self.xdp.is_some());
        }
    }

    /// Makes the interface and the sockets: for this the process may need capabilities. The carrier
    /// comes with the guest.
    pub(crate) fn open(
        self,
        common: &Common,
        interfaces: &mut Interfaces,
    ) -> Result<OpenedNetwork, Failure> {
        let carrier = self.open_carrier(interfaces)?;
        let mut files = Vec::new();
        let mut guests = Vec::new();
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        for guest in &self.guests {
            let (listener, file) = match sockets::bind_for_frontends(&guest.socket, common.access) {
                Ok(bound) => bound,
                Err(error) => {
                    // Closing a listener also closes the connections in its backlog, which may block.
                    reaper::run(move || drop(guests), None);
                    return Err(Failure::runtime(error));
                }
            };
            files.push(file);
            guests.push(GuestConfig {
                name: guest.socket.display().to_string(),
                listener,
                mac: guest.mac,
                mac_filter: guest.mac_filter,
                mtu: self.mtu,
                sealed_memory: common.sealed_memory,
                limits: Limits {
                    descriptors: DESCRIPTORS.min(descriptors / 2),
                    numbers: (2 * DESCRIPTORS).min(descriptors / 2),
                    mapped: common.max_memory,
                    mapped_each: common.max_memory,
                },
            });
        }
        Ok(OpenedNetwork {
            carrier,
            guests,
            files,
            spin: common.spin,
        })
    }

    fn open_carrier(&self, interfaces: &mut Interfaces) -> Result<Carrier, Failure> {
        let Some(first) = self.xdp else {
            let tap = self.open_tap()?;
            return Ok(tap.map_or(Carrier::None, Carrier::Tap));
        };
        let how = XdpQueueOptions {
            queues: self.queues,
            drop_long: self.xdp_drop_long,
            copy: self.xdp_copy,
            uplink: self.guests.len() > 1,
        };
        let (backend, claim) = xdp::open(first, how, interfaces)?;
        Ok(Carrier::Xdp(first.to_string(), Box::new(backend), claim))
    }

    fn open_tap(&self) -> Result<Option<Tap>, Failure> {
        if !self.tap_fd.is_empty() {
            let tap = Tap::from_numbers(&self.tap_fd);
            let tap = tap.map_err(|error| Failure::runtime(format_args!("--tap-fd: {error}")))?;
            return match tap.queues().len() {
                queues if queues > usize::from(MAX_PAIRS) => Err(Failure::usage(format_args!(
                    "--tap-fd: at most {MAX_PAIRS} queues"
                ))),
                _ => Ok(Some(tap)),
            };
        }
        let Some(name) = &self.tap else {
            return Ok(None);
        };
        let sharing = match self.share_tap {
            true => Sharing::Shared,
            false => Sharing::Exclusive,
        };
        let tap = Tap::open_with(name, self.queues, sharing).map_err(|error| {
            let remedy = match error {
                TapError::Access(AccessError::Shared { .. }) => {
                    "; end it, or permit this with --share-tap (share_tap)"
                }
                TapError::Access(AccessError::Owner { .. }) => {
                    ", or permit this with --share-tap (share_tap)"
                }
                _ => "",
            };
            Failure::runtime(format_args!("tap {name}: {error}{remedy}"))
        })?;
        let step = |what: &str, result: io::Result<()>| {
            result.map_err(|error| Failure::runtime(format_args!("{what}: {error}")))
        };
        if let Some(mtu) = self.mtu.filter(|mtu| !has_mtu(name, *mtu)) {
            step(&format!("mtu {mtu}: {name}"), name.set_mtu(mtu))?;
        }
        if let Some(bridge) = &self.bridge {
            name.join_bridge(bridge).map_err(|error| {
                Failure::runtime(format_args!(
                    "tap {name}: cannot be a port of bridge {bridge}: {}",
                    bridge_fault(bridge, &error)
                ))
            })?;
        }
        let up = name.bring_up();
        step(&format!("tap {name}: cannot bring it up"), up)?;
        Ok(Some(tap))
    }
}

/// Why an interface is no port of this bridge, and what to do.
fn bridge_fault(bridge: &InterfaceName, error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NODEV) => {
            format!("there is no bridge {bridge}: make it with `ip link add {bridge} type bridge`")
        }
        Some(Errno::OPNOTSUPP) => format!("{bridge} is no bridge"),
        Some(Errno::BUSY) => "it is a port of another bridge".to_owned(),
        _ => error.to_string(),
    }
}

fn has_mtu(name: &InterfaceName, mtu: u16) -> bool {
    name.mtu().is_ok_and(|has| has == u32::from(mtu))
}

/// What carries the frames of a network between its guests and the host.
enum Carrier {
    Tap(Tap),
    /// With its name, and the claim of the queues.
    Xdp(String, Box<XdpBackend>, Claim),
    /// Nothing: there are only guests.
    None,
}

/// A network with all that needs capabilities.
pub(crate) struct OpenedNetwork {
    carrier: Carrier,
    guests: Vec<GuestConfig>,
    files: Vec<SocketFile>,
    spin: Duration,
}

impl OpenedNetwork {
    /// Starts the threads.
    pub(crate) fn serve(self) -> Result<Serving, Failure> {
        let title = match &self.carrier {
            Carrier::Tap(tap) => tap.name().to_string(),
            Carrier::Xdp(name, ..) => name.clone(),
            Carrier::None => "switch".into(),
        };
        let failed = |error: io::Error| Failure::runtime(format_args!("{title}: {error}"));
        let (guests, spin) = (self.guests, self.spin);
        let count = guests.len();
        let mut claim = None;
        let server = match self.carrier {
            Carrier::Tap(tap) => {
                let backend = TapBackend::new(tap).map_err(failed)?;
                start(&title, guests, Some(backend), spin)
            }
            Carrier::Xdp(_, backend, queues) => {
                claim = Some(queues);
                start(&title, guests, Some(*backend), spin)
            }
            Carrier::None => start(&title, guests, None::<TapBackend>, spin),
        };
        let server = server.map_err(failed)?;
        info!(interface = %title, guests = count, "serving");
        Ok(Serving {
            server,
            _files: self.files,
            _claim: claim,
        })
    }
}

/// Starts the device of a single guest, or a switch.
fn start(
    title: &str,
    mut guests: Vec<GuestConfig>,
    backend: Option<impl Backend<Message = Never>>,
    spin: Duration,
) -> io::Result<Server> {
    match (backend, guests.pop()) {
        (Some(backend), Some(mut guest)) if guests.is_empty() => {
            title.clone_into(&mut guest.name);
            Server::start(guest, backend, spin)
        }
        (backend, last) => {
            guests.extend(last);
            let uplink = backend.map(|backend| (title.to_owned(), backend));
            Server::start_switch(guests, uplink, spin)
        }
    }
}

/// A network that runs.
pub(crate) struct Serving {
    server: Server,
    _files: Vec<SocketFile>,
    _claim: Option<Claim>,
}

impl Serving {
    /// Readable when the service has ended by itself.
    pub(crate) fn over(&self) -> BorrowedFd<'_> {
        self.server.over()
    }

    /// Whether the service has ended by itself.
    pub(crate) fn has_ended(&self) -> bool {
        let events = wait_ready(self.over(), PollFlags::IN, Some(Duration::ZERO));
        events.is_ok_and(|events| !events.is_empty())
    }

    /// Logs the counters of all devices.
    pub(crate) fn report(&self) {
        for (name, stats) in self.server.stats() {
            log_counters(name, &stats, "counters");
        }
    }

    /// Ends the service and logs the counters.
    pub(crate) fn shutdown(self) {
        for (name, stats) in self.server.shutdown() {
            log_counters(&name, &stats, "stopped");
        }
    }
}

fn log_counters(device: &str, stats: &NetStats, what: &str) {
    info!(
        device,
        rx_frames = stats.rx_frames,
        rx_bytes = stats.rx_bytes,
        rx_copied = stats.rx_copied,
        rx_no_room = stats.rx_no_room,
        rx_dropped = stats.rx_dropped,
        rx_long = stats.rx_long,
        rx_kernel_dropped = stats.rx_kernel_dropped,
        rx_ring_full = stats.rx_ring_full,
        rx_fill_empty = stats.rx_fill_empty,
        tx_frames = stats.tx_frames,
        tx_bytes = stats.tx_bytes,
        tx_copied = stats.tx_copied,
        tx_bad_header = stats.tx_bad_header,
        tx_runt = stats.tx_runt,
        tx_too_long = stats.tx_too_long,
        tx_spoofed = stats.tx_spoofed,
        tx_refused = stats.tx_refused,
        tx_link_down = stats.tx_link_down,
        tx_invalid = stats.tx_invalid,
        bad_chains = stats.bad_chains,
        control_refused = stats.control_refused,
        announcements = stats.announcements,
        notifications = stats.notifications,
        "{what}"
    );
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
