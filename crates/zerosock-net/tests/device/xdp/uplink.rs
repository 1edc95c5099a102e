//! The interface as the uplink of a switch.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_net::server::{GuestConfig, Server};
use zerosock_net::xdp::{Use, XdpConfig};
use zerosock_proto::wire::net::{F_CSUM, F_HOST_TSO4, F_MRG_RXBUF, Header};
use zerosock_sys::network::remove_interface;
use zerosock_sys::xdp::InterfaceOptions;

use super::super::driver::Driver;
use super::super::frames::{MARK, TCP_HEADERS, plain, tcp, tso};
use super::super::network::{DEADLINE, LIMITS, receive_from, wait_until};
use super::link::{BUFFER, CONFIG, backend, isolated, listen, name, send_from};

fn addressed(mut frame: Vec<u8>, to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame
}

/// The sum over the bytes of a TCP segment and its pseudo header: 0 if the checksum is right.
fn checksum(frame: &[u8]) -> u16 {
    let tcp = &frame[34..];
    let pseudo = [
        &frame[26..34],
        &[0, 6],
        &(tcp.len() as u16).to_be_bytes()[..],
    ]
    .concat();
    let bytes = [&pseudo, tcp, &[0][..tcp.len() % 2]].concat();
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn guests_and_the_interface_are_joined_by_a_switch() {
    isolated("guests_and_the_interface_are_joined_by_a_switch", || {
        let dir = tempfile::tempdir().unwrap();
        let sockets = [0, 1].map(|index| dir.path().join(index.to_string()));
        let guests = sockets.each_ref().map(|socket| GuestConfig {
            name: "guest".into(),
            listener: UnixListener::bind(socket).unwrap(),
            mac: None,
            mac_filter: false,
            mtu: None,
            sealed_memory: false,
            limits: LIMITS,
        });
        let config = XdpConfig {
            use_of: Use::Uplink,
            ..CONFIG
        };
        let uplink = backend(InterfaceOptions::default(), config);
        let uplink = Some(("uplink".into(), uplink));
        let server = Server::start_switch(guests.into(), uplink, Duration::ZERO).unwrap();
        let far = listen();
        let features = F_MRG_RXBUF | F_CSUM | F_HOST_TSO4;
        let [mut a, mut b] = sockets.map(|socket| Driver::attach(&socket, features, 2));

        let (host, first) = ([2, 0, 0, 0, 0, 50], MARK);
        // From the host to a guest: at first to both, until the switch knows it.
        let to_guest = addressed(plain(1514, 1), first, host);
        b.post_many(0, 40, BUFFER);
        let end = Instant::now() + DEADLINE;
        loop {
            a.post(0, &[BUFFER]);
            send_from(&far, &to_guest);
            if let Some((_, received)) = a.try_receive(0, Duration::from_millis(200)) {
                assert_eq!(received, to_guest);
                break;
            }
            assert!(Instant::now() < end, "no frame of the host arrives");
        }
        // From a guest to the host.
        for (seed, len) in (1..).zip([14, 60, 1514]) {
            let to_host = addressed(plain(len, seed), host, first);
            a.send(0, &Header::default(), &to_host, &[12]);
            a.wait_sent(0);
            assert!(receive_from(&far).1 == to_host);
        }
        // In segments, because AF_XDP knows no offloads.
        let (partial, frame) = tcp(14_480 - 100, 5);
        let frame = addressed(frame, host, first);
        // The sum of the pseudo header, as a driver stores it.
        let mut frame_with_sum = frame.clone();
        frame_with_sum[50..52].copy_from_slice(&[0x14, 0x00]);
        a.send(0, &tso(partial), &frame_with_sum, &[12, 54, 4096]);
        a.wait_sent(0);
        let mut payload = Vec::new();
        for index in 0..10 {
            let (header, segment) = receive_from(&far);
            assert_eq!((header.flags(), header.gso_type()), (0, 0));
            assert_eq!(
                segment.len(),
                TCP_HEADERS + if index == 9 { 1348 } else { 1448 }
            );
            assert_eq!(checksum(&segment), 0, "segment {index}");
            payload.extend_from_slice(&segment[TCP_HEADERS..]);
        }
        assert_eq!(payload, frame[TCP_HEADERS..]);
        let stats = || server.stats()[2].1;
        wait_until("counted", || {
            stats().tx_copied > 14_000 && stats().rx_copied > 0
        });
        a.check_guards();
        b.check_guards();

        remove_interface(&name("near")).unwrap();
        let over = server.over();
        let mut fds = [PollFd::new(&over, PollFlags::IN)];
        let timeout = Timespec::try_from(DEADLINE).unwrap();
        assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1);
        server.shutdown();
    });
}
