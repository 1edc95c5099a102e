//! Guests that write their packets by hand: fragments, STOP and START, and malformed packets.

use std::time::Instant;

use zerosock_proto::vsock::datagram::{
    Control, F_DGRAM, F_DGRAM_FLOW, PauseSource, STOP_DURATION, data,
};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};

use super::*;
use crate::common::raw::{RX_LEN, RawGuest, connect};
use crate::common::{assert_bytes, bytes, eventually};

/// A guest that writes its packets by hand.
pub(crate) struct Guest {
    pub(crate) raw: RawGuest,
}

const OURS: Port = Port::new(40);

/// The guest of CID 3, with these features acknowledged.
pub(crate) fn guest(hub: &Hub, datagrams: bool, flow: bool) -> Guest {
    guest_at(&hub.vm(), datagrams, flow)
}

pub(crate) fn guest_at(socket: &std::path::Path, datagrams: bool, flow: bool) -> Guest {
    let mut features = 1 << 32 | 1 << 28;
    if datagrams {
        features |= F_DGRAM;
    }
    if flow {
        features |= F_DGRAM_FLOW;
    }
    let raw = RawGuest::with_features(connect(socket), true, features);
    Guest { raw }
}

impl Guest {
    fn us(&self, port: Port) -> Address {
        Address::new(self.raw.cid, port)
    }

    /// Sends a packet of a datagram to the host.
    fn part(&mut self, from: Port, to: Port, payload: &[u8], last: bool) {
        let to = Address::new(Cid::HOST, to);
        let header = data(self.us(from), to, payload.len() as u32, last);
        self.raw.send(header, payload);
    }

    pub(crate) fn datagram(&mut self, to: Port, payload: &[u8]) {
        self.part(OURS, to, payload, true);
    }

    /// The next packet of type DGRAM.
    #[track_caller]
    fn recv(&mut self) -> (Repr, Vec<u8>) {
        let datagram = SocketType::Datagram;
        self.raw
            .recv_where(|header| header.socket_type.known() == Some(datagram))
    }
}

#[test]
fn fragments_are_put_together_and_incomplete_sets_are_dropped() {
    let hub = Hub::new();
    let ours = at_host(&hub, PORT);
    let mut guest = guest(&hub, true, true);
    let all = bytes(1, 9000);
    guest.part(OURS, PORT, &all[..4000], false);
    guest.part(OURS, PORT, &all[4000..8000], false);
    guest.part(OURS, PORT, &all[8000..], true);
    let (got, from) = recv(&ours);
    assert_eq!(from, guest.us(OURS));
    assert_bytes(&got, &all);
    // The end is missing: the next datagram, of another port, arrives whole all the same.
    guest.part(OURS, PORT, b"lost", false);
    guest.part(Port::new(41), PORT, b"whole", true);
    assert_eq!(recv(&ours), (b"whole".to_vec(), guest.us(Port::new(41))));
    // Interleaved: of each datagram only the last packets remain.
    guest.part(OURS, PORT, b"a", false);
    guest.part(Port::new(41), PORT, b"b", false);
    guest.part(OURS, PORT, b"c", true);
    guest.part(Port::new(41), PORT, b"d", true);
    assert_eq!(recv(&ours).0, b"c");
    assert_eq!(recv(&ours).0, b"d");
    // Too long: dropped to its end.
    for _ in 0..9 {
        guest.part(OURS, PORT, &[0; 8000], false);
    }
    guest.part(OURS, PORT, &[0; 8000], true);
    guest.part(OURS, PORT, b"short", true);
    assert_eq!(recv(&ours).0, b"short");
    // Packets of streams may lie between.
    let _listener = hub.listen(PORT, 4).unwrap();
    guest.part(OURS, PORT, b"before ", false);
    guest.raw.connect(50, PORT.get());
    guest.part(OURS, PORT, b"and after", true);
    assert_eq!(recv(&ours).0, b"before and after");
}

#[test]
fn fragments_of_a_sibling_never_mix_with_others() {
    let serve = Serve::new(1);
    let process = serve.process();
    let theirs = at(&process, PORT);
    let mut guest = guest_at(&serve.vms[0].socket, true, true);
    let to = theirs.local_addr();
    let sender = guest.us(OURS);
    guest.raw.send(data(sender, to, 0, false), b"one ");
    let another = serve.process();
    at(&another, PORT).send_to(b"between", to).unwrap();
    assert_eq!(recv(&theirs).0, b"between");
    guest.raw.send(data(sender, to, 0, true), b"and two");
    assert_eq!(recv(&theirs), (b"one and two".to_vec(), sender));
}

#[test]
fn datagrams_to_a_guest_are_fragmented_to_its_buffers() {
    let hub = Hub::new();
    let ours = at_host(&hub, PORT);
    let mut guest = guest(&hub, true, true);
    let all = bytes(2, 10_000);
    ours.send_to(&all, guest.us(OURS)).unwrap();
    let mut got = Vec::new();
    loop {
        let (header, payload) = guest.recv();
        let last = got.len() + payload.len() == all.len();
        let len = payload.len() as u32;
        assert_eq!(header, data(ours.local_addr(), guest.us(OURS), len, last));
        assert!(last || len == RX_LEN, "every buffer but the last is full");
        got.extend(payload);
        if last {
            break;
        }
    }
    assert_bytes(&got, &all);
}

#[test]
fn words_to_a_guest_are_those_of_the_document() {
    let hub = Hub::new();
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(8000);
    let mut guest = guest(&hub, true, true);
    for _ in 0..3 {
        guest.datagram(PORT, &[0; 800]);
    }
    let stop = Control::Stop(PauseSource::Receiver);
    let (us, host) = (guest.us(OURS), ours.local_addr());
    assert_eq!(guest.recv().0, stop.emit(host, us));
    for _ in 0..3 {
        recv(&ours);
    }
    // A repeated STOP may be in flight.
    let (word, _) = guest
        .raw
        .recv_where(|header| header.op != stop.emit(us, us).op);
    assert_eq!(word, Control::Start(PauseSource::Receiver).emit(host, us));
}

#[test]
fn a_guest_without_flow_control_gets_no_stop_or_start() {
    let hub = Hub::with(|builder| builder);
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(8000);
    let mut guest = guest(&hub, true, false);
    for _ in 0..20 {
        guest.datagram(PORT, &[0; 800]);
    }
    // Its own STOP and START have no effect, and are counted as malformed.
    let word = Control::Stop(PauseSource::Receiver).emit(guest.us(OURS), ours.local_addr());
    guest.raw.send(word, &[]);
    guest.raw.wait_tx_done();
    ours.send_to(b"still sent", guest.us(OURS)).unwrap();
    assert_eq!(guest.recv().1, b"still sent", "the first of type DGRAM");
}

#[test]
fn stop_blocks_only_the_address_of_its_sender() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    ours.set_nonblocking(true).unwrap();
    let mut guest = guest(&hub, true, true);
    let stop = Control::Stop(PauseSource::Receiver);
    let send = |to: Address| ours.send_to(b"x", to).map_err(|error| error.kind());
    // From another endpoint's address: dropped, as any packet with a foreign source address.
    guest
        .raw
        .send(stop.emit(theirs.local_addr(), ours.local_addr()), &[]);
    guest
        .raw
        .send(stop.emit(guest.us(OURS), ours.local_addr()), &[]);
    eventually("blocked", || send(guest.us(OURS)).is_err());
    assert_eq!(send(theirs.local_addr()), Ok(1));
    assert_eq!(send(guest.us(Port::new(41))), Ok(1));
    assert_eq!(ours.stats().stopped, 1);
    guest.raw.send(
        Control::Start(PauseSource::Receiver).emit(guest.us(OURS), ours.local_addr()),
        &[],
    );
    eventually("free", || send(guest.us(OURS)).is_ok());
}

#[test]
fn a_flood_of_stop_and_start_affects_only_its_sender() {
    let serve = Serve::new(1);
    let (one, other) = (serve.process(), serve.process());
    let (ours, theirs) = (at(&one, PORT), at(&other, PORT));
    let mut guest = guest_at(&serve.vms[0].socket, true, true);
    let start = Instant::now();
    for port in 0..2000 {
        let word = match port % 2 {
            0 => Control::Unsupported,
            _ => Control::Stop(PauseSource::Switch),
        };
        let from = guest.us(Port::new(port));
        guest.raw.send(word.emit(from, ours.local_addr()), &[]);
        if port % 16 == 0 {
            one.drive().unwrap();
        }
    }
    guest.raw.wait_tx_done();
    ours.send_to(b"unharmed", theirs.local_addr()).unwrap();
    assert_eq!(recv(&theirs).0, b"unharmed");
    // 64 at once, and as many again after each time-out of a STOP, which a slow machine reaches.
    let time_outs = start.elapsed().as_millis() / STOP_DURATION.as_millis();
    let most = 64 * (1 + time_outs as u64);
    let stopped = ours.stats().stopped;
    assert!(stopped <= most, "{stopped} of {most}");
}

#[test]
fn rubbish_is_dropped() {
    let hub = Hub::new();
    let ours = at_host(&hub, PORT);
    let mut guest = guest(&hub, true, true);
    let (us, host) = (guest.us(OURS), ours.local_addr());
    for op in 0..0x7a30u16 {
        let known = Op::Rw as u16;
        if op != known && !(16..0x7a1e).contains(&op) {
            let header = Repr {
                op: op.into(),
                ..data(us, host, 0, true)
            };
            guest.raw.send(header, b"what is it");
        }
    }
    let stranger = Address::new(Cid::new(99), OURS);
    guest.raw.send(data(stranger, host, 0, true), b"not mine");
    let elsewhere = Address::new(Cid::new(99), PORT);
    guest.raw.send(data(us, elsewhere, 0, true), b"nobody's");
    guest.raw.send(data(us, us, 0, true), b"my own");
    // Reserved fields and unknown flags are ignored.
    let odd = Repr {
        flags: u32::MAX,
        buf_alloc: 7,
        fwd_cnt: 9,
        ..data(us, host, 0, true)
    };
    guest.raw.send(odd, b"good");
    assert_eq!(recv(&ours), (b"good".to_vec(), us));
    guest.raw.wait_tx_done();
    assert!(guest.raw.try_recv().is_none(), "no RST");
}

#[test]
fn sources_without_number_are_bounded() {
    let hub = Hub::with(|builder| builder);
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(4000);
    let mut guest = guest(&hub, true, true);
    for port in 0..1000 {
        guest.part(Port::new(port), PORT, &[0; 200], true);
        while guest.raw.try_recv().is_some() {}
    }
    guest.raw.wait_tx_done();
    // Another source still gets STOP.
    let process = hub.process();
    let theirs = at(&process, Port::ANY);
    theirs.send_to(b"x", ours.local_addr()).unwrap();
    eventually("told to stop", || {
        process.drive().unwrap();
        theirs.stats().stopped > 0
    });
}

#[test]
fn a_guest_that_never_reads_costs_its_own() {
    let serve = Serve::new(1);
    let (one, other) = (serve.process(), serve.process());
    let (ours, theirs) = (at(&one, Port::ANY), at(&other, PORT));
    let guest = guest_at(&serve.vms[0].socket, true, true);
    let there = guest.us(OURS);
    ours.set_nonblocking(true).unwrap();
    eventually("it is blocked", || {
        one.drive().unwrap();
        let refused = ours.send_to(&[0; 4000], there).is_err();
        refused && ours.stats().stopped > 0
    });
    ours.set_nonblocking(false).unwrap();
    for _ in 0..1000 {
        ours.send_to(&[1; 4000], theirs.local_addr()).unwrap();
        assert_eq!(recv(&theirs).0, [1; 4000]);
    }
    let copied = serve.stats().copied_bytes;
    assert!(copied < 1 << 20, "{copied} bytes were kept for it");
}
