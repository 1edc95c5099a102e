//! What is held longer than what it came from. Types see to it that nothing borrowed is; what owns
//! its part of the endpoint keeps that alive, and its bytes with it.

use std::io::{Read, Write};
use std::thread;

use zerosock::vsock::{Endpoint, Host};

use super::common::pump::Pumped;
use super::hub::Hub;
use super::{FOR_EVER, PORT, common, patient};

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
    // The place itself goes with the last of them.
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

/// The device's side gets to run only when the process has gone.
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
    drop((theirs, process));
    common::eventually("the host knows that it has gone", || {
        host.turn().unwrap();
        host.processes().is_empty()
    });
    let mut got = Vec::new();
    (&ours).read_to_end(&mut got).unwrap();
    assert_eq!(got, sent);
}
