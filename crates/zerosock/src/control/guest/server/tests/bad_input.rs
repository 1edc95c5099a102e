//! What no correct agent sends, and what it may not have: each is refused by name and counted, and other agents go on.

use std::time::{Duration, Instant};

use zerosock_proto::Cid;
use zerosock_virtio::outbox::DeviceAddr;

use super::super::super::key::GuestKey;
use super::super::super::wire::{Answer, AttachmentId, Reason, Refusal, Request};
use super::super::{GuestServer, TimeLimits};
use super::lab::*;
use crate::device::guest_orders::{GuestEvent, GuestOrder};

/// The header of a `Register` with 2^20 extents.
fn header_of_a_million_extents() -> Vec<u8> {
    let mut header = b"zsge\x01\0\0\0\x01\0\0\0".to_vec();
    header.extend(((16u32 << 20) + 24 + 88).to_le_bytes());
    header
}

#[test]
fn bad_requests_are_refused_and_counted() {
    let mut lab = Lab::new();
    let (mut running, key, _) = lab.run(named(1, "db"));
    let bad: [(&[u8], Reason); 4] = [
        (&header_of_a_million_extents(), Reason::BAD_REQUEST),
        (b"GET / HTTP/1.1\r\n\r\n", Reason::BAD_REQUEST),
        (b"zsge\x02\0\0\0", Reason::VERSION_MISMATCH),
        (b"zsge\x01\0\0\0\x07\0\0\0\0\0\0\0", Reason::BAD_REQUEST),
    ];
    for (bytes, reason) in bad {
        let mut agent = lab.agent();
        agent.send_bytes(bytes);
        assert_eq!(lab.last_answer(&mut agent), refused(reason), "{bytes:x?}");
    }
    let mut early = lab.agent();
    early.send(&Request::Start(start()));
    assert_eq!(lab.last_answer(&mut early), refused(Reason::BAD_REQUEST));
    assert!(lab.has_no_order());
    assert_eq!(lab.stats().guest_refused, 5);
    // The others did not notice.
    running.send(&Request::End);
    assert_eq!(lab.end_ordered(key), Reason::REQUESTED);
}

/// A guest with many faults does not keep those of another from the log.
#[test]
fn the_log_has_a_limit_for_each_vm() {
    let limits = TimeLimits::default();
    let mut server = GuestServer::new(CIDS, limits, Default::default()).unwrap();
    for (number, vm) in (0..).zip([VM, OTHER_VM]) {
        server.add_vm(vm, share(DeviceAddr { worker: 0, number }));
    }
    // The period of the limit may end in between.
    let admitted = (0..1_000).map_while(|_| server.admit_log(VM));
    assert!(admitted.count() < 1_000);
    assert!(server.admit_log(OTHER_VM).is_some());
    assert!(server.admit_log(Cid::new(5)).is_none(), "not configured");
}

#[test]
fn half_a_request_has_no_effect() {
    let mut lab = Lab::new();
    for cut in [1, 16, 17, 100] {
        let mut half = lab.agent();
        let bytes = half.encode(&Request::Register(named(1, "db")));
        assert!(bytes.len() > 101);
        half.send_bytes(&bytes[..cut]);
        assert!(!lab.knows(1), "{cut}");
        drop(half);
    }
    // Byte by byte it is a whole one.
    let mut agent = lab.agent();
    for byte in agent.encode(&Request::Register(named(1, "db"))) {
        agent.send_bytes(&[byte]);
    }
    let GuestOrder::Check { key, .. } = lab.order() else {
        panic!("no check");
    };
    // Half of a second request, and the end.
    agent.send_bytes(b"zsge");
    drop(agent);
    assert_eq!(lab.end_ordered(key), Reason::REQUESTED);
}

#[test]
fn a_wrong_or_replayed_tag_is_refused_and_is_no_failure_of_pages() {
    let mut lab = Lab::new();
    let mut first = lab.agent();
    let replayed = first.encode(&Request::Register(register(1)));
    for n in 0..12 {
        let mut agent = lab.agent();
        match n % 3 {
            0 => agent.send_bytes(&replayed),
            1 => {
                agent.set_key(&GuestKey::none());
                agent.send(&Request::Register(register(1)));
            }
            _ => {
                let mut bytes = agent.encode(&Request::Register(register(1)));
                let at = bytes.len() - 40;
                bytes[at] ^= 1;
                agent.send_bytes(&bytes);
            }
        }
        assert_eq!(lab.last_answer(&mut agent), refused(Reason::FAILED), "{n}");
    }
    assert!(lab.has_no_order());
    let stats = lab.stats();
    assert_eq!((stats.guest_refused, stats.guest_page_failures), (12, 0));
    first.send_bytes(&replayed);
    assert!(
        matches!(lab.order(), GuestOrder::Check { .. }),
        "the port is open"
    );
}

#[test]
fn a_second_request_of_an_attachment_is_refused() {
    let mut lab = Lab::new();
    let (mut running, key, _) = lab.run(named(1, "db"));
    let mut second = lab.agent();
    second.send(&Request::Register(register(1)));
    assert_eq!(
        lab.last_answer(&mut second),
        refused(Reason::ATTACHMENT_IN_USE)
    );
    // On the same stream, and any other first request: the agent does not speak the protocol.
    running.send(&Request::Query(AttachmentId([1; 16])));
    assert_eq!(lab.end_ordered(key), Reason::BAD_REQUEST);
    assert_eq!(
        lab.last_answer(&mut running),
        Some(Answer::Ended(Reason::BAD_REQUEST))
    );
    for bad in [Request::Register(register(2)), Request::Start(start())] {
        let (mut agent, key, _) = lab.run(register(3));
        agent.send(&bad);
        // What follows is not read.
        agent.send(&Request::End);
        assert_eq!(lab.end_ordered(key), Reason::BAD_REQUEST, "{bad:?}");
        assert_eq!(
            lab.last_answer(&mut agent),
            Some(Answer::Ended(Reason::BAD_REQUEST))
        );
    }
    let (mut agent, key, _) = lab.accept(register(3));
    agent.send_bytes(b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(lab.end_ordered(key), Reason::BAD_REQUEST);
    assert_eq!(
        lab.last_answer(&mut agent),
        Some(Answer::Ended(Reason::BAD_REQUEST))
    );
}

#[test]
fn a_name_that_is_taken_and_any_requested_cid_are_refused() {
    let mut lab = Lab::new();
    let with_cid = |id, cid| {
        let mut request = register(id);
        request.endpoint.cid = Some(Cid::new(cid));
        request
    };
    let (mut running, key, cid) = lab.run(named(1, "db"));
    assert!(CIDS.contains(&cid.get()));
    for (request, reason) in [
        (named(2, "db"), Reason::NAME_TAKEN),
        (named(2, "cache"), Reason::NOT_PERMITTED),
        // A CID that is free, that of the endpoint, that of a VM, and one outside of the range.
        (with_cid(2, 1007), Reason::NOT_PERMITTED),
        (with_cid(2, cid.get()), Reason::NOT_PERMITTED),
        (with_cid(2, 3), Reason::NOT_PERMITTED),
        (with_cid(2, 1100), Reason::NOT_PERMITTED),
    ] {
        let (mut agent, _) = lab.connect(OTHER_VM);
        agent.send(&Request::Register(request.clone()));
        assert_eq!(lab.last_answer(&mut agent), refused(reason), "{request:?}");
    }
    assert_eq!(lab.stats().guest_refused, 6);
    running.send(&Request::End);
    lab.end_ordered(key);
    lab.last_answer(&mut running);
    lab.accept(named(2, "db"));
}

#[test]
fn a_vm_has_no_more_endpoints_and_memory_than_it_may_have() {
    let mut lab = Lab::new();
    let of = |id, pages: u64| {
        let mut request = register(id);
        request.extents[0].len = pages * HUGE;
        request
    };
    let refuse = |lab: &mut Lab, request| {
        let mut agent = lab.agent();
        agent.send(&Request::Register(request));
        assert_eq!(lab.last_answer(&mut agent), refused(Reason::FULL));
    };
    refuse(&mut lab, of(1, 17));
    let mut wrapping = of(1, u64::MAX / HUGE);
    wrapping.extents.push(wrapping.extents[0]);
    wrapping.extents.push(wrapping.extents[0]);
    refuse(&mut lab, wrapping);
    let mut kept = vec![lab.accept(of(1, 10))];
    refuse(&mut lab, of(2, 7));
    kept.extend([2, 3, 4].map(|id| lab.accept(of(id, 1))));
    refuse(&mut lab, of(5, 1));
    // It counts until the device is gone.
    let (agent, key, _) = kept.remove(0);
    drop(agent);
    assert!(matches!(lab.order(), GuestOrder::End { .. }));
    refuse(&mut lab, of(5, 1));
    lab.report(GuestEvent::Ended {
        key,
        reason: Reason::REQUESTED,
    });
    lab.await_forgotten(1);
    lab.accept(of(5, 1));
}

/// Those without a valid request make room, in the order in which they were opened.
#[test]
fn streams_without_an_attachment_are_few() {
    let mut lab = Lab::new();
    let (_running, ..) = lab.run(named(1, "db"));
    let mut idle: Vec<_> = (0..32).map(|_| lab.agent()).collect();
    idle[1].send_bytes(b"zsge");
    // A refused one that its process keeps open.
    idle[2].send_bytes(b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(lab.last_answer(&mut idle[2]), refused(Reason::BAD_REQUEST));
    let mut kept = vec![lab.agent(), lab.agent(), lab.agent()];
    for agent in &mut idle[..2] {
        assert_eq!(lab.answer(agent), refused(Reason::FULL));
        assert_eq!(lab.answer(agent), None);
    }
    // With a valid request they keep their places.
    for agent in idle.iter_mut().skip(3).chain(&mut kept) {
        agent.send(&Request::End);
        assert_eq!(
            lab.last_answer(agent),
            Some(Answer::Ended(Reason::REQUESTED))
        );
    }
    let (mut late, first) = lab.connect(VM);
    assert_eq!(first, refused(Reason::FULL));
    assert_eq!(lab.answer(&mut late), None);
    // Other VMs have their own, and one that closes makes room.
    let (_other, first) = lab.connect(OTHER_VM);
    assert!(matches!(first, Some(Answer::Hello(_))));
    drop(idle.pop());
    while !matches!(lab.connect(VM).1, Some(Answer::Hello(_))) {}
}

/// A stream with half a request is closed after a time.
#[test]
fn agents_that_send_no_request_in_time_are_closed() {
    let limits = TimeLimits {
        request: Duration::from_millis(200),
        start: Duration::from_millis(200),
        ..TimeLimits::default()
    };
    let mut lab = Lab::with(limits);
    let mut late = lab.agent();
    let bytes = late.encode(&Request::Register(register(1)));
    late.send_bytes(&bytes[..20]);
    assert_eq!(lab.answer(&mut late), None);
    // An endpoint that is not started ends after the same time.
    let (mut idle, key, _) = lab.accept(register(1));
    assert_eq!(lab.end_ordered(key), Reason::REQUESTED);
    assert_eq!(lab.answer(&mut idle), None);
}

#[test]
fn pages_are_checked_for_one_request_at_a_time() {
    let mut lab = Lab::new();
    let (_first, key) = lab.check(register(1));
    let mut second = lab.agent();
    second.send(&Request::Register(register(2)));
    assert!(lab.knows(2));
    assert!(lab.has_no_order());
    let result = Err(Refusal {
        reason: Reason::OUTSIDE,
        index: 0,
    });
    lab.report(GuestEvent::Checked { key, result });
    assert!(matches!(lab.order(), GuestOrder::Check { .. }));
}

#[test]
fn refusals_of_extents_are_answered_at_once_with_their_index() {
    let mut lab = Lab::new();
    for n in 0..8 {
        let reason = [
            Reason::OUTSIDE,
            Reason::OVERLAP,
            Reason::IN_USE,
            Reason::NOT_READY,
        ][n % 4];
        let (mut agent, key) = lab.check(register(1));
        let refusal = Refusal { reason, index: 3 };
        lab.report(GuestEvent::Checked {
            key,
            result: Err(refusal),
        });
        assert_eq!(lab.last_answer(&mut agent), Some(Answer::Refused(refusal)));
    }
    let stats = lab.stats();
    assert_eq!((stats.guest_page_failures, stats.guest_refused), (0, 8));
}

/// A page without its value is answered late and without its place, delays the next check, and shuts the port the fifth
/// time.
#[test]
fn five_pages_without_their_values_shut_the_port_until_the_next_reset() {
    let limits = TimeLimits {
        failure: Duration::from_millis(150),
        ..TimeLimits::default()
    };
    let mut lab = Lab::with(limits);
    let (mut running, first, _) = lab.run(named(9, "db"));
    let failed = || {
        Err(Refusal {
            reason: Reason::FAILED,
            index: 7,
        })
    };
    for n in 0..5 {
        let (mut agent, key) = lab.check(register(1));
        let mut next = lab.agent();
        next.send(&Request::Register(register(2)));
        assert!(lab.knows(2));
        let before = Instant::now();
        lab.report(GuestEvent::Checked {
            key,
            result: failed(),
        });
        // Each of the two is late: the one that is waited for first shows when it came.
        let mut next_check = None;
        if n % 2 == 1 {
            next_check = Some(lab.order());
            let after = before.elapsed();
            assert!(after >= limits.failure, "{n}: {after:?}");
        }
        assert_eq!(lab.last_answer(&mut agent), refused(Reason::FAILED));
        let after = before.elapsed();
        assert!(after >= limits.failure, "{n}: {after:?}");
        if n == 4 {
            // It was waiting, and its pages are not looked at.
            assert_eq!(lab.last_answer(&mut next), refused(Reason::FAILED));
            break;
        }
        let GuestOrder::Check { key, .. } = next_check.unwrap_or_else(|| lab.order()) else {
            panic!("no check");
        };
        lab.report(GuestEvent::Checked {
            key,
            result: Err(Reason::OUTSIDE.into()),
        });
        lab.last_answer(&mut next);
    }
    assert!(lab.has_no_order());
    let (mut late, answer) = lab.connect(VM);
    assert_eq!(answer, refused(Reason::FAILED));
    assert_eq!(lab.answer(&mut late), None);
    let (_other, answer) = lab.connect(OTHER_VM);
    assert!(
        matches!(answer, Some(Answer::Hello(_))),
        "the other VM's is open"
    );
    assert_eq!(lab.stats().guest_page_failures, 5);
    // Endpoints go on.
    running.send(&Request::End);
    lab.end_ordered(first);
    lab.report(GuestEvent::Reset);
    lab.accept(register(1));
}
