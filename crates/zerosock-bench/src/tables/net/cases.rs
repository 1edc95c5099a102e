//! The cases of the table, its metrics and its method.

use super::nic::{Case, Direction};
use super::rings::Course;
use crate::args::Settings;
use crate::report::Metric;

pub(super) const MB_S: Metric = Metric::higher("throughput", "MB/s");
pub(super) const OUTSIDE: Metric = Metric::lower("CPU outside the processors", "s/GB");
/// Without the VMM's part, which is mostly that of interrupts of the guest. A back-end inside the VMM has
/// no part of its own.
pub(super) const BACK_END: Metric = Metric::lower("CPU of the back-end", "s/GB");
pub(super) const TRIP: Metric = Metric::lower("round trip p50", "us");

pub(super) const FRAMES: Metric = Metric::higher("frames", "10^6/s");

pub(super) const CPU: Metric = Metric::lower("CPU", "ns/frame");

/// The cases at a network card.
pub(super) const NIC_CASES: [(&str, Case); 6] = [
    ("NIC, transmit, 60 B", nic(Direction::Transmit, 60, false)),
    (
        "NIC, transmit, 1514 B",
        nic(Direction::Transmit, 1514, false),
    ),
    (
        "NIC, transmit, 1514 B, two cores",
        nic(Direction::Transmit, 1514, true),
    ),
    ("NIC, receive, 60 B", nic(Direction::Receive, 60, false)),
    ("NIC, receive, 1514 B", nic(Direction::Receive, 1514, false)),
    (
        "NIC, receive, 1514 B, two cores",
        nic(Direction::Receive, 1514, true),
    ),
];

const fn nic(direction: Direction, size: usize, has_own_core: bool) -> Case {
    Case {
        direction,
        size,
        has_own_core,
    }
}

/// The cases of the rings alone: the way of the frames, and their bytes.
pub(super) const RING_CASES: [(&str, Course, usize); 4] = [
    ("rings, 64 B, there and back", Course::Back, 64),
    ("rings, 1500 B, there and back", Course::Back, 1500),
    ("rings, 64 B, port to port", Course::Across, 64),
    ("rings, 1500 B, port to port", Course::Across, 1500),
];

pub(super) const METHOD: &str = "Rings: a driver and a device without a VM, one core each, both polling; the driver \
    writes and reads every byte of at most 192 frames in flight, and the device copies. NIC: the same \
    driver, which sleeps when idle, and its device at one end of a veth pair, without offloads, all on one \
    core unless the row says two; CPU is that of the device and the kernel, to receive also of the thread \
    that sends and receives. The rest: \
    iperf3 over one TCP connection, and ping. The client is in a guest; the server is on the host, or in \
    another guest. CPU is that of the back-end and of QEMU's threads that are no virtual processors, for \
    10^9 bytes received. Guests have one processor and are emulated (tcg,thread=multi); a back-end that \
    polls is stopped while others are measured. Everything is in a network namespace, with Reno as \
    congestion control of the host.";

/// The names of the cases of a group of links.
pub(super) struct Cases {
    pub(super) there: &'static str,
    pub(super) back: Option<&'static str>,
    pub(super) ping: &'static str,
    /// Whether CPU outside of the virtual processors can be told.
    pub(super) has_outside: bool,
}

pub(super) const LAN: Cases = Cases {
    there: "VM to host, TCP",
    back: Some("host to VM, TCP"),
    ping: "VM and host, ping",
    has_outside: true,
};
pub(super) const USER_MODE: Cases = Cases {
    there: "user-mode Linux to host, TCP",
    back: Some("host to user-mode Linux, TCP"),
    ping: "user-mode Linux and host, ping",
    has_outside: false,
};
pub(super) const PAIR: Cases = Cases {
    there: "VM to VM, TCP",
    back: None,
    ping: "VM and VM, ping",
    has_outside: true,
};

impl Cases {
    /// Whether one of the cases was selected.
    pub(super) fn is_wanted(&self, settings: &Settings) -> bool {
        let names = [Some(self.there), self.back, Some(self.ping)];
        names.into_iter().flatten().any(|name| settings.wants(name))
    }
}
