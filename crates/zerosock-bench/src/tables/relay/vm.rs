//! The rows of `relay` with a guest: a relay in the guest between its kernel's vsock and a socket of the
//! guest, as in published comparisons of socat with sockmap.
//!
//! One program in the guest starts the relay, is its client, and measures; on the other side of vsock is
//! this process (virtio) or the same program (loopback).

use zerosock_relay::relay::Way;

use super::guest::MB_S;
use super::programs::{Relay, allows};
use crate::bench::Bench;
use crate::report::{Metric, Outcomes};
use crate::vm::{Relayed, Relaying, Setup, Vm};

const GUEST_CPU: Metric = Metric::lower("CPU of the guest", "s/GB");
const ARRIVED: Metric = Metric::higher("datagrams that arrive", "%");

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

/// The rows, or the reason why there are none.
pub(super) fn guests(bench: &mut Bench<'_>) {
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
        .filter(|(name, ..)| bench.settings.wants(name))
        .collect();
    if cases.is_empty() {
        return;
    }
    let vm = match Vm::boot(Setup::RELAY) {
        Ok(vm) => vm,
        Err(reason) => return bench.table.note_missing("VM", &reason),
    };
    bench.table.method.push_str(&format!(
        " VM: {}. A relay in the guest between its kernel's vsock and a program of the guest; the CPU \
         is that of the guest's processors.",
        vm.describe_kernel()
    ));
    if let Some(reason) = vm.socat() {
        bench.table.note_missing("socat in the guest", reason);
    }
    for (name, kind, cid) in cases {
        if kind == "udp" {
            datagrams_into(&vm, bench, &name, cid);
        } else {
            stream_from(&vm, bench, &name, kind, cid);
        }
    }
}

fn stream_from(vm: &Vm, bench: &mut Bench<'_>, name: &str, kind: &'static str, cid: u32) {
    let bytes = if bench.settings.quick { 1 } else { 32 } << 20;
    let relays = STREAMS.map(|(relay, way)| (relay.title(), (relay, way)));
    let outcomes = bench.measure(name, &bench.wanted(relays), |(relay, way)| {
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
            (Relay::Zerosock(way), Some(taken)) if !allows(*way, taken) => {
                Err(format!("it took the way {taken}"))
            }
            _ => Ok(relayed),
        }
    });
    add_rows(bench, name, &outcomes);
}

fn datagrams_into(vm: &Vm, bench: &mut Bench<'_>, name: &str, cid: u32) {
    let bytes = if bench.settings.quick { 500 } else { 6000 } * 1400;
    let outcomes = bench.measure(name, &bench.wanted(DATAGRAMS), |way| {
        vm.relay(&Relaying {
            way,
            kind: "udp",
            cid,
            is_from_vsock: false,
            bytes,
            chunk: 1400,
        })
    });
    add_rows(bench, name, &outcomes);
    bench.table.add_rows(name, ARRIVED, &outcomes, |relayed| {
        relayed.bytes as f64 * 100.0 / bytes as f64
    });
}

fn add_rows(bench: &mut Bench<'_>, name: &str, outcomes: &Outcomes<Relayed>) {
    bench.table.add_rows(name, MB_S, outcomes, Relayed::mb_s);
    bench
        .table
        .add_rows(name, GUEST_CPU, outcomes, Relayed::cpu_s_per_gb);
}
