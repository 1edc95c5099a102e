//! Unit tests of `mod`.

use super::*;

#[test]
fn only_devices_with_a_common_group_reach_each_other() {
    let mut routes = Routes::default();
    let cid = Cid::new;
    for (n, groups) in [(3, "a b"), (4, "b"), (5, "c"), (6, "a")] {
        let groups: Vec<String> = groups.split(' ').map(String::from).collect();
        routes.add(
            cid(n),
            DeviceAddr {
                worker: 0,
                number: n,
            },
            &groups,
        );
    }
    let reached = |routes: &Routes, from| {
        let to = |n: &u32| Address::new(cid(*n), Port::new(1));
        let reached = |n: &u32| routes.may_reach(cid(from), to(n));
        (3..10).filter(reached).collect::<Vec<u32>>()
    };
    assert_eq!(reached(&routes, 3), [4, 6]);
    assert_eq!(reached(&routes, 4), [3]);
    assert!(reached(&routes, 5).is_empty());
    assert!(reached(&routes, 9).is_empty(), "no endpoint has this CID");
    routes.remove(cid(4));
    assert_eq!(reached(&routes, 3), [6]);
    assert!(!routes.contains(cid(4)) && routes.contains(cid(6)));
    // The host needs no group, and cannot reach itself.
    let host = Address::new(Cid::HOST, Port::new(1));
    assert!(routes.may_reach(cid(5), host));
    assert!(routes.may_reach(Cid::HOST, Address::new(cid(5), Port::new(1))));
    assert!(!routes.may_reach(Cid::HOST, host));
    assert!(!routes.may_reach(Cid::HOST, Address::new(cid(9), Port::new(1))));
}

#[test]
fn the_access_list_goes_before_groups_and_after_named_ports() {
    use crate::routing::access::{Party, Ports, Rule};
    let mut routes = Routes::default();
    let (one, two) = (Cid::new(3), Cid::new(4));
    let device = DeviceAddr {
        worker: 0,
        number: 0,
    };
    routes.add(one, device, &["a".into()]);
    routes.add(two, device, &["a".into()]);
    routes.set_name(two, &"db".parse().unwrap());
    routes.limit_ports(two, [5, 6].map(Port::new));
    let rule = |verdict, from, port, to| Rule {
        name: None,
        verdict,
        from: vec![from],
        to: vec![to],
        ports: Ports::one(Port::new(port)).unwrap(),
    };
    let db = Party::Name("db".parse().unwrap());
    routes.set_access(AccessList::new([
        rule(Verdict::Deny, Party::Any, 5, db.clone()),
        rule(Verdict::Allow, Party::Any, 7, db),
        rule(Verdict::Deny, Party::Group("a".into()), 8, Party::Host),
    ]));
    let may = |from, to, port| routes.may_reach(from, Address::new(to, Port::new(port)));
    assert!(!may(one, two, 5) && !may(Cid::HOST, two, 5), "denied");
    assert!(may(one, two, 6) && may(Cid::HOST, two, 6), "as without");
    assert!(!may(one, two, 7), "not named");
    assert!(may(two, one, 5) && may(two, one, 7));
    assert!(!may(one, Cid::HOST, 8) && may(one, Cid::HOST, 9));
}

#[test]
fn a_port_is_open_unless_others_were_named() {
    let mut routes = Routes::default();
    let cid = Cid::new(3);
    let device = DeviceAddr {
        worker: 0,
        number: 0,
    };
    routes.add(cid, device, &[]);
    let open = |routes: &Routes, port| routes.is_open(Address::new(cid, Port::new(port)));
    assert!(open(&routes, 1) && open(&routes, 2));
    routes.limit_ports(cid, [9, 2, 5].map(Port::new));
    assert!(open(&routes, 2) && open(&routes, 5) && open(&routes, 9));
    assert!(!open(&routes, 1) && !open(&routes, 3) && !open(&routes, 10));
}
