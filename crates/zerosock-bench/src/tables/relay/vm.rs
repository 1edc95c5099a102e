//! The rows of `relay` with a guest: a relay in the guest between its kernel's vsock and a socket of the
//! guest, as in published comparisons of socat with sockmap.
//!
//! One program in the guest starts the relay, is its client, and measures; on the other side of vsock is
//! this process (virtio) or the same program (loopback).

use super::programs::{Relay, Way};
use super::{Bench, MB_S};
use crate::report::Metric;
use crate::rounds::alternate;
use crate::vm::{Relaying, Setup, Vm};

const GUEST_CPU: Metric = Metric {
    name: "CPU of the guest",
    unit: "s/GB",
    higher_is_better: false,
};
const ARRIVED: Metric = Metric {
    name: "datagrams that arrive",
    unit: "%",
    higher_is_better: true,
};

/// CIDs of the other side.
const SIDES: [(&str, u32); 2] = [("virtio", 2), ("loopback", 1)];

/// Contestants of streams from vsock, as the program in the guest knows them. The first is zerosock.
const STREAMS: [(Relay, &str); 5] = [
    (Relay::Zerosock(Way::Auto), "relay-auto"),
    (Relay::Socat(8192), "socat"),
    (Relay::Zerosock(Way::Copy), "relay-copy"),
    (Relay::Zerosock(Way::Splice), "relay-splice"),
    (Relay::Zerosock(Way::Sockmap), "relay-sockmap"),
];

/// Contestants of datagrams into vsock. `zerosock relay` keeps the bounds of datagrams, which a stream has
/// not: the library redirects, and copies.
const DATAGRAMS: [(&str, &str); 3] = [
    ("zerosock_relay::sockmap", "sockmap"),
    ("socat -b 8192", "socat"),
    ("a copying loop", "copy"),
];

impl Bench<'_> {
    /// The rows, or the reason why there are none.
    pub(super) fn guests(&mut self) {
        let streams = ["tcp", "unix"].map(|kind| {
            SIDES.map(|(side, cid)| {
                let to = if kind == "tcp" { "TCP" } else { "Unix" };
                (format!("VM vsock to {to}, {side}, 64 KiB"), kind, cid)
            })
        });
        let datagrams =
            SIDES.map(|(side, cid)| (format!("VM UDP to vsock, {side}, 1400 B"), "udp", cid));
        let cases = streams.into_iter().flatten().chain(datagrams);
        let cases: Vec<_> = cases
            .filter(|(name, ..)| self.settings.wants(name))
            .collect();
        if cases.is_empty() {
            return;
        }
        let vm = match Vm::boot(Setup::RELAY) {
            Ok(vm) => vm,
            Err(reason) => return self.table.note_missing("VM", &reason),
        };
        self.table.method.push_str(&format!(
            " VM: {}. A relay in the guest between its kernel's vsock and a program of the guest; the CPU \
             is that of the guest's processors.",
            vm.describe_kernel()
        ));
        if let Some(reason) = vm.socat() {
            self.table.note_missing("socat in the guest", reason);
        }
        for (name, kind, cid) in cases {
            if kind == "udp" {
                self.guest_datagrams(&vm, &name, cid);
            } else {
                self.guest_stream(&vm, &name, kind, cid);
            }
        }
    }

    fn guest_stream(&mut self, vm: &Vm, name: &str, kind: &'static str, cid: u32) {
        let all = STREAMS
            .into_iter()
            .map(|(relay, way)| (relay.title(), relay, way));
        let wanted: Vec<_> = all
            .filter(|(title, relay, _)| *relay == STREAMS[0].0 || self.settings.is_against(title))
            .collect();
        let bytes = if self.settings.quick { 1 } else { 32 } << 20;
        let outcomes = alternate(self.settings.rounds, wanted.len(), |round, at| {
            let (title, relay, way) = &wanted[at];
            progress!("{name}: round {}, {title}", round + 1);
            let relaying = Relaying {
                way,
                kind,
                cid,
                is_from_vsock: true,
                bytes,
                chunk: 64 << 10,
            };
            let relayed = vm.relay(&relaying)?;
            match (relay, &relayed.way) {
                (Relay::Zerosock(way), Some(taken)) if !way.allows(taken) => {
                    Err(format!("it took the way {taken}"))
                }
                _ => Ok(relayed),
            }
        });
        let titles: Vec<_> = wanted.into_iter().map(|(title, ..)| title).collect();
        self.rows(name, MB_S, &titles, &outcomes, |relayed| relayed.mb_s());
        self.rows(name, GUEST_CPU, &titles, &outcomes, |relayed| {
            relayed.cpu_s_per_gb()
        });
    }

    fn guest_datagrams(&mut self, vm: &Vm, name: &str, cid: u32) {
        let count = if self.settings.quick { 500 } else { 6000 };
        let wanted: Vec<_> = DATAGRAMS
            .into_iter()
            .filter(|(title, _)| *title == DATAGRAMS[0].0 || self.settings.is_against(title))
            .collect();
        let outcomes = alternate(self.settings.rounds, wanted.len(), |round, at| {
            let (title, way) = wanted[at];
            progress!("{name}: round {}, {title}", round + 1);
            vm.relay(&Relaying {
                way,
                kind: "udp",
                cid,
                is_from_vsock: false,
                bytes: count * 1400,
                chunk: 1400,
            })
        });
        let titles: Vec<_> = wanted.iter().map(|(title, _)| title.to_string()).collect();
        self.rows(name, MB_S, &titles, &outcomes, |relayed| relayed.mb_s());
        self.rows(name, GUEST_CPU, &titles, &outcomes, |relayed| {
            relayed.cpu_s_per_gb()
        });
        self.rows(name, ARRIVED, &titles, &outcomes, |relayed| {
            relayed.bytes as f64 * 100.0 / (count * 1400) as f64
        });
    }
}
