//! Ends: the stream closes, the agent asks, the device reports it, at each stage. Queries in between.

use zerosock_proto::Cid;

use super::super::super::wire::{Answer, AttachmentId, Reason, Refusal, Request};
use super::lab::*;
use crate::device::guest_orders::{AttachmentKey, GuestEvent, GuestOrder};

/// The name of a stage, and what brings attachment 1 of an agent to it.
type NamedStage = (&'static str, fn(&mut Lab) -> (Agent, AttachmentKey));

/// The stages at which the device knows an attachment.
fn stages() -> Vec<NamedStage> {
    vec![
        ("checking", |lab| lab.check(named(1, "db"))),
        ("joining", |lab| {
            let (agent, key) = lab.check(named(1, "db"));
            lab.holds_routes = true;
            lab.report(GuestEvent::Checked {
                key,
                result: Ok(()),
            });
            lab.joined(key);
            (agent, key)
        }),
        ("accepted", |lab| {
            let (agent, key, _) = lab.accept(named(1, "db"));
            (agent, key)
        }),
        ("starting", |lab| {
            let (mut agent, key, _) = lab.accept(named(1, "db"));
            agent.send(&Request::Start(start()));
            assert!(matches!(lab.order(), GuestOrder::Start { .. }));
            (agent, key)
        }),
        ("running", |lab| {
            let (agent, key, _) = lab.run(named(1, "db"));
            (agent, key)
        }),
    ]
}

/// What another agent gets once all of it is free.
fn assert_free(lab: &mut Lab, stage: &str) {
    assert!(!lab.knows(1), "{stage}");
    assert_eq!(lab.added, lab.removed, "{stage}");
    assert_eq!(lab.directory.guests.endpoints(), [], "{stage}");
    let (mut agent, key, _) = lab.accept(named(1, "db"));
    agent.send(&Request::End);
    lab.end_ordered(key);
    lab.last_answer(&mut agent);
}

#[test]
fn an_endpoint_ends_with_its_stream_at_each_stage() {
    for (stage, bring) in stages() {
        let mut lab = Lab::new();
        let (agent, key) = bring(&mut lab);
        lab.holds_routes = false;
        drop(agent);
        // The device touches the pages until it has said that it does not.
        let GuestOrder::End { key: ended, reason } = lab.order() else {
            panic!("{stage}: not ended");
        };
        assert_eq!((ended, reason), (key, Reason::REQUESTED), "{stage}");
        assert!(lab.knows(1), "{stage}");
        lab.report_end(key, reason);
        lab.await_forgotten(1);
        assert_free(&mut lab, stage);
    }
}

#[test]
fn an_agent_may_end_its_endpoint_at_each_stage() {
    for (stage, bring) in stages() {
        let mut lab = Lab::new();
        let (mut agent, key) = bring(&mut lab);
        lab.holds_routes = false;
        agent.send(&Request::End);
        assert_eq!(lab.end_ordered(key), Reason::REQUESTED, "{stage}");
        let mut answer = lab.answer(&mut agent);
        if let Some(Answer::Accepted { .. }) = answer {
            answer = lab.answer(&mut agent);
        }
        assert_eq!(answer, Some(Answer::Ended(Reason::REQUESTED)), "{stage}");
        assert_eq!(lab.answer(&mut agent), None, "{stage}");
        assert_free(&mut lab, stage);
    }
}

#[test]
fn an_agent_learns_of_an_end_that_the_device_reports() {
    for (stage, bring) in stages() {
        let mut lab = Lab::new();
        let (mut agent, key) = bring(&mut lab);
        lab.holds_routes = false;
        let reason = Reason::DEVICE_RESET;
        lab.report_end(key, reason);
        let mut answer = lab.answer(&mut agent);
        if let Some(Answer::Accepted { .. }) = answer {
            answer = lab.answer(&mut agent);
        }
        match stage {
            "checking" => assert_eq!(answer, refused(reason)),
            _ => assert_eq!(answer, Some(Answer::Ended(reason)), "{stage}"),
        }
        assert_eq!(lab.answer(&mut agent), None, "{stage}");
        assert_free(&mut lab, stage);
    }
}

/// The device has refused the pages already when it gets the order to end. It does not know the attachment then, and
/// sends no `Ended`.
#[test]
fn a_refusal_that_crosses_the_order_to_end_is_the_end() {
    let mut lab = Lab::new();
    let (mut agent, key) = lab.check(named(1, "db"));
    agent.send(&Request::End);
    assert!(matches!(lab.order(), GuestOrder::End { .. }));
    let result = Err(Refusal::from(Reason::OUTSIDE));
    lab.report(GuestEvent::Checked { key, result });
    // It is the end that was asked for, and says nothing of the pages.
    assert_eq!(
        lab.last_answer(&mut agent),
        Some(Answer::Ended(Reason::REQUESTED))
    );
    assert_free(&mut lab, "refused");
    // The other order: the device has accepted the pages.
    let (mut agent, key) = lab.check(named(2, "db"));
    agent.send(&Request::End);
    assert!(matches!(lab.order(), GuestOrder::End { .. }));
    lab.report(GuestEvent::Checked {
        key,
        result: Ok(()),
    });
    assert!(lab.has_no_order(), "it is not accepted any more");
    let reason = Reason::REQUESTED;
    lab.report(GuestEvent::Ended { key, reason });
    assert_eq!(lab.last_answer(&mut agent), Some(Answer::Ended(reason)));
}

/// Reports for an attachment that is gone have no effect.
#[test]
fn late_reports_are_ignored() {
    let mut lab = Lab::new();
    let (mut agent, key, _) = lab.run(named(1, "db"));
    agent.send(&Request::End);
    let reason = lab.end_ordered(key);
    lab.report(GuestEvent::Ended { key, reason });
    lab.last_answer(&mut agent);
    lab.report(GuestEvent::Ended { key, reason });
    lab.report(GuestEvent::Started { key });
    lab.report(GuestEvent::Checked {
        key,
        result: Ok(()),
    });
    assert!(lab.has_no_order());
    assert_eq!(lab.removed.len(), 1);
}

/// An agent that was killed may have left a request that is not read yet, on a stream that its kernel still closes. Its
/// successor gives the pages away once they are said to be unknown.
#[test]
fn no_request_is_granted_behind_a_query_that_was_answered_with_unknown() {
    let mut lab = Lab::new();
    let mut old = lab.agent();
    let mut unrelated = lab.agent();
    assert!(!lab.knows(1));
    old.send(&Request::Register(register(1)));
    assert_eq!(
        lab.last_answer(&mut old),
        refused(Reason::ATTACHMENT_IN_USE)
    );
    // Another attachment on a stream of that age, and the same on a younger one.
    unrelated.send(&Request::Register(register(2)));
    assert!(matches!(lab.order(), GuestOrder::Check { .. }));
    drop(unrelated);
    assert!(matches!(lab.order(), GuestOrder::End { .. }));
    let mut agent = lab.agent();
    agent.send(&Request::Register(register(1)));
    assert!(lab.knows(1));
    // The other VM has numbers of its own.
    let (mut other, _) = lab.connect(OTHER_VM);
    other.send(&Request::Query(AttachmentId([1; 16])));
    assert_eq!(lab.last_answer(&mut other), Some(Answer::Known(false)));
}

/// The same with the older stream in the inbox, when the query arrives.
#[test]
fn a_query_comes_behind_all_streams_that_were_opened_before_it() {
    let mut lab = Lab::new();
    for _ in 0..50 {
        let mut asking = lab.agent();
        let query = asking.encode(&Request::Query(AttachmentId([1; 16])));
        let mut old = lab.agent_beside(|| asking.send_bytes(&query));
        old.send(&Request::Register(register(1)));
        if lab.last_answer(&mut asking) == Some(Answer::Known(false)) {
            let answer = lab.last_answer(&mut old);
            assert_eq!(answer, refused(Reason::ATTACHMENT_IN_USE));
            continue;
        }
        // The request was faster.
        let GuestOrder::Check { key, .. } = lab.order() else {
            panic!("no check");
        };
        drop(old);
        lab.end_ordered(key);
        lab.await_forgotten(1);
    }
}

/// Without the reservation the CID would be free as soon as the routes are changed, before every worker has removed the
/// process.
#[test]
fn an_endpoint_does_not_get_the_cid_of_a_process_that_leaves() {
    let mut lab = Lab::new();
    let first = Cid::new(*CIDS.start());
    lab.holds_commands = true;
    let process = lab.attach(first);
    lab.holds_routes = true;
    drop(process);
    lab.holds_commands = false;
    lab.until(|lab| (lab.removed == lab.added).then_some(()));
    let (mut agent, key) = lab.check(register(1));
    lab.holds_routes = false;
    lab.report(GuestEvent::Checked {
        key,
        result: Ok(()),
    });
    lab.joined(key);
    let Some(Answer::Accepted { cid, .. }) = lab.answer(&mut agent) else {
        panic!("not accepted");
    };
    assert_eq!(cid.get(), first.get() + 1);
    // It is free again.
    lab.attach(first);
}
