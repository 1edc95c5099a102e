//! Streams that end before everything is sent: bytes that were taken arrive and are counted; the
//! other buffers are free.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use zerosock_zc::{Copying, Outgoing, Refusal, Sender};

use crate::network::{BACKENDS, byte, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const EACH: usize = (1 << 20) + 5;
const SENDS: usize = 12;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let far = listener.accept().expect("a stream").0;
    (socket.expect("loopback"), far)
}

/// More than any buffers between the two take, in parts.
fn contents() -> Vec<Vec<u8>> {
    let mut bytes = vec![0; EACH * SENDS];
    fill(&mut bytes, 0);
    bytes.chunks(EACH).map(<[u8]>::to_vec).collect()
}

/// Reads as long as there is something, compares it, and counts.
fn read(mut stream: TcpStream, count: &AtomicU64) {
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut bytes = vec![0; 1 << 18];
    while let Ok(len @ 1..) = crate::streams::read(&mut stream, &mut bytes) {
        let at = count.load(Relaxed);
        for (offset, &found) in (at..).zip(&bytes[..len]) {
            assert_eq!(found, byte(offset), "at {offset}");
        }
        count.store(at + len as u64, Relaxed);
    }
}

#[test]
fn bytes_sent_before_a_cancellation_arrive_and_are_counted() {
    let contents = contents();
    for (backend, copying) in BACKENDS
        .into_iter()
        .flat_map(|it| [(it, Copying::Never), (it, Copying::Always)])
    {
        let (socket, far) = pair();
        let builder = Sender::builder().backend(backend).capacity(SENDS as u32);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        for bytes in &contents {
            let pushed = sender.push(Outgoing::new(bytes.clone()).copying(copying));
            pushed.map_err(|refused| refused.why).expect("a place");
        }
        sender.submit().expect("the kernel answers");
        sender.cancel().expect("the kernel answers");
        // The peer reads: buffers that were taken must become free.
        let arrived = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&arrived);
        let reader = std::thread::spawn(move || read(far, &count));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let (mut taken, mut failed) = (0, 0);
        for returned in std::iter::from_fn(|| sender.returned()) {
            match returned.outcome {
                Ok(_) => taken += returned.buffer.len(),
                Err(failure) => {
                    let code = failure.error.raw_os_error();
                    assert_eq!(code, Some(libc::ECANCELED), "{backend:?}");
                    assert!(failure.sent < returned.buffer.len(), "{backend:?}");
                    taken += failure.sent;
                    failed += 1;
                }
            }
        }
        assert!(failed > 0, "{backend:?}");
        let stats = sender.stats();
        assert_eq!(stats.failed, failed, "{backend:?}");
        assert_eq!((stats.over, stats.bytes), (SENDS as u64, taken as u64));
        // No byte may follow the gap.
        let refused = sender.push(Outgoing::new(vec![1])).expect_err("it is over");
        assert!(matches!(refused.why, Refusal::Broken(_)), "{backend:?}");
        // Before the end, which is none that is in order.
        let begun = Instant::now();
        while arrived.load(Relaxed) < taken as u64 {
            assert!(begun.elapsed() < PATIENCE, "{backend:?}: {taken}");
            std::thread::yield_now();
        }
        drop(sender);
        reader.join().expect("the contents");
        let arrived = arrived.load(Relaxed);
        assert_eq!(arrived, taken as u64, "{backend:?}, {copying:?}");
    }
}

/// Counts when it is freed.
struct Owner(Vec<u8>, mpsc::Sender<()>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.1.send(());
    }
}

#[test]
fn a_dropped_sender_frees_unsent_buffers_without_a_reader() {
    let contents = contents();
    for backend in BACKENDS {
        let (socket, far) = pair();
        let builder = Sender::builder().backend(backend).capacity(SENDS as u32);
        let mut sender: Sender<Bytes> = builder.open(socket).expect("a sender");
        let (tell, told) = mpsc::channel();
        for bytes in &contents {
            let bytes = Bytes::from_owner(Owner(bytes.clone(), tell.clone()));
            let pushed = sender.push(Outgoing::new(bytes).copying(Copying::Always));
            pushed.map_err(|refused| refused.why).expect("a place");
        }
        sender.submit().expect("the kernel answers");
        assert!(!sender.is_quiet(), "{backend:?}");
        drop(sender);
        for _ in 0..SENDS {
            told.recv_timeout(PATIENCE).expect("it is freed");
        }
        drop(far);
    }
}

/// Segments with data that a TCP socket has sent: `tcpi_data_segs_out`, Linux 4.6.
fn segments(socket: &impl std::os::fd::AsRawFd) -> u32 {
    const AT: usize = 156;
    let mut info = [0u8; 256];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: so many bytes may be written, and both outlive the call.
    let result = unsafe {
        let info = info.as_mut_ptr().cast();
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info,
            &mut len,
        )
    };
    assert!(result == 0 && len as usize >= AT + 4, "{len}");
    u32::from_ne_bytes(info[AT..AT + 4].try_into().expect("four"))
}

#[test]
fn a_send_with_more_shares_a_request_with_the_next() {
    for backend in BACKENDS {
        let sent = [false, true].map(|corked| {
            let (socket, far) = pair();
            socket.set_nodelay(true).expect("a socket");
            let builder = Sender::builder().backend(backend);
            let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            for index in 0..20 {
                let mut bytes = vec![0; 100];
                fill(&mut bytes, index * 100);
                let copying = [Copying::Always, Copying::Never][index as usize % 2];
                let outgoing = Outgoing {
                    more: corked && index < 19,
                    ..Outgoing::new(bytes).copying(copying)
                };
                let sent = sender.send(outgoing).map_err(|refused| refused.why);
                sent.expect("a place");
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            let segments = segments(&sender.socket());
            drop(sender);
            assert_eq!(check(far), 2000, "{backend:?}");
            segments
        });
        // The kernel lets a part go after 200 ms, on a machine that is slow.
        assert!(sent[0] >= 20 && sent[1] < 10, "{backend:?}: {sent:?}");
    }
}
