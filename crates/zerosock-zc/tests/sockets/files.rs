//! Sends from mapped files.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use zerosock_zc::{Copying, FileMap, FilePart, Outgoing, SendBackend, Sender};

use crate::network::{BACKENDS, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const LEN: usize = 3_000_000;

fn file() -> std::fs::File {
    let mut file = tempfile::tempfile().expect("a file");
    let mut bytes = vec![0; LEN];
    fill(&mut bytes, 0);
    file.write_all(&bytes).expect("room");
    file
}

fn pair(backend: zerosock_zc::SendBackend) -> (Sender<FilePart>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let builder = Sender::builder().backend(backend).capacity(4);
    let sender = builder.open(socket.expect("loopback")).expect("a sender");
    (sender, listener.accept().expect("a stream").0)
}

#[test]
fn a_file_arrives_in_parts() {
    for backend in BACKENDS {
        let (mut sender, far) = pair(backend);
        let reader = thread::spawn(move || check(far));
        let map = FileMap::new(&file()).expect("a mapping");
        // No multiple of a page.
        let mut from = 0;
        while from < map.len() {
            let outgoing = Outgoing::new(map.part(from, 77_777)).copying(Copying::Never);
            from += 77_777;
            sender
                .send(outgoing)
                .map_err(|refused| refused.why)
                .expect("a place");
            while let Some(returned) = sender.returned() {
                returned.outcome.expect("it was sent");
            }
        }
        drop(map);
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        drop(sender);
        assert_eq!(reader.join().expect("the contents"), LEN as u64);
    }
}

#[test]
fn a_truncated_file_fails_only_its_send() {
    for backend in BACKENDS {
        let (mut sender, far) = pair(backend);
        let file = file();
        let map = FileMap::new(&file).expect("a mapping");
        let part = map.part(0, LEN);
        file.set_len(0).expect("it is ours");
        sender
            .send(Outgoing::new(part).copying(Copying::Never))
            .map_err(|refused| refused.why)
            .expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let failed = sender.returned().expect("it is over").outcome;
        let failed = failed.expect_err("there is nothing to read");
        assert_eq!(
            failed.error.raw_os_error(),
            Some(libc::EFAULT),
            "{backend:?}: {failed}"
        );
        drop(far);
    }
}

/// The kernel takes no more than 2 GiB less a page at once, and calls that a success.
#[test]
fn a_send_longer_than_a_request_keeps_the_stream_order() {
    const PART: usize = 64 << 20;
    const PARTS: usize = 33;
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let mut far = listener.accept().expect("a stream").0;
    let builder = Sender::builder().backend(SendBackend::Uring).capacity(4);
    let socket = socket.expect("loopback");
    let mut sender: Sender<Vec<FilePart>> = builder.open(socket).expect("a sender");
    let file = tempfile::tempfile().expect("a file");
    file.set_len(PART as u64).expect("room");
    let zeros = FileMap::new(&file).expect("a mapping");
    let mut end = tempfile::tempfile().expect("a file");
    end.write_all(&[1; 1000]).expect("room");
    let end = FileMap::new(&end).expect("a mapping");
    let long: Vec<FilePart> = (0..PARTS).map(|_| zeros.part(0, PART)).collect();
    for parts in [long, vec![end.part(0, 1000)]] {
        let pushed = sender.push(Outgoing::new(parts).copying(Copying::Always));
        pushed.map_err(|refused| refused.why).expect("a place");
    }
    let reader = thread::spawn(move || {
        far.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut bytes = vec![0; 1 << 20];
        let (mut at, mut first) = (0, None);
        loop {
            let count = crate::streams::read(&mut far, &mut bytes).expect("the stream goes on");
            if count == 0 {
                return (at, first);
            }
            if first.is_none() && bytes[..count].contains(&1) {
                let place = bytes.iter().position(|&byte| byte == 1);
                first = place.map(|place| at + place);
            }
            at += count;
        }
    });
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    drop(sender);
    let all = PART * PARTS;
    let found = reader.join().expect("the contents");
    assert_eq!(found, (all + 1000, Some(all)));
}
