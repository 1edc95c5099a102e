//! Senders that are dropped while the kernel reads their buffers: each buffer is freed when the
//! kernel no longer reads it, whatever the drop of another one does.

use std::net::UdpSocket;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zerosock_zc::{Copying, Outgoing, SendBackend, Sender};

use crate::network::with_sink;

const PATIENCE: Duration = Duration::from_secs(300);

/// Bytes that do something when they are freed.
struct Owner<F: FnOnce()>(Vec<u8>, Option<F>);

impl<F: FnOnce()> AsRef<[u8]> for Owner<F> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl<F: FnOnce()> Drop for Owner<F> {
    fn drop(&mut self) {
        self.1.take().expect("once")();
    }
}

fn bytes(freed: impl FnOnce() + Send + 'static) -> Bytes {
    Bytes::from_owner(Owner(vec![7; 1200], Some(freed)))
}

fn run(program: &str, words: &str) {
    let output = Command::new(program).args(words.split(' ')).output();
    let output = output.expect("a program");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {words}: {told}");
}

/// The device queues packets until `release_packets`.
fn delay_packets(device: &str) {
    let queue = "root tbf rate 8bit burst 1500 limit 60000";
    run("tc", &format!("qdisc replace dev {device} {queue}"));
}

fn release_packets(device: &str) {
    run("tc", &format!("qdisc del dev {device} root"));
}

/// A sender with buffers in the queue of a device; the first one uses up the burst of the queue.
fn held(to: &str, backend: SendBackend, buffers: Vec<Bytes>) -> Sender<Bytes> {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
    socket.connect(to).expect("a route");
    let builder = Sender::builder().backend(backend);
    let mut sender: Sender<Bytes> = builder.open(socket).expect("a sender");
    let count = buffers.len();
    for buffer in [Bytes::from(vec![0; 1200])].into_iter().chain(buffers) {
        let outgoing = Outgoing::new(buffer).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
    }
    sender.poll().expect("the kernel answers");
    assert!(std::iter::from_fn(|| sender.returned()).count() <= 1);
    assert!(count > 0 && !sender.is_quiet());
    sender
}

fn until(what: &str, is: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        thread::yield_now();
    }
}

#[test]
fn a_buffer_whose_drop_panics_affects_no_other() {
    with_sink("a_buffer_whose_drop_panics_affects_no_other", || {
        run("ip", "link add sink1 type ifb");
        run("ip", "addr add 10.7.0.1/24 dev sink1");
        run("ip", "link set sink1 up");
        let neighbour = "10.7.0.2 lladdr 02:00:00:00:00:03 dev sink1 nud permanent";
        run("ip", &format!("neigh add {neighbour}"));
        let (first, second) = ("10.9.0.2:9", "10.7.0.2:9");
        for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
            let freed: [Arc<AtomicUsize>; 3] = Default::default();
            let count = |which: usize| {
                let freed = Arc::clone(&freed[which]);
                move || _ = freed.fetch_add(1, Ordering::SeqCst)
            };
            let is = |which: usize, count| freed[which].load(Ordering::SeqCst) == count;
            delay_packets("sink0");
            delay_packets("sink1");
            // Some buffers that panic in drop, and one that drops a sender with buffers in another
            // queue.
            let panics = |_| {
                let count = count(0);
                bytes(move || {
                    count();
                    panic!("a buffer's drop");
                })
            };
            let inner = held(second, backend, vec![bytes(count(1))]);
            let inside = count(0);
            let drops = bytes(move || {
                drop(inner);
                inside();
            });
            let buffers = (0..3).map(panics).chain([drops]).collect();
            let late = held(second, backend, vec![bytes(count(1)), bytes(count(1))]);
            let early = held(first, backend, buffers);
            drop(late);
            drop(early);
            release_packets("sink0");
            until("they are freed", || is(0, 4));
            // The thread goes on, and others' buffers are where they were.
            delay_packets("sink0");
            drop(held(first, backend, vec![bytes(count(2))]));
            release_packets("sink0");
            until("one more is freed", || is(2, 1));
            assert!(is(1, 0), "{backend:?}: {freed:?}");
            release_packets("sink1");
            until("all are freed", || is(1, 3));
        }
    });
}
