//! A program that declares trust in processes gets plain slices of their memory, and none of a
//! VM's.

use std::io::Write;

use zerosock::vsock::{Endpoint, StreamError, Trust};

use super::FOR_EVER;
use super::hub::Hub;

pub(crate) fn trust() -> Trust {
    // SAFETY: the peers are in this test, and write nothing that is on lease.
    unsafe { Trust::declare() }
}

#[test]
fn slices_both_ways_with_processes_and_none_with_a_vm() {
    let hub = Hub::with(|builder| builder.hold(FOR_EVER).trust_processes(trust()));
    let process = hub.process_with("p", |builder| builder.trust_host(trust()));
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        assert!(from.is_trusted());
        let mut loan = from.loan(8).unwrap();
        assert!(loan.is_in_place());
        loan.as_mut_slice().unwrap().copy_from_slice(b"in place");
        loan.set_filled(8);
        loan.send().unwrap();
        let lease = to.recv().unwrap().unwrap();
        assert_eq!(lease.read().as_slice().unwrap(), b"in place");
        assert_eq!(lease.into_bytes().unwrap(), &b"in place"[..]);
    }
    // The same driver, as the guest of a VM, which may reboot at any time.
    let guest = Endpoint::builder().attach_device(hub.vm()).unwrap();
    let (ours, theirs) = hub.joined(&guest);
    assert!(!ours.is_trusted());
    (&theirs).write_all(b"from a VM").unwrap();
    let lease = ours.recv().unwrap().unwrap();
    assert!(lease.is_in_place());
    assert!(lease.read().as_slice().is_none());
    let (error, lease) = lease.into_bytes().unwrap_err();
    assert_eq!(error, StreamError::Untrusted);
    assert_eq!(lease.to_vec(), b"from a VM", "what is left of it is whole");
    let mut loan = ours.loan(8).unwrap();
    assert!(loan.is_in_place());
    assert_eq!(loan.as_mut_slice().err(), Some(StreamError::Untrusted));
}

#[test]
fn without_a_declaration_no_peer_gives_plain_slices() {
    let hub = Hub::new();
    let process = hub.process("p");
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        assert!(!from.is_trusted());
        let mut loan = from.loan(8).unwrap();
        assert_eq!(loan.as_mut_slice().err(), Some(StreamError::Untrusted));
        loan.write_all(b"the same").unwrap();
        loan.send().unwrap();
        let lease = to.recv().unwrap().unwrap();
        assert!(lease.is_in_place());
        assert!(lease.read().as_slice().is_none());
        assert_eq!(lease.into_bytes().unwrap_err().0, StreamError::Untrusted);
    }
}
