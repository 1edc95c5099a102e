//! Behind a queue that lets through little at a time: what is sent lies there for a while, and its
//! bytes are read late. A buffer that came back too early is seen at the receiver, since it is
//! written over as soon as it is back.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_send_buffer_size;
use zerosock::zc::{Backend, Copying, Outgoing, Sender, SharedSender};

use crate::network::{fill, tc, with_cable};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(60);

/// The cable takes so much from now on, 50 kB in a millisecond.
fn slow_down() {
    tc("qdisc replace dev near0 root tbf rate 400mbit burst 20000 limit 8000000");
}

/// The kernel ends what a thread submitted when that exits: the first of a chain in part, the others
/// at all, and posts for those a notification that no result has spoken of, some milliseconds later.
/// By then they are asked again, by another thread, and some of them wait in the queue.
#[test]
fn a_late_notification_gives_no_buffer_back() {
    const HEAD: usize = 1_200_000;
    const REST: usize = 16_384;
    const TURNS: u64 = 6;
    for backend in [Backend::Uring, Backend::ErrorQueue] {
        let (told, address) = mpsc::channel::<SocketAddr>();
        let near = move || {
            slow_down();
            let socket = TcpStream::connect(address.recv().expect("the far end"));
            let socket = socket.expect("the cable");
            set_socket_send_buffer_size(&socket, 500_000).expect("a socket");
            let end = socket.try_clone().expect("a descriptor");
            let builder = Sender::builder().backend(backend).capacity(64);
            let sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            let sender = sender.into_shared().expect("descriptors");
            let mut at = 0;
            for turn in 0..TURNS {
                let first = HEAD + turn as usize * 7919;
                let lens = std::iter::once(first).chain([REST; 31]);
                let buffers: Vec<_> = lens
                    .map(|len| {
                        let mut bytes = vec![0; len];
                        fill(&mut bytes, at);
                        at += len as u64;
                        bytes
                    })
                    .collect();
                submit_and_end(sender.clone(), buffers);
                while !sender.finish(Some(Duration::ZERO)).expect("an answer") {
                    sender.wait(Some(PATIENCE)).expect("the kernel answers");
                    spoil(&sender);
                }
                spoil(&sender);
            }
            assert_eq!(sender.stats().failed, 0, "{backend:?}");
            end.shutdown(Shutdown::Write).expect("open");
            at
        };
        let far = move || {
            let listener = TcpListener::bind("10.8.0.2:0").expect("an address");
            let address = listener.local_addr().expect("an address");
            told.send(address).expect("the near end");
            check(listener.accept().expect("a stream").0)
        };
        let ends = with_cable("a_late_notification_gives_no_buffer_back", near, far);
        if let Some((sent, arrived)) = ends {
            assert_eq!(sent, arrived, "{backend:?}");
        }
    }
}

/// On a thread that has ended when this returns.
fn submit_and_end(sender: SharedSender<Vec<u8>>, buffers: Vec<Vec<u8>>) {
    let thread = thread::spawn(move || {
        for bytes in buffers {
            let outgoing = Outgoing::new(bytes).copying(Copying::Never);
            let pushed = sender.push(outgoing).map_err(|refused| refused.why);
            pushed.expect("a place");
        }
        sender.submit().expect("the kernel answers");
    });
    thread.join().expect("the thread");
}

/// Writes over everything that is back.
fn spoil(sender: &SharedSender<Vec<u8>>) {
    while let Some(mut returned) = sender.returned() {
        returned.outcome.expect("it was sent");
        returned.buffer.fill(0xee);
        // What is freed may be given back to the system: kept, it is read as it is now.
        std::mem::forget(returned.buffer);
    }
}
