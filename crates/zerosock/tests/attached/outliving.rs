//! What is held longer than what it came from. Types see to it that nothing borrowed is; what owns
//! its part of the endpoint keeps that alive, and its bytes with it.

use std::io::{Read, Write};
use std::thread;

use super::hub::Hub;
use super::{PORT, common};

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
