//! Options of sockets that are out of range, and those that take effect before a connection is
//! there. What they do to one is in the list of behaviours of the command's tests.

mod common;
mod hosting;

use std::io::{Error, ErrorKind};
use std::time::{Duration, Instant};

use common::{deadline, eventually, host};
use hosting::Hosted;
use zerosock::vsock::{ConnectError, Endpoint, Host, ListenError, OptionError};
use zerosock::{Address, Cid, Port};

const ANY: Address = Address::new(Cid::ANY, Port::ANY);

fn inside<E: std::error::Error + Copy + 'static>(error: Error) -> (ErrorKind, Option<E>) {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    (error.kind(), inner.copied())
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: std::io::Result<T>, why: OptionError) {
    let told = inside(result.unwrap_err());
    assert_eq!(told, (ErrorKind::InvalidInput, Some(why)));
}

#[test]
fn options_out_of_range_are_refused_with_their_reason() {
    let hosted = Hosted::new();
    let mut socket = hosted.socket();
    refused(socket.set_buffer_size(0), OptionError::EmptyBuffer);
    refused(socket.set_buffer_bounds(0, 10), OptionError::EmptyBuffer);
    let above = OptionError::MinAboveMax { min: 11, max: 10 };
    refused(socket.set_buffer_bounds(11, 10), above);
    let none = Duration::ZERO;
    refused(socket.set_connect_timeout(none), OptionError::ZeroTimeout);
    refused(
        socket.set_read_timeout(Some(none)),
        OptionError::ZeroTimeout,
    );
    refused(
        socket.set_write_timeout(Some(none)),
        OptionError::ZeroTimeout,
    );
    socket.set_buffer_size(1000).unwrap();
    let above = OptionError::LowWaterAboveBuffer {
        low_water: 1001,
        buffer: 1000,
    };
    refused(socket.set_low_water(1001), above);
    // Nothing of it was taken.
    assert_eq!(socket.buffer_size(), 1000);
    assert_eq!(socket.buffer_bounds(), (128, 262_144));
    assert_eq!(socket.connect_timeout(), Duration::from_secs(2));
}

#[test]
fn addresses_that_cannot_be_bound_are_refused_with_their_reason() {
    let hosted = Hosted::new();
    let mut socket = hosted.socket();
    let foreign = Address::new(Cid::new(9), Port::new(5));
    let told = inside(socket.bind(foreign).unwrap_err());
    let why = ListenError::ForeignCid(Cid::new(9));
    assert_eq!(told, (ErrorKind::AddrNotAvailable, Some(why)));
    socket.bind(ANY).unwrap();
    assert_ne!(socket.local_addr().unwrap().port, Port::ANY);
    let told = inside(socket.bind(ANY).unwrap_err());
    let why = ListenError::AlreadyBound;
    assert_eq!(told, (ErrorKind::InvalidInput, Some(why)));
}

#[test]
fn an_endpoint_with_named_ports_listens_on_those_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let hosted = Hosted::of(Host::builder().attach(&path));
    let builder = Endpoint::builder().ports([Port::new(7), Port::new(8)]);
    let process = builder.attach(&path).unwrap();
    let first = process.listen(Port::ANY, 1).unwrap();
    let second = process.listen(Port::ANY, 1).unwrap();
    let ports = [first, second].map(|listener| listener.local_addr().port);
    assert_eq!(ports, [7, 8].map(Port::new));
    // Both are free again.
    let mut socket = process.socket();
    socket.bind(Address::new(Cid::ANY, Port::new(9))).unwrap();
    let told = inside(socket.listen(1).unwrap_err());
    let why = ListenError::NotNamed(Port::new(9));
    assert_eq!(told, (ErrorKind::InvalidInput, Some(why)));
    drop(hosted);
}

/// One who is there, and whom nobody drives.
#[test]
fn a_connect_waits_as_long_as_its_socket_was_told() {
    let hosted = Hosted::new();
    let _guest = hosted.guest();
    let mut socket = hosted.socket();
    let time = Duration::from_millis(300);
    socket.set_connect_timeout(time).unwrap();
    let there = Address::new(Cid::new(3), Port::new(5));
    let give_up = deadline();
    let (told, took) = loop {
        let start = Instant::now();
        let error = socket.connect(there).unwrap_err();
        // Its queues may not run yet.
        if error.kind() != ErrorKind::HostUnreachable {
            break (inside(error), start.elapsed());
        }
        assert!(start < give_up, "{error}");
    };
    assert_eq!(told, (ErrorKind::TimedOut, Some(ConnectError::TimedOut)));
    assert!(took >= time, "{took:?}");
    assert!(took < Duration::from_millis(1900), "as others do: {took:?}");
}

/// Connections that end before they are there cost nothing that lasts: there may be 4096 of them at
/// once, and there are more one after the other.
#[test]
fn connects_that_are_given_up_at_once_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let hosted = Hosted::of(Host::builder().attach(&path));
    let listener = hosted.listen(Port::new(700), 8).unwrap();
    let process = Endpoint::attach(&path).unwrap();
    for round in 0..5000 {
        if let Err(error) = process.begin_connect(host(700)) {
            panic!("{round}: {error}");
        }
        process.turn().unwrap();
    }
    listener.set_nonblocking(true).unwrap();
    eventually("the last one is over", || {
        while listener.accept().is_ok() {}
        process.turn().unwrap();
        let connected = process.connect(host(700));
        connected.is_ok() && listener.accept().is_ok()
    });
}
