//! Files, sent from where they lie in memory.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use zerosock::zc::{Copying, FileMap, FilePart, Outgoing, Sender};

use crate::network::{BACKENDS, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: usize = 3_000_000;

fn file() -> std::fs::File {
    let mut file = tempfile::tempfile().expect("a file");
    let mut bytes = vec![0; LEN];
    fill(&mut bytes, 0);
    file.write_all(&bytes).expect("room");
    file
}

fn pair(backend: zerosock::zc::Backend) -> (Sender<FilePart>, TcpStream) {
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
fn a_file_that_is_cut_off_fails_the_send_and_nothing_else() {
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
