//! The server against a stand-in for workers and devices: the steps of the protocol, its end at each stage, and what
//! agents do that no correct one does.

mod bad_input;
mod device;
mod lab;
mod lifetime;
mod reloading;

use lab::*;

use super::super::wire::{Answer, Reason, Request};
use super::TimeLimits;
use crate::device::guest_orders::{GuestEvent, GuestOrder};

#[test]
fn the_limits_are_those_of_the_documents() {
    let limits = TimeLimits::default();
    assert_eq!(limits.failure.as_secs(), 10);
    assert_eq!(limits.request.as_secs(), 10);
    assert_eq!(limits.start.as_secs(), 60);
}

/// From `Hello` to `Ended`, with what the device is ordered and what others see.
#[test]
fn an_endpoint_exists_from_accepted_until_ended() {
    let mut lab = Lab::new();
    let mut agent = lab.agent();
    agent.send(&Request::Register(named(1, "db")));
    let GuestOrder::Check { key, .. } = lab.order() else {
        panic!("no check");
    };
    assert_eq!(lab.added, [], "the pages come first");
    assert!(lab.knows(1));
    lab.holds_routes = true;
    lab.report(GuestEvent::Checked {
        key,
        result: Ok(()),
    });
    let token = lab.joined(key);
    // The other worker has not taken the routes.
    assert!(lab.has_no_order());
    assert_eq!(lab.directory.guests.endpoints(), []);
    lab.holds_routes = false;
    let cid = match lab.answer(&mut agent) {
        Some(Answer::Accepted { cid, token: told }) if told == token => cid,
        other => panic!("{other:?}"),
    };
    assert!(CIDS.contains(&cid.get()));
    let listed = lab.directory.guests.endpoints();
    assert_eq!((listed.len(), listed[0].cid, listed[0].vm), (1, cid, VM));
    assert_eq!(
        (listed[0].memory, listed[0].name.clone()),
        (HUGE, "db".parse().ok())
    );
    assert_eq!(lab.directory.resolve(&"db".parse().unwrap()), Some(cid));
    agent.send(&Request::Start(start()));
    assert!(
        matches!(lab.order(), GuestOrder::Start { key: started, start: told, .. } if (started, told) == (key, start()))
    );
    lab.report(GuestEvent::Started { key });
    let features = start().features;
    assert_eq!(lab.answer(&mut agent), Some(Answer::Started { features }));
    agent.send(&Request::End);
    assert!(matches!(lab.order(), GuestOrder::End { .. }));
    assert!(lab.knows(1), "the device still touches the pages");
    assert_eq!(lab.removed, []);
    lab.holds_routes = true;
    let reason = Reason::REQUESTED;
    lab.report(GuestEvent::Ended { key, reason });
    lab.until(|lab| lab.removed.first().copied());
    assert!(lab.knows(1), "a worker may have the device");
    assert_eq!(lab.directory.guests.endpoints(), []);
    lab.holds_routes = false;
    assert_eq!(lab.last_answer(&mut agent), Some(Answer::Ended(reason)));
    assert!(!lab.knows(1));
    assert_eq!(lab.added, lab.removed);
    let stats = lab.stats();
    assert_eq!((stats.guest_registered, stats.guest_endpoints), (1, 0));
}

/// Nothing is used up: CIDs, names, addresses.
#[test]
fn endpoints_come_and_go() {
    let mut lab = Lab::new();
    for n in 0..200 {
        let (mut agent, key, _) = lab.run(named(1, "db"));
        if n % 2 == 0 {
            agent.send(&Request::End);
            lab.end_ordered(key);
            lab.last_answer(&mut agent);
        } else {
            drop(agent);
            lab.end_ordered(key);
            lab.await_forgotten(1);
        }
    }
    assert_eq!(lab.added.len(), 200);
    assert!(
        lab.added.iter().all(|addr| (addr.number as u16) < 4),
        "{:?}",
        lab.added
    );
    assert_eq!(lab.stats().guest_registered, 200);
}
