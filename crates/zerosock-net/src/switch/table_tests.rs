//! Unit tests of `table`.

use super::*;

const A: DeviceAddr = addr(1);
const B: DeviceAddr = addr(2);
const C: DeviceAddr = addr(3);

const fn addr(number: u32) -> DeviceAddr {
    DeviceAddr { worker: 0, number }
}

fn frame(to: u16, from: u16) -> Addresses {
    let ([t0, t1], [f0, f1]) = (to.to_be_bytes(), from.to_be_bytes());
    [2, 0, 0, 0, t0, t1, 2, 0, 0, 0, f0, f1]
}

fn mac(number: u16) -> Mac {
    let [a, b] = number.to_be_bytes();
    Mac([2, 0, 0, 0, a, b])
}

fn table() -> Table {
    let mut table = Table::default();
    for port in [A, B, C] {
        assert!(table.add(port, None));
        table.set_active(port, true);
    }
    table
}

fn at(seconds: u64) -> Instant {
    Instant::ZERO + Duration::from_secs(seconds)
}

#[test]
fn an_address_is_learned_moves_and_ages() {
    let mut table = table();
    assert_eq!(table.route(A, &frame(2, 1), at(0)), Route::Flood);
    assert_eq!(table.route(B, &frame(1, 2), at(1)), Route::Port(A));
    assert_eq!(table.route(A, &frame(1, 3), at(1)), Route::Nowhere);
    table.route(C, &frame(9, 1), at(2));
    assert_eq!(table.route(B, &frame(1, 2), at(3)), Route::Port(C));
    assert_eq!(table.route(B, &frame(1, 2), at(301)), Route::Port(C));
    assert_eq!(table.route(B, &frame(1, 2), at(302)), Route::Flood);
}

#[test]
fn group_addresses_go_to_all_other_ports_in_use_and_are_not_learned() {
    let mut table = table();
    table.set_active(C, false);
    let mut broadcast = frame(0, 1);
    broadcast[..6].fill(0xff);
    assert_eq!(table.route(A, &broadcast, at(0)), Route::Flood);
    assert_eq!(
        table.others(A).map(|(port, _)| port).collect::<Vec<_>>(),
        [B]
    );
    broadcast[6..].fill(0xff);
    table.route(A, &broadcast, at(0));
    assert_eq!(table.entries.len(), 1);
}

#[test]
fn an_assigned_address_stays_and_is_given_once() {
    let mut table = Table::default();
    assert!(table.add(A, Some(mac(1))));
    assert!(!table.add(B, Some(mac(1))));
    assert!(table.add(B, None));
    table.route(B, &frame(9, 1), at(0));
    assert_eq!(table.route(B, &frame(1, 2), at(999)), Route::Port(A));
    table.remove(A);
    assert_eq!(table.route(B, &frame(1, 2), at(999)), Route::Flood);
}

#[test]
fn an_address_that_was_learned_is_assigned_to_its_port() {
    let mut table = table();
    table.route(A, &frame(9, 7), at(0));
    let d = addr(4);
    assert!(table.add(d, Some(mac(7))));
    assert_eq!(table.route(B, &frame(7, 2), at(0)), Route::Port(d));
    assert_eq!(table.ports[0].learned, 0);
}

#[test]
fn a_port_learns_a_bounded_number_of_addresses() {
    let mut table = table();
    table.route(B, &frame(0, 1), at(0));
    for number in 0..3 * PORT_CAP as u16 {
        table.route(A, &frame(0, 100 + number), at(1));
    }
    assert_eq!(table.ports[0].learned, PORT_CAP);
    assert_eq!(table.entries.len(), PORT_CAP + 1);
    assert_eq!(table.route(C, &frame(1, 3), at(1)), Route::Port(B));
    // Room comes with age, and when the driver goes.
    table.route(A, &frame(0, 5000), at(301));
    assert_eq!(table.ports[0].learned, 1);
    table.set_active(A, false);
    assert_eq!(table.ports[0].learned, 0);
    assert_eq!(table.route(C, &frame(5000, 3), at(301)), Route::Flood);
}
