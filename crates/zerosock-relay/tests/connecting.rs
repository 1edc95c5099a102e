//! Connections to addresses and paths: what arrives, what fails and why, and that each request is answered
//! exactly once ([`support::Asked::answer`] fails at a second answer).

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv,
    send, socket, sockopt,
};
use zerosock_relay::proxy_protocol::{Source, header};
use zerosock_relay::{
    AddressPolicy, ConnectError, ConnectStage, Connector, ConnectorConfig, DenyReason,
};

mod support;
use support::{
    HANG, ask, connect, connector, exchange, has_ipv6, isolated, network, request, stalled,
};

#[test]
fn tcp_connects_to_ipv4_and_ipv6_and_passes_bytes_both_ways() {
    let connector = connector(Vec::new());
    for address in ["127.0.0.1:0", "[::1]:0"] {
        if address.starts_with('[') && !has_ipv6() {
            continue;
        }
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let connected = connect(&connector, request(&format!("tcp:{address}"))).unwrap();
        assert_eq!(connected.address, Some(address));
        exchange(connected, &listener);
    }
}

#[test]
fn sockets_are_non_blocking_and_close_on_exec_and_have_their_options() {
    let connector = connector(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (keepalive, seconds) in [
        (None, None),
        (Some(Duration::from_secs(60)), Some(60)),
        (Some(Duration::from_millis(1)), Some(1)),
        (Some(Duration::MAX), Some(32767)),
    ] {
        let mut request = request(&format!("tcp:{}", listener.local_addr().unwrap()));
        request.keepalive = keepalive;
        let socket = connect(&connector, request).unwrap().socket;
        assert!(
            rustix::fs::fcntl_getfl(&socket)
                .unwrap()
                .contains(OFlags::NONBLOCK)
        );
        assert!(
            rustix::io::fcntl_getfd(&socket)
                .unwrap()
                .contains(FdFlags::CLOEXEC)
        );
        assert!(sockopt::tcp_nodelay(&socket).unwrap());
        assert_eq!(
            sockopt::socket_keepalive(&socket).unwrap(),
            seconds.is_some()
        );
        if let Some(seconds) = seconds {
            let interval = Duration::from_secs(seconds);
            assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), interval);
            assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), interval);
        }
    }
}

/// An address on which nothing listens.
fn unused() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

#[test]
fn a_target_without_a_listener_is_refused_and_named() {
    let address = unused();
    let error = connect(&connector(Vec::new()), request(&format!("tcp:{address}"))).unwrap_err();
    assert!(matches!(error, ConnectError::Refused(Some(by)) if by == address));
    assert_eq!(
        error.to_string(),
        format!("connection refused by {address}")
    );
    assert!(matches!(error, ConnectError::Refused(_)), "{error}");
}

#[test]
fn a_black_holed_target_times_out_in_time() {
    let stalled = stalled::tcp(unused()).unwrap();
    let connector = connector(Vec::new());
    let mut request = request(&format!("tcp:{}", local_address(&stalled.listener)));
    for timeout in [Duration::ZERO, Duration::from_millis(300)] {
        request.timeout = timeout;
        let began = Instant::now();
        let error = connect(&connector, request.clone()).unwrap_err();
        assert!(matches!(error, ConnectError::TimedOut(_)), "{error}");
        assert!(began.elapsed() >= timeout);
    }
}

fn local_address(socket: impl AsFd) -> SocketAddr {
    rustix::net::getsockname(socket)
        .unwrap()
        .try_into()
        .unwrap()
}

#[test]
fn a_cancelled_request_is_answered_once() {
    let stalled = stalled::tcp(unused()).unwrap();
    let connector = connector(Vec::new());
    let target = format!("tcp:{}", local_address(&stalled.listener));
    let asked = ask(&connector, request(&target));
    assert!(!asked.is_answered());
    asked.pending.cancel();
    assert!(matches!(asked.answer(), Err(ConnectError::Stopped)));
    asked.pending.cancel();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let asked = ask(
        &connector,
        request(&format!("tcp:{}", listener.local_addr().unwrap())),
    );
    assert!(asked.answer().is_ok());
    asked.pending.cancel();
}

#[test]
fn stop_answers_all_requests_in_flight_and_later_ones() {
    let stalled = stalled::tcp(unused()).unwrap();
    let connector = connector(Vec::new());
    let target = format!("tcp:{}", local_address(&stalled.listener));
    let asked: Vec<_> = (0..100)
        .map(|_| ask(&connector, request(&target)))
        .collect();
    connector.clone().stop();
    for asked in asked {
        assert!(asked.is_answered(), "stop waits for the thread");
    }
    let later = ask(&connector, request(&target));
    assert!(matches!(later.answer(), Err(ConnectError::Stopped)));
    connector.stop();
}

#[test]
fn the_last_handle_ends_the_thread_and_a_clone_keeps_it() {
    let stalled = stalled::tcp(unused()).unwrap();
    let connector = connector(Vec::new());
    let target = format!("tcp:{}", local_address(&stalled.listener));
    let asked = ask(&connector, request(&target));
    let clone = connector.clone();
    drop(connector);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp:{}", listener.local_addr().unwrap());
    assert!(connect(&clone, request(&target)).is_ok());
    assert!(!asked.is_answered());
    drop(clone);
    assert!(matches!(asked.answer(), Err(ConnectError::Stopped)));
}

#[test]
fn requests_beyond_the_limit_are_busy_until_one_ends() {
    let stalled = stalled::tcp(unused()).unwrap();
    let connector = Connector::start(ConnectorConfig {
        max_requests: 2,
        ..ConnectorConfig::default()
    })
    .unwrap();
    let target = format!("tcp:{}", local_address(&stalled.listener));
    let asked = [
        ask(&connector, request(&target)),
        ask(&connector, request(&target)),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = format!("tcp:{}", listener.local_addr().unwrap());
    for _ in 0..3 {
        let error = connect(&connector, request(&free)).unwrap_err();
        assert!(matches!(error, ConnectError::Busy));
    }
    asked[0].pending.cancel();
    assert!(matches!(asked[0].answer(), Err(ConnectError::Stopped)));
    for _ in 0..3 {
        assert!(connect(&connector, request(&free)).is_ok());
    }
    assert!(!asked[1].is_answered());
}

#[test]
fn answers_come_on_the_thread_and_may_make_requests() {
    let connector = Connector::start(ConnectorConfig {
        max_requests: 1,
        ..ConnectorConfig::default()
    })
    .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp:{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    let (again, second) = (connector.clone(), request(&target));
    let done = move |first: support::Answer| {
        first.unwrap();
        let name = thread::current().name().map(str::to_owned);
        // The first request is over: the second one is not one too many.
        let done = move |answer: support::Answer| sender.send((name, answer.is_ok())).unwrap();
        again.connect(second, Box::new(done));
    };
    connector.connect(request(&target), Box::new(done));
    let (name, second) = receiver.recv_timeout(HANG).unwrap();
    assert_eq!(name.as_deref(), Some("connector"));
    assert!(second);
}

#[test]
fn an_answer_that_panics_ends_nothing_else() {
    let connector = connector(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp:{}", listener.local_addr().unwrap());
    connector.connect(
        request(&target),
        Box::new(|_| panic!("a test panics on purpose")),
    );
    assert!(connect(&connector, request(&target)).is_ok());
}

#[test]
fn a_thousand_requests_at_once_are_all_answered() {
    let connector = connector(Vec::new());
    let refused = unused();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let accepting = thread::spawn(move || {
        let accepted: Vec<_> = (0..500).map(|_| listener.accept().unwrap()).collect();
        accepted.len()
    });
    let asked: Vec<_> = (0..1000)
        .map(|number| {
            let target = if number % 2 == 0 { address } else { refused };
            ask(&connector, request(&format!("tcp:{target}")))
        })
        .collect();
    let good = asked.iter().filter(|asked| asked.answer().is_ok()).count();
    assert_eq!(good, 500);
    assert_eq!(accepting.join().unwrap(), 500);
}

#[test]
fn an_address_in_the_rule_is_permitted_unless_deny_has_it() {
    let connector = connector(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for host in ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost", "LOCALHOST."] {
        let mut request = request(&format!("tcp:{host}:{}", address.port()));
        request.policy = Arc::new(AddressPolicy::for_guests(Vec::new(), Vec::new()));
        let connected = connect(&connector, request.clone()).unwrap();
        assert_eq!(connected.address, Some(address), "{host}");
        listener.accept().unwrap();

        let deny = vec![network("127.0.0.0/8"), network("::1")];
        request.policy = Arc::new(AddressPolicy::for_guests(Vec::new(), deny));
        let error = connect(&connector, request).unwrap_err();
        let ConnectError::Denied(denied) = error else {
            panic!("{error}")
        };
        assert!(matches!(denied.reason, DenyReason::Listed(_)));
    }
    // Nothing was sent to the address that was denied.
    listener.set_nonblocking(true).unwrap();
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );
}

#[test]
fn the_longest_time_out_does_not_overflow_the_clock() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut request = request(&format!("tcp:{}", listener.local_addr().unwrap()));
    request.timeout = Duration::MAX;
    assert!(connect(&connector(Vec::new()), request).is_ok());
}

#[test]
fn udp_passes_datagrams_both_ways_and_needs_no_listener() {
    let connector = connector(Vec::new());
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut request = request(&format!("udp:{}", server.local_addr().unwrap()));
    request.first_bytes = b"first".to_vec();
    let connected = connect(&connector, request.clone()).unwrap();
    assert_eq!(connected.address, Some(server.local_addr().unwrap()));
    let ours = UdpSocket::from(connected.socket.into_trusted());
    ours.set_nonblocking(false).unwrap();
    ours.send(b"second").unwrap();
    let mut buffer = [0; 16];
    for expected in [b"first".as_slice(), b"second"] {
        let (length, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], expected);
        assert_eq!(from, ours.local_addr().unwrap());
        server.send_to(expected, from).unwrap();
        let length = ours.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], expected);
    }
    drop(server);
    request.first_bytes.clear();
    assert!(connect(&connector, request).is_ok());
}

#[test]
fn unix_stream_and_seqpacket_connect_and_the_first_bytes_come_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stream");
    let listener = UnixListener::bind(&path).unwrap();
    let connector = connector(Vec::new());
    let mut to_stream = request(&format!("unix:{}", path.display()));
    to_stream.first_bytes = b"first".to_vec();
    let connected = connect(&connector, to_stream).unwrap();
    assert_eq!(connected.address, None);
    let (mut theirs, _) = listener.accept().unwrap();
    send(&connected.socket, b"second", SendFlags::NOSIGNAL).unwrap();
    drop(connected);
    let mut text = String::new();
    theirs.read_to_string(&mut text).unwrap();
    assert_eq!(text, "firstsecond");

    let path = folder.path().join("seqpacket");
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let mut to_seqpacket = request(&format!("unix-seqpacket:{}", path.display()));
    to_seqpacket.first_bytes = b"first".to_vec();
    let ours = connect(&connector, to_seqpacket).unwrap().socket;
    let theirs = accept(&listener).unwrap();
    send(&ours, b"second", SendFlags::NOSIGNAL).unwrap();
    let mut buffer = [0; 16];
    for expected in [b"first".as_slice(), b"second"] {
        let (length, _) = recv(&theirs, &mut buffer, RecvFlags::empty()).unwrap();
        assert_eq!(&buffer[..length], expected);
    }
}

#[test]
fn unix_datagrams_can_be_answered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dgram");
    let server = UnixDatagram::bind(&path).unwrap();
    let request = request(&format!("unix-dgram:{}", path.display()));
    let ours = connect(&connector(Vec::new()), request).unwrap().socket;
    send(&ours, b"ping", SendFlags::NOSIGNAL).unwrap();
    let mut buffer = [0; 16];
    let (length, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"ping");
    server.send_to_addr(b"pong", &from).unwrap();
    let (length, _) = recv(&ours, &mut buffer, RecvFlags::empty()).unwrap();
    assert_eq!(&buffer[..length], b"pong");
}

#[test]
fn unix_targets_that_cannot_be_reached_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let connector = connector(Vec::new());
    let failure = |target: &str| connect(&connector, request(target)).unwrap_err();

    let missing = folder.path().join("missing");
    let error = failure(&format!("unix:{}", missing.display()));
    assert!(matches!(error, ConnectError::Io(error) if error.kind() == io::ErrorKind::NotFound));

    // A file whose socket is closed.
    let stale = folder.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    for kind in ["unix", "unix-dgram"] {
        let error = failure(&format!("{kind}:{}", stale.display()));
        assert!(
            matches!(error, ConnectError::Refused(None)),
            "{kind}: {error}"
        );
    }

    let other = folder.path().join("other");
    let _listener = UnixListener::bind(&other).unwrap();
    for kind in ["unix-seqpacket", "unix-dgram"] {
        let error = failure(&format!("{kind}:{}", other.display()));
        assert!(matches!(error, ConnectError::Io(_)), "{kind}: {error}");
    }
}

#[test]
fn a_full_unix_backlog_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let connector = connector(Vec::new());
    for (kind, socket_type) in [
        ("unix", SocketType::STREAM),
        ("unix-seqpacket", SocketType::SEQPACKET),
    ] {
        let path = folder.path().join(kind);
        let stalled = stalled::unix(&path, socket_type);
        let target = format!("{kind}:{}", path.display());
        let mut short = request(&target);
        short.timeout = Duration::from_millis(200);
        let began = Instant::now();
        let error = connect(&connector, short).unwrap_err();
        assert!(
            matches!(error, ConnectError::TimedOut(ConnectStage::Connecting)),
            "{error}"
        );
        assert!(began.elapsed() >= Duration::from_millis(200));

        let asked = ask(&connector, request(&target));
        assert!(!asked.is_answered());
        let _accepted = stalled.accept();
        assert!(asked.answer().is_ok());
    }
}

#[test]
fn a_proxy_header_is_the_first_thing_that_arrives() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let source = Source::Vsock {
        cid: 3,
        port: 1024,
        to_port: 80,
    };
    let mut request = request(&format!("tcp:{}", listener.local_addr().unwrap()));
    request.first_bytes = header(source, None);
    let connected = connect(&connector(Vec::new()), request.clone()).unwrap();
    send(&connected.socket, b"GET", SendFlags::NOSIGNAL).unwrap();
    drop(connected);
    let mut received = Vec::new();
    listener
        .accept()
        .unwrap()
        .0
        .read_to_end(&mut received)
        .unwrap();
    assert_eq!(received, [request.first_bytes.as_slice(), b"GET"].concat());
}

#[test]
fn first_bytes_that_the_target_does_not_take_time_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connector = connector(Vec::new());
    // More than the buffers of both ends can hold.
    let first_bytes = vec![0x55; 32 << 20];
    let mut stuck = request(&format!("tcp:{}", listener.local_addr().unwrap()));
    stuck.first_bytes = first_bytes.clone();
    stuck.timeout = Duration::from_millis(300);
    let error = connect(&connector, stuck.clone()).unwrap_err();
    assert!(
        matches!(error, ConnectError::TimedOut(ConnectStage::Writing)),
        "{error}"
    );
    drop(listener.accept().unwrap());

    // A target that reads gets all of them.
    stuck.timeout = HANG;
    let asked = ask(&connector, stuck);
    let (mut theirs, _) = listener.accept().unwrap();
    let mut received = vec![0; first_bytes.len()];
    theirs.read_exact(&mut received).unwrap();
    assert!(received == first_bytes);
    assert!(asked.answer().is_ok());
}

#[test]
fn futures_run_on_the_thread_and_are_dropped_with_it() {
    let connector = connector(Vec::new());
    // An address of this process: another one can listen on the port at 127.0.0.1 as soon as it is free.
    let [_, one, two, three] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, one | 0x80, two, three);
    let listener = TcpListener::bind((own, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let (sender, accepted) = mpsc::channel();
    connector.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (_, from) = listener.accept().await.unwrap();
            let name = thread::current().name().map(str::to_owned);
            sender.send((name, from)).unwrap();
        }
    });
    let connected = connect(&connector, request(&format!("tcp:{address}"))).unwrap();
    let (name, from) = accepted.recv_timeout(HANG).unwrap();
    assert_eq!(name.as_deref(), Some("connector"));
    assert_eq!(from, local_address(&connected.socket));
    connector.stop();
    assert!(matches!(
        accepted.recv_timeout(HANG),
        Err(mpsc::RecvTimeoutError::Disconnected)
    ));
    // The listener is closed.
    assert!(TcpStream::connect(address).is_err());
}

/// In a network namespace whose only local ports are those of the target, a connection to a port without
/// a listener can meet itself.
#[test]
fn a_connection_that_meets_itself_is_refused() {
    // Once per namespace: the first such connection leaves its port in TIME_WAIT.
    let ports = [40000, 40001];
    let range = || std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001").unwrap();
    isolated(move || {
        range();
        let mut plain = ports
            .iter()
            .map(|&port| TcpStream::connect(("127.0.0.1", port)));
        assert!(
            plain.any(|stream| stream.is_ok()),
            "plain TCP does meet itself here"
        );
    });
    isolated(move || {
        range();
        let connector = connector(Vec::new());
        for port in ports {
            let target = format!("tcp:127.0.0.1:{port}");
            let error = connect(&connector, request(&target)).unwrap_err();
            assert!(matches!(error, ConnectError::Refused(_)), "{error}");
        }
    });
}

#[cfg(not(feature = "names"))]
#[test]
fn without_the_resolver_a_name_is_refused_with_the_reason() {
    let error = connect(&connector(Vec::new()), request("tcp:example.com:80")).unwrap_err();
    assert!(matches!(error, ConnectError::NamesNotSupported(_)));
    assert!(error.to_string().contains("feature `names`"));
}

#[test]
fn a_unix_server_can_send_no_descriptor_if_the_kernel_refuses_them() {
    use std::io::IoSlice;
    use std::os::fd::AsFd;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let target = format!("unix:{}", path.display());
    let _connected = connect(&connector(Vec::new()), request(&target)).unwrap();
    // Asked of another socket, which the answer changes.
    let (other, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let can_refuse = zerosock_sys::fd_passing::refuse_rights(&other).unwrap();
    let (server, _) = listener.accept().unwrap();
    let fds = [listener.as_fd()];
    let sent = zerosock_sys::fd_passing::send(&server, &[IoSlice::new(b"x")], &fds);
    assert_eq!(sent.is_err(), can_refuse);
}

#[test]
fn a_symbolic_link_of_another_user_is_not_followed() {
    use rustix::fs::{AtFlags, CWD, Uid, chownat};
    let folder = tempfile::tempdir().unwrap();
    let (path, link) = (folder.path().join("s"), folder.path().join("link"));
    let _listener = UnixListener::bind(&path).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let connector = connector(Vec::new());
    let target = format!("unix:{}", link.display());
    assert!(connect(&connector, request(&target)).is_ok());
    let nobody = Some(Uid::from_raw(65534));
    match chownat(CWD, &link, nobody, None, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(()) => match connect(&connector, request(&target)) {
            Err(ConnectError::Io(error)) => {
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            }
            other => panic!("{other:?}"),
        },
        Err(error) => println!("SKIPPED: cannot give a link away: {error}"),
    }
}
