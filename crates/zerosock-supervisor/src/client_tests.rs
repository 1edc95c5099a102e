//! Unit tests of `client`, with the supervisor's end of the socket in the test.

use super::*;
use std::os::unix::net::UnixStream;
use std::thread;

const LIMITS: Limits = Limits {
    entries: 3,
    bytes: 1000,
    descriptors: 2,
};

/// A client with a store that has the entry `old` with a descriptor, and the other end.
fn client() -> (Client, OwnedFd) {
    let (ours, theirs) = socket::pair().unwrap();
    let (a, _b) = UnixStream::pair().unwrap();
    let put = encode(&[Operation::Put("old", b"xy", 1)]).unwrap();
    socket::send(&ours, &put, &[a.as_fd()], SendFlags::empty()).unwrap();
    let end = encode(&[Operation::End(LIMITS)]).unwrap();
    socket::send(&ours, &end, &[], SendFlags::empty()).unwrap();
    let (client, entries) = Client::receive(theirs).unwrap();
    let entries: Vec<_> = entries
        .iter()
        .map(|e| (&*e.key, &*e.bytes, e.fds.len()))
        .collect();
    assert_eq!(entries, [("old", &b"xy"[..], 1)]);
    (client, ours)
}

/// The next message and its number of descriptors.
fn next(socket: &OwnedFd) -> Option<(Vec<u8>, usize)> {
    let (mut buffer, mut fds) = (vec![0; MAX_DATAGRAM], Vec::new());
    let length = socket::receive(socket, &mut buffer, &mut fds, RecvFlags::DONTWAIT).ok()?;
    buffer.truncate(length);
    Some((buffer, fds.len()))
}

#[test]
fn batch_is_sent_as_one_message_with_its_descriptors() {
    let (client, supervisor) = client();
    let (a, b) = UnixStream::pair().unwrap();
    let batch = Batch::default()
        .put("new", b"1", &[a.as_fd()])
        .rename("old", "older");
    client
        .send(&batch.write("older", b"reply").remove("gone"))
        .unwrap();
    let (message, fds) = next(&supervisor).unwrap();
    let expected = [
        Operation::Put("new", b"1", 1),
        Operation::Rename("old", "older"),
        Operation::Write("older", b"reply"),
        Operation::Remove("gone"),
    ];
    assert_eq!(
        (decode(&message, fds).unwrap(), fds),
        (expected.to_vec(), 1)
    );
    client.alive().unwrap();
    client.stopping().unwrap();
    client.notify("READY=1").unwrap();
    client.notify("MAINPID=1").unwrap_err();
    for expected in [
        Operation::Alive,
        Operation::Stopping,
        Operation::Notify("READY=1"),
    ] {
        let (message, fds) = next(&supervisor).unwrap();
        assert_eq!(decode(&message, fds).unwrap(), [expected]);
    }
    drop(b);
}

#[test]
fn batch_that_the_supervisor_would_refuse_is_not_sent() {
    let (client, supervisor) = client();
    let (a, _b) = UnixStream::pair().unwrap();
    let full = Batch::default().put("a", b"", &[a.as_fd(), a.as_fd()]);
    assert!(matches!(client.send(&full), Err(Error::Full)));
    let unknown = Batch::default().put("a", b"", &[]).rename("b", "c");
    assert!(matches!(client.send(&unknown), Err(Error::Invalid(_))));
    let long = [0; crate::MAX_BYTES + 1];
    client
        .send(&Batch::default().put("a", &long, &[]))
        .unwrap_err();
    assert_eq!(next(&supervisor), None);
    // The refused ones have left nothing: three entries fit.
    let three = Batch::default()
        .put("a", b"", &[a.as_fd()])
        .put("b", b"", &[]);
    client.send(&three).unwrap();
    assert_eq!(next(&supervisor).unwrap().1, 1);
}

#[test]
fn threads_send_whole_batches_in_one_order() {
    let (client, supervisor) = client();
    let last = thread::scope(|scope| {
        for name in ["x", "y"] {
            let client = &client;
            scope.spawn(move || {
                for n in 0..200_u32 {
                    client
                        .send(
                            &Batch::default()
                                .put("a", name.as_bytes(), &[])
                                .rename("a", "b"),
                        )
                        .unwrap();
                    client
                        .send(&Batch::default().put("b", &n.to_le_bytes(), &[]))
                        .unwrap();
                }
            });
        }
        let mut store = Store::new(LIMITS);
        store
            .apply(&[Operation::Put("old", b"xy", 1)], vec![()], |_| Ok(()))
            .unwrap();
        let mut received = 0;
        while received < 800 {
            let Some((message, 0)) = next(&supervisor) else {
                thread::yield_now();
                continue;
            };
            store
                .apply(&decode(&message, 0).unwrap(), Vec::new(), |_| Ok(()))
                .unwrap();
            received += 1;
        }
        store
            .entries()
            .map(|(key, value)| (key, value.bytes.clone()))
            .collect::<Vec<_>>()
    });
    let store = client.store.lock().unwrap();
    let ours: Vec<_> = store
        .entries()
        .map(|(key, value)| (key, value.bytes.clone()))
        .collect();
    assert_eq!(ours, last);
}

#[test]
fn end_of_the_supervisor_is_reported() {
    let (client, supervisor) = client();
    assert!(
        !client
            .wait_for_supervisor_end(Some(Duration::ZERO))
            .unwrap()
    );
    drop(supervisor);
    assert!(client.wait_for_supervisor_end(None).unwrap());
    assert!(matches!(client.alive(), Err(Error::NoSupervisor)));
    let batch = Batch::default().put("a", b"", &[]);
    assert!(matches!(client.send(&batch), Err(Error::NoSupervisor)));
    // The batch that was not sent is not in the store.
    assert_eq!(client.store.lock().unwrap().entries().count(), 1);
}

#[test]
fn process_without_a_supervisor_has_no_client() {
    assert!(matches!(Client::take(), Err(Error::NoSupervisor)));
}
