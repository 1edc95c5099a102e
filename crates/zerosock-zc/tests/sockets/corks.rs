//! Datagrams in pieces that are cancelled or fail: no piece arrives, alone or in another datagram.

use std::net::UdpSocket;
use std::time::Duration;

use zerosock_zc::{Copying, Outgoing, SendBackend, Sender};

use crate::network::BACKENDS;

const PATIENCE: Duration = Duration::from_secs(300);

/// A receiver, and a sender to it.
pub(crate) fn datagrams(backend: SendBackend) -> (Sender<Vec<u8>>, UdpSocket) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    receiver.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = receiver.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let builder = Sender::builder().backend(backend);
    (builder.open(socket).expect("a sender"), receiver)
}

pub(crate) fn push(sender: &mut Sender<Vec<u8>>, len: usize, more: bool, copying: Copying) {
    let outgoing = Outgoing {
        more,
        ..Outgoing::new(vec![1; len])
    };
    let pushed = sender.push(outgoing.copying(copying));
    pushed.map_err(|refused| refused.why).expect("a place");
}

/// Lengths and whether they were sent, shortest first.
pub(crate) fn outcomes(sender: &mut Sender<Vec<u8>>) -> Vec<(usize, bool)> {
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    let mut outcomes: Vec<_> = std::iter::from_fn(|| sender.returned())
        .map(|returned| (returned.buffer.len(), returned.outcome.is_ok()))
        .collect();
    outcomes.sort_unstable();
    outcomes
}

#[test]
fn pieces_before_a_cancellation_are_in_no_later_datagram() {
    for backend in BACKENDS {
        let (mut sender, receiver) = datagrams(backend);
        push(&mut sender, 1000, true, Copying::Always);
        sender.submit().expect("the kernel answers");
        push(&mut sender, 2000, true, Copying::Always);
        sender.cancel().expect("the kernel answers");
        // The last piece of the cancelled datagram, and two whole datagrams.
        for len in [3000, 10, 11] {
            push(&mut sender, len, false, Copying::Always);
        }
        let expected = [
            (10, true),
            (11, true),
            (1000, true),
            (2000, false),
            (3000, false),
        ];
        assert_eq!(outcomes(&mut sender), expected, "{backend:?}");
        let mut bytes = [0; 10_000];
        for len in [10, 11] {
            let count = receiver.recv(&mut bytes).expect("a datagram");
            assert_eq!(count, len, "{backend:?}");
        }
    }
}
