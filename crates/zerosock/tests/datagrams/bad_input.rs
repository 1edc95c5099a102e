//! Invalid datagrams of a guest, to the program that embeds the device and through the daemon to a
//! process: dropped, counted, bounded, and without effect on others.

use zerosock::vsock::DatagramDrops;
use zerosock_proto::vsock::datagram::data;

use super::hostile::{Guest, guest, guest_at};
use super::*;
use crate::common::{assert_bytes, bytes, eventually};

const OURS: Port = Port::new(40);

/// A bad guest, the socket that it sends to, and a pair of other sockets.
struct Scene {
    guest: Guest,
    /// The socket that the guest sends to.
    to: Datagram,
    good: [Datagram; 2],
    /// The daemon's counters, if there is a daemon.
    counts: Box<dyn Fn() -> Option<Stats>>,
    _keep: Box<dyn std::any::Any>,
}

impl Scene {
    /// The bad guest and the program that embeds its device.
    fn program(flow: bool) -> Scene {
        let hub = Hub::with(|builder| builder);
        let one = hub.process();
        Scene {
            guest: guest(&hub, true, flow),
            to: at_host(&hub, PORT),
            good: [at_host(&hub, Port::ANY), at(&one, PORT)],
            counts: Box::new(|| None),
            _keep: Box::new((hub, one)),
        }
    }

    /// The bad guest and a process that is attached to the daemon.
    fn sibling(flow: bool) -> Scene {
        let serve = std::sync::Arc::new(Serve::new(1));
        let (one, other) = (serve.process(), serve.process());
        let stats = serve.clone();
        Scene {
            guest: guest_at(&serve.vms[0].socket, true, flow),
            to: at(&one, PORT),
            good: [at(&one, Port::ANY), at(&other, PORT)],
            counts: Box::new(move || Some(stats.stats())),
            _keep: Box::new((serve, one, other)),
        }
    }

    /// Sends a packet of a datagram to a port of the receiver.
    fn part(&mut self, from: u32, to: Port, payload: &[u8], last: bool) {
        let from = Address::new(self.guest.raw.cid, Port::new(from));
        let to = Address::new(self.to.local_addr().cid, to);
        let header = data(from, to, payload.len() as u32, last);
        self.guest.raw.send(header, payload);
    }

    /// The receiver's next datagram is `wanted`, a valid one of the bad guest.
    fn still_hears(&mut self, wanted: &[u8]) {
        self.part(OURS.get(), PORT, wanted, true);
        let (got, from) = recv(&self.to);
        assert_eq!(from, Address::new(self.guest.raw.cid, OURS));
        assert_bytes(&got, wanted);
    }

    /// The receiver counts in its next call.
    fn counts(&self, what: &str, holds: impl Fn(DatagramDrops) -> bool) {
        self.to.set_nonblocking(true).unwrap();
        eventually(what, || {
            assert!(self.to.peek_from(&mut []).is_err(), "something has come");
            holds(self.to.drops())
        });
        self.to.set_nonblocking(false).unwrap();
    }

    /// The device that assembles datagrams has counted this many incomplete ones.
    fn counts_lost(&self, what: &str, of: impl Fn(DatagramDrops) -> u64, lost: u64) {
        match (self.counts)() {
            Some(_) => eventually(what, || {
                (self.counts)().is_some_and(|stats| stats.datagrams_dropped == lost)
            }),
            None => self.counts(what, |drops| of(drops) == lost),
        }
    }

    /// Waits for the daemon to count, if there is one: its worker counts after the receiver has
    /// been notified.
    fn daemon_counts(&self, what: &str, holds: impl Fn(&Stats) -> bool) {
        if (self.counts)().is_some() {
            eventually(what, || (self.counts)().is_some_and(|stats| holds(&stats)));
        }
    }

    /// Other sockets still exchange datagrams.
    fn others_are_unharmed(&self) {
        let [one, other] = &self.good;
        for number in 0..50 {
            for (from, to) in [(one, other), (other, one)] {
                let sent = bytes(number, 3000);
                from.send_to(&sent, to.local_addr()).unwrap();
                assert_bytes(&recv(to).0, &sent);
            }
        }
        for socket in &self.good {
            assert_eq!(socket.stats().dropped_full, 0);
        }
    }
}

fn both(flow: bool) -> [Scene; 2] {
    [Scene::program(flow), Scene::sibling(flow)]
}

#[test]
fn datagrams_without_a_receiver_are_counted_and_not_answered() {
    for mut scene in both(true) {
        for port in 0..300 {
            scene.part(OURS.get(), Port::new(1000 + port), b"to no port", true);
            let nowhere = Address::new(Cid::new(4000 + port), PORT);
            let us = Address::new(scene.guest.raw.cid, OURS);
            scene
                .guest
                .raw
                .send(data(us, nowhere, 0, true), b"to no CID");
        }
        scene.guest.raw.wait_tx_done();
        scene.counts("counted", |drops| drops.no_socket == 300);
        scene.daemon_counts("for a CID that nobody has", |stats| {
            stats.datagrams_dropped == 300
        });
        assert!(scene.guest.raw.try_recv().is_none(), "neither RST nor STOP");
        scene.others_are_unharmed();
        scene.still_hears(b"to somebody");
    }
}

/// From a guest without flow control, which would ignore STOP.
#[test]
fn datagrams_to_a_full_receiver_are_bounded_and_counted() {
    const MOST: u64 = 3000;
    for mut scene in both(false) {
        scene.to.set_receive_buffer(20_000);
        for _ in 0..MOST {
            scene.part(OURS.get(), PORT, &[1; 3000], true);
        }
        scene.guest.raw.wait_tx_done();
        scene.others_are_unharmed();
        scene.to.set_nonblocking(true).unwrap();
        // Datagrams that the daemon has kept may arrive later.
        let mut got = 0;
        eventually("each is received or counted", || {
            while scene.to.recv(&mut [0; 3000]).is_ok() {
                got += 1;
            }
            let dropped = scene.to.stats().dropped_full;
            let on_the_way = (scene.counts)().map_or(0, |stats| stats.datagrams_dropped);
            got + dropped + on_the_way == MOST
        });
        assert!((1..MOST).contains(&got), "{got} of {MOST}");
        if let Some(stats) = (scene.counts)() {
            let bound = (640 << 10) + 3000;
            assert!(stats.copied_bytes <= bound, "{} kept", stats.copied_bytes);
        } else {
            // 7 of 3000 bytes and 128.
            assert_eq!(got, 7, "and the last overshoots");
        }
        scene.to.set_nonblocking(false).unwrap();
        scene.still_hears(b"there is room again");
    }
}

#[test]
fn datagrams_above_64_kib_are_dropped_to_their_end() {
    for mut scene in both(true) {
        for round in 0..20 {
            // Half a megabyte as one datagram.
            for _ in 0..64 {
                scene.part(OURS.get(), PORT, &[7; 8000], false);
            }
            scene.part(OURS.get(), PORT, &[7; 100], true);
            scene.still_hears(&bytes(round, 2000));
        }
        // In one packet: no packet of vsock is longer.
        let (us, to) = (
            Address::new(scene.guest.raw.cid, OURS),
            scene.to.local_addr(),
        );
        let header = zerosock_proto::wire::vsock::Repr {
            len: 65537,
            ..data(us, to, 0, true)
        };
        scene.guest.raw.send_as(&header, &[7; 64]);
        scene.still_hears(b"whole");
        scene.daemon_counts("each is dropped", |stats| {
            stats.datagrams_dropped == 20 && stats.bad_packets > 20
        });
        match (scene.counts)() {
            // Of each sender at most the limit, and one datagram in assembly.
            Some(stats) => assert!(stats.copied_bytes <= 20 * 65536, "{}", stats.copied_bytes),
            None => assert_eq!(scene.to.drops().too_long, 20),
        }
        scene.others_are_unharmed();
    }
}

#[test]
fn fragments_that_are_missing_cost_their_datagram_alone() {
    const MOST: u32 = 500;
    for mut scene in both(true) {
        for port in 0..MOST {
            // Neither the middle nor the end of any comes.
            scene.part(port, PORT, &[7; 4000], false);
        }
        scene.still_hears(b"whole");
        // The first part is missing: a receiver cannot know, and the rest is a datagram of its own.
        scene.still_hears(b"an end");
        // The last datagram has one second.
        scene.part(OURS.get(), PORT, b"and no more", false);
        scene.counts_lost("incomplete", |drops| drops.incomplete, u64::from(MOST) + 1);
        scene.others_are_unharmed();
        // Its later packets have no beginning and are no datagram.
        scene.part(OURS.get(), PORT, b", too late", true);
        scene.still_hears(b"whole again");
    }
}

#[test]
fn fragments_out_of_order_are_no_datagram() {
    for mut scene in both(true) {
        let all = bytes(1, 9000);
        // The end first: it counts as a whole datagram, and the rest has no end.
        scene.still_hears(&all[6000..]);
        scene.part(OURS.get(), PORT, &all[3000..6000], false);
        scene.part(OURS.get(), PORT, &all[..3000], false);
        // Another datagram ends it.
        scene.part(41, PORT, b"whole", true);
        let (got, from) = recv(&scene.to);
        assert_eq!((&got[..], from.port.get()), (&b"whole"[..], 41));
        scene.counts_lost("incomplete", |drops| drops.incomplete, 1);
        scene.others_are_unharmed();
    }
}

#[test]
fn interleaved_fragments_never_mix() {
    for mut scene in both(true) {
        for _ in 0..100 {
            for (from, last) in [(40, false), (41, false), (40, true), (41, true)] {
                let what = if last { b"end" } else { b"one" };
                scene.part(from, PORT, what, last);
            }
            for from in [40, 41] {
                let (got, source) = recv(&scene.to);
                assert_eq!((&got[..], source.port.get()), (&b"end"[..], from));
            }
        }
        scene.counts_lost("incomplete", |drops| drops.incomplete, 200);
        scene.others_are_unharmed();
        scene.still_hears(b"whole");
    }
}
