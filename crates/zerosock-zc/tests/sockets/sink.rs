//! Datagrams to a device that reads pages in place: exactly the sends in place are reported as
//! such.

use std::net::UdpSocket;
use std::time::Duration;

use zerosock_zc::{
    Buf, Copying, OffReason, Outgoing, Pool, SendBackend, Sender, SenderStats, Sent, SocketAddress,
};

use crate::network::{BACKENDS, SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);

fn socket(to: &str) -> UdpSocket {
    let socket = UdpSocket::bind(if to.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    });
    socket.expect("an address")
}

/// The outcomes of 100 datagrams of each length.
fn outcomes(mut sender: Sender<Buf>, buffer: impl Fn(usize) -> Buf, wish: Copying) -> Vec<Sent> {
    let mut outcomes = Vec::new();
    for len in [1, 600, 1000, 1500, 4000, 8000, 65_000] {
        for _ in 0..100 {
            let outgoing = Outgoing::new(buffer(len)).copying(wish);
            sender
                .send(outgoing)
                .map_err(|refused| refused.why)
                .expect("it is accepted");
            while let Some(returned) = sender.returned() {
                outcomes.push(returned.outcome.expect("it was sent"));
            }
        }
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    outcomes.extend(std::iter::from_fn(|| sender.returned()).map(|one| one.outcome.expect("sent")));
    let stats = sender.stats();
    assert_eq!((stats.accepted, stats.failed), (700, 0));
    let in_place = outcomes
        .iter()
        .filter(|&&sent| sent == Sent::InPlace)
        .count();
    assert_eq!(stats.in_place, in_place as u64);
    assert_eq!(stats.freed(), stats.accepted, "{stats}");
    outcomes
}

#[test]
fn datagrams_are_reported_in_place_if_the_device_reads_pages() {
    with_sink("datagrams_go_in_place", || {
        // More than there are places: a block is lent before its send waits for one.
        let pool = Pool::new(600, 65_536).expect("memory");
        for to in SINK {
            for backend in BACKENDS {
                let open = || {
                    let socket = socket(to);
                    socket.connect(to).expect("a route");
                    Sender::builder()
                        .backend(backend)
                        .open(socket)
                        .expect("a sender")
                };
                let plain = |len| Buf::from(vec![7; len]);
                let block = |len| {
                    let mut block = pool.loan().expect("a block");
                    block.set_range(0, len).expect("within");
                    Buf::from(block)
                };
                let expected = match backend {
                    SendBackend::Copy => Sent::Copied,
                    _ => Sent::InPlace,
                };
                for outcomes in [
                    outcomes(open(), plain, Copying::Never),
                    outcomes(open(), block, Copying::Never),
                ] {
                    assert_eq!(outcomes, [expected; 700], "{backend:?} to {to}");
                }
                let copied = outcomes(open(), plain, Copying::Always);
                assert_eq!(copied, [Sent::Copied; 700], "{backend:?} to {to}");
            }
        }
    });
}

#[test]
fn an_unconnected_socket_sends_to_the_given_address() {
    with_sink("unconnected_sends", || {
        for (to, backend) in SINK
            .into_iter()
            .flat_map(|to| BACKENDS.map(|backend| (to, backend)))
        {
            let mut sender: Sender = Sender::builder()
                .backend(backend)
                .open(socket(to))
                .expect("a sender");
            let address: std::net::SocketAddr = to.parse().expect("an address");
            let address = SocketAddress::new(&address).expect("it is short");
            for len in [10, 5000] {
                for many in [false, true] {
                    let buffer = match many {
                        false => Buf::from(vec![1; len]),
                        true => {
                            Buf::from(vec![Buf::from(vec![1; len]), Buf::from(&b"and more"[..])])
                        }
                    };
                    let outgoing = Outgoing::new(buffer).to(address).copying(Copying::Never);
                    sender
                        .send(outgoing)
                        .map_err(|refused| refused.why)
                        .expect("it is accepted");
                }
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            for returned in std::iter::from_fn(|| sender.returned()) {
                returned.outcome.expect("it was sent");
            }
            assert_eq!(sender.stats().bytes, 2 * (10 + 5000) + 2 * 8, "{backend:?}");
        }
    });
}

/// The counters after `sends` of 5000 bytes.
fn stats_of(to: &str, backend: SendBackend, threshold: usize, wish: Copying) -> SenderStats {
    let socket = socket(to);
    socket.connect(to).expect("an address");
    let builder = Sender::builder().backend(backend).discard_returned();
    let opened = builder.threshold(threshold).open(socket);
    let mut sender: Sender = opened.expect("a sender");
    for _ in 0..20 {
        let sent = sender.send(Outgoing::new(vec![1; 5000]).copying(wish));
        sent.map_err(|refused| refused.why).expect("it is accepted");
        // The next send knows what the notification of this one says.
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    }
    let stats = sender.stats();
    assert_eq!((stats.freed(), stats.accepted), (20, 20), "{stats}");
    let off = match backend {
        SendBackend::Copy => Some(OffReason::BackendCopies),
        _ if stats.copied_off > 0 => Some(OffReason::CopiedByKernel),
        _ => None,
    };
    assert_eq!(sender.report().off, off);
    stats
}

#[test]
fn each_send_counts_once_by_what_became_of_it() {
    with_sink("each_send_counts_once_by_what_became_of_it", || {
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            let to_sink = |threshold, wish| stats_of(SINK[1], backend, threshold, wish);
            assert_eq!(to_sink(5000, Copying::Auto).in_place, 20);
            assert_eq!(to_sink(5001, Copying::Auto).copied_short, 20);
            assert_eq!(to_sink(0, Copying::Always).copied_on_request, 20);
            let near = UdpSocket::bind("[::1]:0").expect("loopback");
            let near = near.local_addr().expect("an address").to_string();
            // The loopback device copies: after 16 notifications zero copy is off.
            let stats = stats_of(&near, backend, 0, Copying::Auto);
            assert_eq!(
                (stats.copied_by_kernel, stats.copied_off),
                (16, 4),
                "{stats}"
            );
        }
        let stats = stats_of(SINK[1], SendBackend::Copy, 0, Copying::Never);
        assert_eq!(stats.copied_off, 20, "{stats}");
    });
}
