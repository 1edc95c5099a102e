//! Guests on a switch, and its uplink.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tempfile::TempDir;
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::stats::NetStats;
use zerosock_net::tap::TapBackend;
use zerosock_proto::wire::net::{
    F_CSUM, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, Header, Mac, NEEDS_CSUM,
};
use zerosock_sys::network;
use zerosock_sys::tun::{InterfaceName, Tap};

use super::driver::Driver;
use super::frames::{is_complete_udp, plain, tcp, tso, udp};
use super::network::{DEADLINE, LIMITS, Network, Setup, isolated, receive_from, wait_until};

const ALL: u64 = F_MRG_RXBUF | F_CSUM | F_GUEST_CSUM | F_GUEST_TSO4 | F_HOST_TSO4;
/// Longer than a frame waits for its receiver.
const QUIET: Duration = Duration::from_millis(200);

/// A switch with the guests `a`, `b` and so on.
pub(crate) struct Lan {
    pub(crate) server: Server,
    sockets: Vec<PathBuf>,
    _dir: TempDir,
}

fn config(name: &str, listener: UnixListener, mac: Option<Mac>) -> GuestConfig {
    GuestConfig {
        name: name.into(),
        listener,
        mac,
        mac_filter: mac.is_some(),
        mtu: None,
        sealed_memory: false,
        limits: LIMITS,
    }
}

impl Lan {
    pub(crate) fn new(macs: &[Option<Mac>], uplink: Option<(String, TapBackend)>) -> Lan {
        let dir = tempfile::tempdir().unwrap();
        let sockets: Vec<_> = (0..macs.len())
            .map(|index| dir.path().join(index.to_string()))
            .collect();
        let guests = sockets.iter().zip(macs);
        let guests = guests.map(|(socket, mac)| {
            let listener = UnixListener::bind(socket).unwrap();
            config("guest", listener, *mac)
        });
        let guests = guests.collect();
        let server = Server::start_switch(guests, uplink, Duration::ZERO).unwrap();
        Lan {
            server,
            sockets,
            _dir: dir,
        }
    }

    pub(crate) fn attach(&self, index: usize, features: u64) -> Driver {
        let mut driver = Driver::attach(&self.sockets[index], features, 2);
        // The device has started both queues when it has answered.
        driver.frontend.sync().unwrap();
        driver
    }

    fn stats(&self, index: usize) -> NetStats {
        self.server.stats()[index].1
    }
}

pub(crate) fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

const BROADCAST: Mac = Mac([0xff; 6]);

pub(crate) fn addressed(mut frame: Vec<u8>, to: Mac, from: Mac) -> Vec<u8> {
    frame[..6].copy_from_slice(&to.0);
    frame[6..12].copy_from_slice(&from.0);
    frame
}

pub(crate) fn frame(to: Mac, from: Mac, len: usize, seed: u8) -> Vec<u8> {
    addressed(plain(len, seed), to, from)
}

/// Makes the switch know the address of each driver: each sends a broadcast, which the others get.
pub(crate) fn introduce(drivers: &mut [&mut Driver]) {
    for from in 0..drivers.len() {
        let hello = frame(BROADCAST, mac(from as u8), 60, from as u8);
        for (to, driver) in drivers.iter_mut().enumerate() {
            if to != from {
                driver.post(0, &[2048]);
            }
        }
        drivers[from].send(0, &Header::default(), &hello, &[]);
        drivers[from].wait_sent(0);
        for (to, driver) in drivers.iter_mut().enumerate() {
            if to != from {
                assert_eq!(driver.receive(0).1, hello);
            }
        }
    }
}

#[test]
fn frames_go_to_their_port_only_and_broadcasts_to_all_others() {
    let lan = Lan::new(&[None; 3], None);
    let (mut a, mut b, mut c) = (lan.attach(0, ALL), lan.attach(1, ALL), lan.attach(2, 0));
    introduce(&mut [&mut a, &mut b, &mut c]);
    for (seed, len) in (1..).zip([14, 15, 60, 1514, 9000]) {
        let sent = frame(mac(1), mac(0), len, seed);
        for lens in [&[12][..], &[], &[5, 9, 1, 7, 3, 2]] {
            b.post_many(0, 8, 1536);
            c.post(0, &[2048]);
            a.send(0, &Header::default(), &sent, lens);
            a.wait_sent(0);
            assert_eq!(b.receive(0).1, sent);
        }
    }
    // The next frame that the third one gets is its own.
    let last = frame(mac(2), mac(1), 60, 99);
    b.send(0, &Header::default(), &last, &[]);
    assert_eq!(c.receive(0).1, last);
    for driver in [&a, &b, &c] {
        driver.check_guards();
    }
    assert_eq!(lan.stats(1).rx_copied, 0, "copied more than once");
    lan.server.shutdown();
}

#[test]
fn a_64_kib_tso_frame_crosses_as_one() {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, ALL));
    introduce(&mut [&mut a, &mut b]);
    let (partial, bytes) = tcp(65_000, 3);
    let (header, sent) = (tso(partial), addressed(bytes, mac(1), mac(0)));
    for _ in 0..3 {
        b.post_many(0, 50, 1536);
        a.send(0, &header, &sent, &[12, 54, 4096, 10_000, 20_000, 7]);
        a.wait_sent(0);
        let (mut received_header, received) = b.receive(0);
        assert_eq!(received, sent);
        received_header.set_num_buffers(header.num_buffers());
        assert_eq!(received_header, header);
    }
    assert_eq!(lan.stats(1).rx_copied, 0);
    b.check_guards();
    lan.server.shutdown();
}

/// The kernel's segments, through a TAP, are the yardstick.
#[test]
fn a_driver_without_offloads_gets_the_segments_that_the_kernel_would_make() {
    isolated(
        "a_driver_without_offloads_gets_the_segments_that_the_kernel_would_make",
        || {
            let network = Network::new(&Setup::default());
            let lan = Lan::new(&[None; 2], None);
            for (features, payload, flags) in [
                (0, 14_480, 0x90),
                (0, 14_000, 0x99),
                (F_CSUM | F_GUEST_CSUM, 10_001, 0x18),
            ] {
                let mut wanted = network.attach(features);
                let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, features));
                introduce(&mut [&mut a, &mut b]);
                let (partial, mut frame) = tcp(payload, 5);
                frame[47] = flags;
                frame[38..42].copy_from_slice(&0xffff_f000_u32.to_be_bytes());
                frame[18..20].copy_from_slice(&0xfffe_u16.to_be_bytes());
                // The sum of the pseudo header.
                let sum = pseudo_sum(&frame);
                frame[50..52].copy_from_slice(&sum.to_be_bytes());
                let header = tso(partial);
                wanted.post_many(0, 12, 2048);
                network.send(&header, &addressed(frame.clone(), mac(1), mac(0)));
                b.post_many(0, 12, 2048);
                a.send(0, &header, &addressed(frame, mac(1), mac(0)), &[12, 40]);
                a.wait_sent(0);
                for index in 0..payload.div_ceil(1448) {
                    let (header, bytes) = wanted.receive(0);
                    let (ours, our_bytes) = b.receive(0);
                    assert_eq!(our_bytes, bytes, "segment {index} of {payload}");
                    assert_eq!(ours.flags() & NEEDS_CSUM, header.flags() & NEEDS_CSUM);
                    assert_eq!(ours.gso_type(), 0);
                }
                b.check_guards();
            }
            assert!(lan.stats(1).rx_copied > 0);
            lan.server.shutdown();
        },
    );
}

#[test]
fn a_partial_checksum_is_completed_and_too_many_segments_are_dropped() {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, 0));
    introduce(&mut [&mut a, &mut b]);
    let (header, frame) = tcp(1001, 9);
    let mut sent = addressed(frame, mac(1), mac(0));
    let sum = pseudo_sum(&sent);
    sent[50..52].copy_from_slice(&sum.to_be_bytes());
    b.post(0, &[2048]);
    a.send(0, &header, &sent, &[]);
    a.wait_sent(0);
    let (received, bytes) = b.receive(0);
    assert_eq!((received.flags(), bytes.len()), (0, sent.len()));
    // With the sum of the pseudo header added, the sum of all is that of no error.
    let all = ones_sum(&bytes[34..]) + u32::from(pseudo_sum(&sent));
    assert_eq!((all & 0xffff) + (all >> 16), 0xffff);

    let (partial, frame) = tcp(60_000, 9);
    let mut header = tso(partial);
    header.set_gso_size(1);
    a.send(0, &header, &addressed(frame, mac(1), mac(0)), &[]);
    a.wait_sent(0);
    wait_until("it is dropped", || lan.stats(1).rx_dropped == 1);
    lan.server.shutdown();
}

/// The server is a guest, and so is the client.
#[test]
fn a_dhcp_reply_of_a_guest_has_its_whole_checksum() {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, ALL));
    introduce(&mut [&mut a, &mut b]);
    for (port, completed) in [(67, true), (53, false)] {
        let (header, bytes) = udp(port, 301);
        let sent = addressed(bytes, mac(1), mac(0));
        b.post_many(0, 8, 64);
        a.send(0, &header, &sent, &[12, 30, 5]);
        a.wait_sent(0);
        let (received, bytes) = b.receive(0);
        assert_eq!(is_complete_udp(&bytes), completed);
        let flags = if completed { 0 } else { NEEDS_CSUM };
        assert_eq!(received.flags(), flags);
        assert_eq!((&bytes[..40], &bytes[42..]), (&sent[..40], &sent[42..]));
    }
    b.check_guards();
    lan.server.shutdown();
}

fn ones_sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2);
    let sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum & 0xffff) + (sum >> 16)
}

/// The sum of the pseudo header of a frame of [`tcp`].
fn pseudo_sum(frame: &[u8]) -> u16 {
    let mut pseudo = frame[26..34].to_vec();
    pseudo.extend([0, 6]);
    pseudo.extend((frame.len() as u16 - 34).to_be_bytes());
    ones_sum(&pseudo) as u16
}

#[test]
fn a_frame_without_buffers_is_copied_and_its_sender_gets_its_own_back() {
    let lan = Lan::new(&[None; 2], None);
    let (mut a, mut b) = (lan.attach(0, 0), lan.attach(1, 0));
    introduce(&mut [&mut a, &mut b]);
    let sent = frame(mac(1), mac(0), 200, 1);
    a.send(0, &Header::default(), &sent, &[]);
    a.wait_sent(0);
    a.write(a.last_buffer() + 12, &frame(mac(7), mac(9), 200, 0x55));
    b.post(0, &[2048]);
    assert_eq!(b.receive(0).1, sent);
    assert_eq!(lan.stats(1).rx_copied, 200, "counted as copied once more");
    lan.server.shutdown();
}

#[test]
fn a_guest_that_never_refills_stops_no_other() {
    /// Frames that wait at a port.
    const WAITING: u16 = 1024;
    const SENT: u16 = WAITING + 76;
    let lan = Lan::new(&[None; 3], None);
    let (mut a, mut b, mut c) = (lan.attach(0, 0), lan.attach(1, 0), lan.attach(2, 0));
    introduce(&mut [&mut a, &mut b, &mut c]);
    let numbered = |number: u16| {
        let mut sent = frame(mac(1), mac(0), 60, 0);
        sent[20..22].copy_from_slice(&number.to_le_bytes());
        sent
    };
    for number in 0..SENT {
        a.send(0, &Header::default(), &numbered(number), &[]);
        if number % 16 == 0 {
            let sent = frame(mac(2), mac(0), 200, number as u8);
            c.post(0, &[2048]);
            a.send(0, &Header::default(), &sent, &[]);
            a.wait_sent(0);
            assert_eq!(c.receive(0).1, sent);
        }
        a.wait_sent(0);
    }
    wait_until("the last ones are dropped", || {
        lan.stats(1).rx_no_room == u64::from(SENT - WAITING)
    });
    // The others wait for as long as it likes.
    for number in 0..WAITING {
        b.post(0, &[1536]);
        assert_eq!(b.receive(0).1, numbered(number));
    }
    // A long frame has its share of room: 4 MiB for all.
    for seed in 0..100 {
        let sent = frame(mac(1), mac(0), 60_000, seed);
        a.send(0, &Header::default(), &sent, &[]);
        a.wait_sent(0);
    }
    wait_until("the last ones are dropped", || {
        lan.stats(1).rx_no_room == u64::from(SENT - WAITING) + 100 - (4 << 20) / 60_000
    });
    // What waits goes with the guest.
    drop(b);
    wait_until("all that wait are dropped", || {
        lan.stats(1).rx_dropped == (4 << 20) / 60_000
    });
    lan.server.shutdown();
}

#[test]
fn a_sender_stops_resets_and_goes_while_copies_of_its_frames_wait() {
    let lan = Lan::new(&[None; 2], None);
    let mut b = lan.attach(1, 0);
    for round in 0..4 {
        let mut a = lan.attach(0, 0);
        introduce(&mut [&mut a, &mut b]);
        let sent = |seed| frame(mac(1), mac(0), 200, seed);
        for seed in 0..10 {
            a.send(0, &Header::default(), &sent(seed), &[]);
        }
        // With one broadcast in each round.
        let taken = 11 * (round + 1);
        wait_until("all are taken", || lan.stats(0).tx_frames == taken);
        match round {
            0 => {
                let base = a.frontend.get_vring_base(1).unwrap();
                assert_eq!(base, a.used_index(1), "all that was taken is returned");
            }
            1 => {
                a.send_memory();
                a.frontend.sync().unwrap();
            }
            2 => a.frontend.reset_device().unwrap(),
            _ => {}
        }
        drop(a);
        b.post_many(0, 10, 2048);
        for seed in 0..10 {
            assert_eq!(b.receive(0).1, sent(seed));
        }
    }
    // Both ends work as before.
    let mut a = lan.attach(0, 0);
    introduce(&mut [&mut a, &mut b]);
    a.check_guards();
    b.check_guards();
    lan.server.shutdown();
}

/// Each of them costs a copy for each receiver.
#[test]
fn frames_for_several_ports_are_limited_until_all_have_them() {
    let lan = Lan::new(&[None; 3], None);
    let (mut a, mut b, mut c) = (lan.attach(0, 0), lan.attach(1, 0), lan.attach(2, 0));
    introduce(&mut [&mut a, &mut b, &mut c]);
    // All are sent in the turn that begins with the queue: 2 copies of 60 000 bytes each.
    a.frontend.set_vring_enable(1, false).unwrap();
    a.frontend.sync().unwrap();
    for seed in 0..12 {
        let sent = frame(BROADCAST, mac(0), 60_000, seed);
        a.queue(0, &Header::default(), &sent);
    }
    a.frontend.set_vring_enable(1, true).unwrap();
    for _ in 0..12 {
        a.wait_sent(0);
    }
    let stats = lan.stats(0);
    assert_eq!((stats.tx_frames, stats.tx_refused), (1 + 8, 4));
    // They are sent again after that.
    let again = frame(BROADCAST, mac(0), 1000, 1);
    a.send(0, &Header::default(), &again, &[]);
    a.wait_sent(0);
    assert_eq!(lan.stats(0).tx_refused, 4);
    // 256 segments of one byte each are charged as 64 KiB at each receiver, before one of them cuts.
    drop(a);
    let mut a = lan.attach(0, F_CSUM | F_HOST_TSO4);
    a.frontend.set_vring_enable(1, false).unwrap();
    a.frontend.sync().unwrap();
    for seed in 0..12 {
        let (partial, bytes) = tcp(256, seed);
        let mut header = tso(partial);
        header.set_gso_size(1);
        a.queue(0, &header, &addressed(bytes, BROADCAST, mac(0)));
    }
    a.frontend.set_vring_enable(1, true).unwrap();
    for _ in 0..12 {
        a.wait_sent(0);
    }
    let stats = lan.stats(0);
    assert_eq!((stats.tx_frames, stats.tx_refused), (1 + 8 + 1 + 8, 4 + 4));
    lan.server.shutdown();
}

#[test]
fn an_assigned_address_is_not_taken_by_others_and_no_other_is_used() {
    let lan = Lan::new(&[Some(mac(0)), Some(mac(1)), None], None);
    let (mut a, mut b, mut c) = (lan.attach(0, 0), lan.attach(1, 0), lan.attach(2, 0));
    introduce(&mut [&mut a, &mut b, &mut c]);
    // The first one may not use the address of another.
    a.send(0, &Header::default(), &frame(mac(1), mac(5), 200, 1), &[]);
    a.wait_sent(0);
    wait_until("it is counted", || lan.stats(0).tx_spoofed == 1);
    // The third one, which has no filter, may, but gets no frames of the first.
    c.send(0, &Header::default(), &frame(mac(1), mac(0), 60, 2), &[]);
    c.wait_sent(0);
    let sent = frame(mac(0), mac(1), 60, 3);
    a.post(0, &[2048]);
    b.send(0, &Header::default(), &sent, &[]);
    assert_eq!(a.receive(0).1, sent);
    let taken = Server::start_switch(
        [0, 1]
            .map(|_| {
                let dir = tempfile::tempdir().unwrap();
                let listener = UnixListener::bind(dir.path().join("s")).unwrap();
                config("twin", listener, Some(mac(0)))
            })
            .into(),
        None::<(String, TapBackend)>,
        Duration::ZERO,
    );
    assert_eq!(taken.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    lan.server.shutdown();
}

#[test]
fn an_uplink_joins_guests_and_an_interface() {
    isolated("an_uplink_joins_guests_and_an_interface", || {
        let name: InterfaceName = "uplink".parse().unwrap();
        let tap = Tap::open(&name, 1).unwrap();
        name.bring_up().unwrap();
        let uplink = TapBackend::new(tap).unwrap();
        let lan = Lan::new(&[None; 2], Some(("uplink".into(), uplink)));
        let host = network::packet_socket(&name).unwrap();
        set_socket_timeout(&host, Timeout::Recv, Some(DEADLINE)).unwrap();
        let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, ALL));
        let host_mac = mac(50);
        let (partial, bytes) = tcp(60_000, 3);
        let (header, bytes) = (tso(partial), bytes);
        // From the host to one guest, and back, as one frame.
        let send = |frame: &[u8]| {
            let bytes = [&header.0[..10], frame].concat();
            rustix::net::send(&host, &bytes, rustix::net::SendFlags::empty())
        };
        let to_guest = addressed(bytes.clone(), mac(1), host_mac);
        let end = Instant::now() + DEADLINE;
        loop {
            b.post_many(0, 50, 1536);
            // Until the carrier is there the kernel refuses.
            let _ = send(&to_guest);
            if let Some((_, received)) = b.try_receive(0, QUIET) {
                assert_eq!(received, to_guest);
                break;
            }
            assert!(Instant::now() < end, "no frame of the host arrives");
        }
        let to_host = addressed(bytes, host_mac, Mac(super::frames::MARK));
        a.send(0, &header, &to_host, &[12, 54, 4096]);
        a.wait_sent(0);
        let (received_header, received) = receive_from(&host);
        assert_eq!((received_header, received), (header, to_host));
        // A guest with a known address gets frames of the other one, and the host does not.
        let hello = frame(BROADCAST, mac(0), 60, 1);
        b.post_many(0, 8, 1536);
        a.send(0, &Header::default(), &hello, &[]);
        a.wait_sent(0);
        assert_eq!(b.receive(0).1, hello);

        network::remove_interface(&name).unwrap();
        let over = lan.server.over();
        let mut fds = [PollFd::new(&over, PollFlags::IN)];
        let timeout = Timespec::try_from(DEADLINE).unwrap();
        assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1);
        a.check_guards();
        b.check_guards();
        lan.server.shutdown();
    });
}

#[test]
fn a_guest_that_has_moved_to_another_port_is_found_there() {
    let lan = Lan::new(&[None; 3], None);
    let (mut a, mut b, mut c) = (lan.attach(0, ALL), lan.attach(1, ALL), lan.attach(2, ALL));
    introduce(&mut [&mut a, &mut b, &mut c]);
    let guest = mac(0);
    b.post_many(0, 2, 2048);
    a.post_many(0, 2, 2048);
    c.frontend.send_rarp(guest.0).unwrap();
    let expected = super::announcements::rarp(guest.0);
    assert_eq!(a.receive(0).1, expected);
    assert_eq!(b.receive(0).1, expected);
    let to_guest = frame(guest, mac(1), 60, 7);
    c.post(0, &[2048]);
    b.send(0, &Header::default(), &to_guest, &[]);
    assert_eq!(c.receive(0).1, to_guest);
    assert!(a.try_receive(0, QUIET).is_none(), "at the old port, too");
    lan.server.shutdown();
}

#[test]
fn a_port_announces_only_the_address_that_it_may_use() {
    let lan = Lan::new(&[Some(mac(0)), Some(mac(1))], None);
    let (mut a, mut b) = (lan.attach(0, ALL), lan.attach(1, ALL));
    b.post_many(0, 4, 2048);
    assert!(a.frontend.send_rarp(mac(1).0).is_err());
    a.frontend.send_rarp(mac(0).0).unwrap();
    assert_eq!(b.receive(0).1, super::announcements::rarp(mac(0).0));
    assert!(b.try_receive(0, QUIET).is_none());
    lan.server.shutdown();
}
