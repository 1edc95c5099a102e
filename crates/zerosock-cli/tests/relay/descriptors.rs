//! Descriptors and out-of-band bytes that peers send.

use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

use crate::process::{DEADLINE, Running, wait_until};
use crate::{descriptors, read_all, receives_descriptors, relay, skip_receiving, terminate};

/// As on a kernel that cannot refuse descriptors: they are received, closed, and hold nothing up.
#[test]
fn descriptors_that_a_client_sends_are_closed_and_the_bytes_pass() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["relay", "target"].map(|name| dir.path().join(name));
    let target = UnixListener::bind(&to).unwrap();
    let mut command = relay(&[
        &format!("unix-listen:{}", from.display()),
        &format!("unix:{}", to.display()),
    ]);
    if !receives_descriptors(&mut command) {
        return skip_receiving("descriptors_that_a_client_sends_are_closed_and_the_bytes_pass");
    }
    let running = Running::start(&mut command);
    wait_until("the relay", || running.stderr().contains("relaying"));
    let client = UnixStream::connect(&from).unwrap();
    let (mut served, _) = target.accept().unwrap();
    let file = tempfile::tempfile().unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file); 100];
    // Several at once: a read ends behind each.
    for n in 0..50u8 {
        let message = [n; 100];
        let bytes = [std::io::IoSlice::new(&message)];
        zerosock_sys::fd_passing::send(&client, &bytes, &fds).unwrap();
    }
    drop(client);
    let all = read_all(&mut served);
    let wanted: Vec<u8> = (0..50).flat_map(|n| [n; 100]).collect();
    assert_eq!(all, wanted);
    drop(served);
    wait_until("the end", || running.stderr().contains("connection ended"));
    wait_until("the closes", || descriptors(&running) < 30);
    terminate(running);
}

/// As on a kernel that cannot refuse descriptors.
#[test]
fn an_out_of_band_byte_passes_in_its_place_and_descriptors_of_datagrams_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let start = |from: &str, to: &str| {
        let mut command = relay(&[from, to]);
        if !receives_descriptors(&mut command) {
            return None;
        }
        let running = Running::start(&mut command);
        wait_until("the relay", || running.stderr().contains("relaying"));
        Some(running)
    };
    let at = |name: &str| dir.path().join(name);
    let target = UnixListener::bind(at("target")).unwrap();
    let Some(running) = start(
        &format!("unix-listen:{}", at("relay").display()),
        &format!("unix:{}", at("target").display()),
    ) else {
        return skip_receiving(
            "an_out_of_band_byte_passes_in_its_place_and_descriptors_of_datagrams_are_closed",
        );
    };
    let client = UnixStream::connect(at("relay")).unwrap();
    let (mut served, _) = target.accept().unwrap();
    (&client).write_all(b"before").unwrap();
    let urgent = rustix::net::SendFlags::OOB;
    match rustix::net::send(&client, b"!", urgent) {
        Ok(_) => {
            (&client).write_all(b"after").unwrap();
            drop(client);
            assert_eq!(read_all(&mut served), b"before!after");
        }
        Err(errno) => println!("SKIPPED: no MSG_OOB for Unix sockets: {errno}"),
    }
    terminate(running);

    let target = UnixDatagram::bind(at("to")).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let running = start(
        &format!("unix-dgram-listen:{}", at("from").display()),
        &format!("unix-dgram:{}", at("to").display()),
    )
    .unwrap();
    let client = UnixDatagram::bind(at("client")).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    client.connect(at("from")).unwrap();
    let file = tempfile::tempfile().unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file); 100];
    let mut got = [0; 200];
    for n in 0..50u8 {
        let message = [n; 100];
        let bytes = [std::io::IoSlice::new(&message)];
        zerosock_sys::fd_passing::send(&client, &bytes, &fds).unwrap();
        let (length, from) = target.recv_from(&mut got).unwrap();
        assert_eq!(got[..length], message);
        let name = std::os::linux::net::SocketAddrExt::as_abstract_name(&from).unwrap();
        let to = rustix::net::SocketAddrUnix::new_abstract_name(name).unwrap();
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendto(&target, &message, flags, &to).unwrap();
        assert_eq!(client.recv(&mut got).unwrap(), 100);
    }
    wait_until("the closes", || descriptors(&running) < 30);
    terminate(running);
}
