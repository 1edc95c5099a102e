//! Changes of the configuration: the option removed and added, another key, other groups, the VM removed.

use std::collections::BTreeMap;

use super::super::super::key::GuestKey;
use super::super::super::options::GuestEndpoints;
use super::super::super::wire::{Answer, Reason, Request};
use super::lab::*;
use crate::control::config::Reload;
use crate::device::guest_orders::{GuestEvent, GuestOrder};

fn set(options: Option<GuestEndpoints>) -> Reload {
    Reload {
        guest_endpoints: BTreeMap::from([(VM, options)]),
        ..Reload::default()
    }
}

#[test]
fn endpoints_end_when_the_option_is_removed() {
    let mut lab = Lab::new();
    let (mut running, key, _) = lab.run(named(1, "db"));
    let (mut checking, second) = lab.check(register(2));
    let mut queued = lab.agent();
    queued.send(&Request::Register(register(3)));
    let mut silent = lab.agent();
    assert!(lab.knows(3));
    lab.change(set(None));
    assert!(matches!(lab.order(), GuestOrder::Allow(None)));
    assert_eq!(lab.end_ordered(key), Reason::REMOVED);
    assert_eq!(lab.end_ordered(second), Reason::REMOVED);
    for agent in [&mut running, &mut checking, &mut queued] {
        assert_eq!(lab.last_answer(agent), Some(Answer::Ended(Reason::REMOVED)));
    }
    assert_eq!(lab.last_answer(&mut silent), refused(Reason::REMOVED));
    let (mut late, first) = lab.connect(VM);
    assert_eq!(first, refused(Reason::REMOVED));
    assert_eq!(lab.answer(&mut late), None);
    assert_eq!(lab.added, lab.removed);
    // And back.
    lab.change(set(Some(options())));
    assert!(matches!(lab.order(), GuestOrder::Allow(Some(_))));
    lab.run(named(1, "db"));
}

#[test]
fn another_key_leaves_endpoints_and_ends_streams_that_have_none() {
    let mut lab = Lab::new();
    let (mut running, first, _) = lab.run(named(1, "db"));
    let mut silent = lab.agent();
    let other = GuestKey::new(b"another key of this VM").unwrap();
    lab.change(set(Some(GuestEndpoints {
        key: other.clone(),
        names: Vec::new(),
        ..options()
    })));
    assert_eq!(lab.last_answer(&mut silent), refused(Reason::REMOVED));
    let mut old = lab.agent();
    old.send(&Request::Register(register(2)));
    assert_eq!(lab.last_answer(&mut old), refused(Reason::FAILED));
    let mut new = lab.agent();
    new.set_key(&other);
    new.send(&Request::Register(named(2, "web")));
    assert_eq!(lab.last_answer(&mut new), refused(Reason::NOT_PERMITTED));
    assert!(lab.has_no_order());
    running.send(&Request::End);
    lab.end_ordered(first);
    assert_eq!(
        lab.last_answer(&mut running),
        Some(Answer::Ended(Reason::REQUESTED))
    );
}

#[test]
fn an_option_for_a_vm_that_does_not_exist_changes_nothing() {
    let mut lab = Lab::new();
    let unknown = Reload {
        guest_endpoints: BTreeMap::from([(9.into(), None), (VM, None)]),
        ..Reload::default()
    };
    assert!(lab.try_change(unknown).is_err());
    lab.run(named(1, "db"));
}

#[test]
fn endpoints_end_with_their_vm() {
    let mut lab = Lab::new();
    let (mut running, key, _) = lab.run(named(1, "db"));
    let (mut checking, second) = lab.check(register(2));
    let mut silent = lab.agent();
    lab.change(Reload {
        remove: vec![VM],
        ..Reload::default()
    });
    assert_eq!(lab.last_answer(&mut silent), refused(Reason::REMOVED));
    assert!(matches!(lab.order(), GuestOrder::Allow(None)));
    assert!(matches!(lab.order(), GuestOrder::End { key: first, .. } if first == key));
    assert_eq!(lab.end_ordered(second), Reason::REMOVED);
    // Something still has the pages of the first: its agent hears nothing, and the VM's device stays to look at them.
    assert_eq!(
        lab.last_answer(&mut checking),
        Some(Answer::Ended(Reason::REMOVED))
    );
    assert!(lab.has_no_order());
    assert!(running.has_no_answer());
    assert!(!lab.removed.contains(&lab.addrs[0]));
    let reason = Reason::REMOVED;
    lab.report(GuestEvent::Ended { key, reason });
    assert_eq!(lab.last_answer(&mut running), Some(Answer::Ended(reason)));
    let removed = lab.until(|lab| (lab.removed.len() == 2).then(|| lab.removed.clone()));
    assert_eq!(removed, [lab.added[0], lab.addrs[0]]);
    let (_, first) = lab.connect(VM);
    assert_eq!(first, refused(Reason::REMOVED));
    lab.report(GuestEvent::Reset);
    assert_eq!(lab.directory.guests.endpoints(), []);
}
