//! An endpoint that never drops its leases, on either side, does not stop others.

use std::io::{ErrorKind, Read, Write};

use zerosock::vsock::Stream;

use super::hub::Hub;
use crate::common::{assert_bytes, bytes};

/// Keeps leases on everything that `from` sends, every second one under a reading; other
/// connections must continue.
fn hold_all(from: &Stream, to: &Stream, others: impl FnOnce()) {
    let mut leases = Vec::new();
    for round in 0..200 {
        from.batch().write(&bytes(round, 1000)).unwrap();
        let lease = to.recv().unwrap().unwrap();
        assert_eq!(lease.len(), 1000);
        leases.push(lease);
    }
    let readings: Vec<_> = leases.iter().step_by(2).map(|lease| lease.read()).collect();
    others();
    for (n, reading) in readings.iter().enumerate() {
        assert!(!reading.is_revoked());
        assert_bytes(&reading.to_vec(), &bytes(2 * n as u64, 1000));
    }
    drop(readings);
    for (n, lease) in leases.iter().enumerate() {
        assert_bytes(&lease.to_vec(), &bytes(n as u64, 1000));
    }
}

#[test]
fn leases_that_are_never_dropped_stop_no_transfer_connect_or_reset() {
    let hub = Hub::with(|builder| builder);
    let process = hub.process("p");
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        hold_all(from, to, || {
            let (one, two) = hub.joined(&process);
            for (from, to) in [(&one, &two), (&two, &one)] {
                for round in 0..50 {
                    (&*from).write_all(&bytes(round, 5000)).unwrap();
                    let mut got = vec![0; 5000];
                    (&*to).read_exact(&mut got).unwrap();
                    assert_bytes(&got, &bytes(round, 5000));
                }
            }
            two.reset();
            let error = one.recv().map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        });
    }
}
