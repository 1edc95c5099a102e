//! Unit tests of `access`.

use super::*;

fn ports(first: u32, last: u32) -> Result<Ports, RangeError> {
    Ports::new([Port::new(first)..=Port::new(last)])
}

#[test]
fn invalid_ranges_cannot_be_constructed() {
    assert_eq!(Ports::new([]), Err(RangeError::Empty));
    assert_eq!(ports(5, 4), Err(RangeError::Reversed));
    assert_eq!(ports(5, u32::MAX), Err(RangeError::Reserved));
    assert_eq!(ports(0, u32::MAX - 1), Ok(Ports::all()));
    let cids = |first, last| Cids::new(Cid::new(first), Cid::new(last));
    for reserved in [0, 1, 2, u32::MAX] {
        assert_eq!(cids(reserved, 9), Err(RangeError::Reserved));
        assert_eq!(cids(9, reserved), Err(RangeError::Reserved));
    }
    assert_eq!(cids(9, 8), Err(RangeError::Reversed));
    assert!(cids(9, 9).is_ok());
}

#[test]
fn the_first_matching_rule_decides() {
    let name: Name = "db".parse().unwrap();
    let groups = ["red".to_owned()];
    let endpoint = |cid, groups, name| EndpointTraits {
        cid: Cid::new(cid),
        groups,
        name,
    };
    let host = endpoint(2, &[], None);
    let vm = endpoint(3, &groups, None);
    let db = endpoint(70, &[], Some(&name));
    let rule = |verdict, from: Party, to: Party, ports| Rule {
        name: None,
        verdict,
        from: vec![from],
        to: vec![to],
        ports,
    };
    use Verdict::{Allow, Deny};
    let red = Party::Group("red".into());
    let named = Party::Name(name.clone());
    let cids = Party::Cids(Cids::new(Cid::new(60), Cid::new(80)).unwrap());
    let list = AccessList::new([
        rule(Allow, red.clone(), named, ports(5, 6).unwrap()),
        rule(Deny, red, Party::Any, ports(0, 9).unwrap()),
        rule(Deny, cids, Party::Host, Ports::all()),
    ]);
    let asked = |from, to, port| list.first_match(from, to, Port::new(port));
    for port in [5, 6] {
        assert_eq!(asked(vm, db, port), Some((0, Allow)));
    }
    for port in [0, 4, 7, 9] {
        assert_eq!(asked(vm, db, port), Some((1, Deny)), "{port}");
    }
    assert_eq!(asked(vm, db, 10), None);
    assert_eq!(asked(vm, host, 5), Some((1, Deny)), "any includes the host");
    assert_eq!(asked(db, host, 5), Some((2, Deny)), "by its CID");
    assert_eq!(asked(host, db, 5), None);
    assert_eq!(asked(db, vm, 5), None, "not the other way round");
    assert_eq!(
        AccessList::default().first_match(vm, db, Port::new(5)),
        None
    );
}
