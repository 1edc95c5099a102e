//! No request leaves a descriptor behind. The only test of its program, since it counts those of the
//! process.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use zerosock_relay::ConnectError;

mod support;
use support::{HANG, ask, connect, connector, request, stalled};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits for the number of descriptors; the thread of a connector closes some after its answers.
fn wait_for(expected: usize, what: &str) {
    let began = Instant::now();
    while descriptors() != expected {
        let now = descriptors();
        assert!(
            began.elapsed() < HANG,
            "{what}: {now} descriptors, not {expected}"
        );
        std::thread::yield_now();
    }
}

#[test]
fn requests_leave_no_descriptor_behind() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let refused = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let stalled = stalled::tcp(refused).unwrap();
    let path = folder.path().join("stream");
    let _unix = UnixListener::bind(&path).unwrap();
    let full = folder.path().join("full");
    let _full = stalled::unix(&full, SocketType::STREAM);

    // The list of mounts stays open for the life of the process.
    zerosock_sys::socket_path::learn_mounts().unwrap();
    let before = descriptors();
    let connector = connector(Vec::new());
    assert!(connect(&connector, request(&format!("tcp:{address}"))).is_ok());
    listener.accept().unwrap();
    // The event loop has its descriptors from now on, and the reaper has closed that of the result.
    assert!(zerosock_sys::reaper::drain(HANG));
    let running = descriptors();

    for _ in 0..20 {
        let mut made = request(&format!("tcp:{address}"));
        made.first_bytes = b"first".to_vec();
        assert!(connect(&connector, made).is_ok());
        listener.accept().unwrap();
        assert!(connect(&connector, request(&format!("unix:{}", path.display()))).is_ok());
        assert!(connect(&connector, request(&format!("udp:{address}"))).is_ok());
        assert!(connect(&connector, request("unix:/nonexistent/socket")).is_err());

        for target in [format!("tcp:{refused}"), format!("unix:{}", full.display())] {
            let mut late = request(&target);
            late.timeout = Duration::from_millis(10);
            let error = connect(&connector, late).unwrap_err();
            assert!(matches!(error, ConnectError::TimedOut(_)), "{error}");
            let cancelled = ask(&connector, request(&target));
            cancelled.pending.cancel();
            assert!(cancelled.answer().is_err());
        }
    }
    wait_for(running, "after requests of all kinds");
    names(running - before);

    let in_flight: Vec<_> = (0..20)
        .map(|_| ask(&connector, request(&format!("tcp:{refused}"))))
        .collect();
    connector.stop();
    for asked in in_flight {
        assert!(matches!(asked.answer(), Err(ConnectError::Stopped)));
    }
    drop(connector);
    // Those of the test's name server, whose threads stay.
    let server = if cfg!(feature = "names") { 2 } else { 0 };
    wait_for(before + server, "after the connector");
    drop(stalled);
    relay(&full);
}

/// A client that resets its connection ends the request for its target, which would try for 10 minutes.
fn relay(full: &std::path::Path) {
    use zerosock_relay::relay::{Relay, RelayConfig};
    let ends = [
        "tcp-listen:127.0.0.1:0".parse().unwrap(),
        format!("unix:{}", full.display()).parse().unwrap(),
    ];
    let mut config = RelayConfig::new(ends);
    config.connect_timeout = Duration::from_secs(600);
    let relay = Relay::start(config).unwrap();
    let address = relay.addresses()[0].unwrap();
    let connect = || std::net::TcpStream::connect(address).unwrap();
    let reset = |client: std::net::TcpStream| {
        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    };
    let resting = descriptors();
    // Both of its sockets, and the client's.
    let clients: Vec<_> = (0..10).map(|_| connect()).collect();
    wait_for(resting + 3 * clients.len(), "while the clients wait");
    clients.into_iter().for_each(reset);
    wait_for(resting, "after the clients have left");
    relay.shutdown();
}

/// The attempts that lose are closed when one wins, and the sockets of lookups when they end. A connector
/// at rest has `of_loop` descriptors.
#[cfg(feature = "names")]
fn names(of_loop: usize) {
    use support::dns::{NameServer, Reply, addresses};
    use zerosock_relay::connector::ATTEMPTS_AT_ONCE;

    const EIGHT: [&str; 8] = [
        "127.0.0.2",
        "127.0.0.4",
        "127.0.0.5",
        "127.0.0.6",
        "127.0.0.7",
        "127.0.0.8",
        "127.0.0.9",
        "127.0.0.10",
    ];
    let server = NameServer::start(|question| match question.name.as_str() {
        "two.example" => addresses(question, &["127.0.0.2", "127.0.0.3"]),
        "eight.example" => addresses(question, &EIGHT),
        _ => Reply::Never,
    });
    let listener = TcpListener::bind("127.0.0.3:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let stalled = stalled::tcp(([127, 0, 0, 2], port).into()).unwrap();
    let before = descriptors();
    let connector = connector(vec![server.address]);
    for _ in 0..5 {
        let mut never = request("tcp:never.example:80");
        never.timeout = Duration::from_millis(10);
        let error = connect(&connector, never).unwrap_err();
        assert!(matches!(error, ConnectError::TimedOut(_)), "{error}");
        assert!(connect(&connector, request(&format!("tcp:two.example:{port}"))).is_ok());
        listener.accept().unwrap();
    }
    wait_for(before + of_loop, "after lookups");

    let holes = EIGHT;
    let others: Vec<_> = holes[1..]
        .iter()
        .map(|host| stalled::tcp(format!("{host}:{port}").parse().unwrap()).unwrap())
        .collect();
    let resting = descriptors();
    let asked = ask(&connector, request(&format!("tcp:eight.example:{port}")));
    wait_for(resting + ATTEMPTS_AT_ONCE, "with six attempts");
    asked.pending.cancel();
    assert!(asked.answer().is_err());
    // It has a share in the event loop.
    drop(asked);
    drop(others);

    connector.stop();
    drop(connector);
    wait_for(before, "after the connector of the lookups");
    drop((listener, stalled));
    // The name server of the test keeps its two sockets.
}

#[cfg(not(feature = "names"))]
fn names(_of_loop: usize) {}
