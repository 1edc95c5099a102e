//! Connections to names: a name server of the test answers, and listeners on 127.0.0.0/8 and ::1 are the
//! targets. Built with `-C target-feature=+crt-static`, the same tests show that a static binary resolves
//! names.

#![cfg(feature = "names")]

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use zerosock_relay::{
    AddressPolicy, ConnectError, ConnectRequest, ConnectStage, Connector, ConnectorConfig,
    DenyReason,
};

mod support;
use support::dns::{NameServer, Question, Reply, addresses};
use support::{
    HANG, address, ask, connect, connector, exchange, has_ipv6, isolated, listeners, network,
    request, stalled,
};

/// A connector that asks a name server with one rule.
fn asking(rule: impl Fn(&Question) -> Reply + Send + Sync + 'static) -> (Connector, NameServer) {
    let server = NameServer::start(rule);
    (connector(vec![server.address]), server)
}

/// A request without exceptions to the default policy.
fn strict(target: &str) -> ConnectRequest {
    ConnectRequest {
        policy: Arc::new(AddressPolicy::for_guests(Vec::new(), Vec::new())),
        ..request(target)
    }
}

fn question(name: &str, ipv6: bool) -> Question {
    Question {
        name: name.into(),
        ipv6,
    }
}

#[test]
fn a_name_with_an_a_record_only_is_reached() {
    let (connector, server) = asking(|question| addresses(question, &["127.0.0.2"]));
    let (port, [listener]) = listeners(["127.0.0.2"]);
    let connected = connect(&connector, request(&format!("tcp:a.example:{port}"))).unwrap();
    assert_eq!(connected.address, Some(listener.local_addr().unwrap()));
    exchange(connected, &listener);
    let mut asked = server.asked();
    asked.sort_by_key(|question| question.ipv6);
    assert_eq!(
        asked,
        [question("a.example", false), question("a.example", true)]
    );
}

#[test]
fn a_name_with_an_aaaa_record_only_is_reached() {
    if !has_ipv6() {
        return;
    }
    let (connector, _server) = asking(|question| addresses(question, &["::1"]));
    let (port, [listener]) = listeners(["::1"]);
    let connected = connect(&connector, request(&format!("tcp:aaaa.example:{port}"))).unwrap();
    assert_eq!(connected.address, Some(listener.local_addr().unwrap()));
    exchange(connected, &listener);
}

#[test]
fn ipv6_comes_first_if_a_name_has_both() {
    if !has_ipv6() {
        return;
    }
    let (port, _listeners) = listeners(["::1", "127.0.0.1"]);
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.1", "::1"]));
    // 100 times: chance would not give it.
    for _ in 0..100 {
        let answer = connect(&connector, request(&format!("tcp:both.example:{port}")));
        assert!(address(answer).is_ipv6());
    }
}

#[test]
fn an_alias_is_followed() {
    let (connector, _server) = asking(|question| match question.ipv6 {
        false => Reply::Alias("other.example", vec!["127.0.0.2".parse().unwrap()]),
        true => Reply::Alias("other.example", Vec::new()),
    });
    let (port, _listener) = listeners(["127.0.0.2"]);
    let answer = connect(&connector, request(&format!("tcp:alias.example:{port}")));
    assert_eq!(address(answer).to_string(), "127.0.0.2");
}

#[test]
fn names_without_an_address_and_failures_of_servers_are_told_apart() {
    let (connector, _server) = asking(|question| match question.name.as_str() {
        "missing.example" => Reply::NoSuchName,
        "empty.example" => Reply::Addresses(Vec::new()),
        _ => Reply::ServerFailure,
    });
    for name in ["missing.example", "empty.example"] {
        let error = connect(&connector, request(&format!("tcp:{name}:80"))).unwrap_err();
        assert!(matches!(error, ConnectError::NoSuchName(_)), "{error}");
        assert!(error.to_string().contains(name));
    }
    let error = connect(&connector, request("tcp:failing.example:80")).unwrap_err();
    assert!(matches!(error, ConnectError::Resolve { .. }), "{error}");
    assert!(
        error
            .to_string()
            .starts_with("cannot resolve failing.example: "),
        "{error}"
    );
}

#[test]
fn a_server_that_never_answers_times_out_in_time() {
    let (connector, server) = asking(|_| Reply::Never);
    let mut request = request("tcp:never.example:80");
    request.timeout = Duration::from_millis(300);
    let began = Instant::now();
    let error = connect(&connector, request).unwrap_err();
    assert!(
        matches!(error, ConnectError::TimedOut(ConnectStage::Resolving)),
        "{error}"
    );
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(!server.asked().is_empty());
}

#[test]
fn a_request_that_waits_for_a_server_can_be_cancelled() {
    let (told, asked_server) = mpsc::channel();
    let (connector, _server) = asking(move |_| {
        told.send(()).unwrap();
        Reply::Never
    });
    let asked = ask(&connector, request("tcp:never.example:80"));
    asked_server.recv_timeout(HANG).unwrap();
    asked.pending.cancel();
    assert!(matches!(asked.answer(), Err(ConnectError::Stopped)));
    let asked = ask(&connector, request("tcp:never.example:80"));
    connector.stop();
    assert!(matches!(asked.answer(), Err(ConnectError::Stopped)));
}

#[test]
fn a_late_answer_is_used() {
    let (release, moment) = mpsc::channel::<()>();
    let moment = std::sync::Mutex::new(moment);
    let (told, asked_server) = mpsc::channel();
    let (connector, _server) = asking(move |question| {
        told.send(()).unwrap();
        let _ = moment.lock().unwrap().recv();
        addresses(question, &["127.0.0.1"])
    });
    let (port, _listener) = listeners(["127.0.0.1"]);
    let asked = ask(&connector, request(&format!("tcp:late.example:{port}")));
    asked_server.recv_timeout(HANG).unwrap();
    assert!(!asked.is_answered());
    drop(release);
    assert!(asked.answer().is_ok());
}

#[test]
fn ipv4_does_not_wait_for_an_ipv6_answer_that_never_comes() {
    let (connector, _server) = asking(|question| match question.ipv6 {
        true => Reply::Never,
        false => addresses(question, &["127.0.0.1"]),
    });
    let (port, _listener) = listeners(["127.0.0.1"]);
    let began = Instant::now();
    let answer = connect(&connector, request(&format!("tcp:half.example:{port}")));
    assert!(address(answer).is_ipv4());
    // The resolution delay of RFC 8305, and far less than the query takes to time out (4 s).
    assert!(began.elapsed() >= Duration::from_millis(50));
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[test]
fn ipv6_does_not_wait_for_an_ipv4_answer() {
    if !has_ipv6() {
        return;
    }
    let (connector, _server) = asking(|question| match question.ipv6 {
        false => Reply::Never,
        true => addresses(question, &["::1"]),
    });
    let (port, _listener) = listeners(["::1"]);
    let answer = connect(&connector, request(&format!("tcp:half.example:{port}")));
    assert!(address(answer).is_ipv6());
}

#[test]
fn a_failure_for_one_family_leaves_the_other() {
    let (connector, _server) = asking(|question| match question.ipv6 {
        true => Reply::ServerFailure,
        false => addresses(question, &["127.0.0.1"]),
    });
    let (port, _listener) = listeners(["127.0.0.1"]);
    let answer = connect(&connector, request(&format!("tcp:half.example:{port}")));
    assert!(address(answer).is_ipv4());
}

/// A listener on `second`, and one with a full backlog on the same port of `first`.
fn black_hole_and_listener(first: &str, second: &str) -> (u16, stalled::StalledTcp, TcpListener) {
    loop {
        let listener = TcpListener::bind((second, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let first = SocketAddr::new(first.parse().unwrap(), port);
        if let Ok(stalled) = stalled::tcp(first) {
            return (port, stalled, listener);
        }
    }
}

#[test]
fn the_second_family_wins_after_250_ms_if_the_first_is_black_holed() {
    if !has_ipv6() {
        return;
    }
    let (port, _stalled, listener) = black_hole_and_listener("::1", "127.0.0.1");
    let (connector, _server) = asking(|question| addresses(question, &["::1", "127.0.0.1"]));
    let began = Instant::now();
    let connected = connect(&connector, request(&format!("tcp:both.example:{port}"))).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(250));
    assert!(connected.address.unwrap().is_ipv4());
    exchange(connected, &listener);
}

#[test]
fn the_second_address_of_a_family_wins_if_the_first_is_black_holed() {
    let (port, _stalled, listener) = black_hole_and_listener("127.0.0.2", "127.0.0.3");
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.2", "127.0.0.3"]));
    let began = Instant::now();
    let connected = connect(&connector, request(&format!("tcp:two.example:{port}"))).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(250));
    assert_eq!(connected.address.unwrap().ip().to_string(), "127.0.0.3");
    exchange(connected, &listener);
}

#[test]
fn an_address_behind_five_black_holes_is_reached_and_then_remembered() {
    let all = [
        "127.0.0.4",
        "127.0.0.5",
        "127.0.0.6",
        "127.0.0.7",
        "127.0.0.8",
        "127.0.0.9",
    ];
    let (port, mut holes, listener) = loop {
        let listener = TcpListener::bind((all[5], 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let hole = |host: &&str| stalled::tcp(SocketAddr::new(host.parse().unwrap(), port));
        let holes: Vec<_> = all[..5].iter().flat_map(hole).collect();
        if holes.len() == 5 {
            break (port, holes, listener);
        }
    };
    let (connector, _server) = asking(move |question| addresses(question, &all));
    let target = format!("tcp:six.example:{port}");
    let connected = connect(&connector, request(&target)).unwrap();
    assert_eq!(connected.address.unwrap().ip().to_string(), all[5]);
    exchange(connected, &listener);

    // The first address accepts from now on, and would be taken if nothing were remembered.
    drop(holes.remove(0));
    let revived = TcpListener::bind((all[0], port)).unwrap();
    let answer = connect(&connector, request(&target));
    assert_eq!(address(answer).to_string(), all[5]);
    // The one that is remembered has gone: the next is tried at once, and remembered.
    drop(listener);
    for _ in 0..2 {
        let answer = connect(&connector, request(&target));
        assert_eq!(address(answer).to_string(), all[0]);
    }
    drop((revived, holes));
}

#[test]
fn an_address_that_refused_datagrams_is_followed_by_the_next() {
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.2", "127.0.0.3"]));
    let asked = request("udp:dns.example:53");
    let mut used = Vec::new();
    for has_alternative in [true, false, false] {
        let connected = connect(&connector, asked.clone()).unwrap();
        let at = connected.address.unwrap();
        // Whether IPv6 has an answer may not be known yet.
        assert!(connected.has_alternative || !has_alternative);
        connector.refused(&asked.target, at);
        used.push(at.ip().to_string());
    }
    // All have refused: the one that refused first.
    assert_eq!(used, ["127.0.0.2", "127.0.0.3", "127.0.0.2"]);
}

#[test]
fn a_refused_address_is_followed_by_the_next() {
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.2", "127.0.0.3"]));
    let (port, _listener) = listeners(["127.0.0.3"]);
    let answer = connect(&connector, request(&format!("tcp:two.example:{port}")));
    assert_eq!(address(answer).to_string(), "127.0.0.3");

    drop(_listener);
    let error = connect(&connector, request(&format!("tcp:two.example:{port}"))).unwrap_err();
    assert!(matches!(error, ConnectError::Refused(Some(_))), "{error}");
}

#[test]
fn of_100_addresses_16_are_tried() {
    let all: Vec<String> = (1..=100).map(|last| format!("127.0.1.{last}")).collect();
    let reply = all.clone();
    let (connector, server) = asking(move |question| {
        let reply: Vec<&str> = reply.iter().map(String::as_str).collect();
        addresses(question, &reply)
    });
    let (port, [listener]) = listeners([all[15].as_str()]);
    let answer = connect(&connector, request(&format!("tcp:many.example:{port}")));
    assert_eq!(address(answer).to_string(), all[15]);
    drop(listener);
    // The answer did not fit into a datagram and came over TCP.
    let a = question("many.example", false);
    assert_eq!(
        server.asked().iter().filter(|asked| **asked == a).count(),
        2
    );

    let (port, [listener]) = listeners([all[16].as_str()]);
    let error = connect(&connector, request(&format!("tcp:many.example:{port}"))).unwrap_err();
    assert!(matches!(error, ConnectError::Refused(_)), "{error}");
    assert_untouched(&listener);
}

/// Nothing connected to a listener.
fn assert_untouched(listener: &TcpListener) {
    listener.set_nonblocking(true).unwrap();
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );
}

#[test]
fn a_name_that_leads_into_the_machine_is_denied_without_a_packet() {
    let (port, [listener]) = listeners(["127.0.0.1"]);
    for found in [
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "::1",
        "0.0.0.0",
        "::",
        "169.254.169.254",
        "64:ff9b::7f00:1",
    ] {
        let (connector, _server) = asking(move |question| addresses(question, &[found]));
        let error = connect(&connector, strict(&format!("tcp:inside.example:{port}"))).unwrap_err();
        assert!(matches!(error, ConnectError::Denied(_)), "{found}: {error}");
    }
    assert_untouched(&listener);
}

#[test]
fn a_name_that_is_rebound_to_loopback_is_denied_at_the_next_connection() {
    let asked = AtomicUsize::new(0);
    let (connector, _server) = asking(move |question| match question.ipv6 {
        true => Reply::Addresses(Vec::new()),
        false => match asked.fetch_add(1, Ordering::Relaxed) {
            0 => addresses(question, &["127.0.0.2"]),
            _ => addresses(question, &["127.0.0.1"]),
        },
    });
    let (port, [public, inside]) = listeners(["127.0.0.2", "127.0.0.1"]);
    let mut request = strict(&format!("tcp:rebound.example:{port}"));
    let allow = vec![network("127.0.0.2")];
    request.policy = Arc::new(AddressPolicy::for_guests(allow, Vec::new()));
    let connected = connect(&connector, request.clone()).unwrap();
    exchange(connected, &public);
    let error = connect(&connector, request).unwrap_err();
    let ConnectError::Denied(denied) = error else {
        panic!("{error}")
    };
    assert_eq!(denied.address.to_string(), "127.0.0.1");
    assert_eq!(denied.reason, DenyReason::Loopback);
    assert_untouched(&inside);
}

#[test]
fn denied_addresses_of_a_name_are_left_out() {
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.1", "127.0.0.2"]));
    let (port, [inside, _listener]) = listeners(["127.0.0.1", "127.0.0.2"]);
    let mut request = strict(&format!("tcp:mixed.example:{port}"));
    let allow = vec![network("127.0.0.2")];
    request.policy = Arc::new(AddressPolicy::for_guests(allow, Vec::new()));
    assert_eq!(
        address(connect(&connector, request)).to_string(),
        "127.0.0.2"
    );
    assert_untouched(&inside);
}

#[test]
fn names_below_localhost_are_no_exception_and_no_question() {
    let (connector, server) = asking(|_| Reply::ServerFailure);
    let error = connect(&connector, strict("tcp:x.localhost:80")).unwrap_err();
    assert!(matches!(error, ConnectError::Denied(_)), "{error}");
    assert!(server.asked().is_empty());
}

#[test]
fn udp_is_connected_to_the_first_permitted_address() {
    let (connector, _server) = asking(|question| addresses(question, &["127.0.0.1", "127.0.0.2"]));
    let target = UdpSocket::bind("127.0.0.2:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let mut request = strict(&format!("udp:mixed.example:{port}"));
    let allow = vec![network("127.0.0.2")];
    request.policy = Arc::new(AddressPolicy::for_guests(allow, Vec::new()));
    request.first_bytes = b"first".to_vec();
    assert_eq!(
        address(connect(&connector, request)).to_string(),
        "127.0.0.2"
    );
    let mut buffer = [0; 16];
    let length = target.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"first");
}

#[test]
fn an_answer_is_remembered_for_its_time_to_live() {
    let (connector, server) =
        asking(|question| Reply::Cacheable(Box::new(addresses(question, &["127.0.0.1", "::1"]))));
    let (port, _listener) = listeners(["127.0.0.1"]);
    for _ in 0..10 {
        assert!(connect(&connector, request(&format!("tcp:kept.example:{port}"))).is_ok());
    }
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn requests_for_one_name_at_once_share_the_questions() {
    let (release, moment) = mpsc::channel::<()>();
    let moment = std::sync::Mutex::new(moment);
    let (connector, server) = asking(move |question| {
        let _ = moment.lock().unwrap().recv();
        addresses(question, &["127.0.0.1"])
    });
    let (port, [_listener]) = listeners(["127.0.0.1"]);
    let asked: Vec<_> = (0..100)
        .map(|_| ask(&connector, request(&format!("tcp:shared.example:{port}"))))
        .collect();
    // The thread takes what it is given in order: it has begun all of them when it runs this.
    let (sender, begun) = mpsc::channel();
    connector.spawn(async move { sender.send(()).unwrap() });
    begun.recv_timeout(HANG).unwrap();
    drop(release);
    for asked in asked {
        asked.answer().unwrap();
    }
    // Two, and what the resolver sent again on a slow machine; not 200.
    assert!(server.asked().len() < 20);
}

/// A connector with files of the test instead of those of the system.
fn with_files(folder: &std::path::Path, name_servers: Vec<SocketAddr>) -> Connector {
    Connector::start(ConnectorConfig {
        name_servers,
        resolv_conf: folder.join("resolv.conf"),
        hosts: folder.join("hosts"),
        ..ConnectorConfig::default()
    })
    .unwrap()
}

#[test]
fn names_of_the_hosts_file_are_not_asked_of_a_server_and_changes_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.2 box Box.Example # a comment\n").unwrap();
    let server = NameServer::start(|_| Reply::NoSuchName);
    let connector = with_files(folder.path(), vec![server.address]);
    let (port, [old, _new]) = listeners(["127.0.0.2", "127.0.0.3"]);
    for name in ["box", "box.example", "BOX.example."] {
        let answer = connect(&connector, request(&format!("tcp:{name}:{port}")));
        assert_eq!(address(answer).to_string(), "127.0.0.2", "{name}");
    }
    assert!(server.asked().is_empty());
    let error = connect(&connector, strict(&format!("tcp:box:{port}"))).unwrap_err();
    assert!(matches!(error, ConnectError::Denied(_)), "{error}");

    // A new file in the place of the old one, as editors write it.
    std::fs::write(folder.path().join("new"), "127.0.0.3 box\n").unwrap();
    std::fs::rename(folder.path().join("new"), &hosts).unwrap();
    let began = Instant::now();
    loop {
        let answer = connect(&connector, request(&format!("tcp:box:{port}")));
        if address(answer).to_string() == "127.0.0.3" {
            break;
        }
        old.accept().unwrap();
        assert!(began.elapsed() < HANG, "the change is never seen");
    }
}

#[test]
fn the_name_servers_and_search_domains_of_resolv_conf_are_used() {
    isolated(|| {
        let folder = tempfile::tempdir().unwrap();
        // Port 53 is free in this namespace. The first server does not exist.
        let server =
            NameServer::start_at("127.0.0.53:53", |question| match question.name.as_str() {
                "short.search.example" => addresses(question, &["127.0.0.2"]),
                _ => Reply::NoSuchName,
            });
        let text = "nameserver 127.0.0.54\nnameserver 127.0.0.53\nsearch search.example\n";
        std::fs::write(folder.path().join("resolv.conf"), text).unwrap();
        let connector = with_files(folder.path(), Vec::new());
        let (port, _listener) = listeners(["127.0.0.2"]);
        let answer = connect(&connector, request(&format!("tcp:short:{port}")));
        assert_eq!(address(answer).to_string(), "127.0.0.2");
        assert!(
            server
                .asked()
                .contains(&question("short.search.example", false))
        );

        // A dot at the end keeps the search domains away.
        let error = connect(&connector, request(&format!("tcp:short.:{port}"))).unwrap_err();
        assert!(matches!(error, ConnectError::NoSuchName(_)), "{error}");
    });
}

#[test]
fn without_resolv_conf_the_error_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let connector = with_files(folder.path(), Vec::new());
    let error = connect(&connector, request("tcp:some.example:80")).unwrap_err();
    assert!(matches!(error, ConnectError::Resolve { .. }), "{error}");
    assert!(error.to_string().contains("resolv.conf"), "{error}");
}
