//! A piece of a datagram that the socket refuses, or that is never sent: how this is reported, and
//! what follows it.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};
use zerosock_zc::{
    CloseOutcome, Copying, KeepReason, Outgoing, Refusal, SendBackend, Sender, SocketAddress,
};

use crate::network::{BACKENDS, with_loopback};

const PATIENCE: Duration = Duration::from_secs(300);
/// Longer than the kernel looks at, over IPv4; over IPv6 it begins, and fails then.
const TOO_LONG: usize = 70_000;

fn pair(backend: SendBackend, home: &str) -> (Sender<Vec<u8>>, UdpSocket) {
    let receiver = UdpSocket::bind(home).expect("loopback");
    receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let socket = UdpSocket::bind(home).expect("loopback");
    let address = receiver.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let builder = Sender::builder().backend(backend);
    (builder.open(socket).expect("a sender"), receiver)
}

fn piece(len: usize) -> Outgoing<Vec<u8>> {
    Outgoing::new(vec![len as u8; len]).copying(Copying::Never)
}

fn push(sender: &mut Sender<Vec<u8>>, outgoing: Outgoing<Vec<u8>>) {
    let pushed = sender.push(outgoing).map_err(|refused| refused.why);
    pushed.expect("a place");
}

/// A piece that the socket has taken. Its buffer is the kernel's as long as the datagram is not
/// over.
fn begin(sender: &mut Sender<Vec<u8>>) {
    push(sender, piece(100).more());
    let over = sender.stats().over;
    sender.submit().expect("the kernel answers");
    assert_eq!(sender.stats().over, over + 1);
}

/// The error of each send, in order.
fn errors(sender: &mut Sender<Vec<u8>>) -> Vec<Option<i32>> {
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    let mut back: Vec<_> = std::iter::from_fn(|| sender.returned()).collect();
    back.sort_by_key(|returned| returned.number);
    let code = |failed: zerosock_zc::Failed| failed.error.raw_os_error().expect("the kernel's");
    back.into_iter()
        .map(|returned| returned.outcome.err().map(code))
        .collect()
}

fn arrives_alone(sender: &mut Sender<Vec<u8>>, receiver: &UdpSocket, of: &str) {
    push(sender, piece(10));
    assert_eq!(errors(sender), [None], "{of}");
    assert_eq!(receiver.recv(&mut [0; 300]).expect("it"), 10, "{of}");
}

fn each(test: impl Fn(Sender<Vec<u8>>, UdpSocket, &str)) {
    for backend in BACKENDS {
        for home in ["127.0.0.1:0", "[::1]:0"] {
            let (sender, receiver) = pair(backend, home);
            test(sender, receiver, &format!("{backend:?}, {home}"));
        }
    }
}

#[test]
fn no_datagram_is_appended_to_a_piece_with_a_refused_rest() {
    each(|mut sender, receiver, of| {
        for at_once in [true, false] {
            match at_once {
                true => push(&mut sender, piece(100).more()),
                false => begin(&mut sender),
            }
            push(&mut sender, piece(TOO_LONG));
            let failed = errors(&mut sender);
            assert_eq!(failed, [None, Some(libc::EMSGSIZE)], "{of}");
            arrives_alone(&mut sender, &receiver, of);
        }
        // Later pieces fail as well, and the next whole datagram arrives.
        for outgoing in [piece(100).more(), piece(TOO_LONG).more(), piece(50)] {
            push(&mut sender, outgoing);
        }
        let failed = errors(&mut sender);
        assert_eq!(failed[1..], [Some(libc::EMSGSIZE); 2], "{of}");
        for outgoing in [piece(20).more(), piece(30)] {
            push(&mut sender, outgoing);
        }
        assert_eq!(errors(&mut sender), [None; 2], "{of}");
        assert_eq!(receiver.recv(&mut [0; 300]).expect("it"), 50, "{of}");
    });
}

#[test]
fn no_datagram_is_appended_to_a_piece_with_a_cancelled_rest() {
    each(|mut sender, receiver, of| {
        for last in [true, false] {
            begin(&mut sender);
            push(&mut sender, if last { piece(50) } else { piece(50).more() });
            sender.cancel().expect("the kernel answers");
            if !last {
                push(&mut sender, piece(60));
            }
            let failed = errors(&mut sender).split_off(1);
            assert!(
                failed.iter().all(|code| *code == Some(libc::ECANCELED)),
                "{of}"
            );
            arrives_alone(&mut sender, &receiver, of);
        }
    });
}

#[test]
fn a_returned_socket_has_collected_no_pieces() {
    each(|mut sender, receiver, of| {
        begin(&mut sender);
        let kept = sender.into_socket().expect_err("it is to be continued");
        assert!(
            matches!(kept.why, KeepReason::Busy | KeepReason::Corked),
            "{of}"
        );
        let mut sender = *kept.sender;
        push(&mut sender, piece(TOO_LONG));
        assert_eq!(errors(&mut sender), [None, Some(libc::EMSGSIZE)], "{of}");
        let socket = UdpSocket::from(sender.into_socket().expect("it is quiet"));
        assert_eq!(socket.send(&[1; 10]).expect("a datagram"), 10);
        assert_eq!(receiver.recv(&mut [0; 300]).expect("it"), 10, "{of}");
    });
}

#[test]
fn closing_reports_an_incomplete_datagram() {
    each(|mut sender, _receiver, of| {
        begin(&mut sender);
        let closed = sender.close(None);
        assert!(
            matches!(closed.outcome, CloseOutcome::Corked),
            "{of}: {:?}",
            closed.outcome
        );
        assert_eq!((closed.returned.len(), closed.held), (1, 0), "{of}");
    });
}

#[test]
fn a_raw_socket_with_an_incomplete_packet_refuses_sends() {
    with_loopback("a_raw_socket_that_cannot_forget", || {
        // For experiments (RFC 3692).
        let protocol = Protocol::from_raw(253.try_into().expect("not zero"));
        let socket: OwnedFd = socket_with(
            AddressFamily::INET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(protocol),
        )
        .expect("a socket");
        let address: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let to = SocketAddress::new(&address).expect("it is short");
        let mut sender: Sender<Vec<u8>> = Sender::builder().open(socket).expect("a sender");
        push(&mut sender, piece(100).more().to(to));
        push(&mut sender, piece(TOO_LONG).to(to));
        push(&mut sender, piece(10).to(to));
        let failed = errors(&mut sender);
        assert_eq!(failed[..2], [None, Some(libc::EMSGSIZE)]);
        assert!(failed[2].is_some());
        let refused = sender
            .push(piece(10).to(to))
            .expect_err("it would be glued");
        assert!(matches!(refused.why, Refusal::Broken(_)));
    });
}
