//! Datagrams arrive whole and with their source; errors of sends that cannot arrive.

use std::io::ErrorKind;
use std::thread;

use super::*;
use crate::common::{self, assert_bytes, bytes, eventually};

const LENGTHS: [usize; 8] = [0, 1, 44, 4096, 4097, 65535, 65536, 3];

/// Sends datagrams of many lengths from one to the other, and back.
fn there_and_back(one: &Datagram, other: &Datagram) {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        for (from, to) in [(one, other), (other, one)] {
            let sent = bytes(seed as u64, len);
            assert_eq!(from.send_to(&sent, to.local_addr()).unwrap(), len);
            let (got, source) = recv(to);
            assert_eq!(source, from.local_addr());
            assert_bytes(&got, &sent);
        }
    }
}

#[test]
fn between_a_process_and_the_host() {
    let hub = Hub::new();
    let process = hub.process();
    there_and_back(&at_host(&hub, PORT), &at(&process, Port::ANY));
}

#[test]
fn between_two_processes_of_a_host() {
    let hub = Hub::new();
    let (one, other) = (hub.process(), hub.process());
    there_and_back(&at(&one, PORT), &at(&other, PORT));
}

#[test]
fn between_siblings_through_the_daemon() {
    for workers in [1, 2] {
        let serve = Serve::new(workers);
        let (one, other) = (serve.process(), serve.process());
        there_and_back(&at(&one, PORT), &at(&other, PORT));
        // The workers count after the receiver has been notified.
        let all = 2 * LENGTHS.iter().sum::<usize>() as u64;
        eventually("all bytes are counted", || {
            let stats = serve.stats();
            (stats.in_place_bytes, stats.rx_bytes) == (all, all)
        });
        let copied = serve.stats().copied_bytes;
        assert_eq!(copied, 0, "none but from buffer to buffer");
    }
}

#[test]
fn in_fragments_where_buffers_are_small() {
    let small = |builder: EndpointBuilder| {
        builder
            .receive_buffers(1000)
            .transmit_buffers(3000)
            .queue_size(512)
    };
    let hub = Hub::new();
    let process = hub.process_with(small);
    there_and_back(&at_host(&hub, PORT), &at(&process, Port::ANY));
    let other = hub.process_with(small);
    there_and_back(&at(&other, PORT), &at(&process, PORT));
    let serve = Serve::new(1);
    let (one, other) = (serve.process_with(small), serve.process_with(small));
    there_and_back(&at(&one, PORT), &at(&other, PORT));
}

#[test]
fn one_that_no_queue_can_take_is_refused() {
    let hub = Hub::new();
    // 16 buffers of 1000 bytes.
    let process = hub.process_with(|b| {
        b.receive_buffers(1000)
            .transmit_buffers(1000)
            .queue_size(32)
    });
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let error = from.send_to(&[0; 20_000], to.local_addr()).unwrap_err();
        assert_eq!(reason(&error), DatagramError::TooLong(20_000));
        from.send_to(&[7; 8_000], to.local_addr()).unwrap();
        assert_eq!(recv(to).0, [7; 8_000]);
    }
}

#[test]
fn above_64_kib_is_refused() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let error = from.send_to(&[0; 65537], to.local_addr()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert_eq!(reason(&error), DatagramError::TooLong(65537));
    }
}

#[test]
fn a_small_buffer_truncates_and_the_full_length_is_returned() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        from.send_to(b"too long for it", to.local_addr()).unwrap();
        from.send_to(b"next", to.local_addr()).unwrap();
        let mut four = [0; 4];
        assert_eq!(to.peek_from(&mut four).unwrap(), (15, from.local_addr()));
        assert_eq!(to.recv_from(&mut four).unwrap(), (15, from.local_addr()));
        assert_eq!(&four, b"too ");
        assert_eq!(to.recv_from(&mut four).unwrap(), (4, from.local_addr()));
        assert_eq!(&four, b"next", "the rest of the first is gone");
    }
}

#[test]
fn a_connected_socket_receives_from_its_peer_only() {
    let hub = Hub::new();
    let (one, other) = (hub.process(), hub.process());
    let ours = at_host(&hub, PORT);
    let (one, other) = (at(&one, Port::ANY), at(&other, Port::ANY));
    assert_eq!(ours.send(b"x").unwrap_err().kind(), ErrorKind::NotConnected);
    ours.connect(other.local_addr());
    assert_eq!(ours.peer_addr(), Some(other.local_addr()));
    one.send_to(b"from a stranger", ours.local_addr()).unwrap();
    // The host's thread processes both in its turns.
    eventually("dropped", || ours.stats().dropped_not_peer == 1);
    other.send_to(b"from the peer", ours.local_addr()).unwrap();
    assert_eq!(recv(&ours), (b"from the peer".to_vec(), other.local_addr()));
    ours.send(b"back").unwrap();
    assert_eq!(recv(&other).0, b"back");
    assert_eq!(ours.drops().not_peer, 1);
    ours.disconnect();
    one.send_to(b"again", ours.local_addr()).unwrap();
    assert_eq!(recv(&ours).0, b"again");
}

#[test]
fn ports_are_not_those_of_streams() {
    let hub = Hub::new();
    let process = hub.process();
    let listener = process.listen(PORT, 1).unwrap();
    let theirs = at(&process, PORT);
    let host_listener = hub.listen(PORT, 1).unwrap();
    let ours = at_host(&hub, PORT);
    ours.send_to(b"datagram", theirs.local_addr()).unwrap();
    assert_eq!(recv(&theirs).0, b"datagram");
    thread::scope(|scope| {
        scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap());
        hub.connect(Address::new(process.cid(), PORT)).unwrap();
    });
    drop(host_listener);
    theirs.send_to(b"and back", ours.local_addr()).unwrap();
    assert_eq!(recv(&ours).0, b"and back");
}

#[test]
fn datagrams_without_a_receiver_are_dropped_and_counted() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    let nobody = |of: &Datagram| Address::new(of.local_addr().cid, Port::new(9));
    theirs.send_to(b"lost", nobody(&ours)).unwrap();
    eventually("counted", || ours.drops().no_socket == 1);
    ours.send_to(b"lost", nobody(&theirs)).unwrap();
    ours.send_to(b"found", theirs.local_addr()).unwrap();
    assert_eq!(recv(&theirs).0, b"found");
    assert_eq!(theirs.drops().no_socket, 1);
    // There is no such CID: only the side with the table of routes knows.
    let nowhere = Address::new(Cid::new(77), PORT);
    let error = ours.send_to(b"lost", nowhere).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
    assert_eq!(reason(&error), DatagramError::Unreachable);
    theirs.send_to(b"lost", nowhere).unwrap();
}

#[test]
fn endpoints_without_datagrams_have_streams_and_senders_get_an_error() {
    use crate::common::driver::{Driver, DriverConfig};
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    let there = Address::new(Cid::new(3), PORT);
    assert_eq!(
        reason(&ours.send_to(b"x", there).unwrap_err()),
        DatagramError::Unreachable,
        "no driver yet"
    );
    // A stock guest: it acknowledges neither bit.
    let mut config = DriverConfig::new(hub.vm());
    config.datagrams = false;
    let mut guest = Driver::attach(config).unwrap();
    let error = ours.send_to(b"x", there).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(reason(&error), DatagramError::PeerUnsupported);
    // Through the daemon the first datagram is lost, and later sends get an error.
    eventually("the sibling hears of it", || {
        match theirs.send_to(b"x", there) {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(reason(&error), DatagramError::PeerUnsupported);
                true
            }
        }
    });
    // Its streams still work.
    let listener = hub.listen(PORT, 1).unwrap();
    let host = Address::new(Cid::HOST, PORT);
    let stream = guest.wait_connect(host, common::deadline()).unwrap();
    guest
        .wait_send(stream, b"stock", common::deadline())
        .unwrap();
    let (accepted, _) = listener.accept_timeout(PATIENCE).unwrap();
    assert_eq!(accepted.recv().unwrap().unwrap().to_vec(), b"stock");
    assert_eq!(guest.stats().rx_malformed, 0, "nothing of type 3 came");
}

#[test]
fn a_send_at_a_device_without_datagrams_fails_with_no_datagrams() {
    let hub = Hub::new();
    let process = hub.process_with(|builder| builder.datagrams(false));
    let theirs = at(&process, PORT);
    let error = theirs
        .send_to(b"x", Address::new(Cid::HOST, PORT))
        .unwrap_err();
    assert_eq!(reason(&error), DatagramError::NoDatagrams);
}

#[test]
fn only_named_ports_are_bound() {
    let hub = Hub::new();
    let process = hub.process_with(|builder| builder.ports([PORT]));
    let error = Datagram::bind(&process, Port::new(7)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let theirs = at(&process, PORT);
    let ours = at_host(&hub, Port::ANY);
    ours.send_to(b"x", theirs.local_addr()).unwrap();
    assert_eq!(recv(&theirs).0, b"x");
    let closed = Address::new(process.cid(), Port::new(7));
    assert!(ours.send_to(b"x", closed).is_err());
}

#[test]
fn batches_and_shows() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (at_host(&hub, PORT), at(&process, PORT));
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let all: Vec<(Vec<u8>, Address)> = (0..40u64)
            .map(|seed| (bytes(seed, 100 + seed as usize), to.local_addr()))
            .collect();
        let mut sent = 0;
        while sent < all.len() {
            sent += from.send_many(&all[sent..]).unwrap();
        }
        let mut buffers = vec![[0; 120]; 20];
        let mut got = 0;
        while got < 20 {
            let more = to.recv_many(&mut buffers[got..]).unwrap();
            for (len, source) in more {
                assert_eq!((len, source), (100 + got, from.local_addr()));
                assert_bytes(
                    &buffers[got][..len.min(120)],
                    &bytes(got as u64, len)[..len.min(120)],
                );
                got += 1;
            }
        }
        while got < 40 {
            to.recv_each(40 - got, |datagram, source| {
                assert_eq!(source, from.local_addr());
                assert_bytes(&datagram.to_vec(), &bytes(got as u64, 100 + got));
                got += 1;
            })
            .unwrap();
        }
        assert_eq!(to.stats().received, 40);
        assert_eq!(from.stats().sent, 40);
    }
}

#[test]
fn a_socket_that_is_closed_leaves_its_port_and_its_leases() {
    let hub = Hub::new();
    let process = hub.process();
    let ours = at_host(&hub, PORT);
    let theirs = at(&process, PORT);
    for text in ["kept", "dropped", "dropped as well"] {
        theirs.send_to(text.as_bytes(), ours.local_addr()).unwrap();
    }
    let kept = ours.recv_lease().unwrap().into_owned().unwrap();
    drop(ours);
    assert_eq!(kept.to_vec(), b"kept");
    let ours = at_host(&hub, PORT);
    theirs.send_to(b"new", ours.local_addr()).unwrap();
    // Those that had not arrived when the first socket was closed are for this one.
    let late = std::iter::repeat_with(|| recv(&ours).0).take_while(|got| got != b"new");
    assert!(late.take(3).all(|got| got.starts_with(b"dropped")));
    drop(kept);
    // Every buffer has returned: as many datagrams as the queue has buffers pass, and once more.
    for _ in 0..300 {
        theirs.send_to(b"again", ours.local_addr()).unwrap();
        assert_eq!(recv(&ours).0, b"again");
    }
}

#[test]
fn a_service_is_the_host_at_its_ports() {
    let serve = Serve::new(2);
    let path = serve.dir.path().join("attach.sock");
    let service = Endpoint::builder()
        .ports([PORT])
        .attach_as_host(path)
        .unwrap();
    let process = serve.process();
    let (ours, theirs) = (at(&service, PORT), at(&process, Port::ANY));
    assert_eq!(ours.local_addr(), Address::new(Cid::HOST, PORT));
    there_and_back(&ours, &theirs);
    let error = Datagram::bind(&service, Port::new(9)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
