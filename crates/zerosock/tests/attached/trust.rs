//! A program that declares trust in processes gets plain slices of their memory, and none of a
//! VM's.

use std::io::{BufRead, Read, Write};

use bytes::Buf;
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

#[test]
fn windows_and_cursors_give_the_bytes_of_any_peer_once_and_in_order() {
    for trusts in [false, true] {
        let hub = Hub::with(|builder| match trusts {
            true => builder.hold(FOR_EVER).trust_processes(trust()),
            false => builder.hold(FOR_EVER),
        });
        let process = hub.process("p");
        let (ours, theirs) = hub.joined(&process);
        for len in [1, 511, 512, 513, 4096, 5000, 20_000] {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256) as u8).collect();
            (&theirs).write_all(&bytes).unwrap();
            let lease = ours.recv().unwrap().unwrap();
            assert!(lease.is_in_place());
            assert_eq!(lease.read().as_slice().is_some(), trusts);
            assert_eq!(lease.len(), len);
            let mut seen = Vec::new();
            lease
                .read()
                .windows(|window| seen.extend_from_slice(window));
            assert_eq!(seen, bytes);
            // Through each trait in turn, so that one goes on where another has stopped.
            let (mut cursor, mut seen) = (lease.read().into_cursor(), Vec::new());
            while cursor.has_remaining() {
                assert_eq!(cursor.remaining(), len - seen.len());
                seen.push(cursor.get_u8());
                let window = cursor.fill_buf().unwrap();
                let (count, end) = (window.len() / 3, window.is_empty());
                assert_eq!(end, seen.len() == len);
                seen.extend_from_slice(&window[..count]);
                cursor.consume(count);
                let mut out = [0; 700];
                let count = cursor.read(&mut out).unwrap();
                assert_eq!(count, out.len().min(len - seen.len()));
                seen.extend_from_slice(&out[..count]);
                let count = cursor.chunk().len() / 2;
                seen.extend_from_slice(&cursor.chunk()[..count]);
                cursor.advance(count);
            }
            assert_eq!(seen, bytes);
            assert_eq!(cursor.read(&mut [0; 8]).unwrap(), 0);
            cursor.consume(1);
            assert_eq!((cursor.remaining(), cursor.chunk()), (0, &[][..]));
        }
    }
}
