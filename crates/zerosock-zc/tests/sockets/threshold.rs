//! The length from which on zero copy is cheaper: measured where buffers go in place, and reported.
//! No other test of this process sends over UDP and IPv6 with `Copying::Auto`.

use std::net::UdpSocket;
use std::time::Duration;

use zerosock_zc::{
    Buf, Copying, Outgoing, Pool, SendBackend, Sender, Stable, Threshold, ThresholdBasis,
};

use crate::network::{SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(60);
/// Sends after which every class is decided, one way or the other.
const MANY: usize = 100_000;

fn socket(to: &str) -> UdpSocket {
    let socket = UdpSocket::bind("[::]:0").expect("an address");
    socket.connect(to).expect("a route");
    socket
}

fn sender<B: Stable>(backend: SendBackend, to: &str) -> Sender<B> {
    let builder = Sender::builder().backend(backend);
    builder.open(socket(to)).expect("a sender")
}

/// Sends one buffer after the other until `is`, at most so many.
fn send(sender: &mut Sender<Vec<u8>>, most: usize, is: impl Fn(&Sender<Vec<u8>>) -> bool) {
    let mut buffer = vec![0; 5000];
    for _ in 0..most {
        let sent = sender.send(Outgoing::new(buffer));
        sent.map_err(|refused| refused.why).expect("a place");
        buffer = match sender.returned() {
            Some(returned) => returned.buffer,
            None => vec![0; 5000],
        };
        while sender.returned().is_some() {}
        if is(sender) {
            break;
        }
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    while sender.returned().is_some() {}
}

#[test]
fn only_sockets_that_send_in_place_decide_a_class() {
    with_sink("a_class_is_decided_in_place", || {
        // The kernel copies, and the peer does not read.
        let near = UdpSocket::bind("[::1]:0").expect("loopback");
        let near = near.local_addr().expect("an address").to_string();
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            for _ in 0..12 {
                let mut sender = sender(backend, &near);
                send(&mut sender, 200, |_| false);
                let report = sender.report();
                assert!(report.off.is_some(), "{backend:?}: {:?}", sender.stats());
                let known = (report.threshold, report.threshold_basis);
                assert_eq!(known, (None, ThresholdBasis::Unknown), "{backend:?}");
            }
            let mut far = sender(backend, SINK[1]);
            let decided =
                |sender: &Sender<_>| sender.report().threshold_basis != ThresholdBasis::Unknown;
            send(&mut far, MANY, decided);
            let report = far.report();
            assert_eq!(report.off, None, "{backend:?}");
            assert_eq!(
                report.threshold_basis,
                ThresholdBasis::Measured,
                "{backend:?}"
            );
            assert!(matches!(report.threshold, None | Some(4096)), "{report:?}");
            // The class is the process's; that the kernel copies is the socket's.
            let mut sender = sender(backend, &near);
            let known = sender.report();
            assert_eq!(known.threshold, report.threshold, "{backend:?}");
            send(&mut sender, 200, |_| false);
            assert_eq!(sender.report().off.is_some(), report.threshold.is_some());
        }
    });
}

#[test]
fn a_class_that_cannot_be_measured_is_assumed() {
    with_sink("a_class_that_teaches_nothing", || {
        let pool = Pool::new(64, 20_000).expect("memory");
        let mut sender: Sender<Buf> = sender(SendBackend::Uring, SINK[1]);
        let mut found = None;
        for _ in 0..MANY {
            // Two that cost differently go together.
            let open = Outgoing::new(pool.loan().expect("a block"));
            let copied = Outgoing::new(&b"a header"[..]).copying(Copying::Always);
            for outgoing in [open, copied] {
                let pushed = sender.push(outgoing);
                pushed.map_err(|refused| refused.why).expect("a place");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            while sender.returned().is_some() {}
            let report = sender.report();
            found = Some((
                report.registered_threshold,
                report.registered_threshold_basis,
            ));
            if report.registered_threshold_basis != ThresholdBasis::Unknown {
                break;
            }
        }
        assert_eq!(found, Some((Some(16_384), ThresholdBasis::Assumed)));
        let before = sender.stats();
        let outgoing = Outgoing::new(pool.loan().expect("a block"));
        let sent = sender.send(outgoing);
        sent.map_err(|refused| refused.why).expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(sender.stats().in_place, before.in_place + 1);
    });
}

#[test]
fn a_configured_threshold_is_kept_and_reported() {
    with_sink("a_threshold_that_was_told", || {
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            let builder = Sender::builder().backend(backend);
            let builder = builder.threshold(Threshold::Bytes(3000));
            let mut sender: Sender<Vec<u8>> = builder.open(socket(SINK[1])).expect("a sender");
            let report = sender.report();
            let known = (report.threshold, report.threshold_basis);
            assert_eq!(known, (Some(3000), ThresholdBasis::Configured));
            for len in [2999, 3000].repeat(50) {
                let sent = sender.send(Outgoing::new(vec![0; len]));
                sent.map_err(|refused| refused.why).expect("a place");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            assert_eq!(sender.stats().in_place, 50, "{backend:?}");
        }
    });
}
