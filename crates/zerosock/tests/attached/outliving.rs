//! Leases, loans and streams that live longer than their endpoint's handle.
//!
//! The type system prevents this for what borrows. What owns its part of the endpoint keeps the
//! endpoint and its bytes alive.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use zerosock::vsock::{Endpoint, Host};

use super::hub::Hub;
use super::{FOR_EVER, PORT, patient};
use crate::common;
use crate::common::pump::Pumped;

#[test]
fn a_lease_outlives_its_stream_its_endpoint_and_its_host() {
    let hub = Hub::new();
    let process = hub.process("leases");
    let (ours, theirs) = hub.joined(&process);
    (&ours).write_all(b"to the process").unwrap();
    (&theirs).write_all(b"to the host").unwrap();
    let at_process = theirs.recv().unwrap().unwrap().into_owned();
    let at_host = ours.recv().unwrap().unwrap().into_owned();
    drop(theirs);
    drop(process);
    assert_eq!(at_process.to_vec(), b"to the process");
    // The attachment ends with the last of them.
    assert!(hub.resolve("leases").is_ok());
    drop(ours);
    assert_eq!(at_host.to_vec(), b"to the host");
    drop(at_process);
    common::eventually("free again", || hub.resolve("leases").is_err());
    assert_eq!(at_host.to_vec(), b"to the host", "whose sender has gone");
    drop(hub);
    assert_eq!(at_host.to_vec(), b"to the host", "and the host");
}

#[test]
fn a_stream_and_a_listener_outlive_the_endpoint_value() {
    let hub = Hub::new();
    let (listener, ours, theirs) = {
        let process = hub.process("brief");
        let (ours, theirs) = hub.joined(&process);
        (process.listen(PORT, 1).unwrap(), ours, theirs)
    };
    (&theirs).write_all(b"still here").unwrap();
    let mut got = [0; 10];
    (&ours).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still here");
    drop((ours, theirs));
    thread::scope(|scope| {
        scope.spawn(|| hub.reach("brief"));
        listener.accept_timeout(common::PATIENCE).unwrap();
    });
    drop(listener);
    common::eventually("the last of them", || hub.resolve("brief").is_err());
}

/// The device's side runs only after the process has exited.
#[test]
fn what_a_process_sent_before_it_went_arrives_at_a_host_that_was_busy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let builder = Host::builder().attach(&path).hold(FOR_EVER);
    let mut host = Pumped::new(builder.start().unwrap());
    let listener = host.listen(PORT, 1).unwrap();
    // More small packets than the host lets a connection hold, and no more than fit into a queue.
    let process = Endpoint::builder().name("brief").queue_size(256);
    let process = process.attach(&path).unwrap();
    let to = zerosock::Address::new(zerosock::Cid::HOST, PORT);
    let theirs = process.connect(to).unwrap();
    let (ours, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    let ours = patient(ours);
    host.stop();
    let sent = common::bytes(9, 110 * 100);
    for packet in sent.chunks(100) {
        (&theirs).write_all(packet).unwrap();
    }
    // Like a busy host, it takes as much as it may hold, which is not all.
    host.drive().unwrap();
    drop((theirs, process));
    common::eventually("the host knows that it has gone", || {
        host.drive().unwrap();
        host.processes().is_empty()
    });
    let mut got = Vec::new();
    (&ours).read_to_end(&mut got).unwrap();
    assert_eq!(got, sent);
}

/// Not a test by itself: the process that the next test stops and wakes.
#[test]
#[ignore = "a part of bytes_of_a_host_that_has_ended_are_read_by_a_process_that_slept"]
fn sleeping_process() {
    let Some(path) = std::env::var_os("ZEROSOCK_TEST_ATTACH") else {
        return;
    };
    let process = Endpoint::builder().name("sleeping").attach(path).unwrap();
    let to = zerosock::Address::new(zerosock::Cid::HOST, PORT);
    let stream = patient(process.connect(to).unwrap());
    println!("\nready {}", rustix::thread::gettid().as_raw_nonzero());
    let mut got = String::new();
    let outcome = (&stream).read_to_string(&mut got);
    println!("\nread {got:?}, {outcome:?}");
}

/// The reader sleeps, and runs only after the other side has exited.
#[test]
fn bytes_of_a_host_that_has_ended_are_read_by_a_process_that_slept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let host = Host::builder().attach(&path).start().unwrap();
    let listener = host.listen(PORT, 1).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "attached::outliving::sleeping_process",
            "--exact",
            "--ignored",
        ])
        .arg("--nocapture")
        .env("ZEROSOCK_TEST_ATTACH", &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut line = |word: &str| {
        let mut lines = lines.by_ref().map(Result::unwrap);
        lines.find(|line| line.starts_with(word)).unwrap()
    };
    let (stream, _) = listener.accept_timeout(common::PATIENCE).unwrap();
    let ready = line("ready");
    let thread = ready.trim_start_matches("ready ");
    let stat = format!("/proc/{}/task/{thread}/stat", child.id());
    common::eventually("the reader sleeps", || {
        let stat = std::fs::read_to_string(&stat).unwrap();
        stat.rsplit(')').next().unwrap().starts_with(" S")
    });
    kill_process(pid, Signal::STOP).unwrap();
    (&stream).write_all(b"last words").unwrap();
    drop((stream, listener, host));
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(line("read"), "read \"last words\", Ok(10)");
    assert!(child.wait().unwrap().success());
}
