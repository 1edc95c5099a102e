//! Socket options that are out of range, and options set before a connection exists.
//!
//! Their effect on a connection is in the list of behaviours (docs/behaviours.md).

use std::io::{Error, ErrorKind, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, deadline, eventually, host, pairs};
use crate::hosting::Hosted;
use zerosock::daemon::StartError;
use zerosock::driver::ConfigError;
use zerosock::vsock::{
    BindError, ConnectError, ConnectReason, Endpoint, EndpointBuilder, Fault, Host, HostBuilder,
    OpenError, OptionError,
};
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
    assert_eq!(socket.connect_timeout(), Duration::from_millis(1500));
}

/// On a connection of either kind as on a socket that is none yet; and nothing of it is taken, also
/// not by halves.
#[test]
fn options_out_of_range_leave_a_connection_as_it_is() {
    let (mut hosted, process) = joined();
    let port = Port::new(700);
    let listener = hosted.listen(port, 1).unwrap();
    let records = hosted.listen_seqpacket(Port::new(701), 1).unwrap();
    refused(listener.set_buffer_size(0), OptionError::EmptyBuffer);
    let mut ours = process.connect(host(700)).unwrap();
    let (mut theirs, _) = listener.accept_timeout(PATIENCE).unwrap();
    macro_rules! both {
        ($socket:expr) => {
            let none = Some(Duration::ZERO);
            refused($socket.set_buffer_size(0), OptionError::EmptyBuffer);
            refused($socket.set_buffer_bounds(0, 1), OptionError::EmptyBuffer);
            let above = OptionError::MinAboveMax {
                min: u32::MAX,
                max: 1,
            };
            refused($socket.set_buffer_bounds(u32::MAX, 1), above);
            refused($socket.set_read_timeout(none), OptionError::ZeroTimeout);
            refused($socket.set_write_timeout(none), OptionError::ZeroTimeout);
            assert_eq!($socket.buffer_size(), 262_144);
            assert_eq!($socket.buffer_bounds(), (128, 262_144));
            assert_eq!($socket.read_timeout(), None);
            assert_eq!($socket.write_timeout(), None);
        };
    }
    both!(ours);
    let above = OptionError::LowWaterAboveBuffer {
        low_water: 262_145,
        buffer: 262_144,
    };
    refused(ours.set_low_water(262_145), above);
    assert_eq!(ours.low_water(), 1);
    // What is only too small or too large for the bounds is brought within.
    for (told, becomes) in [(1, 128), (u32::MAX, 262_144)] {
        ours.set_buffer_size(told).unwrap();
        assert_eq!(ours.buffer_size(), becomes);
    }
    // A mark comes down with the buffer: it would never be reached.
    ours.set_low_water(100_000).unwrap();
    ours.set_buffer_size(1000).unwrap();
    assert_eq!(ours.low_water(), 1000);
    theirs.write_all(&[1; 1000]).unwrap();
    ours.read_exact(&mut [0; 1000]).unwrap();
    let sends = process.connect_seqpacket(host(701)).unwrap();
    let (receives, _) = records.accept_timeout(PATIENCE).unwrap();
    both!(sends);
    both!(receives);
    hosted.stop();
}

/// As long as there is no clock for.
#[test]
fn the_longest_times_are_for_ever() {
    let (hosted, process) = joined();
    let listener = hosted.listen(Port::new(700), 1).unwrap();
    let mut socket = process.socket();
    socket.set_connect_timeout(Duration::MAX).unwrap();
    socket.set_read_timeout(Some(Duration::MAX)).unwrap();
    socket.set_write_timeout(Some(Duration::MAX)).unwrap();
    socket.set_linger(Some(Duration::MAX));
    let mut ours = socket.connect(host(700)).unwrap();
    let (mut theirs, _) = listener.accept_timeout(Duration::MAX).unwrap();
    ours.write_all(b"one").unwrap();
    theirs.read_exact(&mut [0; 3]).unwrap();
    thread::scope(|scope| {
        let reading = scope.spawn(|| (&ours).read_exact(&mut [0; 3]).unwrap());
        theirs.write_all(b"two").unwrap();
        reading.join().unwrap();
    });
    ours.close().unwrap();
}

/// What no connection could live with is refused before there is any.
#[test]
fn a_host_or_endpoint_out_of_range_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let host = || Host::builder().attach(dir.path().join("other.sock"));
    let kind = |builder: HostBuilder| builder.start().map(drop).unwrap_err();
    assert!(matches!(kind(host().window(0)), StartError::EmptyWindow));
    let never = host().connect_timeout(Duration::ZERO);
    assert!(matches!(kind(never), StartError::NoConnectTime));
    for pairs in [0, 17, u16::MAX] {
        let told = kind(host().queue_pairs(pairs));
        assert!(matches!(told, StartError::QueuePairs(_)), "{told}");
    }
    let _hosted = Hosted::of(Host::builder().attach(&path));
    type Tune = fn(EndpointBuilder) -> EndpointBuilder;
    let bad: [(Tune, ConfigError); 8] = [
        (|it| it.window(0), ConfigError::EmptyWindow),
        (
            |it| it.connect_timeout(Duration::ZERO),
            ConfigError::NoConnectTime,
        ),
        (|it| it.queue_size(0), ConfigError::QueueSize(0)),
        (|it| it.queue_size(100), ConfigError::QueueSize(100)),
        (|it| it.queue_pairs(0), ConfigError::QueuePairs(0)),
        (|it| it.queue_pairs(17), ConfigError::QueuePairs(17)),
        (|it| it.receive_buffers(0), ConfigError::RxBufferSize(0)),
        (
            |it| it.transmit_buffers(65_537),
            ConfigError::TxBufferSize(65_537),
        ),
    ];
    for (tune, why) in bad {
        let told = tune(Endpoint::builder()).attach(&path).map(drop);
        let told = told.unwrap_err();
        assert_eq!(told.fault(), Fault::Caller);
        let OpenError::Device(told) = told else {
            panic!("{told}");
        };
        assert_eq!(told.to_string(), why.to_string());
    }
    // None of those endpoints remains attached.
    Endpoint::attach(&path).unwrap();
}

/// A host, and a process at it.
fn joined() -> (Hosted, Endpoint) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let hosted = Hosted::of(Host::builder().attach(&path).queue_pairs(pairs()));
    let builder = Endpoint::builder().queue_pairs(pairs());
    let process = builder.attach(&path).unwrap();
    (hosted, process)
}

#[test]
fn addresses_that_cannot_be_bound_are_refused_with_their_reason() {
    let hosted = Hosted::new();
    let mut socket = hosted.socket();
    let foreign = Address::new(Cid::new(9), Port::new(5));
    let told = inside(socket.bind(foreign).unwrap_err());
    let why = BindError::ForeignCid(Cid::new(9));
    assert_eq!(told, (ErrorKind::AddrNotAvailable, Some(why)));
    socket.bind(ANY).unwrap();
    assert_ne!(socket.local_addr().unwrap().port, Port::ANY);
    let told = inside(socket.bind(ANY).unwrap_err());
    let why = BindError::AlreadyBound;
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
    let why = BindError::NotNamed(Port::new(9));
    assert_eq!(told, (ErrorKind::InvalidInput, Some(why)));
    drop(hosted);
}

/// The peer exists, and no thread runs it.
#[test]
fn a_connect_waits_for_the_timeout_of_its_socket() {
    // Others of this host wait longer than the test does.
    let hosted = Hosted::tuned(|builder| builder.connect_timeout(2 * common::PATIENCE));
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
    let (kind, error) = told;
    let told = error.map(|error: ConnectError| (error.peer(), error.reason()));
    assert_eq!(
        (kind, told),
        (ErrorKind::TimedOut, Some((there, ConnectReason::TimedOut)))
    );
    assert!(took >= time, "{took:?}");
    assert!(took < common::PATIENCE, "as others do: {took:?}");
}

/// Connections that end before they are there cost nothing that lasts: there may be 64 of them at
/// once, and there are more one after the other.
#[test]
fn connects_that_are_given_up_at_once_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let hosted = Hosted::of(Host::builder().attach(&path));
    let listener = hosted.listen(Port::new(700), 8).unwrap();
    // Fewer at once than there are rounds: each must be gone when the next one begins.
    let process = Endpoint::builder()
        .max_connections(64)
        .attach(&path)
        .unwrap();
    for round in 0..5000 {
        if let Err(error) = process.begin_connect(host(700)) {
            panic!("{round}: {error}");
        }
        process.drive().unwrap();
    }
    listener.set_nonblocking(true).unwrap();
    eventually("the last one is over", || {
        while listener.accept().is_ok() {}
        process.drive().unwrap();
        let connected = process.connect(host(700));
        connected.is_ok() && listener.accept().is_ok()
    });
}
