//! Slots over real sockets: which sends a notification covers, and its tag and sequence number.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use zerosock_zc::{Buf, Copying, Notification, Outgoing, Pool, SendBackend, Sender, Stable};

use crate::network::{BACKENDS, SINK, with_sink};

const PATIENCE: Duration = Duration::from_secs(300);

fn sender<B: Stable>(
    backend: SendBackend,
    to: &str,
    tags: impl IntoIterator<Item = u64>,
) -> Sender<B> {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
    socket.connect(to).expect("a route");
    let builder = Sender::builder().backend(backend).slots(tags);
    builder.open(socket).expect("a sender")
}

fn push<B: Stable>(sender: &mut Sender<B>, outgoing: Outgoing<B>) {
    let pushed = sender.push(outgoing.copying(Copying::Never));
    pushed.map_err(|refused| refused.why).expect("a place");
}

/// Submits, and waits until all buffers are free, without flushing.
fn wait_until_quiet<B: Stable>(sender: &mut Sender<B>) {
    sender.submit().expect("the kernel answers");
    while !sender.is_quiet() {
        sender.wait(Some(PATIENCE)).expect("the kernel answers");
    }
}

fn posted<B: Stable>(sender: &mut Sender<B>) -> Vec<(u64, u32)> {
    let notification = |found: Notification| (found.tag, found.sequence);
    std::iter::from_fn(|| sender.notification())
        .map(notification)
        .collect()
}

fn receiver() -> (UdpSocket, String) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = receiver.local_addr().expect("an address").to_string();
    (receiver, address)
}

#[test]
fn a_notification_has_the_tag_of_its_first_send() {
    let (_receiver, address) = receiver();
    for backend in BACKENDS {
        let mut sender: Sender<Vec<u8>> = sender(backend, &address, [1, 2]);
        sender.set_tag(0, 7).expect("a slot");
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0));
        // Whether the kernel has it or not.
        sender.set_tag(0, 8).expect("a slot");
        wait_until_quiet(&mut sender);
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0));
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(1));
        wait_until_quiet(&mut sender);
        assert_eq!(posted(&mut sender), [], "{backend:?}");
        sender.flush(0..2).expect("slots");
        assert_eq!(posted(&mut sender), [(7, 0), (2, 0)], "{backend:?}");
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0).flush());
        wait_until_quiet(&mut sender);
        assert_eq!(posted(&mut sender), [(8, 1)], "{backend:?}");
        let refused = sender.set_tag(2, 0).expect_err("there are two");
        assert_eq!((refused.slot, refused.slots), (2, 2));
    }
}

#[test]
fn a_failed_send_attaches_and_does_not_flush() {
    let (_receiver, address) = receiver();
    for backend in BACKENDS {
        let mut sender: Sender<Vec<u8>> = sender(backend, &address, [1]);
        // Too long for a datagram.
        push(&mut sender, Outgoing::new(vec![1; 70_000]).slot(0).flush());
        wait_until_quiet(&mut sender);
        assert_eq!(sender.stats().failed, 1, "{backend:?}");
        assert_eq!(posted(&mut sender), [], "{backend:?}");
        // Under the same notifier.
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0).flush());
        wait_until_quiet(&mut sender);
        assert_eq!(posted(&mut sender), [(1, 0)], "{backend:?}");
        // It alone has a notifier, too.
        push(&mut sender, Outgoing::new(vec![1; 70_000]).slot(0).flush());
        wait_until_quiet(&mut sender);
        assert_eq!(posted(&mut sender), [], "{backend:?}");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(posted(&mut sender), [(1, 1)], "{backend:?}");
    }
}

#[test]
fn a_flush_covers_only_the_slots_of_its_range() {
    const SLOTS: u32 = 5000;
    let (_receiver, address) = receiver();
    for backend in BACKENDS {
        let mut sender: Sender<Vec<u8>> = sender(backend, &address, 0..u64::from(SLOTS));
        for slot in [0, 1023, 1024, 3000, SLOTS - 1] {
            push(&mut sender, Outgoing::new(vec![1; 10]).slot(slot));
        }
        wait_until_quiet(&mut sender);
        sender.flush(1..1024).expect("slots");
        assert_eq!(posted(&mut sender), [(1023, 0)], "{backend:?}");
        sender.flush(1024..1024).expect("none");
        sender.flush(0..SLOTS + 1).expect_err("there are fewer");
        assert_eq!(posted(&mut sender), [], "{backend:?}");
        sender.flush(1024..SLOTS).expect("slots");
        let rest = [(1024, 0), (3000, 0), (u64::from(SLOTS) - 1, 0)];
        assert_eq!(posted(&mut sender), rest, "{backend:?}");
        // The end flushes everything.
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(posted(&mut sender), [(0, 0)], "{backend:?}");
    }
}

#[test]
fn memory_that_is_registered_and_memory_that_is_not_share_a_notifier() {
    with_sink("they_share_a_notifier", || {
        let pool = Pool::new(4, 8000).expect("memory");
        for backend in BACKENDS {
            let mut sender: Sender<Buf> = sender(backend, SINK[0], [5]);
            for round in 0..15 {
                // One kind, the other, and both.
                let which = [&[true; 4], &[false; 4], &[true, false, false, true]][round % 3];
                for registered in which {
                    let buffer = match registered {
                        true => Buf::from(pool.loan().expect("a block")),
                        false => Buf::from(vec![1; 8000]),
                    };
                    push(&mut sender, Outgoing::new(buffer).slot(0));
                }
                // Before any of them is with the kernel: it is for all of them.
                sender.flush(0..1).expect("a slot");
                assert_eq!(posted(&mut sender), [], "{backend:?}");
                wait_until_quiet(&mut sender);
                assert_eq!(posted(&mut sender), [(5, round as u32)], "{backend:?}");
                assert_eq!(std::iter::from_fn(|| sender.returned()).count(), 4);
            }
            let registered = usize::from(backend == SendBackend::Uring);
            assert_eq!(sender.report().registered, registered, "{backend:?}");
        }
    });
}

#[test]
fn a_send_that_never_started_does_not_delay_a_flush() {
    for backend in BACKENDS {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let _far = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(backend).slots([1, 2]);
        let socket = socket.expect("loopback");
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0));
        wait_until_quiet(&mut sender);
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(0));
        push(&mut sender, Outgoing::new(vec![1; 100]).slot(1).flush());
        sender.flush(0..2).expect("slots");
        assert_eq!(posted(&mut sender), [], "{backend:?}");
        sender.cancel().expect("the kernel answers");
        wait_until_quiet(&mut sender);
        // The one before it has been executed; the one of the other slot has not.
        assert_eq!(sender.stats().failed, 2, "{backend:?}");
        assert_eq!(posted(&mut sender), [(1, 0)], "{backend:?}");
    }
}
