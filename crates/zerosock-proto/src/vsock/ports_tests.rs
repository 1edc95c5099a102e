//! Unit tests of `ports`.

use super::*;

const ADDRESS: Address = Address::new(Cid::HOST, Port::new(5));

#[test]
fn a_listener_has_its_port_exclusively() {
    let ports = PortTable::new();
    assert!(ports.listen(ADDRESS, 1));
    assert!(!ports.listen(ADDRESS, 1));
    assert_eq!(ports.acquire(ADDRESS), None);
    assert!(ports.unlisten(ADDRESS) && !ports.unlisten(ADDRESS));
    let port_ref = ports.acquire(ADDRESS).unwrap();
    assert!(!ports.listen(ADDRESS, 1) && !ports.unlisten(ADDRESS));
    ports.release(ADDRESS, port_ref);
    assert!(ports.listen(ADDRESS, 1));
}

#[test]
fn a_new_listener_has_an_empty_backlog() {
    let ports = PortTable::new();
    assert_eq!(ports.admit(ADDRESS), Admission::NoListener);
    ports.listen(ADDRESS, 0);
    let Admission::Granted(old) = ports.admit(ADDRESS) else {
        panic!()
    };
    assert_eq!(ports.admit(ADDRESS), Admission::Full);
    ports.unlisten(ADDRESS);
    ports.listen(ADDRESS, 1);
    let Admission::Granted(_) = ports.admit(ADDRESS) else {
        panic!()
    };
    ports.release(ADDRESS, old);
    assert_eq!(
        ports.waiting(ADDRESS),
        Some(1),
        "not an entry of the old listener"
    );
}

#[test]
fn a_bound_port_is_in_use_until_unbound_and_unconnected() {
    let ports = PortTable::new();
    assert_eq!(ports.bind(ADDRESS), Some(ADDRESS.port));
    assert_eq!(ports.bind(ADDRESS), None);
    assert!(!ports.listen(ADDRESS, 1));
    assert_eq!(ports.admit(ADDRESS), Admission::NoListener);
    let port_ref = ports.acquire(ADDRESS).unwrap();
    ports.release(ADDRESS, port_ref);
    assert_eq!(ports.bind(ADDRESS), None, "still bound");
    let port_ref = ports.acquire(ADDRESS).unwrap();
    ports.unbind(ADDRESS);
    assert_eq!(ports.bind(ADDRESS), None, "still connected");
    ports.release(ADDRESS, port_ref);
    assert!(ports.is_empty());
    let any = ports.bind(Address::new(Cid::HOST, Port::ANY)).unwrap();
    assert!(any.get() >= EPHEMERAL_FIRST);
    assert_eq!(ports.bind(Address::new(Cid::HOST, any)), None);
}

#[test]
fn ephemeral_ports_wrap_and_skip_ports_in_use() {
    let ports = PortTable::new();
    ports.lock().next_ephemeral = EPHEMERAL_COUNT - 1;
    let taken = Address::new(Cid::HOST, Port::new(EPHEMERAL_FIRST));
    ports.listen(taken, 1);
    let (last, port_ref) = ports.allocate(Cid::HOST).unwrap();
    let (next, _) = ports.allocate(Cid::HOST).unwrap();
    assert_eq!(last.port.get(), EPHEMERAL_FIRST + EPHEMERAL_COUNT - 1);
    assert_eq!(next.port.get(), EPHEMERAL_FIRST + 1);
    ports.release(last, port_ref);
    assert!(ports.acquire(last).is_some(), "reusable at once");
}

#[test]
fn a_table_allocates_only_its_own_ephemeral_ports() {
    let (first, last) = (Port::new(u32::MAX - 3), Port::new(u32::MAX - 1));
    let ports = PortTable::with_ephemeral(first..=last);
    let mut given = [0; 3].map(|_| ports.allocate(Cid::HOST).unwrap().0.port);
    given.sort_unstable();
    assert_eq!(given, [first, Port::new(u32::MAX - 2), last]);
    assert_eq!(ports.allocate(Cid::HOST), None);
    assert_eq!(ports.allocate(Cid::new(3)).unwrap().0.cid, Cid::new(3));
    let none = PortTable::with_ephemeral(last..=first);
    assert_eq!(none.allocate(Cid::HOST), None);
}
