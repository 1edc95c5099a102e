//! The decisions of the flights that no peer can be made to bring about.

use std::net::UdpSocket;

use super::super::policy::Threshold;
use super::*;

fn flight(total: usize, sent: usize) -> Flight {
    Flight {
        total,
        sent,
        ..Flight::vacant()
    }
}

#[test]
fn nothing_follows_what_one_request_does_not_take() {
    assert!(is_followed(&flight(LONGEST, 0), true));
    assert!(!is_followed(&flight(LONGEST + 1, 0), true));
    assert!(is_followed(&flight(LONGEST + 1, 1), true));
    assert!(!is_followed(&flight(100, 0), false));
    let piece = Flight {
        part: Part::First,
        more: true,
        ..flight(100, 0)
    };
    assert!(is_followed(&piece, false));
}

#[test]
fn memory_is_not_waited_for_when_nothing_is_owed() {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = socket.local_addr().expect("an address");
    socket.connect(address).expect("loopback");
    let opened = Carrier::<Vec<u8>>::open(socket.into(), 4, Some(Backend::Copy));
    let (carrier, kind) = opened.expect("a carrier");
    let policy = Policy::new(kind, Backend::Copy, Threshold::Measured);
    let mut flights = Flights::new(carrier, false, 4, Slots::new([0]), policy);
    flights.starved = true;
    assert!(flights.accept(Outgoing::new(vec![1; 100])).is_ok());
    flights.submit().expect("the kernel answers");
    assert!(flights.is_quiet());
    assert!(!flights.starved);
}
