//! Unit tests of `mod`.

use zerosock_proto::Cid;

use super::*;
use crate::routing::access::Cids;

fn rule(first: u32, last: u32, to: &str) -> ForwardRule {
    ForwardRule::new(Port::new(first)..=Port::new(last), to.parse().unwrap())
}

fn rules(rules: impl IntoIterator<Item = ForwardRule>) -> Result<ForwardRules, RuleError> {
    ForwardRules::default().replaced(rules.into_iter().collect())
}

fn guest(cid: u32) -> EndpointTraits<'static> {
    EndpointTraits {
        cid: Cid::new(cid),
        groups: &[],
        name: None,
    }
}

#[test]
fn the_first_rule_for_endpoint_port_and_type_decides() {
    let cids = Cids::new(Cid::new(3), Cid::new(4)).unwrap();
    let mut first = rule(80, 90, "unix:/first");
    first.from = vec![Party::Cids(cids)];
    let all = rules([first, rule(85, 85, "unix:/second"), rule(80, 80, "udp:a:1")]).unwrap();
    let found = |cid, port, socket_type| {
        let found = all.find(guest(cid), Port::new(port), socket_type);
        found.map(|active| active.rule.to.to_string())
    };
    use SocketType::{SeqPacket, Stream};
    assert_eq!(found(3, 85, Stream).as_deref(), Some("unix:/first"));
    assert_eq!(found(5, 85, Stream).as_deref(), Some("unix:/second"));
    assert_eq!(found(5, 80, Stream), None);
    assert_eq!(found(5, 80, SeqPacket).as_deref(), Some("udp:a:1"));
    assert_eq!(found(3, 79, Stream), None);
    assert_eq!(found(3, 91, Stream), None);
}

#[test]
fn conflicts_and_rules_that_cannot_match_are_named() {
    let host = ForwardRule {
        from: vec![Party::Host],
        ..rule(1, 1, "unix:/a")
    };
    let denied = ForwardRule {
        deny: vec!["127.0.0.0/8".parse().unwrap()],
        ..rule(1, 1, "tcp:127.0.0.1:1")
    };
    for (wanted, error) in [
        (vec![rule(2, 1, "unix:/a")], RuleError::Ports(0)),
        (vec![rule(2, u32::MAX, "unix:/a")], RuleError::Ports(0)),
        (vec![rule(2, 2, "unix:/a"), host], RuleError::From(1)),
        (vec![rule(1, 65_536, "tcp:a")], RuleError::OwnPort(0)),
        (vec![rule(0, 1, "tcp:a")], RuleError::OwnPort(0)),
        (
            vec![denied],
            RuleError::DeniedTarget {
                rule: 0,
                address: [127, 0, 0, 1].into(),
            },
        ),
        (
            vec![
                rule(1, 5, "unix:/a"),
                rule(6, 9, "unix:/b"),
                rule(4, 4, "tcp:a:1"),
            ],
            RuleError::Overlap {
                first: 0,
                second: 2,
                port: Port::new(4),
            },
        ),
    ] {
        assert_eq!(rules(wanted.clone()).unwrap_err(), error, "{wanted:?}");
    }
    rules([rule(1, 5, "unix:/a"), rule(4, 4, "udp:a:1")]).expect("of different types");
}

#[test]
fn an_unchanged_rule_keeps_its_counters() {
    let before = rules([rule(1, 1, "unix:/a"), rule(2, 2, "unix:/b")]).unwrap();
    let mut changed = rule(1, 1, "unix:/a");
    changed.max_connections = Some(1);
    let after = before
        .replaced(vec![rule(2, 2, "unix:/b"), changed])
        .unwrap();
    let (old, new): (Vec<_>, Vec<_>) = (before.states().collect(), after.states().collect());
    assert!(Arc::ptr_eq(&old[1], &new[0]));
    assert!(!Arc::ptr_eq(&old[0], &new[1]));
    // The changed one goes on counting.
    let one = old[0].admit().unwrap();
    assert!(new[1].admit().is_err());
    drop(one);
    assert!(new[1].admit().is_ok());
}
