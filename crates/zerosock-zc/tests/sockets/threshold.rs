//! The length from which on sends go without a copy: that of the kind of socket, or the configured one.

use std::net::UdpSocket;
use std::time::Duration;

use zerosock_zc::{Outgoing, SendBackend, Sender, SenderBuilder, SocketKind};

use crate::network::{SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);

/// Sends 50 buffers that are too short for the threshold and 50 that are not, and says how many went in place.
fn sent_in_place(builder: SenderBuilder, threshold: usize) -> u64 {
    let socket = UdpSocket::bind("[::]:0").expect("an address");
    socket.connect(SINK[1]).expect("a route");
    let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
    assert_eq!(sender.report().threshold, threshold);
    for len in [threshold - 1, threshold].repeat(50) {
        let sent = sender.send(Outgoing::new(vec![0; len]));
        sent.map_err(|refused| refused.why).expect("a place");
        while sender.returned().is_some() {}
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    let stats = sender.stats();
    assert_eq!(stats.copied_short + stats.in_place, 100, "{stats}");
    stats.in_place
}

#[test]
fn sends_from_the_threshold_on_go_without_a_copy() {
    with_sink("sends_from_the_threshold_on_go_without_a_copy", || {
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            let builder = || Sender::builder().backend(backend);
            let udp = SocketKind::Udp6.zero_copy_threshold();
            assert_eq!(sent_in_place(builder(), udp), 50, "{backend:?}");
            assert_eq!(
                sent_in_place(builder().threshold(3000), 3000),
                50,
                "{backend:?}"
            );
        }
    });
}
