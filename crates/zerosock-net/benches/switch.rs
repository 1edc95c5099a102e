//! Frames from one port of a switch to another, for instruction counts, which no other load disturbs:
//!
//! `valgrind --tool=callgrind --toggle-collect='*Worker*step*' PROGRAM small|large N`
//!
//! `small`: bursts of 32 frames of 64 bytes; `large`: bursts of 4 TSO frames of 64 KiB. `N` bursts pass.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use zerosock_net::interface::{Checksum, Gso, Interface, InterfaceConfig, Repr, Segments};
use zerosock_net::server::{GuestConfig, Limits, Server};
use zerosock_net::tap::TapBackend;

const TSO: Repr = Repr {
    checksum: Checksum::Partial {
        start: 34,
        offset: 16,
    },
    gso: Some(Gso {
        kind: Segments::Tcp4,
        ecn: false,
        size: 1448,
        hdr_len: 54,
    }),
};

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let (repr, len, burst) = match arguments.next().as_deref() {
        Some("large") => (TSO, 65_000, 4),
        _ => (Repr::PLAIN, 64, 32),
    };
    let bursts: usize = arguments.next().map_or(10, |word| word.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    let guests = paths.each_ref().map(|path| GuestConfig {
        name: "port".into(),
        listener: UnixListener::bind(path).unwrap(),
        mac: None,
        mac_filter: false,
        mtu: None,
        sealed_memory: true,
        limits: Limits {
            descriptors: 256,
            numbers: 512,
            mapped: 1 << 30,
            mapped_each: 1 << 30,
        },
    });
    let uplink = None::<(String, TapBackend)>;
    let server = Server::start_switch(guests.into(), uplink, Duration::ZERO).unwrap();
    let connect = |path| Interface::connect(path, &InterfaceConfig::default()).unwrap();
    let [a, b] = paths.each_ref().map(|path| connect(path));
    // The switch learns both addresses.
    pass(&b, &a, &Repr::PLAIN, 64, 1);
    for _ in 0..bursts {
        pass(&a, &b, &repr, len, burst);
    }
    println!("{} frames", bursts * burst);
    server.shutdown();
}

/// Sends a burst and waits until it has arrived.
fn pass(from: &Interface, to: &Interface, repr: &Repr, len: usize, burst: usize) {
    let addresses = [to.mac().0, from.mac().0].concat();
    let mut left = burst;
    for _ in 0..burst {
        let mut loan = from.loan(len).unwrap();
        loan.write(0, &addresses);
        loan.queue(repr).unwrap();
    }
    from.flush();
    while left > 0 {
        match to.recv() {
            Some(_) => left -= 1,
            None => drop(to.wait(None).unwrap()),
        }
    }
}
