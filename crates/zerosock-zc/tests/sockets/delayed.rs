//! A slow queue delays datagrams, so that the kernel reads buffers late. The tests overwrite each
//! buffer as soon as it is returned: the receiver detects a buffer that was returned too early.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size};
use zerosock_zc::{Buf, Copying, Outgoing, Pool, SendBackend, Sender, SharedSender};

use crate::network::{BACKENDS, accept, fill, slow_down, with_cable};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);

/// The kernel ends what a thread submitted when that exits: the first of a chain in part, the
/// others at all, and posts for those a notification that no result has spoken of, some
/// milliseconds later. By then another thread has retried them, and some of them wait in the queue.
#[test]
fn a_late_notification_returns_no_buffer() {
    const HEAD: usize = 1_200_000;
    const REST: usize = 16_384;
    const TURNS: u64 = 6;
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
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
            check(accept(&listener))
        };
        let ends = with_cable("a_late_notification_returns_no_buffer", near, far);
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

/// Overwrites every returned buffer.
fn spoil(sender: &SharedSender<Vec<u8>>) {
    while let Some(mut returned) = sender.returned() {
        returned.outcome.expect("it was sent");
        returned.buffer.fill(0xee);
        // Freed memory may be unmapped; kept memory is read with its present contents.
        std::mem::forget(returned.buffer);
    }
}

/// Lengths of every size class of datagrams; above 9000 they go in fragments.
const LENGTHS: [usize; 10] = [0, 1, 600, 1000, 1500, 4000, 8000, 9001, 16_384, 65_000];
/// Datagrams of each.
const EACH: usize = 30;

/// Two buffers are used in turn. Each is overwritten when it is returned, and then filled anew.
#[test]
fn datagrams_arrive_as_they_were_when_sent() {
    for backend in BACKENDS {
        for registered in [false, true] {
            let (told, address) = mpsc::channel::<SocketAddr>();
            let (got, arrived) = mpsc::channel();
            let near = move || {
                slow_down();
                let socket = UdpSocket::bind("10.8.0.1:0").expect("an address");
                let to = address.recv().expect("the far end");
                socket.connect(to).expect("the cable");
                let sender: Sender = Sender::builder()
                    .backend(backend)
                    .open(socket)
                    .expect("a sender");
                let pool = Pool::new(2, 65_536).expect("memory");
                let block = || Buf::from(pool.loan().expect("a block"));
                let buffers = match registered {
                    true => vec![block(), block()],
                    false => vec![Buf::from(vec![0; 65_536]), Buf::from(vec![0; 65_536])],
                };
                send_datagrams(sender, buffers, || {
                    arrived.recv_timeout(PATIENCE).expect("it arrives");
                });
            };
            let far = move || {
                let socket = UdpSocket::bind("10.8.0.2:0").expect("an address");
                // The receive buffer has room for all datagrams.
                set_socket_recv_buffer_size_force(&socket, 8 << 20).expect("a socket");
                socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
                let address = socket.local_addr().expect("an address");
                told.send(address).expect("the near end");
                let (mut found, mut wanted) = (vec![0; 65_536], vec![0; 65_536]);
                for (number, len) in numbered() {
                    let count = socket
                        .recv(&mut found)
                        .unwrap_or_else(|why| panic!("{number}: {why}"));
                    fill(&mut wanted[..len], number << 20);
                    let whole = found[..count] == wanted[..len];
                    assert!(whole, "{backend:?}: {number}, of {len} bytes");
                    let _ = got.send(());
                }
            };
            with_cable("datagrams_arrive_as_they_were_when_sent", near, far);
        }
    }
}

/// All datagrams, with their numbers.
fn numbered() -> impl Iterator<Item = (u64, usize)> {
    (0..).zip((0..EACH).flat_map(|_| LENGTHS))
}

/// `arrived` waits until one more has.
fn send_datagrams(mut sender: Sender, mut buffers: Vec<Buf>, arrived: impl Fn()) {
    for (number, len) in numbered() {
        // So few that the receiver has room for them.
        if number >= 32 {
            arrived();
        }
        let mut buffer = loop {
            while let Some(returned) = sender.returned() {
                returned.outcome.expect("it was sent");
                let mut buffer = returned.buffer;
                write(&mut buffer, None).fill(0xee);
                buffers.push(buffer);
            }
            match buffers.pop() {
                Some(buffer) => break buffer,
                None => sender.wait(Some(PATIENCE)).expect("the kernel answers"),
            }
        };
        fill(write(&mut buffer, Some(len)), number << 20);
        let outgoing = Outgoing::new(buffer).copying(Copying::Never);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    assert_eq!(sender.stats().failed, 0);
}

/// The bytes of a buffer, to be written. Sets the length if one is given.
fn write(buffer: &mut Buf, len: Option<usize>) -> &mut [u8] {
    match buffer {
        Buf::Vec(bytes) => {
            if let Some(len) = len {
                bytes.resize(len, 0);
            }
            bytes
        }
        Buf::Pool(block) => {
            if let Some(len) = len {
                block.set_range(0, len).expect("within");
            }
            block
        }
        other => panic!("not one of ours: {other:?}"),
    }
}
